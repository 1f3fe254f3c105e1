"""Checks shapes, and whether arguments fit each other."""

from typing import Any

import jax.numpy as jnp

from transformer_embed._src.arguments.messages import describe, value_error


def check_broadcasts(
    name: str,
    shape: tuple[int, ...],
    target: tuple[int, ...],
    other: str = "the ids",
    *,
    with_length: bool = False,
) -> None:
    """Raises a ValueError unless a shape broadcasts to the target.

    Args:
        name: The argument that has the shape.
        shape: The shape.
        target: The shape to broadcast to.
        other: What has the shape `target`, in words.
        with_length: Whether the shape must end in the last size of the target. If False, the last
            size may also be 1, or the shape may be [].
    """
    try:
        fits = jnp.broadcast_shapes(shape, target) == target
    except ValueError:
        fits = False
    want = f"that broadcasts to that of {other}, {list(target)}"
    if with_length and target:
        want += ", with its last axis"
        fits &= shape[-1:] == target[-1:]
    check_shape(name, shape, fits, want)


def check_shape(name: str, shape: tuple[int, ...], is_right: bool, want: str) -> None:
    """Raises a ValueError that shows a shape, unless `is_right` says that the shape is right.

    In the error, `want` describes the right shape.
    """
    if not is_right:
        raise value_error(name, f"shape {want}", f"shape {list(shape)}")


def check_left_out(name: str, value: Any, why: str) -> None:
    """Raises a ValueError if an argument is given. `why` says in the error why it must be None."""
    if value is not None:
        raise value_error(name, f"None, since {why}", describe(value))


def check_same(name: str, what: str, found: Any, expected: Any) -> None:
    """Raises a ValueError unless `found` equals `expected`.

    Both are a size, a shape or another property of the argument `name`. `what` says in the error
    what is expected, such as "the size of embedding_matrix".
    """
    if found != expected:
        raise value_error(name, f"{what}, {expected}", found)
