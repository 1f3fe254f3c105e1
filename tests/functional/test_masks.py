"""Masks against plain Python loops, and against the attention layers that take them."""

import functools
import itertools

import haiku as hk
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import x64
from references import dense_mask

import transformer_embed as te


def attention_mask(*, padding_mask=None, **arguments):
    """The dense mask of arrays; a padding mask says which keys are padding."""
    if padding_mask is not None:
        segments = arguments.get("key_segment_ids", 1)
        arguments["key_segment_ids"] = jnp.where(jnp.asarray(padding_mask), segments, 0)
    return dense_mask(**arguments)


# In float32 a score of 4 products of numbers below 4 has an absolute error below 4 * 16 * 2**-24,
# which is the relative error of its weight; the output, below 4, has it once for the weight and
# once for the sum of the weights.
ATTENTION_ERROR = 2 * 4 * 64 * 2.0**-24

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
IDS = np.array([[5, 6, 7, 8, 0], [9, 0, 0, 0, 0], [1, 2, 3, 0, 0]])
QUERIES = {1: np.array([1, 2, 3, 4]), 2: np.array([[1, 2, 3, 4], [0, 1, 2, 3], [2, 3, 4, 5]])}
KEYS = {1: np.arange(5), 2: np.arange(5) + np.array([[0], [1], [2]])}
PADDING = {0: None, 1: np.array([True, True, False, True, True]), 2: IDS != 0}
COMBINATIONS = list(itertools.product((1, 2), (1, 2), (0, 1, 2), (True, False)))

quick = hypothesis.settings(max_examples=20)


def loop_mask(queries, keys, padding, causal):
    """[B, T, S] for rows of positions, one comparison at a time."""
    return [
        [
            [
                (not causal or keys[b][s] <= queries[b][t])
                and (padding is None or bool(padding[b][s]))
                for s in range(len(keys[b]))
            ]
            for t in range(len(queries[b]))
        ]
        for b in range(len(queries))
    ]


def rows(array, number):
    return None if array is None else np.broadcast_to(array, (number, np.shape(array)[-1])).tolist()


def smallest(full):
    """[B, T, S] as [B or 1, 1, T or 1, S]: an axis along which nothing differs has length 1."""
    full = np.array(full)
    if (full == full[:1]).all():
        full = full[:1]
    if (full == full[:, :1]).all():
        full = full[:, :1]
    return full[:, None]


def attention(q, k, v, mask):
    """Scaled dot-product attention of [B, T or S, H, D], in float64."""
    scores = np.einsum("bthd,bshd->bhts", *(np.asarray(x, np.float64) for x in (q, k))) / np.sqrt(
        q.shape[-1]
    )
    weights = np.where(mask, np.exp(scores), 0)
    return np.einsum(
        "bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), np.asarray(v, np.float64)
    )


# --- padding_mask


@pytest.mark.parametrize("pad_id", [0, 3, 8])
def test_padding_mask_is_a_comparison_with_each_id(pad_id):
    expected = [[token != pad_id for token in row] for row in IDS.tolist()]
    assert te.padding_mask(IDS, pad_id=pad_id).tolist() == expected
    assert te.padding_mask(IDS.tolist(), pad_id=pad_id).tolist() == expected


def test_padding_mask_keeps_ids_below_pad_id():
    assert te.padding_mask([1, 3, 5], pad_id=3).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_padding_mask_with_a_negative_pad_id(dtype):
    assert te.padding_mask(np.array([-1, 0, 1], dtype), pad_id=-1).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("dtype", "highest"),
    [(np.uint8, 255), (np.uint16, 2**16 - 1), (np.uint32, 2**32 - 1), (np.uint64, 2**64 - 1)],
)
def test_padding_mask_of_unsigned_ids_has_no_minus_one(dtype, highest):
    assert te.padding_mask(np.array([highest, 0], dtype), pad_id=-1).tolist() == [True, True]


def test_padding_mask_does_not_narrow_pad_id_to_the_dtype_of_the_ids():
    assert te.padding_mask(np.array([0, 255], np.uint8), pad_id=256).tolist() == [True, True]


