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
from contexts import x64

import transformer_embed as te
from transformer_embed._src import arguments

TABLE = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
IDS = np.array([[1, 0, 3], [2, 2, 0]], np.int32)
POSITIONS = np.array([0, 1, 2], np.int32)
SEGMENTS = np.array([[1, 1, 2]], np.int32)
PADDING = np.array([True, True, False])
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 3, 2, 4)

# Every public function that takes arrays, as a function of arrays alone.
CALLS = {
    "alibi_bias": (functools.partial(te.alibi_bias, num_heads=2), (POSITIONS, POSITIONS)),
    "apply_rotary": (te.apply_rotary, (X, POSITIONS)),
    "apply_rotary_axes": (
        functools.partial(te.apply_rotary, pair_axes=(0, 1)),
        (X, np.stack([POSITIONS, POSITIONS], -1)),
    ),
    "AttentionMask": (
        lambda queries, keys, segments: te.AttentionMask(
            te.TokenPositions(queries, segments),
            te.TokenPositions(keys, segments),
            causal=True,
            window=(1, 0),
        ).dense(),
        (POSITIONS, POSITIONS, SEGMENTS),
    ),
    "AttentionMask, chunks and blocks": (
        lambda queries, keys, blocks: te.AttentionMask(
            te.TokenPositions(queries, block_ids=blocks),
            te.TokenPositions(keys, block_ids=blocks),
            causal=False,
            chunk=2,
        ).dense(),
        (POSITIONS, POSITIONS, SEGMENTS),
    ),
    "dropout": (lambda x: te.dropout(jax.random.key(0), 0.5, x), (X,)),
    "from_ids": (functools.partial(te.TokenPositions.from_ids, pad_id=0), (IDS,)),
    "from_lengths": (functools.partial(te.TokenPositions.from_lengths, length=4), (IDS[0],)),
    "from_offset": (functools.partial(te.TokenPositions.from_offset, length=2), (IDS[0],)),
    "from_segment_ids": (te.TokenPositions.from_segment_ids, (SEGMENTS,)),
    "lookup": (te.lookup, (TABLE, IDS)),
    "lookup_one_hot": (
        functools.partial(te.lookup, lookup_style="one_hot", pad_id=0),
        (TABLE, IDS),
    ),
    "mask_to_bias": (te.mask_to_bias, (PADDING,)),
    "padding_mask": (functools.partial(te.padding_mask, pad_id=0), (IDS,)),
    "permute_rotary_weights": (
        functools.partial(
            te.permute_rotary_weights, num_heads=1, source="half", target="interleaved"
        ),
        (X,),
    ),
    "relative_position_buckets": (te.relative_position_buckets, (POSITIONS, POSITIONS)),
    "sinusoidal_encoding": (lambda positions: te.sinusoidal_encoding(positions, 4), (POSITIONS,)),
    "sinusoidal_grid": (
        lambda positions: te.sinusoidal_grid((2, 2), 4, positions=positions),
        (POSITIONS,),
    ),
    "linear_cross_entropy": (
        te.linear_cross_entropy,
        (X[..., :3], TABLE, IDS[:1, :, None] + np.zeros(2, np.int32)),
    ),
    "linear_logits": (te.linear_logits, (X[..., :3], TABLE)),
}
every_function = pytest.mark.parametrize("name", CALLS)


class Wrapped(NamedTuple):
    """Not an array, but jax takes it for one: Flax's nnx.Param in small. A tree, for jit."""

    array: jax.Array

    def __jax_array__(self):
        return self.array


def expect_equal(got, expected):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@every_function
def test_jax_array_protocol_is_honoured_under_jit_too(name):
    function, arrays = CALLS[name]
    expected = function(*arrays)
    expect_equal(function(*(Wrapped(jnp.asarray(array)) for array in arrays)), expected)
    got = jax.jit(function)(*(Wrapped(jnp.asarray(array)) for array in arrays))
    expected = jax.jit(function)(*arrays)
    # XLA may fuse a product and a sum.
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_param_of_flax_is_a_table_under_jit():
    nnx = pytest.importorskip("flax.nnx")
    table = nnx.Param(jnp.asarray(TABLE))
    read = lambda table: te.lookup(nnx.Param(table), IDS)
    np.testing.assert_array_equal(te.lookup(table, IDS), TABLE[IDS])
    np.testing.assert_array_equal(jax.jit(read)(jnp.asarray(TABLE)), TABLE[IDS])
    np.testing.assert_array_equal(jax.jit(lambda table: te.lookup(table, IDS))(table), TABLE[IDS])


@every_function
def test_arrays_in_the_other_byte_order_are_read_right(name):
    function, arrays = CALLS[name]
    expected = function(
        *arrays
    )  # At the same shapes before: jax's fast path ignores the byte order.
    expect_equal(
        function(*(array.astype(array.dtype.newbyteorder()) for array in arrays)), expected
    )


