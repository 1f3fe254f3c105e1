"""The most probable ids of an output layer, beside those of whole logits in float64."""

import collectives
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal, near
from drawn import normal
from meshes import EXPLICIT, mesh_of, put
from references import linear_logits, linear_top_k

import transformer_embed as te

VOCAB, WIDTH = 13, 4
X, TABLE, BIAS = normal(0, 4, 6, WIDTH), normal(1, VOCAB, WIDTH), normal(2, VOCAB)
BANS = np.where(np.arange(VOCAB) % 3 == 1, np.float32(-np.inf), BIAS)
OPTIONS = [
    {"k": 1},
    {"k": VOCAB, "bias": BIAS, "chunk_size": 5},
    {"k": 3, "pad_id": 0, "softcap": 1.5, "scale": 2.0},
    # Fewer than k ids are left.
    {"k": VOCAB - 1, "pad_id": 4, "bias": BANS},
    {"k": 9, "pad_id": -100, "bias": BANS, "softcap": 2.0},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_they_are_those_of_whole_logits(options):
    k, options = options["k"], {**options}
    del options["k"]
    found, ids = linear_top_k(X, TABLE, k, **options)
    options.pop("chunk_size", None)
    logits = linear_logits(X, TABLE, **options)
    if options.get("pad_id", -1) >= 0:
        logits = logits.at[..., options["pad_id"]].set(-np.inf)
    want = jax.nn.log_softmax(logits)
    near(found, -np.sort(-want, -1)[..., :k], rtol=1e-5)
    near(found, np.take_along_axis(want, ids, -1), rtol=1e-5)
    assert all(len({*row}) == k for row in ids.reshape(-1, k).tolist())


def test_of_equal_ids_the_lower_one_is_first_and_no_gradient_is_left():
    table = np.float32([[0], [1], [2], [1], [2], [2]])
    assert te.linear_top_k([1.0], table, 5)[1].tolist() == [2, 4, 5, 1, 3]
    of_x = jax.grad(lambda x: te.linear_top_k(x, table, 2)[0].sum())(jnp.ones(1))
    equal(of_x, 0)


@pytest.mark.slow
def test_a_shard_sends_k_numbers_and_ids_of_a_token():
    mesh = mesh_of((8,), ("a",), EXPLICIT)
    with jax.set_mesh(mesh):
        arrays = put(mesh, jnp.ones((16, 8))), put(mesh, jnp.ones((800, 8)), "a")
        program = jax.jit(lambda x, table: te.linear_top_k(x, table, 3)).lower(*arrays).compile()
    assert max(each.largest for each in collectives.collectives(program)) <= 8 * 16 * 3


@pytest.mark.parametrize(
    ("k", "message"),
    [(0, "at least 1, got 0"), (VOCAB, f"at most {VOCAB - 1}, got {VOCAB}"), (2.0, "Python int")],
)
def test_a_k_out_of_range_is_refused(k, message):
    with pytest.raises((TypeError, ValueError), match=f"^k: wanted .*{message}"):
        linear_top_k(X, TABLE, k, pad_id=3)