def test_padding_mask_does_not_wrap_wide_ids():
    assert te.padding_mask(np.array([2**32, 2**32 + 3, 0, -(2**32)]), pad_id=0).tolist() == [
        True,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("ids", [[1.0, 0.0], np.zeros(2, np.float16), [True, False]])
def test_padding_mask_refuses_ids_that_are_not_integers(ids):
    with pytest.raises(TypeError, match=r"^ids: wanted an integer dtype, got (float|bool)"):
        te.padding_mask(ids, pad_id=0)


@pytest.mark.parametrize("pad_id", [0.0, True, None, np.array(0)])
def test_padding_mask_refuses_a_pad_id_that_is_not_an_int(pad_id):
    with pytest.raises(TypeError, match=r"^pad_id: wanted a Python int, got "):
        te.padding_mask([1], pad_id=pad_id)


def test_padding_mask_refuses_a_pad_id_outside_int32():
    with pytest.raises(
        ValueError, match=r"^pad_id: wanted an int of at most 2147483646, got 2147483647$"
    ):
        te.padding_mask([1], pad_id=2**31 - 1)
    with pytest.raises(
        ValueError, match=r"^pad_id: wanted an int of at least -2147483647, got -2147483648$"
    ):
        te.padding_mask([1], pad_id=-(2**31))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0), (0, 3), (2, 3, 4)])
def test_padding_mask_has_the_shape_of_the_ids(shape):
    mask = te.padding_mask(np.zeros(shape, np.int32), pad_id=0)
    assert mask.shape == shape
    assert mask.dtype == jnp.bool_
    assert not np.asarray(mask).any()


# --- causal_mask


@pytest.mark.parametrize("length", [0, 1, 2, 7])
def test_causal_mask_is_a_loop(length):
    mask = te.causal_mask(length)
    assert mask.shape == (length, length)
    assert mask.tolist() == [[s <= t for s in range(length)] for t in range(length)]


def test_causal_mask_refuses_bad_lengths():
    with pytest.raises(TypeError, match=r"^length: wanted a Python int, got float 3.0$"):
        te.causal_mask(3.0)
    with pytest.raises(TypeError, match=r"^length: wanted a Python int, got a traced int32\[\]"):
        jax.jit(te.causal_mask)(3)
    with pytest.raises(ValueError, match=r"^length: wanted an int of at least 0, got -1$"):
        te.causal_mask(-1)


# --- The dense form of AttentionMask


@functools.cache
def compiled_masks():
    """The mask of each combination, from one program."""

    def build(queries, keys, padding):
        return [
            attention_mask(
                query_positions=queries[q],
                key_positions=keys[k],
                padding_mask=padding[p],
                causal=causal,
            )
            for q, k, p, causal in COMBINATIONS
        ]

    return dict(zip(COMBINATIONS, jax.jit(build)(QUERIES, KEYS, PADDING), strict=True))


@pytest.mark.parametrize(("query_rank", "key_rank", "padding_rank", "causal"), COMBINATIONS)
def test_attention_mask_is_a_loop_in_the_smallest_shape(query_rank, key_rank, padding_rank, causal):
    queries, keys, padding = QUERIES[query_rank], KEYS[key_rank], PADDING[padding_rank]
    mask = compiled_masks()[query_rank, key_rank, padding_rank, causal]
    expected = smallest(loop_mask(rows(queries, 3), rows(keys, 3), rows(padding, 3), causal))
    assert mask.dtype == jnp.bool_
    assert mask.shape == expected.shape
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize(("query_rank", "key_rank", "padding_rank", "causal"), COMBINATIONS[::3])
def test_attention_mask_under_jit_is_the_eager_one(query_rank, key_rank, padding_rank, causal):
    queries, keys, padding = QUERIES[query_rank], KEYS[key_rank], PADDING[padding_rank]
    eager = attention_mask(
        query_positions=queries, key_positions=keys, padding_mask=padding, causal=causal
    )
    np.testing.assert_array_equal(
        compiled_masks()[query_rank, key_rank, padding_rank, causal], eager
    )


