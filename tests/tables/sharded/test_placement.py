"""Parameter trees on a mesh: which rule splits what, how tables are padded, drawn and moved, and
errors."""

import copy
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import few
from compare import equal, near
from fuzzing import VALUES, call, named_on_failure
from jax.sharding import NamedSharding
from refused import refused
from sharded_tables import (
    AUTO,
    BOTH,
    EXPLICIT,
    SPEC,
    TABLE,
    WIDTH,
    mesh_of,
    on_host,
    put,
    shard,
    stripe,
)

import transformer_embed as te

SHARDED = te.sharding.Sharded
MESH = mesh_of((2, 4))
NAME = "transformer_embedding/~/token_embedding"
CONFIG = te.EmbedderConfig(vocab_size=37, d_model=16, pad_id=0)
STRIPED = {"stripe": "*/embeddings", "virtual_shards": 16}


def test_names_choose_specs_and_the_first_rule_counts():
    name = "a/~/token_embedding"
    linear = {"w": TABLE, "b": TABLE[0], "c": TABLE, "scale": 1.5}
    params = {name: {"embeddings": TABLE}, "linear": linear}
    rules = {
        "*/embeddings": SPEC("model"),
        "linear/w": SPEC(None, "model"),
        "*/b": SPEC("data"),
        "linear/*": SPEC(),
    }
    placed = te.sharding.shard_params(params, MESH, rules)
    table = placed[name]["embeddings"]
    assert isinstance(table, SHARDED)
    assert table.sharding.spec == SPEC("model")
    specs = {name: array.sharding.spec for name, array in placed["linear"].items()}
    assert specs == dict.fromkeys(linear, SPEC()) | {"w": SPEC(None, "model"), "b": SPEC("data")}
    equal(on_host(placed), params)


@pytest.mark.parametrize("vocab_size", [1, 128, 129, 10**9])
def test_padding_is_the_same_on_every_mesh_of_a_power_of_two(vocab_size):
    table = jax.ShapeDtypeStruct((vocab_size, WIDTH), jnp.float32)
    padded = lambda shape, *spec: shard(mesh_of(shape), SPEC(*spec), table).array.shape[0]
    size = padded((1, 1), "model")
    assert vocab_size <= size < vocab_size + 128
    for shape in ((1, 1), (1, 2), (2, 4), (1, 8)):
        assert padded(shape, "model") == padded(shape, None, "model") == size
    # Devices that do not divide it get more.
    odd = padded((1, 3), "model")
    assert (size % 128, odd % (3 * 128)) == (0, 0)
    assert vocab_size <= odd < vocab_size + 3 * 128


@pytest.mark.parametrize("first", [shard, stripe])
def test_a_table_moves_to_another_mesh_and_order(first):
    table = first(MESH, SPEC("model"))
    for mesh, spec in ((mesh_of((4, 2)), SPEC(BOTH)), (mesh_of((1, 2)), SPEC("model"))):
        moved = shard(mesh, spec, table), stripe(mesh, spec, table, shards=64)
        for each in moved:
            equal(on_host(each), TABLE)


def test_shapes_are_mapped_to_shapes_and_move():
    table = shard(MESH, SPEC("model"), jax.ShapeDtypeStruct((300, WIDTH), jnp.bfloat16))
    assert (table.shape, table.dtype) == ((300, WIDTH), jnp.bfloat16)
    sharding = NamedSharding(MESH, SPEC("model"))
    assert table.array == jax.ShapeDtypeStruct((384, WIDTH), jnp.bfloat16, sharding=sharding)
    # The axes that the table does not use.
    assert table.split.batch_axes == ("data",)
    assert shard(mesh_of((4, 2)), SPEC("model"), table).array.shape == (384, WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "kind"), [(shard, EXPLICIT), (stripe, AUTO)])
def test_a_table_is_copied_pickled_exported_and_mapped(place, kind, monkeypatch):
    mesh, ids = mesh_of((2, 4), kind), np.arange(16, dtype=np.int32).reshape(8, 2)
    table, read = place(mesh, SPEC(BOTH)), jax.jit(te.lookup)
    for other in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert other.split == table.split
        assert other.array.sharding == table.sharding
        equal(on_host(other), TABLE)
    with jax.set_mesh(mesh):
        file = jax.export.export(read)(table, ids).serialize()
        equal(jax.export.deserialize(file).call(table, ids), TABLE[ids])
        equal(jax.vmap(read, (None, 0))(table, ids), TABLE[ids])
        with pytest.raises(ValueError, match=r"vmap|axis_names"):
            jax.vmap(read, (None, 0), spmd_axis_name="data")(table, put(mesh, ids, "data"))
    monkeypatch.setattr(jax, "devices", lambda: list(mesh.devices.flat)[:6])
    with pytest.raises(ValueError, match=r"^mesh: wanted the devices that .* numbers \[6, 7\]$"):
        jax.export.deserialize(file)


