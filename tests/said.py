"""What the arguments of fused kernels say of each pair of a query and a key."""

import functools

import jax
import loops
import numpy as np
from compare import equal

import transformer_embed as te
from transformer_embed._src.kernels import row_indices, splash_kernels


def from_ids(queries, keys):
    return np.asarray(queries)[:, :, None] == np.asarray(keys)[:, None, :]


def said_by_splash(mask, order, **options):
    rule = row_indices.RowRule(mask, "splash attention", order, **options)
    heads, ids = splash_kernels.heads_and_segment_ids(rule, 1)
    said = np.asarray(heads.masks[0][: heads.shape[1], : heads.shape[2]])[None]
    return said if ids is None else said & from_ids(ids.q, ids.kv)


def said_without_windows(mask, causal, segment_ids):
    said = np.ones(mask.dense().shape[1:], bool)
    said = np.tril(said) if causal else said
    return said if segment_ids is None else said & from_ids(*segment_ids)


def said_by_flash(mask, order):
    return said_without_windows(mask, **te.kernels.flash_attention_kwargs(mask, order=order))


def said_by_mha(mask, order):
    options = te.kernels.mha_kwargs(mask, order=order, batch_size=2)
    ids = options["segment_ids"]
    return said_without_windows(mask, options["causal"], None if ids is None else [ids] * 2)


def said_by_dot_product(mask, order):
    options = te.kernels.dot_product_attention_kwargs(mask, order=order)
    queries, keys = (side.positions.shape[-1] for side in (mask.queries, mask.keys or mask.queries))
    ahead = np.arange(keys) - np.arange(queries)[:, None]
    left, right = options.get("local_window_size", (1000, 1000))
    said = ((-left <= ahead) & (ahead <= right) & (~(options["is_causal"] & (ahead > 0))))[None]
    lengths = options.get("key_value_seq_lengths", np.array([keys]))
    return said & (np.arange(keys) < np.asarray(lengths)[:, None, None])


SAID = {
    "splash_kernels": said_by_splash,
    "flash_attention_kwargs": said_by_flash,
    "mha_kwargs": said_by_mha,
    "dot_product_attention_kwargs": said_by_dot_product,
}


def check(kernel, options, mode, f, batches):
    """That a kernel is told the rule of the mask f(lib, *batch), or refuses it."""
    for batch in batches:
        mask = f(te, *map(jax.numpy.asarray, batch))
        try:
            found = SAID[kernel](mask, **options)
        except ValueError:
            continue
        assert_said(found, f(loops, *batch).allowed, mask.queries.padding_mask)
        # A splash kernel compares by identity.
        if mode == "jit" and kernel != "splash_kernels":
            make = functools.partial(getattr(te.kernels, kernel), **options)
            equal(jax.jit(lambda *x, make=make: make(f(te, *x)))(*batch), make(mask))


def assert_said(said, allowed, is_query):
    """At queries that are tokens and see a key; kernels differ in what the others get."""
    allowed = np.asarray(allowed)
    counts = np.asarray(is_query)[:, :, None] & allowed.any(-1, keepdims=True)
    said, allowed, counts = np.broadcast_arrays(said, allowed, counts)
    np.testing.assert_array_equal(said & counts, allowed & counts)
