"""The package inside somebody's shard_map over some of the axes of a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import few
from compare import equal, near
from jax.sharding import PartitionSpec
from meshes import AUTO, EXPLICIT, mesh_of, put

import transformer_embed as te

SPEC, NAMES, VOCAB, WIDTH = PartitionSpec, ("data", "model", "extra"), 300, 8
SPLITS = {
    "rows": SPEC("model"),
    "columns": SPEC(None, "model"),
    "both": SPEC("model", "extra"),
    "rows over all": SPEC(("data", "model")),
}
RANDOM = np.random.default_rng(0)
TABLE = RANDOM.normal(size=(VOCAB, WIDTH)).astype(np.float32)
X = RANDOM.normal(size=(4, 4, WIDTH)).astype(np.float32)
IDS = RANDOM.integers(0, VOCAB, (4, 4)).astype(np.int32)
# Sums of some hundred terms below 10, each rounded by 2**-24 of itself.
ERROR = 1e-4


def plain_parts(x, table, ids):
    """The numbers of `parts`, in jax.numpy alone."""
    logits = x @ table.T
    logits_of_loss = (x + table[ids]) @ table.T
    log_probs = jax.nn.log_softmax(logits_of_loss)
    of_labels = (log_probs * jax.nn.one_hot(ids, VOCAB)).sum(-1)
    entropies = -(jnp.exp(log_probs) * log_probs).sum(-1)
    is_right = (logits_of_loss.argmax(-1) == ids).mean()
    metrics = is_right + jax.nn.logsumexp(logits_of_loss, axis=-1).mean()
    return {
        "lookup": jnp.mean(table[ids] ** 2),
        "logits": jnp.mean(jnp.sin(logits)),
        "loss": -of_labels.mean(),
        "losses": jnp.mean(of_labels**2),
        "log_probs": jnp.mean(of_labels**2),
        "entropies": jnp.mean(entropies**2),
        "top_k": jax.lax.stop_gradient(jax.lax.top_k(log_probs, 3)[0]).mean(),
        "metrics": jax.lax.stop_gradient(metrics),
        "candidates": jnp.mean(jnp.tanh(log_probs[..., :3])),
        "divergence": (jnp.exp(log_probs) * (log_probs - jax.nn.log_softmax(logits)))
        .sum(-1)
        .mean(),
        "kept": jnp.mean(jax.nn.log_softmax(logits_of_loss[..., 2:5])[..., 1] ** 2),
    }


def parts(x, table, ids):
    """What reads a table, each as a number."""
    logits, rows = te.linear_logits(x, table), te.lookup(table, ids)
    first_x, x = x, x + rows
    log_probs, entropies = te.linear_log_probs(x, table, ids, with_entropy=True)
    candidates = jnp.zeros_like(ids)[..., None] + jnp.arange(3)
    loss, metrics = te.linear_cross_entropy(x, table, ids, with_metrics=True)
    # Those of padding are the lowest numbers.
    is_row = jnp.arange(logits.shape[-1]) < VOCAB
    return {
        "lookup": jnp.mean(rows**2),
        "logits": jnp.sum(jnp.where(is_row, jnp.sin(logits), 0)) / (ids.size * VOCAB),
        "loss": loss,
        "losses": jnp.mean(te.linear_cross_entropy(x, table, ids, reduction="none") ** 2),
        "log_probs": jnp.mean(log_probs**2),
        "entropies": jnp.mean(entropies**2),
        "top_k": te.linear_top_k(x, table, 3)[0].mean(),
        "metrics": metrics.accuracy + metrics.log_z,
        "candidates": jnp.mean(jnp.tanh(te.linear_log_probs(x, table, candidates))),
        "divergence": te.linear_divergence(first_x, table, x, table),
        "kept": jnp.mean(te.linear_kept_log_probs(x, table, candidates + 2)[..., 1] ** 2),
    }


def total(numbers):
    return sum(n * number for n, number in enumerate(numbers.values(), 1)), numbers


def over_data(function, out_specs):
    specs = (SPEC("data"), SPEC(), SPEC("data"))
    return jax.shard_map(function, in_specs=specs, out_specs=out_specs, axis_names={"data"})


def slope(loss, psum=lambda number: number):
    """The derivative of a loss along x and the table, whose gradient has second derivatives."""

    def derivative(x, table, ids):
        of_x, of_table = jax.grad(loss, (0, 1))(x, table, ids)
        (of_rows,), (rows,) = jax.tree.leaves(of_table), jax.tree.leaves(table)
        # Each device has its own part of x.
        return psum(jnp.sum(of_x * x)) + jnp.sum(of_rows * rows)

    return derivative


def placed(kind, split, is_sharded):
    """The mesh, and x, the table and ids on it."""
    mesh = mesh_of((2, 2, 2), NAMES, kind)
    with jax.set_mesh(mesh):
        if is_sharded:
            table = te.sharding.shard_params(TABLE, mesh, {"*": split}, tables="*")
        else:
            table = put(mesh, TABLE, *split)
        return mesh, (put(mesh, X, "data"), table, put(mesh, IDS, "data"))


def found(kind, split, is_sharded, where):
    mesh, arrays = placed(kind, split, is_sharded)
    mean = functools.partial(jax.lax.pmean, axis_name="data")
    with jax.set_mesh(mesh):
        if where == "outside":
            loss = over_data(lambda *args: mean(total(parts(*args))), SPEC())
            step = jax.value_and_grad(loss, (0, 1), has_aux=True)
        else:

            def step(*args):
                loss = lambda *args: mean(total(parts(*args)))
                (_, values), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(*args)
                return (None, values), grads

            out_specs = ((None, SPEC()), (SPEC("data"), SPEC()))
            step = over_data(step, out_specs)
        return jax.jit(step)(*arrays)


def found_twice(kind, split, is_sharded, where):
    """The gradients of the loss's slope."""
    mesh, arrays = placed(kind, split, is_sharded)
    loss = lambda *args: jax.lax.pmean(total(parts(*args))[0], "data")
    with jax.set_mesh(mesh):
        if where == "outside":
            step = jax.grad(slope(over_data(loss, SPEC())), (0, 1))
        else:
            psum = functools.partial(jax.lax.psum, axis_name="data")
            step = over_data(jax.grad(slope(loss, psum), (0, 1)), (SPEC("data"), SPEC()))
        return jax.jit(step)(*arrays)


