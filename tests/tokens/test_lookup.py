"""Rows of a table and their gradient where draws do not reach: programs, other platforms, errors."""

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import platforms
import pytest
from compare import equal, near
from drawn import normal
from jax import export
from meshes import AUTO, EXPLICIT, put
from oracle import loop_lookup, loop_lookup_gradient
from refused import each_raises

import transformer_embed as te
from transformer_embed._src.tokens import lookup_gradient

# A gradient row sums at most 16 cotangents below 4 in magnitude: each sum is rounded by 2**-24 of
# at most 64.
GRADIENT_ERROR = 16 * 64 * 2.0**-24
VOCAB, WIDTH = 5, 3
# Inside, at both ends, beyond both ends, far beyond, and repeated.
IDS = np.array([[0, 4, 2, 2], [-1, 5, 2, 4], [1, -7, 2**31 - 1, -(2**31)]])
TABLE = normal(0, VOCAB, WIDTH)


def assert_gradient(got, ids, cotangent):
    expected = loop_lookup_gradient(got.shape, ids, cotangent)
    near(got, expected, atol=GRADIENT_ERROR)
    equal(np.asarray(got)[~expected.any(-1)], 0)


def total(table, ids, **options):
    return jnp.sum(te.lookup(table, ids, **options))


def mesh_of(kind, shape=(2, 2)):
    return meshes.mesh_of(shape, ("x", "y")[: len(shape)], kind)


# --- derivatives


@pytest.mark.parametrize("policy", ["nan", "clip", "zero"])
def test_padding_reads_as_zeros_whatever_the_table_holds(policy):
    def total(table):
        rows = te.lookup(table, [2, 1, 2], pad_id=2, out_of_range=policy)
        return rows.sum(), rows

    step = jax.jit(jax.grad(total, has_aux=True))
    table = TABLE.copy()
    for table[2] in (np.nan, -np.inf):
        gradient, rows = step(table)
        equal(rows, [np.zeros(WIDTH), TABLE[1], np.zeros(WIDTH)])
        assert_gradient(gradient, [1], np.ones((1, WIDTH)))


@pytest.mark.slow
@pytest.mark.parametrize("style", ["gather", "one_hot"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_count_further_than_16_bits_do(dtype, style):
    # One by one, bfloat16 counts to 256 and float16 to 2048; the sum, a power of two, is exact.
    step = jax.grad(functools.partial(total, ids=np.full(4096, 3), lookup_style=style))
    gradient = jax.jit(step)(TABLE.astype(dtype))
    assert gradient.dtype == dtype
    equal(np.asarray(gradient, np.float32)[3], 4096)


@pytest.mark.parametrize("policy", ["nan", "clip", "zero"])
def test_the_jvp_is_the_lookup_of_the_direction(policy):
    """Zeros where an id reads a constant."""
    direction = normal(2, VOCAB, WIDTH)
    find = functools.partial(te.lookup, ids=IDS, pad_id=2, out_of_range=policy)
    tangent = jax.jit(lambda table: jax.jvp(find, (table,), (direction,))[1])(TABLE)
    equal(tangent, np.nan_to_num(loop_lookup(direction, IDS, 2, policy)))


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


@pytest.mark.parametrize("index", [[0] * 6, [4, 4, 0, 2, 9, 4], [9, 2**32 - 1] * 3])
def test_gradient_on_a_gpu_sums_the_repeats_of_each_row(index):
    """The first and the last row of the order, one run alone, and rows past the end."""
    index, cotangent = np.array(index, np.uint32), normal(1, len(index), WIDTH)
    want = loop_lookup_gradient((VOCAB, WIDTH), index, cotangent)
    near(gradient_on_a_gpu(index, cotangent, VOCAB), want, atol=GRADIENT_ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 500])
def test_gradient_on_a_gpu_is_the_float64_sum_of_repeats(size):
    rng = np.random.default_rng(size)
    for distinct in (1, 7, 90):
        cotangent = normal(1, size, WIDTH)
        index = rng.integers(0, distinct, size).astype(np.uint32)
        # Of rows that do not exist; what is not finite stays in its own row.
        index[1::5] = 2**32 - 1 - rng.integers(0, 3)
        expected = loop_lookup_gradient((90, WIDTH), index, cotangent)
        magnitude = loop_lookup_gradient((90, WIDTH), index, np.abs(cotangent))
        cotangent[0] = expected[index[0]] = np.nan
        gradient = np.asarray(gradient_on_a_gpu(index, cotangent, 90))
        # A sum over a tree of at most 10 levels, each of which rounds by 2**-24 of the magnitudes
        # below it.
        error = np.abs(gradient - expected)
        assert np.all((error <= 10 * 2.0**-24 * magnitude) | np.isnan(expected))
        equal(np.isnan(gradient), np.isnan(expected))


def lowered(step, platform):
    traced = jax.jit(step).trace(TABLE, np.zeros((4, 2), np.int32))
    return traced.lower(lowering_platforms=(platform,)).as_text()


step = jax.grad(functools.partial(total, pad_id=2))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_gradient_lowered_for_a_gpu_scatters_to_distinct_rows_alone(devices):
    """A scatter to repeated rows is atomic there: slow, and not the same from run to run."""
    mesh, of_mesh = mesh_of(AUTO, (devices,)), step
    if devices > 1:
        specs = (jax.P(), jax.P("x"))
        of_mesh = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P())
    with jax.set_mesh(mesh):
        text = {name: lowered(of_mesh, name) for name in ("cuda", "cpu", "tpu")}
    assert set(re.findall(r"stablehlo\.scatter.*?unique_indices = (\w+)", text["cuda"])) == {"true"}
    assert ["stablehlo.sort" in each for each in text.values()] == [True, False, False]


