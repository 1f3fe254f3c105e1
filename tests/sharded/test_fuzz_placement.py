"""Any argument of `shard_params`: the table that was given, on the mesh, or an error of ours that
says what was wanted."""

import jax
import numpy as np
import pytest
from fuzzing import VALUES, call
from jax.sharding import AxisType, PartitionSpec

import transformer_embed as te

TABLE = np.arange(20, dtype=np.float32).reshape(10, 2)
GOOD = {
    "params": {"embed": {"embeddings": TABLE}},
    "rules": {"*embeddings": PartitionSpec("model")},
    "interleave": None,
}


@pytest.mark.parametrize("interleave", [None, "*embeddings"])
@pytest.mark.parametrize(
    "name",
    [
        "rng",
        "batch_axes",
        "virtual_shards",
        "capacity",
    ],
)
def test_any_argument_of_shard_params_keeps_the_table_or_is_named(name, interleave):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    good = GOOD | {"mesh": mesh, "interleave": interleave, "virtual_shards": 8}
    assert call(te.sharding.shard_params, good)[0]
    for value in VALUES:
        returned, placed = call(te.sharding.shard_params, good | {name: value})
        if returned:
            table = placed["embed"]["embeddings"]
            whole = table.in_vocabulary_order() if isinstance(table, te.sharding.Sharded) else table
            np.testing.assert_array_equal(whole, TABLE)
