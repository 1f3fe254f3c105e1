"""A model with memory, as Transformer-XL: relative positions, and the hidden states of the segment
before as further keys.

It has the names and shapes of the public Haiku ports. Its ends, its mask and its relative logits are
written twice: by hand, and with this package.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import near
from drawn import drawn

import transformer_embed as te

VOCAB, WIDTH, HEADS, HEAD_DIM, LENGTH, MEMORY = 29, 16, 2, 8, 5, 7
IDS = np.random.default_rng(0).integers(0, VOCAB, (2, 3 * LENGTH + 1)).astype(np.int32)
NO_MEMORY = np.zeros((2, MEMORY, WIDTH), np.float32)


def weights(name, *shape):
    return hk.get_parameter(name, shape, init=hk.initializers.RandomNormal(0.3))


def attention(x, memory, mask, encodings, shift):
    """Content and position logits: the queries have a bias of their own for each."""
    context = jnp.concatenate([memory, x], axis=1)
    project = lambda name, h: jnp.einsum(
        "...d,dhk->...hk", h, weights(name, WIDTH, HEADS, HEAD_DIM)
    )
    queries, keys, values = project("q", x), project("k", context), project("v", context)
    positions = project("r", encodings)
    by_content = jnp.einsum("bthk,bshk->bhts", queries + weights("u", HEADS, HEAD_DIM), keys)
    by_place = jnp.einsum("bthk,shk->bhts", queries + weights("v_bias", HEADS, HEAD_DIM), positions)
    logits = (by_content + shift(by_place)) / np.sqrt(HEAD_DIM)
    shares = jax.nn.softmax(jnp.where(mask, logits, -1e30))
    mixed = jnp.einsum("bhts,bshk->bthk", shares, values).reshape((*x.shape[:2], -1))
    return x + mixed @ weights("o", HEADS * HEAD_DIM, WIDTH)


# --- by hand


def sinusoids_by_hand(positions):
    frequencies = 10_000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)
    angles = positions[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def shift_by_hand(logits):
    """Column j of the result of row i is column j + t - 1 - i: the distances end at 0."""
    *batch, t, s = logits.shape
    padded = jnp.pad(logits, [(0, 0)] * len(batch) + [(0, 0), (1, 0)])
    return padded.reshape(*batch, s + 1, t)[..., 1:, :].reshape(*batch, t, s)


def old_segment(ids, memory):
    inputs, labels = ids[:, :-1], ids[:, 1:]
    x = hk.Embed(VOCAB, WIDTH)(inputs) * np.sqrt(WIDTH)
    encodings = sinusoids_by_hand(np.arange(MEMORY + LENGTH - 1, -1, -1.0))
    places = np.arange(MEMORY + LENGTH)
    mask = places[None] <= MEMORY + np.arange(LENGTH)[:, None]
    new_memory = jnp.concatenate([memory, x], axis=1)[:, -MEMORY:]
    x = attention(x, memory, mask, encodings, shift_by_hand)
    log_probs = jax.nn.log_softmax(hk.Linear(VOCAB)(x))
    loss = -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], -1))
    return loss, jax.lax.stop_gradient(new_memory)


# --- with this package


class Head(hk.Module):
    def __call__(self):
        w = weights("w", WIDTH, VOCAB)
        b = hk.get_parameter("b", [VOCAB], init=jnp.zeros)
        return te.OutputLayer(w, b, vocab_axis=1)


def new_segment(ids, memory):
    inputs, labels = ids[:, :-1], ids[:, 1:]
    x = te.TokenEmbedding(VOCAB, WIDTH, name="embed")(inputs)
    distances = np.arange(MEMORY + LENGTH - 1, -1, -1)
    encodings = te.sinusoidal_encoding(distances, WIDTH, layout="sin_cos")
    queries = te.TokenPositions.from_offset(MEMORY, LENGTH)
    keys = te.TokenPositions.from_offset(0, MEMORY + LENGTH)
    mask = te.AttentionMask(queries, keys, causal=True).dense()
    new_memory = jnp.concatenate([memory, x], axis=1)[:, -MEMORY:]
    x = attention(x, memory, mask, encodings, te.relative_shift)
    loss = te.linear_cross_entropy(x, Head(name="linear")(), labels)
    return loss, jax.lax.stop_gradient(new_memory)


# --- both


def trained(segment, params):
    """The mean loss of three segments, each of which sees the states of the one before."""
    apply = hk.without_apply_rng(hk.transform(segment)).apply
    segments = np.stack([IDS[:, start : start + LENGTH + 1] for start in (0, LENGTH, 2 * LENGTH)])

    def loss(params):
        def step(memory, ids):
            value, memory = apply(params, ids, memory)
            return memory, value

        memory, values = jax.lax.scan(step, NO_MEMORY, segments)
        return values.mean(), memory

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.mark.slow
def test_a_model_with_memory_keeps_its_parameters_values_and_gradients():
    params, new_params = (
        drawn(hk.transform(segment).init, IDS[:, : LENGTH + 1], NO_MEMORY, scale=0.3)
        for segment in (old_segment, new_segment)
    )
    assert jax.tree.map(jnp.shape, new_params) == jax.tree.map(jnp.shape, params)
    (expected, memory), gradients = trained(old_segment, params)
    (found, new_memory), new_gradients = trained(new_segment, params)
    near(found, expected, rtol=1e-6)
    near(new_memory, memory, rtol=1e-6)
    near(new_gradients, gradients, rtol=2e-4, atol=2e-5)