def test_the_sharding_of_a_table_that_jax_moved_is_that_of_its_array():
    whole = NamedSharding(MESH, SPEC())
    moved = jax.device_put(shard(MESH, SPEC("model")), whole)
    assert moved.sharding == whole
    equal(te.lookup(moved, np.arange(9)), TABLE[:9])


# --- drawing


@pytest.mark.parametrize(
    ("kind", "options"),
    [(EXPLICIT, {}), pytest.param(AUTO, STRIPED, marks=pytest.mark.slow)],
    ids=["contiguous", "striped"],
)
def test_shards_are_drawn_as_on_one_device(kind, options):
    init, rng, mesh = te.Embedder(CONFIG).init, jax.random.key(7), mesh_of((2, 4), kind)
    rules, params = {"*/embeddings": SPEC(BOTH)}, init(rng)
    shapes = te.sharding.shard_params(jax.eval_shape(init, rng), mesh, rules, **options)
    drawn = te.sharding.init_params(init, rng, shapes)
    placed = te.sharding.shard_params(params, mesh, rules, **options)
    assert jax.tree.structure(drawn) == jax.tree.structure(placed)
    (one,), (other,) = map(jax.tree.leaves, (drawn, placed))
    assert one.sharding == other.sharding
    # XLA may round a product and a sum once in one program and twice in another.
    np.testing.assert_array_max_ulp(np.asarray(one), np.asarray(other), maxulp=4)
    rows, expected = (tree[NAME]["embeddings"] for tree in on_host((drawn, params)))
    np.testing.assert_array_max_ulp(rows, expected, maxulp=4)


@pytest.mark.slow
def test_no_device_draws_the_whole_table(monkeypatch):
    texts, jit = [], jax.jit

    def spy(function, **options):
        def run(rng):
            compiled = jit(function, **options).lower(rng).compile()
            texts.append(compiled.as_text())
            return compiled(rng)

        return run

    size = 4096 * 16
    init = lambda rng: {"embeddings": jax.random.normal(rng, (4096, 16))}
    monkeypatch.setattr(jax, "jit", spy)
    shapes = jax.eval_shape(init, jax.random.key(0))
    shapes = te.sharding.shard_params(shapes, MESH, {"*": SPEC(BOTH)})
    te.sharding.init_params(init, jax.random.key(0), shapes)
    (text,) = texts
    arrays = re.findall(r"[fsu]32\[([\d,]+)\]", text)
    # The partitioner moves the border of a shard by less than a row a device.
    assert max(np.prod([*map(int, array.split(","))]) for array in arrays) <= size // 8 + 8 * 16


# --- errors

