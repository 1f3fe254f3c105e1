"""Trains a sharded table over the devices of several processes: one process, two on this machine,
or many on a cluster.

Run `python tests/two_processes.py ADDRESS:PORT NUM_PROCESSES PROCESS_ID [OUT.npz]` once for each
process; ADDRESS:PORT is a free port on the machine of process 0. Each process prints the losses of
three trainings, which fall and are the same in all processes.
"""

import functools
import json
import os
import sys
import warnings

ADDRESS, NUM_PROCESSES, PROCESS_ID, *OUT = sys.argv[1:]
NUM_DEVICES = 8
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# CPU devices stand for accelerators here: on a machine with accelerators, delete the next two
# lines.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES // int(NUM_PROCESSES)}"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import transformer_embed as te

STEPS, VOCAB_SIZE, D_MODEL = 4, 1019, 16
CONFIG = te.EmbedderConfig(VOCAB_SIZE, D_MODEL, pad_id=0)
LEARNED = te.EmbedderConfig(VOCAB_SIZE, D_MODEL, pad_id=0, scheme=te.Learned(8))
DENSE, BY_ROWS, BY_EXCHANGE = "dense", "by_rows", "by_exchange"
TABLE = "transformer_embedding/~/token_embedding"


LOSSES = {
    DENSE: "dense Adam, cross entropy of the tied output",
    BY_ROWS: "lazy Adam by rows, squared error of the embeddings",
    BY_EXCHANGE: "lazy Adam by exchanged rows, squared error of the embeddings",
}


def main():
    say = quiet_runtime()
    if NUM_PROCESSES != "1":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(ADDRESS, int(NUM_PROCESSES), int(PROCESS_ID))
    found = {}
    for name, what in LOSSES.items():
        found[f"{name}_losses"], found[f"{name}_table"] = trained(name)
        losses = ", ".join(f"{loss:.6f}" for loss in found[f"{name}_losses"])
        say(
            f"process {jax.process_index()} of {jax.process_count()}, {jax.device_count()} devices, {what}: {losses}"
        )
    if jax.process_index() == 0:
        say(
            f"Each line has the losses of {STEPS} steps: they fall, and every process prints the same.",
            end=" ",
        )
        say("The dense training has another loss than the two by rows.")
    if OUT:
        with open(f"{OUT[0]}.{jax.process_index()}.json", "w") as file:
            json.dump(surface(OUT[0] + ".safetensors"), file)
    if OUT and jax.process_index() == 0:
        np.savez(OUT[0], **found)


