"""Makes trees of tokens, in which each token sees its ancestors: drafts, answers to one prompt.

The parents of a row say, for each token, the index in the row of its parent. A root has -1 in place
of a parent, and padding has -2. A path goes from a token to its parent, to the parent's parent and
so on, up to a root.

The *place* of a token is its index in depth-first order, in which the tokens of a subtree follow
each other. So a subtree is a range of places: it begins at the token's own place, and its end is
one past its last place. For example, if the root 0 has the children 1 and 2, and token 3 is a child
of token 1, the tokens 0 to 3 have the places 0 1 3 2 and the ends 4 3 4 3.

In shapes, b counts batch rows, t counts the tokens of a row, a counts the answers to a prompt and
n = t + 1: a root with the index t is added after the tokens of a row, as the parent of all roots.
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

# The number that padding has in place of a parent.
PADDING = -2


def shared_prefix_parents(
    prefix_lengths: ArrayLike, answer_lengths: ArrayLike, length: int
) -> Int32[Array, "b t"]:
    """Computes each token's parent, in rows of one prompt, several answers to it, and padding.

    Use it with `TokenPositions.from_parents` if you train on several answers to a prompt. Each
    answer then sees the prompt and itself, as if each answer were in another batch row with a copy
    of the prompt. But the prompt is computed only once.

    Args:
        prefix_lengths: The number of tokens of each prompt. Integers of at least 0, shape [batch].
        answer_lengths: The number of tokens of each answer. Integers of at least 0, shape [batch,
            answers].
        length: The number of tokens of a row, with padding.

    Returns:
        The parent of each token, as an index into the row, int32 [batch, length]. The parent is the
        previous token of the same text. The parent of the first token of an answer is the last
        token of the prompt. The first token of the prompt has -1, and padding has -2.

    Raises:
        TypeError: The lengths are not integers, or `length` is not a Python int.
        ValueError: The lengths do not have the shapes above. A length in a list or a numpy array is
            negative. `length` is out of its range, or the prompt and the answers of a row have more
            than `length` tokens.

    Example:
        >>> import transformer_embed as te
        >>> te.shared_prefix_parents([2], [[2, 1]], 6).tolist()
        [[-1, 0, 1, 2, 1, -2]]

    Edge cases:
        The values of jax arrays are not checked. Tokens beyond `length` are cut off, and a row with
        a negative length becomes all padding.
    """
    length = arguments.length("length", length)
    # Lengths on the host stay there for now, for the check below.
    prefix_lengths = arguments.as_integers("prefix_lengths", prefix_lengths)
    answer_lengths = arguments.as_integers("answer_lengths", answer_lengths)
    # `as_indices` makes int32 arrays on a device, [batch] and [batch, answers], after a check that
    # lengths on the host are 0 to `length`. "the row" says in its error what has this length.
    prefixes = arguments.as_indices("prefix_lengths", prefix_lengths, length, "the row", "batch")
    answers = arguments.as_indices(
        "answer_lengths", answer_lengths, length, "the row", "batch", "answers"
    )
    # The error says that answer_lengths must have as many rows as prefix_lengths.
    want = "rows as prefix_lengths"
    arguments.check_same("answer_lengths", want, answers.shape[0], prefixes.shape[0])
    # Inside jit, arrays on a device are traced, and cannot be checked.
    are_on_host = isinstance(prefix_lengths, np.ndarray) and isinstance(answer_lengths, np.ndarray)
    if are_on_host and not export.is_symbolic_dim(length):
        row_lengths = prefix_lengths + answer_lengths.sum(axis=1)
        longest = int(row_lengths.max(initial=0))
        if longest > length:
            raise arguments.value_error("length", f"at least {longest}, the longest row", length)
    return _shared_prefix_parents(prefixes, answers, length)


def check_parents(parents: np.ndarray) -> None:
    """Raises a ValueError if a parent is padding, or if following the parents leads into a cycle.

    Args:
        parents: The index of each token's parent, [b, t], on the host. A root has -1, and padding
            has -2.
    """
    has_parent = parents >= 0
    # For a token without a parent, this reads the number of token 0, and `has_parent` leaves it
    # out.
    grandparents = np.take_along_axis(parents, np.maximum(parents, 0), axis=1)
    if (has_parent & (grandparents == PADDING)).any():
        raise arguments.value_error("parents", "trees of tokens", "padding for a parent")
    # `ancestors` has the index of the ancestor 1, 2, 4, ... levels above each token. If there are
    # fewer levels above the token, the number is -1 or -2, and stays as it is.
    ancestors = parents
    for _ in range(parents.shape[1].bit_length()):
        higher_ancestors = np.take_along_axis(ancestors, np.maximum(ancestors, 0), axis=1)
        ancestors = np.where(ancestors < 0, ancestors, higher_ancestors)
    # Now `ancestors` are more levels above than the row has tokens. An ancestor so far up can only
    # be in a cycle.
    if (ancestors >= 0).any():
        raise arguments.value_error("parents", "trees of tokens", "a cycle")


# The functions below are compiled even if the caller is not.


@compiled(2)
def _shared_prefix_parents(
    prefixes: Int32[Array, "b"], answers: Int32[Array, "b a"], length: int
) -> Int32[Array, "b t"]:
    """Computes the index of each token's parent, from lengths on a device.

    A row has 1 + a texts, one after the other: the prompt and the answers. For a prompt of 2 tokens
    and answers of 2 and 1 tokens, the texts end at 2, 4 and 5, so the answers start at 2 and 4. In
    a row of 6 tokens, the parents are -1 0 1 2 1 -2.
    """
    index = jnp.arange(length, dtype=jnp.int32)[None]
    text_lengths = jnp.concatenate([prefixes[:, None], answers], axis=1)
    text_ends = jnp.cumsum(text_lengths, axis=1, dtype=jnp.int32)
    # An answer starts where the text before it ends. The axes are [batch, answer, token]: each
    # index [1, 1, t] is compared with each start [b, a, 1].
    index_of_token = index[:, None]
    answer_starts = text_ends[:, :-1, None]
    is_start_of_answer = index_of_token == answer_starts
    # Whether the token is the first token of any answer, [b, t].
    starts_answer = is_start_of_answer.any(1)
    last_of_prompt = prefixes[:, None] - 1
    previous_token = index - 1
    parents = jnp.where(starts_answer, last_of_prompt, previous_token)
    # A device cannot refuse a negative length: the whole row becomes padding.
    is_valid = (text_lengths >= 0).all(axis=1, keepdims=True)
    row_end = text_ends[:, -1:]
    is_token = is_valid & (index < row_end)
    return jnp.where(is_token, parents, PADDING)


@compiled()
def tree_arrays(
    parents: Int32[Array, "rows t"], offset: Integer[Array, "..."]
) -> dict[str, Integer[Array, "b t"]]:
    """Computes the arrays of a `TokenPositions` from the parents of each batch row.

    Args:
        parents: The index of each token's parent, [b, t] or [1, t], -1 for a root and -2 for
            padding.
        offset: The position of the roots, [] or [b]. One tree with several offsets gives several
            batch rows.

    Returns:
        Four arrays, by name:

        - `positions`, the number of ancestors plus the offset;
        - `segment_ids`, 1 at tokens and 0 at padding;
        - `places`, the index in depth-first order plus the offset;
        - `ends`, one past the last place of the token's subtree.

        The places and ends of padding have no meaning, because the segment id 0 hides padding.
    """
    # A parent may be anywhere in the row, also in the part of the row that another device has.
    parents = with_whole_rows(parents)
    parents_with_root = _with_added_root(parents)
    # `_trees_of_row` sums these ones over paths and subtrees, to count tokens. They are made here,
    # from the parents, so explicit mesh axes split them as the parents. A row of ones that is made
    # inside vmap would be shared by all batch rows, and would not be split.
    ones = jnp.ones_like(parents_with_root)
    trees = jax.vmap(_trees_of_row)(parents_with_root, ones)

    def plus_offset(row_numbers: Array) -> Array:
        """Adds to the numbers of each batch row the offset of the row."""
        return row_numbers + offset.reshape(-1, 1)

    positions = plus_offset(trees.depths)
    places = plus_offset(trees.places)
    ends = plus_offset(trees.ends)
    # A token is in a tree if the path of its parents ends at a root (`has_root`), and not in a
    # cycle. Until here, padding counts as a root, so padding is left out: it has -2 in `parents`.
    is_in_tree = trees.has_root & (parents > PADDING)
    is_token = is_in_tree.astype(jnp.int32)
    is_token = jnp.broadcast_to(is_token, positions.shape)
    return {
        "positions": positions * is_token,
        "segment_ids": is_token,
        "places": places,
        "ends": ends,
    }


def _with_added_root(parents: Int32[Array, "b t"]) -> Int32[Array, "b n"]:
    """Adds a root to each batch row, after the last token, as the parent of all other roots.

    The added root has the index t, and is its own parent. It makes the other roots siblings, and
    every path that is not in a cycle ends at this root. For example, the parents -1 0 -1 become
    3 0 3 3.

    A device cannot raise an error for a wrong parent: an index outside the row, or the index of
    padding. A token with a wrong parent becomes its own parent, so its path has no end, as in a
    cycle. For example, the parents -1 9 -2 2 become 4 1 4 3 4.
    """
    length = parents.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)[None]
    parent_or_added_root = jnp.where(parents < 0, length, parents)
    is_inside = (parents >= PADDING) & (parents < length)
    has_parent = parents >= 0
    # The parent of each token's parent. For a token whose parent is the added root, the index is
    # past the end of `parents`: "clip" reads the number of the last token, and `has_parent` leaves
    # this number out.
    read_rows = jax.vmap(lambda row, index: row.at[index].get(mode="clip"))
    grandparents = read_rows(parents, parent_or_added_root)
    is_parent_padding = has_parent & (grandparents == PADDING)
    is_valid = is_inside & ~is_parent_padding
    valid_parents = jnp.where(is_valid, parent_or_added_root, index)
    return jnp.pad(valid_parents, ((0, 0), (0, 1)), constant_values=length)


class _Trees(NamedTuple):
    """Holds the trees of one batch row, token by token."""

    # Whether the path of the token ends at a root. A path that leads into a cycle does not.
    has_root: Bool[Array, "t"] | bool
    # The number of ancestors.
    depths: Int32[Array, "t"]
    # The place in depth-first order.
    places: Int32[Array, "t"]
    # One past the last place of the token's subtree.
    ends: Int32[Array, "t"]


def _trees_of_row(parents_with_root: Int32[Array, "n"], ones: Int32[Array, "n"]) -> _Trees:
    """Computes the trees of one batch row.

    Args:
        parents_with_root: A row of `_with_added_root`.
        ones: A one for each token, and for the added root.
    """
    length = parents_with_root.shape[0] - 1
    index = jnp.arange(length + 1, dtype=jnp.int32)
    # True for the tokens of the row, and False for the added root.
    is_in_row = index < length
    subtree_sizes = _subtree_sizes(parents_with_root, is_in_row, ones)
    steps_down = _steps_from_parents(parents_with_root, index, subtree_sizes)
    # The sum of the steps from the added root down to the token, over all tokens on the path.
    steps_to_token = _sum_over_paths(steps_down, parents_with_root, is_in_row)
    # A sum of ones over a path counts the ancestors and the token itself.
    token_counts = _sum_over_paths(ones, parents_with_root, is_in_row)
    # The first root is one step after the added root, but has the place 0.
    places = steps_to_token.sums[:length] - 1
    depths = token_counts.sums[:length] - 1
    # The top of a path is the added root, which has the index `length`, unless there is a cycle.
    has_root = token_counts.path_tops[:length] == length
    return _Trees(
        has_root=has_root,
        depths=depths,
        places=places,
        ends=places + subtree_sizes[:length],
    )


def _number_of_doublings(length: Any) -> int:
    """Returns how often a path of 1 token must be doubled to be longer than `length` tokens."""
    # A length is symbolic inside jax.export. Whatever it will be, it is below 2**31.
    return 31 if export.is_symbolic_dim(length) else length.bit_length()


class _PathSums(NamedTuple):
    """Holds sums over the path of each token, and the top of each path."""

    sums: Int32[Array, "n"]
    # The index of the highest token of the path: the added root, or any token of a cycle.
    path_tops: Int32[Array, "n"]


def _sum_over_paths(
    values: Int32[Array, "n"], parents_with_root: Int32[Array, "n"], is_in_row: Bool[Array, "n"]
) -> _PathSums:
    """Sums, for each token, the values of the token and of all its ancestors in the row.

    For example, the tokens 0 to 3 are a chain: each token is the parent of the next one. The added
    root has the index 4, so parents_with_root are 4 0 1 2 4. If the values are 1 2 3 4 (the value
    of the added root counts as 0), the sums begin as 1 2 3 4 0. One doubling adds to each sum the
    sum of the parent, which gives 1 3 5 7 0. The next one adds the sum of the parent's parent,
    which gives 1 3 6 10 0.

    Args:
        values: A number for each token, and for the added root.
        parents_with_root: A row of `_with_added_root`.
        is_in_row: True for the tokens of the row, and False for the added root.
    """

    def double_paths(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """Doubles the number of tokens that are summed.

        After i steps, `sums` has the sum of 2**i tokens, from each token upwards, and `ancestors`
        has the index of the token 2**i levels above each token.
        """
        sums, ancestors = carry
        # The ancestor's sum goes on where the token's sum stops.
        doubled_sums = sums + sums[ancestors]
        higher_ancestors = ancestors[ancestors]
        return doubled_sums, higher_ancestors

    steps = _number_of_doublings(values.shape[0] - 1)
    values_in_row = jnp.where(is_in_row, values, 0)
    start = values_in_row, parents_with_root
    sums, path_tops = jax.lax.fori_loop(0, steps, double_paths, start)
    return _PathSums(sums=sums, path_tops=path_tops)


def _subtree_sizes(
    parents_with_root: Int32[Array, "n"], is_in_row: Bool[Array, "n"], ones: Int32[Array, "n"]
) -> Int32[Array, "n"]:
    """Counts the tokens of the subtree of each token, including the token itself.

    For example, the tokens 0 to 3 are a chain: each token is the parent of the next one. The added
    root has the index 4, so parents_with_root are 4 0 1 2 4. The sizes of the tokens begin as
    1 1 1 1. Each token adds its size to the size of its parent, which gives 2 2 2 1. Then each adds
    its size to the size of the parent's parent, which gives 4 3 2 1.

    Args:
        parents_with_root: A row of `_with_added_root`.
        is_in_row: True for the tokens of the row, and False for the added root.
        ones: A one for each token, and for the added root.
    """

    def double_depths(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """Doubles the number of levels that are counted in each subtree.

        After i steps, `sizes` counts the tokens of each subtree down to 2**i - 1 levels below its
        root, and `ancestors` has the index of the token 2**i levels above each token. Each token
        then adds its size to the size of that ancestor.
        """
        sizes, ancestors = carry
        # The added root is its own ancestor, and must not count itself again and again.
        sizes_in_row = jnp.where(is_in_row, sizes, 0)
        doubled_sizes = sizes.at[ancestors].add(sizes_in_row)
        higher_ancestors = ancestors[ancestors]
        return doubled_sizes, higher_ancestors

    steps = _number_of_doublings(ones.shape[0] - 1)
    sizes, _ = jax.lax.fori_loop(0, steps, double_depths, (ones, parents_with_root))
    return sizes


def _steps_from_parents(
    parents_with_root: Int32[Array, "n"], index: Int32[Array, "n"], subtree_sizes: Int32[Array, "n"]
) -> Int32[Array, "n"]:
    """Computes how many places each token is after its parent, in depth-first order.

    This is 1 for the first child. For another child, it is 1 plus the sizes of the subtrees of the
    siblings before this child. The last of the n numbers is for the added root, and is 0. For
    example, the root 0 has the children 1 and 2, and token 3 is a child of token 1. The added root
    has the index 4, so parents_with_root are 4 0 0 1 4. The subtree sizes of the tokens are
    4 2 1 1, and the steps are 1 1 3 1 0.

    Args:
        parents_with_root: A row of `_with_added_root`.
        index: 0, 1, ..., t, the index of each token and of the added root.
        subtree_sizes: The number of tokens of each subtree, from `_subtree_sizes`.
    """
    length = index.shape[0] - 1
    # If tokens are sorted by their parents, siblings are neighbours.
    order = jnp.argsort(parents_with_root[:length], stable=True)
    # For each sorted token, the sum of the subtree sizes of all sorted tokens before it. In long
    # rows of deep trees, this sum may be beyond int32, and wraps. Below, only differences between
    # siblings are used. These are at most the length, so they are right even then.
    sizes_before = jnp.cumsum(subtree_sizes[order], dtype=jnp.int32) - subtree_sizes[order]
    # After sorting, siblings are a run of equal parents, so the index in the run counts the
    # siblings before. (jnp.searchsorted could find the first sibling, too, but fails if explicit
    # mesh axes split the batch rows.) `index_in_run` takes a batch, here of one row.
    sorted_index = index[:length]
    sorted_parents = parents_with_root[order]
    siblings_before = index_in_run(sorted_parents[None])[0]
    index_of_first_sibling = sorted_index - siblings_before
    steps_down = jnp.zeros_like(parents_with_root)
    sorted_steps = sizes_before - sizes_before[index_of_first_sibling] + 1
    return steps_down.at[order].set(sorted_steps)
