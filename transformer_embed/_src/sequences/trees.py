"""Makes trees of tokens, in which each token sees its ancestors: drafts, answers to one prompt.

In shapes, b counts batch rows, t counts the tokens of a row, a counts the answers to a prompt and
n = t + 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Bool, Int32, Integer

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import with_whole_rows
from transformer_embed._src.sequences.runs import index_in_run

# What stands for the parent of padding.
PADDING = -2


def shared_prefix_parents(
    prefix_lengths: ArrayLike, answer_lengths: ArrayLike, length: int
) -> Int32[Array, "b t"]:
    """Computes the parents of rows that hold one prompt, several answers to it, then padding.

    Use it with `TokenPositions.from_parents` if you train on several answers to a prompt. Each
    answer then sees the prompt and itself, as in a row of its own, and the prompt is computed once.

    Args:
        prefix_lengths: Integers of at least 0, [batch], the number of tokens of each prompt.
        answer_lengths: Integers of at least 0, [batch, answers], the number of tokens of each
            answer.
        length: The length of the rows.

    Returns:
        int32 [batch, length], the index of the token before each token in its text. The first token
        of each answer gets the prompt's last token, the first token of the prompt gets -1, and
        padding gets -2.

    Raises:
        TypeError: The lengths are not integers, or `length` is not a Python int.
        ValueError: An array has another shape; or on the host, a length is out of range, or a row
            is longer than `length`.

    Example:
        >>> import transformer_embed as te
        >>> te.shared_prefix_parents([2], [[2, 1]], 6).tolist()
        [[-1, 0, 1, 2, 1, -2]]

    Edge cases:
        A device cannot raise errors. There, tokens beyond `length` are cut, and a row with a
        negative length is all padding.
    """
    length = arguments.length("length", length)
    prefix = arguments.as_integers("prefix_lengths", prefix_lengths)
    answer = arguments.as_integers("answer_lengths", answer_lengths)
    prefixes = arguments.as_indices("prefix_lengths", prefix, length, "the row", "batch")
    answers = arguments.as_indices("answer_lengths", answer, length, "the row", "batch", "answers")
    want = "rows as prefix_lengths"
    arguments.check_same("answer_lengths", want, answers.shape[0], prefixes.shape[0])
    # Inside jit, arrays that are made of lengths on the host are traced. So the lengths themselves
    # are looked at.
    if isinstance(prefix, np.ndarray) and isinstance(answer, np.ndarray):
        longest = int((prefix + answer.sum(1)).max(initial=0))
        if not export.is_symbolic_dim(length) and longest > length:
            raise arguments.value_error("length", f"at least {longest}, the longest row", length)
    return _shared_prefix_parents(prefixes, answers, length)


def check_parents(parents: np.ndarray) -> None:
    """Raises a ValueError if batch rows on the host have a cycle, or padding for a parent."""
    rows = np.arange(len(parents))[:, None]
    if np.any((parents >= 0) & (parents[rows, parents] == PADDING)):
        raise arguments.value_error("parents", "trees of tokens", "padding for a parent")
    # Each step doubles the distance of the ancestor that is known.
    ancestors = parents
    for _ in range(parents.shape[1].bit_length()):
        ancestors = np.where(ancestors < 0, ancestors, ancestors[rows, ancestors])
    if (ancestors >= 0).any():
        raise arguments.value_error("parents", "trees of tokens", "a cycle")


# The functions below are compiled even if the caller is not.


@compiled(2)
def _shared_prefix_parents(
    prefixes: Int32[Array, "b"], answers: Int32[Array, "b a"], length: int
) -> Int32[Array, "b t"]:
    """Computes `shared_prefix_parents` from lengths on a device."""
    index = jnp.arange(length, dtype=jnp.int32)[None]
    lengths = jnp.concatenate([prefixes[:, None], answers], axis=1)
    ends = jnp.cumsum(lengths, axis=1, dtype=jnp.int32)
    is_start = (index[:, None] == ends[:, :-1, None]).any(1)
    parents = jnp.where(is_start, prefixes[:, None] - 1, index - 1)
    # A device cannot refuse a negative length: the whole row becomes padding.
    is_valid = (lengths >= 0).all(axis=1, keepdims=True)
    return jnp.where(is_valid & (index < ends[:, -1:]), parents, PADDING)


@compiled()
def tree_arrays(
    parents: Int32[Array, "rows t"], offset: Integer[Array, "..."]
) -> dict[str, Integer[Array, "b t"]]:
    """Computes the arrays of a `TokenPositions` from the parents of each batch row.

    Returns:
        `positions`, the number of ancestors; `segment_ids`, 1 at tokens and 0 at padding; `places`,
        the index in depth-first order; and `ends`, one past the last place of the token's subtree.
        The offset is added to all but the segment ids, so one tree may give several rows. Padding
        keeps its place and its end, because its segment id alone hides it.
    """
    # The tree of a token may be anywhere in its row.
    parents = with_whole_rows(parents)
    parent_or_root = _parent_or_root(parents)
    # The ones are made here, because inside vmap they would be one row for all batch rows, which
    # explicit mesh axes do not split.
    ones = jnp.ones_like(parent_or_root)
    trees = jax.vmap(_tree_of_row)(parent_or_root, ones)

    def from_offset(array: Array) -> Array:
        """Adds the offset of each batch row."""
        return array + offset.reshape(-1, 1)

    positions = from_offset(trees.depths)
    places = from_offset(trees.places)
    ends = from_offset(trees.ends)
    is_token = (trees.has_root & (parents > PADDING)).astype(jnp.int32)
    is_token = jnp.broadcast_to(is_token, positions.shape)
    return {
        "positions": positions * is_token,
        "segment_ids": is_token,
        "places": places,
        "ends": ends,
    }


def _parent_or_root(parents: Int32[Array, "b t"]) -> Int32[Array, "b n"]:
    """Returns the parent of each token, and adds one token that is the parent of all roots.

    The added token has the index `length`, and is its own parent. It makes the roots siblings, and
    ends every path.
    """
    length = parents.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)[None]
    parent_or_root = jnp.where(parents < 0, length, parents)
    # A device cannot refuse a parent that is outside the row or padding. A token with such a parent
    # becomes its own parent, so its path has no end, as in a cycle.
    is_inside = (parents >= PADDING) & (parents < length)
    # The added token has no parent to read yet. "clip" reads another token's, which `parents >= 0`
    # leaves out.
    read_rows = jax.vmap(lambda row, index: row.at[index].get(mode="clip"))
    has_padding_above = (parents >= 0) & (read_rows(parents, parent_or_root) == PADDING)
    parent_or_root = jnp.where(is_inside & ~has_padding_above, parent_or_root, index)
    return jnp.pad(parent_or_root, ((0, 0), (0, 1)), constant_values=length)


class _Tree(NamedTuple):
    """Holds the trees of one batch row, token by token."""

    # Whether the path from the token upwards ends.
    has_root: Bool[Array, "t"] | bool
    # The number of ancestors.
    depths: Int32[Array, "t"]
    # The place in depth-first order.
    places: Int32[Array, "t"]
    # One past the last place of the token's subtree.
    ends: Int32[Array, "t"]


def _tree_of_row(parent_or_root: Int32[Array, "n"], ones: Int32[Array, "n"]) -> _Tree:
    """Computes the trees of one batch row.

    Args:
        parent_or_root: A row of `_parent_or_root`.
        ones: As many ones.
    """
    length = parent_or_root.shape[0] - 1
    index = jnp.arange(length + 1, dtype=jnp.int32)
    is_token = index < length
    # Any length of jax.export has fewer than 2**31 tokens.
    steps = 31 if export.is_symbolic_dim(length) else length.bit_length()

    def sum_over_paths(values: Array) -> tuple[Array, Array]:
        """Sums values over each token and its ancestors, and finds where their paths end.

        A step doubles the length of the paths.
        """

        def double(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            """Doubles the length of the paths that are summed."""
            sums, ancestors = carry
            return sums + sums[ancestors], ancestors[ancestors]

        return jax.lax.fori_loop(0, steps, double, (jnp.where(is_token, values, 0), parent_or_root))

    def double_subtrees(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """Adds the sizes of subtrees to an ancestor, twice as far up in each step."""
        sizes, ancestors = carry
        sizes = sizes.at[ancestors].add(jnp.where(is_token, sizes, 0))
        return sizes, ancestors[ancestors]

    sizes, _ = jax.lax.fori_loop(0, steps, double_subtrees, (ones, parent_or_root))
    # The offset of a token is the number of places from its parent to the token: 1, and the sizes
    # of the siblings before it. In the order of their parents, siblings are neighbours. Sums
    # over all sizes may wrap int32, but not their differences, which are at most the length.
    order = jnp.argsort(parent_or_root[:length], stable=True)
    sizes_before = jnp.cumsum(sizes[order], dtype=jnp.int32) - sizes[order]
    # The first sibling of each token. jnp.searchsorted would fail if explicit mesh axes split the
    # batch rows.
    first_sibling = index[:length] - index_in_run(parent_or_root[order][None])[0]
    # The added token has the offset 0.
    offsets = jnp.zeros_like(parent_or_root)
    offsets = offsets.at[order].set(sizes_before - sizes_before[first_sibling] + 1)
    # A token's place is the sum of the offsets from the root to it.
    places, _ = sum_over_paths(offsets)
    depths, path_ends = sum_over_paths(ones)
    places = places[:length] - 1
    depths = depths[:length] - 1
    return _Tree(
        has_root=path_ends[:length] == length,
        depths=depths,
        places=places,
        ends=places + sizes[:length],
    )
