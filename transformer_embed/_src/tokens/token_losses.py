"""The loss of each token and the entropy of its prediction, one chunk of tokens at a time.

Unlike the sum of all losses (cross_entropy.py), each of them may get another cotangent, so their
gradients cannot be computed before the cotangents are known: the backward pass computes the logits
of a chunk again. A chunk is a step of a `scan` and a `jax.checkpoint`, which keeps its x and labels
only; inside it, `_of_chunk` has a rule of its own, which keeps one [chunk, vocabulary] array where
autodiff of its arithmetic would keep several.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.partitioning import (
    OutputSplit,
    all_gather,
    split_like,
    varying,
    varying_axes,
)
from transformer_embed._src.sequences.runs import of_previous_token
from transformer_embed._src.tokens.losses import (
    Batch,
    ChunkLosses,
    LossOptions,
    array_and_split,
    cut_into_chunks,
    join_chunks,
    losses_and_logit_gradients,
    nan_outside,
    targets,
    weighted,
)


def token_losses(
    options: LossOptions, table: Any, bias: Array | None, batch: Batch
) -> tuple[Array, Array | None]:
    """At each label its weighted loss and, if `options.with_entropy`, the entropy; else None.

    Both are 0 at labels that are not counted.
    """
    dtype = arguments.compute_dtype(batch.x.dtype, table.dtype)
    x, labels, counted, weights = targets(options, batch, dtype)
    array, split = array_and_split(x, table)
    bias = split.bias(bias, array.shape[0])
    received, of_labels = split.receive(x, labels)
    of_tokens = PartitionSpec(*split.tokens)
    run = functools.partial(_on_device, options, split)
    run_all = split.map(run, (of_tokens, *split.specs()), of_tokens)
    # Split as x again: over axes of the table too, along which its tokens were gathered.
    losses, entropies = jax.tree.map(
        lambda a: split_like(a, x), run_all(of_labels, received, array, bias)
    )
    losses = weighted(losses, nan_outside(options, labels, weights))
    if options.with_entropy:
        entropies = jnp.where(counted, entropies, 0)
    if options.shift:
        back = functools.partial(of_previous_token, steps=options.shift)
        losses, entropies = jax.tree.map(back, (losses, entropies))
    return losses, entropies


def _on_device(
    options: LossOptions,
    split: OutputSplit,
    labels: Int32[Array, "..."],
    x: Float[Array, "... c"],
    shard: Float[Array, "r k"],
    bias: Array | None,
) -> tuple[Array, Array | None]:
    """Each token's loss and entropy, on one of the devices."""
    x, rows = all_gather(x, split.gathered), split.exchange(shard, 0, 1)
    dtype = arguments.compute_dtype(x.dtype, rows.dtype)
    # These carry the gradients of the rows and the bias, so that they are summed over the chunks in
    # the wide dtype, and over devices after that.
    wide_rows, bias = jax.tree.map(lambda array: array.astype(dtype), (rows, bias))
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves((labels, x, rows, bias))))
    x, wide_rows, bias = jax.tree.map(lambda array: varying(array, axes), (x, wide_rows, bias))

    # In a loop nothing can be shared with the backward pass: barriers against that would only cost.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(_, chunk):
        return None, _of_chunk(options, split, *chunk, rows, wide_rows, bias)

    chunks = cut_into_chunks(options.chunk_size, labels[..., None], x)
    _, values = jax.lax.scan(step, None, chunks)

    return jax.tree.map(lambda chunks: join_chunks(chunks, labels.size, labels.shape), values)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _of_chunk(options: LossOptions, split: OutputSplit, *arrays: Any) -> tuple[Array, Array | None]:
    """Each token's loss and entropy [t, 1]; see `_unweighted` for the arrays."""
    found = _unweighted(options, split, *arrays)
    return found.losses, found.entropies


@functools.partial(_of_chunk.defjvp, symbolic_zeros=True)
def _of_chunk_jvp(
    options: LossOptions, split: OutputSplit, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    _, x, rows, wide_rows, _ = primals
    found = _unweighted(options, split, *primals)
    _, of_x, _, of_rows, of_bias = tangents
    multiply = functools.partial(jnp.einsum, "td,vd->tv", preferred_element_type=wide_rows.dtype)
    logit_tangents = jnp.zeros_like(found.gradients)
    if not isinstance(of_x, SymbolicZero):
        logit_tangents += multiply(of_x, rows)
    if not isinstance(of_rows, SymbolicZero):
        logit_tangents += multiply(x, of_rows)
    if not isinstance(of_bias, SymbolicZero | None):
        logit_tangents += of_bias.astype(wide_rows.dtype)[None]

    def tangent(gradients):
        of_rows = (gradients * logit_tangents).sum(-1, keepdims=True)
        return jax.lax.psum(of_rows, split.vocabulary)

    of_losses = found.factors * tangent(found.gradients)
    of_entropies = tangent(found.entropy_gradients) if options.with_entropy else None
    return (found.losses, found.entropies), (of_losses, of_entropies)


def _unweighted(
    options: LossOptions,
    split: OutputSplit,
    labels: Int32[Array, "t 1"],
    x: Float[Array, "t d"],
    rows: Float[Array, "r d"],
    wide_rows: Float[Array, "r d"],
    bias: Array | None,
) -> ChunkLosses:
    """The losses of a chunk. wide_rows are the rows; only they have a gradient."""
    ones = jnp.ones(labels.shape, wide_rows.dtype)
    return losses_and_logit_gradients(options, split, rows, bias, (x, labels, ones))
