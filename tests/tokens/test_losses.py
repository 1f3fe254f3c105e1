"""The losses of an output layer where draws do not reach: memory, programs, meshes, errors."""

import functools
import math
import re

import collectives
import jax
import jax.export
import jax.numpy as jnp
import jax.test_util
import loss_draws
import numpy as np
import platforms
import pytest
import scipy.special
from compare import equal, near
from drawn import normal
from meshes import AUTO, EXPLICIT, mesh_of, put
from refused import each_raises

import transformer_embed as te
from transformer_embed._src.tokens import chunks, output_split, row_logits

# What is promised of values and gradients of magnitude 1; float32 sums of some 100 terms are within
# 100 * 2**-24 = 6e-6.
ERROR = 1e-5
VOCAB, WIDTH, SHAPE = 13, 4, (4, 6)
X, TABLE, BIAS = normal(0, *SHAPE, WIDTH), normal(1, VOCAB, WIDTH), normal(2, VOCAB)
TEACHER_X, TEACHER, TEACHER_BIAS = normal(3, *SHAPE, 3), normal(4, VOCAB, 3), normal(5, VOCAB)
WEIGHTS = np.random.default_rng(6).random(SHAPE).astype(np.float32) + np.float32(0.1)
MASK = np.random.default_rng(7).random(SHAPE) < 0.7
SEGMENTS = np.int32([[1, 1, 2, 2, 2, 0], [3] * 6, [1, 1, 0, 0, 0, 0], [0, 0, 5, 6, 6, 6]])
BANS = np.where(np.arange(VOCAB) % 3 == 1, np.float32(-np.inf), BIAS)


def ids_of(x, *more):
    """An id of a vocabulary of 13 or more for each token, or several."""
    shape = *x.shape[:-1], *more
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape) * 5 % VOCAB


LABELS, CANDIDATES = ids_of(X), ids_of(X, 3)


def divergence_of(x, output, **options):
    """From a teacher with some of the channels."""
    teacher = jax.lax.stop_gradient((x[..., :2], output.table[:, 1:3]))
    return te.linear_divergence(x, output, *teacher, **options)


# Of tokens, functions of x and an output layer.
EVERY = {
    "cross entropy": lambda x, output: te.linear_cross_entropy(
        x, output, ids_of(x), reduction="none", label_smoothing=0.1, z_loss=1e-2
    ),
    "log probs": lambda x, output: te.linear_log_probs(x, output, ids_of(x), with_entropy=True),
    "candidates": lambda x, output: te.linear_log_probs(x, output, ids_of(x, 3)),
    "top k": lambda x, output: te.linear_top_k(x, output, 3),
    "divergence": functools.partial(divergence_of, reduction="none"),
}
every = pytest.mark.parametrize("function", EVERY.values(), ids=EVERY)


def total(function, x, table, bias=None):
    """The sum of its first array."""
    return jax.tree.leaves(function(x, te.OutputLayer(table, bias)))[0].sum()


def with_gradients(function):
    """Returns what it finds, and the gradients of the sum of its first array."""

    def step(*arrays):
        def total(x, *rows):
            found = function(x, te.OutputLayer(*rows))
            return jax.tree.leaves(found)[0].sum(), found

        (_, found), gradients = jax.value_and_grad(total, tuple(range(len(arrays))), has_aux=True)(
            *arrays
        )
        return found, gradients

    return step


def value(x=X, table=TABLE, bias=BIAS, labels=LABELS, loss=te.linear_cross_entropy, **options):
    fields = {
        name: options.pop(name)
        for name in ("softcap", "scale", "pad_id", "vocab_axis")
        if name in options
    }
    return loss(x, te.OutputLayer(table, bias, **fields), labels, **options)


log_probs = functools.partial(value, loss=te.linear_log_probs)


ARRAYS = X, TABLE, BIAS, WEIGHTS


@functools.partial(jax.jit, static_argnames=["softcap", "scale", "pad_id", "chunk_size"])
def step(x, table, bias, weights, labels=LABELS, **options):
    """The loss, and the gradients of x, the table, the bias and the weights."""
    loss = lambda x, table, bias, weights: value(x, table, bias, labels, weights=weights, **options)
    of_loss, gradients = jax.value_and_grad(loss, (0, 1, 2, 3))(x, table, bias, weights)
    return of_loss, *gradients


def loss_of_whole_logits(
    x, table, bias, weights, softcap=None, scale=1.0, pad_id=None, label_smoothing=0.0, z_loss=0.0
):  # fmt: skip
    is_possible = np.arange(VOCAB) != pad_id
    logits = scale * (x @ table.T + bias)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    log_z = jax.nn.logsumexp(logits, -1, where=is_possible, keepdims=True)
    log_p = jnp.where(is_possible, logits - log_z, 0)
    targets = label_smoothing * is_possible / is_possible.sum()
    targets = targets + (1 - label_smoothing) * (LABELS[..., None] == np.arange(VOCAB))
    losses = z_loss * log_z[..., 0] ** 2 - (targets * log_p).sum(-1)
    weights = jnp.where(pad_id == LABELS, 0, weights)
    return (weights * losses).sum() / weights.sum()


def exact_step(*arrays, **options):
    """What `step` returns, by autodiff."""
    loss = functools.partial(loss_of_whole_logits, **options)
    of_loss, gradients = jax.value_and_grad(loss, (0, 1, 2, 3))(*arrays)
    return of_loss, *gradients


# --- values and derivatives

KINDS = [{"kind": "forward"}, {"kind": "reverse"}, {"kind": "js", "beta": 0.1}]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