def quiet_runtime():
    """A print of our own; what the runtime of the processes writes to standard output goes
    nowhere."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return functools.partial(print, file=output, flush=True)


def trained(name):
    """The losses, and the table after the last step."""
    step, exchange = dense_step if name == DENSE else row_step, name == BY_EXCHANGE
    # The first axis goes over the processes: each feeds its own rows of the batch and holds the
    # whole table, or, by exchange, half of it.
    mesh = jax.make_mesh((2, NUM_DEVICES // 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    name, over = "*/token_embedding/embeddings", ("data", "model") if exchange else "model"
    stripe = name if exchange else None
    key, options = jax.random.key(0), {"stripe": stripe, "virtual_shards": 8}
    shapes = jax.eval_shape(init, key)
    shapes = te.sharding.shard_params(shapes, mesh, {name: PartitionSpec(over)}, **options)
    params, state = te.sharding.init_params(init, key, shapes)
    losses = []
    batch = np.random.default_rng(0).integers(0, VOCAB_SIZE, (8, 17)).astype(np.int32)
    ids = jax.make_array_from_callback(
        batch.shape,
        NamedSharding(mesh, PartitionSpec(over if exchange else "data")),
        lambda index: batch[index],
    )
    for i in range(STEPS):
        params, state, loss = step(params, state, jax.random.key(i), ids)
        losses.append(float(loss))
    if OUT:
        te.pretrained.save_embedder(OUT[0] + ".trained.safetensors", CONFIG, params)
    table = params[TABLE]["embeddings"]
    everywhere = jax.jit(lambda array: array, out_shardings=NamedSharding(mesh, PartitionSpec()))(
        table.array
    )
    return losses, np.asarray(everywhere.addressable_data(0))[
        table.split.slots(np.arange(VOCAB_SIZE, dtype=np.int32))
    ]


ROWS = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)


def surface(path):
    """What each function that takes parameters or ids does with those of several processes."""
    warnings.simplefilter("ignore")
    automatic = {"axis_types": (AxisType.Auto,) * 2}
    mesh = jax.make_mesh((2, NUM_DEVICES // 2), ("data", "model"), **automatic)
    other = jax.make_mesh((1, NUM_DEVICES), ("data", "model"), **automatic)
    backwards = jax.sharding.Mesh(mesh.devices[::-1], mesh.axis_names)
    both, me = PartitionSpec(("data", "model")), jax.process_index()
    rules = {"*/token_embedding/embeddings": both}
    striped = {"stripe": "t", "virtual_shards": 16}

    def place(tree, on=mesh, **options):
        return te.sharding.shard_params(tree, on, {"t": both}, tables="t", **options)

    def everywhere(array, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    def moved(on, options, back):
        return place(place({"t": ROWS}, **back), on, **options)["t"].in_vocabulary_order()

    def embedder():
        init, key = te.Embedder(LEARNED).init, jax.random.key(0)
        shapes = te.sharding.shard_params(jax.eval_shape(init, key), mesh, rules)
        return te.sharding.init_params(init, key, shapes)

    rows_of = lambda params: params[TABLE]["embeddings"].in_vocabulary_order()
    batch = everywhere(np.arange(16, dtype=np.int32).reshape(8, 2), ("data", "model"))

    def saved():
        te.pretrained.save_embedder(path, LEARNED, embedder())
        return rows_of(embedder()), te.pretrained.load_embedder(path).params[TABLE]["embeddings"]

    def resized():
        larger = te.resize_vocabulary(embedder(), VOCAB_SIZE + 9, rng=jax.random.key(1))
        return rows_of(embedder()), rows_of(larger)[:VOCAB_SIZE]

    draw = lambda key: {"t": jax.random.normal(key, ROWS.shape)}
    calls = {
        "another key": lambda: te.sharding.init_params(
            draw, jax.random.key(me), place(jax.eval_shape(draw, jax.random.key(0)))
        ),
        "another tree": lambda: place({"t": ROWS} | ({"u": ROWS} if me else {})),
        "other rules": lambda: place({"t": ROWS}, **(striped if me else {})),
        "another leaf": lambda: place({"t": ROWS + me}),
        "another mesh": lambda: (ROWS, moved(other, {}, {})),
        "devices in another order": lambda: (ROWS, moved(backwards, {}, {})),
        "striped": lambda: (ROWS, moved(other, striped, {})),
        "striped before": lambda: (ROWS, moved(mesh, {}, striped)),
        "a global array": lambda: (
            ROWS,
            place({"t": everywhere(ROWS, None, ("data", "model"))})["t"].in_vocabulary_order(),
        ),
        "save_embedder": saved,
        "resize_vocabulary": resized,
        "resize_positions": lambda: te.resize_positions(embedder(), 16),
        "check_batch, ids": lambda: te.check_batch(batch, vocab_size=300),
        "check_batch, tokens": lambda: te.check_batch(
            np.zeros(batch.shape, int), te.TokenPositions(batch), vocab_size=300, order="full"
        ),
        "exchange_load": lambda: te.sharding.exchange_load(
            place({"t": ROWS}, **striped)["t"], batch
        ),
    }
    return {name: told(call) for name, call in calls.items()}


def told(call):
    """The message of an error, or whether the arrays that a call gives are equal."""
    try:
        found = call()
    except ValueError as error:
        return str(error)
    return not isinstance(found, tuple) or bool(np.array_equal(*found))


EMBEDDER = te.Embedder(CONFIG)
OPTIMIZER = optax.adam(0.01)


def init(rng):
    """Parameters and the state of the optimizer: each device holds the moments of its own rows."""
    params = EMBEDDER.init(rng)
    return params, OPTIMIZER.init(params)


@jax.jit
def dense_step(params, state, rng, ids):
    """Adam on the whole tree, for the output layer is tied to the table."""

    def loss(params):
        x = EMBEDDER.apply(params, rng, ids[:, :-1], is_training=True)
        logits = te.linear_logits(x, EMBEDDER.output(params))
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


@jax.jit
def row_step(params, state, rng, ids):
    """Lazy Adam on the rows that the batch touches."""

    def loss(params):
        return jnp.mean((EMBEDDER.apply(params, rng, ids, is_training=True) - 1) ** 2)

    value, gradients = te.rows.value_and_grad(loss, ids={TABLE: {"embeddings": ids}})(params)
    return *te.rows.update(OPTIMIZER, gradients, state, params), value


if __name__ == "__main__":
    main()
