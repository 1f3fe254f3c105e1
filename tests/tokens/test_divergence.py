"""The divergence of two output layers, beside whole logits in float64."""

import jax
import jax.numpy as jnp
import jax.test_util
import loss_draws
import numpy as np
import pytest
from compare import equal, near
from drawn import normal
from meshes import EXPLICIT, mesh_of, put
from refused import refused
from test_cross_entropy import products, temporaries

import transformer_embed as te

VOCAB = 13
KINDS = [{"kind": "forward"}, {"kind": "reverse"}, {"kind": "js"}, {"kind": "js", "beta": 0.1}]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
STUDENT, TEACHER = normal(0, VOCAB, 4), normal(1, VOCAB, 3)
X, TEACHER_X = normal(2, 4, 6, 4), normal(3, 4, 6, 3)
BIAS, TEACHER_BIAS = normal(4, VOCAB), normal(5, VOCAB)
WEIGHTS = np.random.default_rng(6).random((4, 6)).astype(np.float32)
MASK = np.random.default_rng(7).random((4, 6)) < 0.7
ARRAYS = X, STUDENT, BIAS, TEACHER_X, TEACHER, TEACHER_BIAS
ERROR = 1e-5


def divergence(arrays, softcap=None, pad_id=None, **options):
    x, table, bias, teacher_x, teacher, teacher_bias = arrays
    output = te.OutputLayer(table, bias, softcap=softcap, scale=0.5, pad_id=pad_id)
    other = te.OutputLayer(teacher, teacher_bias, pad_id=pad_id)
    return te.linear_divergence(x, output, teacher_x, other, **options)


def oracle(arrays, kind, beta=None):
    """Of each token, in float64."""
    names = "x", "table", "bias", "teacher_x", "teacher_table", "teacher_bias"
    given = {name: np.float64(array) for name, array in zip(names, arrays, strict=True)}
    tokens = given["x"].shape[:-1]
    found = loss_draws.oracle(kind, given, {}, tokens=tokens, scale=0.5, beta=beta)
    return found[0].real


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_first_and_second_derivatives_are_finite_differences(kind, reduction):
    options = {"softcap": 1.5, "pad_id": 2, "mask": MASK, "reduction": reduction}

    @jax.jit
    def loss(arrays, temperature, weights):
        return divergence(arrays, temperature=temperature, weights=weights, **options, **kind)

    with jax.enable_x64():
        arrays = jax.tree.map(np.float64, (ARRAYS, np.float32(0.7), WEIGHTS + 0.1))
        jax.test_util.check_grads(loss, arrays, 2, modes="rev", atol=1e-5, rtol=1e-5, eps=1e-4)


@pytest.mark.slow
@every_kind
def test_at_equality_it_is_0_and_its_hessian_is_that_of_a_divergence(kind):
    with jax.enable_x64():
        logits = np.float64([0.5, -1.0, 0.2])
        loss = lambda z: te.linear_divergence(z, np.eye(3), logits, np.eye(3), **kind)
        assert float(loss(logits)) == 0
        p = np.exp(logits) / np.exp(logits).sum()
        beta = kind.get("beta", 0.5)
        size = beta * (1 - beta) if kind["kind"] == "js" else 1
        got = jax.jit(jax.hessian(loss))(logits)
        near(got, size * (np.diag(p) - np.outer(p, p)), atol=1e-12)


@every_kind
def test_near_equality_it_is_accurate_and_never_negative(kind):
    """Differences of log_softmax are off by 2e-7 where the divergence is 5e-7."""
    table = normal(8, 1000, 16)
    x = normal(9, 64, 16)
    for noise in (0, 1e-5, 1e-3):
        near_x = x + np.float32(noise) * normal(10, 64, 16)
        found = te.linear_divergence(near_x, table, x, table, reduction="none", **kind)
        arrays = (2 * near_x, table, np.zeros(1000), x, table, np.zeros(1000))
        want = oracle(arrays, **kind)
        assert np.asarray(found).min() >= 0
        near(found, np.maximum(want, 0), atol=1e-9, rtol=2e-3)


def test_rare_ids_leave_no_nan():
    """Softmax underflows: -200 against -210."""
    student, teacher = np.float32([0, -200, -1]), np.float32([0, -210, -2])
    rare = te.linear_divergence(student, np.eye(3, dtype="f4"), teacher, np.eye(3, dtype="f4"))
    arrays = 2 * student, np.eye(3), np.zeros(3), teacher, np.eye(3), np.zeros(3)
    near(rare, oracle(arrays, "forward"), rtol=1e-5)


@pytest.mark.slow
def test_only_gradients_that_are_asked_for_are_computed():
    loss = lambda *arrays: te.linear_divergence(*arrays)
    arrays = X, STUDENT, TEACHER_X, TEACHER
    functions = loss, jax.grad(loss, (0, 1)), jax.grad(loss, (0, 1, 2, 3))
    assert [products(jax.jit(each), *arrays) for each in functions] == [2, 4, 6]
    equal(loss(*arrays), jax.value_and_grad(loss)(*arrays)[0])
    # Whose logits are more than fit at once.
    shapes = (2**17, 4), (1024, 4), (2**17, 3), (1024, 3)
    many = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert temporaries(functions[1], *many) < 2**17 * 1024 * 4


def test_a_plain_table_beside_a_sharded_one_is_refused():
    mesh = mesh_of((4, 2), ("a", "b"), EXPLICIT)
    want = "teacher_output: wanted a table with rows split over the mesh axes of output's, "
    with jax.set_mesh(mesh):
        whole, split = put(mesh, jnp.ones((16, 4))), put(mesh, jnp.ones((16, 4)), "a")
        for student, teacher, got in (
            (split, whole, "('a',), got ()"),
            (whole, split, "(), got ('a',)"),
        ):
            with refused(ValueError, want + got):
                te.linear_divergence(X, student, X, teacher)
    with refused(ValueError, "teacher_output: wanted output's vocab_size, 16, got 13"):
        te.linear_divergence(
            X, jnp.ones((16, 4)), X, te.OutputLayer(jnp.ones((16, 4)), vocab_size=13)
        )


REFUSED = [
    ({"kind": "symmetric"}, "kind: ... got 'symmetric'"),
    ({"beta": 0.5}, "beta: ... got float 0.5"),
    ({"kind": "js", "beta": 1.0}, "beta: ... 1, got 1.0"),
    ({"weights": WEIGHTS[:, :2]}, "weights: ... [4, 6], got shape [4, 2]"),
]  # fmt: skip


def test_bad_arguments_are_refused():
    for options, message in REFUSED:
        with refused(ValueError, message):
            divergence(ARRAYS, **options)
    with refused(ValueError, "teacher_output: ... 13, got 9"):  # fmt: skip
        te.linear_divergence(X, STUDENT, TEACHER_X, TEACHER[:9])
    with refused(ValueError, "teacher_x: ... got (2,)"):
        te.linear_divergence(X, STUDENT, TEACHER_X[..., :2], TEACHER)
    with refused(ValueError, "teacher_x: ... (4, 6), got (6,)"):
        te.linear_divergence(X, STUDENT, TEACHER_X[0], TEACHER)
    with refused(ValueError, "teacher_output: ... 0, got None"):
        te.linear_divergence(X, te.OutputLayer(STUDENT, pad_id=0), TEACHER_X, TEACHER)