CAPPED = {"softcap": 1.5, "pad_id": 2}
PACKED = {"shift": True, "segment_ids": SEGMENTS, "mask": MASK, "chunk_size": 7}
STUDENT = {"x": X, "table": TABLE, "bias": BIAS}
# A function of arrays by their names.
WEIGHED = functools.partial(value, scale=3.0, label_smoothing=0.1, z_loss=0.1, **CAPPED, **PACKED)


def test_a_published_loss():
    """Stanford CS231n, linear classification notes, softmax classifier: scores -2.85, 0.86, 0.28
    with label 2 cost 1.04. https://cs231n.github.io/linear-classify/"""
    got = te.linear_cross_entropy([-2.85, 0.86, 0.28], np.eye(3, dtype=np.float32), 2)
    near(got, 1.04, rtol=2e-3)


SIZES = [{"scale": 1e6, "label_smoothing": 0.1, "z_loss": 1e-4}]
SIZES += [{"scale": 3e15, "softcap": 3e15, "z_loss": 1e-4}]


@pytest.mark.slow
@pytest.mark.parametrize("options", SIZES)
def test_a_factor_of_any_size_gives_the_losses_and_gradients_of_float64(options):
    """A product that is rounded once in one place and twice in another differs by more than 1."""
    with jax.enable_x64():
        exact = jax.jit(functools.partial(exact_step, **options))(*map(np.float64, ARRAYS))
    for found, want in zip(step(*ARRAYS, **options), exact, strict=True):
        near(found, want, atol=ERROR * np.abs(want).max())


@pytest.mark.slow
def test_a_z_loss_whose_slope_is_zero_has_its_gradient():
    # One id, whose logit is log_z = -1 / (2 z_loss): the two terms of the slope cancel.
    x, table = np.float32([[-1]]), np.float32([[1], [1e4]])
    loss = lambda x: te.linear_cross_entropy(x, table, [0], z_loss=0.5)
    near(jax.jit(jax.grad(loss))(x), [[-1]], rtol=1e-5)


@pytest.mark.slow
@every_kind
def test_second_derivatives_of_divergence_hold_at_equality_and_where_both_are_tiny(kind):
    """1e-26: the square of such a probability underflows to 0 in float32."""
    same = [0.5, -1.0, 0.2, 0.9]
    # Of the student, then of the teacher.
    logits = np.float32([[[2, 0, -60, -63], same], [[1, 0, -61, -60], same]])
    table, direction = np.eye(4), normal(10, *logits.shape)

    @jax.jit
    def second_derivatives(logits):
        def slope(logits):
            def total(logits):
                student, teacher = logits
                of_dtype = table.astype(logits.dtype)
                given = student, of_dtype, teacher, of_dtype
                values = te.linear_divergence(*given, reduction="none", **kind)
                return values.sum(), values

            gradient, values = jax.grad(total, has_aux=True)(logits)
            return jnp.vdot(gradient, direction), values

        return jax.grad(slope, has_aux=True)(logits)

    def exact_slope(logits):
        student, teacher = logits + loss_draws.STEP * 1j * direction
        given = {"x": student, "table": table, "teacher_x": teacher, "teacher_table": table}
        options = {"tokens": (2,), "beta": kind.get("beta")}
        (values,) = loss_draws.oracle(kind["kind"], given, {}, **options)
        return values.sum().imag / loss_draws.STEP

    want = np.zeros(logits.shape)
    for at in np.ndindex(logits.shape):
        step = np.zeros(logits.shape)
        step[at] = 1e-5
        want[at] = (exact_slope(logits + step) - exact_slope(logits - step)) / 2e-5
    with jax.enable_x64():
        in_float64, values = jax.device_get(second_derivatives(np.float64(logits)))
    near(in_float64, want, atol=1e-5)
    assert values[1] == 0
    p = np.exp(np.float64(logits[0, 1]))
    p /= p.sum()
    beta = kind.get("beta")
    size = beta * (1 - beta) if beta else 1
    of_student, of_teacher = np.float64(direction[:, 1])
    at_equality = size * (np.diag(p) - np.outer(p, p)) @ (of_student - of_teacher)
    near(in_float64[:, 1], [at_equality, -at_equality], atol=1e-12)
    if beta:
        # Only a mixture divides by a probability, whose square may underflow in float32.
        in_float32, values = jax.device_get(second_derivatives(logits))
        near(in_float32, want, atol=1e-5)
        assert values[1] == 0


@every_kind
def test_near_equality_it_is_accurate_and_never_negative(kind):
    """Differences of log_softmax are off by 2e-7 where the divergence is 5e-7."""
    table, x = normal(8, 1000, 16), normal(9, 64, 16)
    for noise in (0, 1e-5, 1e-3):
        near_x = x + np.float32(noise) * normal(10, 64, 16)
        found = te.linear_divergence(near_x, table, x, table, reduction="none", **kind)
        given = {"x": near_x, "table": table, "teacher_x": x, "teacher_table": table}
        given = {name: np.float64(array) for name, array in given.items()}
        options = {"tokens": (64,), "beta": kind.get("beta")}
        (want,) = loss_draws.oracle(kind["kind"], given, {}, **options)
        assert np.asarray(found).min() >= 0
        near(found, np.maximum(want.real, 0), atol=1e-9, rtol=2e-3)