def test_attention_mask_under_vmap_is_a_loop():
    def build(queries, keys, padding):
        return attention_mask(
            query_positions=queries, key_positions=keys, padding_mask=padding, causal=True
        )

    stacked = jax.vmap(build)(QUERIES[2], KEYS[2], PADDING[2])
    np.testing.assert_array_equal(
        stacked, [build(*one) for one in zip(QUERIES[2], KEYS[2], PADDING[2], strict=True)]
    )


def test_attention_mask_of_a_whole_sequence_is_the_causal_mask():
    mask = attention_mask(query_positions=np.arange(6), key_positions=np.arange(6), causal=True)
    np.testing.assert_array_equal(mask, np.asarray(te.causal_mask(6))[None, None])


def test_attention_mask_of_the_last_queries_is_the_last_rows_of_the_causal_mask():
    mask = attention_mask(query_positions=np.arange(4, 6), key_positions=np.arange(6), causal=True)
    np.testing.assert_array_equal(np.asarray(mask)[0, 0], np.asarray(te.causal_mask(6))[4:])


def test_attention_mask_while_decoding_has_an_offset_for_each_row():
    offsets = np.array([[0], [3], [4]])
    mask = attention_mask(query_positions=offsets, key_positions=np.arange(5), causal=True)
    assert mask.shape == (3, 1, 1, 5)
    assert np.sum(np.asarray(mask), -1).ravel().tolist() == [1, 4, 5]


def test_attention_mask_has_one_trace_for_all_offsets():
    traces = []

    @jax.jit
    def step(offset):
        traces.append(offset)
        return attention_mask(
            query_positions=offset + jnp.arange(2), key_positions=np.arange(6), causal=True
        )

    whole = np.asarray(te.causal_mask(6))
    for offset in range(5):
        np.testing.assert_array_equal(np.asarray(step(offset))[0, 0], whole[offset : offset + 2])
    assert len(traces) == 1


def test_attention_mask_with_left_padding_is_the_causal_mask_of_the_tokens():
    tokens = te.padding_mask([[0, 0, 5, 6, 7]], pad_id=0)
    mask = np.asarray(
        attention_mask(
            query_positions=np.arange(5),
            key_positions=np.arange(5),
            padding_mask=tokens,
            causal=True,
        )
    )[0, 0]
    np.testing.assert_array_equal(mask[2:, 2:], te.causal_mask(3))
    assert not mask[:, :2].any()
    assert not mask[:2].any()


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
)
def test_attention_mask_takes_host_positions_of_any_integer_dtype(dtype):
    mask = attention_mask(
        query_positions=np.array([1, 0], dtype),
        key_positions=np.arange(3, dtype=dtype),
        causal=True,
    )
    assert mask.tolist() == [[[[True, True, False], [True, False, False]]]]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint16])
def test_attention_mask_compares_narrow_positions_with_wide_ones(dtype):
    narrow = jax.device_put(np.array([100], dtype))
    mask = attention_mask(query_positions=narrow, key_positions=[-1, 100, 356], causal=True)
    assert mask.tolist() == [[[[True, True, False]]]]


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 3), (3, 0), (1, 1)])
def test_attention_mask_of_empty_and_single_sequences(queries, keys):
    mask = attention_mask(
        query_positions=np.arange(queries),
        key_positions=np.arange(keys),
        padding_mask=np.ones((2, keys), bool),
        causal=True,
    )
    assert mask.shape == (2, 1, queries, keys)
    assert np.asarray(mask).all()


def test_attention_mask_of_an_empty_batch():
    assert attention_mask(
        query_positions=[0], key_positions=[0, 1], padding_mask=np.ones((0, 2), bool), causal=True
    ).shape == (
        0,
        1,
        1,
        2,
    )


@pytest.mark.parametrize("causal", [True, False])
def test_attention_mask_of_padding_alone_is_wholly_false(causal):
    mask = attention_mask(
        query_positions=np.arange(3),
        key_positions=np.arange(3),
        padding_mask=[False] * 3,
        causal=causal,
    )
    assert not np.asarray(mask).any()
    assert mask.shape == (1, 1, 3 if causal else 1, 3)


def refused(error, message, **arguments):
    with pytest.raises(error, match=message):
        attention_mask(
            **({"query_positions": [0, 1], "key_positions": [0, 1], "causal": True} | arguments)
        )