@pytest.mark.parametrize(
    "call",
    [
        functools.partial(te.lookup, TABLE),
        functools.partial(te.sinusoidal_encoding, d_model=4),
        lambda ids: te.sinusoidal_grid((2, 2), 4, positions=ids),
        lambda ids: te.apply_rotary(jnp.ones((len(ids), 1, 4)), ids),
        lambda ids: te.TokenPositions.from_ids(ids, pad_id=2).positions,
        lambda ids: te.TokenPositions.from_segment_ids(ids).positions,
    ],
    ids=[
        "lookup",
        "sinusoidal_encoding",
        "sinusoidal_grid",
        "apply_rotary",
        "from_ids",
        "from_segment_ids",
    ],
)
def test_a_host_array_that_changes_after_the_call_changes_no_result(call):
    """jax shares the memory of host arrays that are aligned to 64 bytes, such as those of
    memory-mapped files, and computes later."""
    size = 2**18
    memory = np.zeros(size + 16, np.int32)
    ids = memory[-memory.ctypes.data % 64 // 4 :][:size]
    wanted, others = np.asarray(call(np.ones(size, np.int32))), np.arange(size) % 3
    for _ in range(4):
        ids[:] = 1
        found = call(ids)
        ids[:] = others
        np.testing.assert_array_equal(found, wanted)


def test_unsigned_positions_in_the_other_byte_order():
    positions = np.array([2**31 + 5], ">u4")
    np.testing.assert_array_equal(
        te.sinusoidal_encoding(positions, 4),
        te.sinusoidal_encoding(np.array([2**31 + 5], np.uint32), 4),
    )


@every_function
def test_masked_arrays_do_not_lose_their_mask_in_silence(name):
    function, arrays = CALLS[name]
    with pytest.raises(
        TypeError,
        match=r"wanted an array without a mask \(fill it first: x.filled\(...\)\), got a masked array of numpy",
    ):
        function(*(np.ma.masked_array(array, mask=np.ones_like(array, bool)) for array in arrays))


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, np.int8, np.uint16]
)
@every_function
def test_narrow_integers_are_integers(name, dtype):
    function, arrays = CALLS[name]
    narrow = [
        array.astype(dtype)
        if array.dtype == np.int32 and array.max() < (2 if "2" in dtype.__name__ else 4)
        else array
        for array in arrays
    ]
    expect_equal(function(*narrow), function(*arrays))


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn]
)
@pytest.mark.parametrize(
    "name", ["apply_rotary", "dropout", "lookup", "linear_cross_entropy", "linear_logits"]
)
def test_floats_of_8_bits_and_less_are_refused(name, dtype):
    function, arrays = CALLS[name]
    with pytest.raises(
        TypeError, match=r"^\w+: wanted a floating dtype of 16 to 64 bits, got float"
    ):
        function(*(array.astype(dtype) if array.dtype == np.float32 else array for array in arrays))


@pytest.mark.parametrize(
    "value",
    [
        np.longdouble([1.0, 2.0, 0.5]),
        [2**70, 1, 0],
        np.zeros(3, [("a", int)]),
        ["a", "b", "c"],
        object(),
    ],
)
@every_function
def test_what_holds_no_numbers_is_refused_by_our_error(name, value):
    function, arrays = CALLS[name]
    with pytest.raises(TypeError, match=r"^[\w\[\]]+: wanted "):
        function(*(value for _ in arrays))


@every_function
def test_token_positions_given_as_an_array_say_to_pass_a_field(name):
    function, arrays = CALLS[name]
    with pytest.raises(
        TypeError,
        match=r"^[\w\[\]]+: wanted an array, got a TokenPositions: pass one of its fields$",
    ):
        function(*(te.TokenPositions.from_ids(IDS, pad_id=0) for _ in arrays))


class TestTracedIntegersThatInt32DoesNotHold:
    """On the host they are refused by value; traced, by dtype, for clamped or wrapped they would be
    other numbers."""

    @pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.uint64])
    @pytest.mark.parametrize(
        ("argument", "function"),
        [("segment_ids", CALLS["from_segment_ids"][0]), ("offset", CALLS["from_offset"][0])],
    )
    def test_are_refused(self, argument, function, dtype):
        message = rf"^{argument}: wanted an int32 array \(.*astype.*\), got a traced {np.dtype(dtype)}\[2\]"
        with x64(), pytest.raises(TypeError, match=message):
            jax.jit(function)(np.array([3_000_000_000, 3_000_000_001], dtype))

    def test_on_the_host_pass_where_int32_holds_them(self):
        with x64():
            assert te.TokenPositions.from_offset(jnp.array([5, 2]), 1).positions.tolist() == [
                [5],
                [2],
            ]
            with pytest.raises(ValueError, match=r"^offset: wanted integers inside int32"):
                te.TokenPositions.from_offset(jnp.array([2**40]), 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: te.sinusoidal_table(n, 4),
        te.causal_mask,
        lambda n: te.TokenPositions.from_offset(0, n),
    ],
)
def test_a_length_past_int32_is_refused_and_ends_no_process(make):
    with pytest.raises(ValueError, match=r"^length: wanted an int of at most \d+, got 2147483656"):
        jax.jit(lambda: make(2**31 + 8))()


