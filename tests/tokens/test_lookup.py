"""Rows of a table against a loop over ids and against one-hot matrices, on one device and on a
mesh."""

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from compare import equal, near
from drawn import normal
from jax import export
from jax.sharding import AxisType, PartitionSpec
from meshes import put
from oracle import loop_lookup
from references import linear_logits
from refused import refused

import transformer_embed as te
from transformer_embed._src.tokens import lookup_gradient

# A gradient row sums at most 16 cotangents below 4 in magnitude: each sum is rounded by 2**-24 of
# at most 64.
GRADIENT_ERROR = 16 * 64 * 2.0**-24
POLICIES = ("nan", "clip", "zero")
STYLES = ("gather", "one_hot")
VOCAB, WIDTH = 5, 3
# Inside, at both ends, beyond both ends, far beyond, and repeated.
IDS = np.array([[0, 4, 2, 2], [-1, 5, 2, 4], [1, -7, 2**31 - 1, -(2**31)]])


TABLE = normal(0, VOCAB, WIDTH)


def assert_gradient(got, ids, cotangent, pad_id=None, out_of_range="nan"):
    last, expected = len(got) - 1, np.zeros(got.shape)
    for token, row in zip(np.ravel(ids), cotangent.reshape(-1, got.shape[1]), strict=True):
        if token != pad_id and (0 <= token <= last or out_of_range == "clip"):
            expected[min(max(token, 0), last)] += row
    near(got, expected, atol=GRADIENT_ERROR)
    equal(np.asarray(got)[~expected.any(-1)], 0)


def weighted(table, ids, cotangent, **options):
    return jnp.sum(te.lookup(table, ids, **options) * cotangent)


# --- rows


ERRORS = [
    (TypeError, {"ids": [1.0]}, "ids: ... got float64"),
    (TypeError, {"ids": [True]}, "ids: ... got bool"),
    (TypeError, {"ids": [[1, 2], [3]]}, "ids: ... equal lengths, got a list"),
    (TypeError, {"ids": None}, "ids: ... got None"),
    (TypeError, {"table": IDS}, "table: ... got int64"),
    (ValueError, {"table": TABLE[0]}, "table: ... got shape [3]"),
    (ValueError, {"table": TABLE[:0]}, "table: ... got shape [0, 3]"),
    (ValueError, {"out_of_range": "wrap"}, "out_of_range: ... got 'wrap'"),
    (ValueError, {"lookup_style": "matmul"}, "lookup_style: ... got 'matmul'"),
    (TypeError, {"pad_id": 0.0}, "pad_id: ... got float 0.0"),
    (ValueError, {"pad_id": 2**31 - 1}, "pad_id: ... 2147483646, got 2147483647"),
    (ValueError, {"pad_id": -(2**31)}, "pad_id: ... -2147483647, got -2147483648"),
]  # fmt: skip


def test_bad_arguments_of_lookup():
    for kind, changes, message in ERRORS:
        with refused(kind, message):
            te.lookup(**{"table": TABLE, "ids": [0]} | changes)


# --- derivatives


@pytest.mark.parametrize("policy", POLICIES)
def test_padding_reads_as_zeros_whatever_the_table_holds(policy):
    read = jax.jit(functools.partial(te.lookup, ids=[2, 1, 2], pad_id=2, out_of_range=policy))
    for content in (np.nan, -np.inf):
        table = np.where(np.arange(VOCAB)[:, None] == 2, np.float32(content), TABLE)
        equal(read(table), [np.zeros(WIDTH), TABLE[1], np.zeros(WIDTH)])
        gradient = jax.grad(lambda table: read(table).sum())(table)
        assert_gradient(gradient, [1], np.ones((1, WIDTH)))


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_count_further_than_16_bits_do(dtype, style):
    # One by one, bfloat16 counts to 256 and float16 to 2048; the sum, a power of two, is exact.
    ids = np.full(4096, 3)
    total = lambda table: weighted(table, ids, 1.0, lookup_style=style)
    gradient = jax.jit(jax.grad(total))(TABLE.astype(dtype))
    assert gradient.dtype == dtype
    equal(np.asarray(gradient, np.float32)[3], 4096)


