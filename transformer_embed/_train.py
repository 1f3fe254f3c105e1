"""The small language model of `python -m transformer_embed train`, and an example of how the parts go together."""

import dataclasses
import functools
import hashlib
import math
import pathlib
import sysconfig
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, UInt8
from tqdm import tqdm

import transformer_embed as te

VOCAB_SIZE, D_MODEL, NUM_HEADS, NUM_LAYERS, CONTEXT = 256, 128, 4, 2, 128
BATCH_SIZE, EVAL_BATCH_SIZE, PEAK_LEARNING_RATE, HELD_OUT = 16, 64, 8e-3, 0.05
SHORTEST_TEXT = math.ceil((CONTEXT + 1) / HELD_OUT)
LONGEST_LIBRARY = 8_000_000

Params = Mapping[str, Mapping[str, Array]]


def embedder_config(positions: te.Sinusoidal | None) -> te.EmbedderConfig:
    """The input layer of the model; so short a training needs no dropout."""
    return te.EmbedderConfig(VOCAB_SIZE, D_MODEL, positions=positions, dropout_rate=0.0)


def next_byte_logits(config: te.EmbedderConfig, ids: UInt8[Array, "b t"]) -> Float[Array, "b t v"]:
    """A causal Transformer with its norms in front (Xiong et al., 2020, https://arxiv.org/abs/2002.04745)."""
    embed = te.TransformerEmbedding(config.vocab_size, config.d_model, positions=config.positions, dropout_rate=config.dropout_rate)
    x = embed(ids, is_training=True)
    places = jnp.arange(ids.shape[1])
    mask = te.attention_mask(query_positions=places, key_positions=places)
    for _ in range(NUM_LAYERS):
        x = x + _attention(_norm(x), mask)
        x = x + _feed_forward(_norm(x))
    return embed.logits(_norm(x))


def _attention(x: Float[Array, "b t d"], mask: Array) -> Float[Array, "b t d"]:
    heads = (*x.shape[:2], NUM_HEADS, D_MODEL // NUM_HEADS)
    query, key, value = (hk.Linear(D_MODEL, with_bias=False, name=name)(x).reshape(heads) for name in ("query", "key", "value"))
    return hk.Linear(D_MODEL, name="attended")(jax.nn.dot_product_attention(query, key, value, mask=mask).reshape(x.shape))


def _feed_forward(x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """Squared ReLU (So et al., "Primer", 2021, https://arxiv.org/abs/2109.08668): it learns the most in a minute on a CPU."""
    return hk.Linear(D_MODEL, name="narrow")(jnp.square(jax.nn.relu(hk.Linear(4 * D_MODEL, name="wide")(x))))


def _norm(x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)


class Result(NamedTuple):
    """A trained model: its input layer, its parameters, and bits per byte on the text of training and on held-out text."""

    config: te.EmbedderConfig
    params: Params
    training: float
    held_out: float


def train(config: te.EmbedderConfig, text: bytes, *, steps: int, seed: int, name: str, quiet: bool) -> Result:
    """Trains on all but the last part of a text; equal arguments give equal results on one machine."""
    training, held_out = split(text)
    model = hk.without_apply_rng(hk.transform(functools.partial(next_byte_logits, config)))
    schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK_LEARNING_RATE, steps // 10, max(steps, 2))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))

    def bits(params, windows):
        logits = model.apply(params, windows[:, :-1])
        targets = windows[:, 1:].astype(jnp.int32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean() / math.log(2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, windows):
        gradient = jax.grad(bits)(params, windows)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = model.init(jax.random.key(seed), jnp.zeros([1, CONTEXT], jnp.uint8))
    state = optimizer.init(params)
    rng = np.random.default_rng(seed)
    for _ in tqdm(range(steps), desc=f"{name}: training", ncols=79, disable=quiet):
        starts = rng.integers(0, len(training) - CONTEXT, BATCH_SIZE)
        params, state = step(params, state, _windows(training, starts))
    score = functools.partial(_mean_bits, jax.jit(bits), params)
    ends = training[-len(held_out) :]
    return Result(config, params, score(ends, name, quiet), score(held_out, name, quiet))


def split(text: bytes) -> tuple[UInt8[np.ndarray, "n"], UInt8[np.ndarray, "m"]]:
    """The part to train on, and the held-out end."""
    held_out = max(CONTEXT + 1, int(len(text) * HELD_OUT))
    array = np.frombuffer(text, np.uint8)
    return array[:-held_out], array[-held_out:]


def _windows(text, starts):
    return text[np.asarray(starts)[:, None] + np.arange(CONTEXT + 1)]
