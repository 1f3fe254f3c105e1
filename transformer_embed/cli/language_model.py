"""The small language model that `train` trains, also an example of how to use this package."""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, UInt8

import transformer_embed as te
from transformer_embed.cli.progress import progress

VOCAB_SIZE, D_MODEL, NUM_HEADS, NUM_LAYERS, CONTEXT = 256, 128, 4, 2, 128
BATCH_SIZE, EVALUATION_BATCH_SIZE, PEAK_LEARNING_RATE, HELD_OUT = 4, 64, 5e-3, 0.05
# The progress bar shows the loss of every tenth step, because reading a loss waits for its step.
STEPS_A_LOSS = 10
# Its held-out end has one context, and the byte after it.
SHORTEST_TEXT = math.ceil((CONTEXT + 1) / HELD_OUT)

Params = Mapping[str, Mapping[str, Array]]


def next_byte_logits(config: te.EmbedderConfig, ids: UInt8[Array, "b t"]) -> Float[Array, "b t v"]:
    """A causal pre-norm Transformer without dropout, with a tied output layer.

    Xiong et al. (2020), https://arxiv.org/abs/2002.04745.
    """
    embed = te.TransformerEmbedding(config)
    tokens = te.TokenPositions(jnp.arange(ids.shape[1]))
    mask = te.AttentionMask(tokens, causal=True).dense()
    x = embed(ids, is_training=False)
    for _ in range(NUM_LAYERS):
        w_init = hk.initializers.VarianceScaling()
        attend = hk.MultiHeadAttention(NUM_HEADS, D_MODEL // NUM_HEADS, w_init=w_init)
        attend_to = _norm(x)
        x = x + attend(attend_to, attend_to, attend_to, mask)
        x = x + hk.nets.MLP([4 * D_MODEL, D_MODEL], activation=_squared_relu)(_norm(x))
    return te.linear_logits(_norm(x), embed.output())


def _norm(x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)


def _squared_relu(x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """Learns faster than GELU and is cheaper on a CPU.

    So et al., "Primer" (2021), https://arxiv.org/abs/2109.08668.
    """
    return jnp.square(jax.nn.relu(x))


class Result(NamedTuple):
    """A trained model: its input layer, its parameters, and bits per byte on held-out text."""

    config: te.EmbedderConfig
    params: Params
    bits: float


def train(
    text: bytes, scheme: te.Sinusoidal | None, name: str, *, steps: int, seed: int, quiet: bool
) -> Result:
    """Trains on a text but its end; equal arguments give equal results on one machine."""
    config = te.EmbedderConfig(VOCAB_SIZE, D_MODEL, scheme=scheme, dropout_rate=0.0)
    training, held_out = map(_windows, split(text))
    params = model(config).init(jax.random.key(seed), jnp.zeros([1, CONTEXT], jnp.uint8))
    state, rng = _optimizer(steps).init(params), np.random.default_rng(seed)
    bar = progress(range(steps), f"{name}, training", quiet=quiet)
    for done in bar:
        batch = training[rng.integers(0, len(training), BATCH_SIZE)]
        params, state, loss = _step(config, steps, params, state, batch)
        if done % STEPS_A_LOSS == 0:
            bar.set_postfix_str(f"loss={float(loss):.2f}", refresh=False)
    # Each byte is scored once, except the first one and a remainder shorter than a window.
    bits = _score(config, params, held_out[::CONTEXT])
    return Result(config, params, float(np.asarray(bits).mean(dtype=np.float64)))


def model(config: te.EmbedderConfig) -> hk.Transformed:
    """`next_byte_logits` as init(rng, ids) and apply(params, ids)."""
    return hk.without_apply_rng(hk.transform(functools.partial(next_byte_logits, config)))


# The new parameters and state take the memory of the old ones.
@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _step(
    config: te.EmbedderConfig,
    steps: int,
    params: optax.Params,
    state: optax.OptState,
    windows: UInt8[Array, "b t"],
) -> tuple[optax.Params, optax.OptState, Float[Array, ""]]:
    """One step of training, and the loss before it in bits per byte."""
    loss, gradient = jax.value_and_grad(lambda params: _bits(config, params, windows).mean())(
        params
    )
    updates, state = _optimizer(steps).update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss


@functools.partial(jax.jit, static_argnums=0)
def _score(
    config: te.EmbedderConfig, params: Params, windows: UInt8[Array, "b t"]
) -> Float[Array, "b"]:
    def score(window):
        return _bits(config, params, window[None])[0]

    return jax.lax.map(score, windows, batch_size=EVALUATION_BATCH_SIZE)


def _bits(
    config: te.EmbedderConfig, params: Params, windows: UInt8[Array, "b t"]
) -> Float[Array, "b"]:
    """Bits per byte of each window: the mean over all its bytes except the first."""
    logits = model(config).apply(params, windows[:, :-1])
    targets = windows[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(-1) / math.log(2)


def unigram_bits(text: bytes) -> float:
    """Bits per byte of a unigram model with add-one smoothing, on the bytes that `train` scores."""
    training, held_out = split(text)
    counts = np.bincount(training, minlength=VOCAB_SIZE) + 1
    targets = _windows(held_out)[::CONTEXT, 1:]
    return float(-np.log2(counts / counts.sum())[targets].mean())


def split(text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on, and the held-out end of a text of at least SHORTEST_TEXT bytes."""
    held_out = max(CONTEXT + 1, int(len(text) * HELD_OUT))
    ids = np.frombuffer(text, np.uint8)
    return ids[:-held_out], ids[-held_out:]


def _optimizer(steps: int) -> optax.GradientTransformation:
    # optax wants at least one step after the warm-up.
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, PEAK_LEARNING_RATE, max(1, steps // 10), max(2, steps)
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )


def _windows(ids: np.ndarray) -> np.ndarray:
    """A view [starts, CONTEXT + 1]: at each start, a context and the byte after it."""
    return np.lib.stride_tricks.sliding_window_view(ids, CONTEXT + 1)
