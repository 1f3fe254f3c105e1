"""Rows of a table against a loop over ids and against one-hot matrices, on one device and on a mesh
of eight."""

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import set_mesh, x64
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from oracle import loop_lookup

import transformer_embed as te
from transformer_embed._src.functional import lookup_gradient

# A gradient row sums at most 16 cotangents below 4 in magnitude: each sum is rounded by 2**-24 of
# at most 64.
GRADIENT_ERROR = 16 * 64 * 2.0**-24
# A float32 sum of n products of numbers below 4 in magnitude, each partial sum rounded by 2**-24.
PRODUCT_ERROR = 16 * 2.0**-24

POLICIES = ("nan", "clip", "zero")
STYLES = ("gather", "one_hot")
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
VOCAB, WIDTH = 5, 3
# Inside, at both ends, beyond both ends, far beyond, and repeated.
IDS = np.array([[0, 4, 2, 2], [-1, 5, 2, 4], [1, -7, 2**31 - 1, -(2**31)]])
PADS = (None, 0, 2, 4, 9, -1)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


TABLE = normal(0, VOCAB, WIDTH)
COTANGENT = normal(1, *IDS.shape, WIDTH)


def one_hot(ids, pad_id=None, out_of_range="nan", vocab_size=VOCAB):
    """float64 [number of ids, vocab_size]: the row of the table that each id reads, and none where
    it reads a constant."""
    matrix = np.zeros((np.size(ids), vocab_size))
    for n, token in enumerate(int(token) for token in np.ravel(ids)):
        inside = 0 <= token < vocab_size
        if token != pad_id and (inside or out_of_range == "clip"):
            matrix[n, min(max(token, 0), vocab_size - 1)] = 1
    return matrix


def weighted(table, ids, cotangent, **options):
    return jnp.sum(te.lookup(table, ids, **options) * cotangent)


CASES = list(itertools.product(POLICIES, PADS))
every_case = pytest.mark.parametrize(("policy", "pad_id"), CASES)


@functools.cache
def rows_and_gradients(style):
    """By policy and pad_id: the rows, and the gradient of the table. One program computes them
    all."""

    def of_case(table, cotangent, policy, pad_id):
        rows, back = jax.vjp(
            lambda table: te.lookup(
                table, IDS, pad_id=pad_id, out_of_range=policy, lookup_style=style
            ),
            table,
        )
        return rows, back(cotangent)[0]

    return dict(
        zip(
            CASES,
            jax.jit(lambda *arrays: [of_case(*arrays, *case) for case in CASES])(TABLE, COTANGENT),
            strict=True,
        )
    )


# --- lookup: values


@every_case
def test_lookup_is_a_loop_over_ids(policy, pad_id):
    rows, _ = rows_and_gradients("gather")[policy, pad_id]
    assert rows.dtype == jnp.float32
    np.testing.assert_array_equal(rows, loop_lookup(TABLE, IDS, pad_id, policy))


def test_lookup_of_an_id_out_of_range_is_nan_by_default():
    np.testing.assert_array_equal(te.lookup(TABLE, [VOCAB]), np.full((1, WIDTH), np.nan))


@pytest.mark.parametrize("policy", POLICIES)
def test_lookup_of_a_negative_id_never_counts_from_the_end(policy):
    rows = np.asarray(te.lookup(TABLE, -np.arange(1, VOCAB + 1), out_of_range=policy))
    expected = {"nan": np.full(WIDTH, np.nan), "clip": TABLE[0], "zero": np.zeros(WIDTH)}[policy]
    np.testing.assert_array_equal(rows, np.broadcast_to(expected, rows.shape))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_lookup_copies_rows_of_any_floating_dtype_to_the_bit(dtype, style):
    table = TABLE.astype(dtype)
    rows = te.lookup(table, [3, 0, 7], lookup_style=style)
    assert rows.dtype == dtype
    rows = np.asarray(rows)
    np.testing.assert_array_equal(rows[:2], table[[3, 0]])
    assert np.isnan(rows[2]).all()


def test_lookup_takes_lists_numpy_and_jax_arrays():
    expected = loop_lookup(TABLE, IDS)
    for table, ids in (
        (TABLE.tolist(), IDS.tolist()),
        (TABLE, IDS),
        (jnp.asarray(TABLE), jnp.asarray(IDS, jnp.int32)),
    ):
        np.testing.assert_array_equal(te.lookup(table, ids), expected)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0), (2, 1, 3)])
