"""What every public function does with the arrays that it is given: whatever holds numbers is read
right, or refused by our own error."""

import collections
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from calls import CALLS, IDS, TABLE
from cases import few
from compare import equal
from refused import each_raises

import transformer_embed as te
from transformer_embed._src import arguments
from transformer_embed._src.positions.phase import as_positions
from transformer_embed._src.sequences import token_positions

every_function = pytest.mark.parametrize("name", CALLS)


class Wrapped(NamedTuple):
    """Not an array, but jax takes it for one: Flax's nnx.Param in small."""

    array: jax.Array

    def __jax_array__(self):
        return self.array


def expect_equal(got, expected):
    # XLA may fuse a product and a sum.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, got, expected)


def narrowed(array, dtype):
    fits = array.dtype.kind == "i" and array.max() <= ml_dtypes.iinfo(dtype).max
    return array.astype(dtype) if fits else array


NARROW = [ml_dtypes.int2, ml_dtypes.int4, ml_dtypes.uint4, np.int8, np.uint16]


@every_function
def test_arrays_of_any_kind_are_read_right(name):
    """In the other byte order (jax's fast path ignores it at shapes that it has seen), of narrow
    integers, and by the protocol of jax."""
    function, arrays = CALLS[name]
    expected = function(*arrays)
    expect_equal(
        function(*(array.astype(array.dtype.newbyteorder()) for array in arrays)), expected
    )
    for dtype in few(NARROW, 3):
        expect_equal(function(*(narrowed(array, dtype) for array in arrays)), expected)
    expect_equal(function(*(Wrapped(jnp.asarray(array)) for array in arrays)), expected)


@every_function
def test_values_that_hold_no_numbers_are_refused(name):
    function, arrays = CALLS[name]
    # Weights are permuted in any dtype that jax has.
    message = r"^[\w\[\]]+: wanted |^Error interpreting argument"
    for value in ([2**70, 1, 0], np.zeros(3, [("a", int)]), ["a", "b", "c"], object()):
        with pytest.raises(TypeError, match=message):
            function(*(value for _ in arrays))
    with pytest.raises(TypeError, match=r"wanted an array without a mask, got a masked array"):
        function(*(np.ma.masked_array(array, mask=np.ones_like(array, bool)) for array in arrays))


MASKED = np.ma.masked_array(IDS[0], mask=[True, False, False])
HOLD_A_MASK = {
    "a list": [MASKED, IDS[1]],
    "a deque": collections.deque([IDS[1], MASKED]),
    "a list of lists": [[list(IDS[0]), MASKED]],
    "a wrapper": Wrapped(MASKED),
}


@pytest.mark.parametrize("ids", HOLD_A_MASK.values(), ids=HOLD_A_MASK)
def test_a_masked_array_inside_of_another_value_is_refused(ids):
    for call in (functools.partial(te.lookup, TABLE), te.TokenPositions.from_positions):
        with pytest.raises(TypeError, match=r"wanted an array without a mask, got a masked array"):
            call(ids)


TINY = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn]


@pytest.mark.parametrize(
    "name", ["apply_rotary", "dropout", "lookup", "linear_cross_entropy", "linear_logits"]
)
def test_floats_of_8_bits_and_less_are_refused(name):
    function, arrays = CALLS[name]
    for dtype in TINY:
        tiny = [array.astype(dtype) if array.dtype == np.float32 else array for array in arrays]
        with pytest.raises(TypeError, match=r"^\w+: wanted a floating dtype of 16 to 64 bits, got"):
            function(*tiny)


