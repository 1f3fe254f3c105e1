"""Resizing the tables of a trained input layer: its vocabulary and its learned positions."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from transformer_embed._src import arguments, conversions
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.parameters import Params, find_parameters
from transformer_embed._src.partitioning import gathered, on_every_device
from transformer_embed._src.pretrained.files import call_with_named_errors
from transformer_embed._src.pretrained.layer_parts import POSITIONS, TOKENS
from transformer_embed._src.tables.row_order import nearest_rows


def resize(
    params: Params,
    config: EmbedderConfig,
    new_config: EmbedderConfig,
    *,
    rng: Array | None = None,
    grids: Sequence[Sequence[int]] | None = None,
    keep_positions: bool = False,
) -> Params:
    """Resizes the tables of a trained input layer, so that they fit another config.

    Use it to add tokens to a vocabulary, to train on longer texts or larger images, or to pad a
    table so that the devices of a mesh can share it. new_config may differ in `vocab_size`,
    `row_multiple`, `spread` and the `max_len` of `Learned` positions, and in what changes no
    parameter's shape. All other tables are returned as they are, in their own dtypes.

    Ids are added or removed at the end of the vocabulary, and the parameters of an output layer
    change with the table. New rows are sampled from a normal distribution with the mean and the
    standard deviation of each channel over the old rows. Rows that are only padding are zeros.

    Learned positions are interpolated like an image: each new row is a weighted mean of nearby old
    rows (`jax.image.resize`, with antialiasing if there are fewer). Rows on a line are interpolated
    linearly, and rows on a grid by cubic functions, as in timm. With `keep_positions=True`, the old
    rows stay as they are instead.

    Args:
        params: A Haiku parameter tree with the parameters of config, as `Embedder.init` makes it,
            or of a whole model. A token table that lies on several devices keeps its sharding; its
            rows pass through the host of each process.
        config: The config that the parameters fit.
        new_config: The config that the returned parameters will fit, such as
            `dataclasses.replace(config, vocab_size=300)`.
        rng: A key, needed if rows are sampled.
        grids: The old and the new shape of the grid that positions lie on, numbered in row-major
            order, such as ((14, 14), (24, 24)) for the patches of images. Rows before the grid, as
            for a class token (ViT, CLIP), do not change. If None, positions are on a line from the
            scheme's `start` on, and the rows before it do not change.
        keep_positions: Whether learned positions keep their rows, as in transformers. Rows are
            added or removed at the end, and new ones are sampled like the rows of new ids. Set it
            if you train the model on longer texts: its outputs for short texts do not change.

    Returns:
        The tree, in which only the resized tables are replaced.

    Raises:
        TypeError: config or new_config is not an EmbedderConfig.
        ValueError: params do not fit config; the result would not fit new_config, or would spread
            the rows of a tied output layer; rows are sampled and rng is None; devices do not
            divide the new number of rows; the schemes have another `start`; grids do not have a
            point for each position, with as many positions before them; or there are grids and
            keep_positions.

    Example:
        >>> import dataclasses, jax
        >>> import transformer_embed as te
        >>> config = te.EmbedderConfig(vocab_size=256, d_model=64)
        >>> params = te.Embedder(config).init(jax.random.key(0))
        >>> larger = dataclasses.replace(config, vocab_size=300, row_multiple=128)
        >>> params = te.pretrained.resize(params, config, larger, rng=jax.random.key(1))
        >>> params["transformer_embedding/~/token_embedding"]["embeddings"].shape
        (384, 64)

        >>> vit = te.EmbedderConfig(1, 64, scheme=te.Learned(max_len=1 + 14 * 14))
        >>> larger = dataclasses.replace(vit, scheme=te.Learned(max_len=1 + 24 * 24))
        >>> params, grids = te.Embedder(vit).init(jax.random.key(0)), ((14, 14), (24, 24))
        >>> params = te.pretrained.resize(params, vit, larger, grids=grids)
        >>> params["transformer_embedding/~/learned_positional_encoding"]["embeddings"].shape
        (577, 64)

    Edge cases:
        - Grids are resized as by PyTorch's `interpolate(..., mode="bicubic", antialias=True)`.
          transformers leaves antialiasing out, with which PyTorch also takes another cubic
          function: from a grid of 14 by 14 independent normal numbers to 24 by 24, results differ
          by 0.07 (root mean square). Trained positions are smoother, so they differ by less.

    Source:
        New rows: Hewitt, "Initializing New Word Embeddings for Pretrained Language Models" (2021),
        https://nlp.stanford.edu/~johnhew/vocab-expansion.html, with a diagonal covariance.
        Positions: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), section 3.2,
        https://arxiv.org/abs/2010.11929
    """
    for name, value in {"config": config, "new_config": new_config}.items():
        arguments.instance(name, value, EmbedderConfig, "an EmbedderConfig")
    arguments.flag("keep_positions", keep_positions)
    if keep_positions:
        arguments.check_left_out("grids", grids, "keep_positions adds rows at the end")
    paths = find_parameters(params, config).paths
    _check_spread(new_config)
    resized = {**params}
    if _row_numbers(config) != _row_numbers(new_config):
        path = paths[_module(TOKENS)]
        resized[path] = _resized_token_tables(path, resized[path], config, new_config, rng)
    if grids is not None or _number_of_positions(config) != _number_of_positions(new_config):
        layout = _layout(config, new_config, grids)
        path = paths[_module(POSITIONS)]
        table = _as_jax_array(f"{path}/embeddings", resized[path]["embeddings"])
        if keep_positions:
            table = _extended(table, layout, rng)
        else:
            table = _interpolated(table, layout, "linear" if grids is None else "bicubic")
        resized[path] = {"embeddings": table}
    call_with_named_errors("new_config", find_parameters, resized, new_config)
    return resized


def _module(parameter: str) -> str:
    """Returns the path of a parameter's module."""
    return parameter.rpartition("/")[0]