def test_lookup_of_ids_of_any_shape(shape):
    rows = te.lookup(TABLE, np.full(shape, 3, np.int32))
    assert rows.shape == (*shape, WIDTH)
    np.testing.assert_array_equal(rows, np.broadcast_to(TABLE[3], rows.shape))


@pytest.mark.parametrize("policy", POLICIES)
def test_lookup_in_a_vocabulary_of_one(policy):
    table = np.array([[7.0, 8.0]], np.float32)
    rows = te.lookup(table, [0, 1, -1], out_of_range=policy)
    np.testing.assert_array_equal(rows, loop_lookup(table, [0, 1, -1], out_of_range=policy))


def test_lookup_of_rows_without_channels():
    assert te.lookup(np.zeros((3, 0), np.float32), [0, 5]).shape == (2, 0)


# --- lookup: the dtypes of ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "vocab_size", "ids"),
    [
        (np.int8, 70_000, [0, 127, -1, -128]),
        (np.uint8, 70_000, [0, 127, 128, 255]),
        (np.int16, 70_000, [0, 2**15 - 1, -1, -(2**15)]),
        (np.uint16, 70_000, [0, 2**15 - 1, 2**15, 2**16 - 1]),
        (np.uint32, 200, [0, 199, 200, 3_000_000_000, 2**32 - 1]),
        (np.int64, 200, [0, 199, 2**32 + 5, -(2**32) + 5, 2**63 - 1, -(2**63)]),
        (np.uint64, 200, [0, 199, 2**32 + 5, 2**64 - 1]),
    ],
)
def test_lookup_takes_ids_of_any_integer_dtype(dtype, vocab_size, ids):
    table, ids = normal(0, vocab_size, 2), np.array(ids, dtype)
    of_policy = {
        policy: functools.partial(te.lookup, table, out_of_range=policy) for policy in POLICIES
    }
    with x64(np.dtype(dtype).itemsize == 8):
        on_device = jax.device_put(ids)
        from_device = {policy: find(on_device) for policy, find in of_policy.items()}
        compiled = jax.jit(lambda ids: {policy: find(ids) for policy, find in of_policy.items()})(
            ids
        )
    for policy, find in of_policy.items():
        expected = loop_lookup(table, ids, out_of_range=policy)
        for rows in (find(ids), from_device[policy], compiled[policy]):
            np.testing.assert_array_equal(rows, expected, err_msg=policy)


def test_lookup_compares_pad_id_with_the_whole_id():
    rows = te.lookup(TABLE, np.array([2**32 + 2, 2]), pad_id=2, out_of_range="clip")
    np.testing.assert_array_equal(rows, [TABLE[-1], np.zeros(WIDTH)])
    np.testing.assert_array_equal(
        te.lookup(normal(0, 300, 1), np.array([44], np.uint8), pad_id=300), normal(0, 300, 1)[44:45]
    )


def test_lookup_in_float64():
    with x64():
        table = np.random.default_rng(0).normal(size=(VOCAB, WIDTH))
        rows = te.lookup(table, jax.device_put(IDS), pad_id=2)
        assert rows.dtype == jnp.float64
        np.testing.assert_array_equal(rows, loop_lookup(table, IDS, 2))


@pytest.mark.parametrize(
    "ids",
    [[1.0], np.ones(2, np.float16), jnp.ones(2, jnp.bfloat16), [True], np.ones(1, bool)],
)
def test_lookup_refuses_ids_that_are_not_integers(ids):
    with pytest.raises(
        TypeError,
        match=r"^ids: wanted an integer dtype, got (float64|float16|bfloat16|bool)$",
    ):
        te.lookup(TABLE, ids)


def test_lookup_refuses_lists_of_unequal_lengths():
    with pytest.raises(
        ValueError,
        match=r"^ids: wanted an array, or nested lists of equal lengths, got lists of unequal lengths$",
    ):
        te.lookup(TABLE, [[1, 2], [3]])
    with pytest.raises(
        TypeError,
        match=r"^ids: wanted an array of real numbers of at most 64 bits, got NoneType None$",
    ):
        te.lookup(TABLE, None)
    with pytest.raises(
        TypeError,
        match=r"^ids: wanted an array of real numbers of at most 64 bits, got list \[\(1\+0j\)\]$",
    ):
        te.lookup(TABLE, [1 + 0j])


def test_lookup_refuses_a_list_of_ids_that_jit_took_apart():
    with pytest.raises(TypeError, match=r"^ids: wanted one array .*, got a list of traced values"):
        jax.jit(te.lookup)(TABLE, [1, 2])


