"""What the numbers beside a gradient's rows tell, and what they do not change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import equal

import transformer_embed as te
from transformer_embed._src.rows.fingerprint import fingerprint, fits

IDS = jnp.array([1, 4, 7, 20, 21])
MARK = fingerprint(IDS)
SCALES = (1, -1, 1e-12, 2.0**15, 0.3, 1e30, 1 / 3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_scale_and_a_cast_keep_the_ratios(dtype):
    for scale in SCALES:
        cast = (MARK.astype(dtype) * dtype(scale)).astype(dtype)
        assert fits(IDS, cast), scale
        assert fits(IDS, cast * dtype(3) - cast), scale


OTHERS = {
    "shifted": IDS + 1,
    "reversed": IDS[::-1],
    "one other": IDS.at[2].add(1),
    "one more": jnp.append(IDS, 22),
    "none": IDS[:0],
}
CHANGED = {
    "sign": jnp.sign(MARK),
    "zeros": 0 * MARK,
    "cast to float16": MARK.astype(jnp.float16),
    "shifted": MARK + 1e-20,
    "infinite": MARK * jnp.inf,
    "NaN": MARK * jnp.nan,
    "a mean": jnp.full_like(MARK, MARK.mean()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_ids_in_one_of_thousands_of_devices_do_not_fit(name):
    other = fingerprint(OTHERS[name])
    for devices in (1, 2, 30_000):
        mean = ((devices - 1) * np.float64(MARK) + np.float64(other)) / devices
        assert not fits(IDS, jnp.asarray(mean, jnp.float32))


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_no_scale_does_not_fit(name):
    assert not fits(IDS, CHANGED[name])


def test_each_number_has_every_exponent():
    marks = jax.vmap(fingerprint)(jnp.arange(1000).reshape(200, 5))[:, 0]
    # The first one is the unit of the others.
    assert {len(np.unique(column)) for column in np.asarray(marks).T[1:]} == {8}


@pytest.mark.slow
def test_lists_of_ids_rarely_share_a_fingerprint():
    ids = jnp.sort(jax.random.randint(jax.random.key(0), [5_000, 3], 0, 60), axis=1)
    marks = np.asarray(jax.vmap(fingerprint)(ids))[:, 0]
    assert len(np.unique(marks, axis=0)) == len(np.unique(ids, axis=0))


@pytest.mark.slow
def test_norms_are_those_of_the_rows_alone():
    for values in (jnp.zeros([5, 2]), 1e-20 * jnp.ones([5, 2]), jnp.ones([5, 2], jnp.bfloat16)):
        gradient = te.rows.RowGradient(IDS, values, 30)
        clip = lambda tree: optax.clip_by_global_norm(1.0).update(tree, optax.EmptyState())[0]
        equal(clip(gradient).values, clip(values))
