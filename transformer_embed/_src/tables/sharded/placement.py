"""Parameter trees on a device mesh, split by a rule for each parameter's name."""

import fnmatch
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from transformer_embed._src import arguments
from transformer_embed._src.partitioning import Axes, devices_along, gathered, spec_axes
from transformer_embed._src.tables.rows.row_gradient import by_name, check_shapes, is_leaf
from transformer_embed._src.tables.sharded.row_order import RowOrder
from transformer_embed._src.tables.sharded.table import Sharded, put, sharded
from transformer_embed._src.tables.sharded.table_split import TableSplit

TABLES = "*embeddings"
VIRTUAL_SHARDS = 4096
# The array of a contiguous table has the same size on all meshes whose devices divide this number:
# Megatron-LM's `make-vocab-size-divisible-by`, and the lanes of a TPU.
ROW_MULTIPLE = 128
# Of a table's rows: a statistic over all of them changes by less than half of this.
MOST_PADDING = 0.01


def shard_params(
    params: Any,
    mesh: Mesh,
    rules: Mapping[str, PartitionSpec],
    *,
    tables: str = TABLES,
    batch_axes: Axes | None = None,
    stripe: str | None = None,
    virtual_shards: int = VIRTUAL_SHARDS,
    capacity: float = 1.0,
) -> Any:
    """Puts a parameter tree on a mesh, split by a rule for each parameter's name.

    A name is the parameter's path in the tree, such as
    `"transformer_embedding/~/token_embedding/embeddings"` (Haiku writes `~` for `__init__`). The
    first rule whose pattern matches the name decides; `*` stands for any characters, slashes
    included. A parameter that no rule matches is replicated. Tables become `Sharded`.

    Up to some dozens of devices, rules are all that you need. Beyond that, `stripe` large
    tables, so that devices exchange only the rows that each of them reads. "Tables on a mesh", a
    section of the reference page, says how rows lie and travel in both cases.

    An optimizer that trains a sharded table densely sees its array, padding included. Update by
    update of one number this changes nothing. But a root mean square over the table is
    sqrt(vocab_size / padded vocab_size) of that over its rows: the steps of adafactor and
    scale_by_param_block_rms are so many times those on one device, and those that clip_by_block_rms
    clips are divided by it. Adafactor factors a table from min_dim_size_to_factor rows on, padding
    included. If padding is more than 1 % of a table's rows, a warning says its share.

    Args:
        params: a tree of parameters, an optimizer state (its paths end in the parameters' names),
            or shapes from jax.eval_shape. It may hold `Sharded` tables of another mesh, whose rows
            go from device to device. With several processes, all pass the same tree and rules.
        mesh: of any shape, with automatic or explicit axes.
        rules: patterns and their specs: for each dimension a mesh axis, a tuple of them, or None.
            In a tuple of explicit and automatic axes, put the explicit ones first. (In another
            order, a step on jax 0.9 or 0.12 returns the table whole along the automatic axes.)
        tables: a pattern for the names of tables, [vocab_size, d], that a rule splits, and that
            only `lookup` and `linear_logits` read. Other modules, such as hk.Embed, need a plain
            array: leave their tables out. An array [vocab_size] with such a name has one number for
            each row, such as row-wise Adagrad's state.
        batch_axes: the mesh axes that you split the batch (the first dimension of ids) over. Only
            automatic axes need it: with explicit ones, the type of ids says it. None: the axes that
            the table does not use; for a striped table, all axes of the mesh.
        stripe: a pattern for the names of tables to stripe. None: none, all are contiguous.
            A table that a tied output layer reads cannot be striped.
        virtual_shards: the parts that a striped table is dealt to, of which each device stores
            several: a power of two of at least 2 that the number of devices along the rows' axes
            divides.
        capacity: raise it if ids of a striped table do not fit into the buffers of the
            exchange (`exchange_load` counts them, and they read as NaN): there is then room for at
            least this many times the mean of a batch without repeats.

    Returns:
        A tree like params; if params holds shapes, one of the shapes and shardings to compile for,
        to restore a checkpoint into, or to draw parameters of by `init_params`.

    Raises:
        TypeError: a rule is not a PartitionSpec; params is a function.
        ValueError: parameters or rules that are not the same in every process; a pattern that
            matches no parameter; a spec that does not fit its parameter or the mesh (only a
            table's rows are padded); batch_axes that are not a tuple of the mesh's axes; a striped
            table whose columns are split, whose batch is not split over the axes of its rows, or
            whose virtual shards the devices do not divide; virtual_shards or a capacity out of
            range.

    Example:
        >>> import jax, numpy as np
        >>> from jax.sharding import Mesh, PartitionSpec
        >>> import transformer_embed as te
        >>> embedder = te.Embedder(te.EmbedderConfig(vocab_size=1024, d_model=64))
        >>> mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ["data", "model"])
        >>> rules = {"*/token_embedding/embeddings": PartitionSpec("model")}
        >>> params = te.sharding.shard_params(embedder.init(jax.random.key(0)), mesh, rules)
        >>> embedder.apply(params, None, [[1, 2, 3]], is_training=False).shape
        (1, 3, 64)

    Source:
        Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs" (2021),
        https://arxiv.org/abs/2105.04663
    """
    axes = arguments.instance("mesh", mesh, Mesh | AbstractMesh, "a jax.sharding.Mesh").axis_names
    want = "a mapping of patterns to PartitionSpecs"
    rules = arguments.instance("rules", rules, Mapping, want)
    tables = arguments.instance("tables", tables, str, "a pattern")
    stripe = arguments.instance("stripe", stripe, str | None, "a pattern, or None")
    if not isinstance(batch_axes, tuple | None) or not all(i in axes for i in batch_axes or ()):
        want = f"a tuple of axes of the mesh, {axes}, or None"
        raise arguments.value_error("batch_axes", want, repr(batch_axes))
    virtual_shards = arguments.integer("virtual_shards", virtual_shards, at_least=2, at_most=2**20)
    if virtual_shards.bit_count() != 1:
        raise arguments.value_error("virtual_shards", "a power of two", virtual_shards)
    capacity = arguments.positive("capacity", capacity)
    if callable(params):
        want = "a tree (for a function, that of its shapes, jax.eval_shape(init, rng))"
        raise arguments.type_error("params", want, arguments.describe(params))
    return _Placement(mesh, rules, tables, batch_axes, stripe, virtual_shards, capacity).tree(
        params
    )


