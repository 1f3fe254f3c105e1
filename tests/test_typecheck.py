"""The checks of shapes and dtypes under which the other tests run."""

import beartype.roar
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, Int32
from typecheck import check_arrays

import transformer_embed as te
from transformer_embed._src.array_types import DTypeLike
from transformer_embed._src.tokens import lookup


@check_arrays
def taken(
    table: Float[Array, "v d"], ids: Int32[Array, "t"], style: int = 0
) -> Float[Array, "t d"]:
    return table[ids] if style == 0 else table[ids[:1]] if style == 1 else style


def test_shapes_and_dtypes_of_arguments_and_results_are_checked():
    table, ids = jnp.zeros((3, 2)), jnp.zeros(4, jnp.int32)
    # Other arguments are left to the package.
    assert taken(table, ids, style=False).shape == (4, 2)
    for wrong in ((table[0], ids), (table, ids + 0.5), (table, ids, 1), (table, ids, 2)):
        with pytest.raises(beartype.roar.BeartypeDoorHintViolation):
            taken(*wrong)


def test_dtypes_are_instances_of_their_annotation():
    for dtype in ("float32", jnp.float32, jnp.dtype("float32"), jnp.zeros(0)):
        assert isinstance(dtype, DTypeLike)
    assert not isinstance(32, DTypeLike)


def test_functions_of_the_package_are_checked():
    for function in (lookup.lookup, te.causal_mask, te.Embedder.apply):
        assert function.__code__.co_filename == check_arrays.__code__.co_filename