def test_lookup_refuses_bad_tables_and_options():
    with pytest.raises(
        TypeError, match=r"^table: wanted a floating dtype of 16 to 64 bits, got int32$"
    ):
        te.lookup(np.ones((2, 2), np.int32), [0])
    for shape in ((), (2,), (0, 2), (1, 2, 2)):
        message = rf"^table: wanted shape \[vocab_size, d\] with at least one row, got shape \[{', '.join(map(str, shape))}\]$"
        with pytest.raises(ValueError, match=message):
            te.lookup(np.ones(shape, np.float32), [0])
    with pytest.raises(
        ValueError, match=r"^out_of_range: wanted one of 'nan', 'clip', 'zero', got 'wrap'$"
    ):
        te.lookup(TABLE, [0], out_of_range="wrap")
    with pytest.raises(
        ValueError, match=r"^lookup_style: wanted one of 'gather', 'one_hot', got 'matmul'$"
    ):
        te.lookup(TABLE, [0], lookup_style="matmul")
    with pytest.raises(TypeError, match=r"^pad_id: wanted a Python int, got float 0.0$"):
        te.lookup(TABLE, [0], pad_id=0.0)
    with pytest.raises(
        ValueError, match=r"^pad_id: wanted an int of at most 2147483646, got 2147483647$"
    ):
        te.lookup(TABLE, [0], pad_id=2**31 - 1)
    with pytest.raises(
        ValueError, match=r"^pad_id: wanted an int of at least -2147483647, got -2147483648$"
    ):
        te.lookup(TABLE, [0], pad_id=-(2**31))


# --- lookup: derivatives


@every_case
def test_lookup_gradient_is_the_one_hot_product(policy, pad_id):
    _, gradient = rows_and_gradients("gather")[policy, pad_id]
    expected = one_hot(IDS, pad_id, policy).T @ COTANGENT.reshape(-1, WIDTH).astype(np.float64)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=GRADIENT_ERROR)
    np.testing.assert_array_equal(np.asarray(gradient)[~expected.any(-1)], 0)


@every_case
def test_lookup_by_one_hot_is_the_gather_forward_and_back(policy, pad_id):
    """A policy that one style followed and the other did not, or the gradient did not, would be two
    models of one config."""
    (rows, gradient), (expected, expected_gradient) = (
        rows_and_gradients(style)[policy, pad_id] for style in ("one_hot", "gather")
    )
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=2 * GRADIENT_ERROR)