def init_params(init: Callable[[Array], Any], rng: Array, shapes: Any) -> Any:
    """Draws a parameter tree on a mesh: no device ever holds the whole of a sharded table.

    Args:
        init: a function that draws parameters from a key, such as `Embedder.init`.
        rng: a key, the same in every process.
        shapes: what `shard_params` makes of `jax.eval_shape(init, rng)`.

    Returns:
        The tree that `shard_params` makes of `init(rng)`, up to rounding.

    Raises:
        TypeError: rng is not one key.
        ValueError: shapes are not those of the parameters that init draws, or have no shardings;
            the key is not the same in every process.

    Example:
        >>> import jax, numpy as np
        >>> from jax.sharding import Mesh, PartitionSpec
        >>> import transformer_embed as te
        >>> embedder = te.Embedder(te.EmbedderConfig(vocab_size=1024, d_model=64))
        >>> mesh, rng = Mesh(np.array(jax.devices()[:1]), ["model"]), jax.random.key(0)
        >>> rules = {"*/token_embedding/embeddings": PartitionSpec("model")}
        >>> shapes = te.sharding.shard_params(jax.eval_shape(embedder.init, rng), mesh, rules)
        >>> params = te.sharding.init_params(embedder.init, rng, shapes)
        >>> embedder.apply(params, None, [[1, 2, 3]], is_training=False).shape
        (1, 3, 64)
    """
    init = arguments.instance("init", init, Callable, "a function of a key")
    rng = arguments.as_key(rng)
    drawn = jax.eval_shape(init, rng)
    check_shapes("shapes", drawn, shapes)
    placed: Any = [getattr(target, "sharding", None) for target in jax.tree.leaves(shapes)]
    each = zip(by_name(drawn), placed, strict=True)
    unplaced = [name for name, sharding in each if not isinstance(sharding, NamedSharding)]
    if unplaced or not placed:
        want = "what shard_params makes of jax.eval_shape(init, rng)"
        raise arguments.value_error("shapes", want, f"no sharding on a mesh for {unplaced}")
    return _drawn(init, rng, shapes, placed[0].mesh)


