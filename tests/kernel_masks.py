"""The masks [B, T, S] that the arguments of fused kernels stand for."""

import functools

import jax
import loops
import numpy as np
from compare import equal

import transformer_embed as te
from transformer_embed._src.kernels import row_indices, splash_kernels


def from_ids(queries, keys):
    return np.asarray(queries)[:, :, None] == np.asarray(keys)[:, None, :]


def mask_of_splash(mask, order, **options):
    rule = row_indices.RowRule(mask, "splash attention", order, **options)
    heads = splash_kernels.index_masks(rule, 1)
    ids = splash_kernels.splash_segment_ids(rule)
    allowed = np.asarray(heads.masks[0][: heads.shape[1], : heads.shape[2]])[None]
    return allowed if ids is None else allowed & from_ids(ids.q, ids.kv)


def mask_without_windows(mask, causal, segment_ids):
    allowed = np.ones(mask.dense().shape[1:], bool)
    allowed = np.tril(allowed) if causal else allowed
    return allowed if segment_ids is None else allowed & from_ids(*segment_ids)


def mask_of_flash(mask, order):
    return mask_without_windows(mask, **te.kernels.flash_attention_kwargs(mask, order=order))


def mask_of_mha(mask, order):
    options = te.kernels.mha_kwargs(mask, order=order, batch_size=2)
    ids = options["segment_ids"]
    return mask_without_windows(mask, options["causal"], None if ids is None else [ids] * 2)


def mask_of_dot_product(mask, order):
    options = te.kernels.dot_product_attention_kwargs(mask, order=order)
    queries, keys = (side.positions.shape[-1] for side in (mask.queries, mask.keys or mask.queries))
    ahead = np.arange(keys) - np.arange(queries)[:, None]
    left, right = options.get("local_window_size", (1000, 1000))
    allowed = ((-left <= ahead) & (ahead <= right) & (~(options["is_causal"] & (ahead > 0))))[None]
    lengths = options.get("key_value_seq_lengths", np.array([keys]))
    return allowed & (np.arange(keys) < np.asarray(lengths)[:, None, None])


KERNELS = {
    "splash_kernels": mask_of_splash,
    "flash_attention_kwargs": mask_of_flash,
    "mha_kwargs": mask_of_mha,
    "dot_product_attention_kwargs": mask_of_dot_product,
}


def check(kernel, options, mode, f, batches):
    """That a kernel is told the rule of the mask f(lib, *batch), or refuses it."""
    for batch in batches:
        mask = f(te, *map(jax.numpy.asarray, batch))
        try:
            found = KERNELS[kernel](mask, **options)
        except ValueError:
            continue
        assert_mask(found, f(loops, *batch).allowed, mask.queries.padding_mask)
        # A splash kernel compares by identity.
        if mode == "jit" and kernel != "splash_kernels":
            make = functools.partial(getattr(te.kernels, kernel), **options)
            equal(jax.jit(lambda *x, make=make: make(f(te, *x)))(*batch), make(mask))


def assert_mask(found, allowed, is_query):
    """At queries that are tokens and see a key; kernels differ in what the others get."""
    allowed = np.asarray(allowed)
    counts = np.asarray(is_query)[:, :, None] & allowed.any(-1, keepdims=True)
    found, allowed, counts = np.broadcast_arrays(found, allowed, counts)
    np.testing.assert_array_equal(found & counts, allowed & counts)