@pytest.mark.slow
def test_a_divergence_takes_tables_whose_padding_rows_differ():
    """Two models with one vocabulary may have different `row_multiple`s."""
    vocab, x, teacher_x = 40, normal(10, 4, 3, 8), normal(12, 4, 3, 6)
    tables, biases = (normal(11, 64, 8), normal(13, 48, 6)), (normal(14, 64), normal(15, 48))

    def loss(x, tables, biases, vocab_size):
        student, teacher = (
            te.OutputLayer(*arrays, vocab_size=vocab_size)
            for arrays in zip(tables, biases, strict=True)
        )
        return te.linear_divergence(x, student, teacher_x, teacher, kind="js")

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), static_argnums=3)
    without_padding = jax.tree.map(lambda array: array[:vocab], (tables, biases))
    value, (of_x, *of_rows) = step(x, *without_padding, None)
    with jax.set_mesh(MESH):
        split_tables = tuple(put(MESH, table, "model") for table in tables)
        found, (found_of_x, *found_of_rows) = step(x, split_tables, biases, vocab)
    near((found, found_of_x), (value, of_x), rtol=ERROR, atol=ERROR)
    for got, want in zip(*map(jax.tree.leaves, (found_of_rows, of_rows)), strict=True):
        near(np.asarray(got)[:vocab], want, rtol=ERROR, atol=ERROR)
        equal(np.asarray(got)[vocab:], 0)


@pytest.mark.slow
def test_the_ratio_of_a_policy_to_itself_is_1_to_rounding():
    of_policy = lambda x: log_probs(x, chunk_size=5)
    reference = jax.jit(of_policy)(X)
    ratio = lambda x: jnp.exp(of_policy(x) - reference)

    def total(x):
        ratios = ratio(x)
        return ratios.sum(), ratios

    gradient, ratios = jax.jit(jax.grad(total, has_aux=True))(X)
    near(ratios, np.ones(SHAPE), rtol=2e-6)
    assert np.abs(gradient).max() > 0


@pytest.mark.parametrize("k", [1, VOCAB - 1])
def test_top_k_equals_whole_logits(k):
    """Also where bans leave fewer than k."""
    output = te.OutputLayer(TABLE, BANS, pad_id=4, softcap=2.0, scale=2.0)
    found, ids = te.linear_top_k(X, output, k, chunk_size=5)
    # Padding, the id 4, is one of those.
    is_banned = np.isneginf(BANS)
    logits = 2 * np.tanh(np.float64(X) @ TABLE.T + np.where(is_banned, 0, BANS))
    want = scipy.special.log_softmax(np.where(is_banned, -np.inf, logits), -1)
    near(found, -np.sort(-want, -1)[..., :k], rtol=1e-5)
    near(found, np.take_along_axis(want, ids, -1), rtol=1e-5)
    assert all(len({*row}) == k for row in ids.reshape(-1, k).tolist())


def test_of_equal_ids_the_lower_one_is_first_and_no_gradient_is_left():
    table = np.float32([[0], [1], [2], [1], [2], [2]])
    assert te.linear_top_k([1.0], table, 5)[1].tolist() == [2, 4, 5, 1, 3]
    accuracy = lambda label: te.linear_cross_entropy([1.0], table, label, with_metrics=True)[1][0]
    assert [accuracy(label) for label in (2, 4, 5)] == [1, 0, 0]
    of_x = jax.jit(jax.grad(lambda x: te.linear_top_k(x, table, 2)[0].sum()))(
        np.ones(1, np.float32)
    )
    equal(of_x, 0)


# --- tokens and ids that are not there


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cross entropy", "divergence"])
def test_without_tokens_nothing_is_found_and_nothing_moves(name):
    """Also where the function is mapped. A loop of no steps would fail without jit."""
    x, tables = np.zeros((5, 3, 0, WIDTH), np.float32), normal(1, 5, VOCAB, WIDTH)
    step = with_gradients(EVERY[name])
    found, (of_x, of_tables) = jax.jit(jax.vmap(step))(x, tables)
    for array in jax.tree.leaves(found):
        assert array.shape[:3] == x.shape[:3]
    assert of_x.shape == x.shape
    equal(of_tables, np.zeros_like(tables))
    with jax.disable_jit():
        of_one = jax.eval_shape(step, x[0], tables[0])
    assert jax.tree.map(np.shape, of_one) == jax.tree.map(
        lambda array: array.shape[1:], (found, (of_x, of_tables))
    )


def test_a_weight_of_0_has_the_derivatives_of_any_weight():
    """A program that learns the weights of examples starts from any of them."""

    def slope(weights):
        loss = lambda x: value(x, weights=weights, reduction="none").sum()
        return jnp.vdot(jax.grad(loss)(X), np.cos(X))

    of_weights = jax.jit(jax.grad(slope))
    near(of_weights(np.zeros(SHAPE)), of_weights(np.ones(SHAPE)), rtol=ERROR, atol=ERROR)


@pytest.mark.slow
def test_the_one_pass_of_a_gpu_has_second_derivatives_where_logits_are_equal():
    """A head that starts at zero has equal logits for every id."""
    logits = np.float64([[0] * 5, [1, 2, 2, 2, 0], [3, 1, 3, 3, 3]])
    direction = np.cos(np.arange(logits.size)).reshape(logits.shape)

    def log_sum(logits):
        top, total = row_logits.in_one_pass(1.0, logits)
        return jnp.sum(jnp.log(total) + top)

    with jax.enable_x64():
        found = jax.jit(functools.partial(jax.jvp, jax.grad(log_sum)))((logits,), (direction,))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    near(found, (p, p * (direction - (p * direction).sum(-1, keepdims=True))), atol=1e-12)


def test_a_counted_label_outside_the_vocabulary_makes_all_nan():
    labels = LABELS.copy()
    for labels[1, 2] in (VOCAB, -1, -(2**31)):
        _, of_x, of_table, *_ = step(X, TABLE, BIAS, WEIGHTS, labels)
        assert np.isnan(of_table).all()
        assert np.isnan(np.asarray(of_x)[1, 2]).all()


