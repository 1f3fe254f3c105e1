"""Meshes of the first devices, and arrays on them."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(shape, names, kind=AUTO):
    """All axes of one kind, or each of its own."""
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(shape)
    return Mesh(devices, names, axis_types=kinds)


def put(mesh, tree, *axes):
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*axes)))