@functools.partial(jax.jit, static_argnums=1)
def read_around_padding(table, policy):
    """The rows of three ids, two of them padding, their sum, and its gradient."""
    ids, options = [2, 1, 2], {"pad_id": 2, "out_of_range": policy}
    return te.lookup(table, ids, **options), *jax.value_and_grad(weighted)(
        table, ids, 1.0, **options
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("content", [np.nan, np.inf, -np.inf])
def test_lookup_of_padding_is_zero_whatever_the_table_holds(policy, content):
    table = TABLE.copy()
    table[2] = content
    rows, value, gradient = read_around_padding(table, policy)
    np.testing.assert_array_equal(np.asarray(rows)[[0, 2]], 0)
    np.testing.assert_allclose(value, TABLE[1].sum(dtype=np.float64), rtol=0, atol=PRODUCT_ERROR)
    np.testing.assert_array_equal(gradient, one_hot([1])[0][:, None] * np.ones(WIDTH))


def test_lookup_gradient_accumulates_repeated_ids():
    gradient = jax.jit(jax.grad(lambda table: weighted(table, [3] * 7 + [1], 1.0)))(TABLE)
    np.testing.assert_array_equal(gradient, np.array([0, 1, 0, 7, 0])[:, None] * np.ones(WIDTH))


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("repeats", [512, 4096])
def test_lookup_gradient_counts_further_than_16_bits_do(dtype, repeats, style):
    # One by one, bfloat16 counts to 256 and float16 to 2048; the sums themselves, powers of two,
    # are exact in both.
    gradient = jax.jit(
        jax.grad(lambda table: weighted(table, np.full(repeats, 3), 1.0, lookup_style=style))
    )(TABLE.astype(dtype))
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(np.asarray(gradient, np.float32)[3], repeats)


@pytest.mark.parametrize("policy", POLICIES)
def test_lookup_jvp_and_vjp_are_transposes(policy):
    find = functools.partial(te.lookup, ids=IDS, pad_id=2, out_of_range=policy)
    direction, matrix = normal(2, VOCAB, WIDTH), one_hot(IDS, 2, policy)
    tangent, (back,) = jax.jit(
        lambda *args: (jax.jvp(find, args[:1], args[1:2])[1], jax.vjp(find, args[0])[1](args[2]))
    )(TABLE, direction, COTANGENT)
    np.testing.assert_array_equal(tangent, np.float32(matrix @ direction).reshape(tangent.shape))
    np.testing.assert_allclose(
        back, matrix.T @ COTANGENT.reshape(-1, WIDTH), rtol=0, atol=GRADIENT_ERROR
    )


@pytest.mark.slow
def test_lookup_hessian_of_a_sum_of_cubes():
    ids = np.array([1, 1, 3, 0])
    hessian = jax.jit(jax.hessian(lambda table: jnp.sum(te.lookup(table, ids, pad_id=0) ** 3)))(
        TABLE
    )
    diagonal = 6 * one_hot(ids, 0).sum(0)[:, None] * TABLE.astype(np.float64)
    expected = np.diag(diagonal.ravel()).reshape(hessian.shape)
    np.testing.assert_allclose(hessian, expected, rtol=0, atol=GRADIENT_ERROR)


# --- lookup: transformations


@pytest.mark.parametrize(("policy", "pad_id"), list(itertools.product(POLICIES, (None, 2))))
def test_lookup_under_jit_is_the_eager_one_to_the_bit(policy, pad_id):
    find = functools.partial(te.lookup, pad_id=pad_id, out_of_range=policy)
    np.testing.assert_array_equal(jax.jit(find)(TABLE, IDS), find(TABLE, IDS))


@pytest.mark.parametrize(
    ("axes", "tables", "ids"),
    [
        ((None, 0), [TABLE] * 3, list(IDS)),
        ((0, None), list(normal(2, 4, VOCAB, WIDTH)), [IDS] * 4),
        ((0, 0), list(normal(2, 3, VOCAB, WIDTH)), list(IDS)),
        ((1, 1), list(normal(2, 4, VOCAB, WIDTH)), list(IDS.T)),
    ],
)
def test_lookup_under_vmap_is_a_loop(axes, tables, ids):
    stacked = [
        one[0] if axis is None else np.stack(one, axis)
        for one, axis in zip((tables, ids), axes, strict=True)
    ]
    expected = [te.lookup(*pair) for pair in zip(tables, ids, strict=True)]
    np.testing.assert_array_equal(jax.vmap(te.lookup, axes)(*stacked), expected)


@pytest.mark.slow
def test_lookup_gradient_under_vmap_is_a_loop():
    gradient = jax.jit(jax.grad(lambda table, ids: weighted(table, ids, 1.0, pad_id=2)))
    np.testing.assert_array_equal(
        jax.vmap(gradient, (None, 0))(TABLE, IDS), [gradient(TABLE, row) for row in IDS]
    )


def test_lookup_has_one_trace_for_all_ids():
    traces = []

    @jax.jit
    def find(ids):
        traces.append(ids)
        return te.lookup(TABLE, ids)

    for token in range(3):
        np.testing.assert_array_equal(find(np.array([token], np.int32)), TABLE[token : token + 1])
    assert len(traces) == 1


@pytest.fixture
def exported():
    return export.export(jax.jit(functools.partial(te.lookup, pad_id=2)))(
        TABLE, IDS.astype(np.int32)
    )


def test_lookup_survives_export(exported):
    np.testing.assert_array_equal(
        exported.call(TABLE, IDS.astype(np.int32)), loop_lookup(TABLE, IDS, 2)
    )


def test_lookup_survives_export_to_bytes(exported):
    pytest.importorskip("flatbuffers")
    revived = export.deserialize(exported.serialize())
    np.testing.assert_array_equal(
        revived.call(TABLE, IDS.astype(np.int32)), loop_lookup(TABLE, IDS, 2)
    )


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lookup_and_its_gradient_lower_for_accelerators(platform):
    step = jax.value_and_grad(lambda table, ids: weighted(table, ids, 1.0, pad_id=2))
    text = (
        jax.jit(step)
        .trace(TABLE, IDS.astype(np.int32))
        .lower(lowering_platforms=(platform,))
        .as_text()
    )
    assert "stablehlo.gather" in text
    assert "stablehlo.scatter" in text


# --- lookup: the gradient on a GPU


def gradient_of_once(index, cotangent, vocab_size):
    """The gradient that a GPU computes, here on the CPU."""
    read = functools.partial(
        lookup_gradient._read_each_row_once, index=jnp.asarray(index, jnp.uint32)
    )
    return jax.linear_transpose(read, jnp.zeros((vocab_size, cotangent.shape[-1])))(cotangent)[0]


gradient_on_a_gpu = jax.jit(gradient_of_once, static_argnums=2)


@pytest.mark.parametrize("size", [1, 2, 33, 1000])
@pytest.mark.parametrize("distinct", [1, 7, 900])
def test_gradient_on_a_gpu_is_the_float64_sum_of_repeats(size, distinct):
    rng = np.random.default_rng(size + distinct)
    index, cotangent = rng.integers(0, distinct, size), normal(1, size, WIDTH)
    index[::5] = 2**32 - 1 - rng.integers(0, 3)
    inside = index < 900
    expected, magnitude = np.zeros((2, 900, WIDTH))
    np.add.at(expected, index[inside], cotangent[inside].astype(np.float64))
    np.add.at(magnitude, index[inside], np.abs(cotangent[inside], dtype=np.float64))
    # A sum over a tree of at most 10 levels, each of which rounds by 2**-24 of the magnitudes below
    # it.
    assert np.all(
        np.abs(np.asarray(gradient_on_a_gpu(index, cotangent, 900)) - expected)
        <= 10 * 2.0**-24 * magnitude
    )


def test_gradient_on_a_gpu_reaches_the_highest_row_of_the_batch():
    gradient = gradient_on_a_gpu(np.array([4, 1, 4, 2, 0, 1]), np.ones((6, 1), np.float32), 6)
    np.testing.assert_array_equal(gradient[:, 0], [1, 2, 1, 0, 2, 0])


def test_gradient_on_a_gpu_is_the_same_in_every_run():
    rng = np.random.default_rng(0)
    index, cotangent = rng.integers(0, 9, 500), normal(1, 500, WIDTH)
    runs = [np.asarray(gradient_on_a_gpu(index, cotangent, 9)) for _ in range(10)]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


def test_gradient_on_a_gpu_keeps_what_is_not_finite_in_its_own_row():
    cotangent = normal(1, 6, WIDTH)
    cotangent[3] = np.nan
    gradient = np.asarray(gradient_on_a_gpu(np.array([4, 1, 4, 2, 0, 1]), cotangent, VOCAB))
    np.testing.assert_array_equal(np.isnan(gradient).all(-1), np.arange(VOCAB) == 2)
    np.testing.assert_array_equal(np.isnan(gradient).any(-1), np.arange(VOCAB) == 2)


@pytest.mark.parametrize("manual", [False, True])
def test_gradient_lowered_for_a_gpu_scatters_to_distinct_rows_alone(manual):
    """A scatter to repeated rows is atomic there: slow, and not the same from run to run."""
    mesh = jax.make_mesh(
        (8 if manual else 1,),
        ("x",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices("cpu")[: 8 if manual else 1],
    )
    step = lambda table, ids: jax.grad(lambda table: weighted(table, ids, 1.0, pad_id=2))(table)
    if manual:
        step = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("x")),
            out_specs=PartitionSpec(),
        )
    with set_mesh(mesh):
        traced = jax.jit(step).trace(TABLE, np.zeros((8, 2), np.int32))
        text = {
            platform: traced.lower(lowering_platforms=(platform,)).as_text()
            for platform in ("cuda", "cpu", "tpu")
        }
    assert set(re.findall(r"stablehlo\.scatter.*?unique_indices = (\w+)", text["cuda"])) == {"true"}
    assert "stablehlo.sort" in text["cuda"]
    for platform in ("cpu", "tpu"):
        assert "stablehlo.sort" not in text[platform]