@pytest.mark.parametrize("name", ["query_positions", "key_positions"])
def test_attention_mask_refuses_bad_positions(name):
    refused(TypeError, r"^positions: wanted an integer dtype, got float64$", **{name: [0.0, 1.0]})
    refused(TypeError, r"^positions: wanted an integer dtype, got bool$", **{name: [True, False]})
    refused(
        TypeError,
        r"^positions: wanted a signed integer dtype, got uint32$",
        **{name: jax.device_put(np.arange(2, dtype=np.uint32))},
    )
    refused(
        ValueError,
        r"^positions: wanted shape \[length\] or \[batch, length\], got shape \[\]$",
        **{name: 1},
    )
    refused(
        ValueError,
        r"^positions: wanted shape \[length\] or \[batch, length\], got shape \[1, 1, 2\]$",
        **{name: [[[0, 1]]]},
    )
    message = r"^positions: wanted integers inside int32, -2147483648\.\.2147483647, got 4294967296 at index \[1\]$"
    refused(ValueError, message, **{name: np.array([0, 2**32])})


@pytest.mark.parametrize("name", ["segment_ids", "block_ids"])
def test_token_positions_refuse_ids_that_are_not_integers_or_of_another_shape(name):
    for values, kind, message in [
        ([0.5, 1.5], TypeError, "wanted an integer dtype, got float64"),
        ([True, False], TypeError, "wanted an integer dtype, got bool"),
        ([1] * 3, ValueError, "wanted the length of positions, 2, got 3"),
        (
            [[[1, 1]]],
            ValueError,
            r"wanted shape \[length\] or \[batch, length\], got shape \[1, 1, 2\]",
        ),
    ]:
        with pytest.raises(kind, match=f"^{name}: {message}$"):
            te.TokenPositions([0, 1], **{name: values})


@pytest.mark.parametrize("causal", [True, False])
def test_attention_mask_refuses_batches_of_unequal_sizes(causal):
    message = r"^queries.positions and keys.positions( and keys.segment_ids)?: wanted the same number of rows, or 1, got 2 and (1 and )?3$"
    refused(
        ValueError,
        message,
        query_positions=np.zeros((2, 2), int),
        key_positions=np.zeros((3, 2), int),
        causal=causal,
    )
    refused(
        ValueError,
        message,
        query_positions=np.zeros((2, 2), int),
        padding_mask=np.ones((3, 2), bool),
        causal=causal,
    )


def test_attention_mask_refuses_a_causal_that_is_not_a_bool():
    refused(TypeError, r"^causal: wanted a Python bool, got int 1$", causal=1)
    with pytest.raises(
        TypeError,
        match=r"^causal: wanted a Python bool known while tracing .*, got a traced bool\[\]",
    ):
        jax.jit(attention_mask)(
            query_positions=np.arange(2), key_positions=np.arange(2), causal=True
        )


# --- by hand


def test_padding_and_causal_make_the_attention_mask_by_hand():
    tokens = te.padding_mask(IDS, pad_id=0)
    combined = te.causal_mask(5)[None, None] & tokens[:, None, None, :]
    positions = np.arange(5)
    np.testing.assert_array_equal(
        combined,
        attention_mask(
            query_positions=positions, key_positions=positions, padding_mask=tokens, causal=True
        ),
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint8])
def test_mask_to_bias_refuses_numbers(dtype):
    numbers = np.ones((1, 1, 2, 2), dtype)
    message = f"wanted a bool array, True = may attend, got {np.dtype(dtype)}$"
    with pytest.raises(TypeError, match="^mask: " + message):
        te.mask_to_bias(numbers)


# --- mask_to_bias


@pytest.mark.parametrize("dtype", FLOATS)
def test_mask_to_bias_is_zero_or_half_of_the_lowest(dtype):
    bias = te.mask_to_bias([[True, False], [False, True]], dtype)
    lowest = float(jnp.finfo(dtype).min)
    assert bias.dtype == dtype
    assert np.asarray(bias, np.float32).tolist() == [[0, lowest / 2], [lowest / 2, 0]]


