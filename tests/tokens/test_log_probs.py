"""Log-probabilities and entropies of single tokens, their derivatives, and the losses of tokens."""

import re

import collectives
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from compare import equal, near
from drawn import normal
from meshes import EXPLICIT, mesh_of, put
from references import linear_log_probs

import transformer_embed as te

# Of numbers of magnitude 1: float32 sums of some 100 terms are within 100 * 2**-24 = 6e-6.
ERROR = 1e-5
VOCAB, WIDTH = 7, 3
TABLE, X, BIAS = normal(0, VOCAB, WIDTH), normal(1, 4, 6, WIDTH), normal(2, VOCAB)
LABELS = np.random.default_rng(4).integers(1, VOCAB, (4, 6))
MASK = np.random.default_rng(5).random((4, 6)) < 0.7
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0]] * 4)
OPTIONS = [
    {"temperature": 0.7, "softcap": 1.5, "scale": 2.0, "pad_id": 0},
    {"shift": True, "pad_id": 3},
    {"shift": True, "segment_ids": SEGMENTS, "mask": MASK, "chunk_size": 7},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_first_and_second_derivatives_are_finite_differences(options):
    options = {"with_entropy": True, **options}

    @jax.jit
    def log_probs(x, table, bias):
        return linear_log_probs(x, table, LABELS, bias=bias, **options)

    with jax.enable_x64():
        arrays = tuple(map(np.float64, (X, TABLE, BIAS)))
        jax.test_util.check_grads(log_probs, arrays, order=2, atol=1e-5, rtol=1e-5, eps=1e-4)


CANDIDATES = np.random.default_rng(6).integers(0, VOCAB, (4, 6, 3))


@pytest.mark.slow
def test_candidates_outside_the_vocabulary_are_nan_and_entropies_those_of_tokens():
    ids = CANDIDATES.copy()
    ids[1, 1, 2] = VOCAB
    log_probs, entropies = linear_log_probs(X, TABLE, ids, with_entropy=True)
    assert np.argwhere(np.isnan(log_probs)).tolist() == [[1, 1, 2]]
    near(entropies, linear_log_probs(X, TABLE, LABELS, with_entropy=True)[1], rtol=ERROR)
    kept = te.linear_log_probs(X, TABLE, ids, truncated=True)
    assert np.argwhere(np.isnan(kept).any(-1)).tolist() == [[1, 1]]


EVERY = {
    "candidates": lambda x, table: te.linear_log_probs(
        x, table, CANDIDATES[: len(x), : x.shape[1]]
    ),
    "truncated": lambda x, table: te.linear_log_probs(
        x, table, CANDIDATES[: len(x), : x.shape[1]], truncated=True
    ),
    "top k": lambda x, table: te.linear_top_k(x, table, 3),
    "divergence": lambda x, table: te.linear_divergence(
        x, table, *jax.lax.stop_gradient((x[..., :2], table[:, 1:]))
    ),
}
every = pytest.mark.parametrize("function", EVERY.values(), ids=EVERY)


@every
@pytest.mark.parametrize("x", [X[:0], X[:, :0]], ids=["batch", "length"])
def test_without_tokens_nothing_is_found_and_nothing_moves(function, x):
    for found in jax.tree.leaves(function(x, TABLE)):
        assert found.shape in ((), (*x.shape[:2], 3))
        equal(found, np.zeros_like(found))
    of_table = jax.grad(lambda table: jax.tree.leaves(function(x, table))[0].sum())(TABLE)
    equal(of_table, 0)


@pytest.mark.parametrize("truncated", [False, True])
def test_a_token_without_candidates_has_none(truncated):
    empty = te.linear_log_probs(X, TABLE, CANDIDATES[..., :0], truncated=truncated)
    assert empty.shape == (4, 6, 0)


@every
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bits_are_summed_in_float32(function, dtype):
    """And gradients are rounded once; in bfloat16 those of the logits are, too."""
    arrays = dtype(X), dtype(TABLE)
    loss = lambda *arrays: jnp.square(jax.tree.leaves(function(*arrays))[0]).sum()
    step = jax.jit(lambda *arrays: (function(*arrays), jax.grad(loss, (0, 1))(*arrays)))
    (found, gradients), (wide, of_wide) = step(*arrays), step(*map(jnp.float32, arrays))
    assert [each.dtype for each in jax.tree.leaves(gradients)] == [dtype] * 2
    for got, want in zip(*map(jax.tree.leaves, (found, wide)), strict=True):
        assert got.dtype == want.dtype
        near(got, want, rtol=ERROR, atol=ERROR)
    for got, want in zip(gradients, of_wide, strict=True):
        of_logits = 0 if dtype == jnp.float16 else 2**-8 * np.abs(want).max()
        near(np.float32(got), want, rtol=2**-8, atol=ERROR + of_logits)


@pytest.mark.parametrize("name", ["candidates", "divergence"])
def test_gradients_of_bfloat16_are_products_of_bfloat16(name):
    """In float32 they took three times as long on a GPU, with a wide copy of the table a chunk."""
    loss = lambda *arrays: EVERY[name](*arrays).sum()
    step = jax.jit(jax.grad(loss, (0, 1))).lower(jnp.bfloat16(X), jnp.bfloat16(TABLE))
    products = re.findall(r"dot_general.* : \(tensor<(.*)>, tensor<(.*)>\)", step.as_text())
    assert products
    assert {dtype.split("x")[-1] for operands in products for dtype in operands} == {"bf16"}


@pytest.mark.slow
def test_the_ratio_of_a_policy_to_itself_is_1_to_rounding():
    log_probs = lambda x: linear_log_probs(x, TABLE, LABELS, chunk_size=5)
    reference = jax.jit(log_probs)(X)

    @jax.jit
    def ratio_and_gradient(x):
        ratio, back = jax.vjp(lambda x: jnp.exp(log_probs(x) - reference), x)
        return ratio, back(jnp.ones_like(ratio))

    ratio, (gradient,) = ratio_and_gradient(X)
    near(ratio, np.ones_like(ratio), rtol=2e-6)
    assert np.abs(gradient).max() > 0


def test_labels_that_are_not_counted_have_0_and_not_its_negative():
    got = linear_log_probs(X * np.nan, TABLE, LABELS, mask=MASK & False)
    assert not np.signbit(got).any()
    equal(got, 0)


@pytest.mark.slow
def test_over_a_split_vocabulary_only_numbers_of_tokens_are_sent():
    mesh = mesh_of((4,), ("a",), EXPLICIT)
    with jax.set_mesh(mesh):
        arguments = (
            put(mesh, jnp.ones((64, 8))),
            put(mesh, jnp.ones((400, 8)), "a"),
            put(mesh, jnp.ones(64, int)),
        )
        compiled = jax.jit(linear_log_probs).lower(*arguments).compile()
    sent = collectives.collectives(compiled)
    assert {each.kind for each in sent} == {"all-reduce"}
    assert max(each.largest for each in sent) <= 64


@pytest.mark.slow
def test_backward_memory_is_that_of_a_chunk():
    """With 8 times the tokens, the temporaries grow by less than one array of logits."""

    def temporaries(tokens):
        x, labels = jnp.zeros((tokens, 8)), jnp.zeros(tokens, int)
        loss = lambda x, table: jnp.exp(linear_log_probs(x, table, labels, chunk_size=64)).sum()
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, jnp.zeros((5000, 8))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2048) - temporaries(256) < 4 * 64 * 5000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, r"^temperature: wanted a number above 0 that float32 holds"),
        (
            {"temperature": np.ones((4, 5), "f4")},
            r"^temperature: wanted shape that broadcasts to that of the tokens",
        ),
        ({"temperature": None}, r"^temperature: wanted an array, got None"),
        ({"with_entropy": 1}, r"^with_entropy: wanted a Python bool"),
        ({"truncated": 1}, r"^truncated: wanted a Python bool"),
        ({"truncated": True}, r"^labels: wanted as many axes as x, for truncated, 3, got 2"),
        (
            {"truncated": True, "labels": LABELS[..., None], "with_entropy": True},
            r"^with_entropy: wanted the only choice if truncated, False, got True",
        ),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        linear_log_probs(X, TABLE, **{"labels": LABELS} | options)
