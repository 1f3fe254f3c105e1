"""Writes tokens into a cache: positions, keys and values go into the same slots.

In the comments, b counts batch rows, t counts new tokens and s counts slots of the cache.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Bool, Int32

from transformer_embed._src import arguments, conversions
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import split_like, with_whole_rows
from transformer_embed._src.sequences.token_positions import TokenPositions, arrays_of

# What a cache with these arrays holds for new tokens that lack them. (For `places` it holds their
# positions.)
VALUES_IF_ABSENT = {"ends": 2**31 - 1, "block_ids": -1}


def write_cache(cache: Any, new: Any, slot: ArrayLike) -> tuple[Any, Bool[Array, "*b t"]]:
    """Writes new tokens into a cache, and says which of them were written.

    A cache is a tree of arrays [batch, slots, ...]: a `TokenPositions`, which says what each slot
    holds, and the keys and values of any number of layers. All of them are written in one call, so
    the positions of a slot always fit its key and value. Use it in a decoding loop: write the new
    tokens, then attend with `AttentionMask(new_tokens, cache_tokens, causal=True)`.

    Args:
        cache: The tree to write into. Inside `jax.vmap` over batch rows, its arrays have no batch
            axis.
        new: The tree of the new tokens, with arrays [batch, length, ...]. If the batch of an array
            is 1, the same tokens are written into every batch row of the cache. Token positions
            without a batch axis are used for every batch row, too. New tokens may lack block ids
            (they are in no block), or be a plain sequence even if the cache holds a tree.
        slot: Integers, which say where the new tokens go.

            - [] or [batch]: the slot of the first token of each batch row. The others follow it, as
              far as there are slots. A batch row with -1 stays as it is.
            - [1 or batch, length]: the slot of each token. A token with -1 is not written. If
              several tokens have one slot, the last of them is written.

            If `new` has a batch axis, `jnp.where(new.padding_mask, new.positions % slots, -1)`
            makes the cache a ring, which also takes a prompt that is longer than the ring. If the
            new tokens attend to a ring after they are written, the ring needs window + length - 1
            slots for a window of that many tokens. In a smaller ring, the last new tokens overwrite
            keys that the first ones should see.

    Returns:
        The cache, and bool [batch, length], True = written. A token that was not written does not
        see itself.

    Raises:
        TypeError: `slot` does not hold integers.
        ValueError: The trees differ, or arrays in their dtypes or shapes; `slot` has another shape,
            or on the host one is outside the cache and not -1; there are more new tokens than
            slots, and not a slot for each token; or slots of tokens without a batch axis may also
            be those of batch rows.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> cache = te.TokenPositions.empty(2, 4), jnp.zeros([2, 4, 1, 8])
        >>> tokens = te.TokenPositions.from_offset(0, 3)
        >>> (slots, keys), written = te.write_cache(cache, (tokens, jnp.ones([1, 3, 1, 8])), [0, 2])
        >>> slots.positions.tolist(), written.astype(int).tolist()
        ([[0, 1, 2, 0], [0, 0, 0, 1]], [[1, 1, 1], [1, 1, 0]])
        >>> keys[:, :, 0, 0].tolist()
        [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]]

        A prompt of six tokens in a ring of four slots:

        >>> prompt = te.TokenPositions.from_offset([0], 6)
        >>> ring, _ = te.write_cache(te.TokenPositions.empty(1, 4), prompt, prompt.positions % 4)
        >>> ring.positions.tolist()
        [[4, 5, 2, 3]]

    Edge cases:
        - On a device, no error can be raised for a slot. A token whose slot is outside the cache is
          not written, and neither is a batch row whose first slot is negative.
        - If token positions have 64 bits and the cache has 32, numbers beyond int32 are written as
          the lowest or the highest one.
    """
    slot = _as_slots(slot, cache)
    if _has_batch(cache):
        leaves = jax.tree.leaves((cache, new))
        if not all(isinstance(leaf, jax.Array) for leaf in leaves):
            # Numbers on the host are checked before they are narrowed.
            cache = _as_arrays("cache", cache)
            new = _as_arrays("new", new)
        return _written(cache, new, slot)
    # One batch row is written as a batch of one.
    row_cache = _as_arrays("cache", cache, add_batch=True)
    row_new = _as_arrays("new", new, add_batch=True)
    row_slot = slot[None] if slot.ndim == 1 else slot
    written = _written(row_cache, row_new, row_slot)
    return jax.tree.map(lambda array: array[0], written)


def _is_tokens(part: Any) -> bool:
    """Returns whether a part of a cache is token positions."""
    return isinstance(part, TokenPositions)


def _has_batch(cache: Any) -> bool:
    """Returns whether the token positions of a cache have a batch axis, if it has any."""
    parts = jax.tree.leaves(cache, is_leaf=_is_tokens)
    return not any(_is_tokens(part) and np.ndim(part.positions) == 1 for part in parts)


def _as_slots(slot: ArrayLike, cache: Any) -> Int32[Array, "..."]:
    """Converts slots to int32. Slots on the host are inside the cache, or -1."""
    if isinstance(slot, jax.Array):
        return arguments.as_int32("slot", slot)
    shape = np.shape(next(iter(jax.tree.leaves(cache)), 0))
    axis = 1 if _has_batch(cache) else 0
    last = 2**31 - 1
    # A number of slots that is not known here, or a cache without slots, is left to `_written`.
    if len(shape) > axis and isinstance(shape[axis], int):
        last = shape[axis] - 1
    integers = arguments.as_integers("slot", slot, -1, last, "the cache, or -1 to write nothing")
    return arguments.as_int32("slot", integers)


def _as_arrays(name: str, tree: Any, *, add_batch: bool = False) -> Any:
    """Converts a tree to jax arrays, and gives them a batch axis of 1 if asked to."""

    def converted(path: Any, part: Any) -> Any:
        """Converts one part of the tree."""
        if _is_tokens(part):
            # These have a batch axis in any case.
            return TokenPositions(**arrays_of(part))
        array = arguments.as_array(name + jax.tree_util.keystr(path), part)
        array = conversions.on_device(array)
        return array[None] if add_batch else array

    return jax.tree_util.tree_map_with_path(converted, tree, is_leaf=_is_tokens)


# The function is compiled even if the caller is not, and so are its checks of shapes.
@compiled()
def _written(cache: Any, new: Any, slot: Int32[Array, "..."]) -> tuple[Any, Bool[Array, "b t"]]:
    """Writes new tokens, and returns the cache and which tokens were written."""
    new_has_batch = _has_batch(new)
    # Trees that differ are refused below, where their paths are compared.
    if _structure(cache) == _structure(new):
        new = jax.tree.map(_completed, new, cache, is_leaf=_is_tokens)
        cache = jax.tree.map(_with_full_dtypes, cache, is_leaf=_is_tokens)
    held_arrays = _arrays_by_path("cache", cache)
    new_arrays = _arrays_by_path("new", new)
    sizes = _checked_sizes(held_arrays, new_arrays, slot)
    if not new_has_batch:
        _check_one_meaning(slot, sizes)
    target = _target_of(slot, sizes)

    def write(held: Array, added: Array) -> Array:
        whole = with_whole_rows(held, 1)
        added = jnp.broadcast_to(added, (sizes.batch, *added.shape[1:]))
        added = split_like(with_whole_rows(added, 1), whole)
        slots = split_like(with_whole_rows(target.slots, 1), whole)
        write_row = jax.vmap(lambda row, added, slots: row.at[slots].set(added, mode="drop"))
        return split_like(write_row(whole, added, slots), held)

    written = map(write, held_arrays.values(), new_arrays.values())
    return jax.tree.unflatten(jax.tree.structure(cache), written), target.is_written


def _structure(tree: Any) -> Any:
    """Returns the structure of a tree, in which token positions are leaves."""
    return jax.tree.structure(tree, is_leaf=_is_tokens)


def _with_full_dtypes(part: Any) -> Any:
    """Makes token positions anew: `jax.tree.map` may have narrowed their arrays."""
    return TokenPositions(**arrays_of(part)) if _is_tokens(part) else part


def _completed(new: Any, held: Any) -> Any:
    """Gives new token positions the arrays and the dtypes of the cache's token positions."""
    if not (_is_tokens(new) and _is_tokens(held)):
        return new
    arrays = arrays_of(new)
    held_arrays = arrays_of(held)
    defaults = {"places": arrays["positions"]}
    for name, number in VALUES_IF_ABSENT.items():
        defaults[name] = jnp.full_like(arrays["positions"], number)
    for name, held_array in held_arrays.items():
        if name not in arrays and name in defaults:
            arrays[name] = defaults[name]
        if name in arrays:
            is_int32 = held_array.dtype == jnp.int32
            # Numbers beyond int32 become one of its ends, and do not wrap.
            arrays[name] = (
                arguments.as_int32("new", arrays[name])
                if is_int32
                else arrays[name].astype(held_array.dtype)
            )
    return TokenPositions(**arrays)


