"""Arrays that should be alike, or trees of them."""

import functools

import jax
import numpy as np


def _alike(compare, got, want):
    is_one = isinstance(got, list) or jax.tree_util.all_leaves([got])
    if is_one:
        compare(got, want)
    else:
        jax.tree.map(compare, got, want)


def equal(got, want):
    _alike(np.testing.assert_array_equal, got, want)


def near(got, want, *, atol=0.0, rtol=0.0):
    _alike(functools.partial(np.testing.assert_allclose, atol=atol, rtol=rtol), got, want)
