"""The cross-entropy of an output layer where draws do not reach: sizes, memory, programs, errors."""

import functools

import collectives
import jax
import jax.export
import jax.numpy as jnp
import jax.test_util
import meshes
import numpy as np
import optax
import pytest
from compare import equal, near
from drawn import normal
from jax.sharding import AxisType
from references import linear_cross_entropy, linear_logits
from refused import refused

import transformer_embed as te
from transformer_embed._src.tokens import chunks as engine
from transformer_embed._src.tokens import losses

# What is promised of values and gradients of magnitude 1; float32 sums of some 100 terms are within
# 100 * 2**-24 = 6e-6.
ERROR = 1e-5
VOCAB, WIDTH, SHAPE = 7, 3, (4, 5)


TABLE, X, BIAS = normal(0, VOCAB, WIDTH), normal(1, *SHAPE, WIDTH), normal(20, VOCAB)
LABELS = np.random.default_rng(2).integers(0, VOCAB, SHAPE).astype(np.int32)
MASK = np.random.default_rng(3).random(SHAPE) < 0.7
WEIGHTS = np.random.default_rng(21).random(SHAPE).astype(np.float32)
SEGMENTS = np.int32([[1, 1, 2, 2, 2], [3, 3, 3, 3, 3], [1, 1, 0, 0, 0], [0, 0, 5, 6, 6]])
ARRAYS = {"x": X, "table": TABLE, "labels": LABELS, "bias": BIAS, "weights": WEIGHTS, "mask": MASK}
PACKED = {"shift": True, "segment_ids": SEGMENTS}


STATIC = ["softcap", "scale", "pad_id", "shift", "reduction", "chunk_size"]


@functools.partial(jax.jit, static_argnames=STATIC)
def step(x, table, labels, bias, weights, **options):
    """Loss, of all tokens, and the gradients of x, the table, the bias and the weights."""

    def loss(x, table, bias, weights):
        arguments = {"bias": bias, "weights": weights, **options}
        return linear_cross_entropy(x, table, labels, **arguments).sum()

    value, gradients = jax.value_and_grad(loss, (0, 1, 2, 3))(x, table, bias, weights)
    return value, *gradients


def assert_close(got, expected, error=ERROR):
    for one, other in zip(got, expected, strict=True):
        near(np.asarray(one, np.float64), other, rtol=error, atol=error)


def value(**changes):
    return linear_cross_entropy(**ARRAYS | changes)


# --- values and gradients

ALL = {"softcap": 2.0, "scale": 3.0, "pad_id": 2, "label_smoothing": 0.1, "z_loss": 0.1, **PACKED}
ALL |= {"chunk_size": 3}


@pytest.mark.slow
def test_a_published_loss():
    """Stanford CS231n, linear classification notes, softmax classifier: scores -2.85, 0.86, 0.28
    with label 2 cost 1.04. https://cs231n.github.io/linear-classify/"""
    got = linear_cross_entropy([-2.85, 0.86, 0.28], np.eye(3, dtype=np.float32), 2)
    near(got, 1.04, rtol=2e-3)