def test_candidates_outside_the_vocabulary_are_nan_and_leave_entropies():
    ids = CANDIDATES.copy()
    ids[1, 1, 2] = VOCAB
    found, entropies = te.linear_log_probs(X, TABLE, ids, with_entropy=True)
    assert np.argwhere(np.isnan(found)).tolist() == [[1, 1, 2]]
    near(entropies, te.linear_log_probs(X, TABLE, CANDIDATES, with_entropy=True)[1], rtol=ERROR)
    of_none = jax.eval_shape(lambda: te.linear_log_probs(X, TABLE, ids[..., :0]))
    assert of_none.shape == (*SHAPE, 0)
    assert not np.signbit(log_probs(mask=MASK & False)).any()


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "axes"), [("cpu", "model"), ("cuda", None)])
def test_if_all_ids_are_banned_losses_are_infinite_and_gradients_finite(platform, axes):
    """Also the arithmetic of a GPU, which finds the largest logit in another way."""
    bias = np.full(64, -np.inf, np.float32)

    def total(x, table, bias):
        output = te.OutputLayer(table, bias, softcap=2.125)
        log_probs, entropies = te.linear_log_probs(x, output, ids_of(x), with_entropy=True)
        loss = te.linear_cross_entropy(x, te.OutputLayer(table, bias), ids_of(x))
        return loss + log_probs.sum() + entropies.sum(), (loss, log_probs, entropies)

    step = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))
    with jax.set_mesh(MESH), platforms.as_on(platform):
        found, values = step(put(MESH, MESH_X), put(MESH, MESH_TABLE, axes), put(MESH, bias))
    equal(values, (np.inf, np.full((8, 8), -np.inf), np.zeros((8, 8))))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(found)))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.2e-38, 1e-30, 1e30, 1e36])
def test_padding_is_never_predicted_at_extreme_temperatures(temperature):
    output = te.OutputLayer(TABLE, BIAS, pad_id=4)
    rest = np.delete(np.arange(VOCAB), 4)
    ids_of_all = np.broadcast_to(np.arange(VOCAB), (*SHAPE, VOCAB))
    ids_of_rest = ids_of_all[..., : len(rest)]
    for number in (temperature, np.float32(temperature)):
        of_all = np.asarray(te.linear_log_probs(X, output, ids_of_all, temperature=number))
        of_rest = te.linear_log_probs(
            X, te.OutputLayer(TABLE[rest], BIAS[rest]), ids_of_rest, temperature=number
        )
        equal(np.exp(of_all[..., 4]), 0)
        near(np.exp(of_all[..., rest]).sum(-1), np.ones(SHAPE), rtol=ERROR)
        near(of_all[..., rest], of_rest, rtol=ERROR)


@pytest.mark.slow
def test_a_vocabulary_of_one_id_costs_nothing():
    one_id = X, TABLE[:1], BIAS[:1], WEIGHTS, np.zeros(SHAPE, int)
    for got in step(*one_id, label_smoothing=0.3)[:4]:
        equal(got, 0)


def test_a_setting_out_of_range_is_nan_at_its_token():
    label_smoothing, z_loss, temperature = np.zeros((3, *SHAPE), np.float32)
    label_smoothing[0, :2], z_loss[0, 2] = (1.0, -0.1), -1.0
    found = value(label_smoothing=label_smoothing, z_loss=z_loss, reduction="none")
    assert np.argwhere(np.isnan(found)).tolist() == [[0, 0], [0, 1], [0, 2]]
    temperature[:] = 1
    temperature[2, :5] = 0.0, -1.0, 2e36, np.inf, np.nan
    found = log_probs(temperature=temperature)
    assert np.argwhere(np.isnan(found)).tolist() == [[2, column] for column in range(5)]


def test_a_setting_of_any_size_does_no_harm_where_nothing_counts():
    """At a token whose label is not counted, and at one whose weight is 0."""
    mask, weights = np.ones(SHAPE, bool), WEIGHTS.copy()
    mask[0, 1], weights[2, 3] = False, 0
    inside, outside = np.full((2, 2, *SHAPE), 0.5, np.float32)
    outside[:, 0, 1], outside[:, 2, 3] = (1.5, np.inf), (1.5, -1)

    def loss(x, table, settings):
        options = {"mask": mask, "weights": weights, "reduction": "none"}
        options |= {"label_smoothing": settings[0], "z_loss": settings[1]}
        return te.linear_cross_entropy(x, table, LABELS, **options).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    equal(step(X, TABLE, outside), step(X, TABLE, inside))


def test_label_smoothing_is_spread_over_the_ids_that_are_not_banned():
    is_allowed = np.isfinite(BANS)
    labels = np.flatnonzero(is_allowed)[LABELS % is_allowed.sum()]
    options = {"label_smoothing": 0.3, "reduction": "none"}
    found = te.linear_cross_entropy(X, te.OutputLayer(TABLE, BANS), labels, **options)
    log_probs = scipy.special.log_softmax(np.float64(X) @ TABLE.T + BANS, -1)
    of_label = np.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
    near(found, -0.7 * of_label - 0.3 * log_probs[..., is_allowed].mean(-1), rtol=ERROR)


def test_a_logit_far_below_the_largest_is_not_a_ban():
    log_probs, ids = te.linear_top_k([1.0], np.float32([[0], [-2e30]]), 2)
    near(log_probs, [0, -2e30], rtol=ERROR)
    assert ids.tolist() == [0, 1]


