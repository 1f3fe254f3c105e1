"""Resizing the tables of a trained input layer: its vocabulary and its learned positions."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.embed import check_spread
from transformer_embed._src.layers.parameters import Params, layer_paths
from transformer_embed._src.partitioning import gathered, on_every_device
from transformer_embed._src.positions.schemes import PositionScheme
from transformer_embed._src.tables.row_order import nearest_rows


def resize(
    params: Params,
    config: EmbedderConfig,
    new_config: EmbedderConfig,
    *,
    rng: Array | None = None,
    grids: Sequence[Sequence[int]] | None = None,
) -> Params:
    """Resizes the tables of a trained input layer to those of another config.

    new_config may differ in `vocab_size`, `row_multiple`, `spread` and the `max_len` of `Learned`
    positions, and in what changes no parameter's shape. A table that these do not concern is
    returned as it is, in its own dtype.

    Ids are added or removed at the end of the vocabulary, and the parameters of an output layer
    change with the table. New rows are drawn from a normal distribution with each channel's mean
    and standard deviation over the old rows; rows that are only padding are zeros.

    Learned positions are interpolated like an image: each new row is a weighted mean of nearby old
    rows (`jax.image.resize`, with antialiasing if there are fewer). Rows on a line are interpolated
    linearly. Those of a grid by cubic functions, as in timm: the result is that of PyTorch's
    `interpolate(..., mode="bicubic", antialias=True)`. The transformers library leaves antialiasing
    out, with which PyTorch also takes another cubic function: from a grid of 14 by 14 independent
    normal numbers to 24 by 24, results differ by 0.07 (root mean square); trained positions are
    smoother.

    Args:
        params: a Haiku parameter tree with those of config, as `Embedder.init` makes. A token table
            that lies on several devices keeps its sharding; its rows pass through the host,
            of each process.
        config: that of params.
        new_config: that of the result, such as `dataclasses.replace(config, vocab_size=300)`.
        rng: a key; may be None if no id is added.
        grids: the old and the new shape of the grid that positions lie on, numbered in row-major
            order, such as ((14, 14), (24, 24)) for the patches of images. Rows before the grid, as
            for a class token (ViT, CLIP), do not change. None: positions are on a line from the
            scheme's `start` on, and the rows before it do not change.

    Returns:
        The tree, in which only the resized tables are replaced.

    Raises:
        TypeError: config or new_config is not an EmbedderConfig.
        ValueError: params are not those of config; the result would not be those of new_config, or
            would spread the rows of a tied output layer; ids are added and rng is None; devices
            that do not divide the new number of rows; the schemes have another `start`; grids do
            not have a point for each position, with as many positions before them.

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

    Source:
        New rows: Hewitt, "Initializing New Word Embeddings for Pretrained Language Models" (2021),
        https://nlp.stanford.edu/~johnhew/vocab-expansion.html, with a diagonal covariance.
        Positions: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), section 3.2,
        https://arxiv.org/abs/2010.11929
    """
    configs = config, new_config
    for name, each in {"config": config, "new_config": new_config}.items():
        arguments.instance(name, each, EmbedderConfig, "an EmbedderConfig")
    paths, params = layer_paths("params", config, params), {**params}
    check_spread("new_config.spread", new_config)
    if _rows(config) != _rows(new_config):
        path = paths["token_embedding"]
        # Sorted, because a table's number chooses its random rows, and a dict may have any order.
        params[path] = {
            name: _moved(f"{path}/{name}", table, configs, rng, n)
            for n, (name, table) in enumerate(sorted(params[path].items()))
        }
    scheme, new_scheme = config.scheme, new_config.scheme
    if grids is not None or _positions(scheme) != _positions(new_scheme):
        layout = _grids(scheme, new_scheme, grids)
        path = paths["learned_positional_encoding"]
        table = jnp.asarray(params[path]["embeddings"])
        method = "linear" if grids is None else "bicubic"
        params[path] = {"embeddings": _interpolated(table, *layout, method)}
    layer_paths("new_config", new_config, params)
    return params


def _rows(config: EmbedderConfig) -> tuple[int, int, bool]:
    """What says which row of the token tables an id has."""
    return config.vocab_size, config.rows, config.spread


def _positions(scheme: PositionScheme | None) -> int | None:
    """The number of learned positions; None: there are none."""
    return scheme.max_len if scheme is not None and scheme.is_learned else None


def _interpolated(
    table: Array, first: int, shape: tuple[int, ...], new_shape: tuple[int, ...], method: str
) -> Array:
    """The table of positions with a grid of another shape after the first ones."""
    table, width = on_every_device(table), table.shape[1]
    # jax.image.resize rounds its weights to the dtype of what it resizes.
    grid = arguments.widened(table[first:]).reshape(*shape, width)
    rows = jax.image.resize(grid, (*new_shape, width), method).reshape(-1, width)
    return jnp.concatenate([table[:first], rows.astype(table.dtype)])


def _grids(
    scheme: Any, new_scheme: Any, grids: Any
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The number of positions before a grid, its old shape and its new one."""
    size = arguments.size("config.scheme.max_len", _positions(scheme))
    new_size = arguments.size("new_config.scheme.max_len", _positions(new_scheme))
    if grids is None:
        first, name = scheme.start, "new_config.scheme.start"
        arguments.check_same(name, "that of config", new_scheme.start, first)
        return first, (size - first,), (new_size - first,)
    shapes = functools.partial(arguments.entries, convert=arguments.size)
    shape, new_shape = arguments.entries("grids", grids, shapes, count=2)
    first = size - math.prod(shape)
    if first < 0 or first != new_size - math.prod(new_shape) or len(shape) != len(new_shape):
        want = (
            f"shapes of as many axes, of all but the first few of {size} and {new_size} positions"
        )
        raise arguments.value_error("grids", want, (shape, new_shape))
    return first, shape, new_shape