def test_mask_to_bias_of_published_float16_limits():
    # IEEE 754-2019, table 3.5: the largest finite binary16 is (2 - 2**-10) * 2**15 = 65504.
    assert te.mask_to_bias(False, np.float16).tolist() == -65504 / 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_mask_to_bias_leaves_room_for_another_bias(dtype):
    # ALiBi's steepest slope for 8 heads, 1/2, at a distance of 2**15; and two masks one after the
    # other.
    distance = np.array(-(2.0**14), dtype)
    bias = np.asarray(te.mask_to_bias([False], dtype))
    assert np.isfinite(bias + distance).all()
    assert np.isfinite(bias + bias).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_mask_to_bias_of_a_wholly_masked_row_has_a_softmax_and_a_gradient(dtype):
    logits = np.array([[0.5, -1.0, 2.0, 0.25]], dtype)

    @jax.jit
    def softmax_and_gradient(x):
        def first(x):
            weights = jax.nn.softmax(x + te.mask_to_bias(np.zeros((1, 4), bool), dtype))
            return weights[0, 0].astype(jnp.float32), weights

        gradient, weights = jax.grad(first, has_aux=True)(x)
        return weights, gradient

    weights, gradient = softmax_and_gradient(logits)
    # Half of the lowest value is so large that logits below half its spacing round away: four equal
    # numbers are left.
    assert weights.tolist() == [[0.25] * 4]
    assert np.isfinite(np.asarray(gradient, np.float32)).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_mask_to_bias_hides_keys_to_the_bit(dtype):
    logits = np.array([0.5, -1.0, 2.0, 0.25], dtype)
    mask = np.array([True, False, True, False])
    softmax = jax.jit(jax.nn.softmax)
    hidden = np.asarray(softmax(logits + np.asarray(te.mask_to_bias(mask, dtype))), np.float32)
    np.testing.assert_array_equal(hidden[~mask], 0)
    np.testing.assert_array_equal(hidden[mask], np.asarray(softmax(logits[mask]), np.float32))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 1, 0, 3)])
def test_mask_to_bias_keeps_the_shape(shape):
    assert te.mask_to_bias(np.ones(shape, bool)).shape == shape


def test_mask_to_bias_under_jit_and_vmap_is_the_eager_one():
    mask = attention_mask(
        query_positions=QUERIES[1], key_positions=KEYS[1], padding_mask=PADDING[2], causal=True
    )
    np.testing.assert_array_equal(jax.jit(te.mask_to_bias)(mask), te.mask_to_bias(mask))
    np.testing.assert_array_equal(
        jax.vmap(te.mask_to_bias)(mask), [te.mask_to_bias(one) for one in np.asarray(mask)]
    )


@pytest.mark.parametrize("dtype", [jnp.int32, bool])
def test_mask_to_bias_refuses_a_dtype_without_a_fraction(dtype):
    with pytest.raises(
        TypeError,
        match=rf"^dtype: wanted a floating dtype of 16 to 64 bits, got {jnp.dtype(dtype)}$",
    ):
        te.mask_to_bias([True], dtype)


# --- The layers that take a mask.

BATCH, HEADS, LENGTH, HEAD_DIM = 3, 2, 5, 4
MASKS = {
    "causal": attention_mask(
        query_positions=np.arange(LENGTH), key_positions=np.arange(LENGTH), causal=True
    ),
    "padding": attention_mask(
        query_positions=np.arange(LENGTH),
        key_positions=np.arange(LENGTH),
        padding_mask=IDS != 0,
        causal=False,
    ),
    "both": attention_mask(
        query_positions=np.arange(LENGTH),
        key_positions=np.arange(LENGTH),
        padding_mask=IDS != 0,
        causal=True,
    ),
    "decode": attention_mask(
        query_positions=[[3], [0], [2]],
        key_positions=np.arange(LENGTH),
        padding_mask=IDS != 0,
        causal=True,
    ),
}


@pytest.fixture(params=list(MASKS))
def example(request):
    """(q, k, v, mask, attention in float64)."""
    mask = MASKS[request.param]
    random = np.random.default_rng(0)
    queries = 1 if request.param == "decode" else LENGTH
    q, k, v = (
        random.normal(size=(BATCH, n, HEADS, HEAD_DIM)).astype(np.float32)
        for n in (queries, LENGTH, LENGTH)
    )
    with jax.default_matmul_precision("highest"):
        yield q, k, v, mask, attention(q, k, v, np.asarray(mask))


