"""Tables sharded over a device mesh, by rows of the vocabulary, by columns, or by both: no device holds, sends or receives a whole one."""

import dataclasses
import fnmatch
import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed import _checks
from transformer_embed.functional.lookup import Table
from transformer_embed.functional.mesh import Axes, leading_without, per_dimension, spec_of
from transformer_embed.large_tables import rows

TABLES = "*/embeddings"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["vocab_size", "sharding", "batch"])
@dataclasses.dataclass(frozen=True, eq=False)
class Sharded(Table):
    """A table in shards: a leaf of a parameter tree that `lookup`, `tied_logits` and so every module of this package read.

    `shard_params` makes it. It is a pytree with the padded array as its one leaf: gradients, optimizer states and
    checkpoints have its form and stay in the shards. Rows past vocab_size are padding up to the mesh: no id reads them, they get no
    gradient, and their logits are half of the dtype's lowest number, which no softmax, argmax or cross-entropy sees.

    `lookup` of ids sends ids and rows: each shard reads the rows that it holds and the sum over the shards has one term that is not zero,
    so values are those of one device to the bit. `tied_logits` gives [..., padded vocab_size], split over the table's axes, and sends
    gradients of x; a table with columns over a mesh axis changes its columns for rows first. A gradient of the table is summed over the
    axes that the batch is split over and stays in the shard.

    Args:
        array: [padded vocab_size, d].
        vocab_size: number of rows that are no padding.
        sharding: of the array.
        batch: under automatic axes, the mesh axes that the first dimension of ids and x is split over, where it divides by them. Under
            explicit axes their own types say.

    Example:
        >>> import jax, numpy as np
        >>> from jax.sharding import Mesh, PartitionSpec
        >>> import transformer_embed as te
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ["model"])
        >>> params = {"embed": {"embeddings": np.ones([5, 2], np.float32)}}
        >>> table = te.sharding.shard_params(params, mesh, {"embed/*": PartitionSpec("model")})["embed"]["embeddings"]
        >>> type(table).__name__, table.shape, te.lookup(table, [4]).tolist()
        ('Sharded', (5, 2), [[1.0, 1.0]])

    Source:
        Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019), section 3,
        https://arxiv.org/abs/1909.08053
    """

    array: Any
    vocab_size: int
    sharding: NamedSharding
    batch: Axes

    @property
    def shape(self) -> tuple[int, int]:
        """(vocab_size, d), without the padding."""
        return (self.vocab_size, self.array.shape[-1])

    @property
    def dtype(self) -> jnp.dtype:
        """Of the rows."""
        return self.array.dtype

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        """See `Table`; split as the ids are, then as the columns are."""
        return _gather(self, ids)

    def logits(self, x: Float[Array, "... d"]) -> Float[Array, "... v"]:
        """See `Table`; split as x is, less the table's axes, then over the table's axes."""
        return _logits(self, x)

    def take_rows(self, ids: Int32[Array, "..."], distinct: Callable[[Array], Array]) -> rows.TakenRows:
        """See `Table`; on every device. The ids of the whole batch are gathered, and a sum over the shards has each row once."""
        mesh = self.sharding.mesh
        if _table_axes(self)[1]:
            raise ValueError(_checks.wanted("table", "rows over mesh axes, and whole columns", self.sharding.spec))
        held = jax.shard_map(distinct, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())(_replicate(ids, mesh))
        everywhere = dataclasses.replace(self, batch=())
        return _Taken(held, everywhere.gather(held), self.vocab_size, mesh, self.batch)

    def update_rows(self, step: Callable, needed: Sequence[Array], gradient: rows.Rows, states: Sequence["Sharded"]) -> list["Sharded"]:
        """See `Table`; each shard updates its own rows. Nothing is sent."""
        mesh, wholes = self.sharding.mesh, [self, *states]

        def update_shard(needed, ids, values, shards):
            own, order = _own_rows(self, ids, shards[0].shape[0])
            return step(needed, own, values[order], shards)

        whole, split = PartitionSpec(), [self.sharding.spec] * len(wholes)
        specs = ([_spec_inside(mesh, array) for array in needed], whole, whole, split)
        update_all = jax.shard_map(update_shard, mesh=mesh, in_specs=specs, out_specs=split)
        written = update_all(list(needed), gradient.ids, gradient.values, [each.array for each in wholes])
        return [dataclasses.replace(each, array=array) for each, array in zip(wholes, written, strict=True)]

    def shards(self, x: Float[Array, "... d"]) -> tuple[Array, Any, Axes, Axes, Sequence[Axes]]:
        """See `Table`."""
        rows, columns = _table_axes(self)
        return self.array, self.sharding.mesh, rows, columns, _split(self.sharding.mesh, self.batch, x, x.ndim - 1)


