"""The tied cross-entropy against float64 arithmetic, against optax over whole logits, and on meshes
of eight devices."""

import functools
import importlib

import collectives
import hypothesis
import hypothesis.strategies as st
import jax
import jax.export
import jax.numpy as jnp
import jax.test_util
import numpy as np
import optax
import pytest
from contexts import set_mesh, x64
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import transformer_embed as te
from transformer_embed._src.functional import cross_entropy as implementation
from transformer_embed._src.functional.lookup import Table

SPEC = PartitionSpec
# What is promised of values and gradients of magnitude 1; float32 sums of some 100 terms are within
# 100 * 2**-24 = 6e-6.
ERROR = 1e-5
VOCAB, WIDTH = 7, 3


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


TABLE = normal(0, VOCAB, WIDTH)
X = normal(1, 4, 5, WIDTH)
LABELS = np.random.default_rng(2).integers(0, VOCAB, (4, 5))
MASK = np.random.default_rng(3).random((4, 5)) < 0.7


def oracle(
    x,
    table,
    labels,
    *,
    bias=None,
    softcap=None,
    scale=1.0,
    pad_id=None,
    mask=True,
    weights=1.0,
    shift=False,
    segment_ids=None,
    label_smoothing=0.0,
    z_loss=0.0,
    reduction="mean",
    chunk_size=None,
):
    """Loss and the gradients of x, the table, the bias and the weights, one token at a time in
    float64."""
    del chunk_size
    table, labels = np.array(table, np.float64), np.asarray(labels)
    x, vocab, shape = np.asarray(x, np.float64), len(table), labels.shape
    bias = np.zeros(vocab) if bias is None else np.array(bias, np.float64)
    predicted = np.ones(vocab, bool)
    if pad_id is not None and 0 <= pad_id < vocab:
        predicted[pad_id] = False
    weights = np.broadcast_to(np.asarray(weights, np.float64), shape)
    counted = np.broadcast_to(mask, shape) & (labels != pad_id)
    targets = {}
    for index in np.ndindex(shape):
        label = (*index[:-1], index[-1] + 1) if shift else index
        if shift and label[-1] == shape[-1]:
            continue
        if segment_ids is not None:
            segments = np.broadcast_to(segment_ids, shape)
            if segments[index] == 0 or segments[index] != segments[label]:
                continue
        if counted[label]:
            targets[index] = label
    total = sum(weights[label] for label in targets.values()) if reduction == "mean" else 1.0
    total = total or 1.0
    x_gradient, table_gradient = np.zeros_like(x), np.zeros_like(table)
    bias_gradient, losses = np.zeros(vocab), np.zeros(shape)
    for index, label in targets.items():
        u = scale * (table @ x[index] + bias)
        logits = u if softcap is None else softcap * np.tanh(u / softcap)
        logits = np.where(predicted, logits, np.finfo(np.float32).min)
        log_z = logits.max() + np.log(np.exp(logits - logits.max()).sum())
        target = label_smoothing / predicted.sum() * predicted
        target[labels[label]] += 1 - label_smoothing
        losses[label] = log_z - target @ logits + z_loss * log_z**2
        slope = np.exp(logits - log_z) * (1 + 2 * z_loss * log_z) - target
        slope *= scale * weights[label] / total
        if softcap is not None:
            slope /= np.cosh(u / softcap) ** 2
        x_gradient[index] = slope @ table
        table_gradient += np.outer(slope, x[index])
        bias_gradient += slope
    loss = (losses * weights).sum() / total
    weight_gradient = np.zeros(shape)
    for label in targets.values():
        weight_gradient[label] = (losses[label] - loss * (reduction == "mean")) / total
    return loss, x_gradient, table_gradient, bias_gradient, weight_gradient


def ours(x, table, labels, **options):
    loss, (x_gradient, table_gradient) = jax.value_and_grad(te.linear_cross_entropy, (0, 1))(
        x, table, labels, **options
    )
    return loss, x_gradient, table_gradient


STATIC = (
    "softcap",
    "scale",
    "pad_id",
    "shift",
    "label_smoothing",
    "z_loss",
    "reduction",
    "chunk_size",
)
compiled = jax.jit(ours, static_argnames=STATIC)


@functools.partial(jax.jit, static_argnames=STATIC)
def with_all_gradients(x, table, labels, bias, weights, **options):
    def loss(x, table, bias, weights):
        return te.linear_cross_entropy(x, table, labels, bias=bias, weights=weights, **options)

    value, gradients = jax.value_and_grad(loss, (0, 1, 2, 3))(x, table, bias, weights)
    return value, *gradients


def plain(x, table, labels, label_smoothing=0.0):
    """With all the logits at once."""
    targets = optax.smooth_labels(jax.nn.one_hot(labels, table.shape[0]), label_smoothing)
    return optax.softmax_cross_entropy(te.linear_logits(x, table), targets).mean()


PLAIN_STEP = jax.jit(jax.value_and_grad(plain, (0, 1)), static_argnums=3)


def assert_close(got, expected, error=ERROR):
    for one, other in zip(got, expected[: len(got)], strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=error, atol=error)


# --- values and gradients


