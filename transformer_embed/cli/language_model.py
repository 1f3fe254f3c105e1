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
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, UInt8
from tqdm import tqdm

import transformer_embed as te

VOCAB_SIZE, D_MODEL, NUM_HEADS, NUM_LAYERS, CONTEXT = 256, 128, 4, 2, 128
# On each device.
BATCH_SIZE, EVALUATION_TOKENS = 4, 8192
PEAK_LEARNING_RATE, HELD_OUT = 5e-3, 0.05
# Of the texts that are scored; it trains on the first.
LENGTHS = (CONTEXT, 2 * CONTEXT, 4 * CONTEXT)
BAR = "{l_bar}{bar}| {elapsed}<{remaining}, {rate_fmt}{postfix}"
# The progress bar shows the loss of every tenth step, because reading a loss waits for its step.
STEPS_A_LOSS = 10
# Its held-out end has one text of each length, and the byte after it.
SHORTEST_TEXT = math.ceil((LENGTHS[-1] + 1) / HELD_OUT)
# What is added to tokens; other positions change attention instead.
SCHEMES = {"sinusoidal": te.Sinusoidal(), "learned": te.Learned(CONTEXT)}

Params = Mapping[str, Mapping[str, Array]]


def config(positions: str) -> te.EmbedderConfig:
    """The input layer with these positions."""
    return te.EmbedderConfig(VOCAB_SIZE, D_MODEL, scheme=SCHEMES.get(positions), dropout_rate=0.0)


def next_byte_logits(positions: str, ids: UInt8[Array, "b t"]) -> Float[Array, "b t v"]:
    """A causal pre-norm Transformer without dropout, with a tied output layer.

    Xiong et al. (2020), https://arxiv.org/abs/2002.04745.
    """
    embed = te.TransformerEmbedding(config(positions))
    x = embed(ids, is_training=False)
    for _ in range(NUM_LAYERS):
        x = x + _attention(positions, _norm(x))
        x = x + hk.nets.MLP([4 * D_MODEL, D_MODEL], activation=_squared_relu)(_norm(x))
    return te.linear_logits(_norm(x), embed.output())


def _attention(positions: str, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    tokens = te.TokenPositions.from_offset(0, x.shape[1])
    heads = (*x.shape[:2], NUM_HEADS, D_MODEL // NUM_HEADS)
    query, key, value = (
        hk.Linear(D_MODEL, with_bias=False, name=name)(x).reshape(heads)
        for name in ("query", "key", "value")
    )
    bias = None
    if positions == "rotary":
        query, key = (te.apply_rotary(each, tokens.positions) for each in (query, key))
    if positions == "alibi":
        bias = te.alibi_bias(tokens.positions, tokens.positions, num_heads=NUM_HEADS)
    mask = te.AttentionMask(tokens, causal=True).dense()
    attended = jax.nn.dot_product_attention(query, key, value, bias=bias, mask=mask)
    return hk.Linear(D_MODEL, name="attended")(attended.reshape(x.shape))


def _norm(x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)


def _squared_relu(x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """Learns faster than GELU and is cheaper on a CPU.

    So et al., "Primer" (2021), https://arxiv.org/abs/2109.08668.
    """
    return jnp.square(jax.nn.relu(x))


class Result(NamedTuple):
    """A trained model: its parameters, the loss of each step, and its scores.

    The scores are bits per byte on held-out texts of LENGTHS; None: it has no positions for them.
    """

    params: Params
    losses: np.ndarray
    bits: list[float | None]


def train(text: bytes, positions: str, *, steps: int, seed: int) -> Result:
    """Trains on a text but its end; equal arguments give equal results on one machine."""
    training, held_out = split(text)
    windows = _windows(training, CONTEXT)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    over_devices = NamedSharding(mesh, PartitionSpec("data"))
    params = model(positions).init(jax.random.key(seed), jnp.zeros([1, CONTEXT], jnp.uint8))
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    state, rng = _optimizer(steps).init(params), np.random.default_rng(seed)
    batch_size, losses = BATCH_SIZE * mesh.size, []
    options = {"unit": " tokens", "unit_scale": batch_size * CONTEXT, "bar_format": BAR}
    # None hides the bar unless stderr is a terminal.
    bar = tqdm(range(steps), f"{positions}, training", ncols=79, disable=None, **options)
    for done in bar:
        batch = windows[rng.integers(0, len(windows), batch_size)]
        batch = jax.device_put(batch, over_devices)
        params, state, loss = _step(positions, steps, params, state, batch)
        losses.append(loss)
        if done % STEPS_A_LOSS == 0:
            bar.set_postfix_str(f"loss={float(loss):.2f}", refresh=False)
    lengths = LENGTHS[:1] if positions == "learned" else LENGTHS
    bits = [_score(positions, params, held_out, length, over_devices) for length in lengths]
    return Result(params, np.asarray(losses), bits + [None] * (len(LENGTHS) - len(lengths)))


def model(positions: str) -> hk.Transformed:
    """`next_byte_logits` as init(rng, ids) and apply(params, ids)."""
    return hk.without_apply_rng(hk.transform(functools.partial(next_byte_logits, positions)))


# The new parameters and state take the memory of the old ones.
@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _step(
    positions: str,
    steps: int,
    params: optax.Params,
    state: optax.OptState,
    windows: UInt8[Array, "b t"],
) -> tuple[optax.Params, optax.OptState, Float[Array, ""]]:
    """One step of training, and the loss before it in bits per byte."""
    loss, gradient = jax.value_and_grad(lambda params: _bits(positions, params, windows).mean())(
        params
    )
    updates, state = _optimizer(steps).update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss


def _score(
    positions: str, params: Params, text: np.ndarray, length: int, over_devices: NamedSharding
) -> float:
    """Bits per byte of a text that is read in pieces of this length.

    Each byte is scored once, except the first one and a remainder shorter than a piece.
    """
    pieces = _windows(text, length)[::length]
    size = EVALUATION_TOKENS // length * over_devices.num_devices
    bits = []
    for start in range(0, len(pieces), size):
        # Of one shape, so that it compiles once.
        batch = np.resize(pieces[start : start + size], (size, length + 1))
        bits.append(_bits(positions, params, jax.device_put(batch, over_devices)))
    return float(np.concatenate(bits)[: len(pieces)].mean(dtype=np.float64))


@functools.partial(jax.jit, static_argnums=0)
def _bits(positions: str, params: Params, windows: UInt8[Array, "b t"]) -> Float[Array, "b"]:
    """Bits per byte of each window: the mean over all its bytes except the first."""
    logits = model(positions).apply(params, windows[:, :-1])
    targets = windows[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(-1) / math.log(2)


def unigram_bits(text: bytes) -> float:
    """Bits per byte of a unigram model with add-one smoothing, on the bytes that `train` scores."""
    training, held_out = split(text)
    counts = np.bincount(training, minlength=VOCAB_SIZE) + 1
    targets = _windows(held_out, CONTEXT)[::CONTEXT, 1:]
    return float(-np.log2(counts / counts.sum())[targets].mean())


def split(text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on, and the held-out end of a text of at least SHORTEST_TEXT bytes."""
    held_out = max(LENGTHS[-1] + 1, int(len(text) * HELD_OUT))
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


def _windows(ids: np.ndarray, length: int) -> np.ndarray:
    """A view [starts, length + 1]: at each start, a text and the byte after it."""
    return np.lib.stride_tricks.sliding_window_view(ids, length + 1)
