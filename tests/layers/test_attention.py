"""Hand-over to attention: the same mask in two libraries, and invariances of every position
scheme through a real attention layer."""

import functools

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import near
from hypothesis import strategies as st

import transformer_embed as te

HEADS, SIZE, WIDTH, LENGTH = 2, 4, 8, 6
# Sums of at most LENGTH products of numbers near 1, in another order: a few roundings of 2**-24
# each.
CLOSE = {"rtol": 0, "atol": 2e-6}


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


QUERY, KEY, VALUE = (normal(seed, 2, LENGTH, HEADS, SIZE) for seed in range(3))


def by_hand(query, key, value, mask):
    """Softmax attention in float64; a wholly masked row attends evenly."""
    logits = np.einsum("bthd,bshd->bhts", query.astype(np.float64), key) / np.sqrt(SIZE)
    logits = np.where(mask, logits, np.where(mask.any(-1, keepdims=True), -np.inf, 0))
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), value)


PACKED = te.TokenPositions.from_segment_ids([[1, 1, 1, 2, 2, 0], [0, 1, 1, 1, 1, 1]])
PADDED = te.TokenPositions(range(LENGTH), segment_ids=[[1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]])
CAUSAL = te.AttentionMask(te.TokenPositions(range(LENGTH)), causal=True).dense()


@pytest.mark.slow
@pytest.mark.parametrize("attend", [jax.nn.dot_product_attention, nn.dot_product_attention])
@pytest.mark.parametrize("tokens", [PACKED, PADDED])
def test_one_mask_in_two_libraries(attend, tokens):
    mask = np.asarray(te.AttentionMask(tokens, window=(2, 0), causal=True).dense())
    rows = mask.any(-1)[:, 0, :, None, None]
    got, want = jax.jit(attend)(QUERY, KEY, VALUE, mask=mask), by_hand(QUERY, KEY, VALUE, mask)
    near(np.where(rows, got, 0), np.where(rows, want, 0), **CLOSE)


# --- invariances

TABLE = normal(7, 64, WIDTH)
BUCKETS = normal(8, 32, HEADS)
WEIGHTS = normal(9, 3, WIDTH, WIDTH) / np.sqrt(WIDTH)


def t5(queries, keys):
    buckets = te.relative_position_buckets(queries, keys, causal=True)
    return jnp.moveaxis(jnp.asarray(BUCKETS)[buckets], -1, 1)


SCHEMES = {
    "sinusoidal": {"encode": functools.partial(te.sinusoidal_encoding, d_model=WIDTH)},
    "learned": {"encode": functools.partial(te.lookup, TABLE)},
    "rotary": {"rotate": functools.partial(te.apply_rotary, base=100.0)},
    "alibi": {"bias": functools.partial(te.alibi_bias, num_heads=HEADS)},
    "t5": {"bias": t5},
}


def layer(scheme, x, tokens):
    """One attention layer; x [batch, length, width]."""
    options = SCHEMES[scheme]
    if "encode" in options:
        x = x + options["encode"](tokens.positions)
    query, key, value = ((x @ w).reshape(*x.shape[:2], HEADS, SIZE) for w in WEIGHTS)
    if "rotate" in options:
        query, key = (options["rotate"](part, tokens.positions) for part in (query, key))
    bias = options["bias"](tokens.positions, tokens.positions) if "bias" in options else None
    mask = te.AttentionMask(tokens, causal=True).dense()
    return jax.nn.dot_product_attention(query, key, value, bias=bias, mask=mask).reshape(x.shape)


@functools.cache
def compiled(scheme):
    """(x, segment_ids) -> the output, and the gradient of a weighting of it that does not mix
    tokens."""

    @jax.jit
    def values_and_gradient(x, segment_ids):
        tokens = te.TokenPositions.from_segment_ids(segment_ids)
        output, back = jax.vjp(lambda x: layer(scheme, x, tokens), x)
        (gradient,) = back(jnp.where(tokens.padding_mask[..., None], jnp.cos(output), 0))
        return output, gradient

    return values_and_gradient


def of_segments(scheme, x, lengths, before):
    """What sequences of given lengths, after some padding, give in one row of LENGTH + 4 tokens."""
    segment_ids = np.repeat(np.arange(len(lengths) + 1), [before, *lengths])
    return compiled(scheme)(x, np.pad(segment_ids, (0, x.shape[1] - len(segment_ids)))[None])


some_lengths = st.lists(st.integers(1, 5), min_size=1, max_size=3).filter(
    lambda lengths: sum(lengths) <= 8
)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@hypothesis.given(lengths=some_lengths, before=st.integers(0, 2), seed=st.integers(0, 99))
@hypothesis.settings(max_examples=15)
def test_packed_equals_each_alone_wherever_it_stands(scheme, lengths, before, seed):
    """Packing, padding on the left and padding on the right are one property: values and gradients
    of a sequence are its own."""
    x = normal(seed, 1, LENGTH + 4, WIDTH)
    packed = of_segments(scheme, x, lengths, before)
    ends = before + np.cumsum(lengths)
    for end, length in zip(ends, lengths, strict=True):
        for shift in (0, x.shape[1] - length):
            alone = of_segments(scheme, np.roll(x, shift - (end - length), axis=1), [length], shift)
            for ours, theirs in zip(packed, alone, strict=True):
                near(ours[:, end - length : end], theirs[:, shift : shift + length], **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["rotary", "alibi", "t5"])
def test_relative_schemes_see_differences_only(scheme):
    x, attend = normal(14, 1, LENGTH, WIDTH), jax.jit(functools.partial(layer, scheme))
    here = attend(x, te.TokenPositions.from_offset(0, LENGTH))
    for shift in (1, 1000, 2**30):
        there = attend(x, te.TokenPositions.from_offset(shift, LENGTH))
        near(here, there, **CLOSE)
