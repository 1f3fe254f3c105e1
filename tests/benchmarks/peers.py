"""The same input layer in several libraries: rows of a table times sqrt(d_model), plus the usual
sinusoid, then dropout.

A builder takes the work and returns a call without arguments for each mode: `eval` and `train`
return the embeddings, `grad` the gradient of the training output's sum of squares with respect to
the table. A call that jax compiles is a `functools.partial` of the function and its arguments, so
that it can be lowered as well. Each library is used as its documents say is fastest.
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

Calls = dict[str, Callable[[], Any]]


class Work(NamedTuple):
    """One table [vocab_size, d_model], in float32, and ids [batch, length], on the host; `dtype` is
    that of tables and results.

    All lines of jax read the same `device_table`, so that none of them gains from where its table
    lies in memory.
    """

    table: np.ndarray
    ids: np.ndarray
    dtype: str
    device_table: jax.Array

    @property
    def d_model(self) -> int:
        return self.table.shape[1]

    @property
    def factor(self) -> float:
        return math.sqrt(self.d_model)

    def sinusoid(self) -> np.ndarray:
        """The table for 0..length-1, of `dtype`."""
        return usual_sinusoid(self.ids.shape[1], self.d_model).astype(jnp.dtype(self.dtype))


def make_work(batch: int = BATCH, length: int = LENGTH, dtype: str = "float32") -> Work:
    """Uniform ids, and a table whose scaled rows have unit variance."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((VOCAB_SIZE, D_MODEL), np.float32) / np.float32(math.sqrt(D_MODEL))
    return Work(
        table,
        rng.integers(0, VOCAB_SIZE, (batch, length), np.int32),
        dtype,
        jnp.asarray(table, dtype),
    )


def usual_sinusoid(length: int, d_model: int) -> np.ndarray:
    """[length, d_model] by the textbook formula, in float64, rounded to float32."""
    angles = np.arange(length)[:, None] * np.exp(
        np.arange(0, d_model, 2) * -(math.log(10_000) / d_model)
    )
    return (
        np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, d_model).astype(np.float32)
    )


def sum_of_squares(x):
    return (x.astype(jnp.float32) ** 2).sum()


def jax_calls(embed: Callable[..., jax.Array], params: Any, rng: Any, ids: jax.Array) -> Calls:
    """The calls of embed(params, rng, ids, train)."""
    functions = {
        "eval": lambda params, rng, ids: embed(params, rng, ids, False),
        "train": lambda params, rng, ids: embed(params, rng, ids, True),
        "grad": jax.grad(lambda params, rng, ids: sum_of_squares(embed(params, rng, ids, True))),
    }
    return {
        mode: functools.partial(jax.jit(function), params, rng, ids)
        for mode, function in functions.items()
    }


def ours(work: Work) -> Calls:
    """`apply` as users call it: it is compiled already."""
    config = te.EmbedderConfig(
        VOCAB_SIZE, work.d_model, dropout_rate=RATE, param_dtype=work.dtype, dtype=work.dtype
    )
    apply = te.Embedder(config).apply
    params = our_params(config, work.device_table)
    rng, ids = jax.random.key(1), jnp.asarray(work.ids)
    grad = jax_calls(
        lambda params, rng, ids, train: apply(params, rng, ids, is_training=train), params, rng, ids
    )["grad"]
    return {
        "eval": functools.partial(apply, params, None, ids, is_training=False),
        "train": functools.partial(apply, params, rng, ids, is_training=True),
        "grad": grad,
    }


def our_params(config: te.EmbedderConfig, table: jax.Array) -> Any:
    return jax.tree.map(
        lambda _: table, jax.eval_shape(te.Embedder(config).init, jax.random.key(0))
    )


def bare_gather(work: Work) -> Calls:
    """The limit: the rows alone."""
    return jax_calls(
        lambda table, rng, ids, train: table[ids], work.device_table, None, jnp.asarray(work.ids)
    )


def haiku_constant(work: Work) -> Calls:
    """The tutorials' module with its mistakes mended: a numpy table that the compiled function
    holds."""
    sinusoid = work.sinusoid()
    return _haiku(work, lambda: sinusoid)


def haiku_in_trace(work: Work) -> Calls:
    """The same, the table computed by jax in the function, in float32."""

    def sinusoid():
        frequencies = jnp.exp(
            jnp.arange(0, work.d_model, 2, dtype=jnp.float32)
            * np.float32(-math.log(10_000) / work.d_model)
        )
        angles = jnp.arange(work.ids.shape[1], dtype=jnp.float32)[:, None] * frequencies
        return (
            jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1)
            .reshape(-1, work.d_model)
            .astype(work.dtype)
        )

    return _haiku(work, sinusoid)


def _haiku(work: Work, sinusoid: Callable[[], Any]) -> Calls:
    def embed(params, rng, ids, train):
        def forward(ids):
            x = (
                hk.Embed(VOCAB_SIZE, work.d_model, name="embed")(ids)
                * np.array(work.factor, work.dtype)
                + sinusoid()
            )
            return hk.dropout(hk.next_rng_key(), RATE, x) if train else x

        return hk.transform(forward).apply(params, rng, ids)

    return jax_calls(
        embed,
        {"embed": {"embeddings": work.device_table}},
        jax.random.key(1),
        jnp.asarray(work.ids),
    )


