"""A decoder with grouped queries, rotary positions and a cache, with the names and shapes of Llama.

Its ends, its mask and its cache are written twice: by hand, and with this package. The layers are
the same function of what is different: rotate, store, mask.
"""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import near
from drawn import drawn

import transformer_embed as te

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, SLOTS = 31, 16, 4, 2, 8, 10
BASE = 10_000.0
IDS = np.random.default_rng(0).integers(0, VOCAB, (2, 9)).astype(np.int32)


def weights(name, *shape):
    return hk.get_parameter(name, shape, init=hk.initializers.RandomNormal(0.3))


class RMSNorm(hk.Module):
    def __call__(self, x):
        scale = hk.get_parameter("scale", x.shape[-1:], init=jnp.ones)
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


class Layer(hk.Module):
    def __call__(self, x, rotate, store, mask):
        h = RMSNorm(name="input_layernorm")(x)
        queries = jnp.einsum("btd,dhk->bthk", h, weights("q_proj", WIDTH, HEADS, HEAD_DIM))
        keys = jnp.einsum("btd,dhk->bthk", h, weights("k_proj", WIDTH, KV_HEADS, HEAD_DIM))
        values = jnp.einsum("btd,dhk->bthk", h, weights("v_proj", WIDTH, KV_HEADS, HEAD_DIM))
        keys, values, cache = store(self.name, rotate(keys), values)
        queries = rotate(queries).reshape(*x.shape[:2], KV_HEADS, -1, HEAD_DIM)
        logits = jnp.einsum("btghk,bsgk->bghts", queries, keys) / np.sqrt(HEAD_DIM)
        shares = jax.nn.softmax(jnp.where(mask, logits, -1e30))
        mixed = jnp.einsum("bghts,bsgk->btghk", shares, values).reshape(*x.shape[:2], -1)
        x = x + mixed @ weights("o_proj", HEADS * HEAD_DIM, WIDTH)
        h = RMSNorm(name="post_attention_layernorm")(x)
        return x + jax.nn.silu(h @ weights("up", WIDTH, 32)) @ weights("down", 32, WIDTH), cache


def layers(x, rotate, store, mask):
    """One layer, because both decoders have the same layers."""
    x, cache = Layer(name="layer_0")(x, rotate, store, mask)
    return RMSNorm(name="norm")(x), {"layer_0": cache}


def empty_arrays():
    empty = np.zeros((2, SLOTS, KV_HEADS, HEAD_DIM), np.float32)
    return {"layer_0": (empty, empty)}


# --- by hand


def rotated_by_hand(x, positions):
    """Pairs of a channel in the first half and one in the second."""
    frequencies = BASE ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (positions[..., None] * frequencies)[None, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def old_decoder(ids, cache, offset):
    positions = offset + jnp.arange(ids.shape[1])
    x = weights("embed_tokens", VOCAB, WIDTH)[ids]
    rotate = functools.partial(rotated_by_hand, positions=positions)

    def store(name, keys, values):
        write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, offset, axis=1)
        new = tuple(map(write, cache[name], (keys, values)))
        return *new, new

    mask = jnp.arange(SLOTS)[None] <= positions[:, None]
    x, cache = layers(x, rotate, store, mask)
    return x @ weights("lm_head", WIDTH, VOCAB), cache, offset + ids.shape[1]


def old_loss(ids):
    logits, *_ = old_decoder(ids, empty_arrays(), 0)
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_probs, ids[:, 1:, None], -1)), logits


# --- with this package


def new_layers(ids, cache, offset):
    tokens = te.TokenPositions.from_offset(offset, ids.shape[1])
    slots, written = cache
    slots, _ = te.write_cache(slots, tokens, offset)
    mask = te.AttentionMask(tokens, slots, causal=True).dense()[:, :, None]
    rotate = functools.partial(te.apply_rotary, positions=tokens.positions, base=BASE)

    def store(name, keys, values):
        new, _ = te.write_cache(written[name], (keys, values), offset)
        return *new, new

    x = te.lookup(weights("embed_tokens", VOCAB, WIDTH), ids)
    x, arrays = layers(x, rotate, store, mask)
    output = te.OutputLayer(weights("lm_head", WIDTH, VOCAB), vocab_axis=1)
    return x, output, (slots, arrays)


def new_decoder(ids, cache, offset):
    x, output, cache = new_layers(ids, cache, offset)
    return te.linear_logits(x, output), cache, offset + ids.shape[1]


def new_loss(ids):
    cache = te.TokenPositions.empty(2, SLOTS), empty_arrays()
    x, output, _ = new_layers(ids, cache, 0)
    return te.linear_cross_entropy(x, output, ids, shift=1)


# --- both


def decoded(params):
    """The logits of steps of one token. The losses store all tokens in one step."""
    step = jax.jit(hk.without_apply_rng(hk.transform(new_decoder)).apply)
    cache, found, offset = (te.TokenPositions.empty(2, SLOTS), empty_arrays()), [], 0
    for n in range(IDS.shape[1]):
        logits, cache, offset = step(params, IDS[:, n : n + 1], cache, offset)
        found.append(np.asarray(logits))
    return np.concatenate(found, axis=1)


@pytest.mark.slow
def test_a_decoder_keeps_its_parameters_logits_cache_and_gradients():
    old, new = (hk.without_apply_rng(hk.transform(loss)) for loss in (old_loss, new_loss))
    params, new_params = (drawn(model.init, IDS, scale=0.3) for model in (old, new))
    shapes = functools.partial(jax.tree.map, jnp.shape)
    assert shapes(new_params) == shapes(params)
    old_step = jax.jit(jax.value_and_grad(old.apply, has_aux=True))
    (expected, logits), gradients = old_step(params, IDS)
    found, new_gradients = jax.jit(jax.value_and_grad(new.apply))(params, IDS)
    near(found, expected, rtol=1e-6)
    near(new_gradients, gradients, rtol=2e-4, atol=2e-5)
    near(decoded(params), logits, rtol=2e-4, atol=2e-5)