def test_an_entropy_counts_if_any_candidate_does():
    labels = np.stack([LABELS, LABELS, LABELS], -1)
    mask = np.array([False, True, False])
    options = {"with_entropy": True, "mask": np.broadcast_to(mask, labels.shape)}
    found, entropies = te.linear_log_probs(X, TABLE, labels, **options)
    near(entropies, te.linear_log_probs(X, TABLE, CANDIDATES, with_entropy=True)[1], rtol=ERROR)
    assert np.isfinite(np.asarray(found)).all((0, 1)).tolist() == mask.tolist()


@pytest.mark.slow
def test_an_infinite_divergence_has_finite_gradients():
    """The teacher predicts ids that the student bans."""

    def loss(x, teacher_x):
        student = te.OutputLayer(TABLE, BANS)
        return te.linear_divergence(x, student, teacher_x, TEACHER, reduction="none").sum()

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(X, TEACHER_X)
    assert float(value) == np.inf
    assert all(np.isfinite(np.asarray(gradient)).all() for gradient in gradients)


# --- a table [d, vocab_size]


def self_divergence(x, output):
    """From the predictions of the same layer for other hidden states."""
    return te.linear_divergence(x, output, jnp.cos(x), output, reduction="none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "of_x", "of_table"),
    [
        # More ids than a device has columns.
        (lambda x, output: te.linear_top_k(x, output, 9), ["data"], [None, "model"]),
        (self_divergence, ["data", None, "model"], ["model", "data"]),
    ],
)
def test_a_transposed_table_gives_the_values_and_gradients_of_the_table(function, of_x, of_table):
    """`w` of an hk.Linear, of which the last columns are padding. Draws have the other losses."""
    x, table, bias = normal(1, 4, 8, 8), normal(2, 16, 8), normal(3, 16)
    options = {"vocab_size": VOCAB, "pad_id": 4, "softcap": 2.0, "scale": 0.7}

    def derivatives(vocab_axis, *arrays):
        def total(x, table, bias):
            output = te.OutputLayer(table, bias, vocab_axis=vocab_axis, **options)
            values = jax.tree.leaves(function(x, output))
            return sum(jnp.sin(value).sum() for value in values), values

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*arrays)

    want = derivatives(0, x, table, bias)
    mesh = mesh_of((2, 2), ("data", "model"), EXPLICIT)
    with jax.set_mesh(mesh):
        w = put(mesh, table.T, *of_table)
        found = derivatives(1, put(mesh, x, *of_x), w, put(mesh, bias))
    assert found[0][1].sharding.is_equivalent_to(w.sharding, w.ndim)
    (of_x, of_w, of_bias), values = jax.device_get(found)
    near(((of_x, of_w.T, of_bias), values), jax.device_get(want), rtol=ERROR, atol=ERROR)