def _moved(
    path: str, table: Any, configs: Sequence[EmbedderConfig], rng: Array | None, salt: int
) -> Any:
    """A parameter with a row for each id, from the rows of one config in those of another."""
    old, new = configs
    # One device may have no room for what lies on many: those rows stay on the host.
    sharding = getattr(table, "sharding", None)
    is_on_mesh = isinstance(sharding, NamedSharding) and sharding.num_devices > 1
    library = np if is_on_mesh else jnp
    rows: Any = gathered(path, table) if is_on_mesh else jnp.asarray(table)
    by_id = rows[_rows_of_ids(path, old)]
    more = _drawn(by_id, new.vocab_size - old.vocab_size, rng, salt)
    # Padding takes the last one, of zeros.
    zeros = library.zeros((1, *rows.shape[1:]), rows.dtype)
    ids = np.full(new.rows, -1)
    ids[_rows_of_ids(path, new)] = np.arange(new.vocab_size)
    moved: Any = library.concatenate([by_id, more, zeros])[ids]
    return _placed(path, moved, sharding) if is_on_mesh else moved


def _drawn(rows: Any, count: int, rng: Array | None, salt: int) -> Any:
    """New rows with the mean and the standard deviation of each channel of the others."""
    if count <= 0:
        return rows[:0]
    if rng is None:
        raise arguments.value_error("rng", f"a key, to draw {count} new rows", "None")
    # NumPy sums 16-bit rows in 16 bits: the mean of 4096 ones of bfloat16 is 0.0625.
    wide = arguments.widened(rows)
    # Without the salt, all tables would get rows of the same random numbers.
    key = jax.random.fold_in(arguments.as_key(rng), salt)
    normal = jax.random.normal(key, (count, *rows.shape[1:]), wide.dtype)
    drawn = wide.mean(0, keepdims=True) + wide.std(0, keepdims=True) * normal
    return drawn.astype(rows.dtype)


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
