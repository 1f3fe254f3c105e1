"""What the page Performance says of other libraries, asked of them: where this fails, its table is
out of date."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal
from meshes import EXPLICIT, mesh_of, put

TABLE = np.arange(1.0, 21.0, dtype=np.float32).reshape(10, 2)
LAST_ROW, ROW_5, NAN = TABLE[-1], TABLE[5], np.full(2, np.nan)


def haiku_rows(ids):
    embed = hk.transform(lambda ids: hk.Embed(embedding_matrix=TABLE)(ids))
    return jax.jit(embed.apply)({"embed": {"embeddings": jnp.asarray(TABLE)}}, None, ids)


def flax_rows(ids):
    from flax import nnx  # noqa: PLC0415

    init = lambda *_: jnp.asarray(TABLE)
    embed = nnx.Embed(*TABLE.shape, embedding_init=init, rngs=nnx.Rngs(0))
    return nnx.jit(lambda embed, ids: embed(ids))(embed, ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "expected"),
    [(haiku_rows, [LAST_ROW, LAST_ROW, ROW_5]), (flax_rows, [LAST_ROW, NAN, ROW_5])],
)
def test_ids_outside_the_vocabulary_and_over_an_explicit_mesh_axis(rows, expected):
    """Ours are drawn: NaN, and no error."""
    equal([np.asarray(rows(np.array([id])))[0] for id in (-1, 10, 2**32 + 5)], expected)
    mesh = mesh_of((8,), ("data",), EXPLICIT)
    with jax.set_mesh(mesh), pytest.raises(Exception, match="out_sharding"):
        rows(put(mesh, np.zeros([8, 4], np.int32), "data"))