class TestPermutedWeights:
    def test_of_64_bits_are_not_narrowed_in_silence(self):
        permute = CALLS["permute_rotary_weights"][0]
        for weights in (np.ones(4), np.arange(4), np.array([2**40, 0, 0, 0])):
            with pytest.raises(
                TypeError,
                match=r"^weights: wanted at most 32 bits, for jax_enable_x64 is off \(cast them first\), got (float|int)64$",
            ):
                permute(weights)
        with x64():
            assert permute(np.arange(4.0)).dtype == jnp.float64

    def test_of_python_numbers_have_the_dtype_that_jax_gives_these(self):
        permute = CALLS["permute_rotary_weights"][0]
        assert permute([0, 1, 2, 3]).dtype == jnp.int32
        assert permute([0.5, 1, 2, 3]).dtype == jnp.float32
        with pytest.raises(ValueError, match=r"^weights: wanted integers inside int32"):
            permute([2**40, 0, 0, 0])


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (
            ValueError,
            "query_positions and key_positions: wanted the same number of rows, or 1, got 2 and 3",
            lambda: te.relative_position_buckets(np.ones((2, 3), int), np.ones((3, 3), int)),
        ),
        (
            ValueError,
            "axes: wanted a permutation",
            lambda: te.sinusoidal_grid((2, 2), 4, axes=(0, 2)),
        ),
        (
            TypeError,
            "pair_axes: wanted a sequence, got an array int64[]",
            lambda: te.apply_rotary(X, POSITIONS, pair_axes=np.array(2)),
        ),
        (
            TypeError,
            "shape: wanted a sequence, got bytes b'half'",
            lambda: te.sinusoidal_grid(b"half", 4),
        ),
        (
            ValueError,
            "base: wanted a finite number above 0, got 1000",
            lambda: te.sinusoidal_table(3, 4, base=10**400),
        ),
        (
            ValueError,
            "alpha: wanted a finite number above 0, got 1000",
            lambda: te.NTKScaling(10**400),
        ),
        (
            ValueError,
            "shape: its number of points: wanted an int of at most 2147483647",
            lambda: te.sinusoidal_grid((46341, 46341), 4, positions=[0]),
        ),
    ],
)
def test_errors_are_ours(kind, message, call):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith(message)


# Inputs that numpy, jax or Python would read as something else.


@pytest.mark.parametrize(
    "hold",
    [
        lambda x: [x],
        lambda x: ([x],),
        lambda x: [x, x],
        lambda x: collections.deque([x]),
        lambda x: [collections.UserList([x])],
        lambda x: [[0.0, 1.0], x],
    ],
)
def test_a_masked_array_inside_sequences_is_refused(hold):
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    message = r"^table: wanted an array without a mask \(fill it first: x.filled\(...\)\), got "
    with pytest.raises(TypeError, match=message):
        te.lookup(hold(masked), [0])
    with pytest.raises(TypeError, match=message):
        te.lookup([[1.0, np.ma.masked]], [0])
    np.testing.assert_array_equal(te.lookup([masked.filled(0.0), [3.0, 4.0]], [0]), [[0.0, 2.0]])


def test_numbers_in_a_list_are_not_looked_at_one_by_one(monkeypatch):
    """A million ids took eight times as long as numpy takes."""
    looked_at, holds_mask = [], arguments._holds_mask
    spy = lambda value: looked_at.append(value) or holds_mask(value)
    monkeypatch.setattr(arguments, "_holds_mask", spy)
    te.check_ids([list(range(1000)), [np.int32(7)] * 1000], 1000)
    assert len(looked_at) == 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("exponent", [1, 8, 20, 40, 50, 60, 300])
def test_a_bias_that_rounds_to_zero_is_refused(dtype, exponent):
    value = -(10.0**-exponent)
    with x64():
        if float(np.asarray(value).astype(jnp.dtype(dtype))) < 0:
            assert np.asarray(te.mask_to_bias([False], dtype, value=value)) < 0
        else:
            message = rf"^value: wanted a number below 0 that {dtype} holds, at least "
            with pytest.raises(ValueError, match=message):
                te.mask_to_bias([False], dtype, value=value)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4), (0, 0, 0, 4)])