# jax refuses the table of the last split where types say it, and XLA of jax 0.12 aborts on a plain
# array that it splits both ways.
CASES = [
    (kind, split, is_sharded, where)
    for kind in (AUTO, EXPLICIT)
    for split in SPLITS
    for is_sharded in (False, True)
    for where in ("inside", "outside")
    if (kind, split) != (EXPLICIT, "rows over all")
    if (kind, split, is_sharded) != (AUTO, "both", False)
]
HAS_NESTED_MAPS = jax.__version_info__ >= (0, 10)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "split", "is_sharded", "where"), few(CASES, 14), ids=str)
def test_gradients_inside_a_shard_map_over_some_axes_are_those_of_the_whole_batch(
    kind, split, is_sharded, where
):
    if is_sharded and not HAS_NESTED_MAPS:
        with pytest.raises(ValueError, match=r"table: wanted jax 0\.10 or newer"):
            found(kind, SPLITS[split], is_sharded, where)
        return
    (_, values), grads = found(kind, SPLITS[split], is_sharded, where)
    loss = lambda *args: total(plain_parts(*args))
    (_, wants), want_grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(X, TABLE, IDS)
    near(values, wants, atol=ERROR)
    of_table = grads[1].array if is_sharded else grads[1]
    copies = {}
    for shard in of_table.addressable_shards:
        first = copies.setdefault(str(shard.index), np.asarray(shard.data))
        equal(np.asarray(shard.data), first)
    near(np.asarray(of_table)[:VOCAB], want_grads[1], atol=ERROR)
    near(grads[0], want_grads[0], atol=ERROR)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NESTED_MAPS, reason="an error of its own, tested above")
@pytest.mark.parametrize(("kind", "split", "is_sharded", "where"), few(CASES, 3), ids=str)
def test_second_derivatives_inside_a_shard_map_are_those_of_the_whole_batch(
    kind, split, is_sharded, where
):
    of_x, of_table = found_twice(kind, SPLITS[split], is_sharded, where)
    want_slope = slope(lambda *args: total(plain_parts(*args))[0])
    want_x, want_table = jax.jit(jax.grad(want_slope, (0, 1)))(X, TABLE, IDS)
    # Their largest terms are some ten times those of the gradient.
    near(np.asarray(*jax.tree.leaves(of_table))[:VOCAB], want_table, atol=10 * ERROR)
    near(of_x, want_x, atol=10 * ERROR)


