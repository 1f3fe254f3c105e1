"""The same input layer in several libraries: rows of a table times sqrt(d_model), plus the usual
sinusoid, then dropout.

A line is a layer of jax, or a call without arguments for each mode: `eval` and `train` return the
embeddings, `grad` the gradient of the training output's sum of squares with respect to the table.
Each library is used as its documents say is fastest.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import transformer_embed as te

RATE = 0.1
BATCH, LENGTH, D_MODEL, VOCAB_SIZE = 32, 512, 512, 32_000
FACTOR = np.float32(math.sqrt(D_MODEL))
CONFIG = te.EmbedderConfig(VOCAB_SIZE, D_MODEL, dropout_rate=RATE)
MODES = ("eval", "train", "grad")


class Layer(NamedTuple):
    """`embed(params, rng, ids, is_training)`; `is_compiled` if users do not jit it themselves."""

    embed: Callable
    params: Any
    rng: Any
    is_compiled: bool = False


class Work(NamedTuple):
    """A table [vocab_size, d_model], of which all lines of jax read the same array, so that none of
    them gains from where it lies in memory, and ids [batch, length]."""

    table: Any
    ids: np.ndarray


def make_work(batch=BATCH):
    """Uniform ids, and a table whose scaled rows have unit variance."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((VOCAB_SIZE, D_MODEL), np.float32) / FACTOR
    return Work(jnp.asarray(table), rng.integers(0, VOCAB_SIZE, (batch, LENGTH), np.int32))


def sinusoid(length=LENGTH):
    """[length, d_model] by the textbook formula, in float64, rounded to float32."""
    frequencies = np.exp(np.arange(0, D_MODEL, 2) * -(math.log(10_000) / D_MODEL))
    angles = np.arange(length)[:, None] * frequencies
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, -1).astype(np.float32)


def float32_waves(positions, pairs, base):
    """Sines and cosines of angles that are float32 products, as they are usually written."""
    steps = jnp.arange(pairs, dtype=jnp.float32)
    frequencies = jnp.exp(steps * np.float32(-math.log(base) / pairs))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.sin(angles), jnp.cos(angles)


def calls_of(name, work):
    """The calls of a line; those of jax are `functools.partial` of a function and its arguments."""
    layer = LINES[name](work)
    return layer if isinstance(layer, dict) else jax_calls(layer, jnp.asarray(work.ids))


def jax_calls(layer, ids):
    def loss(params, rng, ids):
        return (layer.embed(params, rng, ids, True) ** 2).sum()

    functions = {"eval": lambda *each: layer.embed(*each, False)}
    functions |= {"train": lambda *each: layer.embed(*each, True)}
    if not layer.is_compiled:
        functions = {mode: jax.jit(function) for mode, function in functions.items()}
    functions |= {"grad": jax.jit(jax.grad(loss))}
    arguments = layer.params, layer.rng, ids
    return {mode: functools.partial(function, *arguments) for mode, function in functions.items()}


def ours(work):
    """`apply` as users call it."""
    apply = te.Embedder(CONFIG).apply

    def embed(params, rng, ids, train):
        return apply(params, rng if train else None, ids, is_training=train)

    return Layer(embed, our_params(work.table), jax.random.key(1), is_compiled=True)


def our_params(table):
    shapes = jax.eval_shape(te.Embedder(CONFIG).init, jax.random.key(0))
    return jax.tree.map(lambda _: table, shapes)


def bare_gather(work):
    """The limit: the rows alone."""
    return Layer(lambda table, rng, ids, train: table[ids], work.table, None)


def haiku(work, encode=sinusoid):
    """The tutorials' module with its mistakes mended: a numpy table that the compiled function
    holds."""

    def embed(params, rng, ids, train):
        def forward(ids):
            x = hk.Embed(VOCAB_SIZE, D_MODEL, name="embed")(ids) * FACTOR + encoding
            return hk.dropout(hk.next_rng_key(), RATE, x) if train else x

        encoding = encode()
        return hk.transform(forward).apply(params, rng, ids)

    return Layer(embed, {"embed": {"embeddings": work.table}}, jax.random.key(1))