def _is_of_this_process(leaf: Any) -> bool:
    """Whether a leaf has numbers, and this process has all of them."""
    if isinstance(leaf, Sharded | jax.ShapeDtypeStruct) or arguments.is_traced(leaf):
        return False
    return getattr(leaf, "is_fully_addressable", True)


def _check_alike(mesh: Mesh | AbstractMesh, parts: Mapping[str, Any]) -> None:
    """Raises a ValueError unless all processes of a mesh have the same parts; all must ask."""
    # A mesh to compile for may have devices of processes that do not run.
    if not parts or jax.process_count() == 1:
        return
    if not isinstance(mesh, Mesh) or not mesh.is_multi_process:
        return
    contents = (np.asarray(part).tobytes() for part in parts.values())
    hashes = b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in contents)
    numbers = np.frombuffer(hashes, np.uint32).reshape(1, -1, 2)
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (mesh.size, *numbers.shape[1:])
    found = gathered("params", jax.make_array_from_callback(shape, sharding, lambda _: numbers))
    for name, others in zip(parts, (found != found[:1]).any(-1).T, strict=True):
        if others.any():
            devices = mesh.devices.reshape(-1)[others]
            got = f"another in {sorted({device.process_index for device in devices})}"
            raise arguments.value_error(name, "the same in every process", got)


