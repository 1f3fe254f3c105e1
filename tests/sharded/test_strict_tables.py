"""Every public function that takes a table or parameters, with every kind of table, under JAX's
strict modes."""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import public
import pytest
from contexts import set_mesh
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import transformer_embed as te

NAME = "transformer_embedding/~/token_embedding"
PATTERN = "*/token_embedding/embeddings"
CONFIG = te.EmbedderConfig(vocab_size=37, d_model=8, scheme=te.Learned(8), pad_id=0)
IDS = np.arange(16, dtype=np.int32).reshape(8, 2)
X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(8, 2, 8)
KINDS = {
    "plain": None,
    "rows": {"rules": {PATTERN: PartitionSpec("model")}},
    "columns": {"rules": {PATTERN: PartitionSpec(None, "model")}},
    "interleaved": {
        "rules": {PATTERN: PartitionSpec(("data", "model"))},
        "interleave": PATTERN,
        "virtual_shards": 16,
    },
}


@contextlib.contextmanager
def strict_modes():
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.debug_nans(True),
        jax.legacy_prng_key("error"),
    ):
        yield


def table_of(params):
    return params[NAME]["embeddings"]


def lookup(params, ids, x, tmp_path):
    def loss(params):
        return jnp.sum(te.lookup(table_of(params), ids, pad_id=0) * x)

    return jax.value_and_grad(loss)(params)


def linear_logits(params, ids, x, tmp_path):
    def loss(params, x):
        logits = te.linear_logits(x, table_of(params), pad_id=0)
        return jnp.sum(jnp.where(logits > -1e9, logits, 0))

    return jax.value_and_grad(loss)(params, x.astype(jnp.bfloat16))


def linear_cross_entropy(params, ids, x, tmp_path):
    loss = functools.partial(te.linear_cross_entropy, labels=ids, pad_id=0, label_smoothing=0.1)
    return jax.value_and_grad(lambda params, x: loss(x, table_of(params)))(
        params, x.astype(jnp.bfloat16)
    )


def update(params, ids, x, tmp_path):
    adam, of_table = optax.adam(0.1), {NAME: {"embeddings": ids}}

    def loss(params):
        return jnp.sum(te.lookup(table_of(params), ids) * x)

    _, grads = te.rows.value_and_grad(loss, ids=of_table, max_rows=8)(params)
    more = te.rows.value_and_grad(loss, ids=of_table)(params)[1]
    with jax.numpy_dtype_promotion("standard"):
        # optax multiplies a count by a float.
        return te.rows.update(adam, te.rows.add(grads, more), adam.init(params), params)


def resize(params, ids, x, tmp_path):
    more = te.resize_positions(te.resize_vocabulary(params, 50, jax.random.key(1)), 16)
    return te.resize_vocabulary(more, 20)


def load(params, ids, x, tmp_path):
    return te.sharding.exchange_load(table_of(params), ids)


def save(params, ids, x, tmp_path):
    te.pretrained.save_embedder(tmp_path / "model.safetensors", CONFIG, params)
    return te.pretrained.load_embedder(tmp_path / "model.safetensors").params


CALLS = {
    "lookup": lookup,
    "linear_logits": linear_logits,
    "linear_cross_entropy": linear_cross_entropy,
    "rows.update": update,
    "rows.add": update,
    "resize_vocabulary": resize,
    "resize_positions": resize,
    "pretrained.save_embedder": save,
    "sharding.exchange_load": load,
    "sharding.shard_params": lambda params, *_: params,
}
ON_THE_HOST = (resize, save, load, CALLS["sharding.shard_params"])
ARGUMENTS = {"table", "params", "grads"}


def test_every_public_function_of_tables_is_here():
    functions = {name: functools.reduce(getattr, name.split("."), te) for name in public.EVERY}
    takes_tables = {
        name
        for name, function in functions.items()
        if inspect.isfunction(function) and ARGUMENTS & {*inspect.signature(function).parameters}
    }
    # pmean runs where each device has a whole table.
    assert takes_tables == set(CALLS) | {"rows.pmean"}


CASES = [
    pytest.param(kind, table, marks=[] if kind == AxisType.Auto else pytest.mark.slow)
    for kind in (AxisType.Auto, AxisType.Explicit)
    for table in KINDS
]


@pytest.mark.parametrize(
    "call",
    dict.fromkeys(CALLS.values()),
    ids=lambda call: call.__name__,
)
@pytest.mark.parametrize(("kind", "table"), CASES)
def test_tables_under_all_modes_at_once(call, kind, table, tmp_path):
    if table == "interleaved" and call in (linear_logits, linear_cross_entropy):
        pytest.skip("is refused: its rows are not in vocabulary order")
    if table != "interleaved" and call is load:
        pytest.skip("is refused: rows are not exchanged")
    if table == "columns" and call is update:
        pytest.skip("is refused: rows train whole")
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    params = te.Embedder(CONFIG).init(jax.random.key(0))
    with set_mesh(mesh), strict_modes():
        if KINDS[table]:
            params = te.sharding.shard_params(params, mesh, **KINDS[table])
        batch = {"interleaved": ("data", "model")}.get(table, "data")
        ids, x = (
            jax.device_put(array, NamedSharding(mesh, PartitionSpec(batch))) for array in (IDS, X)
        )
        run = call if call in ON_THE_HOST else jax.jit(call, static_argnums=3)
        found = run(params, ids, x, tmp_path)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