@pytest.mark.slow
@hypothesis.settings(max_examples=12)
@hypothesis.given(
    shape=st.sampled_from([(), (1,), (5,), (2, 3)]),
    sizes=st.sampled_from([(2, 1), (2, 3), (9, 2)]),
    seed=st.integers(0, 99),
    masked=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "pad_id": st.sampled_from([None, 0, 1, -100]),
            "label_smoothing": st.sampled_from([0.0, 0.1, 0.9]),
            "reduction": st.sampled_from(["mean", "sum"]),
            "chunk_size": st.sampled_from([None, 1, 2, 4]),
            "softcap": st.sampled_from([None, 0.5, 30.0]),
            "scale": st.sampled_from([1.0, 0.25, 3.0]),
            "z_loss": st.sampled_from([0.0, 1e-4, 0.5]),
            "shift": st.booleans(),
        }
    ),
)
def test_loss_and_gradients_are_those_of_a_loop_in_float64(shape, sizes, seed, masked, options):
    (vocab, width), rng = sizes, np.random.default_rng(seed)
    x, table, labels = (
        normal(seed, *shape, width),
        normal(seed + 1, vocab, width),
        rng.integers(0, vocab, shape),
    )
    options = {**options, "shift": options["shift"] and shape != ()}
    if masked:
        options = {**options, "mask": np.array(rng.random(shape) < 0.6)}
    if options["shift"]:
        options = {**options, "segment_ids": rng.integers(0, 3, shape)}
    weights = rng.random(shape).astype(np.float32)
    arrays = {"bias": normal(seed + 2, vocab), "weights": weights}
    # Scaled sums of 3 terms of magnitude 3.
    assert_close(
        with_all_gradients(x, table, labels, **arrays, **options),
        oracle(x, table, labels, **arrays, **options),
        error=10 * ERROR,
    )
    assert_close(
        compiled(x, table, labels, **options), oracle(x, table, labels, **options), 10 * ERROR
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk_size", "label_smoothing"), [(1, 0.0), (3, 0.1), (20, 0.0), (1000, 0.1), (None, 0.0)]
)
def test_loss_and_gradients_are_those_of_whole_logits(chunk_size, label_smoothing):
    loss, gradients = PLAIN_STEP(X, TABLE, LABELS, label_smoothing)
    assert_close(
        compiled(X, TABLE, LABELS, chunk_size=chunk_size, label_smoothing=label_smoothing),
        (loss, *gradients),
    )


@pytest.mark.slow
def test_loss_of_integer_labels_is_that_of_optax():
    losses = jax.jit(
        lambda x: optax.softmax_cross_entropy_with_integer_labels(
            te.linear_logits(x, TABLE, pad_id=2), LABELS
        )
    )(X)
    loss = te.linear_cross_entropy(X, TABLE, LABELS, pad_id=2, reduction="sum")
    np.testing.assert_allclose(loss, np.where(LABELS != 2, losses, 0).sum(), rtol=ERROR)


def test_loss_of_one_token_in_a_published_example():
    # Stanford CS231n, linear classification notes, softmax classifier: scores -2.85, 0.86, 0.28
    # with label 2 cost 1.04. https://cs231n.github.io/linear-classify/
    loss = te.linear_cross_entropy([[-2.85, 0.86, 0.28]], np.eye(3, dtype=np.float32), [2])
    assert round(float(loss), 2) == 1.04


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_loss_of_even_logits_is_the_logarithm_of_the_vocabulary(label_smoothing):
    loss = te.linear_cross_entropy(X, np.zeros_like(TABLE), LABELS, label_smoothing=label_smoothing)
    np.testing.assert_allclose(loss, np.log(VOCAB), rtol=ERROR)


def test_a_vocabulary_of_one_costs_nothing():
    for result in compiled(X, TABLE[:1], np.zeros([4, 5], int)):
        np.testing.assert_array_equal(result, 0)


def test_loss_does_not_change_with_a_shift_of_all_logits():
    wide = np.concatenate([X, np.full((*LABELS.shape, 1), 5, np.float32)], -1)
    shifted = np.concatenate([TABLE, np.ones((VOCAB, 1), np.float32)], -1)
    np.testing.assert_allclose(
        te.linear_cross_entropy(wide, shifted, LABELS),
        te.linear_cross_entropy(X, TABLE, LABELS),
        rtol=ERROR,
    )


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_of_large_logits_is_finite_and_right(label_smoothing):
    x, table = np.float32([[1e4], [-1e4], [1e4]]), np.float32([[1], [-1], [0.9999]])
    options = {"label_smoothing": label_smoothing}
    labels = np.array([0, 0, 2])
    got, expected = compiled(x, table, labels, **options), oracle(x, table, labels, **options)
    # Logits and gradients are of magnitude 1e4 here, and 2**-24 of that is 6e-4.
    assert_close(got, expected, error=1e-3)