@pytest.mark.parametrize(
    "call", [functools.partial(te.lookup, TABLE), te.TokenPositions.from_segment_ids]
)
def test_a_host_array_that_changes_after_the_call_changes_no_result(call):
    """jax shares the memory of host arrays that are aligned to 64 bytes, such as those of
    memory-mapped files, and computes later."""
    size = 2**18
    memory = np.zeros(size + 16, np.int32)
    ids = memory[-memory.ctypes.data % 64 // 4 :][:size]
    wanted = call(np.ones(size, np.int32))
    for _ in range(4):
        ids[:] = 1
        found = call(ids)
        ids[:] = 2
        equal(found, wanted)


@pytest.mark.parametrize("name", ["from_segment_ids", "from_offset"])
def test_integers_of_another_width_are_compared_unchanged(name):
    """A sum of lengths is int64 in x64 mode. Clamped or wrapped it would be another number."""
    build, of_offset = jax.jit(CALLS[name][0]), 2**40 * (name == "from_offset")
    with jax.enable_x64():
        for dtype in ("uint32", "uint64"):
            with pytest.raises(TypeError, match=f"wanted a signed integer dtype, got {dtype}"):
                build(jnp.array([5, 2], dtype))
        narrow, wide = (build(jnp.array(ids)) for ids in ([0, 1], [2**40, 2**40 + 1]))
        equal(wide.positions, narrow.positions + of_offset)
        equal(wide.segment_ids, narrow.segment_ids + 2**40 - of_offset)


def test_an_array_of_jax_is_taken_as_it_is():
    """`jnp.asarray` would take longer than all else that a call outside of jit does."""
    ids, floats = jnp.atleast_2d(jnp.asarray(IDS)), jnp.asarray(TABLE)
    for convert in (
        arguments.as_int32,
        arguments.as_integers,
        as_positions,
        token_positions.as_comparable,
    ):
        assert convert("ids", ids) is ids
    for convert in (arguments.as_floats, as_positions):
        assert convert("x", floats) is floats


YARN = te.YarnScaling(2.0, original_length=4, mscale=1e300)
# What a loader makes of positions.
FLOATS = jax.tree.map(np.float32, te.TokenPositions([0, 1, 0, 0], segment_ids=[1, 1, 2, 0]))
EMPTY = te.TokenPositions([[0] * 4], segment_ids=[[0] * 4])
KEY, EMBEDDER = jax.random.key(0), te.Embedder(te.EmbedderConfig(4, 3, dropout_rate=0.5))
NO_KEY = "TypeError: rng: wanted one key of jax.random.key or jax.random.PRNGKey, got an array"
REFUSED = {
    "te.dropout(IDS, 0.5, TABLE)": f"{NO_KEY} int32[2, 3] (ids are the argument after rng)",
    "EMBEDDER.apply({}, IDS, KEY, is_training=True)": f"{NO_KEY} int32[2, 3] (ids are the",
    "te.dropout(TABLE, 0.5, TABLE)": f"{NO_KEY} float32[4, 3]",
    "te.lookup(TABLE, np.dtype('f4'))": "TypeError: ids: wanted an array, got Float32DType dtype('float32')",
    "te.SinusoidalGrid(b'half')": "TypeError: shape: ... got bytes b'half'",
    "jax.jit(lambda id: te.lookup(TABLE, [id, id]))(1)": "TypeError: ids: ... got a list",
    "te.lookup([[1.0], [1.0, 2.0]], [0])": "TypeError: table: ... equal lengths, got a list",
    "te.apply_rotary(np.ones((2, 1, 2), np.float32), [0, 1], scaling=YARN)": "ValueError: attention factor: wanted a number above 0 that float32 ",
    "te.AttentionMask(FLOATS, causal=True).dense()": "TypeError: positions: wanted an integer dtype",
    "te.check_batch([[0] * 4], FLOATS, vocab_size=1)": "TypeError: positions: wanted an integer dtype",
    "te.write_cache(EMPTY, FLOATS, 0)": "TypeError: positions: wanted an integer dtype",
    # A length past int32 ends no process.
    "jax.jit(lambda: te.sinusoidal_table(2**31 + 8, 4))()": "ValueError: length: wanted an int of at most ... got 2147483656",
    "jax.jit(lambda: te.causal_mask(2**31 + 8))()": "ValueError: length: wanted an int of at most ... got 2147483656",
    "jax.jit(lambda: te.TokenPositions.from_offset(0, 2**31 + 8))()": "ValueError: length: wanted an int of at most ... got 2147483656",
}
for each in (3e38, 1e300, 1e-39, 1e-300):
    # float32 rounds it to infinity or zero, or it is subnormal: compiled programs flush that to zero.
    REFUSED |= {
        f"te.OutputLayer(TABLE, softcap={each})": "ValueError: softcap: wanted a number above 0 that float32",
        f"te.EmbedderConfig(4, 4, scale={each})": "ValueError: scale: wanted a number above 0 that float32",
    }


def test_errors_are_ours():
    each_raises(REFUSED, globals())