class _Sizes(NamedTuple):
    """Holds the sizes of a cache and of the tokens that are written into it."""

    # The number of batch rows.
    batch: Any
    # The number of slots of a batch row.
    slot_count: Any
    # The number of new tokens of a batch row.
    length: Any


class _Target(NamedTuple):
    """Says where the new tokens go."""

    # The slot of each token. It is past the end of the cache if the token is not written.
    slots: Int32[Array, "b t"]
    is_written: Bool[Array, "b t"]


def _target_of(slot: Int32[Array, "..."], sizes: _Sizes) -> _Target:
    """Computes the slot of each token, and whether it is written.

    Args:
        slot: The slot of the first token, [] or [batch], or the slot of each token, [1 or batch,
            length].
        sizes: The sizes of the cache and of the new tokens.
    """
    has_slot_of_each_token = slot.ndim == 2
    if has_slot_of_each_token:
        slots = jnp.broadcast_to(slot, (sizes.batch, sizes.length))
        is_written = (slots >= 0) & (slots < sizes.slot_count)
        # Two tokens of a row may have one slot, as in a ring, and the later one is kept.
        if sizes.length != 1:
            is_written &= _is_last_of_slot(slots, sizes.slot_count)
    else:
        first = jnp.broadcast_to(slot, sizes.batch)[:, None]
        slots = first + jnp.arange(sizes.length, dtype=jnp.int32)[None]
        # If the first token of a batch row is before the cache, no token of the row is written.
        is_written = (first >= 0) & (slots < sizes.slot_count)
    # A scatter drops only indices past the end. The index -1 would be the last slot.
    slots = jnp.where(is_written, slots, sizes.slot_count)
    return _Target(slots=slots, is_written=is_written)