@pytest.mark.parametrize("is_named", [True, False])
def test_gradient_lowered_for_gpus_that_the_compiler_splits_the_batch_over_sorts_nothing(is_named):
    """A sort of the whole batch would bring all of it to each device."""
    with set_mesh(mesh_of(AxisType.Auto)) if is_named else contextlib.nullcontext():
        traced = jax.jit(jax.grad(lambda table, ids: weighted(table, ids, 1.0))).trace(
            TABLE, IDS.astype(np.int32)
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.sort" not in text


# --- lookup: meshes of eight devices

SPEC = PartitionSpec
MESH_IDS = np.array([[0, 7, 3, 3, 9, -1, 5, 2], [2, 2, 2, 1, 0, 8, 6, 4]])
MESH_TABLE = normal(3, 8, 4)
MESH_COTANGENT = normal(4, *MESH_IDS.shape, 4)
PLACEMENTS = [
    (SPEC(), SPEC(), SPEC(None, None, None)),
    (SPEC("x"), SPEC(), SPEC("x", None, None)),
    (SPEC("x", "y"), SPEC(), SPEC("x", "y", None)),
    (SPEC(None, ("x", "y")), SPEC(), SPEC(None, ("x", "y"), None)),
    (SPEC(), SPEC(None, "y"), SPEC(None, None, "y")),
    (SPEC("x"), SPEC(None, "y"), SPEC("x", None, "y")),
    (SPEC("x"), SPEC("y"), SPEC("x", None, None)),
]


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:8])