@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("size", [1e6, 1e10, 3e15])
@pytest.mark.parametrize("softcap", [False, True])
def test_a_factor_of_any_size_gives_finite_losses_and_gradients(
    softcap, size, label_smoothing, z_loss
):
    """A product that is rounded once in one place and twice in another differs by more than 1."""
    options = {"scale": size, "label_smoothing": label_smoothing, "z_loss": z_loss}
    if softcap:
        options["softcap"] = size
    got, expected = compiled(X, TABLE, LABELS, **options), oracle(X, TABLE, LABELS, **options)
    for values, exact in zip(got, expected, strict=False):
        np.testing.assert_allclose(values, exact, rtol=0, atol=ERROR * np.abs(exact).max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits_are_summed_in_float32_and_cast_once(dtype):
    tokens = 1024
    x, table = normal(4, tokens, 2).astype(dtype), normal(5, 3, 2).astype(dtype)
    labels = np.arange(tokens) % 3
    loss, x_gradient, table_gradient = compiled(x, table, labels, reduction="sum", chunk_size=16)
    expected = oracle(np.float32(x), np.float32(table), labels, reduction="sum")
    assert (loss.dtype, x_gradient.dtype, table_gradient.dtype) == (jnp.float32, dtype, dtype)
    np.testing.assert_allclose(loss, expected[0], rtol=ERROR)
    # One rounding to the dtype, and float32 sums of 1024 terms of both signs.
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(
        np.float32(x_gradient),
        expected[1],
        rtol=half_ulp + ERROR,
        atol=float(jnp.finfo(dtype).tiny),
    )
    np.testing.assert_allclose(
        np.float32(table_gradient), expected[2], rtol=half_ulp + ERROR, atol=tokens * 2.0**-24 * 4
    )


@pytest.mark.slow
def test_a_scale_on_the_loss_reaches_float16_gradients_before_they_are_rounded():
    tokens, scale = 2**14, 2.0**15
    x, table = np.full((tokens, 1), 2.0**-8, np.float16), np.array([[1.0], [-1.0]], np.float16)
    scaled = jax.jit(
        jax.grad(lambda x: scale * te.linear_cross_entropy(x, table, np.zeros(tokens, int)))
    )(x)
    # About -1 / tokens each: below float16's normal numbers, above them when scaled.
    np.testing.assert_allclose(
        np.float32(scaled),
        scale * oracle([[2.0**-8]], table, [0])[1][0, 0] / tokens,
        rtol=2.0**-11 + ERROR,
    )


def test_float64_inputs_are_computed_in_float64():
    with x64():
        x, table = np.float64(X), np.float64(TABLE)
        got = compiled(x, table, LABELS, pad_id=1, label_smoothing=0.1, chunk_size=3)
        assert {array.dtype for array in got} == {jnp.dtype("float64")}
        assert_close(got, oracle(x, table, LABELS, pad_id=1, label_smoothing=0.1), error=1e-13)


# --- the settings of an output layer, weights and shift

BIAS = normal(20, VOCAB)
WEIGHTS = np.random.default_rng(21).random((4, 5)).astype(np.float32)
SEGMENTS = np.int32([[1, 1, 2, 2, 2], [3, 3, 3, 3, 3], [1, 1, 0, 0, 0], [0, 0, 5, 6, 6]])
SETTINGS = {
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 2.0},
    "z_loss": {"z_loss": 0.1},
    "shift": {"shift": True},
    "packed": {"shift": True, "segment_ids": SEGMENTS},
    "sum": {"reduction": "sum", "z_loss": 0.01},
    "all": {
        "softcap": 2.0,
        "scale": 3.0,
        "pad_id": 2,
        "mask": MASK,
        "shift": True,
        "segment_ids": SEGMENTS,
        "label_smoothing": 0.1,
        "z_loss": 0.1,
        "chunk_size": 3,
    },
}
every_setting = pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)


@every_setting
def test_each_setting_is_that_of_a_loop_in_float64(options):
    assert_close(
        with_all_gradients(X, TABLE, LABELS, BIAS, WEIGHTS, **options),
        oracle(X, TABLE, LABELS, bias=BIAS, weights=WEIGHTS, **options),
    )


def test_every_setting_in_float64():
    with x64():
        arrays = {"bias": np.float64(BIAS), "weights": np.float64(WEIGHTS)}
        got = with_all_gradients(
            np.float64(X), np.float64(TABLE), LABELS, **arrays, **SETTINGS["all"]
        )
        assert_close(got, oracle(X, TABLE, LABELS, **arrays, **SETTINGS["all"]), error=1e-13)


@pytest.mark.slow
def test_derivatives_with_every_setting_are_finite_differences():
    options = {**SETTINGS["all"], "pad_id": 2, "segment_ids": SEGMENTS[0], "mask": None}
    with x64():

        def loss(x, table, bias, weights):
            return te.linear_cross_entropy(
                x, table, LABELS[0], bias=bias, weights=weights, **options
            )

        arguments = map(np.float64, (X[0], TABLE, BIAS, WEIGHTS[0] + 0.1))
        jax.test_util.check_grads(loss, tuple(arguments), order=2, atol=1e-5, rtol=1e-5, eps=1e-4)


@pytest.mark.parametrize("z_loss", [0.5, 0.25])
def test_a_z_loss_whose_slope_is_zero_has_its_gradient(z_loss):
    # One id, whose logit is log_z = -1 / (2 z_loss): the two terms of the slope cancel.
    x, table = np.float32([[-1 / (2 * z_loss)]]), np.float32([[1], [1e4]])
    got = compiled(x, table, np.array([0]), z_loss=z_loss)
    assert_close(got, oracle(x, table, [0], z_loss=z_loss))
    np.testing.assert_allclose(got[1], [[-1]], rtol=1e-5)


def test_shifted_labels_are_the_labels_one_later():
    shifted = compiled(X, TABLE, LABELS, shift=True, mask=MASK)
    by_hand = compiled(X[:, :-1], TABLE, LABELS[:, 1:], mask=MASK[:, 1:])
    np.testing.assert_allclose(shifted[0], by_hand[0], rtol=ERROR)
    np.testing.assert_allclose(shifted[1][:, :-1], by_hand[1], atol=ERROR)
    np.testing.assert_array_equal(shifted[1][:, -1], 0)
    assert compiled(X[:, :1], TABLE, LABELS[:, :1], shift=True)[0] == 0


def test_the_loss_of_packed_sequences_is_that_of_each_alone():
    """Whatever stands between them and in the padding."""
    documents = [(0, slice(0, 2)), (0, slice(2, 5)), (1, slice(0, 5)), (2, slice(0, 2))]
    documents += [(3, slice(3, 5))]
    alone = [
        te.linear_cross_entropy(
            X[row, part][:-1], TABLE, LABELS[row, part][1:], reduction="sum", bias=BIAS
        )
        for row, part in documents
    ]
    labels, x = LABELS.copy(), X.copy()
    labels[SEGMENTS == 0], x[SEGMENTS == 0] = 10**6, np.nan
    batch = te.TokenPositions.from_segment_ids(SEGMENTS)
    together = te.linear_cross_entropy(
        x,
        TABLE,
        labels,
        bias=BIAS,
        reduction="sum",
        shift=True,
        segment_ids=batch.segment_ids,
    )
    np.testing.assert_allclose(together, sum(alone), rtol=ERROR)