@pytest.mark.slow
def test_jax_attention_takes_the_mask(example):
    q, k, v, mask, expected = example
    got = jax.jit(jax.nn.dot_product_attention)(q, k, v, mask=mask)
    np.testing.assert_allclose(got, expected, rtol=0, atol=ATTENTION_ERROR)


def test_jax_attention_takes_the_bias(example):
    q, k, v, mask, expected = example
    bias = te.mask_to_bias(mask)
    got = jax.jit(jax.nn.dot_product_attention)(q, k, v, bias=bias)
    np.testing.assert_allclose(got, expected, rtol=0, atol=ATTENTION_ERROR)


def test_flax_attention_takes_the_mask(example):
    nnx = pytest.importorskip("flax.nnx")
    q, k, v, mask, expected = example
    got = jax.jit(nnx.dot_product_attention)(q, k, v, mask=mask)
    np.testing.assert_allclose(got, expected, rtol=0, atol=ATTENTION_ERROR)


@pytest.mark.slow
def test_haiku_attention_takes_the_mask(example):
    q, k, v, mask, expected = example

    def attend(*inputs):
        layer = hk.MultiHeadAttention(
            HEADS, HEAD_DIM, w_init=hk.initializers.Identity(), with_bias=False
        )
        return layer(*inputs, mask=mask)

    joined = [x.reshape(*x.shape[:2], -1) for x in (q, k, v)]
    module = hk.without_apply_rng(hk.transform(attend))
    output = np.asarray(
        jax.jit(lambda key, *inputs: module.apply(module.init(key, *inputs), *inputs))(
            jax.random.key(0), *joined
        )
    )
    np.testing.assert_allclose(
        output.reshape(expected.shape), expected, rtol=0, atol=ATTENTION_ERROR
    )


# --- window, chunk, block and segment masks


def by_loop(rule, queries, keys):
    return np.array([[[[bool(rule(q, k)) for k in keys] for q in queries]]])


FAR = (2**31 - 1, -(2**31), 0, 5, -7)


WINDOWS = list(itertools.product([None, 0, 2, 2**31, 2**33], [None, 0, 3, 2**31]))
WINDOW_QUERIES, WINDOW_KEYS = [*range(-3, 6), *FAR], [*range(7), *FAR]


@functools.cache
def compiled_windows():
    """The mask of each window, from one program."""
    build = lambda queries, keys: [
        attention_mask(query_positions=queries, key_positions=keys, causal=False, window=window)
        for window in WINDOWS
    ]
    return dict(
        zip(WINDOWS, jax.jit(build)(np.array(WINDOW_QUERIES), np.array(WINDOW_KEYS)), strict=True)
    )


@pytest.mark.parametrize(("left", "right"), WINDOWS)
def test_a_window_of_any_distance(left, right):
    rule = lambda q, k: (left is None or k >= q - left) and (right is None or k <= q + right)
    expected = by_loop(rule, WINDOW_QUERIES, WINDOW_KEYS)
    mask = compiled_windows()[left, right]
    assert mask.shape == (expected.shape if (left, right) != (None, None) else (1, 1, 1, 12))
    np.testing.assert_array_equal(np.broadcast_to(mask, expected.shape), expected)


def test_window_conventions():
    """transformers counts oneself, tensor2tensor does not; the symmetric one has a distance."""
    positions, w = range(6), 2
    for options, rule in [
        ({"window": (w - 1, 0)}, lambda q, k: q - w < k <= q),
        ({"window": (w, 0)}, lambda q, k: q - w <= k <= q),
        ({"window": (w, w), "causal": False}, lambda q, k: abs(q - k) <= w),
    ]:
        mask = attention_mask(
            query_positions=positions, key_positions=positions, **({"causal": True} | options)
        )
        np.testing.assert_array_equal(mask, by_loop(rule, positions, positions))


