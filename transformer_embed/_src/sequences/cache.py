"""Writes tokens into a cache: positions, keys and values go into the same slots.

A slot has room for one token in a batch row of the cache. In shapes, b counts batch rows and t
counts new tokens.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Bool, Int32, Shaped

from transformer_embed._src import arguments, conversions
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import split_like, with_whole_rows
from transformer_embed._src.sequences.token_positions import TokenPositions, batch_arrays

# If the cache has one of these arrays and the new tokens do not, the array is filled with this
# number in the slots of the new tokens. The number in `ends` means that all later tokens see the
# token, and the number in `block_ids` that the token is in no block. A missing array `places` is
# filled with the positions of the tokens.
VALUES_IF_ABSENT = {"ends": 2**31 - 1, "block_ids": -1}


def write_cache(cache: Any, new: Any, slot: ArrayLike) -> tuple[Any, Bool[Array, "*b t"]]:
    """Writes new tokens into a cache, and says which of them were written.

    A cache keeps the keys and values of earlier tokens. A slot has room for one token in a batch
    row of the cache. The cache is a pytree of arrays [batch, slots, ...]. It has a `TokenPositions`
    that says which token is in each slot, and the keys and values of any number of layers. One call
    writes all arrays, so the positions in a slot always belong to the key and value in the slot.
    Use it in a decoding loop: write the new tokens, then attend with
    `AttentionMask(new_tokens, cache_tokens, causal=True)`.

    Args:
        cache: The pytree to write into. Inside `jax.vmap` over batch rows, the arrays have the
            shape [slots, ...].
        new: The pytree of the new tokens, with arrays [batch, length, ...]. If an array has a
            single batch row, it is written into every batch row of the cache. Token positions
            without a batch axis are also used for every batch row. The `block_ids` of a cache
            number groups of tokens that always see each other. If the new tokens have no
            `block_ids`, they are in no group. A cache may hold a tree of tokens, in which several
            tokens can follow the same token (`TokenPositions.from_parents`). A causal mask then
            hides each branch from the other branches. If you write an ordinary sequence into such a
            cache, the new tokens are in no branch: a causal mask lets all tokens at later positions
            see them.
        slot: Integers that say into which slots the new tokens are written. You can pass the first
            slot of each batch row, or the slot of each token.

            - Pass the slot for the first new token of each batch row, as integers of shape [] or
              [batch]. The other new tokens are written into the next slots. Tokens past the last
              slot are dropped. If the number for a batch row is -1, nothing is written into this
              batch row.
            - Or pass the slot for each new token, as integers of shape [1 or batch, length]. A
              token with -1 is not written. If several tokens have the same slot, the last of these
              tokens is written.

            A ring is a cache for attention with a window: new tokens overwrite the oldest tokens.
            For a ring of n slots, pass `jnp.where(tokens.padding_mask, tokens.positions % n, -1)`,
            where `tokens` is the `TokenPositions` of the new tokens, with a batch axis. The prompt
            may then be longer than the ring. If you write `length` new tokens first and then
            attend, the ring must still hold the keys that the first new token sees. So for a window
            of w tokens, the ring needs at least `w + length - 1` slots. For example, with a window
            of 4 tokens, the new tokens at the positions 10, 11 and 12 see the positions 7 to 12, so
            the ring needs 6 slots.

    Returns:
        A pair. The first entry is the new cache. The second entry is a bool array [batch, length],
        True = the token was written. A token that was not written cannot attend to itself, because
        the key of the token is not in the cache.

    Raises:
        TypeError: `slot` does not hold integers.
        ValueError: There are several causes:

            - The pytrees differ in structure, or their arrays differ in dtype or do not fit in
              shape.
            - `slot` has a shape that is not listed above.
            - A slot is outside the cache and is not -1. (Slots in a jax array are not checked.)
            - There are more new tokens than slots, and `slot` does not give the slot of each token.
            - `slot` has shape [n], and could mean two things, because the new tokens have no batch
              axis, and there are n batch rows and n new tokens. For one slot per token, pass `slot`
              in shape [1, n]. For the first slot of each batch row, give the new tokens a batch
              axis.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> cache = te.TokenPositions.empty(2, 4), jnp.zeros([2, 4, 1, 8])
        >>> tokens = te.TokenPositions.from_offset(0, 3)
        >>> (slots, keys), written = te.write_cache(cache, (tokens, jnp.ones([1, 3, 1, 8])), [0, 2])
        >>> slots.positions.tolist()
        [[0, 1, 2, 0], [0, 0, 0, 1]]
        >>> written.astype(int).tolist()  # the last token of row 1 is past the last slot
        [[1, 1, 1], [1, 1, 0]]
        >>> keys[:, :, 0, 0].tolist()
        [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]]

        A prompt of six tokens in a ring of four slots:

        >>> prompt = te.TokenPositions.from_offset([0], 6)
        >>> ring, _ = te.write_cache(te.TokenPositions.empty(1, 4), prompt, prompt.positions % 4)
        >>> ring.positions.tolist()
        [[4, 5, 2, 3]]

    Edge cases:
        - If `slot` is a jax array, the slots are not checked. A token whose slot is outside the
          cache is not written. If the first slot of a batch row is negative, the batch row stays as
          it is.
        - If token positions have 64 bits and the cache has 32 bits, a number outside int32 is
          written as the lowest or the highest int32.
    """
    slot = _as_slots(slot, cache)
    if _has_batch(cache):
        leaves = jax.tree.leaves((cache, new))
        are_on_device = all(isinstance(leaf, jax.Array) for leaf in leaves)
        if not are_on_device:
            # `_write` is compiled, and jax.jit would narrow an int64 array of numpy to int32
            # without a check. `_as_arrays` makes jax arrays, and checks those of token positions.
            cache = _as_arrays("cache", cache)
            new = _as_arrays("new", new)
        return _write(cache, new, slot)
    # A cache without a batch axis is written as a batch of one row.
    row_cache = _as_arrays("cache", cache, add_batch=True)
    row_new = _as_arrays("new", new, add_batch=True)
    # Slots [length] are about single tokens, so they get a batch axis, too.
    row_slot = slot[None] if slot.ndim == 1 else slot
    cache_and_is_written = _write(row_cache, row_new, row_slot)
    return jax.tree.map(lambda array: array[0], cache_and_is_written)


def _is_tokens(subtree: Any) -> bool:
    """Returns whether a subtree of a cache is a `TokenPositions`."""
    return isinstance(subtree, TokenPositions)


def _has_batch(cache: Any) -> bool:
    """Returns False if a tree has token positions without a batch axis, and True otherwise."""
    for subtree in jax.tree.leaves(cache, is_leaf=_is_tokens):
        if _is_tokens(subtree) and np.ndim(subtree.positions) == 1:
            return False
    return True


def _as_slots(slot: ArrayLike, cache: Any) -> Int32[Array, "..."]:
    """Converts slots to int32. A slot on the host must be inside the cache, or -1."""
    if isinstance(slot, jax.Array):
        return arguments.as_int32("slot", slot)
    arrays = jax.tree.leaves(cache)
    # All arrays of a cache have the same slots, so the first array says how many there are. If
    # there is no array, or none with an axis of slots, `_write` raises an error.
    shape = np.shape(arrays[0]) if arrays else ()
    slot_axis = 1 if _has_batch(cache) else 0
    last = 2**31 - 1
    # In jax.export, the number of slots may be symbolic, and cannot be compared with a slot. Then
    # every slot up to the largest int32 is allowed.
    if len(shape) > slot_axis and isinstance(shape[slot_axis], int):
        last = shape[slot_axis] - 1
    integers = arguments.as_integers("slot", slot, -1, last, "the cache, or -1 to write nothing")
    return arguments.as_int32("slot", integers)


def _as_arrays(name: str, tree: Any, *, add_batch: bool = False) -> Any:
    """Converts the arrays of a tree to jax arrays; `add_batch` puts a batch axis of 1 in front."""

    def converted(path: Any, leaf: Any) -> Any:
        """Converts one array of the tree, or all arrays of token positions."""
        if _is_tokens(leaf):
            # `batch_arrays` gives the arrays of token positions a batch axis of 1, if they have
            # none. This does not depend on `add_batch`: token positions without a batch axis are
            # allowed beside arrays with one, and are used for every batch row.
            return TokenPositions(**batch_arrays(leaf))
        array = arguments.as_array(name + jax.tree_util.keystr(path), leaf)
        array = conversions.on_device(array)
        return array[None] if add_batch else array

    return jax.tree_util.tree_map_with_path(converted, tree, is_leaf=_is_tokens)


# The function is compiled even if the caller is not, and so are its checks of shapes.
@compiled()
def _write(cache: Any, new: Any, slot: Int32[Array, "..."]) -> tuple[Any, Bool[Array, "b t"]]:
    """Computes `write_cache` for a cache whose arrays have a batch axis."""
    new_has_batch = _has_batch(new)
    cache_structure = jax.tree.structure(cache, is_leaf=_is_tokens)
    new_structure = jax.tree.structure(new, is_leaf=_is_tokens)
    # If the structures differ, nothing is converted, and `_checked_sizes` below raises an error
    # that names the paths of the arrays.
    if cache_structure == new_structure:
        # Each `TokenPositions` of the new tokens gets the same arrays as the one of the cache.
        new = jax.tree.map(_with_arrays_of_cache, new, cache, is_leaf=_is_tokens)
        cache = jax.tree.map(_widened_to_int32, cache, is_leaf=_is_tokens)
    cache_arrays = _arrays_by_path("cache", cache)
    new_arrays = _arrays_by_path("new", new)
    # The numbers of batch rows, of slots and of new tokens.
    sizes = _checked_sizes(cache_arrays, new_arrays, slot)
    if not new_has_batch:
        _check_slot_is_unambiguous(slot, sizes)
    # The slot of each new token, and whether the token is written.
    target = _find_target_slots(slot, sizes)
    written_arrays = [
        _write_array(cache_array, new_arrays[path], target.slots)
        for path, cache_array in cache_arrays.items()
    ]
    written_cache = jax.tree.unflatten(jax.tree.structure(cache), written_arrays)
    return written_cache, target.is_written


def _write_array(
    cache_array: Shaped[Array, "b n ..."], new_array: Shaped[Array, "_ t ..."], slots: Array
) -> Shaped[Array, "b n ..."]:
    """Writes new tokens into one array of a cache of n slots.

    A slot has room for one token in a batch row of the cache.

    Args:
        cache_array: The array of the cache.
        new_array: The same array of the new tokens. If it has one batch row, this row is written to
            every batch row of the cache.
        slots: The slot of each new token, int32 [b, t]. A token whose slot is n is not written.
    """
    # Axis 1 counts slots or tokens. Explicit mesh axes may split it over devices, but a scatter
    # needs all slots of a batch row on one device. So `with_whole_rows` makes axis 1 whole.
    cache_rows = with_whole_rows(cache_array, 1)
    new_rows = jnp.broadcast_to(new_array, (len(slots), *new_array.shape[1:]))
    # The other axes of the new tokens and of their slots, such as the batch, are split over devices
    # as the axes of the cache are.
    new_rows = split_like(with_whole_rows(new_rows, 1), cache_rows)
    row_slots = split_like(with_whole_rows(slots, 1), cache_rows)

    def write_row(cache_row: Array, new_row: Array, slots_of_row: Array) -> Array:
        """Writes the tokens of one batch row, except tokens whose slot is past the end."""
        return cache_row.at[slots_of_row].set(new_row, mode="drop")

    written_rows = jax.vmap(write_row)(cache_rows, new_rows, row_slots)
    return split_like(written_rows, cache_array)


def _widened_to_int32(leaf: Any) -> Any:
    """Converts the arrays of token positions to int32, unless they are wider.

    A user may have narrowed them by `jax.tree.map`. Any other leaf stays as it is.
    """
    return TokenPositions(**batch_arrays(leaf)) if _is_tokens(leaf) else leaf


def _with_arrays_of_cache(new: Any, cached: Any) -> Any:
    """Gives new token positions the same arrays as the cache has, in the same dtypes.

    If the cache has `places` (the numbers by which masks compare tokens) and the new tokens do not,
    the positions of the new tokens are used. A missing array `ends` (of trees) or `block_ids` is
    filled with its number in `VALUES_IF_ABSENT`. If the segment ids are missing, they stay missing,
    and `_write` raises an error. Any other leaf than token positions stays as it is.

    Args:
        new: A leaf of the new tokens.
        cached: The same leaf of the cache.
    """
    if not (_is_tokens(new) and _is_tokens(cached)):
        return new
    arrays = batch_arrays(new)
    positions = arrays["positions"]
    defaults = {"places": positions}
    for name, number in VALUES_IF_ABSENT.items():
        defaults[name] = jnp.full_like(positions, number)
    for name, cached_array in batch_arrays(cached).items():
        if name not in arrays and name in defaults:
            arrays[name] = defaults[name]
        # Only segment ids may still be missing.
        if name in arrays:
            arrays[name] = _as_dtype_of_cache(arrays[name], cached_array.dtype)
    return TokenPositions(**arrays)


def _as_dtype_of_cache(integers: Array, cache_dtype: Any) -> Array:
    """Converts integers to the dtype of the cache, int32 or wider.

    If the dtype is int32, numbers beyond int32 become the lowest or the highest int32.
    """
    if cache_dtype == jnp.int32:
        return arguments.as_int32("new", integers)
    return integers.astype(cache_dtype)


class _Sizes(NamedTuple):
    """Holds the sizes of a cache and of the tokens that are written into it."""

    # The number of batch rows.
    batch: Any
    # The number of slots of a batch row.
    slot_count: Any
    # The number of new tokens of a batch row.
    length: Any


class _TargetSlots(NamedTuple):
    """Says into which slot each new token goes, and whether the token is written."""

    # The slot of each token. If the token is not written, the slot is past the end of the cache.
    slots: Int32[Array, "b t"]
    is_written: Bool[Array, "b t"]


def _find_target_slots(slot: Int32[Array, "..."], sizes: _Sizes) -> _TargetSlots:
    """Computes the slot of each token, and whether it is written.

    A slot has room for one token in a batch row of the cache. For example, 3 tokens with the first
    slot 2, in a cache of 4 slots, get the slots 2 3 4, and the last one is not written.

    Args:
        slot: The slot of the first token, [] or [batch], or the slot of each token, [1 or batch,
            length].
        sizes: The sizes of the cache and of the new tokens.
    """
    has_slot_of_each_token = slot.ndim == 2
    if has_slot_of_each_token:
        slots = jnp.broadcast_to(slot, (sizes.batch, sizes.length))
        is_written = (slots >= 0) & (slots < sizes.slot_count)
        # In a cache that is used as a ring, a long prompt has several tokens for one slot. Only the
        # last of these tokens is written.
        if sizes.length != 1:
            is_written &= _is_last_of_slot(slots, sizes.slot_count)
    else:
        first = jnp.broadcast_to(slot, sizes.batch)[:, None]
        slots = first + jnp.arange(sizes.length, dtype=jnp.int32)[None]
        # If the first slot of a batch row is negative, no token of the row is written.
        is_written = (first >= 0) & (slots < sizes.slot_count)
    # A token that is not written gets the slot past the end of the cache, because the scatter drops
    # indices past the end. It would write index -1 into the last slot.
    slots = jnp.where(is_written, slots, sizes.slot_count)
    return _TargetSlots(slots=slots, is_written=is_written)


def _is_last_of_slot(slots: Int32[Array, "b t"], slot_count: int) -> Bool[Array, "b t"]:
    """Returns whether no later token of the batch row has the same slot.

    For example, of the slots 0 1 2 0, the last three tokens are the last ones of their slots.
    """
    index = jnp.arange(slots.shape[1], dtype=jnp.int32)
    no_tokens = jnp.full(slot_count, -1, jnp.int32)

    def last_index_in_slot(row_slots: Array) -> Array:
        """Returns, for each token of a batch row, the index of the last token in its slot."""
        last_index_by_slot = no_tokens.at[row_slots].max(index, mode="drop")
        # A slot past the end reads the number of the last slot. The caller does not write its token
        # anyway.
        return last_index_by_slot[row_slots]

    # The scatter drops slots past the end, but would take slot -1 for the last slot.
    slots_or_end = jnp.where(slots < 0, slot_count, slots)
    last_indices = jax.vmap(last_index_in_slot)(slots_or_end)
    return last_indices == index[None]


def _arrays_by_path(name: str, tree: Any) -> dict[str, Array]:
    """Returns the arrays of a tree by their paths, or raises if one has fewer than two axes."""
    arrays = {}
    for path, array in jax.tree.leaves_with_path(tree):
        key = jax.tree_util.keystr(path)
        arguments.check_shape(name + key, array.shape, array.ndim > 1, "[batch, length, ...]")
        arrays[key] = array
    return arrays


def _checked_sizes(
    cache_arrays: dict[str, Array], new_arrays: dict[str, Array], slot: Array
) -> _Sizes:
    """Returns the sizes of a cache and of new tokens, or raises a ValueError if they do not fit.

    Args:
        cache_arrays: The arrays of the cache, by their paths.
        new_arrays: The arrays of the new tokens, by their paths.
        slot: The slots, in one of the shapes that `write_cache` takes.
    """
    if not cache_arrays or cache_arrays.keys() != new_arrays.keys():
        want = f"the arrays of the cache, {', '.join(cache_arrays)}"
        raise arguments.value_error("new", want, ", ".join(new_arrays) or "none")
    # All arrays of a tree must have the same sizes, so the first array gives them.
    first_of_cache = next(iter(cache_arrays.values()))
    first_of_new = next(iter(new_arrays.values()))
    batch, slot_count = first_of_cache.shape[:2]
    length = first_of_new.shape[1]
    # In jax.export, both numbers may be symbolic, and then the difference is. Symbolic numbers are
    # assumed to fit.
    is_symbolic = export.is_symbolic_dim(length - slot_count)
    is_too_long = not is_symbolic and length > slot_count
    # With a slot for each token, several tokens may share a slot (a ring).
    has_slot_of_each_token = slot.ndim == 2
    if is_too_long and not has_slot_of_each_token:
        want = f"at most {slot_count} tokens, as the cache, or a slot for each token (a ring)"
        raise arguments.value_error("new", want, length)
    for path, cache_array in cache_arrays.items():
        dtype = cache_array.dtype
        # The axes behind the slots, such as heads and channels.
        other_axes = cache_array.shape[2:]
        cache_shape = (slot_count, *other_axes)
        _check_layout(f"cache{path}", cache_array, dtype, [batch], cache_shape)
        # The new tokens may also have a batch axis of 1: they are then written to every batch row.
        new_batch_sizes = [batch, 1]
        new_shape = (length, *other_axes)
        _check_layout(f"new{path}", new_arrays[path], dtype, new_batch_sizes, new_shape)
    fits = slot.shape in ((), (batch,), (1, length), (batch, length))
    arguments.check_shape("slot", slot.shape, fits, f"[], [{batch}] or [{batch}, {length}]")
    return _Sizes(batch=batch, slot_count=slot_count, length=length)


def _check_slot_is_unambiguous(slot: Array, sizes: _Sizes) -> None:
    """Raises a ValueError if `slot` [n] may be about n batch rows, or about n tokens.

    This can happen only if the new tokens have no batch axis. If they have one, the slots of tokens
    have a batch axis too.
    """
    fits_tokens = slot.shape == (sizes.length,)
    fits_rows = slot.shape == (sizes.batch,)
    if fits_tokens and fits_rows and sizes.batch != 1:
        want = (
            f"shape [1, {sizes.length}] for a slot of each token, or new tokens with a batch axis "
            "for a slot of each batch row"
        )
        raise arguments.value_error("slot", want, f"shape [{sizes.length}], which may be either")


def _check_layout(
    name: str, array: Array, dtype: Any, batch_sizes: list[Any], row_shape: tuple[Any, ...]
) -> None:
    """Raises a ValueError unless an array has this dtype, one of these batch sizes and this shape.

    Args:
        name: The path of the array, for the error.
        array: An array of the cache or of the new tokens.
        dtype: The dtype that the array of the cache has.
        batch_sizes: The sizes that the first axis may have.
        row_shape: The sizes that the other axes must have.
    """
    batch_size, *sizes_of_row = array.shape
    has_right_shape = batch_size in batch_sizes and tuple(sizes_of_row) == row_shape
    if has_right_shape and array.dtype == dtype:
        return
    # If the two possible batch sizes are equal, the error names the size once. (A dictionary drops
    # the second one and keeps the order.)
    different_sizes = dict.fromkeys(str(size) for size in batch_sizes)
    wanted_sizes = [" or ".join(different_sizes)]
    wanted_sizes.extend(str(size) for size in row_shape)
    want = f"{dtype}[{', '.join(wanted_sizes)}]"
    raise arguments.value_error(name, want, f"{array.dtype}{list(array.shape)}")