def test_weights_of_zero_and_one_are_a_mask_and_others_a_weighted_mean():
    as_mask = compiled(X, TABLE, LABELS, weights=MASK.astype(np.float32))
    for got, want in zip(as_mask, compiled(X, TABLE, LABELS, mask=MASK), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-7)
    np.testing.assert_allclose(
        te.linear_cross_entropy(X, TABLE, LABELS, weights=np.full(5, 7.0, np.float32)),
        te.linear_cross_entropy(X, TABLE, LABELS),
        rtol=ERROR,
    )
    for result in compiled(X, TABLE, LABELS, weights=np.zeros(5, np.float32)):
        np.testing.assert_array_equal(result, 0)


def test_weights_of_uncounted_labels_change_nothing_even_if_they_are_nan():
    weights = np.where(MASK, WEIGHTS, np.nan)
    got = with_all_gradients(X, TABLE, LABELS, BIAS, weights, mask=MASK)
    want = with_all_gradients(X, TABLE, LABELS, BIAS, WEIGHTS, mask=MASK)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_published_softcap_bounds_the_logits():
    """Gemma 2, section 2: softcap * tanh(logits / softcap), so a loss of at most 2 softcaps."""
    x, table = np.float32([[1e4]]), np.float32([[1], [-1]])
    loss, *gradients = compiled(x, table, np.array([1]), softcap=30.0)
    np.testing.assert_allclose(loss, 60, rtol=ERROR)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0)


def test_the_bias_and_padding_of_16_bits():
    bias = BIAS.astype(jnp.bfloat16)
    got = with_all_gradients(
        X.astype(jnp.bfloat16), TABLE.astype(jnp.bfloat16), LABELS, bias, WEIGHTS, pad_id=2
    )
    assert [g.dtype for g in got] == [jnp.float32, *[jnp.bfloat16] * 3, jnp.float32]
    assert got[3][2] == 0


# --- tokens that are not counted