@pytest.mark.slow
def test_a_transposed_table_costs_no_memory():
    """Four lines with `w.T` cost a table of temporaries more."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 64), (32_000, 64))]
    loss = lambda axis: (
        lambda x, table: te.linear_cross_entropy(
            x, te.OutputLayer(table, vocab_axis=axis), np.zeros(512, int)
        )
    )
    by_rows = temporaries(jax.grad(loss(0), (0, 1)), *shapes)
    shapes[1] = jax.ShapeDtypeStruct((64, 32_000), jnp.float32)
    by_columns = temporaries(jax.grad(loss(1), (0, 1)), *shapes)
    assert by_columns < by_rows + 4 * 64 * 32_000 / 8


# --- narrow dtypes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cross entropy", "float16"),
        ("divergence", "bfloat16"),
        ("candidates", "float16"),
        ("top k", "bfloat16"),
    ],
)
def test_16_bits_are_summed_in_float32(name, dtype):
    """And gradients are rounded once; in bfloat16 those of the logits are, too."""
    step = jax.jit(with_gradients(EVERY[name]))
    arrays = [array.astype(dtype) for array in (normal(0, 64, WIDTH), TABLE, BIAS)]
    found, gradients = step(*arrays)
    wide, of_wide = step(*map(np.float32, arrays))
    assert [each.dtype for each in gradients] == [dtype] * 3
    for got, want in zip(*map(jax.tree.leaves, (found, wide)), strict=True):
        assert got.dtype == want.dtype
        near(got, want, rtol=ERROR, atol=ERROR)
    for got, want in zip(gradients, of_wide, strict=True):
        of_logits = 0 if dtype == "float16" else 2**-8 * np.abs(want).max()
        near(np.float32(got), want, rtol=2**-8, atol=ERROR + of_logits)


@pytest.mark.slow
def test_a_scale_on_the_loss_reaches_float16_gradients_before_they_are_rounded():
    tokens, scale = 2**14, 2.0**15
    x, table = np.full((tokens, 1), 2.0**-8, np.float16), np.array([[1.0], [-1.0]], np.float16)
    loss = lambda x: scale * te.linear_cross_entropy(x, table, np.zeros(tokens, int))
    # About -1 / tokens each: below float16's normal numbers, above them when scaled.
    want = -2 * scale / (1 + np.exp(2.0**-7)) / tokens
    near(np.float32(jax.jit(jax.grad(loss))(x)), want, rtol=2.0**-11 + ERROR)


@pytest.mark.slow
def test_gradients_of_narrow_weights_are_rounded_once():
    """Weights of one number a column are summed over many rows."""
    x, table = normal(0, 2048, 2, 8), normal(1, 16, 8)
    labels = np.arange(4096).reshape(-1, 2) % 16

    @jax.jit
    def of_weights(x, table, labels, weights):
        loss = functools.partial(te.linear_cross_entropy, x, table, labels)
        of_sum = jax.grad(lambda weights: loss(weights=weights, reduction="sum"))
        return of_sum(weights), loss(reduction="none")

    got, losses = of_weights(x, table, labels, np.ones(2, jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    near(np.float32(got), np.asarray(losses).sum(0), rtol=2**-8)


@pytest.mark.parametrize("name", ["candidates", "divergence"])
def test_gradients_of_bfloat16_are_products_of_bfloat16(name):
    """In float32 they took three times as long on a GPU, with a wide copy of the table a chunk."""
    step = jax.jit(jax.grad(functools.partial(total, EVERY[name]), (0, 1)))
    text = step.lower(X.astype(jnp.bfloat16), TABLE.astype(jnp.bfloat16)).as_text()
    products = re.findall(r"dot_general.* : \(tensor<(.*)>, tensor<(.*)>\)", text)
    assert products
    assert {dtype.split("x")[-1] for operands in products for dtype in operands} == {"bf16"}


def test_logits_of_16_bits_are_summed_in_float32():
    # 2048 + 511 * 0.5 is exact in float32 and no number of 8 or 11 bits: they step by 16 and by 2
    # there.
    table = np.full((1, 512), 0.5).astype(np.float32)
    table[0, 0] = 2048
    for dtype in (jnp.bfloat16, jnp.float16):
        logits = jax.jit(te.linear_logits)
        arrays = np.ones((1, 512), dtype), table.astype(dtype)
        assert "convert" not in logits.lower(*arrays).as_text()
        assert logits(*arrays).dtype == jnp.float32
        assert logits(*arrays).tolist() == [[2048 + 511 * 0.5]]


# --- programs and their memory


@pytest.mark.slow
def test_the_arithmetic_of_a_gpu_is_right_too():
    """Each branch of a TPU is that of a GPU or of a CPU."""

    def derivatives(step, *arrays):
        """The loss with its gradients, and a product with the Hessian of x."""

        def slope(x):
            found = step(x, *arrays[1:], pad_id=1, softcap=2.5)
            return jnp.vdot(found[1], X), found

        return jax.jit(jax.grad(slope, has_aux=True))(arrays[0])

    with jax.enable_x64():
        exact = jax.device_get(derivatives(exact_step, *map(np.float64, ARRAYS)))
    with platforms.as_on("cuda") as taken:
        near(derivatives(step, *ARRAYS), exact, rtol=ERROR, atol=ERROR)
    assert len(taken) >= 2


def test_a_gpu_finds_the_largest_logit_and_the_sum_of_exponentials_in_one_pass():
    # It runs on a GPU alone; its arithmetic is tried here.
    logits = 40 * normal(1, 6, 300)
    logits[0], logits[1, 5:] = 3.0, -np.inf
    logits[2, :7], logits[3, 9], logits[4] = -np.inf, 1e30, -1e30
    wide = logits.astype(np.float64)
    for factor in (1.0, 0.3, 20.0):
        top, total = jax.jit(functools.partial(row_logits.in_one_pass, factor))(logits)
        np.testing.assert_array_equal(top[:, 0], wide.max(1))
        wanted = np.exp(factor * (wide - wide.max(1, keepdims=True))).sum(1)
        np.testing.assert_allclose(total[:, 0], wanted, rtol=1e-5)


def products(function, *arrays):
    """Number of products in the program, those in loops once each."""
    return jax.jit(function).lower(*arrays).as_text().count("dot_general")


@pytest.mark.slow
def test_only_requested_results_are_computed():
    loss = lambda x, table: te.linear_cross_entropy(x, table, LABELS)
    functions = loss, jax.grad(loss), jax.grad(loss, 1), jax.grad(loss, (0, 1))
    assert [products(each, X, TABLE) for each in functions] == [1, 2, 2, 3]
    # The fourth one, with eight columns, sums the bias's gradient.
    assert products(jax.grad(lambda arrays: WEIGHED(**arrays)), STUDENT) == 4
    arrays = X, TABLE, TEACHER_X, TEACHER
    functions = [jax.grad(te.linear_divergence, which) for which in ((0, 1), (0, 1, 2, 3))]
    functions.insert(0, te.linear_divergence)
    assert [products(each, *arrays) for each in functions] == [2, 4, 6]


def temporaries(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@every
def test_temporaries_are_an_eighth_of_whole_logits_or_less(function):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 512, 8), (2**15, 8))]
    assert 8 * temporaries(with_gradients(function), *shapes) <= 4 * 16 * 512 * 2**15


@pytest.mark.slow
def test_products_with_the_hessian_keep_the_memory_of_chunks():
    x, table, labels = normal(8, 2048, 2), normal(9, 256, 2), np.zeros(2048, int)
    gradient = jax.grad(lambda table: te.linear_cross_entropy(x, table, labels, chunk_size=32))
    product = lambda table: jax.jvp(gradient, (table,), (table,))
    assert 8 * temporaries(product, table) < 2048 * 256 * 4


SPLIT = output_split.OutputSplit(
    vocab_size=1, softcap=None, scale=1.0, pad_id=None, vocab_axis=0, mesh=None, row_axes=(),
    column_axes=(), token_axes=(),
)  # fmt: skip


def test_a_chunk_has_all_tokens_whose_logits_fit_or_a_sixth_or_enough_for_the_tables_gradient():
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    for tokens, words, width, chunk_size, count in (
        (65_536, 1024, 768, None, 1), (65_537, 1024, 768, None, 7), (131_072, 1000, 768, None, 16), (4096, 32_000, 256, None, 12),
        (16_384, 32_000, 1024, None, 8), (16_384, 8000, 2048, None, 8), (4096, 50_304, 768, None, 6),
        (8192, 151_936, 2048, None, 4), (9, 1000, 4, 2, 5), (0, 5, 4, None, 0),
    ):  # fmt: skip
        layer = output_split.LayerArrays(of(tokens, width), None, None, of(words, width), SPLIT)
        assert chunks.number_of_chunks(chunk_size, (layer,)) == count


@pytest.mark.slow
def test_a_symbolic_vocabulary_gives_the_loss_of_each():
    loss = jax.jit(lambda table: te.linear_cross_entropy(X, table, LABELS, label_smoothing=0.1))
    (rows,) = jax.export.symbolic_shape("v")
    exported = jax.export.export(loss)(jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32))
    for vocab in (VOCAB, VOCAB + 3):
        table = normal(7, vocab, WIDTH)
        given, others = {"x": X, "table": table}, {"labels": LABELS}
        options = {"tokens": SHAPE, "reduction": "mean", "label_smoothing": 0.1}
        want, *_ = loss_draws.oracle("cross_entropy", given, others, **options)
        near(exported.call(table), want.real, rtol=ERROR)


def test_metrics_leave_an_exported_function():
    loss = lambda x: te.linear_cross_entropy(x, TABLE, LABELS, mask=MASK & False, with_metrics=True)
    exported = jax.export.export(jax.jit(loss))(jax.ShapeDtypeStruct(X.shape, X.dtype))
    found, metrics = jax.export.deserialize(exported.serialize()).call(X)
    # Of no labels, as of perfect training, but for the weight.
    assert (float(found), float(metrics.weight)) == (0, 0)


# --- meshes

MESH = mesh_of((2, 4), ("data", "model"), EXPLICIT)
MESH_X, MESH_TABLE = normal(10, 8, 8, 8), normal(11, 64, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [(AUTO, "cross entropy"), *[(EXPLICIT, name) for name in EVERY]]
)
def test_shards_send_no_table_and_no_logits(kind, name):
    """Never 64 rows of 8, or a token's 64 logits: gradients of x of half of the tokens, gradients
    of a quarter of the rows, k numbers of a token from each shard."""
    mesh = mesh_of((2, 4), ("data", "model"), kind)
    with jax.set_mesh(mesh):
        arrays = put(mesh, MESH_X, "data"), put(mesh, MESH_TABLE, "model")
        step = jax.jit(jax.value_and_grad(functools.partial(total, EVERY[name]), (0, 1)))
        sent = collectives.collectives(step.lower(*arrays).compile())
    assert 0 < max(each.largest for each in sent) < 64 * 8


def test_candidates_in_rows_of_any_device_have_their_log_probs():
    with jax.set_mesh(MESH):
        arrays = put(MESH, MESH_X, "data"), put(MESH, MESH_TABLE, "model")
        found = jax.jit(EVERY["candidates"])(*arrays)
    log_probs = scipy.special.log_softmax(np.float64(MESH_X) @ MESH_TABLE.T, -1)
    near(found, np.take_along_axis(log_probs, ids_of(MESH_X, 3), -1), rtol=ERROR, atol=ERROR)


def test_the_gradient_of_split_columns_returns_to_them():
    """While it is traced: the values are compared on meshes drawn above."""
    with jax.set_mesh(MESH):
        table = put(MESH, MESH_TABLE, None, "model")
        gradient = jax.eval_shape(
            jax.grad(te.linear_cross_entropy, 1), MESH_X, table, ids_of(MESH_X)
        )
    assert gradient.shape == table.shape
    assert gradient.sharding.spec == table.sharding.spec


def test_tables_that_do_not_fit_their_mesh_are_refused():
    mesh = mesh_of((4, 2), ("a", "b"), EXPLICIT)
    with jax.set_mesh(mesh):
        ones = np.ones((16, 4), np.float32)
        whole, split = put(mesh, ones), put(mesh, ones, "a")
        names = globals() | {
            "whole": whole,
            "split": split,
            "odd": put(mesh, MESH_TABLE[:13], None, "a"),
        }
        want = "ValueError: teacher_output: wanted a table split over the same mesh axes as the table of output, "
        each_raises(
            {
                "te.linear_divergence(X, split, X, whole)": want + "('a',), got ()",
                "te.linear_divergence(X, whole, X, split)": want + "(), got ('a',)",
                "te.linear_cross_entropy(MESH_X, odd, ids_of(MESH_X))": "ValueError: table: ... (see row_multiple), got",
            },
            names,
        )


# --- errors

between = functools.partial(te.linear_divergence, X, TABLE)
(SYMBOLIC,) = jax.export.symbolic_shape("b")
OF_ANY = jax.ShapeDtypeStruct((SYMBOLIC, 4), "float32"), jax.ShapeDtypeStruct((SYMBOLIC,), "int32")
REFUSED = {
    "value(x=np.ones((4, 6, 4), int))": "TypeError: x: ... got int64",
    "value(table=TABLE.astype(int))": "TypeError: table: ... got int64",
    "value(labels=np.ones(SHAPE))": "TypeError: labels: ...labels.argmax(-1)... got float64",
    "log_probs(labels=np.eye(VOCAB)[LABELS])": "TypeError: labels: ...labels.argmax(-1)... got float64",
    "value(labels=np.eye(VOCAB, dtype=int)[LABELS])": "ValueError: labels: ... (4, 6)...labels.argmax(-1)... got (4, 6, 13)",
    "value(labels=LABELS[:2])": "ValueError: labels: ... (4, 6), got (2, 6)",
    "value(labels=None)": "TypeError: labels: ... got None",
    "value(mask=np.ones(SHAPE))": "TypeError: mask: ...weights=), got float64",
    "log_probs(mask=MASK.astype(int))": "TypeError: mask: ...mask != 0... got int64",
    "value(pad_id=0.0)": "TypeError: pad_id: ... got float 0.0",
    "value(bias=np.ones(13, int))": "TypeError: bias: ... got int64",
    "value(weights=MASK)": "TypeError: weights: ... got bool",
    "value(shift=1.0)": "TypeError: shift: ... got float 1.0",
    "value(shift=True, segment_ids=WEIGHTS)": "TypeError: segment_ids: ... got float32",
    "value(x=X[..., :2])": "ValueError: x: ... (4,), got (2,)",
    "value(table=TABLE[0])": "ValueError: table: ... got shape [4]",
    "value(x=X[0, 0], labels=1, shift=True)": "ValueError: labels: ... got shape []",
    "value(mask=MASK[:2])": "ValueError: mask: ... [4, 6], got shape [2, 6]",
    "value(weights=WEIGHTS[:, :2])": "ValueError: weights: ... [4, 6], got shape [4, 2]",
    "value(shift=True, segment_ids=SEGMENTS[:, :4])": "ValueError: segment_ids: ... its last axis, got shape [4, 4]",
    "value(segment_ids=SEGMENTS)": "ValueError: segment_ids: wanted None, since shift is 0 (TokenPositions takes them for positions and masks), got an array int32[4, 6]",
    "te.linear_logits(X, te.Embedder(te.EmbedderConfig(VOCAB, WIDTH)))": "TypeError: output: wanted the result of its method `output()`, got Embedder",
    "value(bias=BIAS[:-1])": "ValueError: bias: ... (13,), got (12,)",
    "value(shift=6)": "ValueError: shift: ... below the length of labels, 6, got 6",
    "value(x=X[:, :1], labels=LABELS[:, :1], shift=True)": "ValueError: shift: ... below the length of labels, 1, got 1",
    "log_probs(labels=CANDIDATES, shift=7)": "ValueError: shift: ... below the length of labels, 6, got 7",
    "between(TEACHER_X, TEACHER, shift=9)": "ValueError: shift: ... below the length of x, 6, got 9",
    "value(shift=-1)": "ValueError: shift: ... 0, got -1",
    "value(label_smoothing=1.0)": "ValueError: label_smoothing: ... [0, 1), got 1.0",
    "value(reduction='all')": "ValueError: reduction: ... got 'all'",
    "value(chunk_size=0)": "ValueError: chunk_size: ... 1, got 0",
    "value(softcap=0)": "ValueError: softcap: ... got 0",
    "value(scale=0.0)": "ValueError: scale: ... got 0.0",
    "value(z_loss=-1e-4)": "ValueError: z_loss: ... 0, got -0.0001",
    "jax.eval_shape(lambda x, labels: value(x, labels=labels), *OF_ANY)": "ValueError: labels: wanted shape of known sizes, ... got shape [b",
    "te.linear_logits(X, TABLE[:, :2])": "ValueError: x: ... (2,), got (4,)",
    "te.linear_logits(X, TABLE.T)": "ValueError: x: ... vocab_axis=1), (13,), got (4,)",
    "te.linear_logits(X, te.OutputLayer(TABLE, vocab_axis=1))": "ValueError: x: ... [d, vocab_size], (13,), got (4,)",
    "value(table=TABLE.T, vocab_axis=1, bias=BIAS[:4])": "ValueError: bias: ... (13,), got (4,)",
    "value(table=TABLE.T, vocab_axis=2)": "ValueError: vocab_axis: ... at most 1, got 2",
    "te.OutputLayer(TABLE, vocab_axis=True)": "TypeError: vocab_axis: ... got bool True",
    "te.OutputLayer(TABLE.T, vocab_size=14, vocab_axis=1)": "ValueError: vocab_size: ... at most 13, got 14",
    "te.linear_logits(LABELS, TABLE)": "TypeError: x: ... got int32",
    "log_probs(temperature=0.0)": "ValueError: temperature: wanted a number above 0, 1.18e-38 to 1e+36, got 0.0",
    "log_probs(temperature=2e36)": "ValueError: temperature: ... 1e+36, got 2e+36",
    "between(TEACHER_X, TEACHER, temperature=1e37)": "ValueError: temperature: ... 1e+36, got 1e+37",
    "log_probs(temperature=WEIGHTS[:, :5])": "ValueError: temperature: wanted shape that broadcasts to that of the tokens",
    "log_probs(with_entropy=1)": "TypeError: with_entropy: wanted a Python bool",
    "te.linear_top_k(X, TABLE, 0)": "ValueError: k: wanted ... at least 1, got 0",
    "te.linear_top_k(X, te.OutputLayer(TABLE, pad_id=3), 13)": "ValueError: k: wanted ... at most 12, got 13",
    "te.linear_top_k(X, TABLE, 2.0)": "TypeError: k: wanted ... Python int",
    "between(TEACHER_X, TEACHER, kind='symmetric')": "ValueError: kind: ... got 'symmetric'",
    "between(TEACHER_X, TEACHER, beta=0.5)": "ValueError: beta: ... got float 0.5",
    "between(TEACHER_X, TEACHER, kind='js', beta=1.0)": "ValueError: beta: ... 1, got 1.0",
    "between(TEACHER_X, TEACHER[:9])": "ValueError: teacher_output: ... 13 ... got 9",
    "between(TEACHER_X, te.OutputLayer(TEACHER, vocab_size=9))": "ValueError: teacher_output: wanted output's vocab_size, 13 ... got 9",
    "between(TEACHER_X[..., :2], TEACHER)": "ValueError: teacher_x: ... got (2,)",
    "between(TEACHER_X[0], TEACHER)": "ValueError: teacher_x: ... (4, 6), got (6,)",
    "between(TEACHER_X, te.OutputLayer(TEACHER, pad_id=0))": "ValueError: teacher_output: ... None, got 0",
}


def test_bad_arguments_are_refused():
    each_raises(REFUSED, globals())
