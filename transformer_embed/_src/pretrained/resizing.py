"""Resizing the tables of a trained input layer: its vocabulary and its learned positions."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.parameters import Params, as_params, table_path
from transformer_embed._src.partitioning import gathered, on_every_device
from transformer_embed._src.tokens.row_order import nearest_rows
from transformer_embed._src.tokens.stand_in import StandIn


def resize_vocabulary(
    params: Params, config: EmbedderConfig, new_config: EmbedderConfig, *, rng: Array | None = None
) -> Params:
    """Moves an embedder's token table into the rows of another config.

    That may have another `vocab_size`, `row_multiple` or `spread`. Ids are added or removed at the
    end of the vocabulary, and the parameters of an output layer change with the table. New rows are
    drawn from a normal distribution with each channel's mean and standard deviation over the old
    rows; rows that are only padding are zeros.

    Args:
        params: a Haiku parameter tree with one token table, as `Embedder.init` makes. A table that
            lies on several devices keeps its sharding; its rows pass through the host, of each
            process.
        config: that of params.
        new_config: that of the result, such as `dataclasses.replace(config, vocab_size=300)`.
        rng: a key; may be None if no id is added.

    Returns:
        The tree, in which only that module's parameters are replaced.

    Raises:
        TypeError: config or new_config is not an EmbedderConfig.
        ValueError: params does not have exactly one token table, or not that of config; ids are
            added and rng is None; devices that do not divide the new number of rows.

    Example:
        >>> import dataclasses, jax
        >>> import transformer_embed as te
        >>> config = te.EmbedderConfig(vocab_size=256, d_model=64)
        >>> params = te.Embedder(config).init(jax.random.key(0))
        >>> larger = dataclasses.replace(config, vocab_size=300, row_multiple=128)
        >>> params = te.resize_vocabulary(params, config, larger, rng=jax.random.key(1))
        >>> params["transformer_embedding/~/token_embedding"]["embeddings"].shape
        (384, 64)

    Source:
        Hewitt, "Initializing New Word Embeddings for Pretrained Language Models" (2021),
        https://nlp.stanford.edu/~johnhew/vocab-expansion.html, with a diagonal covariance.
    """
    for name, each in {"config": config, "new_config": new_config}.items():
        arguments.instance(name, each, EmbedderConfig, "an EmbedderConfig")
    params = as_params("params", params)
    path = table_path("params", params, "token_embedding")
    # Sorted, because a table's number chooses its random rows, and a dict may have any order.
    resized = {
        name: _moved(f"{path}/{name}", table, (config, new_config), rng, n)
        for n, (name, table) in enumerate(sorted(params[path].items()))
    }
    return {**params, path: resized}


def _moved(
    path: str, table: Any, configs: Sequence[EmbedderConfig], rng: Array | None, salt: int
) -> Any:
    """A parameter with a row for each id, from the rows of one config in those of another."""
    old, new = configs
    # One device may have no room for what lies on many: those rows stay on the host.
    sharding = getattr(table, "sharding", None)
    is_on_mesh = isinstance(sharding, NamedSharding) and sharding.num_devices > 1
    library = np if is_on_mesh else jnp
    rows: Any = gathered(path, table) if is_on_mesh else _whole(path, table)
    arguments.check_same(f"params: {path}", "the rows of config", rows.shape[0], old.rows)
    of_old, of_new = (_rows_of_ids(path, config) for config in configs)
    more, tail = new.vocab_size - old.vocab_size, rows.shape[1:]
    parts = [rows[of_old]]
    if more > 0:
        if rng is None:
            raise arguments.value_error("rng", f"a key, to draw {more} new rows", "None")
        # NumPy sums 16-bit rows in 16 bits: the mean of 4096 ones of bfloat16 is 0.0625.
        wide = arguments.widened(parts[0])
        # Without the salt, all tables would get rows of the same random numbers.
        key = jax.random.fold_in(arguments.as_key(rng), salt)
        normal = jax.random.normal(key, (more, *tail), wide.dtype)
        drawn = wide.mean(0, keepdims=True) + wide.std(0, keepdims=True) * normal
        parts.append(drawn.astype(rows.dtype))
    # Padding takes the last one, of zeros.
    by_id = library.concatenate([*parts, library.zeros((1, *tail), rows.dtype)])
    held = np.full(new.rows, -1)
    held[of_new] = np.arange(new.vocab_size)
    moved: Any = by_id[held]
    return _placed(path, moved, sharding) if is_on_mesh else moved


def _rows_of_ids(path: str, config: EmbedderConfig) -> np.ndarray:
    """The row of each id; only the token table may be spread."""
    order = config.row_order if path.endswith("/embeddings") else None
    return nearest_rows(np.arange(config.vocab_size, dtype=np.int32), config.rows, order)


def _placed(path: str, rows: np.ndarray, sharding: Any) -> Array:
    """Rows of the host, on the devices of a mesh."""
    try:
        sharding.shard_shape(rows.shape)
    except ValueError as error:
        want = f"rows that the devices of {sharding.spec} divide (see row_multiple)"
        raise arguments.value_error(f"params: {path}", want, len(rows)) from error
    # Each device receives only its own part.
    return jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)


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
    table = on_every_device(_whole(f"{path}/embeddings", params[path]["embeddings"]))
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
    if isinstance(table, StandIn):
        raise table.use_error()
    return jnp.asarray(table)