def test_chunks():
    positions = list(range(-3, 8))
    np.testing.assert_array_equal(
        attention_mask(query_positions=positions, key_positions=positions, causal=False, chunk=3),
        by_loop(lambda q, k: q // 3 == k // 3, positions, positions),
    )
    mask = attention_mask(query_positions=positions, key_positions=positions, chunk=3, causal=True)
    np.testing.assert_array_equal(
        mask, by_loop(lambda q, k: q // 3 == k // 3 and k <= q, positions, positions)
    )


def test_prefix_inside_packing():
    """Two sequences with a prefix each: the prefix of one must not be seen from the other, though
    both are block 0."""
    segments, prefix = np.array([1, 1, 1, 2, 2, 2]), np.array([0, 0, -1, 0, 0, -1])
    positions = np.array([0, 1, 2, 0, 1, 2])
    mask = attention_mask(
        query_positions=positions,
        key_positions=positions,
        query_block_ids=prefix,
        key_block_ids=prefix,
        query_segment_ids=segments,
        key_segment_ids=segments,
        causal=True,
    )
    one = np.array([[1, 1, 0], [1, 1, 0], [1, 1, 1]], bool)
    np.testing.assert_array_equal(np.asarray(mask)[0, 0], np.kron(np.eye(2, dtype=bool), one))


def test_prefix_up_to_and_with_the_first_separator():
    """tensor2tensor's prefix language model: the tokens before a separator, and the first one
    itself, see each other."""
    ids, separator, positions = np.array([[5, 6, 9, 7, 9], [9, 5, 6, 7, 8]]), 9, range(5)
    before = np.cumsum(ids == separator, -1) - (ids == separator)
    blocks = np.where(before == 0, 0, -1)
    mask = attention_mask(
        query_positions=positions,
        key_positions=positions,
        query_block_ids=blocks,
        key_block_ids=blocks,
        causal=True,
    )
    for row, last in zip(np.asarray(mask), (2, 0), strict=True):
        np.testing.assert_array_equal(
            row[None],
            by_loop(lambda q, k, last=last: k <= q or max(q, k) <= last, positions, positions),
        )


def test_blocks_see_past_a_window():
    blocks, positions = np.array([0, 0, 0, -1, -1]), np.arange(5)
    mask = attention_mask(
        query_positions=positions,
        key_positions=positions,
        window=(0, 0),
        query_block_ids=blocks,
        key_block_ids=blocks,
        causal=True,
    )
    np.testing.assert_array_equal(
        mask, by_loop(lambda q, k: q == k or max(q, k) < 3, positions, positions)
    )


def test_blocks_without_another_term_hide_nothing():
    mask = attention_mask(
        query_positions=range(3),
        key_positions=range(3),
        causal=False,
        query_block_ids=[0, -1, 1],
        key_block_ids=[0, -1, 1],
    )
    assert np.asarray(mask).all()


def segment_mask(queries, keys):
    return attention_mask(
        query_positions=range(np.shape(queries)[-1]),
        key_positions=range(np.shape(keys)[-1]),
        causal=False,
        query_segment_ids=queries,
        key_segment_ids=keys,
    )


def window_mask(positions, window):
    return attention_mask(
        query_positions=positions, key_positions=positions, causal=False, window=window
    )


def test_segment_0_is_padding_and_any_other_segment_attends_to_itself():
    assert segment_mask([0, 1], [0, 1]).tolist() == [[[[False, False], [False, True]]]]
    assert segment_mask([-1, 1], [-1, 1]).tolist() == [[[[True, False], [False, True]]]]


def test_masks_without_a_batch_term_have_no_rows():
    for mask in (
        attention_mask(
            query_positions=range(3), key_positions=range(4), causal=False, window=(1, None)
        ),
        attention_mask(query_positions=range(3), key_positions=range(4), causal=False, chunk=2),
    ):
        assert mask.shape == (1, 1, 3, 4)
    assert segment_mask([[1, 2]], [[1, 2, 3]] * 2).shape == (2, 1, 2, 3)


def test_masks_combine_by_operators():
    positions = range(5)
    causal, local = (
        window_mask(positions, (None, 0)),
        window_mask(positions, (1, 1)),
    )
    np.testing.assert_array_equal(
        causal & ~local, by_loop(lambda q, k: k <= q and abs(q - k) > 1, positions, positions)
    )


def test_masks_at_an_offset_are_rows_of_the_whole():
    whole = np.asarray(
        attention_mask(query_positions=range(8), key_positions=range(8), window=(2, 0), causal=True)
    )

    @jax.jit
    def step(offset):
        return attention_mask(
            query_positions=offset[None], key_positions=np.arange(8), window=(2, 0), causal=True
        )

    for offset in range(8):
        np.testing.assert_array_equal(step(np.int32(offset)), whole[:, :, offset : offset + 1])
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (
            TypeError,
            "window: wanted a sequence, got int 3",
            lambda m: m(window=3),
        ),
        (ValueError, "window[0]: wanted an int of at least 0, got -1", lambda m: m(window=(-1, 0))),
        (TypeError, "window[1]: wanted a Python int, got float 0.5", lambda m: m(window=(1, 0.5))),
        (ValueError, "chunk: wanted an int of at least 1, got 0", lambda m: m(chunk=0)),
        (
            ValueError,
            "keys.block_ids: wanted an array, since queries.block_ids is given, got None",
            lambda m: m(query_block_ids=[0, 0]),
        ),
        (
            ValueError,
            "keys.segment_ids: wanted an array, since queries.segment_ids is given, got None",
            lambda m: m(query_segment_ids=[0, 0]),
        ),
        (
            ValueError,
            "segment_ids: wanted the length of positions, 2, got 1",
            lambda m: m(query_segment_ids=[0], key_segment_ids=[0, 0]),
        ),
    ],
)
def test_errors_of_the_other_masks(kind, message, call):
    with pytest.raises(kind) as caught:
        call(
            lambda **options: attention_mask(
                query_positions=[0, 1], key_positions=[0, 1], **options, causal=True
            )
        )
    assert str(caught.value).startswith(message)


