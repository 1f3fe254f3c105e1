"""The small language model that `train` trains, also an example of how to use this package."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

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
# The texts in a training batch, and the tokens in a batch that is scored, for each device.
BATCH_SIZE = 4
EVALUATION_TOKENS = 8192
PEAK_LEARNING_RATE = 5e-3
# The share of the text that is held out for scoring.
HELD_OUT = 0.05
# The lengths of the texts that are scored. The model trains on texts of the first length.
LENGTHS = (CONTEXT, 2 * CONTEXT, 4 * CONTEXT)
BAR = "{l_bar}{bar}| {elapsed}<{remaining}, {rate_fmt}{postfix}"
# The progress bar shows the loss of every tenth step, because reading a loss waits for its step.
STEPS_BETWEEN_LOSSES = 10
# The held-out end of the shortest text has one text of each length, and the byte after it.
SHORTEST_TEXT = math.ceil((LENGTHS[-1] + 1) / HELD_OUT)
# These positions are added to tokens. The other kinds of positions change attention instead.
SCHEMES = {"sinusoidal": te.Sinusoidal(), "learned": te.Learned(CONTEXT)}

ModelParams = Mapping[str, Mapping[str, Array]]


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
        x = x + _attention(positions, _normalized(x))
        hidden = hk.Linear(4 * D_MODEL)(_normalized(x))
        # So et al., "Primer" (2021), https://arxiv.org/abs/2109.08668: a squared ReLU learns faster
        # than GELU, and is cheaper on a CPU.
        hidden = jnp.square(jax.nn.relu(hidden))
        x = x + hk.Linear(D_MODEL)(hidden)
    return te.linear_logits(_normalized(x), embed.output())


def _normalized(x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """Applies a new layer norm, which has parameters of its own."""
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)


def _attention(positions: str, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """Runs causal attention. Rotary positions turn queries and keys, and ALiBi adds a bias."""
    batch, length, _ = x.shape
    # The positions 0, 1, 2, ... of the tokens.
    tokens = te.TokenPositions.from_offset(0, length)

    def project_to_heads(name: str) -> Float[Array, "b t h c"]:
        """Applies a linear layer of this name, and splits the channels over the heads."""
        projected = hk.Linear(D_MODEL, with_bias=False, name=name)(x)
        return projected.reshape(batch, length, NUM_HEADS, D_MODEL // NUM_HEADS)

    query = project_to_heads("query")
    key = project_to_heads("key")
    value = project_to_heads("value")
    bias = None
    if positions == "rotary":
        query = te.apply_rotary(query, tokens.positions)
        key = te.apply_rotary(key, tokens.positions)
    if positions == "alibi":
        bias = te.alibi_bias(tokens.positions, tokens.positions, num_heads=NUM_HEADS, causal=True)
    mask = te.AttentionMask(tokens, causal=True).dense()
    attended = jax.nn.dot_product_attention(query, key, value, bias=bias, mask=mask)
    return hk.Linear(D_MODEL, name="attended")(attended.reshape(x.shape))


class TrainedModel(NamedTuple):
    """A trained model, and how well it predicts the held-out end of the text.

    Args:
        params: The parameters, as `model` takes them.
        bits_per_byte: The score for texts of each of LENGTHS, as far as the model has positions for
            such texts. Lower is better.
    """

    params: ModelParams
    bits_per_byte: list[float]


def train(text: bytes, positions: str, *, steps: int, seed: int) -> TrainedModel:
    """Trains on a text except its end, and scores the model on the end.

    The model is trained and scored on windows: runs of bytes of one length, as `_windows` makes
    them. Equal arguments give equal results on one machine.
    """
    # All of the text but the end, and the end.
    training_ids, held_out_ids = split(text)
    mesh = Mesh(jax.devices(), ("data",))
    # Batches are split over all devices.
    over_devices = NamedSharding(mesh, PartitionSpec("data"))
    # The loss is compiled once for each shape of windows, and used for training and for scoring.
    compiled_loss = jax.jit(functools.partial(_bits_per_byte, positions))
    params = _train_params(training_ids, positions, compiled_loss, over_devices, steps, seed)
    # There are learned positions only up to the length of the training texts.
    lengths = LENGTHS[:1] if positions == "learned" else LENGTHS
    scores = []
    with _bar(len(lengths), f"{positions}, scoring", unit="length", size=1) as bar:
        for length in lengths:
            loss_of_windows = functools.partial(compiled_loss, params)
            scores.append(_score(loss_of_windows, held_out_ids, over_devices, length))
            bar.update()
    return TrainedModel(params=params, bits_per_byte=scores)


def _train_params(
    ids: np.ndarray,
    positions: str,
    compiled_loss: Callable,
    over_devices: NamedSharding,
    steps: int,
    seed: int,
) -> ModelParams:
    """Trains a model on random windows of a text, and returns the parameters.

    Args:
        ids: The bytes of the text.
        positions: The name of the kind of positions, such as "rotary".
        compiled_loss: The loss of each window, in bits per byte, as a function of the parameters
            and the windows (`_bits_per_byte` for these positions, compiled).
        over_devices: The sharding of batches. Parameters are whole on each device of the mesh.
        steps: The number of training steps.
        seed: The seed of the first parameters and of the batches.
    """
    # All windows of CONTEXT + 1 bytes, one from each byte of the text on.
    windows = _windows(ids, CONTEXT)
    optimizer = _optimizer(steps)
    step = _make_step(compiled_loss, optimizer)
    mesh = over_devices.mesh
    # Parameters and the state of the optimizer are whole on each device.
    whole = NamedSharding(mesh, PartitionSpec())
    batch_size = BATCH_SIZE * mesh.size
    rng = np.random.default_rng(seed)
    with _bar(steps, f"{positions}, compiling", " tokens", batch_size * CONTEXT) as bar:
        # Without jit, each operation would be compiled by itself.
        init = jax.jit(model(positions).init, out_shardings=whole)
        params = init(jax.random.key(seed), jnp.zeros([1, CONTEXT], jnp.uint8))
        # The step returns its state on the mesh. If the first state were elsewhere, the step would
        # be compiled again for the second one.
        state = jax.jit(optimizer.init, out_shardings=whole)(params)
        for done in range(steps):
            starts = rng.integers(0, len(windows), batch_size)
            batch = jax.device_put(windows[starts], over_devices)
            params, state, loss = step(params, state, batch)
            if done % STEPS_BETWEEN_LOSSES == 0:
                bar.set_description(f"{positions}, training", refresh=False)
                bar.set_postfix_str(f"loss={float(loss):.2f}", refresh=False)
            bar.update()
    return params


def _bar(total: int, name: str, unit: str, size: int) -> tqdm:
    """Returns a progress bar, which is hidden unless stderr is a terminal.

    Args:
        total: The number of updates.
        name: What the bar begins with.
        unit: What an update is, in words.
        size: How many units an update is.
    """
    options = {"unit": unit, "unit_scale": size, "bar_format": BAR, "leave": False}
    return tqdm(total=total, desc=name, ncols=79, disable=None, **options)


def _make_step(compiled_loss: Callable, optimizer: optax.GradientTransformation) -> Callable:
    """Returns the compiled training step; `_train_params` describes `compiled_loss`."""

    # The new parameters and state take the memory of the old ones.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: ModelParams, state: optax.OptState, batch: UInt8[Array, "b t"]) -> tuple:
        """Returns the new parameters and state, and the loss before the step."""

        def mean_loss(params: ModelParams) -> Float[Array, ""]:
            """Returns the mean loss of the batch."""
            return compiled_loss(params, batch).mean()

        loss, gradient = jax.value_and_grad(mean_loss)(params)
        updates, new_state = optimizer.update(gradient, state, params)
        new_params = optax.apply_updates(params, updates)
        return new_params, new_state, loss

    return step


def model(positions: str) -> hk.Transformed:
    """Returns `next_byte_logits` as init(rng, ids) and apply(params, ids)."""
    return hk.without_apply_rng(hk.transform(functools.partial(next_byte_logits, positions)))


def _score(
    loss_of_windows: Callable, text: np.ndarray, over_devices: NamedSharding, length: int
) -> float:
    """Returns bits per byte of a text that is read in windows of this length.

    Each byte is scored once, except the first one and a remainder shorter than a window.
    `loss_of_windows` takes windows [b, length + 1], and returns the bits per byte of each window.
    """
    # All windows of length + 1 bytes, one from each byte of the text on.
    all_windows = _windows(text, length)
    # Windows at the multiples of the length. The last byte of each is the first byte of the next.
    windows = all_windows[::length]
    windows_per_device = EVALUATION_TOKENS // length
    batch_size = windows_per_device * over_devices.num_devices
    batch_count = math.ceil(len(windows) / batch_size)
    # All batches have one shape, so `loss_of_windows` compiles once. To fill the last batch,
    # `np.resize` starts again from the first window. The scores of these repeated windows come
    # last, and are left out below.
    batches = np.resize(windows, (batch_count, batch_size, length + 1))
    scores_of_batches = []
    for batch in batches:
        scores_of_batches.append(loss_of_windows(jax.device_put(batch, over_devices)))
    scores = np.concatenate(scores_of_batches)[: len(windows)]
    return float(scores.mean(dtype=np.float64))


def _bits_per_byte(
    positions: str, params: ModelParams, windows: UInt8[Array, "b t"]
) -> Float[Array, "b"]:
    """Returns bits per byte of each window, the mean over all bytes except the first."""
    logits = model(positions).apply(params, windows[:, :-1])
    next_bytes = windows[:, 1:].astype(jnp.int32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, next_bytes)
    # The losses are in nats, and a bit is log(2) nats.
    return losses.mean(-1) / math.log(2)


def split(text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Splits a text of at least SHORTEST_TEXT bytes into bytes to train on and a held-out end."""
    held_out_size = max(LENGTHS[-1] + 1, int(len(text) * HELD_OUT))
    ids = np.frombuffer(text, np.uint8)
    return ids[:-held_out_size], ids[-held_out_size:]


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
    """Returns all windows of a text as a view [starts, length + 1], without a copy.

    Row i has `length` bytes from index i on, and the byte after them. For example, the text 5 6 7 8
    and the length 2 give 5 6 7 and 6 7 8.
    """
    return np.lib.stride_tricks.sliding_window_view(ids, length + 1)
