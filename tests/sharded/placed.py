"""The state of an optimizer, placed as a step leaves it: with a state that is placed otherwise, the
first step would compile twice."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def placed_state(optimizer, params):
    """On a mesh, where the parameters are. On one device, uncommitted as they are: a step returns
    all of it committed if any is."""
    shardings = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(params)}
    (some, *_) = shardings.values()
    if not isinstance(some, NamedSharding):
        return optimizer.init(params)
    everywhere = NamedSharding(some.mesh, PartitionSpec())
    state = optimizer.init(jax.tree.map(np.asarray, params))
    return jax.device_put(
        state, jax.tree.map(lambda leaf: shardings.get(leaf.shape, everywhere), state)
    )