@pytest.mark.parametrize("content", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_what_stands_at_a_token_that_is_not_counted_changes_nothing(content, chunk_size):
    x, labels = X.copy(), LABELS.copy()
    x[~MASK], labels[~MASK] = content, 10**6
    got = compiled(x, TABLE, labels, mask=MASK, chunk_size=chunk_size)
    assert_close(got, oracle(X, TABLE, LABELS, mask=MASK))
    np.testing.assert_array_equal(np.asarray(got[1])[~MASK], 0)


def test_mask_broadcasts_to_the_labels():
    np.testing.assert_array_equal(
        te.linear_cross_entropy(X, TABLE, LABELS, mask=MASK[:1]),
        te.linear_cross_entropy(X, TABLE, LABELS, mask=np.broadcast_to(MASK[:1], LABELS.shape)),
    )


def test_padding_is_not_predicted_and_gets_no_gradient():
    table = TABLE.copy()
    table[2] = 1e4
    got = compiled(X, table, LABELS, pad_id=2, label_smoothing=0.1)
    assert_close(got, oracle(X, TABLE, LABELS, pad_id=2, label_smoothing=0.1))
    np.testing.assert_array_equal(np.asarray(got[2])[2], 0)


def test_padding_outside_the_vocabulary_leaves_every_row():
    labels = np.where(MASK, LABELS, -100)
    for got, expected in zip(
        compiled(X, TABLE, labels, pad_id=-100), compiled(X, TABLE, LABELS, mask=MASK), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_counted_token_costs_nothing_and_moves_nothing(reduction):
    for got in compiled(X, TABLE, LABELS, mask=np.zeros(5, bool), reduction=reduction):
        np.testing.assert_array_equal(got, 0)
    for got in compiled(X[:0], TABLE, LABELS[:0], reduction=reduction):
        np.testing.assert_array_equal(got, np.zeros(got.shape))


@pytest.mark.parametrize("label", [VOCAB, -1, 2**32 + 1, -(2**31)])
def test_a_counted_label_outside_the_vocabulary_makes_all_nan(label):
    labels = LABELS.copy()
    labels[1, 2] = label
    loss, x_gradient, table_gradient = ours(X, TABLE, labels, chunk_size=4)
    assert np.isnan(loss)
    assert np.isnan(table_gradient).all()
    assert np.isnan(np.asarray(x_gradient)[1, 2]).all()
    assert np.isnan(te.linear_cross_entropy(X, TABLE, labels))


# --- transformations


@pytest.mark.slow
def test_first_and_second_derivatives_are_finite_differences():
    with x64():
        some = {
            "labels": LABELS[0],
            "mask": MASK[0],
            "pad_id": 1,
            "label_smoothing": 0.1,
            "chunk_size": 3,
        }
        loss = functools.partial(te.linear_cross_entropy, **some)
        # Central differences of step 1e-4 are off by its square times third derivatives, and by
        # 1e-16 / 1e-4 rounding.
        jax.test_util.check_grads(
            loss, (np.float64(X[0]), np.float64(TABLE)), order=2, atol=1e-6, rtol=1e-6, eps=1e-4
        )


@pytest.mark.slow
def test_jit_and_vmap_are_the_eager_one():
    xs, tables, labels = normal(6, 3, 4, WIDTH), normal(7, 3, VOCAB, WIDTH), LABELS[:3, :4]
    step = functools.partial(ours, pad_id=1, chunk_size=2)
    expected = [step(*each) for each in zip(xs, tables, labels, strict=True)]
    assert_close(compiled(xs[0], tables[0], labels[0], pad_id=1, chunk_size=2), expected[0])
    assert_close(
        jax.vmap(step)(xs, tables, labels), [np.stack(each) for each in zip(*expected, strict=True)]
    )


@pytest.mark.parametrize(
    "options", [{}, {"pad_id": 1}, SETTINGS["all"]], ids=["plain", "padding", "all"]
)
def test_the_arithmetic_of_accelerators_is_right_too(monkeypatch, options):
    chosen = []

    def choose_default(*arguments, cpu, default):
        chosen.append(default)
        return default(*arguments)

    monkeypatch.setattr(jax.lax, "platform_dependent", choose_default)
    implementation._weighted_loss.clear_cache()
    result = ours(X, TABLE, LABELS, **options)
    implementation._weighted_loss.clear_cache()
    assert len(chosen) >= 1
    assert_close(result, oracle(X, TABLE, LABELS, **options))


def products(function, *arguments):
    """Number of products in the program, those in loops once each."""
    return jax.jit(function).lower(*arguments).as_text().count("dot_general")


def test_only_what_is_asked_for_is_computed():
    loss = functools.partial(te.linear_cross_entropy, labels=LABELS)
    assert products(loss, X, TABLE) == 1
    assert products(jax.value_and_grad(loss, 0), X, TABLE) == 2
    assert products(jax.value_and_grad(loss, 1), X, TABLE) == 2
    assert products(jax.value_and_grad(loss, (0, 1)), X, TABLE) == 3
    every = functools.partial(with_all_gradients, labels=LABELS, bias=BIAS, weights=WEIGHTS)
    # The fourth one, with eight columns, sums the bias's gradient.
    assert products(functools.partial(every, **SETTINGS["all"]), X, TABLE) == 4


def temporaries(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


MANY_TOKENS = (
    jax.ShapeDtypeStruct((8, 512, 8), jnp.float32),
    jax.ShapeDtypeStruct((512, 8), jnp.float32),
    jax.ShapeDtypeStruct((8, 512), jnp.int32),
)


@functools.cache
def temporaries_of_whole_logits():
    def loss(x, table, labels):
        return optax.softmax_cross_entropy_with_integer_labels(
            te.linear_logits(x, table), labels
        ).mean()

    return temporaries(jax.value_and_grad(loss, (0, 1)), *MANY_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, 8),
        ({"label_smoothing": 0.1}, 8),
        ({"pad_id": 3}, 8),
        # jax 0.6 keeps a second chunk for the softcap.
        ({"softcap": 30.0, "scale": 0.5, "z_loss": 1e-4, "shift": True}, 7),
    ],
    ids=str,
)
def test_temporaries_are_an_eighth_of_whole_logits_or_less(options, part):
    loss, whole = (
        functools.partial(te.linear_cross_entropy, **options),
        temporaries_of_whole_logits(),
    )
    assert part * temporaries(jax.value_and_grad(loss, (0, 1)), *MANY_TOKENS) <= whole
    assert 8 * temporaries(loss, *MANY_TOKENS) <= whole
    assert 4 * temporaries(jax.value_and_grad(loss), *MANY_TOKENS) <= whole


def test_products_with_the_hessian_keep_the_memory_of_chunks():
    x, table, labels = normal(8, 2048, 2), normal(9, 256, 2), np.zeros(2048, int)
    gradient = jax.grad(lambda table: te.linear_cross_entropy(x, table, labels, chunk_size=32))
    assert (
        8 * temporaries(lambda table: jax.jvp(gradient, (table,), (table,)), table) < 2048 * 256 * 4
    )


@pytest.mark.parametrize(
    ("tokens", "size"), [(1, 1), (200, 200), (3000, 250), (4096, 342), (8192, 512), (10**6, 512)]
)
def test_a_chunk_is_a_twelfth_of_the_tokens_within_bounds(tokens, size):
    (chunks,) = implementation._cut_into_chunks(None, jnp.ones((tokens, 1)))
    assert chunks.shape == (-(-tokens // size), size, 1)
    assert chunks.sum() == tokens


def test_loss_has_one_trace_for_all_labels():
    traces = []

    @jax.jit
    def loss(labels):
        traces.append(labels)
        return te.linear_cross_entropy(X, TABLE, labels)

    for label in range(3):
        loss(np.full(LABELS.shape, label, np.int32))
    assert len(traces) == 1


def test_lists_and_integers_of_any_width_are_taken():
    expected = te.linear_cross_entropy(X, TABLE, LABELS)
    for dtype in (np.int8, np.uint8, np.uint32, np.int64):
        np.testing.assert_array_equal(
            te.linear_cross_entropy(X.tolist(), TABLE.tolist(), LABELS.astype(dtype)), expected
        )
    np.testing.assert_array_equal(
        te.linear_cross_entropy(jnp.asarray(X), jnp.asarray(TABLE), LABELS.tolist()), expected
    )


# --- errors


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"x": X[..., :2]},
            ValueError,
            r"x: wanted a last axis of the table's width, \(3,\), got \(2,\)",
        ),
        (
            {"x": np.float32(1)},
            ValueError,
            r"x: wanted a last axis of the table's width, \(3,\), got \(\)",
        ),
        (
            {"x": np.ones((4, 5, 3), int)},
            TypeError,
            r"x: wanted a floating dtype of 16 to 64 bits, got int64",
        ),
        (
            {"table": TABLE[0]},
            ValueError,
            r"table: wanted shape \[vocab_size, d\] with at least one row, got shape \[3\]",
        ),
        (
            {"table": TABLE.astype(int)},
            TypeError,
            r"table: wanted a floating dtype of 16 to 64 bits, got int64",
        ),
        (
            {"labels": LABELS[0]},
            ValueError,
            r"labels: wanted x's shape without its last axis, \(4, 5\), got \(5,\)",
        ),
        ({"labels": np.ones((4, 5))}, TypeError, r"labels: wanted an integer dtype, got float64"),
        (
            {"mask": np.ones((4, 5))},
            TypeError,
            r"mask: wanted a bool array, True = counted, got float64",
        ),
        (
            {"mask": np.ones((2, 5), bool)},
            ValueError,
            r"mask: wanted a shape that broadcasts to that of the labels, \[4, 5\], got shape \[2, 5\]",
        ),
        (
            {"mask": np.ones((4, 1), bool)},
            ValueError,
            r"mask: wanted a last axis of the labels' length, 5, got shape \[4, 1\]",
        ),
        (
            {"mask": np.ones((3, 4, 5), bool)},
            ValueError,
            r"mask: wanted a shape that broadcasts to that of the labels, \[4, 5\], got shape \[3, 4, 5\]",
        ),
        ({"pad_id": 0.0}, TypeError, r"pad_id: wanted a Python int, got float 0.0"),
        (
            {"label_smoothing": 1.0},
            ValueError,
            r"label_smoothing: wanted a number in \[0, 1\), got 1.0",
        ),
        (
            {"label_smoothing": "a"},
            TypeError,
            r"label_smoothing: wanted a Python number, got str 'a'",
        ),
        ({"reduction": "none"}, ValueError, r"reduction: wanted one of 'mean', 'sum', got 'none'"),
        ({"chunk_size": 0}, ValueError, r"chunk_size: wanted an int of at least 1, got 0"),
        ({"chunk_size": 1.5}, TypeError, r"chunk_size: wanted a Python int, got float 1.5"),
        (
            {"bias": BIAS[:-1]},
            ValueError,
            r"bias: wanted a number for each row, \(7,\), got \(6,\)",
        ),
        (
            {"bias": np.ones(7, int)},
            TypeError,
            r"bias: wanted a floating dtype of 16 to 64 bits, got int64",
        ),
        ({"softcap": 0}, ValueError, r"softcap: wanted a finite number above 0, got 0"),
        ({"softcap": -30.0}, ValueError, r"softcap: wanted a finite number above 0, got -30.0"),
        ({"softcap": np.nan}, ValueError, r"softcap: wanted a finite number above 0, got nan"),
        ({"scale": 0.0}, ValueError, r"scale: wanted a finite number above 0, got 0.0"),
        ({"scale": None}, TypeError, r"scale: wanted a Python number, got NoneType None"),
        (
            {"z_loss": -1e-4},
            ValueError,
            r"z_loss: wanted a finite number of at least 0, got -0.0001",
        ),
        ({"z_loss": np.nan}, ValueError, r"z_loss: wanted a finite number, got nan"),
        (
            {"weights": WEIGHTS[:, :1]},
            ValueError,
            r"weights: wanted a last axis of the labels' length, 5, got shape \[4, 1\]",
        ),
        (
            {"weights": MASK},
            TypeError,
            r"weights: wanted a floating dtype of 16 to 64 bits, got bool",
        ),
        ({"shift": 1}, TypeError, r"shift: wanted a Python bool, got int 1"),
        (
            {"segment_ids": SEGMENTS},
            ValueError,
            r"segment_ids: wanted None, since shift is False, got an array int32\[4, 5\]",
        ),
        (
            {"shift": True, "segment_ids": SEGMENTS[:, :4]},
            ValueError,
            r"segment_ids: wanted a last axis of the labels' length, 5, got shape \[4, 4\]",
        ),
        (
            {"shift": True, "segment_ids": WEIGHTS},
            TypeError,
            r"segment_ids: wanted an integer dtype, got float32",
        ),
    ],
)
def test_bad_arguments_are_refused(changes, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        te.linear_cross_entropy(**{"x": X, "table": TABLE, "labels": LABELS, **changes})


@jax.tree_util.register_static
class SomeRows(Table):
    shape, dtype = (VOCAB, WIDTH), jnp.dtype("float32")


@pytest.mark.parametrize(
    "options", [{}, {"pad_id": 60, "label_smoothing": 0.1}], ids=["default", "smoothed"]
)
def test_a_symbolic_vocabulary_gives_the_loss_of_each(options):
    def step(x, table):
        return ours(x, table, LABELS, **options)

    (rows,) = jax.export.symbolic_shape("v")
    shapes = X, jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    exported = jax.export.export(jax.jit(step))(*shapes)
    for vocab in (VOCAB, VOCAB + 3):
        table = normal(7, vocab, WIDTH)
        assert_close(exported.call(X, table), oracle(X, table, LABELS, **options))


def test_a_table_of_some_rows_is_refused():
    message = r"^table: wanted a whole table, trained densely, since the output layer is tied to it, got some of its rows(\n|$)"
    with pytest.raises(TypeError, match=message):
        te.linear_cross_entropy(X, SomeRows(), LABELS)


# --- meshes

SHAPES = [(1, 8), (2, 4), (8, 1)]
# Divided by eight in every direction, and a sharded vocabulary that eight does not divide.
MESH_X, MESH_TABLE = normal(10, 8, 8, 8), normal(11, 64, 8)
MESH_LABELS = np.random.default_rng(12).integers(0, 13, (8, 8)).astype(np.int32)
MESH_OPTIONS = {"pad_id": 3, "label_smoothing": 0.1, "chunk_size": 4}


def mesh_of(kind, shape):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2)