def shard_params(
    params: Any,
    mesh: Mesh,
    rules: Mapping[str, PartitionSpec],
    *,
    rng: Array | None = None,
    tables: str = TABLES,
    batch: Axes | None = None,
) -> Any:
    """A parameter tree on a mesh: its tables as `Sharded`, the other parameters as arrays, each split as its name says.

    A name is the parameter's place in the tree, such as `"transformer_embedding/~/token_embedding/embeddings"`. The first rule whose
    pattern matches it (`*` stands for any characters, slashes among them) says how it is split. What no rule matches is whole on every
    device.

    Args:
        params: a parameter tree, or a function that draws one from a key, which is compiled so that each device draws its own shards
            and holds no whole table: the numbers are those of one device. A tree is one of arrays that this process holds whole, of
            `Sharded` (to move them to another mesh), or of what jax.eval_shape gives: then the result has the shapes and shardings to
            compile for, or to restore a checkpoint into. A state of an optimizer will do: it has the names of the parameters. Of many
            processes, every one gives the same.
        mesh: of any shape, with automatic or explicit axes.
        rules: patterns and their specs: for each dimension a mesh axis, a tuple of them, or None.
        rng: a key, where params is a function. None: otherwise.
        tables: the pattern of the names of tables: of rank 2, split by a rule, and read by `lookup` and `tied_logits` alone. Another
            reader, hk.Embed for one, takes a plain array: leave its table out of the pattern.
        batch: under automatic axes, the mesh axes that the first dimension of ids is split over. With an axis of the table's rows among
            them, the ids of all its devices are gathered and the sums of rows scattered. None: the axes that the table does not use.

    Returns:
        A tree like params.

    Raises:
        TypeError: mesh is no Mesh; rules are no mapping of patterns to PartitionSpec; a traced parameter; a function and no key.
        ValueError: a pattern that matches no parameter; a spec of more dimensions than its parameter; an axis that the mesh lacks; a
            dimension, other than a table's rows, that its axes do not divide; a batch over the axes of a table's columns; a key and no
            function.

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
        Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs" (2021), https://arxiv.org/abs/2105.04663, whose
        annotations these are; that names choose them is own.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(_checks.wanted("mesh", "a jax.sharding.Mesh", type(mesh).__name__))
    if callable(params):
        key = _checks.as_key("rng", rng)
        return _draw(params, key, shard_params(jax.eval_shape(params, key), mesh, rules, tables=tables, batch=batch), mesh)
    _checks.unwanted("rng", rng, "params is no function")
    if not isinstance(batch, tuple | None):
        raise TypeError(_checks.wanted("batch", "a tuple of mesh axes, or None", repr(batch)))
    place = functools.partial(_place, mesh=mesh, tables=tables, batch=batch)
    return jax.tree_util.tree_map_with_path(place, params, _partition_specs(params, rules), is_leaf=_is_table)


def _spec_inside(mesh: Any, leaf: Any) -> PartitionSpec:
    """How a parameter is handed to every device: under explicit axes as it is split, else whole."""
    return jax.typeof(leaf).sharding.spec if AxisType.Explicit in mesh.axis_types else PartitionSpec()


def _own_rows(table: Sharded, ids: Int32[Array, "k"], size: int) -> tuple[Int32[Array, "k"], Int32[Array, "k"]]:
    """The ids that this shard holds, counted from its first row, then ids past its end, so that all ascend; and where they came from."""
    first = _index(_table_axes(table)[0]) * size
    order = (jnp.arange(len(ids), dtype=jnp.int32) + jnp.sum(ids < first, dtype=jnp.int32)) % len(ids)
    own = ids[order] - first
    here = (own >= 0) & (own < size) & (ids[order] < table.vocab_size)
    return jnp.where(here, own, jnp.arange(size, size + len(ids), dtype=jnp.int32)), order


def _replicate(ids: Int32[Array, "..."], mesh: Any) -> Int32[Array, "..."]:
    """On every device: few and small, the ids of the whole batch."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    if AxisType.Explicit not in mesh.axis_types:
        return jax.lax.with_sharding_constraint(ids, everywhere)
    home = jax.sharding if hasattr(jax.sharding, "reshard") else importlib.import_module("jax.experimental.shard")
    return home.reshard(ids, everywhere)