def test_the_jvp_is_the_lookup_of_the_direction():
    """Zeros where an id reads a constant."""
    direction = normal(2, VOCAB, WIDTH)
    for policy in POLICIES:
        find = functools.partial(te.lookup, ids=IDS, pad_id=2, out_of_range=policy)
        tangent = jax.jit(lambda table, find=find: jax.jvp(find, (table,), (direction,))[1])(TABLE)
        equal(tangent, np.nan_to_num(loop_lookup(direction, IDS, 2, policy)))


# --- transformations


def rows_and_gradient(table, ids):
    return te.lookup(table, ids), jax.grad(weighted)(table, ids, 1.0)


def test_the_gather_alone_clips_ids():
    """XLA's gather reads the nearest row anyway: a clip before it would be one more kernel."""
    text = jax.jit(te.lookup).lower(TABLE, jnp.zeros([3], jnp.int32)).as_text()
    assert "gather" in text
    assert not any(word in text for word in ("clamp", "maximum", "minimum"))


# --- the gradient on a GPU


@functools.partial(jax.jit, static_argnums=2)
def gradient_on_a_gpu(index, cotangent, vocab_size):
    """The gradient that a GPU computes, here on the CPU."""
    read = functools.partial(lookup_gradient._read_each_row_once, index=index)
    return jax.linear_transpose(read, jnp.zeros((vocab_size, cotangent.shape[-1])))(cotangent)[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 33, 500])
def test_gradient_on_a_gpu_is_the_float64_sum_of_repeats(size):
    rng = np.random.default_rng(size)
    for distinct in (1, 7, 90):
        cotangent = normal(1, size, WIDTH)
        index = rng.integers(0, distinct, size).astype(np.uint32)
        # Of rows that do not exist; what is not finite stays in its own row.
        index[1::5] = 2**32 - 1 - rng.integers(0, 3)
        inside = index < 90
        expected, magnitude = np.zeros((2, 90, WIDTH))
        np.add.at(expected, index[inside], cotangent[inside].astype(np.float64))
        np.add.at(magnitude, index[inside], np.abs(cotangent[inside], dtype=np.float64))
        cotangent[0] = expected[index[0]] = np.nan
        gradient = np.asarray(gradient_on_a_gpu(index, cotangent, 90))
        # A sum over a tree of at most 10 levels, each of which rounds by 2**-24 of the magnitudes
        # below it.
        error = np.abs(gradient - expected)
        assert np.all((error <= 10 * 2.0**-24 * magnitude) | np.isnan(expected))
        equal(np.isnan(gradient), np.isnan(expected))


def mesh_of(kind, shape=(2, 2)):
    return meshes.mesh_of(shape, ("x", "y")[: len(shape)], kind)


def lowered_gradient(step, platform):
    traced = jax.jit(step).trace(TABLE, np.zeros((4, 2), np.int32))
    return traced.lower(lowering_platforms=(platform,)).as_text()


def step(table, ids):
    return jax.grad(weighted)(table, ids, 1.0, pad_id=2)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_gradient_lowered_for_a_gpu_scatters_to_distinct_rows_alone(devices):
    """A scatter to repeated rows is atomic there: slow, and not the same from run to run."""
    mesh, of_mesh = mesh_of(AxisType.Auto, (devices,)), step
    if devices > 1:
        specs = (PartitionSpec(), PartitionSpec("x"))
        of_mesh = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    with jax.set_mesh(mesh):
        text = {name: lowered_gradient(of_mesh, name) for name in ("cuda", "cpu", "tpu")}
    assert set(re.findall(r"stablehlo\.scatter.*?unique_indices = (\w+)", text["cuda"])) == {"true"}
    assert "stablehlo.sort" in text["cuda"]
    for platform in ("cpu", "tpu"):
        assert "stablehlo.sort" not in text[platform]


@pytest.mark.parametrize("is_named", [True, False])
def test_gradient_lowered_for_gpus_that_the_compiler_splits_the_batch_over_sorts_nothing(is_named):
    """A sort of the whole batch would bring all of it to each device."""
    with jax.set_mesh(mesh_of(AxisType.Auto)) if is_named else contextlib.nullcontext():
        assert "stablehlo.sort" not in lowered_gradient(step, "cuda")