def _is_last_of_slot(slots: Int32[Array, "b t"], slot_count: int) -> Bool[Array, "b t"]:
    """Returns whether no later token of the batch row has the same slot."""
    index = jnp.arange(slots.shape[1], dtype=jnp.int32)
    no_token = jnp.full(slot_count, -1, jnp.int32)

    def last_token(slots: Array) -> Array:
        """Returns the last token in the slot of each token, for one batch row."""
        return no_token.at[slots].max(index, mode="drop")[slots]

    return jax.vmap(last_token)(jnp.where(slots < 0, slot_count, slots)) == index[None]


def _arrays_by_path(name: str, tree: Any) -> dict[str, Array]:
    """Returns the arrays of a tree by their paths. Each has an axis for the batch and one more."""
    arrays = {}
    for path, array in jax.tree.leaves_with_path(tree):
        key = jax.tree_util.keystr(path)
        arguments.check_shape(name + key, array.shape, array.ndim > 1, "[batch, length, ...]")
        arrays[key] = array
    return arrays


def _checked_sizes(
    held_arrays: dict[str, Array], new_arrays: dict[str, Array], slot: Array
) -> _Sizes:
    """Returns the sizes of a cache and of new tokens, or raises if arrays do not fit them."""
    if not held_arrays or held_arrays.keys() != new_arrays.keys():
        want = f"the arrays of the cache, {', '.join(held_arrays)}"
        raise arguments.value_error("new", want, ", ".join(new_arrays) or "none")
    batch, slots = next(iter(held_arrays.values())).shape[:2]
    length = next(iter(new_arrays.values())).shape[1]
    # A symbolic length is assumed to fit.
    is_symbolic = export.is_symbolic_dim(length - slots)
    if slot.ndim < 2 and not is_symbolic and length > slots:
        want = f"at most {slots} tokens, as the cache, or a slot for each token (a ring)"
        raise arguments.value_error("new", want, length)
    for path, held in held_arrays.items():
        trailing = held.shape[2:]
        _check_layout(f"cache{path}", held, held.dtype, (batch, slots, *trailing))
        _check_layout(f"new{path}", new_arrays[path], held.dtype, (batch, length, *trailing), 1)
    fits = slot.shape in ((), (batch,), (1, length), (batch, length))
    arguments.check_shape("slot", slot.shape, fits, f"[], [{batch}] or [{batch}, {length}]")
    return _Sizes(batch=batch, slot_count=slots, length=length)


def _check_one_meaning(slot: Array, sizes: _Sizes) -> None:
    """Raises if the slots of tokens [length] may be those of batch rows or of tokens."""
    if slot.shape == (sizes.length,) and sizes.length == sizes.batch and sizes.batch != 1:
        want = (
            f"shape [1, {sizes.length}] for a slot of each token, or new tokens with a batch axis "
            "for a slot of each batch row"
        )
        raise arguments.value_error("slot", want, f"shape [{sizes.length}], which may be either")


def _check_layout(
    name: str, array: Array, dtype: Any, shape: tuple[Any, ...], *other_batches: int
) -> None:
    """Raises unless an array has this dtype and shape, or another of these batch sizes."""
    batches = dict.fromkeys((shape[0], *other_batches))
    fits = array.shape[0] in batches and array.shape[1:] == shape[1:] and array.dtype == dtype
    if not fits:
        sizes = ", ".join([" or ".join(map(str, batches)), *map(str, shape[1:])])
        got = f"{array.dtype}{list(array.shape)}"
        raise arguments.value_error(name, f"{dtype}[{sizes}]", got)
