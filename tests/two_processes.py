"""Trains a sharded table over the devices of several processes: one process, two on this machine,
or many on a cluster.

Run `python tests/two_processes.py ADDRESS:PORT NUM_PROCESSES PROCESS_ID [OUT.npz]` once for each
process; ADDRESS:PORT is a free port on the machine of process 0. Each process prints the losses of
three trainings, which fall and are the same in all processes.
"""

import dataclasses
import functools
import json
import os
import sys

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
from jax import NamedSharding, P

import transformer_embed as te

STEPS, VOCAB_SIZE, D_MODEL = 4, 1019, 16
# 1024 rows, which any of these meshes divides.
CONFIG = te.EmbedderConfig(VOCAB_SIZE, D_MODEL, pad_id=0, row_multiple=128)
SPREAD = dataclasses.replace(CONFIG, spread=True, output=None)
LEARNED = dataclasses.replace(CONFIG, scheme=te.Learned(8))
TABLE = "transformer_embedding/~/token_embedding"
OPTIMIZER = optax.adam(0.01)


LOSSES = {
    "dense": "dense Adam, cross entropy of the tied output",
    "by_rows": "lazy Adam by rows, squared error of the embeddings",
    "by_exchange": "lazy Adam by exchanged rows, squared error of the embeddings",
}


def main():
    say = quiet_runtime()
    if NUM_PROCESSES != "1":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(ADDRESS, int(NUM_PROCESSES), int(PROCESS_ID))
    found, index = {}, jax.process_index()
    where = f"process {index} of {jax.process_count()}, {jax.device_count()} devices"
    for name, what in LOSSES.items():
        losses, found[f"{name}_table"] = trained(name)
        found[f"{name}_losses"] = losses
        say(f"{where}, {what}: {', '.join(f'{loss:.6f}' for loss in losses)}")
    if index == 0:
        say(f"Each line has the losses of {STEPS} steps: they fall, and every process prints the")
        say("same. The dense training has another loss than the two by rows.")
    if OUT:
        with open(f"{OUT[0]}.{index}.json", "w") as file:
            json.dump(surface(OUT[0] + ".safetensors"), file)
        if index == 0:
            np.savez(OUT[0], **found)


def quiet_runtime():
    """A print of our own; what the runtime of the processes writes to standard output goes
    nowhere."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return functools.partial(print, file=output, flush=True)


def new_mesh():
    """The first axis goes over the processes: each feeds its own rows of the batch and holds the
    whole table, or, by exchange, half of it."""
    return jax.make_mesh((2, NUM_DEVICES // 2), ("data", "model"))


def placed(mesh, batch, axes):
    """An array of several processes, split by its rows."""
    sharding = NamedSharding(mesh, P(axes))
    return jax.make_array_from_callback(batch.shape, sharding, batch.__getitem__)


def trained(name):
    """The losses, and the table after the last step."""
    mesh, exchanges = new_mesh(), name == "by_exchange"
    config = SPREAD if exchanges else CONFIG
    params, state = drawn(config, mesh, mesh.axis_names if exchanges else "model")
    batch = np.random.default_rng(0).integers(0, VOCAB_SIZE, (8, 17)).astype(np.int32)
    step = step_of(name, config)
    ids, losses = placed(mesh, batch, mesh.axis_names if exchanges else "data"), []
    with jax.set_mesh(mesh):
        for _ in range(STEPS):
            params, state, loss = step(params, state, ids)
            losses.append(float(loss))
    plain = dataclasses.replace(config, row_multiple=1, spread=False)
    whole = {TABLE: {"embeddings": everywhere(params[TABLE]["embeddings"], mesh)}}
    return losses, te.pretrained.resize(whole, config, plain)[TABLE]["embeddings"]


def everywhere(array, mesh):
    """All values of an array of several processes."""
    gather = jax.jit(lambda array: array, out_shardings=NamedSharding(mesh, P()))
    return np.asarray(gather(array).addressable_data(0))


def drawn(config, mesh, over):
    """Parameters and the state of the optimizer: each device draws and holds its own rows."""

    def init(rng):
        params = te.Embedder(config).init(rng)
        return params, OPTIMIZER.init(params)

    def sharding(path, leaf):
        is_table = "token_embedding" in jax.tree_util.keystr(path) and leaf.ndim == 2
        return NamedSharding(mesh, P(over) if is_table else P())

    key = jax.random.key(0)
    shardings = jax.tree.map_with_path(sharding, jax.eval_shape(init, key))
    return jax.jit(init, out_shardings=shardings)(key)


def surface(path):
    """What each function that takes parameters or ids does with those of several processes."""
    mesh = new_mesh()
    params, _ = drawn(LEARNED, mesh, mesh.axis_names)
    table = params[TABLE]["embeddings"]
    batch = placed(mesh, np.arange(16, dtype=np.int32).reshape(8, 2), mesh.axis_names)
    tokens = te.TokenPositions(batch)

    def saved():
        te.pretrained.save_embedder(path, LEARNED, params)
        found = te.pretrained.load_embedder(path).params[TABLE]["embeddings"]
        return everywhere(table, mesh), found

    def resized():
        larger = dataclasses.replace(LEARNED, vocab_size=VOCAB_SIZE + 9, scheme=te.Learned(16))
        moved = te.pretrained.resize(params, LEARNED, larger, rng=jax.random.key(1))
        both = table, moved[TABLE]["embeddings"]
        return [everywhere(each, mesh)[:VOCAB_SIZE] for each in both]

    calls = {
        "save_embedder": saved,
        "resize": resized,
        "check_batch, ids": lambda: te.check_batch(batch, vocab_size=300),
        "check_batch, tokens": lambda: te.check_batch(
            np.zeros(batch.shape, int), tokens, vocab_size=300, order="full"
        ),
        "exchange_load": lambda: te.rows.exchange_load(table, batch),
    }
    with jax.set_mesh(mesh):
        return {name: told(call) for name, call in calls.items()}


def told(call):
    """The message of an error, or whether the arrays that a call gives are equal."""
    try:
        found = call()
    except ValueError as error:
        return str(error)
    return bool(np.array_equal(*found))


def step_of(name, config):
    """A step of training by this name."""
    embedder, capacity = te.Embedder(config), 1.0 if name == "by_exchange" else None

    def loss(params, ids):
        x = embedder.apply(params, None, ids, is_training=False)
        if name == "dense":
            return te.linear_cross_entropy(x, embedder.output(params), ids, shift=True)
        return jnp.mean((x - 1) ** 2)

    def dense_step(params, state, ids):
        """Adam on the whole tree, for the output layer is tied to the table."""
        value, grads = jax.value_and_grad(loss)(params, ids)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def row_step(params, state, ids):
        """Lazy Adam on the rows that the batch touches."""
        of_table = {f"{TABLE}/embeddings": ids}
        by_rows = te.rows.value_and_grad(loss, ids=of_table, capacity=capacity, config=config)
        value, grads = by_rows(params, ids)
        return *te.rows.apply_gradients(OPTIMIZER, grads, state, params), value

    return jax.jit(dense_step if name == "dense" else row_step)


if __name__ == "__main__":
    main()
