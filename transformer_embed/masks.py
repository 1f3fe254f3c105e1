"""Attention masks: bool arrays, True = may attend, and the bias that stands for one."""

import functools

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float

from transformer_embed import _checks


def padding_mask(ids: ArrayLike, *, pad_id: int = 0) -> Bool[Array, "..."]:
    """Which ids are tokens rather than padding.

    Args:
        ids: [..., length], any integer dtype.
        pad_id: the id of padding; any int, -1 for example.

    Returns:
        bool [..., length]: `ids != pad_id`.

    Raises:
        TypeError: ids are not integers, or pad_id is no Python int.

    Example:
        >>> import transformer_embed as te
        >>> te.padding_mask([[101, 7, 102, 0]]).tolist()
        [[True, True, True, False]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3, https://arxiv.org/abs/1706.03762, masks illegal connections;
        the padding mask is its case for batches of unequal sequences.
    """
    return _checks.as_int32("ids", ids) != _checks.int32("pad_id", pad_id)


def causal_mask(length: int) -> Bool[Array, "t t"]:
    """The look-ahead mask of one whole sequence: each position attends to itself and what came before it.

    Args:
        length: T, at least 0. For queries at an offset in a cache, use `attention_mask`.

    Returns:
        bool [T, T]; entry [t, s] is `s <= t`.

    Raises:
        TypeError: length is no Python int.
        ValueError: length is negative.

    Example:
        >>> import transformer_embed as te
        >>> te.causal_mask(3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3, https://arxiv.org/abs/1706.03762
    """
    positions = jnp.arange(_checks.integer("length", length, at_least=0), dtype=jnp.int32)
    return positions <= positions[:, None]


def attention_mask(
    *,
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    padding: ArrayLike | None = None,
    causal: bool = True,
) -> Bool[Array, "b 1 t s"]:
    """The mask that an attention layer takes, from the positions of queries and keys, in the smallest shape that broadcasts.

    Query t of row b may attend to key s if `padding[b, s]` and, where causal, `key_positions[b, s] <= query_positions[b, t]`.
    With a cache, give the keys their positions 0..S-1 and the queries theirs, offset included, one row for all or one for each.

    Args:
        query_positions: [T] or [B, T] integers.
        key_positions: [S] or [B, S] integers.
        padding: bool [S] or [B, S], True = a token, as `padding_mask` gives it; None: no padding.
        causal: whether keys after the query are hidden.

    Returns:
        bool [B or 1, 1, T or 1, S], for logits [B, heads, T, S]: the batch axis is 1 where nothing differs between rows,
        the query axis is 1 where nothing differs between queries. A row may be wholly False: see `mask_to_bias`.

    Raises:
        TypeError: positions are not signed integers (uint8 and uint16 pass), padding is not bool, causal is no Python bool.
        ValueError: host positions outside int32, a rank other than 1 or 2, or shapes that do not fit each other.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> ids = jnp.array([[5, 6, 7, 0], [8, 9, 0, 0]])
        >>> mask = te.attention_mask(query_positions=[2], key_positions=jnp.arange(4), padding=te.padding_mask(ids))
        >>> mask.shape, mask[:, 0, 0].tolist()
        ((2, 1, 1, 4), [[True, True, True, False], [True, True, False, False]])

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3, https://arxiv.org/abs/1706.03762
    """
    queries = _rows("query_positions", _checks.as_ordered("query_positions", query_positions))
    keys = _rows("key_positions", _checks.as_ordered("key_positions", key_positions))
    rows, key_length = {keys.shape[0], queries.shape[0]}, keys.shape[1]
    terms = []
    if _checks.flag("causal", causal):
        terms.append(keys[:, None, None, :] <= queries[:, None, :, None])
    if padding is not None:
        tokens = _rows("padding", _checks.as_mask("padding", padding))
        if tokens.shape[1] != key_length:
            raise ValueError(_checks.wanted("padding", f"the length of key_positions, {key_length}", f"shape {list(jnp.shape(padding))}"))
        rows.add(tokens.shape[0])
        terms.append(tokens[:, None, None, :])
    if len(rows - {1}) > 1:
        raise ValueError(_checks.wanted("query_positions, key_positions, padding", "one number of rows, or 1", f"{sorted(rows)} rows"))
    return functools.reduce(jnp.logical_and, terms) if terms else jnp.ones((1, 1, 1, key_length), bool)


def combine_masks(*masks: ArrayLike) -> Bool[Array, "b h t s"]:
    """Where every one of the masks is True.

    Only masks of rank 4 are taken: a [B, S] beside a [T, S] would broadcast without a word wherever B happens to equal T.

    Args:
        *masks: at least one; bool [B or 1, H or 1, T or 1, S or 1].

    Returns:
        bool, of the broadcast shape of all.

    Raises:
        TypeError: a mask that is not bool.
        ValueError: no mask, a rank other than 4, or shapes that do not broadcast.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> tokens = te.padding_mask([[5, 6, 0]])
        >>> te.combine_masks(te.causal_mask(3)[None, None], tokens[:, None, None, :]).astype(int).tolist()
        [[[[1, 0, 0], [1, 1, 0], [1, 1, 0]]]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3, https://arxiv.org/abs/1706.03762
    """
    if not masks:
        raise ValueError(_checks.wanted("masks", "at least one mask", "none"))
    arrays = [_checks.as_mask(f"masks[{n}]", mask) for n, mask in enumerate(masks)]
    for n, array in enumerate(arrays):
        if array.ndim != 4:
            raise ValueError(_checks.wanted(f"masks[{n}]", "rank 4, [batch, heads, queries, keys]", f"shape {list(array.shape)}"))
    _checks.broadcastable("masks", *(array.shape for array in arrays))
    return functools.reduce(jnp.logical_and, arrays)


def mask_to_bias(mask: ArrayLike, dtype: DTypeLike = jnp.float32) -> Float[Array, "..."]:
    """A bias to add to attention logits: 0 where attention is allowed, half of the dtype's lowest value where not.

    Half leaves room to add another bias, ALiBi's for example, without an overflow to -inf. It is finite, so a row that is
    wholly masked gives a softmax over its logits rather than NaN, in the forward pass and in the gradient.

    Args:
        mask: bool [...], True = may attend.
        dtype: of the logits, a floating dtype.

    Returns:
        [...] of `dtype`: 0 or `jnp.finfo(dtype).min / 2`.

    Raises:
        TypeError: mask is not bool (numbers would be read the wrong way round where they are a bias), or dtype is no floating dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> te.mask_to_bias([True, False], jnp.float16).tolist()
        [0.0, -32752.0]

    Source:
        The additive form of the mask of Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3, https://arxiv.org/abs/1706.03762,
        with a finite value for its minus infinity.
    """
    dtype = _checks.floating_dtype("dtype", dtype)
    low = jnp.array(jnp.finfo(dtype).min / 2, dtype)
    return jnp.where(_checks.as_mask("mask", mask), jnp.zeros((), dtype), low)


def _rows(name: str, array: Array) -> Array:
    if array.ndim not in (1, 2):
        raise ValueError(_checks.wanted(name, "shape [length] or [batch, length]", f"shape {list(array.shape)}"))
    return array if array.ndim == 2 else array[None]
