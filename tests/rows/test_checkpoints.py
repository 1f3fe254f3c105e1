"""A run that goes on after a checkpoint, on another mesh."""

import jax
import numpy as np
import pytest
import steps
from compare import equal, near
from jax import NamedSharding, P
from meshes import EXPLICIT, mesh_of, put

import transformer_embed as te

# Padded, so that each mesh divides the rows, and spread, in the same order on all of them.
CONFIG = steps.config(row_multiple=64, spread=True)
OPTIMIZER = steps.row_wise_adagrad(0.1)
MESHES = {"saved": ((2, 4), P(("x", "y"))), "restored": ((4, 1), P("x")), "one": ((1, 1), P())}


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


def init(rng):
    params = te.Embedder(CONFIG).init(rng)
    return params, OPTIMIZER.init(params)


def placed(name):
    """The mesh, how its ids are split, and the shapes of parameters and state on it."""
    shape, spec = MESHES[name]
    mesh, rng = mesh_of(shape, ("x", "y"), EXPLICIT), jax.random.key(0)
    over = NamedSharding(mesh, spec)
    shapes = jax.eval_shape(init, rng)
    return mesh, spec, jax.tree.map(lambda leaf: leaf.update(sharding=over), shapes)


def step(trees, name, number):
    mesh, spec, _ = placed(name)
    ids, weights = (each[number, 0] for each in steps.batches(0))

    def one(trees, ids, weights):
        loss = lambda params: (
            te.Embedder(CONFIG).apply(params, None, ids, is_training=False) * weights
        ).sum()
        of_table = {"embeddings": ids}
        capacity = 1.0 if any(spec) else None
        grads = te.rows.value_and_grad(loss, ids=of_table, capacity=capacity)(trees[0])[1]
        return te.rows.apply_gradients(OPTIMIZER, grads, trees[1], trees[0])

    with jax.set_mesh(mesh):
        return jax.jit(one)(trees, put(mesh, ids, *spec), put(mesh, weights, *spec))


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_goes_on_on_another(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is of the test extra")
    _, _, target = placed("saved")
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    drawn = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    equal(
        jax.tree.map(np.asarray, drawn), jax.tree.map(np.asarray, jax.jit(init)(jax.random.key(0)))
    )
    saved = step(drawn, "saved", 0)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", saved)
    after = {}
    for name in MESHES:
        *_, target = placed(name)
        found = restored(tmp_path / "step", target)
        equal(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, saved))
        assert all(
            map(lambda a, b: a.sharding == b.sharding, *map(jax.tree.leaves, (found, target)))
        )
        after[name] = jax.tree.map(np.asarray, step(found, name, 1))
    for name in ("saved", "restored"):
        near(after[name], after["one"], atol=1e-6, rtol=1e-6)
