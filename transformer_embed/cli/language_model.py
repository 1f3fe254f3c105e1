"""The small language model that `train` trains, also an example of how to use this package."""

import functools
import math
from collections.abc import Callable, Mapping

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, UInt8
from tqdm import tqdm

import transformer_embed as te

VOCAB_SIZE = 256
D_MODEL = 128
NUM_HEADS = 4
NUM_LAYERS = 2
CONTEXT = 128
# These two are for each device.
BATCH_SIZE = 4
EVALUATION_TOKENS = 8192
PEAK_LEARNING_RATE = 5e-3
# The share of the text that is held out.
HELD_OUT = 0.05
# The lengths of the texts that are scored; the model trains on the first.
LENGTHS = (CONTEXT, 2 * CONTEXT, 4 * CONTEXT)
BAR = "{l_bar}{bar}| {elapsed}<{remaining}, {rate_fmt}{postfix}"
# The progress bar shows the loss of every tenth step, because reading a loss waits for its step.
STEPS_A_LOSS = 10
# The held-out end of the shortest text has one text of each length, and the byte after it.
SHORTEST_TEXT = math.ceil((LENGTHS[-1] + 1) / HELD_OUT)
# These positions are added to tokens; the others change attention instead.
SCHEMES = {"sinusoidal": te.Sinusoidal(), "learned": te.Learned(CONTEXT)}

ModelParams = Mapping[str, Mapping[str, Array]]
_norm = functools.partial(hk.LayerNorm, -1, create_scale=True, create_offset=True)


def config(positions: str) -> te.EmbedderConfig:
    """Returns the config of the input layer with these positions."""
    return te.EmbedderConfig(VOCAB_SIZE, D_MODEL, scheme=SCHEMES.get(positions))


def next_byte_logits(positions: str, ids: UInt8[Array, "b t"]) -> Float[Array, "b t v"]:
    """Runs a causal pre-norm Transformer without dropout, with a tied output layer.

    Xiong et al. (2020), https://arxiv.org/abs/2002.04745.
    """
    embed = te.TransformerEmbedding(config(positions))
    x = embed(ids, is_training=False)
    for _ in range(NUM_LAYERS):
        x = x + _attention(positions, _norm()(x))
        # So et al., "Primer" (2021), https://arxiv.org/abs/2109.08668: a squared ReLU learns faster
        # than GELU, and is cheaper on a CPU.
        hidden = jnp.square(jax.nn.relu(hk.Linear(4 * D_MODEL)(_norm()(x))))
        x = x + hk.Linear(D_MODEL)(hidden)
    return te.linear_logits(_norm()(x), embed.output())