def _as_jax_array(parameter: str, table: Any) -> Array:
    """Returns a table as a jax array; a jax array stays where it is.

    A masked array is refused, because jax would drop the mask.
    """
    return jnp.asarray(arguments.native(f"params: {parameter}", table))


def _check_spread(new_config: EmbedderConfig) -> None:
    """Raises a ValueError if the rows of a tied output layer would be spread."""
    if new_config.spread and new_config.output is not None and new_config.output.tied:
        want = "False for a tied output layer (or output=None, or te.OutputConfig(tied=False))"
        raise arguments.value_error("new_config.spread", want, True)


# --- The tables of tokens.


def _row_numbers(config: EmbedderConfig) -> tuple[int, int, bool]:
    """Returns what says which row of the token tables an id has."""
    return config.vocab_size, config.rows, config.spread


def _resized_token_tables(
    path: str, tables: Any, config: EmbedderConfig, new_config: EmbedderConfig, rng: Array | None
) -> dict[str, Any]:
    """Returns the parameters with a row for each id."""
    # Sorted, because a table's number chooses its random rows, and a dict may have any order.
    return {
        name: _with_other_rows(f"{path}/{name}", table, config, new_config, rng, number)
        for number, (name, table) in enumerate(sorted(tables.items()))
    }


def _with_other_rows(
    path: str,
    table: Any,
    config: EmbedderConfig,
    new_config: EmbedderConfig,
    rng: Array | None,
    salt: int,
) -> Any:
    """Returns a parameter with a row for each id, in the rows of another config."""
    # One device may have no room for what lies on many, so those rows stay on the host.
    sharding = getattr(table, "sharding", None)
    is_on_mesh = isinstance(sharding, NamedSharding) and sharding.num_devices > 1
    library = np if is_on_mesh else jnp
    rows: Any = gathered(path, table) if is_on_mesh else _as_jax_array(path, table)
    rows_by_id = rows[_rows_of_ids(path, config)]
    new_rows = _sampled(rows_by_id, new_config.vocab_size - config.vocab_size, rng, salt)
    # The last row is zeros, which padding takes.
    zeros = library.zeros((1, *rows.shape[1:]), rows.dtype)
    ids = np.full(new_config.rows, -1)
    ids[_rows_of_ids(path, new_config)] = np.arange(new_config.vocab_size)
    resized: Any = library.concatenate([rows_by_id, new_rows, zeros])[ids]
    return _on_mesh(path, resized, sharding) if is_on_mesh else resized