SIZES = [
    {"scale": 1e6, "label_smoothing": 0.1, "z_loss": 1e-4},
    {"scale": 1e10},
    {"scale": 3e15, "softcap": 3e15, "z_loss": 1e-4},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", SIZES)
def test_a_factor_of_any_size_gives_the_losses_and_gradients_of_float64(options):
    """A product that is rounded once in one place and twice in another differs by more than 1."""
    with jax.enable_x64():
        wide = {name: np.float64(ARRAYS[name]) for name in ("x", "table", "bias", "weights")}
        exact = step(**ARRAYS | wide, **options)
    for values, want in zip(step(**ARRAYS, **options), exact, strict=True):
        near(values, want, atol=ERROR * np.abs(want).max())


@pytest.mark.slow
def test_a_z_loss_whose_slope_is_zero_has_its_gradient():
    # One id, whose logit is log_z = -1 / (2 z_loss): the two terms of the slope cancel.
    x, table = np.float32([[-1]]), np.float32([[1], [1e4]])
    loss = lambda x: linear_cross_entropy(x, table, [0], z_loss=0.5)
    near(jax.jit(jax.grad(loss))(x), [[-1]], rtol=1e-5)


@pytest.mark.slow
def test_first_and_second_derivatives_are_finite_differences():
    with jax.enable_x64():

        @jax.jit
        def loss(*arrays):
            given = dict(zip(("x", "table", "bias", "weights"), arrays, strict=True))
            return linear_cross_entropy(labels=LABELS, **given, **ALL)

        arrays = tuple(map(np.float64, (X, TABLE, BIAS, WEIGHTS + 0.1)))
        jax.test_util.check_grads(loss, arrays, 2, modes="rev", atol=1e-5, rtol=1e-5, eps=1e-4)


def test_metrics_leave_an_exported_function():
    loss = lambda x: te.linear_cross_entropy(x, TABLE, LABELS, mask=MASK & False, with_metrics=True)
    exported = jax.export.export(jax.jit(loss))(jax.ShapeDtypeStruct(X.shape, X.dtype))
    found, metrics = jax.export.deserialize(exported.serialize()).call(X)
    # Of no labels, as of perfect training, but for the weight.
    assert (float(found), float(metrics.weight)) == (0, 0)


# --- narrow dtypes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bits_are_summed_in_float32(dtype):
    tokens = 1024
    arrays = {"x": normal(0, tokens, 2), "table": normal(1, 3, 2), "bias": normal(2, 3)}
    arguments = {name: array.astype(dtype) for name, array in arrays.items()}
    arguments |= {"labels": np.arange(tokens) % 3, "weights": np.ones(tokens, np.float32)}
    arguments |= {"reduction": "sum", "chunk_size": 16, "pad_id": 9}
    wide = {name: np.float32(arguments[name]) for name in arrays}
    got, want = step(**arguments), step(**arguments | wide)
    assert [each.dtype for each in got] == [jnp.float32, *[dtype] * 3, jnp.float32]
    # One rounding to the dtype, and float32 sums of 1024 terms of both signs. In bfloat16 each term
    # is rounded before, independently of others.
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    sums = tokens * 2.0**-24 * 4 if dtype == jnp.float16 else tokens**0.5 * half_ulp
    for one, other in zip(got[1:4], want[1:4], strict=True):
        near(np.float32(one), other, rtol=half_ulp + ERROR, atol=sums)
    assert_close([got[0], got[4]], [want[0], want[4]])


@pytest.mark.slow
def test_a_scale_on_the_loss_reaches_float16_gradients_before_they_are_rounded():
    tokens, scale = 2**14, 2.0**15
    x, table = np.full((tokens, 1), 2.0**-8, np.float16), np.array([[1.0], [-1.0]], np.float16)
    loss = lambda x: scale * linear_cross_entropy(x, table, np.zeros(tokens, int))
    # About -1 / tokens each: below float16's normal numbers, above them when scaled.
    want = -2 * scale / (1 + np.exp(2.0**-7)) / tokens
    near(np.float32(jax.jit(jax.grad(loss))(x)), want, rtol=2.0**-11 + ERROR)


@pytest.mark.slow
def test_gradients_of_narrow_weights_are_rounded_once():
    """Weights of one number a column are summed over many rows."""
    x, table = normal(0, 2048, 2, 8), normal(1, 16, 8)
    loss = functools.partial(linear_cross_entropy, x, table, np.arange(4096).reshape(-1, 2) % 16)
    of_weights = jax.grad(lambda weights: loss(weights=weights, reduction="sum"))
    got = jax.jit(of_weights)(jnp.ones(2, jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    near(np.float32(got), loss(reduction="none").sum(0), rtol=2**-8)


# --- tokens that are not counted


def test_a_counted_label_outside_the_vocabulary_makes_all_nan():
    labels, mask = LABELS.copy(), np.ones(SHAPE, bool)
    for labels[1, 2] in (VOCAB, -1, -(2**31)):
        _, of_x, of_table, *_ = step(**ARRAYS | {"labels": labels, "mask": mask})
        assert np.isnan(of_table).all()
        assert np.isnan(np.asarray(of_x)[1, 2]).all()


@pytest.mark.slow
def test_vocabularies_in_which_one_id_is_predicted():
    for size, options in ((1, {}), (2, {"pad_id": 0, "label_smoothing": 0.3})):
        rows = {name: ARRAYS[name][:size] for name in ("table", "bias")}
        for got in step(**ARRAYS | rows | {"labels": np.full(SHAPE, size - 1)}, **options)[:4]:
            equal(got, 0)


# --- transformations and cost


@pytest.mark.slow
def test_the_arithmetic_of_accelerators_is_right_too(monkeypatch):
    chosen = []

    def choose_default(*arguments, cpu, default):
        chosen.append(default)
        return default(*arguments)

    # Static arguments that no other test has: nothing is traced already.
    options = {"pad_id": 1, "softcap": 2.5}
    with jax.enable_x64():
        exact = jax.tree.map(np.asarray, step(**ARRAYS, **options))
    monkeypatch.setattr(jax.lax, "platform_dependent", choose_default)
    assert_close(step(**ARRAYS, **options), exact)
    losses._compute.clear_cache()
    assert len(chosen) >= 2


def products(function, *arrays):
    """Number of products in the program, those in loops once each."""
    return function.lower(*arrays).as_text().count("dot_general")


@pytest.mark.slow
def test_only_what_is_asked_for_is_computed():
    loss = lambda x, table: value(x=x, table=table)
    functions = loss, jax.grad(loss), jax.grad(loss, 1), jax.grad(loss, (0, 1))
    assert [products(jax.jit(each), X, TABLE) for each in functions] == [1, 2, 2, 3]
    # The fourth one, with eight columns, sums the bias's gradient.
    assert step.lower(**ARRAYS, **ALL).as_text().count("dot_general") == 4


def test_a_product_of_16_bits_is_not_widened():
    x, table = X.astype(jnp.bfloat16), TABLE.astype(jnp.bfloat16)
    assert "convert" not in jax.jit(linear_logits).lower(x, table).as_text()
    assert linear_logits(x, TABLE).dtype == jnp.float32


def temporaries(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_temporaries_are_an_eighth_of_whole_logits_or_less():
    many = jnp.zeros((8, 512, 8)), jnp.zeros((2**15, 8)), jnp.zeros((8, 512), int)

    def dense(x, table, labels):
        logits = linear_logits(x, table)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    whole = temporaries(jax.value_and_grad(dense, (0, 1)), *many)
    assert 8 * temporaries(linear_cross_entropy, *many) <= whole
    settings = {"softcap": 30.0, "scale": 0.5, "z_loss": 1e-4, "shift": True}
    for options in ({"label_smoothing": 0.1}, {"pad_id": 3}, settings):
        loss = functools.partial(linear_cross_entropy, **options)
        assert 8 * temporaries(jax.value_and_grad(loss, (0, 1)), *many) <= whole


@pytest.mark.slow
def test_products_with_the_hessian_keep_the_memory_of_chunks():
    x, table, labels = normal(8, 2048, 2), normal(9, 256, 2), np.zeros(2048, int)
    gradient = jax.grad(lambda table: linear_cross_entropy(x, table, labels, chunk_size=32))
    product = lambda table: jax.jvp(gradient, (table,), (table,))
    assert 8 * temporaries(product, table) < 2048 * 256 * 4


def test_a_chunk_has_all_tokens_whose_logits_fit_or_a_sixth_or_as_many_as_x_has_channels():
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    for tokens, words, width, chunk_size, count in (
        (65_536, 256, 512, None, 1), (65_536, 1024, 768, None, 1), (65_537, 1024, 768, None, 7),
        (4096, 32_000, 256, None, 12), (8192, 151_936, 2048, None, 4), (8192, 128_256, 4096, None, 4),
        (9, 1000, 4, 2, 5), (0, 5, 4, None, 0),
    ):  # fmt: skip
        layer = engine.Layer(of(tokens, width), None, None, of(words, width), None)
        loss = engine.Loss(chunk_size=chunk_size)
        assert engine.number_of_chunks(loss, engine.NO_TOKEN, (layer,)) == count


@pytest.mark.slow
def test_a_symbolic_vocabulary_gives_the_loss_of_each():
    loss = jax.jit(lambda table: linear_cross_entropy(X, table, LABELS, label_smoothing=0.1))
    (rows,) = jax.export.symbolic_shape("v")
    exported = jax.export.export(loss)(jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32))
    for vocab in (VOCAB, VOCAB + 3):
        table = normal(7, vocab, WIDTH)
        near(exported.call(table), loss(table), rtol=ERROR)


# --- errors


ENDS = "... its last axis, got shape"
OF_LOGITS = {"x", "table", "bias", "softcap", "scale", "pad_id"}
TYPE_ERRORS = [
    ({"x": np.ones((4, 5, 3), int)}, "x: ... got int64"),
    ({"table": TABLE.astype(int)}, "table: ... got int64"),
    ({"labels": np.ones(SHAPE)}, "labels: ... got float64"),
    *[({name: None}, f"{name}: ... got None") for name in ("labels", "label_smoothing", "z_loss")],
    ({"mask": np.ones(SHAPE)}, "mask: ... got float64"),
    ({"pad_id": 0.0}, "pad_id: ... got float 0.0"),
    ({"bias": np.ones(7, int)}, "bias: ... got int64"),
    ({"weights": MASK}, "weights: ... got bool"),
    ({"shift": 1.0}, "shift: ... got float 1.0"),
    ({"shift": True, "segment_ids": WEIGHTS}, "segment_ids: ... got float32"),
]  # fmt: skip
VALUE_ERRORS = [
    ({"x": X[..., :2]}, "x: ... (3,), got (2,)"),
    ({"table": TABLE[0]}, "table: ... got shape [3]"),
    ({"labels": LABELS[0]}, "labels: ... (4, 5), got (5,)"),
    ({"x": X[0, 0], "labels": 1, "mask": None, "shift": True}, "labels: ... got shape []"),
    ({"mask": MASK[:2]}, "mask: ... [4, 5], got shape [2, 5]"),
    ({"weights": WEIGHTS[:, :2]}, "weights: ... [4, 5], got shape [4, 2]"),
    (PACKED | {"segment_ids": SEGMENTS[:, :4]}, f"segment_ids: {ENDS} [4, 4]"),
    ({"segment_ids": SEGMENTS}, "segment_ids: ... 0, got an array int32[4, 5]"),
    ({"bias": BIAS[:-1]}, "bias: ... (7,), got (6,)"),
    ({"shift": -1}, "shift: ... 0, got -1"),
    ({"label_smoothing": 1.0}, "label_smoothing: ... [0, 1), got 1.0"),
    ({"reduction": "all"}, "reduction: ... got 'all'"),
    ({"chunk_size": 0}, "chunk_size: ... 1, got 0"),
    ({"softcap": 0}, "softcap: ... got 0"),
    ({"scale": 0.0}, "scale: ... got 0.0"),
    ({"z_loss": -1e-4}, "z_loss: ... 0, got -0.0001"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "errors"), [(TypeError, TYPE_ERRORS), (ValueError, VALUE_ERRORS)])
def test_bad_arguments_are_refused(kind, errors):
    for changes, message in errors:
        arguments = ARRAYS | changes
        of_logits = {name: arguments[name] for name in OF_LOGITS & arguments.keys()}
        with refused(kind, message):
            linear_cross_entropy(**arguments)
        if changes.keys() <= OF_LOGITS:
            with refused(kind, message):
                linear_logits(**of_logits)


@pytest.mark.parametrize(
    "setting", [{"label_smoothing": 1.0}, {"label_smoothing": -0.1}, {"z_loss": -1.0}]
)
def test_an_array_out_of_range_is_nan(setting):
    assert np.isnan(value(**jax.tree.map(jnp.asarray, setting)))


def test_a_number_of_labels_that_is_not_known_is_refused():
    (size,) = jax.export.symbolic_shape("b")
    x, labels = jax.ShapeDtypeStruct((size, 3), "float32"), jax.ShapeDtypeStruct((size,), "int32")
    want = r"^labels: wanted shape of known sizes, .* got shape \[b"
    with pytest.raises(ValueError, match=want):
        jax.eval_shape(lambda x, labels: linear_cross_entropy(x, TABLE, labels), x, labels)


# --- meshes

MESH_X, MESH_TABLE = normal(10, 8, 8, 8), normal(11, 64, 8)
MESH_LABELS = np.random.default_rng(12).integers(0, 64, (8, 8)).astype(np.int32)


def mesh_of(kind):
    return meshes.mesh_of((2, 4), ("data", "model"), kind)


def mesh_loss(x, table, labels):
    return linear_cross_entropy(x, table, labels, pad_id=3, label_smoothing=0.1, chunk_size=4)


mesh_step = jax.jit(jax.value_and_grad(mesh_loss, (0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shards_send_no_table_and_no_logits(kind):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        x, labels = (meshes.put(mesh, array, "data") for array in (MESH_X, MESH_LABELS))
        table = meshes.put(mesh, MESH_TABLE, "model")
        compiled = mesh_step.lower(x, table, labels).compile()
    sent = collectives.collectives(compiled)
    assert {each.kind for each in sent} == {"all-reduce"}
    # x's gradient of half of the tokens, the gradient of a quarter of the rows: never 64 rows of 8,
    # or a token's 64 logits.
    largest = max(np.prod(shape, dtype=int) for each in sent for _, shape in each.operands)
    assert largest <= 32 * 8


def test_the_gradient_of_split_columns_returns_to_them():
    """While it is traced: the values are compared on meshes drawn above."""
    mesh = mesh_of(AxisType.Explicit)
    table = meshes.put(mesh, MESH_TABLE, None, "model")
    with jax.set_mesh(mesh):
        step = jax.grad(te.linear_cross_entropy, 1)
        gradient = jax.eval_shape(step, MESH_X, table, MESH_LABELS)
    assert gradient.shape == table.shape
    assert gradient.sharding.spec == table.sharding.spec


@pytest.mark.slow
def test_columns_split_in_more_parts_than_rows_are_refused():
    mesh = mesh_of(AxisType.Explicit)
    table = meshes.put(mesh, MESH_TABLE[:13], None, "model")
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"table: .* \(see row_multiple\), got"),
    ):
        mesh_step(MESH_X, table, MESH_LABELS)
