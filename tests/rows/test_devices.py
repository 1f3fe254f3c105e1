"""Gradients by rows on devices that each have a batch: the mean is that of the dense gradients, or
NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import near
from jax.sharding import Mesh, PartitionSpec

import transformer_embed as te

DEVICES, VOCAB_SIZE = 2, 7
TABLE = np.random.default_rng(0).normal(size=(VOCAB_SIZE, 3)).astype(np.float32)
PARAMS = {"t": TABLE, "w": np.ones(3, np.float32)}
OTHER_IDS = np.array([[0, 1, 1], [9, 1, 4]])
SAME_IDS = np.array([[5, 1, 1]] * DEVICES)
WEIGHTS = np.random.default_rng(1).normal(size=(*OTHER_IDS.shape, 3)).astype(np.float32)


def loss(params, ids, weights):
    """Each device has its own, of its own batch."""
    rows = te.lookup(params["t"], ids, out_of_range="zero")
    return jnp.sum(rows * weights * params["w"])


def on_vmap(step):
    return jax.jit(jax.vmap(step, (None, 0, 0), axis_name="d"))


def on_pmap(step):
    return jax.pmap(step, "d", in_axes=(None, 0, 0), devices=jax.devices()[:DEVICES])


def on_shard_map(step, own=False):
    """`own`: each device has parameters of its own, as far as the types say."""

    def of_one(params, *batch):
        zero = 0 * jax.lax.axis_index("d") if own else 0
        params = jax.tree.map(lambda leaf: leaf + zero, params)
        after = step(params, *jax.tree.map(lambda part: part[0], batch))
        return jax.tree.map(lambda leaf: leaf[None], after)

    mesh, split = Mesh(np.array(jax.devices()[:DEVICES]), ["d"]), PartitionSpec("d")
    shared = PartitionSpec()
    specs = {"in_specs": (shared, split, split), "out_specs": split if own else shared}
    return jax.jit(jax.shard_map(of_one, mesh=mesh, **specs))


SHARED = "shard_map, checked"
MAPS = {
    "vmap": on_vmap,
    "pmap": on_pmap,
    SHARED: on_shard_map,
    "shard_map, checked, own parameters": functools.partial(on_shard_map, own=True),
}


every_map = pytest.mark.parametrize(
    "name", ["vmap", *(pytest.param(name, marks=pytest.mark.slow) for name in [*MAPS][1:])]
)
# How the gradients of a step are averaged, and of which ids.
MEANS = {
    "ours": (te.rows.pmean, OTHER_IDS),
    "mixed": (jax.lax.pmean, OTHER_IDS),
    "both": (lambda *args: te.rows.pmean(jax.lax.pmean(*args), args[1]), OTHER_IDS),
    "same": (jax.lax.pmean, SAME_IDS),
}


@functools.cache
def trained(name):
    """The parameters on each device after a step of SGD by each mean, by one program."""
    sgd = optax.sgd(1.0)

    def one(mean, params, ids, weights):
        def of_all(params):
            own = loss(params, ids, weights)
            # With check_vma, jax.grad sums the gradients of parameters that devices share.
            return jax.lax.pmean(own, "d") if name == SHARED else own

        _, grads = te.rows.value_and_grad(of_all, ids={"t": ids})(params)
        grads = mean(jax.tree.map(lambda leaf: 0.3 * leaf / 0.3, grads), "d")
        return te.rows.apply_gradients(sgd, grads, sgd.init(params), params)[0]

    def steps(params, ids, weights):
        return {key: one(mean, params, ids[key], weights) for key, (mean, _) in MEANS.items()}

    return MAPS[name](steps)(PARAMS, {key: ids for key, (_, ids) in MEANS.items()}, WEIGHTS)


def expected(ids):
    """The parameters after a dense step."""
    dense = [jax.grad(loss)(PARAMS, *batch) for batch in zip(ids, WEIGHTS, strict=True)]
    return jax.tree.map(lambda old, *grads: old - np.mean(grads, axis=0), PARAMS, *dense)


def assert_close(found, expected):
    """On the last device, which has the parameters that all of them have."""
    # Some sums of numbers below 4.
    near(jax.tree.map(lambda leaf: leaf[-1], found), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@every_map
def test_pmean_is_the_mean_of_the_dense_gradients(name):
    assert_close(trained(name)["ours"], expected(OTHER_IDS))


@every_map
def test_the_mean_of_jax_is_right_over_the_same_ids_and_else_right_or_nan(name):
    same = expected(SAME_IDS)
    assert_close(trained(name)["same"], same)
    other = expected(OTHER_IDS)
    for mean in ("mixed", "both"):
        found = trained(name)[mean]
        if name == SHARED:
            assert_close(found, other)
        else:
            assert_close(found["w"], other["w"])
            assert np.isnan(found["t"]).any(axis=(1, 2)).all()
