"""Mesh axes, as many for each dimension of an array as split it."""

from jax.sharding import PartitionSpec

Axes = tuple[str, ...]


def per_dimension(spec: PartitionSpec, ndim: int) -> list[Axes]:
    """The mesh axes of each of ndim dimensions."""
    named = [() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in spec]
    return named + [()] * (ndim - len(named))


def spec_of(*axes: Axes) -> PartitionSpec:
    """The spec of dimensions that are split over these axes."""
    return PartitionSpec(*[some if len(some) > 1 else some[0] if some else None for some in axes])


def leading_without(axes: Axes, others: Axes) -> Axes:
    """The leading ones that are none of the others: an array split over these alone is one block."""
    return axes[: next((i for i, axis in enumerate(axes) if axis in others), len(axes))]