@pytest.mark.parametrize("is_named", [True, False])
def test_gradient_lowered_for_gpus_that_the_compiler_splits_the_batch_over_sorts_nothing(is_named):
    """A sort of the whole batch would bring all of it to each device."""
    with jax.set_mesh(mesh_of(AUTO)) if is_named else contextlib.nullcontext():
        assert "stablehlo.sort" not in lowered(step, "cuda")


@pytest.mark.slow
def test_rows_and_gradients_survive_export_with_any_number_of_ids():
    """On one device, where a GPU would sort the ids."""
    both = jax.jit(lambda table, ids: (te.lookup(table, ids), jax.grad(total)(table, ids)))
    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape("n"), np.int32)
    with jax.set_mesh(mesh_of(AUTO, (1,))):
        exported = export.export(both)(TABLE, symbolic)
    for ids in (np.array([1, 7, 1], np.int32), np.array([4], np.int32)):
        rows, gradient = exported.call(TABLE, ids)
        equal(rows, loop_lookup(TABLE, ids))
        assert_gradient(gradient, ids, np.ones((len(ids), WIDTH)))


# --- meshes


@pytest.mark.slow
@pytest.mark.parametrize("of_table", [(), (None, "y")])
def test_gradient_on_an_explicit_mesh_of_gpus_equals_one_device(of_table):
    """The gradient that GPUs compute, here on CPU devices."""
    mesh, ids = mesh_of(EXPLICIT), np.array([[0, 7, 3, 3], [9, -1, 5, 2]], np.int32)
    cotangent = normal(4, *ids.shape, 4)

    @jax.jit
    def gradient(table, index, cotangent):
        read = functools.partial(lookup_gradient.read_or_zero.__wrapped__, index=index)
        return jax.linear_transpose(read, table)(cotangent)[0]

    with jax.set_mesh(mesh), platforms.as_on("cuda") as taken:
        table = put(mesh, normal(3, 8, 4), *of_table)
        of_rows = put(mesh, cotangent, "x", *(of_table or (None, None)))
        found = gradient(table, put(mesh, ids.astype(np.uint32), "x"), of_rows)
    assert taken
    assert_gradient(found, ids, cotangent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_ids", "of_table", "of_rows"),
    [("x", (None, ("x", "y")), ("x", "y")), ("y", ("x",), ("y", None))],
)
def test_rows_are_split_as_the_ids_and_gradients_are_rounded_once(of_ids, of_table, of_rows):
    """Where columns and ids share an axis, and where devices add the gradients of their ids."""
    mesh, ids = mesh_of(EXPLICIT), np.arange(64) % 4
    table, weights = (
        normal(n, *shape).astype(jnp.bfloat16) for n, shape in ((0, (4, 4)), (1, (64, 4)))
    )

    def total(table, ids, weights):
        rows = te.lookup(table, ids)
        return (rows * weights).astype(np.float32).sum(), rows

    with jax.set_mesh(mesh):
        arrays = put(mesh, table, *of_table), put(mesh, ids, of_ids), put(mesh, weights, *of_rows)
        gradient, rows = jax.jit(jax.grad(total, has_aux=True))(*arrays)
    assert rows.sharding.spec == jax.P(*of_rows)
    equal(rows, table[ids])
    exact = np.float64(weights).reshape(16, 4, 4).sum(0)
    equal(np.asarray(gradient), exact.astype(jnp.bfloat16))


