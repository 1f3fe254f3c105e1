"""Tables, batches and meshes for tests, and a training by rows with its oracle."""

import functools

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from meshes import AUTO, EXPLICIT, put

import transformer_embed as te
from transformer_embed._src.tables.sharded.row_order import RowOrder

SPEC = PartitionSpec
__all__ = ["AUTO", "EXPLICIT", "put"]
NAMES = ("data", "model", "extra")
BOTH = ("data", "model")

# Of the 8 shards of a contiguous table, one has padding alone.
VOCAB, WIDTH, SHARDS, PAD = 300, 8, 16, 3
RATE, STEPS = 0.1, 3
# Gradients are sums of at most some hundred cotangents below 4, rounded by 2**-24 each: Adam turns
# a relative error of 2**-16 in a gradient into one of that size in a step of at most RATE, but for
# gradients near its epsilon of 1e-8, which random ones are not.
TRAINED_ERROR = STEPS * RATE * 2.0**-13


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).clip(-4, 4)


TABLE = normal(0, VOCAB, WIDTH)
# Repeats on one device and on all, padding, and ids out of range at both ends.
BATCHES = [
    np.random.default_rng(seed).integers(-3, VOCAB + 5, (8, 4)).astype(np.int32)
    for seed in range(STEPS)
]
for batch in BATCHES:
    batch[:, 0], batch[2:4, 1], batch[0, 1:3], batch[1, 1:3] = 7, 7, (PAD, PAD), (-2, VOCAB + 1)
WEIGHTS = [normal(10 + seed, 8, 4, WIDTH) for seed in range(STEPS)]
# Of the loss below, with respect to the whole table.
GRADIENTS = np.zeros((STEPS, VOCAB, WIDTH))
for gradient, ids, weights in zip(GRADIENTS, BATCHES, WEIGHTS, strict=True):
    counted = (ids >= 0) & (ids < VOCAB) & (ids != PAD)
    np.add.at(gradient, ids[counted], weights[counted])


def mesh_of(shape, kind=AUTO):
    return meshes.mesh_of(shape, NAMES[: len(shape)], kind)


def shard(mesh, spec, table=TABLE, **options):
    return te.sharding.shard_params({"t": table}, mesh, {"t": spec}, tables="t", **options)["t"]


def stripe(mesh, spec=None, table=TABLE, shards=SHARDS, **options):
    spec = SPEC(mesh.axis_names) if spec is None else spec
    return shard(mesh, spec, table, stripe="t", virtual_shards=shards, **options)


def on_host(tree):
    """Tables in vocabulary order, once the padding of a contiguous one is found to be zeros."""

    def read(leaf):
        if not isinstance(leaf, te.sharding.Sharded):
            return np.asarray(leaf)
        rows = leaf.in_vocabulary_order()
        if not leaf.split.order.is_striped:
            assert not np.asarray(leaf.array)[len(rows) :].any()
        return rows

    return jax.tree.map(read, tree, is_leaf=lambda leaf: isinstance(leaf, te.sharding.Sharded))


def placed_state(optimizer, params):
    """The state of an optimizer, placed as a step leaves it: with a count that is placed otherwise,
    the first step would compile twice."""
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    place = lambda leaf: leaf if leaf.ndim else put(mesh, leaf)
    return jax.tree.map(place, optimizer.init(params))


def restored(path, target):
    """An Orbax checkpoint, on the mesh of a tree of shapes."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is of the test extra")
    args = jax.tree.map(
        lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape), target
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(
            path, args=ocp.args.PyTreeRestore(item=target, restore_args=args)
        )


def owned_by_one(count, devices=8):
    """Ids that one device of a striped table owns."""
    order = RowOrder(VOCAB, SHARDS)
    owners = order.slots(np.arange(VOCAB, dtype=np.int32)) // (order.size // devices)
    return np.flatnonzero(owners == 2)[:count].astype(np.int32)


ADAM = optax.adam(RATE)


def loss(params, ids, weights):
    rows = te.lookup(params["t"], ids, pad_id=PAD, out_of_range="zero")
    return jnp.sum(rows.astype(jnp.float32) * weights)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def row_step(params, state, ids, weights):
    """A step, the loss, and the norm of its gradient."""
    value, grads = te.rows.value_and_grad(loss, ids={"t": ids})(params, ids, weights)
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)))
    return *te.rows.update(ADAM, grads, state, params), value, norm