@functools.cache
def one_device(rows):
    return oracle(MESH_X, MESH_TABLE[:rows], MESH_LABELS, **MESH_OPTIONS)


def mesh_loss(x, table, labels):
    return te.linear_cross_entropy(x, table, labels, **MESH_OPTIONS)


mesh_step = jax.jit(jax.value_and_grad(mesh_loss, (0, 1)))

PLACEMENTS = [
    (SPEC("data"), SPEC()),
    (SPEC("data"), SPEC("model")),
    (SPEC("data"), SPEC("data")),
    (SPEC("data", None, "model"), SPEC("data", "model")),
    (SPEC(("data", "model")), SPEC(None, "model")),
    (SPEC(("model", "data")), SPEC("model")),
    (SPEC(None, "model"), SPEC(("model", "data"))),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "x_spec", "table_spec"),
    [(AxisType.Explicit, *placement) for placement in PLACEMENTS]
    + [(AxisType.Auto, *placement) for placement in PLACEMENTS[:3]],
)
def test_sharded_arrays_give_the_loss_of_one_device(kind, x_spec, table_spec):
    mesh = mesh_of(kind, (2, 4))
    with set_mesh(mesh):
        x, table = (
            jax.device_put(MESH_X, NamedSharding(mesh, x_spec)),
            jax.device_put(MESH_TABLE, NamedSharding(mesh, table_spec)),
        )
        loss, gradients = mesh_step(x, table, MESH_LABELS)
    assert_close((loss, *gradients), one_device(64))
    if kind == AxisType.Explicit:
        assert gradients[0].sharding.is_equivalent_to(x.sharding, 3)
        assert gradients[1].sharding.is_equivalent_to(table.sharding, 2)


