"""What each device sends in a training step of a sharded table: formulas, checked against programs
compiled for 8 CPU devices.

Usage: python tests/benchmarks/sharding.py [--pods] [--zipf]

Without an option: the formulas and their check. --pods compiles a step by exchange for TPU pods
that are not there (a few minutes each; needs `pip install "jax[tpu]"`). --zipf counts what each
device has to send where ids follow a Zipf distribution.
"""

import itertools
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
from harness import markdown_table, parser_of, print_machine
from jax.sharding import NamedSharding, PartitionSpec
from meshes import EXPLICIT

import transformer_embed as te
from transformer_embed._src.rows.buffers import plan_buffers

WIDTH, IDS, MEMORY = 128, 16384, 64e9
DEVICES, VOCABULARIES = (2, 64, 4096), (10**6, 10**8, 10**9)
# A float32 table and Adam's two moments.
BYTES_HELD = 3 * 4
# Every mesh here divides it.
ROW_MULTIPLE = 4096


def rows_of(vocab_size):
    return te.EmbedderConfig(vocab_size, WIDTH, row_multiple=ROW_MULTIPLE).rows


def all_reduce(size, devices):
    """Bytes that each device sends around a ring: all but one part of `size` bytes, once to sum and
    once to tell."""
    return 2 * (devices - 1) / devices * size


def dense(vocab_size, data, shards, width=WIDTH, ids=IDS):
    """A whole table on every device: the gradient of it all, summed."""
    return all_reduce(4 * vocab_size * width, data * shards)


def in_shards(vocab_size, data, shards, width=WIDTH, ids=IDS):
    """Rows of the batch of the devices that share a table, summed over the shards; the gradient of
    a shard, over the data axis."""
    shard = rows_of(vocab_size) // shards
    return all_reduce(4 * ids * shards * width, shards) + all_reduce(4 * shard * width, data)