def _draw(init: Callable, rng: Array, targets: Any, mesh: Mesh) -> Any:
    """What init draws, in the form of its targets.

    Only the automatic partitioner splits the drawing of one array; explicit axes would draw it whole on every device.
    """
    automatic = Mesh(mesh.devices, mesh.axis_names)
    shardings = jax.tree.map(lambda target: NamedSharding(automatic, target.sharding.spec), targets)

    def hold(array: Array, target: Any) -> Any:
        if not isinstance(target, Sharded):
            return array
        padding = target.array.shape[0] - target.vocab_size
        return dataclasses.replace(target, array=jnp.pad(array, ((0, padding), (0, 0))))

    # The key of the surrounding mesh has its explicit axes in its type: as numbers of the host it has not.
    numbers, kind = np.asarray(jax.random.key_data(rng)), jax.random.key_impl(rng)
    with _set_mesh(automatic):
        draw = jax.jit(lambda key: jax.tree.map(hold, init(key), targets), out_shardings=shardings)
        drawn = draw(jax.random.wrap_key_data(jnp.asarray(numbers), impl=kind))
    return jax.tree.map(lambda array, target: jax.device_put(array, target.sharding), drawn, targets)


def _partition_specs(params: Any, rules: Mapping[str, PartitionSpec]) -> Any:
    """A tree like params, of PartitionSpec."""
    if not isinstance(rules, Mapping) or not all(isinstance(spec, PartitionSpec) for spec in rules.values()):
        raise TypeError(_checks.wanted("rules", "a mapping of patterns to PartitionSpec", rules))
    leaves, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_table)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    for name, leaf in named.items():
        if not hasattr(leaf, "shape"):
            raise TypeError(_checks.wanted("params", f"an array as {name}", type(leaf).__name__))
    shapes = {name: leaf.shape for name, leaf in named.items()}
    for pattern in rules:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in shapes):
            raise ValueError(_checks.wanted("rules", f"patterns that match one of {', '.join(shapes)}", repr(pattern)))
    return jax.tree.unflatten(tree, [_spec_of(name, shape, rules) for name, shape in shapes.items()])


def _spec_of(name: str, shape: tuple[int, ...], rules: Mapping[str, PartitionSpec]) -> PartitionSpec:
    spec = next((spec for pattern, spec in rules.items() if fnmatch.fnmatchcase(name, pattern)), PartitionSpec())
    if len(spec) > len(shape):
        raise ValueError(_checks.wanted("rules", f"at most {len(shape)} dimensions for {name}", spec))
    return spec


