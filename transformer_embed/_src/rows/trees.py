"""Checks and converts trees of parameters, gradients and states."""

import functools
from typing import Any

import jax
import numpy as np

from transformer_embed._src import arguments, conversions
from transformer_embed._src.rows.row_gradient import is_gradient

Tree = Any


def as_arrays(name: str, tree: Tree) -> Any:
    """Converts the leaves of a user's argument, such as the parameters, to jax arrays.

    The argument `grads` may have leaves that are `RowGradient`s, the gradients of some table rows.
    These stay as they are. In other arguments, they raise an error.

    Args:
        name: The name of the argument, such as "params", "state" or "grads".
        tree: The argument.
    """
    may_have_row_gradients = name == "grads"

    def convert(path: Any, leaf: Any) -> Any:
        """Converts a leaf to a jax array, or raises a TypeError that names its path."""
        if may_have_row_gradients and is_gradient(leaf):
            return leaf
        full_name = name + jax.tree_util.keystr(path)
        # A numpy array gets the byte order of this machine. A masked array raises an error.
        native_leaf = arguments.native(full_name, leaf)
        try:
            return conversions.on_device(native_leaf)
        except (TypeError, ValueError, OverflowError) as error:
            raise arguments.type_error(full_name, "an array", arguments.describe(leaf)) from error

    return jax.tree.map_with_path(convert, tree, is_leaf=is_gradient)


def check_shapes(name: str, expected: Tree, tree: Tree) -> None:
    """Raises a ValueError unless two trees have one structure, and leaves of the same shapes.

    A `RowGradient` counts as one leaf, with the shape of its table.
    """
    expected_shapes = _shape_texts(expected)
    found_shapes = _shape_texts(tree)
    missing = sorted(expected_shapes - found_shapes)
    unknown = sorted(found_shapes - expected_shapes)
    if missing or unknown:
        # Only one of the two lists may be empty.
        want = ", ".join(missing) if missing else "no others"
        got = ", ".join(unknown) if unknown else "none of them"
        raise arguments.value_error(name, want, got)
    expected_structure = jax.tree.structure(expected, is_leaf=is_gradient)
    structure = jax.tree.structure(tree, is_leaf=is_gradient)
    arguments.check_same(name, "the tree", structure, expected_structure)


def _shape_texts(tree: Tree) -> set[str]:
    """Returns the path and the shape of each leaf, as text."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_gradient)
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return {f"{keystr(path)} {[*np.shape(leaf)]}" for path, leaf in leaves}
