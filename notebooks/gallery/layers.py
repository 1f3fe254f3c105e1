"""What all programs of the gallery share: the layers of a Transformer, text, and a training loop.

The layers are plain Haiku. A program of the gallery differs from its plain counterpart only in what
comes before and after these layers.
"""

import functools
import os
import pathlib
import sys
import time

import haiku as hk
import jax
import numpy as np
import optax


def attention(x, mask, memory=None, update=lambda keys, values: (keys, values), heads=4):
    """Attends from x to `memory`, or to x itself. `update` may put keys and values into a cache."""
    memory = x if memory is None else memory
    width = x.shape[-1]

    def split(array):
        return array.reshape(*array.shape[:2], heads, width // heads)

    queries = split(hk.Linear(width, name="queries")(x))
    keys = split(hk.Linear(width, name="keys")(memory))
    values = split(hk.Linear(width, name="values")(memory))
    keys, values = update(keys, values)
    attended = jax.nn.dot_product_attention(queries, keys, values, mask=mask)
    return hk.Linear(width, name="output")(attended.reshape(x.shape))


@hk.transparent
def layer(x, mask, memory=None, memory_mask=None, update=lambda *pair: pair):
    """Applies one Transformer layer, with a norm before each part, as GPT-2 has it."""

    def norm(x):
        return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)

    x = x + hk.to_module(attention)("attention")(norm(x), mask, update=update)
    if memory is not None:
        x = x + hk.to_module(attention)("cross_attention")(norm(x), memory_mask, memory)
    return x + hk.nets.MLP([4 * x.shape[-1], x.shape[-1]], activation=jax.nn.gelu)(norm(x))


def stack(x, mask, layers=2, **options):
    """Applies some layers and a final norm."""
    for _ in range(layers):
        x = layer(x, mask, **options)
    return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)


@functools.cache
def source_lines():
    """Returns the lines of Python's standard library as bytes, those to train on and held-out ones."""
    folder = pathlib.Path(os.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    lines = [line for line in text.split(b"\n") if len(line.strip()) >= 8]
    ids = np.zeros((len(lines), 64), np.int32)  # 0 is padding, and does not occur in the text
    for row, line in zip(ids, lines, strict=True):
        row[: len(line)] = np.frombuffer(line[:64], np.uint8)
    order = np.random.default_rng(0).permutation(len(ids))
    return ids[order[2048:]], ids[order[:2048]]


def training(init, loss_fn, next_batch, steps, seed=0, learning_rate=1e-3, make_optimizer=optax.adam):
    """Returns a training step, and the parameters and optimizer state to start from."""
    schedule = optax.warmup_cosine_decay_schedule(0, learning_rate, steps // 10, steps)
    optimizer = make_optimizer(schedule)

    @jax.jit
    def step(params, state, rng, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, rng, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = init(jax.random.key(seed), next_batch(np.random.default_rng(seed)))
    return step, params, optimizer.init(params)


def run(step, params, state, *, next_batch, steps, seed=0):
    """Trains. Returns the parameters, the loss of each step, and the median seconds per step."""
    random, losses, seconds = np.random.default_rng(seed), [], []
    for rng in jax.random.split(jax.random.key(seed), steps):
        batch = next_batch(random)
        start = time.perf_counter()
        params, state, loss = step(params, state, rng, batch)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
        if sys.stderr.isatty():
            print(f"\rstep {len(losses)} of {steps}: loss {loss:.3f} ", end="", file=sys.stderr)
    return params, np.array(losses), float(np.median(seconds))
