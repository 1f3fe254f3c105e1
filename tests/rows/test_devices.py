"""Gradients by rows on devices that each have a batch: the mean is that of the dense gradients, or
NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import transformer_embed as te

DEVICES, VOCAB_SIZE = 4, 7
TABLE = np.random.default_rng(0).normal(size=(VOCAB_SIZE, 3)).astype(np.float32)
PARAMS = {"t": TABLE, "w": np.ones(3, np.float32)}
OTHER_IDS = np.array([[0, 1, 1], [1, 3, 4], [4, 4, 4], [9, 0, 4]])
SAME_IDS = np.array([[5, 1, 1]] * DEVICES)
WEIGHTS = np.random.default_rng(1).normal(size=(*OTHER_IDS.shape, 3)).astype(np.float32)
# Some sums of numbers below 4.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def loss(params, ids, weights):
    """Each device has its own, of its own batch."""
    rows = te.lookup(params["t"], ids, out_of_range="zero")
    return jnp.sum(rows * weights * params["w"])


def on_pmap(step):
    return jax.pmap(step, "d", in_axes=(None, 0, 0), devices=jax.devices()[:DEVICES])


def on_vmap(step):
    return jax.vmap(step, (None, 0, 0), axis_name="d")


def on_shard_map(step, check_vma=False, own=False):
    """`own`: each device has parameters of its own, as far as the types say."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ["d"])
    spec = PartitionSpec("d") if own else PartitionSpec()

    def of_one(params, *batch):
        params = jax.tree.map(lambda leaf: leaf[0], params) if own else params
        after = step(params, *(part[0] for part in batch))
        return jax.tree.map(lambda leaf: leaf[None], after) if own else after

    specs = (spec, PartitionSpec("d"), PartitionSpec("d"))
    mapped = jax.shard_map(of_one, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=check_vma)

    def run(params, *batch):
        copies = lambda leaf: jnp.broadcast_to(leaf, (DEVICES, *leaf.shape)) if own else leaf
        after = jax.jit(mapped)(jax.tree.map(copies, params), *batch)
        return after if own else jax.tree.map(lambda leaf: leaf[None], after)

    return run


SHARED = "shard_map, checked"
MAPS = {
    "pmap": on_pmap,
    "vmap": on_vmap,
    "shard_map": on_shard_map,
    SHARED: functools.partial(on_shard_map, check_vma=True),
    "shard_map, checked, own parameters": functools.partial(on_shard_map, check_vma=True, own=True),
}


def trained(name, mean, ids, cast=lambda leaf: leaf):
    """The parameters on each device after a step of SGD, and those after a dense step."""
    optimizer = optax.sgd(1.0)

    def step(params, ids, weights):
        def of_all(params):
            own = loss(params, ids, weights)
            # With check_vma, jax.grad sums the gradients of parameters that devices share.
            return jax.lax.pmean(own, "d") if name == SHARED else own

        _, grads = te.rows.value_and_grad(of_all, ids={"t": ids})(params)
        grads = mean(jax.tree.map(cast, grads), "d")
        return te.rows.update(optimizer, grads, optimizer.init(params), params)[0]

    dense = [jax.grad(loss)(PARAMS, *batch) for batch in zip(ids, WEIGHTS, strict=True)]
    expected = jax.tree.map(lambda old, *grads: old - np.mean(grads, axis=0), PARAMS, *dense)
    return MAPS[name](step)(PARAMS, ids, WEIGHTS), expected


@pytest.mark.parametrize("name", MAPS)
def test_pmean_is_the_mean_of_the_dense_gradients(name):
    after, expected = trained(name, te.rows.pmean, OTHER_IDS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[-1], b, **TOLERANCE), after, expected)


@pytest.mark.parametrize("name", MAPS)
def test_the_mean_of_jax_over_other_ids_is_right_or_nan(name):
    after, expected = trained(name, jax.lax.pmean, OTHER_IDS)
    np.testing.assert_allclose(after["w"][-1], expected["w"], **TOLERANCE)
    if name == SHARED:
        np.testing.assert_allclose(after["t"][-1], expected["t"], **TOLERANCE)
    else:
        assert np.isnan(after["t"]).any(axis=(1, 2)).all()


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_mean_of_jax_over_the_same_ids_is_right(name, dtype):
    scaled = lambda leaf: (0.3 * leaf / 0.3).astype(dtype)
    after, expected = trained(name, jax.lax.pmean, SAME_IDS, scaled)
    tolerance = TOLERANCE if dtype == jnp.float32 else {"rtol": 0.05, "atol": 0.05}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[-1], b, **tolerance), after, expected)