def by_rows(vocab_size, data, shards, width=WIDTH, ids=IDS):
    """The ids of the whole batch; its distinct rows, summed over the shards; their gradient, over
    the data axis."""
    rows = min(vocab_size, ids * data * shards)
    rows = rows if rows <= 1024 else -(-rows // 1024) * 1024
    read = all_reduce(4 * rows * width, shards) + all_reduce(4 * rows * width, data)
    return 4 * ids * shards * (data - 1) + read


def by_exchange(vocab_size, data, shards, width=WIDTH, ids=IDS):
    """The ids of the rows that are asked for, the rows, and their gradients. The table is split
    over all devices."""
    devices = data * shards
    shard = rows_of(vocab_size) // devices
    room, _ = plan_buffers(min(ids, vocab_size), devices, shard, devices, 1.0)
    return (4 + 2 * 4 * width) * room * (devices - 1)


WAYS = {"dense": dense, "sharded": in_shards, "by rows": by_rows, "by exchange": by_exchange}


def cell(way, vocab_size, devices):
    """The fewest bytes of the meshes data x shards on which the table fits, and that mesh."""
    counts = [1] if way == "dense" else [2**i for i in range(devices.bit_length())]
    found = []
    for shards in counts:
        data = devices // shards
        copies = 1 if way == "by exchange" else data
        if BYTES_HELD * vocab_size * WIDTH * copies <= MEMORY * devices:
            found.append((WAYS[way](vocab_size, data, shards), data, shards))
    if not found:
        return "does not fit"
    sent, data, shards = min(found)
    return f"{sent / 1e6:,.0f} MB, {data} x {shards}"


def on_paper():
    rows = [
        [f"{vocab_size:.0e}", f"{devices}", *(cell(way, vocab_size, devices) for way in WAYS)]
        for vocab_size, devices in itertools.product(VOCABULARIES, DEVICES)
    ]
    return markdown_table(["rows", "devices", *WAYS], rows)


def step_of(way, optimizer):
    """A training step whose loss is the sum of squares of the rows, weighted."""
    capacity = 1.0 if way == "by exchange" else None

    def loss(params, tokens, weights):
        return jnp.sum(te.lookup(params["table"], tokens) ** 2 * weights)

    def step(params, state, tokens, weights):
        if way in ("by rows", "by exchange"):
            gradient = te.rows.value_and_grad(loss, ids={"table": tokens}, capacity=capacity)
            _, grads = gradient(params, tokens, weights)
            return te.rows.apply_gradients(optimizer, grads, state, params)
        updates, state = optimizer.update(jax.grad(loss)(params, tokens, weights), state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def arguments_of(way, mesh, optimizer, vocab_size, width, ids):
    """The shapes and shardings of the arguments of a step: float32, `ids` tokens a device."""
    over = {"dense": None, "by exchange": mesh.axis_names}.get(way, "model")
    batch = "data" if over == "model" else mesh.axis_names

    def shape(shape, axes, dtype=jnp.float32):
        sharding = NamedSharding(mesh, PartitionSpec(axes) if shape else PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    params = {"table": shape((rows_of(vocab_size), width), over)}
    state = jax.tree.map(
        lambda leaf: shape(leaf.shape, over, leaf.dtype), jax.eval_shape(optimizer.init, params)
    )
    tokens = ids * mesh.size
    return params, state, shape((tokens,), batch, jnp.int32), shape((tokens, width), batch)


def checks():
    """Bytes that each device sends in a step of SGD, by the formula and by the compiled program:
    they are equal."""
    rows, optimizer, sizes = [], optax.sgd(0.1), {"vocab_size": 4096, "width": 16, "ids": 32}
    for way, formula in WAYS.items():
        for data, shards in ((8, 1), (4, 2), (2, 4), (1, 8)):
            mesh = jax.make_mesh((data, shards), ("data", "model"))
            arguments = arguments_of(way, mesh, optimizer, **sizes)
            program = step_of(way, optimizer).lower(*arguments).compile()
            got = sum(each.sent for each in collectives(program))
            paper = formula(sizes["vocab_size"], data, shards, sizes["width"], sizes["ids"])
            rows.append([way, f"{data} x {shards}", f"{paper:,.0f}", f"{got:,.0f}"])
            assert got == paper, rows[-1]
    return markdown_table(["way", "data x shards", "bytes, by formula", "bytes, compiled"], rows)


# TPU pods: rows of the table, and the mesh.
PODS = {"tpu:v5e:16x16": (10**8, (16, 16)), "tpu:v5p:16x16x16": (10**9, (64, 64))}


def compiled_for_pods():
    """Steps of Adam by exchange."""
    from targets import target  # noqa: PLC0415

    rows, optimizer = [], optax.adam(1e-3)
    for name, (vocab_size, (data, shards)) in PODS.items():
        on = target(name)
        mesh = on.mesh(data=data, model=shards)
        arguments = arguments_of("by exchange", mesh, optimizer, vocab_size, WIDTH, IDS)
        facts = on.facts(step_of("by exchange", optimizer), *arguments)
        kinds = ", ".join(sorted({each.kind for each in facts.collectives}))
        sizes = [f"{size / 1e6:,.1f}" for size in (facts.sent, facts.temporaries)]
        rows.append([name, f"{vocab_size:.0e}", str(mesh.size), *sizes, kinds])
    columns = ["target", "rows", "chips", "sent, MB", "temporaries, MB", "kinds"]
    return markdown_table(columns, rows)


def zipf(vocab_size=10**6, exponent=1.05, ids=IDS):
    """What the devices are asked for where the n-th id has a probability that goes with n **
    -exponent, of a spread table and of one in the order of ids."""
    rows, weights = [], np.arange(1, vocab_size + 1) ** -exponent
    steps, rng = np.cumsum(weights / weights.sum()), np.random.default_rng(0)
    for shape in ((1, 8), (2, 4), (8, 8), (16, 16)):
        mesh = jax.sharding.AbstractMesh(shape, ("data", "model"), axis_types=(EXPLICIT,) * 2)
        params, *_ = arguments_of("by exchange", mesh, optax.sgd(0.1), vocab_size, WIDTH, ids)
        batch = np.searchsorted(steps, rng.random((mesh.size, ids))).clip(0, vocab_size - 1)
        for is_spread in (True, False):
            options = {"row_multiple": ROW_MULTIPLE, "spread": is_spread}
            config = te.EmbedderConfig(vocab_size, WIDTH, **options)
            load = te.rows.exchange_load(params["table"], batch, config=config)
            mean, most = load["rows"].mean(), load["rows"].max()
            name = f"{shape[0]} x {shape[1]}{', spread' * is_spread}"
            rows.append([name, f"{mean:,.0f}", f"{most / mean:.2f}", str(load["dropped"])])
    columns = ["data x model", "mean rows asked for", "busiest / mean", "ids without room"]
    return markdown_table(columns, rows)


def main():
    """Prints Markdown tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--pods", action="store_true", help="compile for TPU pods")
    parser.add_argument("--zipf", action="store_true", help="count what Zipf's ids ask for")
    arguments = parser.parse_args()
    what = f"width {WIDTH}, float32, {IDS} ids a device"
    print_machine(["jax", "jaxlib", "libtpu", "numpy"], what)
    if arguments.pods:
        print(f"Adam by exchange:\n\n{compiled_for_pods()}")
    elif arguments.zipf:
        print(f"Zipf-distributed ids, exponent 1.05, 1e6 rows:\n\n{zipf()}")
    else:
        print("Bytes that each device sends in a step; data x shards, the best mesh that fits in")
        print(f"64 GB.\n\n{on_paper()}\n")
        print(f"Eight CPU devices, 4096 rows of width 16, 32 ids a device:\n\n{checks()}")


if __name__ == "__main__":
    main()
