"""Resizing the tables of a trained input layer: its vocabulary and its learned positions."""

import functools
import math
from collections.abc import Mapping, Sequence
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
from transformer_embed._src.tables.row_order import rows_of_nearest_ids


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
    table so that its number of rows is a multiple of the number of devices. `new_config` may differ
    from `config` in `vocab_size`, `row_multiple`, `spread` and the `max_len` of `Learned`
    positions. It may also differ in any field that does not change the shape of a parameter, such
    as `dropout_rate`. Tables whose rows stay the same are returned as they are.

    Ids are added or removed at the end of the vocabulary, in the token table and in the parameters
    of an output layer. The rows of new ids are sampled from a normal distribution. In each channel,
    the distribution has the mean and the standard deviation of the old rows. Rows that
    `row_multiple` adds are zeros.

    Learned positions are interpolated like an image: each new row is a weighted mean of nearby old
    rows. Positions of texts are interpolated linearly. Positions on a grid (of the patches of an
    image) are interpolated by cubic functions, as in timm (PyTorch's image models). If there are
    fewer new rows than old rows, `jax.image.resize` also applies antialiasing. If you set
    `keep_positions=True`, positions are not interpolated.

    Args:
        params: The parameters that fit `config`, as `Embedder.init` makes them, or the parameters
            of a whole model. A token table that is split over several devices keeps its sharding.
            While such a table is resized, the host of each process needs memory for the whole
            table.
        config: The config that the parameters fit.
        new_config: The config that the returned parameters will fit, such as
            `dataclasses.replace(config, vocab_size=300)`.
        rng: A random key, from which new rows are sampled. Required if there are new ids, or if
            there are new positions and `keep_positions` is True.
        grids: The old and the new shape of the grid, if positions are points of a grid. For
            example, pass ((14, 14), (24, 24)) if images of 14 by 14 patches become images of 24 by
            24 patches. Positions are numbered in row-major order. Positions before the grid, such
            as the position of a class token (ViT, CLIP), do not change. If None, positions are on a
            line, as in texts. The position of the first token is `config.scheme.start`, which is 0
            in most models and 2 in RoBERTa. Table rows of positions below `config.scheme.start` do
            not change.
        keep_positions: Whether learned positions keep their rows, as in transformers. If True, rows
            are added or removed at the end, and new rows are sampled in the same way as the rows of
            new ids. If False, the rows are interpolated. Set True if you train the model on longer
            texts and the outputs for short texts must stay the same.

    Returns:
        A tree like `params`, in which the resized tables are replaced. All other leaves are the
        leaves of `params`.

    Raises:
        TypeError: `config` or `new_config` is not an `EmbedderConfig`.
        ValueError: There are several causes:

            - `params` do not fit `config`.
            - The configs differ in a field that cannot be resized, such as `d_model`.
            - `new_config` has both `spread` and a tied output layer.
            - New rows must be sampled, but `rng` is None.
            - The number of devices does not divide the new number of rows.
            - `grids` is None, and the position schemes of the two configs have different `start`s.
            - The two shapes in `grids` have different numbers of axes.
            - A table has too few rows for its grid, or the old and the new table have different
              numbers of rows before the grid.
            - Both `grids` and `keep_positions` are set.

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
        - Grids are resized as PyTorch's `interpolate(..., mode="bicubic", antialias=True)` does it.
          transformers sets `antialias=False`, for which PyTorch uses a different cubic function. If
          a grid of 14 by 14 independent normal numbers is resized to 24 by 24, the two results
          differ by 0.07 (root mean square). Trained positions are smoother than these numbers, so
          the two results differ by less.

    Source:
        Table rows of new ids are sampled from a normal distribution, as in Hewitt, "Initializing
        New Word Embeddings for Pretrained Language Models" (2021),
        https://nlp.stanford.edu/~johnhew/vocab-expansion.html. Hewitt uses the full covariance of
        the old rows, and this function only the diagonal. The interpolation of positions is from
        Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), section 3.2,
        https://arxiv.org/abs/2010.11929
    """
    arguments.instance("config", config, EmbedderConfig, "an EmbedderConfig")
    arguments.instance("new_config", new_config, EmbedderConfig, "an EmbedderConfig")
    arguments.flag("keep_positions", keep_positions)
    if keep_positions:
        arguments.check_left_out("grids", grids, "keep_positions adds rows at the end")
    # The path of each module in `params`, by the path that the module has in an `Embedder`.
    paths_in_params = find_parameters(params, config).paths
    # A tied output layer needs the rows of the table in the order of the ids.
    _check_not_spread_and_tied(new_config)
    resized = {**params}
    rows_change = _fields_about_rows(config) != _fields_about_rows(new_config)
    if rows_change:
        # The module of the token table.
        path = paths_in_params[_module_of(TOKENS)]
        resized[path] = _resized_token_tables(path, resized[path], config, new_config, rng)
    positions_change = _number_of_positions(config) != _number_of_positions(new_config)
    # Two grids may have equally many points, and differ in shape.
    if positions_change or grids is not None:
        # The number of rows before the grid, and the old and the new shape of the grid.
        layout = _old_and_new_grid(config, new_config, grids)
        # The module of the learned positions.
        path = paths_in_params[_module_of(POSITIONS)]
        table = _as_jax_array(f"{path}/embeddings", resized[path]["embeddings"])
        if keep_positions:
            new_table = _cut_or_extend(table, layout, rng)
        else:
            method = "linear" if grids is None else "bicubic"
            new_table = _interpolate(table, layout, method)
        resized[path] = {"embeddings": new_table}
    # `find_parameters` checks the shapes of all parameters. So this raises an error, which names
    # `new_config`, if the configs differ in anything else that changes a shape.
    call_with_named_errors("new_config", find_parameters, resized, new_config)
    return resized


def _module_of(parameter: str) -> str:
    """Returns the path of a parameter's module: "a/b" for "a/b/embeddings"."""
    module, _, _ = parameter.rpartition("/")
    return module


