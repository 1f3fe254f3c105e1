"""Gradients by rows on devices that each have a batch: the mean is that of the dense gradients, or
NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import near
from jax import P
from meshes import mesh_of

import transformer_embed as te

DEVICES, VOCAB_SIZE = 2, 7
TABLE = np.random.default_rng(0).normal(size=(VOCAB_SIZE, 3)).astype(np.float32)
PARAMS = {"t": TABLE, "w": np.ones(3, np.float32)}
# Those of each device.
IDS = {"other": np.array([[0, 1, 1], [9, 1, 4]]), "same": np.array([[5, 1, 1]] * DEVICES)}
WEIGHTS = np.random.default_rng(1).normal(size=(DEVICES, 3, 3)).astype(np.float32)


def loss(params, ids, weights):
    """Each device has its own, of its own batch."""
    rows = te.lookup(params["t"], ids, out_of_range="zero")
    return jnp.sum(rows * weights * params["w"])


def on_shard_map(step):
    """With parameters that all devices share, as their types say."""

    def of_one(params, *batch):
        after = step(params, *jax.tree.map(lambda part: part[0], batch))
        return jax.tree.map(lambda leaf: leaf[None], after)

    specs = {"in_specs": (P(), P("d"), P("d")), "out_specs": P()}
    return jax.jit(jax.shard_map(of_one, mesh=mesh_of((DEVICES,), ("d",)), **specs))


PMAP = {"axis_name": "d", "in_axes": (None, 0, 0), "devices": jax.devices()[:DEVICES]}
MAPS = {
    "vmap": lambda step: jax.jit(jax.vmap(step, (None, 0, 0), axis_name="d")),
    "pmap": functools.partial(jax.pmap, **PMAP),
    "shard_map": on_shard_map,
}
# How the gradients of a step are averaged, and of which ids; and of each map some of these.
MEANS = {
    "ours": (te.rows.pmean, "other"),
    "mixed": (jax.lax.pmean, "other"),
    "both": (lambda *args: te.rows.pmean(jax.lax.pmean(*args), args[1]), "other"),
    "same": (jax.lax.pmean, "same"),
}
MEANS_OF = {
    "vmap": ("ours", "mixed"),
    "pmap": ("ours", "both", "same"),
    "shard_map": ("ours", "mixed", "same"),
}


def trained(name):
    """The parameters on each device after a step of SGD by each mean of a map, by one program."""
    sgd, means = optax.sgd(1.0), {key: MEANS[key] for key in MEANS_OF[name]}

    def gradient(params, ids, weights):
        def of_all(params):
            own = loss(params, ids, weights)
            # With check_vma, jax.grad sums the gradients of parameters that devices share.
            return jax.lax.pmean(own, "d") if name == "shard_map" else own

        _, grads = te.rows.value_and_grad(of_all, ids={"t": ids})(params)
        return jax.tree.map(lambda leaf: 0.3 * leaf / 0.3, grads)

    def steps(params, ids, weights):
        own = {key: gradient(params, each, weights) for key, each in ids.items()}
        grads = {key: mean(own[of_ids], "d") for key, (mean, of_ids) in means.items()}
        # Each updates parameters of its own, so that the step is proven once.
        copies = dict.fromkeys(means, params)
        return te.rows.apply_gradients(sgd, grads, sgd.init(copies), copies)[0]

    ids = {of_ids: IDS[of_ids] for _, of_ids in means.values()}
    return jax.device_get(MAPS[name](steps)(PARAMS, ids, WEIGHTS))


def expected(ids):
    """The parameters after a dense step, by NumPy."""
    after = {name: np.float64(leaf) for name, leaf in PARAMS.items()}
    for id_, weights in zip(ids.ravel(), WEIGHTS.reshape(-1, 3), strict=True):
        if id_ < VOCAB_SIZE:
            after["t"][id_] -= weights * PARAMS["w"] / DEVICES
            after["w"] -= weights * TABLE[id_] / DEVICES
    return after


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPS)
def test_mean_equals_dense_gradients_or_is_nan_where_jax_would_mix_rows(name):
    # Of the last device: all have the same parameters. Some sums of numbers below 4.
    close = functools.partial(near, rtol=1e-5, atol=1e-5)
    found = jax.tree.map(lambda leaf: leaf[-1], trained(name))
    other = expected(IDS["other"])
    for mean, after in found.items():
        if mean in ("mixed", "both") and name != "shard_map":
            close(after["w"], other["w"])
            assert np.isnan(after["t"]).any(axis=1).any()
        else:
            close(after, expected(IDS["same"]) if mean == "same" else other)