def test_a_mask_that_does_not_say_whether_it_is_causal_is_an_error():
    with pytest.raises(TypeError, match="'causal'"):
        attention_mask(query_positions=[0, 1], key_positions=[0, 1])


@pytest.mark.parametrize("chunk", [2**31, 2**40])
def test_a_chunk_past_int32_is_refused(chunk):
    with pytest.raises(
        ValueError, match=rf"^chunk: wanted an int of at most 2147483647, got {chunk}$"
    ):
        attention_mask(query_positions=[0, 1], key_positions=[0, 1], causal=False, chunk=chunk)


def test_a_window_of_a_list_is_that_of_a_tuple():
    tokens = te.TokenPositions([0, 1])
    rule = te.AttentionMask(tokens, causal=True, window=[3, None])  # pyright: ignore[reportArgumentType]
    assert rule.window == (3, None)
    hash(jax.tree.structure(rule))


class TestValueOfTheBias:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_can_be_that_of_transformers_and_of_t5x(self, dtype):
        lowest = jnp.finfo(dtype).min
        got = te.mask_to_bias([True, False], dtype, value=float(lowest))
        assert got.dtype == jnp.dtype(dtype)
        assert got.tolist() == [0.0, float(lowest)]
        assert te.mask_to_bias([False]).tolist() == [float(jnp.finfo(jnp.float32).min) / 2]
        assert te.mask_to_bias([False], value=-1e9).tolist() == [-1e9]

    @pytest.mark.parametrize(
        ("value", "dtype"),
        [(-1e9, "float16"), (0.0, "float32"), (1.0, "float32"), (-1e39, "float32")],
    )
    def test_is_below_zero_and_finite_in_the_dtype(self, value, dtype):
        with pytest.raises(
            ValueError, match=rf"^value: wanted a number below 0 that {dtype} holds, at least -"
        ):
            te.mask_to_bias([True], dtype, value=value)

    @pytest.mark.parametrize("enabled", [False, True])
    @pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
    def test_is_finite_in_float64_in_either_mode(self, enabled):
        with x64(enabled):
            bias = te.mask_to_bias([True, False], "float64")
        assert bias.dtype == (jnp.float64 if enabled else jnp.float32)
        assert np.isfinite(bias).all()
        assert np.asarray(bias)[1] < -1e38