def _sampled(rows: Any, count: int, rng: Array | None, salt: int) -> Any:
    """Returns new rows with the mean and the standard deviation of each channel of the others."""
    if count <= 0:
        return rows[:0]
    if rng is None:
        raise arguments.value_error("rng", f"a key, to draw {count} new rows", "None")
    # NumPy sums 16-bit rows in 16 bits: the mean of 4096 ones of bfloat16 is 0.0625.
    wide = conversions.widened(rows)
    # Without the salt, all tables would get rows of the same random numbers.
    key = jax.random.fold_in(arguments.as_key(rng), salt)
    normal = jax.random.normal(key, (count, *rows.shape[1:]), wide.dtype)
    mean = wide.mean(0, keepdims=True)
    stddev = wide.std(0, keepdims=True)
    return (mean + stddev * normal).astype(rows.dtype)


def _rows_of_ids(path: str, config: EmbedderConfig) -> np.ndarray:
    """Returns the row of each id; only the token table may be spread."""
    order = config.row_order if path.endswith("/embeddings") else None
    return nearest_rows(np.arange(config.vocab_size, dtype=np.int32), config.rows, order)


def _on_mesh(path: str, rows: np.ndarray, sharding: Any) -> Array:
    """Returns rows of the host, on the devices of a mesh."""
    try:
        sharding.shard_shape(rows.shape)
    except ValueError as error:
        want = f"rows that the devices of {sharding.spec} divide (see row_multiple)"
        raise arguments.value_error(f"params: {path}", want, len(rows)) from error
    # Each device receives only its own part.
    return jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)


# --- The table of positions.

# The random numbers of new positions differ from the numbers of each token table.
POSITION_SALT = 1000


class GridLayout(NamedTuple):
    """Where the positions of a table lie.

    Args:
        first: The number of rows before the grid.
        shape: The old shape of the grid; a line has one axis.
        new_shape: The new shape.
    """

    first: int
    shape: tuple[int, ...]
    new_shape: tuple[int, ...]


def _number_of_positions(config: EmbedderConfig) -> int | None:
    """Returns the number of learned positions, or None if there are none."""
    scheme = config.scheme
    return scheme.max_len if scheme is not None and scheme.is_learned else None


def _layout(config: EmbedderConfig, new_config: EmbedderConfig, grids: Any) -> GridLayout:
    """Returns where the positions of both configs lie."""
    size = arguments.size("config.scheme.max_len", _number_of_positions(config))
    new_size = arguments.size("new_config.scheme.max_len", _number_of_positions(new_config))
    if grids is None:
        first = getattr(config.scheme, "start", 0)
        new_first = getattr(new_config.scheme, "start", 0)
        name = "new_config.scheme.start"
        arguments.check_same(name, "as in config", new_first, first)
        return GridLayout(first=first, shape=(size - first,), new_shape=(new_size - first,))
    shapes = functools.partial(arguments.entries, convert=arguments.size)
    shape, new_shape = arguments.entries("grids", grids, shapes, count=2)
    first = size - math.prod(shape)
    if first < 0 or first != new_size - math.prod(new_shape) or len(shape) != len(new_shape):
        want = (
            f"shapes of as many axes, of all but the first few of {size} and {new_size} positions"
        )
        raise arguments.value_error("grids", want, (shape, new_shape))
    return GridLayout(first=first, shape=shape, new_shape=new_shape)


def _interpolated(table: Array, layout: GridLayout, method: str) -> Array:
    """Returns the table of positions with a grid of another shape after the first rows."""
    table = on_every_device(table)
    width = table.shape[1]
    # jax.image.resize rounds its weights to the dtype of what it resizes.
    grid = conversions.widened(table[layout.first :]).reshape(*layout.shape, width)
    resized = jax.image.resize(grid, (*layout.new_shape, width), method).reshape(-1, width)
    return jnp.concatenate([table[: layout.first], resized.astype(table.dtype)])


def _extended(table: Array, layout: GridLayout, rng: Array | None) -> Array:
    """Returns the table of positions with fewer rows, or with sampled rows at the end."""
    table = on_every_device(table)
    (new_size,) = layout.new_shape
    rows = layout.first + new_size
    sampled = _sampled(table[layout.first :], rows - len(table), rng, POSITION_SALT)
    return jnp.concatenate([table[:rows], sampled])