MESH_BIAS, MESH_WEIGHTS = normal(13, 64), np.float32(np.random.default_rng(14).random((8, 8)))
MESH_SEGMENTS = np.sort(np.random.default_rng(15).integers(0, 3, (8, 8)), 1)
MESH_SETTINGS = {
    "softcap": 2.0,
    "scale": 0.5,
    "pad_id": 3,
    "shift": True,
    "label_smoothing": 0.1,
    "z_loss": 0.1,
    "chunk_size": 4,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("x_spec", "table_spec", "token_spec", "bias_spec"),
    [
        (SPEC("data"), SPEC("model"), SPEC(), SPEC()),
        (SPEC("data", "model"), SPEC(), SPEC(), SPEC("model")),
        (SPEC("data", "model"), SPEC("model"), SPEC("data", "model"), SPEC()),
        (SPEC(None, ("data", "model")), SPEC("data", "model"), SPEC(), SPEC("data")),
        (SPEC(("model", "data")), SPEC("model"), SPEC(("model", "data")), SPEC()),
    ],
    ids=str,
)
def test_every_setting_on_a_mesh_is_that_of_one_device(
    kind, x_spec, table_spec, token_spec, bias_spec
):
    mesh = mesh_of(kind, (2, 4))
    arrays = {
        "x": (MESH_X, x_spec),
        "table": (MESH_TABLE, table_spec),
        "labels": (MESH_LABELS, token_spec),
        "bias": (MESH_BIAS, bias_spec),
        "weights": (MESH_WEIGHTS, token_spec),
        "segment_ids": (MESH_SEGMENTS, token_spec),
    }
    if jax.__version_info__ < (0, 7) and kind == AxisType.Explicit and x_spec[1:]:
        pytest.skip("jax 0.6 cannot transpose the shift of weights along an axis that it splits")
    host = {name: array for name, (array, _) in arrays.items()}
    with set_mesh(mesh):
        placed = {
            name: jax.device_put(array, NamedSharding(mesh, spec))
            for name, (array, spec) in arrays.items()
        }
        got = with_all_gradients(**placed, **MESH_SETTINGS)
    assert_close(got, oracle(**host, **MESH_SETTINGS))
    if kind == AxisType.Explicit:
        for gradient, name in zip(got[1:], ("x", "table", "bias", "weights"), strict=True):
            assert gradient.sharding.is_equivalent_to(placed[name].sharding, gradient.ndim)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [SPEC("model"), SPEC("model", "data")], ids=str)
def test_every_setting_with_a_sharded_table_is_that_of_one_device(kind, spec):
    mesh, bias = mesh_of(kind, (2, 4)), MESH_BIAS[:13]
    options = {"segment_ids": MESH_SEGMENTS, **MESH_SETTINGS}
    with set_mesh(mesh):
        table = in_shards(mesh, spec)
        x = jax.device_put(MESH_X, NamedSharding(mesh, SPEC("data")))
        bias = jax.device_put(bias, NamedSharding(mesh, SPEC()))
        loss, of_x, of_table, of_bias, of_weights = with_all_gradients(
            x, table, MESH_LABELS, bias, MESH_WEIGHTS, **options
        )
        logits = jax.jit(te.linear_logits, static_argnames=("softcap", "scale", "pad_id"))(
            x, table, bias=bias, softcap=2.0, scale=0.5, pad_id=3
        )
    want = oracle(MESH_X, MESH_TABLE[:13], MESH_LABELS, bias=bias, weights=MESH_WEIGHTS, **options)
    rows = np.asarray(of_table.array)
    assert_close((loss, of_x, rows[:13], of_bias, of_weights), want)
    np.testing.assert_array_equal(rows[13:], 0)
    plain = te.linear_logits(MESH_X, MESH_TABLE[:13], bias=bias, softcap=2.0, scale=0.5, pad_id=3)
    np.testing.assert_allclose(np.asarray(logits)[..., :13], plain, atol=ERROR)


def in_shards(mesh, spec, rows=13):
    return te.sharding.shard_params(
        {"embeddings": MESH_TABLE[:rows]}, mesh, {"*": spec}, tables="*"
    )["embeddings"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (AxisType.Auto, SPEC("model")),
        (AxisType.Explicit, SPEC("model")),
        (AxisType.Auto, SPEC("model", "data")),
        (AxisType.Explicit, SPEC(("data", "model"))),
    ],
)
def test_a_sharded_table_gives_the_loss_of_one_device(kind, spec, shape):
    mesh = mesh_of(kind, shape)
    with set_mesh(mesh):
        table = in_shards(mesh, spec)
        x = jax.device_put(MESH_X, NamedSharding(mesh, SPEC("data")))
        loss, (x_gradient, table_gradient) = mesh_step(x, table, MESH_LABELS)
    rows = np.asarray(table_gradient.array)
    assert_close((loss, x_gradient, rows[:13]), one_device(13))
    np.testing.assert_array_equal(rows[13:], 0)
    assert table_gradient.array.sharding.is_equivalent_to(table.array.sharding, 2)


LOWEST, HIGHEST = -(2**31), 2**31 - 1