@functools.partial(jax.jit, static_argnums=3)
def mesh_step(table, ids, cotangent, policies):
    """By policy: the rows, and the gradient of the table."""

    def of_policy(policy):
        rows, back = jax.vjp(
            lambda table: te.lookup(table, ids, pad_id=2, out_of_range=policy), table
        )
        return rows, back(cotangent)[0]

    return {policy: of_policy(policy) for policy in policies}


@pytest.mark.slow
@pytest.mark.parametrize(("ids_spec", "table_spec", "rows_spec"), PLACEMENTS)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_lookup_on_a_mesh_equals_lookup_on_one_device(kind, ids_spec, table_spec, rows_spec):
    mesh = mesh_of(kind)
    with set_mesh(mesh):
        table, ids, cotangent = (
            jax.device_put(array, NamedSharding(mesh, spec))
            for array, spec in (
                (MESH_TABLE, table_spec),
                (MESH_IDS.astype(np.int32), ids_spec),
                (MESH_COTANGENT, rows_spec),
            )
        )
        found = mesh_step(table, ids, cotangent, POLICIES)
    for policy, (rows, gradient) in found.items():
        if kind == AxisType.Explicit:
            assert rows.sharding.spec == rows_spec, policy
        np.testing.assert_array_equal(
            rows, loop_lookup(MESH_TABLE, MESH_IDS, 2, policy), err_msg=policy
        )
        expected = one_hot(MESH_IDS, 2, policy, 8).T @ MESH_COTANGENT.reshape(-1, 4).astype(
            np.float64
        )
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=GRADIENT_ERROR, err_msg=policy)


@pytest.mark.parametrize(
    ("ids_spec", "table_spec", "rows_spec"),
    [PLACEMENTS[1], pytest.param(*PLACEMENTS[5], marks=pytest.mark.slow)],
)
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

    with set_mesh(mesh):
        found = gradient(
            jax.device_put(MESH_TABLE, NamedSharding(mesh, table_spec)),
            jax.device_put(MESH_IDS.astype(np.uint32), NamedSharding(mesh, ids_spec)),
            jax.device_put(MESH_COTANGENT, NamedSharding(mesh, rows_spec)),
        )
    expected = one_hot(MESH_IDS, None, "zero", 8).T @ MESH_COTANGENT.reshape(-1, 4).astype(
        np.float64
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=GRADIENT_ERROR)


@pytest.mark.parametrize("dtype", FLOATS)
def test_lookup_on_an_explicit_mesh_without_jit(dtype):
    mesh, table = mesh_of(AxisType.Explicit), MESH_TABLE.astype(dtype)
    with set_mesh(mesh):
        rows = te.lookup(
            table,
            jax.device_put(MESH_IDS.astype(np.int32), NamedSharding(mesh, SPEC("x"))),
            pad_id=2,
        )
    assert rows.sharding.spec == SPEC("x", None, None)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(
        np.asarray(rows, np.float32), loop_lookup(table, MESH_IDS, 2).astype(np.float32)
    )


def test_columns_over_an_explicit_axis_of_the_ids_are_refused():
    mesh = mesh_of(AxisType.Explicit)
    table = jax.device_put(MESH_TABLE, NamedSharding(mesh, SPEC(None, "x")))
    ids = jax.device_put(MESH_IDS.astype(np.int32), NamedSharding(mesh, SPEC("x")))
    with set_mesh(mesh), pytest.raises(Exception, match="duplicate entries for `x`"):
        te.lookup(table, ids)


# --- linear_logits