@pytest.mark.slow
def test_rows_and_gradients_survive_export_with_any_number_of_ids():
    """On one device, where a GPU would sort the ids."""
    pytest.importorskip("flatbuffers")
    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape("n"), np.int32)
    with jax.set_mesh(mesh_of(AxisType.Auto, (1,))):
        revived = export.deserialize(
            export.export(jax.jit(rows_and_gradient))(TABLE, symbolic).serialize()
        )
    for ids in (np.array([1, 7, 1], np.int32), np.array([4], np.int32)):
        rows, gradient = revived.call(TABLE, ids)
        equal(rows, loop_lookup(TABLE, ids))
        assert_gradient(gradient, ids, np.ones((len(ids), WIDTH)))


# --- meshes

SPEC = PartitionSpec
MESH_IDS = np.array([[0, 7, 3, 3], [9, -1, 5, 2]], np.int32)
MESH_TABLE = normal(3, 8, 4)
MESH_COTANGENT = normal(4, *MESH_IDS.shape, 4)
# Of ids, table and rows.
PLACEMENTS = [
    (SPEC("x"), SPEC(), SPEC("x", None, None)),
    (SPEC("x"), SPEC(None, "y"), SPEC("x", None, "y")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ids_spec", "table_spec", "rows_spec"), PLACEMENTS)
def test_gradient_on_an_explicit_mesh_of_gpus_equals_that_of_one_device(
    monkeypatch, ids_spec, table_spec, rows_spec
):
    """The gradient that GPUs compute, here on CPU devices."""
    mesh = mesh_of(AxisType.Explicit)
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *arrays, cuda, rocm, default: cuda(*arrays)
    )

    @jax.jit
    def gradient(table, index, cotangent):
        read = functools.partial(lookup_gradient.read_or_zero.__wrapped__, index=index)
        return jax.linear_transpose(read, table)(cotangent)[0]

    with jax.set_mesh(mesh):
        table, index = put(mesh, MESH_TABLE, *table_spec), MESH_IDS.astype(np.uint32)
        cotangent = put(mesh, MESH_COTANGENT, *rows_spec)
        found = gradient(table, put(mesh, index, *ids_spec), cotangent)
    assert_gradient(found, MESH_IDS, MESH_COTANGENT)


# --- linear_logits


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_logits_of_16_bits_are_summed_in_float32(dtype):
    # 2048 + 511 * 0.5 is exact in float32 and no number of 8 or 11 bits: they step by 16 and by 2
    # there.
    table = np.full((1, 512), 0.5, dtype)
    table[0, 0] = 2048
    logits = linear_logits(np.ones((1, 512), dtype), table)
    assert logits.dtype == jnp.float32
    assert logits.tolist() == [[2048 + 511 * 0.5]]


AXES = ["a"], ["b"], [("a", "b")], ["a", "b"], [None, "a"], [None, "b"], []
OF_X = [], ["a"], ["a", "b"], [None, "a"], [("a", "b")], [None, None, "a"]


def test_logits_of_any_explicit_layout_are_split_as_the_tokens_and_the_table():
    """While they are traced; values are drawn."""
    mesh = meshes.mesh_of((2, 2), ("a", "b"), AxisType.Explicit)
    x, table = jnp.ones((4, 4, 4)), jnp.ones((8, 4))
    with jax.set_mesh(mesh):
        for of_x, of_table in itertools.product(OF_X, AXES):
            arrays = put(mesh, x, *of_x), put(mesh, table, *of_table)
            *tokens, words = jax.eval_shape(te.linear_logits, *arrays).sharding.spec
            taken = jax.tree.leaves(of_table)
            assert jax.tree.leaves(words) == taken
            for dimension, axes in enumerate(of_x[:2]):
                kept = [axis for axis in jax.tree.leaves(axes) if axis not in taken]
                assert jax.tree.leaves(tokens[dimension]) == kept
        spec = SPEC("b", "a")
        logits = jax.eval_shape(lambda x, t: te.linear_logits(x, t, out_sharding=spec), *arrays)
        assert logits.sharding.spec == SPEC("b", "a", None)