def _as_jax_array(parameter: str, table: Any) -> Array:
    """Returns a table as a jax array. If the table is one already, it stays on its devices.

    A masked array is refused, because jax would drop the mask.
    """
    return jnp.asarray(arguments.native(f"params: {parameter}", table))


def _check_not_spread_and_tied(new_config: EmbedderConfig) -> None:
    """Raises a ValueError if the output layer is tied to a token table that is spread.

    A tied output layer needs the rows of the table in the order of the ids, and `spread` puts them
    in another order.
    """
    if new_config.spread and new_config.output is not None and new_config.output.tied:
        want = "False for a tied output layer (or output=None, or te.OutputConfig(tied=False))"
        raise arguments.value_error("new_config.spread", want, True)


# --- The tables of tokens: the token table, and the table and the bias of an output layer.


def _fields_about_rows(config: EmbedderConfig) -> tuple[int, int, bool]:
    """Returns the fields of a config that decide in which table row each id is."""
    return config.vocab_size, config.rows, config.spread


def _resized_token_tables(
    module_path: str,
    tables: Mapping[str, Any],
    config: EmbedderConfig,
    new_config: EmbedderConfig,
    rng: Array | None,
) -> dict[str, Any]:
    """Returns the token tables by name, each with its rows in the order of the new config.

    `tables` has the token table, and the table and the bias of the output layer if it has them.
    """
    resized = {}
    # Each table gets random rows of its own, by a number that is folded into the key. The names are
    # sorted, so that the number does not depend on the order of the dict.
    for number, name in enumerate(sorted(tables)):
        path = f"{module_path}/{name}"
        resized[name] = _resized_table(path, tables[name], config, new_config, rng, salt=number)
    return resized


