"""Packed sequences through a real attention layer, with every kind of positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st

import transformer_embed as te

HEADS, WIDTH, LENGTH = 2, 8, 10
WEIGHTS = normal(9, 3, WIDTH, WIDTH) / np.sqrt(WIDTH)
ENCODED = {
    "sinusoidal": functools.partial(te.sinusoidal_encoding, d_model=WIDTH),
    "learned": functools.partial(te.lookup, normal(7, 64, WIDTH)),
}


def t5(queries, keys):
    buckets = te.relative_position_buckets(queries, keys, causal=True)
    return jnp.moveaxis(jnp.asarray(normal(8, 32, HEADS))[buckets], -1, 1)


BIASES = {"alibi": functools.partial(te.alibi_bias, num_heads=HEADS, causal=True), "t5": t5}
SCHEMES = [*ENCODED, "rotary", *BIASES]


def layer(scheme, x, tokens):
    """One attention layer; x [batch, length, width]."""
    positions = tokens.positions
    x = x + ENCODED[scheme](positions) if scheme in ENCODED else x
    query, key, value = ((x @ w).reshape(*x.shape[:2], HEADS, -1) for w in WEIGHTS)
    if scheme == "rotary":
        query, key = (te.apply_rotary(part, positions, base=100.0) for part in (query, key))
    bias = BIASES[scheme](positions, positions) if scheme in BIASES else None
    mask = te.AttentionMask(tokens, causal=True).dense()
    return jax.nn.dot_product_attention(query, key, value, bias=bias, mask=mask).reshape(x.shape)


@jax.jit
def compiled(x, segment_ids):
    """Of each scheme the output, and the gradient of a weighting of it that does not mix tokens."""
    tokens = te.TokenPositions.from_segment_ids(segment_ids)
    found = {}
    for scheme in SCHEMES:
        output, back = jax.vjp(lambda x, scheme=scheme: layer(scheme, x, tokens), x)
        (gradient,) = back(jnp.where(tokens.padding_mask[..., None], jnp.cos(output), 0))
        found[f"{scheme}, output"], found[f"{scheme}, gradient"] = output, gradient
    return found


def of_segments(x, lengths, before):
    """What sequences of given lengths, after some padding, give in one row."""
    segment_ids = np.repeat(np.arange(len(lengths) + 1), [before, *lengths])
    padded = np.pad(segment_ids, (0, LENGTH - len(segment_ids)))[None]
    return jax.device_get(compiled(x, padded))


some_lengths = st.lists(st.integers(1, 5), min_size=1, max_size=3).filter(
    lambda lengths: sum(lengths) <= 8
)


@pytest.mark.slow
@given(lengths=some_lengths, before=st.integers(0, 2), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_packed_equals_each_alone_wherever_it_stands(lengths, before, seed):
    """Packing, padding on the left and padding on the right are one property: values and gradients
    of a sequence are its own."""
    x = normal(seed, 1, LENGTH, WIDTH)
    packed = of_segments(x, lengths, before)
    ends = before + np.cumsum(lengths)
    for end, length in zip(ends, lengths, strict=True):
        for shift in (0, LENGTH - length):
            alone = of_segments(np.roll(x, shift - (end - length), axis=1), [length], shift)
            for name in packed:
                ours = packed[name][:, end - length : end]
                theirs = alone[name][:, shift : shift + length]
                # A few roundings of sums of numbers near 1, in another order.
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6, err_msg=name)
