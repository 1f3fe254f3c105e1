"""Interleaved tables, batches and meshes for tests."""

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import transformer_embed as te
from transformer_embed._src.sharded.row_order import RowOrder

SPEC = PartitionSpec
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES = ((1, 8), (2, 4), (8, 1), (2, 2, 2))
NAMES = ("data", "model", "extra")

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


def mesh_of(shape, kind=AUTO):
    names = NAMES[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def put(mesh, array, *axes):
    return jax.device_put(
        array, NamedSharding(mesh, SPEC(*axes) if axes else SPEC(mesh.axis_names))
    )


def interleave(mesh, spec=None, table=TABLE, shards=SHARDS, **options):
    rules = {"*": SPEC(mesh.axis_names) if spec is None else spec}
    return te.sharding.shard_params(
        {"t": table}, mesh, rules, tables="t", interleave="t", virtual_shards=shards, **options
    )["t"]


def owned_by_one(count, devices=8):
    """Ids that one device owns."""
    order = RowOrder(VOCAB, SHARDS)
    owners = order.slots(np.arange(VOCAB, dtype=np.int32)) // (order.size // devices)
    return np.flatnonzero(owners == 2)[:count].astype(np.int32)
