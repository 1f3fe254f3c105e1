"""The tied output layer: the product of x with every row of an embedding table."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.functional.compiled import compiled
from transformer_embed._src.functional.lookup import Table, as_table
from transformer_embed._src.functional.partitioning import (
    OutputLayout,
    all_gather,
    index_along,
    partition_spec,
)


def tied_logits(
    x: ArrayLike, table: ArrayLike | Table, *, pad_id: int | None = None
) -> Float[Array, "... v"]:
    """The logits of an output layer that shares the embedding table: the product of x with every
    row.

    Args:
        x: [..., d], a floating dtype.
        table: [vocab_size, d], a floating dtype.
        pad_id: the id whose row counts as zeros, as in `lookup`: its logit is 0 and its row gets no
            gradient. The row must still be finite, because 0 times the row enters x's gradient. To
            sample from the logits, exclude it: 0 is not the lowest logit. None: no padding.

    Returns:
        [..., vocab_size], summed and returned in float32 (float64 if an input is). A sharded table
        pads the vocabulary: see `sharding.Sharded`.

    Raises:
        TypeError: x or the table does not have a floating dtype of 16 bits or more.
        ValueError: the table does not have rank 2, or its width is not that of x.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> te.tied_logits(jnp.array([1.0, 1.0]), jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [3.0, 7.0]

        Padding has a logit of 0, so this line comes before `jax.random.categorical`:

        >>> logits = te.tied_logits(jnp.array([-1.0]), jnp.array([[0.5], [1.0]]), pad_id=0)
        >>> logits.at[..., 0].set(-jnp.inf).tolist()
        [-inf, -1.0]

    Source:
        Press and Wolf, "Using the Output Embedding to Improve Language Models" (2017),
        https://arxiv.org/abs/1608.05859; Vaswani et al., "Attention Is All You Need" (2017),
        section 3.4, https://arxiv.org/abs/1706.03762
    """
    x, table = as_wide_as_table(x, table)
    pad_id = None if pad_id is None else arguments.int32("pad_id", pad_id)
    array, layout = table.output_layout(x) if isinstance(table, Table) else (table, None)
    return _logits(layout, table.shape[0], pad_id, x, array)


def as_wide_as_table(
    x: ArrayLike, table: ArrayLike | Table
) -> tuple[Float[Array, "... d"], Float[Array, "v d"] | Table]:
    """Floating x with a last axis as wide as the table."""
    table, x = as_table("table", table), arguments.as_floats("x", x)
    if x.ndim == 0 or x.shape[-1] != table.shape[1]:
        raise arguments.value_error(
            "x", f"a last axis of the table's width, {table.shape[1]}", f"shape {list(x.shape)}"
        )
    return x, table


def row_logits(x: Float[Array, "... d"], rows: Float[Array, "v d"]) -> Float[Array, "... v"]:
    """The product of x with every row, in float32 or wider."""
    dtype = arguments.compute_dtype(x.dtype, rows.dtype)
    if x.dtype != rows.dtype:
        x, rows = x.astype(dtype), rows.astype(dtype)
    return jnp.einsum("...d,vd->...v", x, rows, preferred_element_type=dtype)


@compiled(0, 1, 2)
def _logits(
    layout: OutputLayout | None,
    vocab_size: int,
    pad_id: int | None,
    x: Float[Array, "... d"],
    table: Float[Array, "v d"],
) -> Float[Array, "... v"]:
    """`tied_logits` of an array, which is padded if it is longer than the vocabulary."""

    def multiply(x, rows):
        axes = ()
        if layout is not None:
            x = all_gather(x, layout.gathered)
            rows = layout.whole_rows(rows)
            axes = layout.vocabulary
        logits = row_logits(x, rows)
        ids = index_along(axes) * rows.shape[0] + jnp.arange(rows.shape[0], dtype=jnp.int32)
        ids = jnp.expand_dims(ids, range(x.ndim - 1))
        if pad_id is not None and pad_id < vocab_size:
            logits = jnp.where(ids == pad_id, jnp.zeros((), logits.dtype), logits)
        if table.shape[0] > vocab_size:
            lowest = jnp.finfo(logits.dtype).min / 2
            logits = jnp.where(ids < vocab_size, logits, lowest)
        return logits

    if layout is None:
        return multiply(x, table)
    # Unchecked: shard_map cannot infer that logits are equal along an axis that x was gathered over
    # and the table is not split over.
    multiply_all = jax.shard_map(
        multiply,
        mesh=layout.mesh,
        in_specs=layout.specs(),
        out_specs=partition_spec(*layout.tokens, layout.vocabulary),
        check_vma=False,
    )
    return multiply_all(x, table)