def flax_nnx(work: Work) -> Calls:
    from flax import nnx  # noqa: PLC0415

    class Model(nnx.Module):
        def __init__(self):
            dtypes = {"dtype": jnp.dtype(work.dtype), "param_dtype": jnp.dtype(work.dtype)}
            self.embed = nnx.Embed(VOCAB_SIZE, work.d_model, rngs=nnx.Rngs(0), **dtypes)
            self.dropout = nnx.Dropout(RATE, rngs=nnx.Rngs(1))

        def __call__(self, ids, train):
            x = self.embed(ids) * np.array(work.factor, work.dtype) + sinusoid
            return self.dropout(x, deterministic=not train)

    sinusoid = work.sinusoid()
    # Split outside and merged inside: nnx.jit walks the module in Python at each call.
    graph, params, rest = nnx.split(Model(), nnx.Param, ...)
    params = jax.tree.map(lambda _: work.device_table, params)
    return jax_calls(
        lambda params, rest, ids, train: nnx.merge(graph, params, rest, copy=True)(ids, train),
        params,
        rest,
        jnp.asarray(work.ids),
    )


def keras_on_jax(work: Work) -> Calls:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras  # noqa: PLC0415

    if keras.backend.backend() != "jax":
        raise ImportError(f"KERAS_BACKEND is {keras.backend.backend()}")

    class Model(keras.Model):
        def __init__(self):
            super().__init__(dtype=work.dtype)
            self.embed = keras.layers.Embedding(VOCAB_SIZE, work.d_model, dtype=work.dtype)
            self.dropout = keras.layers.Dropout(RATE, seed=1, dtype=work.dtype)

        def call(self, ids, training=False):
            return self.dropout(
                self.embed(ids) * np.array(work.factor, work.dtype) + sinusoid, training=training
            )

    sinusoid, ids = work.sinusoid(), jnp.asarray(work.ids)
    model = Model()
    model(ids[:1])
    state = [variable.value for variable in model.non_trainable_variables]

    def embed(params, state, ids, train):
        return model.stateless_call(params, state, ids, training=train)[0]

    return jax_calls(embed, [work.device_table], state, ids)


def equinox(work: Work) -> Calls:
    import equinox as eqx  # noqa: PLC0415

    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        dropout: eqx.nn.Dropout

        def __call__(self, rng, ids, train):
            x = jax.vmap(jax.vmap(self.embed))(ids) * np.array(work.factor, work.dtype) + sinusoid
            return self.dropout(x, key=rng, inference=not train)

    sinusoid, ids, rng = work.sinusoid(), jnp.asarray(work.ids), jax.random.key(1)
    model = Model(eqx.nn.Embedding(weight=work.device_table), eqx.nn.Dropout(RATE))
    forward = eqx.filter_jit(lambda model, rng, ids, train: model(rng, ids, train))
    gradient = eqx.filter_jit(
        eqx.filter_grad(lambda model, rng, ids: sum_of_squares(model(rng, ids, True)))
    )
    return {
        "eval": lambda: forward(model, None, ids, False),
        "train": lambda: forward(model, rng, ids, True),
        "grad": lambda: gradient(model, rng, ids).embed.weight,
    }


def pytorch_eager(work: Work) -> Calls:
    return _pytorch(work, lambda function: function)


def pytorch_compiled(work: Work) -> Calls:
    import torch  # noqa: PLC0415

    return _pytorch(work, functools.partial(torch.compile, dynamic=False))


def _pytorch(work: Work, compiled: Callable[[Any], Any]) -> Calls:
    import torch  # noqa: PLC0415

    if jax.default_backend() != "cpu":
        raise ImportError(f"jax runs on {jax.default_backend()}, this line on the CPU")
    torch.set_num_threads(os.cpu_count() or 1)
    dtype = getattr(torch, work.dtype)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding.from_pretrained(
                torch.tensor(work.table, dtype=dtype), freeze=False
            )
            self.register_buffer(
                "sinusoid",
                torch.tensor(usual_sinusoid(work.ids.shape[1], work.d_model), dtype=dtype),
            )

        def forward(self, ids):
            return torch.nn.functional.dropout(
                self.embed(ids) * work.factor + self.sinusoid, RATE, self.training
            )

    ids = torch.tensor(work.ids, dtype=torch.int64)
    evaluated, trained = Model().eval(), Model().train()
    forward, forward_dropping = compiled(evaluated), compiled(trained)

    def without_gradient(function):
        with torch.no_grad():
            return function(ids)

    def gradient():
        trained.embed.weight.grad = None
        loss_of(ids).backward()
        return trained.embed.weight.grad

    loss_of = compiled(lambda ids: (trained(ids).float() ** 2).sum())
    return {
        "eval": lambda: without_gradient(forward),
        "train": lambda: without_gradient(forward_dropping),
        "grad": gradient,
    }


OURS, GATHER, CONSTANT, IN_TRACE, COMPILED = (
    "ours",
    "bare gather",
    "Haiku, table a constant",
    "Haiku, table in the trace",
    "PyTorch compiled",
)
BUILDERS: dict[str, Callable[[Work], Calls]] = {
    OURS: ours,
    GATHER: bare_gather,
    CONSTANT: haiku_constant,
    IN_TRACE: haiku_in_trace,
    "Flax": flax_nnx,
    "Keras on JAX": keras_on_jax,
    "Equinox": equinox,
    "PyTorch eager": pytorch_eager,
    COMPILED: pytorch_compiled,
}
