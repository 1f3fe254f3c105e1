"""What the page Performance says of other libraries, asked of them: where this fails, its table is
out of date."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal
from flax import nnx
from meshes import EXPLICIT, mesh_of, put

import transformer_embed as te

TABLE = np.arange(1.0, 21.0, dtype=np.float32).reshape(10, 2)
LAST_ROW, ROW_5, NAN = TABLE[-1], TABLE[5], np.full(2, np.nan)


def haiku_rows(ids):
    embed = hk.without_apply_rng(hk.transform(lambda ids: hk.Embed(embedding_matrix=TABLE)(ids)))
    params = embed.init(jax.random.key(0), jnp.zeros(1, jnp.int32))
    return jax.jit(embed.apply)(params, ids)


def flax_rows(ids):
    embed = nnx.Embed(*TABLE.shape, rngs=nnx.Rngs(0))
    nnx.update(embed, {"embedding": nnx.Param(jnp.asarray(TABLE))})
    return nnx.jit(lambda embed, ids: embed(ids))(embed, ids)


def our_rows(ids):
    return te.lookup(TABLE, ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (our_rows, [NAN, NAN, NAN]),
        (haiku_rows, [LAST_ROW, LAST_ROW, ROW_5]),
        (flax_rows, [LAST_ROW, NAN, ROW_5]),
    ],
)
def test_ids_outside_the_vocabulary_and_over_an_explicit_mesh_axis(rows, expected):
    equal([rows(np.array([id]))[0] for id in (-1, 10, 2**32 + 5)], expected)
    mesh = mesh_of((8,), ("data",), EXPLICIT)
    with jax.set_mesh(mesh):
        ids = put(mesh, np.zeros([8, 4], np.int32), "data")
        if rows is our_rows:
            assert jax.jit(rows)(ids).shape == (8, 4, 2)
        else:
            with pytest.raises(Exception, match="out_sharding"):
                rows(ids)