def _place(path: Any, leaf: Any, spec: PartitionSpec, *, mesh: Mesh, tables: str, batch: Axes | None) -> Any:
    """A parameter on the mesh."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    axes = per_dimension(spec, len(leaf.shape))
    used = [axis for some in axes for axis in some]
    for axis in (*used, *(batch or ())):
        if axis not in mesh.axis_names:
            raise ValueError(_checks.wanted("rules and batch", f"axes of the mesh, {mesh.axis_names}, for {name}", repr(axis)))
    if _checks.is_traced(leaf.array if isinstance(leaf, Sharded) else leaf):
        raise TypeError(
            _checks.wanted(
                "params", "arrays outside of jit (a function that draws them is compiled by shard_params itself)", f"a traced {name}"
            )
        )
    sharding = NamedSharding(mesh, spec)
    if not (used and len(leaf.shape) == 2 and fnmatch.fnmatchcase(name, tables)):
        _check_divides(name, leaf.shape, axes, mesh)
        return _put(leaf, leaf.shape, sharding)
    _check_divides(name, leaf.shape[1:], axes[1:], mesh)
    if batch is not None and set(batch) & set(axes[1]):
        raise ValueError(_checks.wanted("batch", f"other axes than those of the columns of {name}", batch))
    rows, shards = leaf.shape[0], math.prod(mesh.shape[axis] for axis in used)
    others = tuple(axis for axis in mesh.axis_names if axis not in used)
    array = _put(leaf, (-(-rows // shards) * shards, leaf.shape[1]), sharding)
    return Sharded(array, rows, sharding, others if batch is None else tuple(batch))


def _check_divides(name: str, shape: tuple[int, ...], axes: list[Axes], mesh: Mesh) -> None:
    for size, some in zip(shape, axes, strict=True):
        parts = math.prod(mesh.shape[axis] for axis in some)
        if size % parts:
            raise ValueError(_checks.wanted("rules", f"a dimension of {name} that {parts} devices divide", size))


def _put(leaf: Any, shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Zeros after the leaf's rows up to the shape; each device is sent its own part."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    if isinstance(leaf, Sharded):
        return _put(leaf.array, shape, sharding) if isinstance(leaf.array, jax.ShapeDtypeStruct) else _put(_whole(leaf), shape, sharding)
    host = np.asarray(leaf)

    def part(index):
        some = host[index]
        full = [len(range(*each.indices(size))) for each, size in zip(index, shape, strict=True)]
        return np.pad(some, [(0, size - have) for size, have in zip(full, some.shape, strict=True)])

    return jax.make_array_from_callback(shape, sharding, part)


def _whole(table: Sharded) -> np.ndarray:
    return np.asarray(table.array)[: table.vocab_size]


def _is_table(leaf: Any) -> bool:
    return isinstance(leaf, Table)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ids", "values"], meta_fields=["vocab_size", "mesh", "batch"])
@dataclasses.dataclass(frozen=True, eq=False)
class _Taken(rows.TakenRows):
    """Rows on every device; each finds those of its own part of the batch, and the gradient is summed over the parts."""

    mesh: Any
    batch: Axes

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        return _gather_taken(self, ids)


@jax.jit
def _gather_taken(taken: _Taken, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    split = _split(taken.mesh, taken.batch, ids, ids.ndim)

    def read(held, values, ids):
        return rows.TakenRows(held, values, taken.vocab_size).gather(ids).astype(taken.dtype)

    specs = (PartitionSpec(), PartitionSpec(), spec_of(*split))
    wide = taken.values.astype(jnp.promote_types(jnp.float32, taken.dtype))
    return jax.shard_map(read, mesh=taken.mesh, in_specs=specs, out_specs=spec_of(*split, ()))(taken.ids, wide, ids)


@jax.jit
def _gather(table: Sharded, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    """Every shard looks up the ids that it holds, zeros for the others; the sum over the shards has one term that is not zero."""
    row_axes, column_axes = _table_axes(table)
    split = _split(table.sharding.mesh, table.batch, ids, ids.ndim)
    if set(column_axes) & {axis for axes in split for axis in axes}:
        raise ValueError(_checks.wanted("table", "columns over a mesh axis that the ids do not use", f"both over {column_axes!r}"))
    by_dimension = [tuple(axis for axis in axes if axis in row_axes) for axes in split]
    elsewhere = tuple(axis for axis in row_axes if not any(axis in axes for axes in by_dimension))

    def read(shard, ids):
        for dimension, axes in enumerate(by_dimension):
            ids = jax.lax.all_gather(ids, axes, axis=dimension, tiled=True) if axes else ids
        row = jnp.clip(ids, 0, table.vocab_size - 1) - _index(row_axes) * shard.shape[0]
        # Unsigned, for a negative index would count from the end.
        rows = shard.at[row.astype(jnp.uint32)].get(mode="fill", fill_value=0).astype(table.dtype)
        rows = jax.lax.psum(rows, elsewhere) if elsewhere else rows
        for dimension, axes in enumerate(by_dimension):
            rows = jax.lax.psum_scatter(rows, axes, scatter_dimension=dimension, tiled=True) if axes else rows
        return rows

    # A row's gradient is summed in float32 over its repeats and over the devices, as on one device.
    wide = table.array.astype(jnp.promote_types(jnp.float32, table.dtype))
    specs = (spec_of(row_axes, column_axes), spec_of(*split))
    return jax.shard_map(read, mesh=table.sharding.mesh, in_specs=specs, out_specs=spec_of(*split, column_axes))(wide, ids)


@jax.jit
def _logits(table: Sharded, x: Float[Array, "... d"]) -> Float[Array, "... v"]:
    """Every shard multiplies by its rows; columns change hands for rows first, since a shard of the table is less than partial logits."""
    row_axes, column_axes = _table_axes(table)
    table_axes = (*row_axes, *column_axes)
    split = _split(table.sharding.mesh, table.batch, x, x.ndim - 1)
    kept = [leading_without(axes, table_axes) for axes in split[:-1]]
    gathered = [axes[len(some) :] for axes, some in zip(split[:-1], kept, strict=True)] + [split[-1]]
    if not {axis for axes in gathered for axis in axes} <= set(table_axes):
        raise ValueError(
            _checks.wanted("x", f"no other mesh axis after the table's in a dimension, nor over its last, {table_axes}", split)
        )
    dtype = jnp.promote_types(jnp.float32, jnp.promote_types(x.dtype, table.dtype))

    def multiply(shard, x):
        for dimension, axes in enumerate(gathered):
            x = jax.lax.all_gather(x, axes, axis=dimension, tiled=True) if axes else x
        if column_axes:
            shard = jax.lax.all_to_all(shard, column_axes, split_axis=0, concat_axis=1, tiled=True)
        logits = jnp.einsum("...d,vd->...v", x, shard, preferred_element_type=dtype)
        if table.array.shape[0] == table.vocab_size:
            return logits
        row = _index(table_axes) * shard.shape[0] + jnp.arange(shard.shape[0], dtype=jnp.int32)
        return jnp.where(row < table.vocab_size, logits, jnp.finfo(dtype).min / 2)

    specs = (spec_of(row_axes, column_axes), spec_of(*split))
    return jax.shard_map(multiply, mesh=table.sharding.mesh, in_specs=specs, out_specs=spec_of(*kept, table_axes))(table.array, x)


def _table_axes(table: Sharded) -> tuple[Axes, Axes]:
    """The mesh axes that the rows are over, and those of the columns."""
    rows, columns = per_dimension(table.sharding.spec, 2)
    return rows, columns


def _split(mesh: Any, batch: Axes, array: Array, batch_dimensions: int) -> list[Axes]:
    """The mesh axes that each dimension is split over: under explicit axes its type says, else `batch` does, for the first one."""
    if AxisType.Explicit in mesh.axis_types:
        return per_dimension(jax.typeof(array).sharding.spec, array.ndim)
    size = math.prod(mesh.shape[axis] for axis in batch)
    first = batch if batch_dimensions and array.shape[0] % size == 0 else ()
    return [first, *[()] * (array.ndim - 1)][: array.ndim]


def _index(axes: Axes) -> Int32[Array, ""] | int:
    return jax.lax.axis_index(axes) if axes else 0


def _set_mesh(mesh: Mesh) -> Any:
    # jax 0.6 has the context under another name.
    return (getattr(jax, "set_mesh", None) or getattr(jax.sharding, "use_mesh"))(mesh)  # noqa: B009
