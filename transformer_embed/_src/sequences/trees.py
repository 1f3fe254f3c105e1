"""Trees of tokens: each sees its ancestors, as in drafts and in answers that share a prompt."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Int32, Integer

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import with_whole_rows
from transformer_embed._src.sequences.runs import index_in_run


def shared_prefix_parents(
    prefix_lengths: ArrayLike, answer_lengths: ArrayLike, length: int
) -> Int32[Array, "b t"]:
    """The parents of rows that hold one prompt and several answers to it, then padding.

    With `TokenPositions.from_parents`, each answer sees the prompt and itself, as in a row of its
    own, and the prompt is computed once.

    Args:
        prefix_lengths: [batch] integers, at least 0: the number of tokens of each prompt.
        answer_lengths: [batch, answers] integers, at least 0.
        length: of the rows. On a device, tokens beyond it are cut, and a row with a negative length
            is all padding.

    Returns:
        int32 [batch, length]: the index of the token before each in its text. This is the prompt's
        last one for the first token of each answer, -1 for the first token of the prompt, and -2 at
        padding.

    Raises:
        TypeError: lengths are not integers, or length is not a Python int.
        ValueError: arrays of other shapes; on the host, lengths out of range, or a row longer than
            length.

    Example:
        >>> import transformer_embed as te
        >>> te.shared_prefix_parents([2], [[2, 1]], 6).tolist()
        [[-1, 0, 1, 2, 1, -2]]
    """
    length = arguments.length("length", length)
    name, of_answers = "prefix_lengths", "answer_lengths"
    prefix = arguments.as_integers(name, prefix_lengths)
    answer = arguments.as_integers(of_answers, answer_lengths)
    prefixes = arguments.as_indices(name, prefix, length, "the row", "batch")
    answers = arguments.as_indices(of_answers, answer, length, "the row", "batch", "answers")
    arguments.check_same(of_answers, f"rows as {name}", answers.shape[0], prefixes.shape[0])
    # Inside jit too, where the arrays made of these are traced.
    if isinstance(prefix, np.ndarray) and isinstance(answer, np.ndarray):
        longest = int((prefix + answer.sum(1)).max(initial=0))
        if not export.is_symbolic_dim(length) and longest > length:
            raise arguments.value_error("length", f"at least {longest}, the longest row", length)
    return _parents(prefixes, answers, length)


def check_parents(parents: np.ndarray) -> None:
    """Raises a ValueError if rows on the host have a cycle, or padding for a parent."""
    rows, ancestors = np.arange(len(parents))[:, None], parents
    is_padding = np.any((parents >= 0) & (parents[rows, parents] == -2))
    for _ in range(parents.shape[1].bit_length()):
        ancestors = np.where(ancestors < 0, ancestors, ancestors[rows, ancestors])
    if is_padding or (ancestors >= 0).any():
        got = "padding for a parent" if is_padding else "a cycle"
        raise arguments.value_error("parents", "trees of tokens", got)


# The functions below are compiled even if the caller is not.


@compiled(2)
def _parents(
    prefixes: Int32[Array, "b"], answers: Int32[Array, "b n"], length: int
) -> Int32[Array, "b t"]:
    index = jnp.arange(length, dtype=jnp.int32)[None]
    lengths = jnp.concatenate([prefixes[:, None], answers], axis=1)
    ends = jnp.cumsum(lengths, axis=1, dtype=jnp.int32)
    is_start = (index[:, None] == ends[:, :-1, None]).any(1)
    parents = jnp.where(is_start, prefixes[:, None] - 1, index - 1)
    # A device cannot refuse a negative length: the whole row becomes padding.
    is_valid = (lengths >= 0).all(axis=1, keepdims=True)
    return jnp.where(is_valid & (index < ends[:, -1:]), parents, -2)


@compiled()
def tree_arrays(
    parents: Int32[Array, "n t"], offset: Integer[Array, "..."]
) -> dict[str, Integer[Array, "b t"]]:
    """The arrays of a `TokenPositions`, from the parents of each row."""
    parents = with_whole_rows(parents)
    length = parents.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)[None]
    # A root above all roots makes these siblings, and ends every path.
    above = jnp.where(parents < 0, length, parents)
    # A device cannot refuse a parent that is outside the row or padding. A token with such a parent
    # becomes its own parent, so its path has no end, as in a cycle.
    is_inside = (parents >= -2) & (parents < length)
    read = jax.vmap(lambda row, index: row.at[index].get(mode="clip"))
    has_padding_above = (parents >= 0) & (read(parents, above) == -2)
    above = jnp.where(is_inside & ~has_padding_above, above, index)
    above = jnp.pad(above, ((0, 0), (0, 1)), constant_values=length)
    # Made here: inside vmap they would be one row for all, which explicit axes do not split.
    ones = jnp.ones_like(above)
    has_end, *trees = jax.vmap(_tree_of_row)(above, ones)
    depths, places, ends = jax.tree.map(lambda array: array + offset.reshape(-1, 1), trees)
    is_token = (has_end & (parents > -2)).astype(jnp.int32)
    is_token = jnp.broadcast_to(is_token, depths.shape)
    arrays = {"positions": depths * is_token, "segment_ids": is_token}
    return arrays | {"places": places, "ends": ends}


def _tree_of_row(above: Int32[Array, "n"], ones: Int32[Array, "n"]) -> tuple[Any, ...]:
    """The depth of each token, its place in depth-first order, and the end of its subtree."""
    length = above.shape[0] - 1
    index = jnp.arange(length + 1, dtype=jnp.int32)
    is_token = index < length
    # Any length of jax.export has fewer than 2**31 tokens.
    steps = 31 if export.is_symbolic_dim(length) else length.bit_length()

    def along_paths(values: Array) -> tuple[Array, Array]:
        """The sum over each token and its ancestors, by paths of doubled length, and their ends."""

        def double(_, carry):
            values, ancestors = carry
            return values + values[ancestors], ancestors[ancestors]

        return jax.lax.fori_loop(0, steps, double, (jnp.where(is_token, values, 0), above))

    def double_down(_, carry):
        sizes, ancestors = carry
        return sizes.at[ancestors].add(jnp.where(is_token, sizes, 0)), ancestors[ancestors]

    sizes = jax.lax.fori_loop(0, steps, double_down, (ones, above))[0]
    # Siblings are neighbours in the order of their parents. Sums over all sizes may wrap int32, but
    # not their differences, which are at most the length.
    order = jnp.argsort(above[:length], stable=True)
    before = jnp.cumsum(sizes[order], dtype=jnp.int32) - sizes[order]
    # jnp.searchsorted fails where explicit mesh axes split the rows.
    first = index[:length] - index_in_run(above[order][None])[0]
    offsets = jnp.zeros_like(above).at[order].set(before - before[first] + 1)
    places, _ = along_paths(offsets)
    depths, ends = along_paths(ones)
    places = places[:length] - 1
    depths = depths[:length] - 1
    return ends[:length] == length, depths, places, places + sizes[:length]
