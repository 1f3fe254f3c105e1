"""What the page Performance says of other libraries, asked of them: where this fails, its table is
out of date."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

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
def test_ids_outside_the_vocabulary(rows, expected):
    equal([rows(np.array([id]))[0] for id in (-1, 10, 2**32 + 5)], expected)


@pytest.mark.slow
def test_ids_over_an_explicit_mesh_axis():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    ids = jax.device_put(np.zeros([8, 4], np.int32), NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        assert jax.jit(te.lookup)(jnp.asarray(TABLE), ids).shape == (8, 4, 2)
        for rows in (haiku_rows, flax_rows):
            with pytest.raises(Exception, match="out_sharding"):
                rows(ids)
