"""How tables and batches are split over a mesh, for draws: numbers beside those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from meshes import AUTO, EXPLICIT, mesh_of, put

import transformer_embed as te

NAMES = ("data", "model", "extra")
# Rows past the vocabulary are padding.
ROWS, VOCAB, WIDTH, PAD = 304, 300, 8, 3
KINDS = {
    "explicit": (EXPLICIT,) * 3,
    "automatic": (AUTO,) * 3,
    "mixed": (EXPLICIT, EXPLICIT, AUTO),
}
HAS_NESTED_MAPS = jax.__version_info__ >= (0, 10)


@functools.cache
def mesh(kind):
    """Returns a mesh of two devices an axis, or of one where there are fewer than eight."""
    size = 2 if len(jax.devices()) >= 8 else 1
    return mesh_of((size,) * 3, NAMES, KINDS[kind])


@functools.cache
def arrays(seed):
    """x, a table, a bias that bans one id, and ids."""
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.normal(size=shape).astype(np.float32)
    ids = random.integers(0, VOCAB, (8, 4)).astype(np.int32)
    ids[:, 0], ids[1, 1] = 7, PAD
    return normal(8, 4, WIDTH), normal(ROWS, WIDTH), normal(ROWS), ids


def output(table, bias):
    return te.OutputLayer(table, bias, softcap=9.0, pad_id=PAD, vocab_size=VOCAB)


def candidates(ids):
    return (ids[..., None] + 5 * jnp.arange(1, 4)) % (VOCAB - 10) + 5


def lookup(x, table, bias, ids):
    return jnp.sum(te.lookup(table, ids, pad_id=PAD) * x**2)


def logits(x, table, bias, ids):
    found = te.linear_logits(x, output(table, bias))
    return jnp.sum(jnp.where(jnp.arange(found.shape[-1]) < VOCAB, jnp.cos(found / 99), 0))


def tied(x, table, bias, ids):
    options = {"label_smoothing": 0.1, "reduction": "sum"}
    rows = te.lookup(table, ids)
    return te.linear_cross_entropy(x + rows, output(table, bias), ids, **options) / ids.size


def log_probs(x, table, bias, ids):
    found, entropies = te.linear_log_probs(x, output(table, bias), ids, with_entropy=True)
    return jnp.mean(found**2 + entropies)


def kept(x, table, bias, ids):
    found = te.linear_log_probs(x, output(table, bias), candidates(ids))
    return jnp.mean(jnp.sin(found - jax.nn.logsumexp(found, -1, keepdims=True)))


def divergence(x, table, bias, ids):
    layer = output(table, bias)
    return te.linear_divergence(x, layer, 2 * x, layer, kind="js")


def top_k(x, table, bias, ids):
    found, _ = te.linear_top_k(x, output(table, bias), 3)
    return jnp.mean(found) + 0 * (jnp.sum(x) + jnp.sum(table) + jnp.sum(bias))


# Each is a number.
PARTS = {each.__name__: each for each in (lookup, logits, tied, log_probs, kept, divergence, top_k)}


def slope(loss, psum=lambda number: number):
    """The derivative along x and the table, whose gradient has second derivatives."""

    def derivative(x, table, bias, ids):
        of_x, of_table = jax.grad(loss, (0, 1))(x, table, bias, ids)
        # Each device has its own part of x.
        return psum(jnp.sum(of_x * x)) + jnp.sum(of_table * table)

    return derivative


def expected(part, order, seed):
    """The number and its gradients, or the gradients of its derivative, on one device."""
    loss = PARTS[part] if order == 1 else slope(PARTS[part])
    return jax.jit(jax.value_and_grad(loss, (0, 1)))(*arrays(seed))


def found(part, order, seed, kind, table, x, where):
    """The same on a mesh, with a table and x that are split by these specs.

    where: "outside" and "inside" of the differentiation, an enclosing shard_map over `data`.
    """
    ours = PARTS[part]
    mean = functools.partial(jax.lax.pmean, axis_name="data")
    of_ids = P(*x[:2])
    if where == "none":
        loss = ours if order == 1 else slope(ours)
    else:
        # A sum over the batch is its size times the mean of the parts.
        scale = 2 if part in ("lookup", "logits") else 1
        loss = lambda *args: scale * mean(ours(*args))
    specs = {"in_specs": (P("data"), P(), P(), P("data")), "axis_names": {"data"}}
    if where == "outside":
        loss = jax.shard_map(loss, out_specs=P(), **specs)
        loss = loss if order == 1 else slope(loss)
    elif where == "inside" and order == 2:
        loss = slope(loss, functools.partial(jax.lax.psum, axis_name="data"))
    step = jax.value_and_grad(loss, (0, 1))
    if where == "inside":
        step = jax.shard_map(step, out_specs=(P(), (P("data"), P())), **specs)
    on = mesh(kind)
    with jax.set_mesh(on):
        of_x, of_table, bias, ids = arrays(seed)
        placed = put(on, of_x, *x), put(on, of_table, *table), put(on, bias), put(on, ids, *of_ids)
        return jax.jit(step)(*placed)
