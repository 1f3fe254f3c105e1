"""Writes tokens into a cache: their positions, keys and values by one rule."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Bool, Int32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import split_like, with_whole_rows
from transformer_embed._src.sequences.token_positions import TokenPositions, arrays_of, as_made

# Of arrays of token positions, if they are left out; places are positions.
DEFAULTS = {"ends": 2**31 - 1, "block_ids": -1}


def write_cache(cache: Any, new: Any, slot: ArrayLike) -> tuple[Any, Bool[Array, "*b t"]]:
    """A cache with new tokens written into it, and which of the tokens were written.

    A cache is a tree of arrays [batch, slots, ...]: a `TokenPositions`, which says what each slot
    holds, and the keys and values of any number of layers. Each of them is written by this rule,
    so that no slot shows a token whose key is another's: a token that has a slot is written, and
    the others are not.

    Inside `vmap` over rows, token positions are [slots], and the arrays beside them [slots, ...].

    Args:
        cache: the tree.
        new: the tree of the new tokens, with arrays [batch, length, ...]; one row of them may serve
            all rows of the cache. Tokens without block ids are in no block, and tokens that are no
            tree may be written beside one. Token positions of 64 bits are written into a cache of
            int32 as its lowest or highest number if they are beyond it.
        slot: integers. [] or [batch]: the slot of the first token of each row, and the others
            follow it, as far as there are slots; a row with -1 stays as it is. [1 or batch,
            length]: the slot of each token, no two of a row in one slot; a token with -1 is not
            written. On a device, nothing is written into a slot outside the cache, nothing of a row
            whose first slot is negative, and of two tokens for one slot only the later one.

            `jnp.where(new.padding_mask, new.positions % slots, -1)` makes the cache a ring. It
            needs window + length - 1 slots for a window of that many tokens, or the first of the
            new tokens misses keys that the last one overwrites.

    Returns:
        The cache, and bool [batch, length], True = written. A token that was not written does not
        see itself.

    Raises:
        TypeError: slot does not hold integers.
        ValueError: the trees differ, or arrays in their dtypes or shapes; slot has another shape,
            or on the host one is outside the cache and not -1, or is given to two tokens.

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
    """
    leaves = jax.tree.leaves(cache)
    if _is_row(cache):
        slot = arguments.as_array("slot", slot)
        slot = slot[None] if slot.ndim == 1 else slot
        written = write_cache(_with_batch(cache), _with_batch(new), slot)
        return jax.tree.map(lambda array: array[0], written)
    if not isinstance(slot, jax.Array):
        shape = np.shape(next(iter(leaves), 0))
        # Where it is not known here, or wrong, the compiled half says so.
        last = shape[1] - 1 if len(shape) > 1 and isinstance(shape[1], int) else 2**31 - 1
        slot = arguments.as_integers("slot", slot, -1, last, "the cache, or -1 to write nothing")
        if isinstance(slot, np.ndarray) and slot.ndim == 2:
            _check_apart(slot)
    slot = arguments.as_int32("slot", slot)
    if not all(isinstance(leaf, jax.Array) for leaf in [*leaves, *jax.tree.leaves(new)]):
        # Numbers on the host are checked before they are narrowed.
        cache, new = _as_arrays("cache", cache), _as_arrays("new", new)
    return _written(cache, new, slot)


# Compiled even if the caller is not, with the checks of shapes.
@compiled()
def _written(cache: Any, new: Any, slot: Int32[Array, "..."]) -> tuple[Any, Bool[Array, "b t"]]:
    arrays, tokens = _checked(cache, new, slot.shape)
    (rows, slots), length = arrays[0].shape[:2], tokens[0].shape[1]
    if slot.ndim < 2:
        first = jnp.broadcast_to(slot, rows)[:, None]
        places = first + jnp.arange(length, dtype=jnp.int32)[None]
        # A row whose first token is before the cache is left out, not only this token.
        is_written = (first >= 0) & (places < slots)
    else:
        places = jnp.broadcast_to(slot, (rows, length))
        is_written = (places >= 0) & (places < slots)
        is_written &= length == 1 or _is_last_of_slot(places, slots)
    # Of indices outside, only those past the end are dropped: -1 would be the last slot.
    places = jnp.where(is_written, places, slots)

    def write(array: Array, added: Array) -> Array:
        whole = with_whole_rows(array, 1)
        added = jnp.broadcast_to(added, (rows, *added.shape[1:]))
        sides = (split_like(with_whole_rows(side, 1), whole) for side in (added, places))
        put = jax.vmap(lambda row, added, places: row.at[places].set(added, mode="drop"))
        return split_like(put(whole, *sides), array)

    arrays = map(write, arrays, tokens)
    return jax.tree.unflatten(jax.tree.structure(cache), arrays), is_written


def _is_last_of_slot(places: Int32[Array, "b t"], slots: int) -> Bool[Array, "b t"]:
    """Whether no later token of the row has the same slot."""
    index = jnp.arange(places.shape[1], dtype=jnp.int32)
    none = jnp.full(slots, -1, jnp.int32)

    def last_token(places: Array) -> Array:
        return none.at[places].max(index, mode="drop")[places]

    return jax.vmap(last_token)(jnp.where(places < 0, slots, places)) == index[None]


def _checked(cache: Any, new: Any, shape: tuple[int, ...]) -> tuple[list[Array], list[Array]]:
    """The arrays of the cache, and those of the new tokens."""
    structure = functools.partial(jax.tree.structure, is_leaf=_is_tokens)
    if structure(cache) == structure(new):
        new = jax.tree.map(_completed, new, cache, is_leaf=_is_tokens)
        cache = jax.tree.map(_made, cache, is_leaf=_is_tokens)
    arrays, tokens = _by_path("cache", cache), _by_path("new", new)
    if not arrays or arrays.keys() != tokens.keys():
        got, want = ", ".join(tokens) or "none", f"the arrays of the cache, {', '.join(arrays)}"
        raise arguments.value_error("new", want, got)
    rows, slots = next(iter(arrays.values())).shape[:2]
    length = next(iter(tokens.values())).shape[1]
    # A symbolic length is assumed to fit.
    if not export.is_symbolic_dim(length - slots) and length > slots:
        raise arguments.value_error("new", f"at most {slots} tokens, as the cache", length)
    for path, array in arrays.items():
        _check_layout(f"cache{path}", array, array, slots, rows)
        _check_layout(f"new{path}", tokens[path], array, length, rows, 1)
    fits = shape in ((), (rows,), (1, length), (rows, length))
    arguments.check_shape("slot", shape, fits, f"[], [{rows}] or [{rows}, {length}]")
    return [*arrays.values()], [*tokens.values()]


def _is_tokens(part: Any) -> bool:
    return isinstance(part, TokenPositions)


def _is_row(cache: Any) -> bool:
    """Whether the token positions of a cache have no batch axis, as inside vmap."""
    parts = jax.tree.leaves(cache, is_leaf=_is_tokens)
    return any(_is_tokens(part) and np.ndim(part.positions) == 1 for part in parts)


def _made(part: Any) -> Any:
    return as_made(part) if _is_tokens(part) else part


def _with_batch(tree: Any) -> Any:
    """The tree of one row, as that of a batch of one."""

    def with_batch(part: Any) -> Any:
        if _is_tokens(part):
            return TokenPositions(**arrays_of(part))
        return arguments.as_array("new", part)[None]

    return jax.tree.map(with_batch, tree, is_leaf=_is_tokens)


def _completed(new: Any, part: Any) -> Any:
    """New token positions with the arrays and the dtypes that the cache has."""
    if not (_is_tokens(new) and _is_tokens(part)):
        return new
    arrays, slots = arrays_of(new), arrays_of(part)
    positions = arrays["positions"]
    if "places" in slots:
        arrays.setdefault("places", positions)
    for name, number in DEFAULTS.items():
        if name in slots and name not in arrays:
            arrays[name] = jnp.full_like(positions, number)
    for name, array in arrays.items():
        if name in slots:
            dtype = slots[name].dtype
            # To int32, those of a wider dtype are clipped.
            is_int32 = dtype == jnp.int32
            arrays[name] = arguments.as_int32("new", array) if is_int32 else array.astype(dtype)
    return TokenPositions(**arrays)


def _check_apart(slots: np.ndarray) -> None:
    """A ValueError if two tokens of a row have one slot."""
    ordered = np.sort(slots, axis=1)
    is_again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if is_again.any():
        row, n = np.argwhere(is_again)[0]
        got = f"two tokens for slot {ordered[row, n]} of row {row}"
        raise arguments.value_error("slot", "a slot of its own for each token of a row", got)


def _as_arrays(name: str, tree: Any) -> Any:
    """A tree of jax arrays."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: arguments.on_device(
            arguments.as_array(name + jax.tree_util.keystr(path), leaf)
        ),
        jax.tree.map(_made, tree, is_leaf=_is_tokens),
    )


def _by_path(name: str, tree: Any) -> dict[str, Array]:
    """The arrays of a tree by their paths."""
    arrays = {}
    for path, array in jax.tree.leaves_with_path(tree):
        key = jax.tree_util.keystr(path)
        arguments.check_shape(name + key, array.shape, array.ndim > 1, "[batch, length, ...]")
        arrays[key] = array
    return arrays


def _check_layout(name: str, array: Array, like: Array, length: int, *rows: int) -> None:
    """A ValueError unless an array has one of these numbers of rows, and tokens like the other."""
    shape = length, *like.shape[2:]
    if array.shape[0] not in rows or array.shape[1:] != shape or array.dtype != like.dtype:
        sizes = ", ".join([" or ".join(map(str, dict.fromkeys(rows))), *map(str, shape)])
        got = f"{array.dtype}{list(array.shape)}"
        raise arguments.value_error(name, f"{like.dtype}[{sizes}]", got)
