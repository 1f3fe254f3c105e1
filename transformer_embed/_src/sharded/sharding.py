"""Parameter trees on a device mesh: a rule for each parameter's name says how it is split, and
tables become `Sharded`.

`shard_params` places a tree, or lets each device draw its own part of one. The module `sharded`
says what a table does on the mesh. `replicated_rows` and `exchanged_rows` say how the rows of cut
and of dealt tables are read and trained.
"""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from transformer_embed._src import arguments
from transformer_embed._src.functional.lookup import Table
from transformer_embed._src.functional.partitioning import Axes, spec_axes
from transformer_embed._src.sharded import dealing
from transformer_embed._src.sharded.sharded import Sharded, padded_size, place_rows

__all__ = ["Sharded", "shard_params"]

TABLES = "*/embeddings"
VIRTUAL_SHARDS = 4096
# Positions are int32, and positions past the end pad buffers.
MAX_SIZE = 2**31 - 2**26


def shard_params(
    params: Any,
    mesh: Mesh,
    rules: Mapping[str, PartitionSpec],
    *,
    rng: Array | None = None,
    tables: str = TABLES,
    batch_axes: Axes | None = None,
    deal: str | None = None,
    virtual_shards: int = VIRTUAL_SHARDS,
    capacity: float = 1.0,
) -> Any:
    """Puts a parameter tree on a mesh: tables become `Sharded`, and the rule for a parameter's name
    says how it is split.

    A name is the parameter's path in the tree, such as
    `"transformer_embedding/~/token_embedding/embeddings"`. The first rule whose pattern matches it
    decides (`*` stands for any characters, slashes included). A parameter that no rule matches is
    replicated.

    A table is either cut into contiguous blocks of rows, or dealt (see `deal`). This also decides
    how its rows travel:

    - Rows of a cut table are replicated. Training by rows sends every distinct row of the whole
      batch to every device, which is cheaper up to some dozens of devices and works for any batch.
      Rows are not exchanged, even if the batch is split over their mesh axes: an exchange has
      buffers of a fixed size, and in vocabulary order the frequent ids, and so most of the load,
      are on one device.
    - Rows of a dealt table are exchanged. In training by rows, in `lookup` and in its dense
      gradient, each device asks the owners for the rows that its own part of the batch reads, and
      sends their gradients back. What a device sends hardly grows with the number of devices, and
      not with the table. The batch must be split over the mesh axes of the rows. For other ids (if
      the devices do not divide their number, for example), `lookup` reads from all shards as in a
      cut table, and training by rows raises an error.

    Args:
        params: a parameter tree, or a function that draws one from a key. The function is compiled
            so that each device draws its own shards and no device holds a whole table; the values
            are the same as on one device. A tree holds whole arrays, `Sharded` tables (to move them
            to another mesh), or shapes from jax.eval_shape: then the result has the shapes and
            shardings to compile for, or to restore a checkpoint into. An optimizer state works too,
            because its paths end in the parameters' names. With many processes, every process
            passes the same tree.
        mesh: of any shape, with automatic or explicit axes.
        rules: patterns and their specs: for each dimension a mesh axis, a tuple of them, or None.
        rng: a key, required if params is a function; otherwise must be None.
        tables: a pattern for the names of tables: of rank 2, split by a rule, and read only by
            `lookup` and `tied_logits`. Other modules, such as hk.Embed, need a plain array: leave
            their tables out of the pattern. An array of rank 1 with such a name has one number for
            each row, such as row-wise Adagrad's state.
        batch_axes: under automatic axes, the mesh axes that the first dimension of ids is split
            over. None: the axes that the table does not use; for a dealt table, all axes of the
            mesh. If a cut table's rows are split over a batch axis, ids are all-gathered and rows
            reduce-scattered over that axis.
        deal: a pattern for the names of tables to deal: their rows are spread over virtual shards,
            so that the frequent ids of a vocabulary sorted by frequency are not all on one device,
            and rows are exchanged. None: all tables are cut. A table that a tied output layer reads
            cannot be dealt.
        virtual_shards: a power of two that the number of devices along the rows' axes divides. A
            dealt table's array, and so its checkpoint, is the same on every such mesh.
        capacity: for dealt tables. Each device can send a fixed number of ids to each other device:
            the mean load of a batch without repeats, plus a margin that randomly spread ids exceed
            in less than one step in 1e9. A capacity c makes it at least c times the mean load. An
            id that does not fit reads as NaN and gets no update; `Sharded.exchange_load` counts
            these for a batch.

    Returns:
        A tree like params.

    Raises:
        TypeError: mesh is not a Mesh; rules are not a mapping of patterns to PartitionSpec; tables
            or deal is not a string; a traced parameter; params is a function and rng is None.
        ValueError: a pattern that matches no parameter; a spec with more dimensions than its
            parameter; an axis that the mesh lacks; a dimension, other than a table's rows, that the
            number of devices along its axes does not divide; a batch over the axes of a table's
            columns; rng without a function; a dealt table whose columns are split, whose batch is
            not split over the axes of its rows, or whose virtual shards the devices do not divide;
            a capacity that is not positive.

    Example:
        >>> import jax, numpy as np
        >>> from jax.sharding import Mesh, PartitionSpec
        >>> import transformer_embed as te
        >>> embedder = te.make_embedder(te.EmbedderConfig(vocab_size=1000, d_model=64))
        >>> mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ["data", "model"])
        >>> rules = {"*/token_embedding/embeddings": PartitionSpec("model")}
        >>> params = te.sharding.shard_params(embedder.init, mesh, rules, rng=jax.random.key(0))
        >>> embedder.apply(params, None, [[1, 2, 3]], is_training=False).shape
        (1, 3, 64)

    Source:
        Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs" (2021),
        https://arxiv.org/abs/2105.04663
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(arguments.wanted("mesh", "a jax.sharding.Mesh", type(mesh).__name__))
    if not isinstance(batch_axes, tuple | None):
        raise TypeError(
            arguments.wanted("batch_axes", "a tuple of mesh axes, or None", repr(batch_axes))
        )
    if (
        arguments.integer("virtual_shards", virtual_shards, at_least=2, at_most=2**20).bit_count()
        != 1
    ):
        raise ValueError(arguments.wanted("virtual_shards", "a power of two", virtual_shards))
    if not isinstance(tables, str):
        raise TypeError(arguments.wanted("tables", "a pattern of names", repr(tables)))
    if not isinstance(deal, str | None):
        raise TypeError(arguments.wanted("deal", "a pattern of names, or None", repr(deal)))
    options = _Options(
        mesh,
        tables,
        batch_axes,
        deal,
        virtual_shards,
        arguments.real("capacity", capacity, above=0),
    )
    if callable(params):
        key = arguments.as_key("rng", rng)
        return _init_on_mesh(
            params, key, options, _place_tree(jax.eval_shape(params, key), rules, options)
        )
    arguments.unwanted("rng", rng, "params is not a function")
    return _place_tree(params, rules, options)


class _Options(NamedTuple):
    """The arguments of `shard_params` that hold for every parameter."""

    mesh: Mesh
    tables: str
    batch_axes: Axes | None
    deal: str | None
    virtual_shards: int
    capacity: float


def _place_tree(params: Any, rules: Mapping[str, PartitionSpec], options: _Options) -> Any:
    place = functools.partial(_place_leaf, options=options)
    return jax.tree_util.tree_map_with_path(
        place, params, _partition_specs(params, rules, options.deal), is_leaf=_is_table
    )


def _partition_specs(params: Any, rules: Mapping[str, PartitionSpec], deal: str | None) -> Any:
    """A tree like params, of PartitionSpec."""
    if not isinstance(rules, Mapping) or not all(
        isinstance(spec, PartitionSpec) for spec in rules.values()
    ):
        raise TypeError(arguments.wanted("rules", "a mapping of patterns to PartitionSpec", rules))
    leaves, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_table)
    named = {_name(path): leaf for path, leaf in leaves}
    for name, leaf in named.items():
        if not hasattr(leaf, "shape"):
            raise TypeError(arguments.wanted("params", f"an array as {name}", type(leaf).__name__))
    shapes = {name: leaf.shape for name, leaf in named.items()}
    for pattern in [*rules, *([] if deal is None else [deal])]:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in shapes):
            argument = "rules" if pattern in rules else "deal"
            raise ValueError(
                arguments.wanted(
                    argument, f"patterns that match one of {', '.join(shapes)}", repr(pattern)
                )
            )
    return jax.tree.unflatten(
        tree, [_matching_spec(name, shape, rules) for name, shape in shapes.items()]
    )


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _matching_spec(
    name: str, shape: tuple[int, ...], rules: Mapping[str, PartitionSpec]
) -> PartitionSpec:
    spec = next(
        (spec for pattern, spec in rules.items() if fnmatch.fnmatchcase(name, pattern)),
        PartitionSpec(),
    )
    while len(spec) > len(shape) and spec[-1] is None:
        spec = PartitionSpec(*spec[:-1])
    if len(spec) > len(shape):
        raise ValueError(
            arguments.wanted("rules", f"at most {len(shape)} dimensions for {name}", spec)
        )
    return spec


def _place_leaf(path: Any, leaf: Any, spec: PartitionSpec, *, options: _Options) -> Any:
    """A parameter on the mesh."""
    name, mesh, batch_axes = _name(path), options.mesh, options.batch_axes
    axes = spec_axes(spec, len(leaf.shape))
    used = [axis for some in axes for axis in some]
    for axis in (*used, *(batch_axes or ())):
        if axis not in mesh.axis_names:
            raise ValueError(
                arguments.wanted(
                    "rules and batch_axes",
                    f"axes of the mesh, {mesh.axis_names}, for {name}",
                    repr(axis),
                )
            )
    if arguments.is_traced(leaf.array if isinstance(leaf, Sharded) else leaf):
        want = (
            "arrays outside of jit (a function that draws them is compiled by shard_params itself)"
        )
        raise TypeError(arguments.wanted("params", want, f"a traced {name}"))
    sharding = NamedSharding(mesh, spec)
    # A row-wise optimizer may have one number of state for each row of a table.
    is_table = len(leaf.shape) in (1, 2) and fnmatch.fnmatchcase(name, options.tables)
    if not (used and is_table):
        _check_divides(name, leaf.shape, axes, mesh)
        return _put_on_mesh(leaf, leaf.shape, sharding)
    _check_divides(name, leaf.shape[1:], axes[1:], mesh)
    if batch_axes is not None and set(batch_axes) & set(used[len(axes[0]) :]):
        raise ValueError(
            arguments.wanted(
                "batch_axes", f"other axes than those of the columns of {name}", batch_axes
            )
        )
    parts = math.prod(mesh.shape[axis] for axis in used)
    if options.deal is not None and fnmatch.fnmatchcase(name, options.deal):
        return _deal(name, leaf, axes, parts, sharding, options)
    others = tuple(axis for axis in mesh.axis_names if axis not in used)
    size = padded_size(leaf.shape[0], parts)
    array = _put_on_mesh(leaf, (size, *leaf.shape[1:]), sharding)
    return Sharded(
        array, leaf.shape[0], sharding, others if batch_axes is None else tuple(batch_axes)
    )


def _deal(
    name: str, leaf: Any, axes: list[Axes], parts: int, sharding: NamedSharding, options: _Options
) -> Sharded:
    """A dealt table on the mesh."""
    batch_axes = (
        options.mesh.axis_names if options.batch_axes is None else tuple(options.batch_axes)
    )
    if any(axes[1:]):
        raise ValueError(
            arguments.wanted(
                "deal", f"rows over mesh axes, and whole columns, for {name}", sharding.spec
            )
        )
    if not set(axes[0]) <= set(batch_axes):
        raise ValueError(
            arguments.wanted(
                "batch_axes",
                f"the mesh axes of the rows of {name}, {axes[0]}, among others, since it is dealt",
                batch_axes,
            )
        )
    if options.virtual_shards % parts:
        want = f"a number of devices along {axes[0]} that divides {options.virtual_shards} virtual shards, to deal {name}"
        raise ValueError(arguments.wanted("mesh", want, parts))
    deal = dealing.Deal(leaf.shape[0], options.virtual_shards)
    if deal.size > MAX_SIZE:
        raise ValueError(
            arguments.wanted(
                "params",
                f"at most {MAX_SIZE} rows for {name}, padding included, to deal it",
                deal.size,
            )
        )
    array = _put_on_mesh(leaf, (deal.size, *leaf.shape[1:]), sharding, deal)
    return Sharded(
        array, leaf.shape[0], sharding, batch_axes, options.virtual_shards, options.capacity
    )


def _check_divides(name: str, shape: tuple[int, ...], axes: list[Axes], mesh: Mesh) -> None:
    for size, some in zip(shape, axes, strict=True):
        parts = math.prod(mesh.shape[axis] for axis in some)
        if size % parts:
            raise ValueError(
                arguments.wanted(
                    "rules", f"a dimension of {name} that {parts} devices divide", size
                )
            )


def _put_on_mesh(
    leaf: Any, shape: tuple[int, ...], sharding: NamedSharding, deal: dealing.Deal | None = None
) -> Any:
    """The leaf on the mesh; for a shape, the shape to compile for."""
    if isinstance(leaf.array if isinstance(leaf, Sharded) else leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    rows = leaf.in_vocabulary_order() if isinstance(leaf, Sharded) else np.asarray(leaf)
    return place_rows(rows, shape, sharding, deal)


def _init_on_mesh(init: Callable, rng: Array, options: _Options, targets: Any) -> Any:
    """The tree that init draws, sharded and padded like its targets.

    Under explicit axes, every device would draw whole arrays; only automatic axes split the
    drawing.
    """
    automatic = Mesh(options.mesh.devices, options.mesh.axis_names)
    shardings = jax.tree.map(lambda target: NamedSharding(automatic, target.sharding.spec), targets)

    def pad_or_deal(array: Array, target: Any) -> Any:
        if not isinstance(target, Sharded):
            return array
        if target.deal is None:
            padding = (0, target.array.shape[0] - target.vocab_size)
            padded = jnp.pad(array, [padding, *[(0, 0)] * (array.ndim - 1)])
            return dataclasses.replace(target, array=padded)
        dealt = dealing.deal_rows(target.deal, automatic, target.axes[0], array)
        return dataclasses.replace(target, array=dealt)

    # A key's type contains the explicit axes of the surrounding mesh; its data on the host does
    # not.
    numbers, kind = np.asarray(jax.random.key_data(rng)), jax.random.key_impl(rng)
    with _set_mesh(automatic):
        draw = jax.jit(
            lambda key: jax.tree.map(pad_or_deal, init(key), targets), out_shardings=shardings
        )
        drawn = draw(jax.random.wrap_key_data(jnp.asarray(numbers), impl=kind))
    return jax.tree.map(
        lambda array, target: jax.device_put(array, target.sharding), drawn, targets
    )


def _is_table(leaf: Any) -> bool:
    return isinstance(leaf, Table)


def _set_mesh(mesh: Mesh) -> Any:
    # jax 0.6 has the context under another name.
    return (getattr(jax, "set_mesh", None) or getattr(jax.sharding, "use_mesh"))(mesh)  # noqa: B009