def _resized_table(
    path: str,
    table: Any,
    config: EmbedderConfig,
    new_config: EmbedderConfig,
    rng: Array | None,
    salt: int,
) -> Any:
    """Returns a table with its rows in the order of the new config.

    Rows of new ids are sampled, and rows that have no id are zeros. If the new vocabulary is
    smaller, the rows of the last ids are left out.

    Args:
        path: The path of the table.
        table: The old table, [config.rows, ...].
        config: The config that the table fits.
        new_config: The config that the result will fit, [new_config.rows, ...].
        rng: A key, or None if there are no new ids.
        salt: A number that is folded into the key. It differs between tables.
    """
    # One device may have no room for a table that is split over many, so such a table is resized on
    # the host.
    sharding: Any = getattr(table, "sharding", None)
    is_on_mesh = isinstance(sharding, NamedSharding) and sharding.num_devices > 1
    if is_on_mesh:
        library: Any = np
        rows: Any = gathered(path, table)
    else:
        library = jnp
        rows = _as_jax_array(path, table)
    # Row i of these rows belongs to id i. [config.vocab_size, ...]
    # `take` is one compiled program, and an index in brackets would be several.
    rows_by_id = rows.take(_row_of_each_id(path, config), axis=0)
    # If there are no new ids, this number is 0 or negative, and no rows are sampled.
    new_id_count = new_config.vocab_size - config.vocab_size
    sampled_rows = _sample_rows(rows_by_id, new_id_count, rng, salt)
    zeros = library.zeros((1, *rows.shape[1:]), rows.dtype)
    # Row i belongs to id i, also for new ids, and the last row is zeros.
    rows_by_id_and_zeros = library.concatenate([rows_by_id, sampled_rows, zeros])
    index_of_zeros = len(rows_by_id_and_zeros) - 1
    # For each row of the new table, the row that it is copied from: the row of its id, or the
    # zeros. For example, if the ids 0, 1 and 2 have the table rows 0, 2 and 1, and row 3 has no id,
    # the table rows 0, 1, 2 and 3 are copied from 0, 2, 1 and `index_of_zeros`.
    copied_from = np.full(new_config.rows, index_of_zeros)
    copied_from[_row_of_each_id(path, new_config)] = np.arange(new_config.vocab_size)
    resized = rows_by_id_and_zeros.take(copied_from, axis=0)
    return _on_mesh(path, resized, sharding) if is_on_mesh else resized


def _sample_rows(rows: Any, count: int, rng: Array | None, salt: int) -> Any:
    """Samples `count` new rows. Each channel has its mean and standard deviation in `rows`.

    If the count is 0 or less, the result has no rows. `salt` is folded into the key.
    """
    if count <= 0:
        return rows[:0]
    if rng is None:
        raise arguments.value_error("rng", f"a key, to draw {count} new rows", "None")
    # NumPy sums 16-bit rows in 16 bits: the mean of 4096 ones of bfloat16 would be 0.0625.
    wide_rows = conversions.widened(rows)
    key = jax.random.fold_in(arguments.as_key(rng), salt)
    normal = jax.random.normal(key, (count, *rows.shape[1:]), wide_rows.dtype)
    mean = wide_rows.mean(0, keepdims=True)
    stddev = wide_rows.std(0, keepdims=True)
    return (mean + stddev * normal).astype(rows.dtype)


def _row_of_each_id(path: str, config: EmbedderConfig) -> np.ndarray:
    """Returns the number of the table row of each id, [vocab_size], in the table at this path.

    Only the token table may have spread rows. In other tables, id i has row i.
    """
    is_token_table = path.endswith("/embeddings")
    row_order = config.row_order if is_token_table else None
    ids = np.arange(config.vocab_size, dtype=np.int32)
    # All of these ids are in the vocabulary, so each gets its own row.
    return rows_of_nearest_ids(ids, config.rows, row_order)


def _on_mesh(path: str, rows: np.ndarray, sharding: NamedSharding) -> Array:
    """Puts a table that is on the host onto the devices of a mesh."""
    try:
        sharding.shard_shape(rows.shape)
    except ValueError as error:
        want = f"rows that the devices of {sharding.spec} divide (see row_multiple)"
        raise arguments.value_error(f"params: {path}", want, len(rows)) from error
    # Each device receives only its own part.
    return jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)


# --- The table of positions.

# The salt of new positions differs from the numbers of all token tables.
POSITION_SALT = 1000