@pytest.mark.parametrize("rotary_dim", [None, 2])
def test_rotary_of_nothing_is_nothing(layout, shape, rotary_dim):
    x = np.zeros(shape, np.float32)
    rotate = functools.partial(te.apply_rotary, layout=layout, rotary_dim=rotary_dim)
    assert rotate(x, np.arange(shape[1])).shape == shape


@pytest.mark.parametrize("empty", [[], (), np.zeros(0, int), jnp.zeros(0, int)])
def test_no_numbers_are_integers_too(empty):
    assert te.TokenPositions.from_offset(empty, 3).positions.shape == (0, 3)
    assert te.TokenPositions.from_segment_ids(empty).positions.shape == (1, 0)
    assert te.TokenPositions.from_lengths(empty, 3).positions.shape == (0, 3)
    assert te.TokenPositions.from_ids(empty, pad_id=0).positions.shape == (1, 0)


@pytest.mark.parametrize("container", [np.array, lambda axes: list(map(np.int8, axes))])
def test_axes_are_integers_of_any_type(container):
    axes = tuple(container([1, 0]))
    expected = te.sinusoidal_grid((2, 3), 8, axes=(1, 0))
    np.testing.assert_array_equal(te.sinusoidal_grid((2, 3), 8, axes=axes), expected)
    assert te.SinusoidalGrid((2, 3), axes=axes) == te.SinusoidalGrid((2, 3), axes=(1, 0))
    assert {type(axis) for axis in te.SinusoidalGrid((2, 3), axes=axes).axes} == {int}


@pytest.mark.parametrize("dtype", ["int2", "uint2", "int4", "uint4"])
@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
def test_integers_of_2_and_4_bits(library, dtype):
    if not hasattr(jnp, dtype):
        pytest.skip("this jax has no such dtype")
    ids = library.asarray(np.array([0, 1, 1]), dtype=getattr(jnp, dtype))
    te.check_ids(ids, 2)
    with pytest.raises(
        ValueError, match=r"^ids: wanted integers inside the vocabulary, 0..0, got 1"
    ):
        te.check_ids(ids, 1)
    np.testing.assert_array_equal(te.lookup(TABLE, ids), TABLE[[0, 1, 1]])
    np.testing.assert_array_equal(
        te.sinusoidal_encoding(ids, 4), te.sinusoidal_encoding([0, 1, 1], 4)
    )
    np.testing.assert_array_equal(
        te.alibi_bias(ids, ids, num_heads=2), te.alibi_bias([0, 1, 1], [0, 1, 1], num_heads=2)
    )
    assert te.TokenPositions.from_ids(ids, pad_id=0).positions.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("convert", ["as_int32", "as_positions", "as_ordered", "as_fitting_int32"])
def test_an_int32_array_of_jax_is_taken_as_it_is(convert):
    """`jnp.asarray` would take longer than all else that a call outside of jit does."""
    array = jnp.asarray(IDS)
    assert getattr(arguments, convert)("ids", array) is array


@pytest.mark.parametrize("convert", ["as_floats", "as_given", "as_positions"])
def test_a_floating_array_of_jax_is_taken_as_it_is(convert):
    array = jnp.asarray(TABLE)
    assert getattr(arguments, convert)("x", array) is array


TABLE_OF_ONES = np.ones((3, 2), np.float32)
POSITIVE = {
    "softcap": [
        lambda value: te.OutputLayer(softcap=value),
        lambda value: te.linear_logits(TABLE_OF_ONES, TABLE_OF_ONES, softcap=value),
    ],
    "scale": [
        lambda value: te.OutputLayer(scale=value),
        lambda value: te.EmbedderConfig(4, 4, scale=value),
        lambda value: te.linear_logits(TABLE_OF_ONES, TABLE_OF_ONES, scale=value),
    ],
    "layer_norm_eps": [lambda value: te.EmbedderConfig(4, 4, layer_norm_eps=value)],
    "attention_factor": [
        lambda value: te.YarnScaling(2.0, original_length=4, attention_factor=value)
    ],
    "base": [lambda value: te.Sinusoidal(base=value)],
}


@pytest.mark.parametrize("value", [3e38, 1e39, 1e300, 1e-39, 1e-46, 1e-300])
def test_a_number_that_float32_rounds_to_infinity_or_zero(value):
    """Also one that is subnormal, which compiled programs flush to zero."""
    for name, functions in POSITIVE.items():
        for function in functions:
            with pytest.raises(ValueError, match=rf"^{name}: wanted a number above 0 that float32"):
                function(value)


def test_an_attention_factor_that_mscale_makes_infinite():
    scaling = te.YarnScaling(2.0, original_length=4, mscale=1e300)
    with pytest.raises(
        ValueError, match=r"^attention factor: wanted a number above 0 that float32"
    ):
        te.apply_rotary(np.ones((1, 1, 2), np.float32), [0], scaling=scaling)