def _attention(positions: str, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """Runs causal attention, which some positions change."""
    tokens = te.TokenPositions.from_offset(0, x.shape[1])
    heads = (*x.shape[:2], NUM_HEADS, D_MODEL // NUM_HEADS)
    query, key, value = (
        hk.Linear(D_MODEL, with_bias=False, name=name)(x).reshape(heads)
        for name in ("query", "key", "value")
    )
    bias = None
    if positions == "rotary":
        query = te.apply_rotary(query, tokens.positions)
        key = te.apply_rotary(key, tokens.positions)
    if positions == "alibi":
        bias = te.alibi_bias(tokens.positions, tokens.positions, num_heads=NUM_HEADS, causal=True)
    mask = te.AttentionMask(tokens, causal=True).dense()
    attended = jax.nn.dot_product_attention(query, key, value, bias=bias, mask=mask)
    return hk.Linear(D_MODEL, name="attended")(attended.reshape(x.shape))


def train(text: bytes, positions: str, *, steps: int, seed: int) -> tuple[ModelParams, list[float]]:
    """Trains on a text but its end; equal arguments give equal results on one machine.

    Returns the parameters, and bits per byte of held-out texts of LENGTHS, as far as the model has
    positions for such texts.
    """
    training, held_out = split(text)
    windows = _windows(training, CONTEXT)
    mesh = Mesh(jax.devices(), ("data",))
    over_devices = NamedSharding(mesh, PartitionSpec("data"))
    bits, optimizer = jax.jit(functools.partial(_bits, positions)), _optimizer(steps)
    step = _step_of(bits, optimizer)
    batch_size, rng = BATCH_SIZE * mesh.size, np.random.default_rng(seed)
    with _bar(steps, f"{positions}, compiling", " tokens", batch_size * CONTEXT) as bar:
        params = model(positions).init(jax.random.key(seed), jnp.zeros([1, CONTEXT], jnp.uint8))
        params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        state = optimizer.init(params)
        for done in range(steps):
            batch = windows[rng.integers(0, len(windows), batch_size)]
            params, state, loss = step(params, state, jax.device_put(batch, over_devices))
            if done % STEPS_A_LOSS == 0:
                bar.set_description(f"{positions}, training", refresh=False)
                bar.set_postfix_str(f"loss={float(loss):.2f}", refresh=False)
            bar.update()
    lengths = LENGTHS[:1] if positions == "learned" else LENGTHS
    score = functools.partial(_score, functools.partial(bits, params), held_out, over_devices)
    with _bar(len(lengths), f"{positions}, scoring", "length", 1) as bar:
        scores = []
        for length in lengths:
            scores.append(score(length))
            bar.update()
    return params, scores


def _bar(total: int, name: str, unit: str, size: int) -> tqdm:
    """Returns a progress bar, which is hidden unless stderr is a terminal."""
    options = {"unit": unit, "unit_scale": size, "bar_format": BAR, "leave": False}
    return tqdm(total=total, desc=name, ncols=79, disable=None, **options)


def _step_of(bits: Callable, optimizer: optax.GradientTransformation) -> Callable:
    """Returns the compiled training step."""

    # The new parameters and state take the memory of the old ones.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: ModelParams, state: optax.OptState, batch: UInt8[Array, "b t"]) -> tuple:
        """Returns the new parameters and state, and the loss before the step."""
        loss, gradient = jax.value_and_grad(lambda params: bits(params, batch).mean())(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def model(positions: str) -> hk.Transformed:
    """Returns `next_byte_logits` as init(rng, ids) and apply(params, ids)."""
    return hk.without_apply_rng(hk.transform(functools.partial(next_byte_logits, positions)))


def _score(bits: Callable, text: np.ndarray, over_devices: NamedSharding, length: int) -> float:
    """Returns bits per byte of a text that is read in windows of this length.

    Each byte is scored once, except the first one and a remainder shorter than a window.
    """
    pieces = _windows(text, length)[::length]
    size = EVALUATION_TOKENS // length * over_devices.num_devices
    # All batches have one shape, so that it compiles once: pieces come again in the last one.
    batches = np.resize(pieces, (-(-len(pieces) // size), size, length + 1))
    found = [bits(jax.device_put(batch, over_devices)) for batch in batches]
    return float(np.concatenate(found)[: len(pieces)].mean(dtype=np.float64))


def _bits(positions: str, params: ModelParams, windows: UInt8[Array, "b t"]) -> Float[Array, "b"]:
    """Returns bits per byte of each window, the mean over all bytes except the first."""
    logits = model(positions).apply(params, windows[:, :-1])
    targets = windows[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(-1) / math.log(2)


def split(text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Splits a text of at least SHORTEST_TEXT bytes into bytes to train on and a held-out end."""
    held_out = max(LENGTHS[-1] + 1, int(len(text) * HELD_OUT))
    ids = np.frombuffer(text, np.uint8)
    return ids[:-held_out], ids[-held_out:]


def _optimizer(steps: int) -> optax.GradientTransformation:
    """Returns AdamW with a warm-up, a cosine decay and clipped gradients."""
    # optax wants at least one step after the warm-up.
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, PEAK_LEARNING_RATE, max(1, steps // 10), max(2, steps)
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )


def _windows(ids: np.ndarray, length: int) -> np.ndarray:
    """Returns a view [starts, length + 1]: at each start, a text and the byte after it."""
    return np.lib.stride_tricks.sliding_window_view(ids, length + 1)