def read_over_data(shape):
    """A table on explicit axes, inside a shard_map over automatic ones of these sizes."""
    rules, split = {"*": SPEC("model")}, SPEC("data")
    table = te.sharding.shard_params(TABLE, mesh_of((2, 2, 2), NAMES, EXPLICIT), rules, tables="*")
    with jax.set_mesh(mesh_of(shape, NAMES)):
        specs = {"in_specs": (SPEC(), split), "out_specs": split, "axis_names": {"data"}}
        return jax.jit(jax.shard_map(te.lookup, **specs))(table, IDS)


@pytest.mark.skipif(not HAS_NESTED_MAPS, reason="an error of its own, tested above")
def test_a_table_on_explicit_axes_is_read_inside_a_shard_map_over_automatic_ones():
    equal(read_over_data((2, 2, 2)), TABLE[IDS])


def test_a_table_of_another_mesh_is_refused_inside_a_shard_map():
    with pytest.raises(ValueError, match=r"table: wanted .*'model': 4.*, got .*'model': 2"):
        read_over_data((2, 4, 1))


def test_a_sharded_table_whose_rows_a_shard_map_splits_is_refused():
    mesh = mesh_of((2, 2, 2), NAMES)
    table = te.sharding.shard_params(TABLE, mesh, {"*": SPEC("data")}, tables="*")
    read = jax.shard_map(
        te.lookup, mesh=mesh, in_specs=SPEC("data"), out_specs=SPEC("data"), axis_names={"data"}
    )
    with pytest.raises(ValueError, match="table: wanted all of its rows inside a shard_map"):
        jax.jit(read)(table, IDS)


@pytest.mark.skipif(not HAS_NESTED_MAPS, reason="an error of its own, tested above")
def test_a_striped_table_does_not_train_by_rows_inside_a_shard_map_over_some_axes():
    """Gradients of one row would come from devices that do not know of each other."""
    mesh = mesh_of((2, 2, 2), NAMES, EXPLICIT)
    rules, options = {"*": SPEC("model")}, {"stripe": "*", "virtual_shards": 16}

    def step(table, ids):
        loss = lambda table: jax.lax.pmean(te.lookup(table, ids).mean(), "data")
        return te.rows.value_and_grad(loss, ids=ids)(table)[0]

    with jax.set_mesh(mesh):
        table = te.sharding.shard_params(TABLE, mesh, rules, tables="*", **options)
        specs = (SPEC(), SPEC("data"))
        run = jax.shard_map(step, in_specs=specs, out_specs=SPEC(), axis_names={"data"})
        with pytest.raises(ValueError, match="table: wanted a contiguous one"):
            jax.jit(run)(table, put(mesh, IDS, "data", "model"))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NESTED_MAPS, reason="an error of its own, tested above")
@pytest.mark.parametrize(
    ("kind", "is_sharded"), [(AUTO, True), (EXPLICIT, True), (EXPLICIT, False)]
)
def test_a_step_by_rows_inside_a_shard_map_over_some_axes_is_that_of_the_whole_batch(
    kind, is_sharded
):
    mesh, sgd = mesh_of((2, 2, 2), NAMES, kind), optax.sgd(1.0)

    def step(params, ids):
        def loss(params):
            return jax.lax.pmean(jnp.mean(te.lookup(params["t"], ids) ** 2), "data")

        value, grads = te.rows.value_and_grad(loss, ids={"t": ids})(params)
        return value, te.rows.update(sgd, grads, sgd.init(params), params)[0]

    with jax.set_mesh(mesh):
        params = {"t": put(mesh, TABLE)}
        if is_sharded:
            params = te.sharding.shard_params({"t": TABLE}, mesh, {"t": SPEC("model")}, tables="t")
        specs = (SPEC(), SPEC("data"))
        run = jax.shard_map(step, in_specs=specs, out_specs=SPEC(), axis_names={"data"})
        value, after = jax.jit(run)(params, put(mesh, IDS, "data"))
    want, gradient = jax.value_and_grad(lambda table: jnp.mean(table[IDS] ** 2))(TABLE)
    near(value, want, rtol=1e-6)
    near(np.asarray(te.lookup(after["t"], np.arange(VOCAB))), TABLE - gradient, atol=1e-6)