@pytest.mark.parametrize("spec", [None, SPEC("model"), SPEC(None, "model")], ids=str)
@pytest.mark.parametrize(
    "pad_id",
    [
        -100,
        13,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (LOWEST + 1, 0, 127, HIGHEST - 1)),
    ],
)
def test_labels_that_do_not_count_reach_no_logit_in_any_layout(pad_id, spec):
    # Without a mask, every fourth label is padding. With one, it is any number.
    labels, counted = MESH_LABELS.copy(), np.arange(64).reshape(8, 8) % 4 > 0
    labels[~counted] = np.resize([pad_id, LOWEST, 13, 63, 64, HIGHEST], 16)
    padded = np.where(counted, MESH_LABELS, pad_id)
    table = MESH_TABLE[:13] if spec is None else in_shards(mesh_of(AxisType.Auto, (2, 4)), spec)
    for labels_and_mask in ((padded, None), (labels, counted)):
        options = dict(zip(("labels", "mask"), labels_and_mask, strict=True)) | {"pad_id": pad_id}
        loss, x_gradient, table_gradient = compiled(MESH_X, table, **options)
        rows = np.asarray(table_gradient.array if spec else table_gradient)
        mask = {"mask": counted}
        expected = oracle(MESH_X, MESH_TABLE[:13], **(options | mask))
        assert_close((loss, x_gradient, rows[:13]), expected)
        assert not rows[13:].any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shards_send_no_table_and_no_logits(kind):
    mesh, chunks = mesh_of(kind, (2, 4)), 16
    with set_mesh(mesh):
        table = in_shards(mesh, SPEC("model"), rows=64)
        x = jax.device_put(MESH_X, NamedSharding(mesh, SPEC("data")))
        compiled = mesh_step.lower(
            x, table, jax.device_put(MESH_LABELS, NamedSharding(mesh, SPEC("data")))
        ).compile()
    sent = collectives.collectives(compiled)
    assert sent
    assert {each.kind for each in sent} == {"all-reduce"}
    # x's gradient of half of the tokens, the gradient of a quarter of the rows: never 64 rows of 8,
    # or a token's 64 logits.
    assert (
        max(max(np.prod(shape, dtype=int) for _, shape in each.operands) for each in sent) <= 32 * 8
    )
    assert chunks * 4 == MESH_LABELS.size


def shard_map():
    """Under its name in this version of jax."""
    return (
        jax if hasattr(jax, "shard_map") else importlib.import_module("jax.experimental.shard_map")
    ).shard_map


def test_inside_a_shard_map_each_device_has_the_loss_of_its_tokens():
    mesh = mesh_of(AxisType.Auto, (8, 1))

    def mean(x, table, labels):
        return jax.lax.pmean(
            te.linear_cross_entropy(x, table, labels, label_smoothing=0.1, chunk_size=4), "data"
        )

    loss = shard_map()(
        mean, mesh=mesh, in_specs=(SPEC("data"), SPEC(), SPEC("data")), out_specs=SPEC()
    )
    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(MESH_X, MESH_TABLE, MESH_LABELS)
    assert_close((value, *gradients), oracle(MESH_X, MESH_TABLE, MESH_LABELS, label_smoothing=0.1))


@pytest.mark.slow
def test_products_with_the_hessian_of_shards_are_those_of_one_device():
    def product(x, table, labels):
        return jax.jvp(jax.grad(lambda x: mesh_loss(x, table, labels)), (x,), (x,))[1]

    mesh = mesh_of(AxisType.Explicit, (2, 4))
    with set_mesh(mesh):
        x = jax.device_put(MESH_X, NamedSharding(mesh, SPEC("data")))
        got = jax.jit(product)(x, in_shards(mesh, SPEC("model")), MESH_LABELS)
    np.testing.assert_allclose(
        got, jax.jit(product)(MESH_X, MESH_TABLE[:13], MESH_LABELS), rtol=ERROR, atol=ERROR
    )


def test_columns_split_in_more_parts_than_rows_are_refused():
    mesh = mesh_of(AxisType.Explicit, (2, 4))
    with set_mesh(mesh), pytest.raises(ValueError, match="all_to_all split_axis"):
        mesh_step(
            MESH_X,
            jax.device_put(MESH_TABLE[:13], NamedSharding(mesh, SPEC(None, "model"))),
            MESH_LABELS,
        )


# --- where arguments meet


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_narrow_weights_are_rounded_once(dtype):
    """Weights of one number a column are summed over many rows."""
    x = jax.random.normal(jax.random.key(0), (2048, 2, 8))
    table = jax.random.normal(jax.random.key(1), (16, 8))
    labels = jnp.arange(4096).reshape(2048, 2) % 16
    loss = lambda w: te.linear_cross_entropy(x, table, labels, weights=w, reduction="sum")
    narrow, wide = (jax.grad(loss)(jnp.ones(2, each)) for each in (dtype, jnp.float32))
    error = np.abs(narrow.astype(jnp.float32) / wide - 1).max()
    assert narrow.dtype == dtype
    assert error <= jnp.finfo(dtype).eps


def test_labels_that_cannot_be_shifted_or_cut():
    x, table = jnp.ones(2), jnp.ones((3, 2))
    with pytest.raises(
        ValueError, match=r"^labels: wanted shape \[..., length\], to shift, got sha"
    ):
        te.linear_cross_entropy(x, table, 1, shift=True)
    (size,) = jax.export.symbolic_shape("b")
    shapes = [
        jax.ShapeDtypeStruct((size, 2), jnp.float32),
        jax.ShapeDtypeStruct((size,), jnp.int32),
    ]
    loss = jax.jit(lambda x, labels: te.linear_cross_entropy(x, table, labels))
    with pytest.raises(
        ValueError, match=r"^labels: wanted a shape of known sizes, .* got shape \[b"
    ):
        jax.export.export(loss)(*shapes)


def test_a_weight_for_all_labels_gets_no_hint_for_positions():
    with pytest.raises(ValueError, match=r"^weights: wanted a last axis .* got shape \[\]$"):
        te.linear_cross_entropy(jnp.ones((1, 2)), jnp.ones((3, 2)), [1], weights=2.0)