# That of padding.
LOWEST = jnp.finfo(jnp.float32).min / 2


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 4), (0,), (2, 0)])
@pytest.mark.parametrize("pad_id", [None, 0, 4, 9])
def test_logits_is_a_product_with_every_row(shape, pad_id):
    x = normal(2, *shape, WIDTH)
    expected = x.astype(np.float64) @ TABLE.astype(np.float64).T
    if pad_id is not None and pad_id < VOCAB:
        expected[..., pad_id] = LOWEST
    with jax.default_matmul_precision("highest"):
        logits = te.linear_logits(x, TABLE, pad_id=pad_id)
    assert logits.dtype == jnp.float32
    assert logits.shape == (*shape, VOCAB)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=3 * PRODUCT_ERROR)


def test_logits_of_one_hot_vectors_is_the_transposed_table():
    with jax.default_matmul_precision("highest"):
        np.testing.assert_array_equal(
            te.linear_logits(np.eye(WIDTH, dtype=np.float32), TABLE), TABLE.T
        )


@pytest.mark.parametrize("content", [1.0, -1e30])
def test_logits_of_padding_are_never_the_highest_and_move_nothing(content):
    table, x = TABLE.copy(), normal(2, 4, WIDTH)
    table[2] = content
    zeroed = np.where(np.arange(VOCAB)[:, None] == 2, 0, TABLE).astype(np.float64)
    with jax.default_matmul_precision("highest"):
        logits, back = jax.vjp(functools.partial(te.linear_logits, pad_id=2), x, table)
        cotangent = normal(3, 4, VOCAB)
        x_gradient, table_gradient = back(cotangent)
    np.testing.assert_array_equal(np.asarray(logits)[:, 2], LOWEST)
    np.testing.assert_array_equal(np.asarray(table_gradient)[2], 0)
    np.testing.assert_allclose(x_gradient, cotangent @ zeroed, rtol=0, atol=VOCAB * PRODUCT_ERROR)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_logits_of_16_bits_is_summed_in_float32(dtype):
    # 2048 + 511 * 0.5 is exact in float32 and no number of 8 or 11 bits: they step by 16 and by 2
    # there.
    table = np.full((1, 512), 0.5, dtype)
    table[0, 0] = 2048
    logits = te.linear_logits(np.ones((1, 512), dtype), table)
    assert logits.dtype == jnp.float32
    assert logits.tolist() == [[2048 + 511 * 0.5]]


def test_logits_widens_mixed_inputs():
    assert te.linear_logits(np.ones((1, WIDTH), jnp.bfloat16), TABLE).dtype == jnp.float32
    with x64():
        assert te.linear_logits(np.ones((1, WIDTH)), TABLE).dtype == jnp.float64


def test_logits_under_jit_and_vmap_is_the_eager_one():
    x = normal(2, 4, WIDTH)
    multiply = functools.partial(te.linear_logits, pad_id=2)
    with jax.default_matmul_precision("highest"):
        expected = multiply(x, TABLE)
        np.testing.assert_allclose(
            jax.jit(multiply)(x, TABLE), expected, rtol=0, atol=3 * PRODUCT_ERROR
        )
        np.testing.assert_allclose(
            jax.vmap(multiply, (0, None))(x, TABLE), expected, rtol=0, atol=3 * PRODUCT_ERROR
        )


def test_logits_refuses_bad_shapes_and_dtypes():
    with pytest.raises(
        ValueError, match=r"^x: wanted a last axis of the table's width, \(3,\), got \(4,\)$"
    ):
        te.linear_logits(np.ones((2, 4), np.float32), TABLE)
    with pytest.raises(
        ValueError, match=r"^x: wanted a last axis of the table's width, \(3,\), got \(\)$"
    ):
        te.linear_logits(np.float32(1), TABLE)
    with pytest.raises(
        ValueError,
        match=r"^table: wanted shape \[vocab_size, d\] with at least one row, got shape \[3\]$",
    ):
        te.linear_logits(np.ones(3, np.float32), TABLE[0])
    with pytest.raises(
        TypeError, match=r"^x: wanted a floating dtype of 16 to 64 bits, got int32$"
    ):
        te.linear_logits(np.ones(3, np.int32), TABLE)
    with pytest.raises(
        TypeError, match=r"^table: wanted a floating dtype of 16 to 64 bits, got int32$"
    ):
        te.linear_logits(np.ones(3, np.float32), TABLE.astype(np.int32))
    with pytest.raises(TypeError, match=r"^pad_id: wanted a Python int, got bool True$"):
        te.linear_logits(np.ones(3, np.float32), TABLE, pad_id=True)