@pytest.mark.slow
def test_no_ids_inside_of_a_shard_map_give_rows_of_each_device():
    """Whose type must say so, or they are no carry beside other rows."""

    def looked_up(tables):
        some, none = (te.lookup(tables[0], np.zeros(n, int)) for n in (3, 0))
        return jax.lax.scan(lambda carry, _: (none, None), some[:0], None, length=1)[0]

    mapped = jax.shard_map(
        looked_up, mesh=mesh_of(AUTO, (2,)), in_specs=jax.P("x"), out_specs=jax.P("x")
    )
    assert jax.eval_shape(mapped, np.stack([TABLE, TABLE])).shape == (0, WIDTH)


AXES = ["a"], ["b"], [("a", "b")], ["a", "b"], [None, "a"], [None, "b"], []
OF_X = [], ["a"], ["a", "b"], [None, "a"], [("a", "b")], [None, None, "a"]


@pytest.mark.slow
def test_logits_of_any_explicit_layout_are_split_as_the_tokens_and_the_table():
    """While they are traced; values are drawn."""
    mesh = meshes.mesh_of((2, 2), ("a", "b"), EXPLICIT)
    x, table = np.ones((4, 4, 4), np.float32), np.ones((8, 4), np.float32)
    with jax.set_mesh(mesh):
        for of_x, of_table in itertools.product(OF_X, AXES):
            arrays = put(mesh, x, *of_x), put(mesh, table, *of_table)
            *tokens, words = jax.eval_shape(te.linear_logits, *arrays).sharding.spec
            taken = jax.tree.leaves(of_table)
            assert jax.tree.leaves(words) == taken
            for dimension, axes in enumerate(of_x[:2]):
                kept = [axis for axis in jax.tree.leaves(axes) if axis not in taken]
                assert jax.tree.leaves(tokens[dimension]) == kept
        of_logits = functools.partial(te.linear_logits, out_sharding=jax.P("b", "a"))
        assert jax.eval_shape(of_logits, *arrays).sharding.spec == jax.P("b", "a", None)


# --- errors

of_table = functools.partial(te.lookup, TABLE)
REFUSED = {
    "of_table([1.0])": "TypeError: ids: ... got float64",
    "of_table([True])": "TypeError: ids: ... got bool",
    "of_table([[1, 2], [3]])": "TypeError: ids: ... equal lengths, got a list",
    "of_table(None)": "TypeError: ids: ... got None",
    "te.lookup(IDS, [0])": "TypeError: table: ... got int64",
    "te.lookup(TABLE[0], [0])": "ValueError: table: ... got shape [3]",
    "te.lookup(TABLE[:0], [0])": "ValueError: table: ... got shape [0, 3]",
    "of_table([0], out_of_range='wrap')": "ValueError: out_of_range: ... got 'wrap'",
    "of_table([0], lookup_style='matmul')": "ValueError: lookup_style: ... got 'matmul'",
    "of_table([0], pad_id=0.0)": "TypeError: pad_id: ... got float 0.0",
    "of_table([0], pad_id=2**31 - 1)": "ValueError: pad_id: ... 2147483646, got 2147483647",
    "of_table([0], pad_id=-(2**31))": "ValueError: pad_id: ... -2147483647, got -2147483648",
}


def test_bad_arguments_are_refused():
    each_raises(REFUSED, globals())