def haiku_in_trace(work):
    """The same, the table computed by jax in the function, in float32."""
    waves = lambda: float32_waves(jnp.arange(LENGTH), D_MODEL // 2, 10_000)
    return haiku(work, lambda: jnp.stack(waves(), -1).reshape(LENGTH, D_MODEL))


def flax_nnx(work):
    from flax import nnx  # noqa: PLC0415

    class Model(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(VOCAB_SIZE, D_MODEL, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(RATE, rngs=nnx.Rngs(1))

        def __call__(self, ids, train):
            return self.dropout(self.embed(ids) * FACTOR + encoding, deterministic=not train)

    encoding = sinusoid()
    # Split outside and merged inside: nnx.jit walks the module in Python at each call.
    graph, params, rest = nnx.split(Model(), nnx.Param, ...)
    embed = lambda params, rest, *each: nnx.merge(graph, params, rest, copy=True)(*each)
    return Layer(embed, jax.tree.map(lambda _: work.table, params), rest)


def keras_on_jax(work):
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras  # noqa: PLC0415

    if keras.backend.backend() != "jax":
        raise ImportError(f"KERAS_BACKEND is {keras.backend.backend()}")

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed = keras.layers.Embedding(VOCAB_SIZE, D_MODEL)
            self.dropout = keras.layers.Dropout(RATE, seed=1)

        def call(self, ids, training=False):
            return self.dropout(self.embed(ids) * FACTOR + encoding, training=training)

    encoding, model = sinusoid(), Model()
    model(work.ids[:1])
    state = [variable.value for variable in model.non_trainable_variables]

    def embed(params, state, ids, train):
        return model.stateless_call(params, state, ids, training=train)[0]

    return Layer(embed, [work.table], state)


def equinox(work):
    import equinox as eqx  # noqa: PLC0415

    encoding, dropout = sinusoid(), eqx.nn.Dropout(RATE)

    def embed(table, rng, ids, train):
        rows = jax.vmap(jax.vmap(eqx.nn.Embedding(weight=table)))(ids)
        return dropout(rows * FACTOR + encoding, key=rng, inference=not train)

    return Layer(embed, work.table, jax.random.key(1))


def pytorch(work, *, is_compiled=False):
    import torch  # noqa: PLC0415

    if jax.default_backend() != "cpu":
        raise ImportError(f"jax runs on {jax.default_backend()}, this line on the CPU")
    torch.set_num_threads(os.cpu_count() or 1)
    compiled = functools.partial(torch.compile, dynamic=False, disable=not is_compiled)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            table = torch.tensor(np.asarray(work.table))
            self.embed = torch.nn.Embedding.from_pretrained(table, freeze=False)
            self.register_buffer("sinusoid", torch.tensor(sinusoid()))

        def forward(self, ids):
            x = self.embed(ids) * float(FACTOR) + self.sinusoid
            return torch.nn.functional.dropout(x, RATE, self.training)

    ids = torch.tensor(work.ids, dtype=torch.int64)
    evaluated, trained = Model().eval(), Model().train()
    loss_of = compiled(lambda ids: (trained(ids) ** 2).sum())

    def gradient():
        trained.embed.weight.grad = None
        loss_of(ids).backward()
        return trained.embed.weight.grad

    return {
        "eval": functools.partial(torch.no_grad()(compiled(evaluated)), ids),
        "train": functools.partial(torch.no_grad()(compiled(trained)), ids),
        "grad": gradient,
    }


OURS, GATHER, CONSTANT = "ours", "bare gather", "Haiku, table a constant"
LINES = {
    OURS: ours,
    GATHER: bare_gather,
    CONSTANT: haiku,
    "Haiku, table in the trace": haiku_in_trace,
    "Flax": flax_nnx,
    "Keras on JAX": keras_on_jax,
    "Equinox": equinox,
    "PyTorch eager": pytorch,
    "PyTorch compiled": functools.partial(pytorch, is_compiled=True),
}