@pytest.mark.parametrize(
    ("table_spec", "logits_spec"),
    [(SPEC(), SPEC("x", None, None)), (SPEC("y"), SPEC("x", None, "y"))],
)
def test_logits_on_an_explicit_mesh_equals_that_of_one_device(table_spec, logits_spec):
    mesh = mesh_of(AxisType.Explicit)
    x = MESH_COTANGENT
    with set_mesh(mesh), jax.default_matmul_precision("highest"):
        placed = (
            jax.device_put(x, NamedSharding(mesh, SPEC("x"))),
            jax.device_put(MESH_TABLE, NamedSharding(mesh, table_spec)),
        )
        logits = jax.jit(functools.partial(te.linear_logits, pad_id=2))(*placed)
    assert logits.sharding.spec == logits_spec
    expected = np.where(
        np.arange(8) == 2, LOWEST, x.astype(np.float64) @ MESH_TABLE.astype(np.float64).T
    )
    np.testing.assert_allclose(logits, expected, rtol=0, atol=4 * PRODUCT_ERROR)


# --- check_ids


@pytest.mark.parametrize(
    "ids",
    [
        0,
        4,
        np.zeros(0, int),
        [[0, 4], [2, 2]],
        np.array([4], np.uint8),
        np.array([4], np.uint64),
        jnp.arange(5),
    ],
)
def test_check_ids_passes_what_lies_in_the_vocabulary(ids):
    assert te.check_ids(ids, VOCAB) is None


@pytest.mark.parametrize(
    ("ids", "got"),
    [
        (5, r"5"),
        ([0, -1, 5], r"-1 at index \[1\]"),
        ([[0, 1], [2, 5], [-1, 0]], r"5 at index \[1, 1\]"),
        (np.array([0, 2**32 + 2]), r"4294967298 at index \[1\]"),
        (np.array([2**64 - 1], np.uint64), r"18446744073709551615 at index \[0\]"),
        (np.array([200], np.uint8), r"200 at index \[0\]"),
        (jnp.array([[-1]]), r"-1 at index \[0, 0\]"),
    ],
)
def test_check_ids_names_the_first_bad_id_and_its_index(ids, got):
    with pytest.raises(
        ValueError, match=rf"^ids: wanted integers inside the vocabulary, 0\.\.4, got {got}$"
    ):
        te.check_ids(ids, VOCAB)


@pytest.mark.parametrize(("dtype", "vocab_size"), [(np.int8, 200), (np.uint8, 300)])
def test_check_ids_does_not_narrow_the_vocabulary_to_the_dtype_of_the_ids(dtype, vocab_size):
    highest = np.iinfo(dtype).max
    assert te.check_ids(np.array([0, highest], dtype), vocab_size) is None
    with pytest.raises(ValueError, match=rf"got {highest} at index \[1\]$"):
        te.check_ids(np.array([0, highest], dtype), highest)


def test_check_ids_refuses_traced_ids():
    with pytest.raises(
        TypeError, match=r"^ids: wanted values on the host, outside of jit, got a traced int32\[2\]"
    ):
        jax.jit(lambda ids: te.check_ids(ids, VOCAB))(np.zeros(2, np.int32))


@pytest.mark.parametrize("ids", [[1.0], [True], np.ones(2, np.float16)])
def test_check_ids_refuses_ids_that_are_not_integers(ids):
    with pytest.raises(
        TypeError, match=r"^ids: wanted an integer dtype, got (float64|bool|float16)$"
    ):
        te.check_ids(ids, VOCAB)


def test_check_ids_refuses_a_bad_vocabulary():
    with pytest.raises(ValueError, match=r"^vocab_size: wanted an int of at least 1, got 0$"):
        te.check_ids([0], 0)
    with pytest.raises(TypeError, match=r"^vocab_size: wanted a Python int, got float 5.0$"):
        te.check_ids([0], 5.0)


def test_an_empty_list_is_one_of_integers():
    assert te.lookup(TABLE, []).shape == (0, WIDTH)
    te.check_ids([], 4)


def test_check_ids_of_huge_values_is_short():
    with pytest.raises(
        TypeError, match=r"^ids: wanted an array of real numbers of at most 64 bits, got list "
    ) as caught:
        te.check_ids([2**70] * 10_000, 4)
    assert len(str(caught.value)) < 300


def test_the_gather_alone_clips_ids():
    """XLA's gather reads the nearest row anyway: a clip before it would be one more kernel."""
    text = jax.jit(te.lookup).lower(TABLE, jnp.zeros([3], jnp.int32)).as_text()
    assert "gather" in text
    assert not any(word in text for word in ("clamp", "maximum", "minimum"))
