"""What each device sends in a training step of a table, on paper, the formulae held against programs compiled for 8 CPU devices.

PYTHONPATH=. python tests/benchmarks/sharding.py
"""

import functools
import os
import pathlib
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from collectives import collectives
from harness import environment, markdown_table
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import transformer_embed as te

WIDTH, IDS, MEMORY = 128, 16384, 64e9
DEVICES, VOCABULARIES = (2, 64, 4096), (10**6, 10**8, 10**9)
# A float32 table and Adam's two moments.
BYTES_HELD = 3 * 4


def all_reduce(size, devices):
    """Bytes that each device sends around a ring: all but one part of `size` bytes, once to sum and once to tell."""
    return 2 * (devices - 1) / devices * size


def dense(vocab_size, data, shards, width=WIDTH, ids=IDS):
    """A whole table on every device: the gradient of it all, summed."""
    return all_reduce(4 * vocab_size * width, data * shards)


def in_shards(vocab_size, data, shards, width=WIDTH, ids=IDS):
    """Rows of the batch of the devices that share a table, summed over the shards; the gradient of a shard, over the data axis."""
    padded = -(-vocab_size // shards)
    return all_reduce(4 * ids * shards * width, shards) + all_reduce(4 * padded * width, data)


def by_rows(vocab_size, data, shards, width=WIDTH, ids=IDS):
    """The ids of the whole batch; its distinct rows, summed over the shards; their gradient, over the data axis."""
    rows = min(vocab_size, ids * data * shards)
    rows = rows if rows <= 1024 else -(-rows // 1024) * 1024
    return 4 * ids * shards * (data - 1) + all_reduce(4 * rows * width, shards) + all_reduce(4 * rows * width, data)


WAYS = {"dense": dense, "in shards": in_shards, "by rows": by_rows}


def best(way, vocab_size, devices):
    """The fewest bytes of the meshes data x shards on which the table fits, and that mesh; None where it fits on none."""
    shards = [2**i for i in range(devices.bit_length()) if devices % 2**i == 0] if way != "dense" else [1]
    fitting = [each for each in shards if BYTES_HELD * vocab_size * WIDTH / each <= MEMORY]
    return min(((WAYS[way](vocab_size, devices // each, each), (devices // each, each)) for each in fitting), default=None)


def on_paper():
    rows = []
    for vocab_size in VOCABULARIES:
        for devices in DEVICES:
            cells = [_cell(way, vocab_size, devices) for way in WAYS]
            rows.append([f"{vocab_size:.0e}", str(devices), *cells])
    return markdown_table(["rows", "devices", *WAYS], rows)


def _cell(way, vocab_size, devices):
    found = best(way, vocab_size, devices)
    if found is None:
        return f"does not fit ({dense(vocab_size, devices, 1) / 1e6:,.0f} MB)" if way == "dense" else "does not fit"
    sent, (data, shards) = found
    return f"{sent / 1e6:,.0f} MB, {data} x {shards}"


def compiled(way, data, shards, vocab_size=4096, width=16, ids=32):
    """Bytes that each device sends in a step of SGD, by the compiled program."""
    mesh = jax.make_mesh((data, shards), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec() if way == "dense" else PartitionSpec("model")
    batch = PartitionSpec(("data", "model") if way == "dense" else "data")
    init = {"embeddings": np.ones((vocab_size, width), np.float32)}
    params = te.sharding.shard_params(init, mesh, {"embeddings": spec}, tables="embeddings")
    tokens = jax.device_put(np.zeros(ids * data * shards, np.int32), NamedSharding(mesh, batch))
    weights = jax.device_put(np.ones((ids * data * shards, width), np.float32), NamedSharding(mesh, batch))
    optimizer = optax.sgd(0.1)

    def step(params, state, tokens, weights):
        loss = lambda params: jnp.sum(te.lookup(params["embeddings"], tokens) ** 2 * weights)
        if way == "by rows":
            _, grads = te.rows.value_and_grad(loss, ids={"embeddings": tokens})(params)
            return te.rows.update(optimizer, grads, state, params)
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    program = jax.jit(step).lower(params, optimizer.init(params), tokens, weights).compile()
    paper = functools.partial(WAYS[way], vocab_size, data, shards, width, ids)
    return sum(each.sent for each in collectives(program)), paper()


def main():
    found = environment(["jax", "jaxlib", "numpy"])
    print(f"{found['platform']}, {found['cpus']} cores, {found['versions']}\n")
    print(
        f"Bytes that each device sends in a step: width {WIDTH}, {IDS} ids a device, float32; data x shards, the best that fits in 64 GB.\n"
    )
    print(on_paper() + "\n")
    checks = []
    for way in WAYS:
        for data, shards in ((8, 1), (4, 2), (2, 4), (1, 8)):
            got, paper = compiled(way, data, shards)
            checks.append([way, f"{data} x {shards}", f"{paper:,.0f}", f"{got:,.0f}"])
            assert got == paper, checks[-1]
    print("Eight CPU devices, 4096 rows of width 16, 32 ids a device:\n")
    print(markdown_table(["way", "data x shards", "bytes, on paper", "bytes, compiled"], checks))


if __name__ == "__main__":
    main()
