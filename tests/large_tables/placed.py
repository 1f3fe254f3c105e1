"""The state of an optimizer for parameters on a mesh."""

import jax
from jax.sharding import NamedSharding, PartitionSpec


def placed_state(optimizer, params):
    """The state, placed as a step leaves it: under automatic axes, a first step with a state of one device would compile twice."""
    shardings = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(params)}
    (some, *_) = shardings.values()
    everywhere = NamedSharding(some.mesh, PartitionSpec()) if isinstance(some, NamedSharding) else some
    shapes = jax.eval_shape(optimizer.init, params)
    return jax.jit(optimizer.init, out_shardings=jax.tree.map(lambda leaf: shardings.get(leaf.shape, everywhere), shapes))(params)