class _Placement(NamedTuple):
    """Places parameters; see `shard_params`."""

    mesh: Mesh
    rules: Mapping[str, PartitionSpec]
    tables: str
    batch_axes: Axes | None
    stripe: str | None
    virtual_shards: int
    capacity: float

    def tree(self, params: Any) -> Any:
        """The parameters on the mesh."""
        arguments.check_open("params", params)
        leaves, treedef = by_name(params), jax.tree.structure(params, is_leaf=is_leaf)
        shapes = {name: np.shape(leaf) for name, leaf in leaves.items()}
        _check_alike(self.mesh, {"params": repr((self, shapes)).encode()})
        _check_alike(
            self.mesh, {k: leaf for k, leaf in leaves.items() if _is_of_this_process(leaf)}
        )
        for pattern in (*self.rules, self.stripe):
            if pattern is not None and not fnmatch.filter(leaves, pattern):
                name = "rules" if pattern in self.rules else "stripe"
                want = f"patterns that match one of {', '.join(leaves)}"
                raise arguments.value_error(name, want, repr(pattern))
        return jax.tree.unflatten(treedef, itertools.starmap(self.leaf, leaves.items()))

    def leaf(self, name: str, leaf: Any) -> Any:
        """A parameter on the mesh."""
        leaf = arguments.native(name or "params", leaf)
        shape = np.shape(leaf)
        specs = (spec for rule, spec in self.rules.items() if fnmatch.fnmatchcase(name, rule))
        spec = arguments.instance(
            "rules", next(specs, PartitionSpec()), PartitionSpec, "a PartitionSpec for each pattern"
        )
        if not any(spec[len(shape) :]):
            # A None past the last dimension says nothing.
            spec = PartitionSpec(*spec[: len(shape)])
        # A row-wise optimizer may have one number of state for each row of a table.
        is_rows = any(spec) and len(shape) in (1, 2) and fnmatch.fnmatchcase(name, self.tables)
        try:
            sharding = NamedSharding(self.mesh, spec)
            # The rows of a table are padded.
            sharding.shard_shape((0, *shape[1:]) if is_rows else shape)
        except (ValueError, IndexError) as error:
            want = f"a PartitionSpec that fits {name} of shape {list(shape)}"
            raise arguments.value_error("rules", want, f"{spec}: {error}") from error
        rows: Any = leaf
        if isinstance(leaf, Sharded):
            if is_rows and not isinstance(leaf.array, jax.ShapeDtypeStruct):
                return leaf._moved(self.split_of(name, shape[0], sharding))
            rows = leaf.in_vocabulary_order()
        elif not isinstance(leaf, jax.ShapeDtypeStruct):
            rows = gathered(name, leaf)
        if is_rows:
            return sharded(rows, self.split_of(name, shape[0], sharding))
        return put(rows, shape, sharding, lambda index: rows[index])

    def split_of(self, name: str, vocab_size: int, sharding: NamedSharding) -> TableSplit:
        """How a table lies on the mesh."""
        rows, columns = spec_axes(sharding.spec, 2)
        parts, axes = devices_along(self.mesh, rows + columns), self.mesh.axis_names
        if self.stripe is None or not fnmatch.fnmatchcase(name, self.stripe):
            order = RowOrder(vocab_size, 1, math.lcm(ROW_MULTIPLE, parts))
            axes = tuple(axis for axis in axes if axis not in rows + columns)
        elif columns:
            want = f"rows over mesh axes, and whole columns, for {name}"
            raise arguments.value_error("stripe", want, sharding.spec)
        elif self.virtual_shards % parts:
            want = (
                f"a number of devices along {rows} that divides {self.virtual_shards} "
                f"virtual shards, to stripe {name}"
            )
            raise arguments.value_error("mesh", want, parts)
        elif self.batch_axes is not None and not set(rows) <= set(self.batch_axes):
            # A lookup would send whole rows to every device, and training would raise an error.
            want = f"the mesh axes of the rows of {name}, {rows}, among others, to stripe it"
            raise arguments.value_error("batch_axes", want, self.batch_axes)
        else:
            order = RowOrder(vocab_size, self.virtual_shards)
        if order.size - vocab_size > MOST_PADDING * vocab_size:
            # Without the table's name: Python says it once for parameters and their state.
            what = f"{order.size - vocab_size} of {order.size} rows of a table are padding, which"
            whom = "adafactor, scale_by_param_block_rms and clip_by_block_rms count"
            warnings.warn(f"{what} {whom} (see te.sharding.shard_params)", stacklevel=5)
        batch_axes = axes if self.batch_axes is None else self.batch_axes
        return TableSplit(order, sharding, batch_axes, self.capacity)


def _drawn(init: Callable, rng: Array, shapes: Any, mesh: Mesh) -> Any:
    """The tree that a function draws from a key, sharded and padded like shapes."""
    # A key's type contains the explicit axes of the surrounding mesh; its data on the host does
    # not.
    numbers, kind = np.asarray(jax.random.key_data(rng)), jax.random.key_impl(rng)
    _check_alike(mesh, {"rng": numbers})
    # Under explicit axes, every device would draw whole arrays; only automatic axes split the
    # drawing.
    automatic = Mesh(mesh.devices, mesh.axis_names)

    def to_array(rows: Array, target: Any) -> Any:
        if not isinstance(target, Sharded):
            return rows
        split = target.split
        return Sharded(split.order.to_array(rows, automatic, split.rows), split)

    def draw(numbers: Array) -> Any:
        drawn = init(jax.random.wrap_key_data(numbers, impl=kind))
        return jax.tree.map(to_array, drawn, shapes)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    automatically = jax.tree.map(lambda each: NamedSharding(automatic, each.spec), shardings)
    with jax.set_mesh(automatic):
        drawn = jax.jit(draw, out_shardings=automatically)(numbers)
    return jax.device_put(drawn, shardings)