class GridLayout(NamedTuple):
    """The old and the new grid of a table of positions, whose rows are points of the grid.

    The rows are in row-major order. Positions on a line are a grid of one axis.

    Args:
        rows_before: The number of rows before the grid, which do not change.
        shape: The old shape of the grid.
        new_shape: The new shape of the grid, with as many axes.
    """

    rows_before: int
    shape: tuple[int, ...]
    new_shape: tuple[int, ...]


def _number_of_positions(config: EmbedderConfig) -> int | None:
    """Returns the number of learned positions, or None if there are none."""
    scheme = config.scheme
    return scheme.max_len if scheme is not None and scheme.is_learned else None


def _old_and_new_grid(config: EmbedderConfig, new_config: EmbedderConfig, grids: Any) -> GridLayout:
    """Returns the old and the new grid. If `grids` is None, these are two lines.

    A table for a class token and 14 * 14 patches has 1 row before the grid and the shape (14, 14).
    A line of 512 positions that starts at row 2 has 2 rows before the grid and the shape (512,).
    """
    # If a config has no learned positions, the number is None, which `size` refuses: the error
    # names the field of this config.
    table_rows = arguments.size("config.scheme.max_len", _number_of_positions(config))
    new_table_rows = arguments.size("new_config.scheme.max_len", _number_of_positions(new_config))
    if grids is None:
        start = getattr(config.scheme, "start", 0)
        new_start = getattr(new_config.scheme, "start", 0)
        arguments.check_same("new_config.scheme.start", "as in config", new_start, start)
        # A line is a grid with one axis: all positions from `start` on.
        line = (table_rows - start,)
        new_line = (new_table_rows - start,)
        return GridLayout(rows_before=start, shape=line, new_shape=new_line)
    # `grids` must be a sequence of two shapes, and `check_shape` checks each of them: a shape must
    # be a sequence, and each of its entries a size.
    check_shape = functools.partial(arguments.entries, convert=arguments.size)
    shape, new_shape = arguments.entries("grids", grids, check_shape, count=2)
    rows_before = table_rows - math.prod(shape)
    new_rows_before = new_table_rows - math.prod(new_shape)
    grid_fits_table = rows_before >= 0
    have_same_axes = len(shape) == len(new_shape)
    have_same_rows_before = rows_before == new_rows_before
    if not (grid_fits_table and have_same_axes and have_same_rows_before):
        want = (
            "two shapes with the same number of axes, and with the same number of positions before "
            f"the grid (there are {table_rows} and {new_table_rows} positions in all)"
        )
        raise arguments.value_error("grids", want, (shape, new_shape))
    return GridLayout(rows_before=rows_before, shape=shape, new_shape=new_shape)


def _interpolate(table: Array, layout: GridLayout, method: str) -> Array:
    """Interpolates a table of positions, so that the grid has the new shape.

    The rows before the grid do not change. `method` is an argument of `jax.image.resize`.
    """
    table = on_every_device(table)
    width = table.shape[1]
    rows_before = table[: layout.rows_before]
    rows_of_grid = table[layout.rows_before :]
    # `jax.image.resize` rounds its weights to the dtype of the grid, so 16-bit grids are widened.
    grid = conversions.widened(rows_of_grid).reshape(*layout.shape, width)
    new_grid_shape = (*layout.new_shape, width)
    new_grid = jax.image.resize(grid, new_grid_shape, method)
    new_rows_of_grid = new_grid.reshape(-1, width).astype(table.dtype)
    return jnp.concatenate([rows_before, new_rows_of_grid])


def _cut_or_extend(table: Array, layout: GridLayout, rng: Array | None) -> Array:
    """Cuts a table of positions on a line at the end, or adds sampled rows there."""
    table = on_every_device(table)
    # A line is a grid with one axis.
    (new_length,) = layout.new_shape
    new_size = layout.rows_before + new_length
    rows_of_line = table[layout.rows_before :]
    sampled_rows = _sample_rows(rows_of_line, new_size - len(table), rng, POSITION_SALT)
    return jnp.concatenate([table[:new_size], sampled_rows])
