"""Resizing the tables of a trained input layer: its vocabulary and its learned positions."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.layers.parameters import Params, as_params, table_path
from transformer_embed._src.tokens.lookup import Table


def resize_vocabulary(params: Params, vocab_size: int, *, rng: Array | None = None) -> Params:
    """Adds rows to the end of an embedder's token table, or removes rows from its end.

    The parameters of an output layer change with it. New rows are drawn from a normal distribution
    with each channel's mean and standard deviation over the old rows. The matching config is
    `dataclasses.replace(config, vocab_size=...)`.

    Args:
        params: a Haiku parameter tree with one token table, as `Embedder.init` makes. A sharded
            table keeps its sharding; its rows pass through this host, which must have access to all
            shards.
        vocab_size: the new number of rows, at least 1; a smaller number drops the last rows.
        rng: a key; may be None if no row is added.

    Returns:
        The tree, in which only that module's parameters are replaced.

    Raises:
        TypeError: vocab_size is not a Python int.
        ValueError: params does not have exactly one token table; rows are added and rng is None.

    Example:
        >>> import jax
        >>> import transformer_embed as te
        >>> embedder = te.Embedder(te.EmbedderConfig(vocab_size=256, d_model=64))
        >>> params = embedder.init(jax.random.key(0))
        >>> params = te.resize_vocabulary(params, 300, rng=jax.random.key(1))
        >>> params["transformer_embedding/~/token_embedding"]["embeddings"].shape
        (300, 64)

    Source:
        Hewitt, "Initializing New Word Embeddings for Pretrained Language Models" (2021),
        https://nlp.stanford.edu/~johnhew/vocab-expansion.html, with a diagonal covariance.
    """
    vocab_size = arguments.size("vocab_size", vocab_size)
    params = as_params("params", params)
    path = table_path("params", params, "token_embedding")
    # Sorted, because a table's number chooses its random rows, and a dict may have any order.
    resized = {
        name: _with_rows(f"{path}/{name}", table, vocab_size, rng, n)
        for n, (name, table) in enumerate(sorted(params[path].items()))
    }
    return {**params, path: resized}


def _with_rows(path: str, table: Any, vocab_size: int, rng: Array | None, salt: int) -> Any:
    """A parameter with a row for each id, with this number of rows."""
    on_host = table._all_rows() if isinstance(table, Table) else None
    is_sharded = on_host is not None
    rows: Any = on_host if is_sharded else _whole(path, table)
    more = vocab_size - rows.shape[0]
    if more > 0:
        if rng is None:
            raise arguments.value_error("rng", f"a key, to draw {more} new rows", "None")
        # NumPy sums 16-bit rows in 16 bits: the mean of 4096 ones of bfloat16 is 0.0625.
        wide = arguments.widened(rows)
        # Without the salt, all tables would get rows of the same random numbers.
        key = jax.random.fold_in(arguments.as_key(rng), salt)
        normal = jax.random.normal(key, (more, *rows.shape[1:]), wide.dtype)
        drawn = wide.mean(0, keepdims=True) + wide.std(0, keepdims=True) * normal
        # A sharded table's rows stay on the host: one device may have no room for them.
        library = np if is_sharded else jnp
        rows = library.concatenate([rows, drawn.astype(rows.dtype)])
    resized: Any = rows[:vocab_size]
    return table._with_rows(resized) if is_sharded else resized


def resize_positions(
    params: Params,
    max_len: int | tuple[int, ...],
    *,
    start: int = 0,
    shape: tuple[int, ...] | None = None,
) -> Params:
    """Interpolates an embedder's learned positions to another number of positions.

    The table is resized like an image: each new row is a weighted mean of nearby old rows
    (`jax.image.resize`, with antialiasing if there are fewer). The matching config is
    `dataclasses.replace(config, scheme=Learned(max_len=...))`, with the new number of rows.

    Rows on a line are interpolated linearly, those of a grid by cubic functions, as in timm: the
    result is that of PyTorch's `interpolate(..., mode="bicubic", antialias=True)`. The transformers
    library leaves antialiasing out, with which PyTorch also takes another cubic function: from a
    grid of 14 by 14 independent normal numbers to 24 by 24, results differ by 0.07 (root mean
    square); trained positions are smoother.

    Args:
        params: a Haiku parameter tree with one table of learned positions, as `Embedder.init`
            makes.
        max_len: the new number of positions, above `start`; with shape, the new shape of the grid.
        start: the `start` of the scheme. The rows before it do not change: those for padding, or
            for a class token before an image's patches (ViT, CLIP: 1).
        shape: the shape of the grid of the rows from start on, numbered in row-major order, such as
            (14, 14) for an image of 14 by 14 patches. None: they are on a line.

    Returns:
        The tree, in which only that table is replaced.

    Raises:
        TypeError: max_len or start is not a Python int; with shape, one of the two is not a tuple
            of ints.
        ValueError: max_len is not above start; start is outside the table; the table does not have
            a row for each point of shape, or max_len has other axes; params does not have exactly
            one table of learned positions.

    Example:
        >>> import jax
        >>> import transformer_embed as te
        >>> embedder = te.Embedder(te.EmbedderConfig(256, 64, scheme=te.Learned(max_len=512)))
        >>> params = te.resize_positions(embedder.init(jax.random.key(0)), 1024)
        >>> params["transformer_embedding/~/learned_positional_encoding"]["embeddings"].shape
        (1024, 64)

        >>> vit = te.Embedder(te.EmbedderConfig(1, 64, scheme=te.Learned(max_len=1 + 14 * 14)))
        >>> params = vit.init(jax.random.key(0))
        >>> params = te.resize_positions(params, (24, 24), start=1, shape=(14, 14))
        >>> params["transformer_embedding/~/learned_positional_encoding"]["embeddings"].shape
        (577, 64)

    Source:
        Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), section 3.2,
        https://arxiv.org/abs/2010.11929
    """
    params = as_params("params", params)
    path = table_path("params", params, "learned_positional_encoding")
    table = _whole(f"{path}/embeddings", params[path]["embeddings"])
    start = arguments.integer("start", start, at_least=0, at_most=table.shape[0] - 1)
    rows, width = table.shape[0] - start, table.shape[1]
    if shape is None:
        last = arguments.integer("max_len", max_len, at_least=start + 1, at_most=2**31 - 1)
        old, new, method = (rows,), (last - start,), "linear"
    else:
        old = arguments.entries("shape", shape, arguments.size)
        new = arguments.entries("max_len", max_len, arguments.size)
        arguments.check_same("shape", "a point for each row from start on", math.prod(old), rows)
        arguments.check_same("max_len", "as many axes as shape", len(new), len(old))
        method = "bicubic"
    # jax.image.resize rounds its weights to the dtype of what it resizes.
    grid = arguments.widened(table[start:]).reshape(*old, width)
    stretched = jax.image.resize(grid, (*new, width), method).reshape(-1, width)
    resized = jnp.concatenate([table[:start], stretched.astype(table.dtype)])
    return {**params, path: {**params[path], "embeddings": resized}}


def _whole(path: str, table: Any) -> Float[Array, "v ..."]:
    """A table as an array; an error if it is held in another way."""
    if isinstance(table, Table):
        got = f"a table held as {type(table).__name__}"
        raise arguments.value_error(f"params: {path}", "a whole array", got)
    return jnp.asarray(table)