PARAMS = {"embed": {"embeddings": TABLE[:13]}, "linear": {"w": TABLE[:13], "b": TABLE[0]}}
FITS = "rules: wanted a PartitionSpec that fits"
# By the message: the rules, and other arguments.
ERRORS = {
    r"rules: wanted patterns that match one of embed/embeddings, linear/b, linear/w, got 'embedding/": (
        {"embedding/*": SPEC("model")},
        {},
    ),
    "stripe: wanted patterns that match one of .*, got 'u'$": ({}, {"stripe": "u"}),
    # An empty pattern is not the absence of one.
    "stripe: wanted patterns that match one of .*, got ''$": ({}, {"stripe": ""}),
    "stripe: wanted a pattern, or None, got bool True$": ({}, {"stripe": True}),
    "mesh: wanted a jax.sharding.Mesh, got None$": ({}, {"mesh": None}),
    "rules: wanted a mapping of patterns to PartitionSpecs, got list ": ([("*", SPEC())], {}),
    rf"{FITS} embed/embeddings of shape \[13, 8\], got .*'tensor'.*: .*tensor .*not found in mesh": (
        {"embed/*": SPEC("tensor")},
        {},
    ),
    "rules: wanted a PartitionSpec for each pattern, got str 'model'$": ({"embed/*": "model"}, {}),
    rf"{FITS} linear/b of shape \[8\], got .*None, 'model'\)": (
        {"linear/b": SPEC(None, "model")},
        {},
    ),
    rf"{FITS} linear/w of shape \[13, 8\], got .*partitioned 4 times, but the dimension size is 13": (
        {"linear/w": SPEC("model")},
        {},
    ),
    rf"{FITS} embed/embeddings of shape \[13, 6\], got .*partitioned 4 times, but .* is 6": (
        {"*": SPEC(None, "model")},
        {"params": {"embed": {"embeddings": TABLE[:13, :6]}}},
    ),
    **{
        rf"batch_axes: wanted a tuple of axes of the mesh, \('data', 'model'\), or None, got {got}$": (
            {},
            {"batch_axes": axes},
        )
        for got, axes in {r"\('tensor',\)": ("tensor",), "'data'": "data", "''": ""}.items()
    },
    "params: wanted .* jax.eval_shape.*, got function": ({}, {"params": lambda rng: PARAMS}),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_trees_and_rules_raise_errors(message):
    rules, options = ERRORS[message]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        te.sharding.shard_params(**{"params": PARAMS, "mesh": MESH, "rules": rules} | options)


def test_only_shapes_with_shardings_are_drawn():
    init = lambda rng: {"t": jax.random.normal(rng, [8, 2])}
    drawn = jax.eval_shape(init, jax.random.key(0))
    place = lambda shapes: te.sharding.shard_params(shapes, MESH, {})
    other = {"t": jax.ShapeDtypeStruct([9, 2], jnp.float32)}
    on_one_device = jax.tree.map(jnp.ones_like, drawn)
    errors = [
        *[(shapes, "... jax.eval_shape(init, rng), got ... ['t']") for shapes in (drawn, on_one_device)],
        *[(shapes, "wanted t [8, 2], got none of them") for shapes in (None, {})],
        (init, "wanted t [8, 2], got ..."),
        (place(other), "wanted t [8, 2], got t [9, 2]"),
        (place(drawn | {"u": other["t"]}), "wanted no others, got u [9, 2]"),
    ]  # fmt: skip
    for shapes, message in errors:
        with refused(ValueError, f"shapes: {message}"):
            te.sharding.init_params(init, jax.random.key(0), shapes)
    with refused(ValueError, "shapes: ... jax.eval_shape(init, rng), got ... []"):
        te.sharding.init_params(lambda rng: {}, jax.random.key(0), {})
    with refused(TypeError, "rng: ... got None"):
        te.sharding.init_params(init, None, place(drawn))


def test_parameters_are_not_placed_under_jit():
    with refused(TypeError, "embed/embeddings: ... got a traced float32[13, 8]"):
        jax.jit(lambda params: te.sharding.shard_params(params, MESH, {}))(PARAMS)
    read = lambda table: table.in_vocabulary_order()
    with refused(TypeError, "table: ... got a traced float32[384, 8]"):
        jax.jit(read)(shard(MESH, SPEC("model")))


def test_columns_over_an_axis_of_the_ids_raise_an_error():
    table = shard(MESH, SPEC(None, "model"), batch_axes=("model",))
    with pytest.raises(Exception, match="duplicate entries for `model`"):
        te.lookup(table, np.arange(8))


@pytest.mark.parametrize("options", [{}, STRIPED], ids=["contiguous", "striped"])
@pytest.mark.parametrize("name", ["batch_axes", "virtual_shards", "capacity"])
def test_any_argument_keeps_the_table_or_is_named(name, options):
    good = {"mesh": MESH, "rules": {"*embeddings": SPEC("model")}} | options
    good["params"] = {"t/embeddings": TABLE[:10]}
    for value in few(VALUES, 16):
        with named_on_failure({name: value}):
            returned, placed = call(te.sharding.shard_params, good | {name: value})
            if returned:
                equal(on_host(placed)["t/embeddings"], TABLE[:10])


@pytest.mark.parametrize("rows", [129, 1000, 12_799])
def test_padding_that_statistics_of_a_table_see_has_a_warning(rows, recwarn):
    """Steps of adafactor were 0.71 of those on one device, without a word."""
    warnings.simplefilter("always")
    params, rules = {"embeddings": np.ones([rows, 4], np.float32)}, {"*": SPEC("model")}
    table = te.sharding.shard_params(params, MESH, rules)["embeddings"]
    seen, _ = optax.scale_by_param_block_rms().update(table, optax.EmptyState(), table)
    ratio = np.sqrt(rows / len(table.array))
    near(seen.in_vocabulary_order(), np.full([rows, 4], ratio), rtol=1e-6)
    said = [str(each.message) for each in recwarn]
    padding = len(table.array) - rows
    want = f"{padding} of {len(table.array)} rows of a table are padding, which adafactor, "
    assert [each[: len(want)] for each in said] == [want] * (padding > rows / 100)
