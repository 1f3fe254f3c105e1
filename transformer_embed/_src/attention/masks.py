"""Masks as bool arrays, True = may attend, and their conversion to a bias."""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, DTypeLike
from transformer_embed._src.compiled import compiled
from transformer_embed._src.sequences.runs import differs


def padding_mask(ids: ArrayLike, *, pad_id: int) -> Bool[Array, "..."]:
    """Which ids are tokens and not padding.

    Args:
        ids: [..., length], any integer dtype.
        pad_id: the id of padding; any int, -1 for example. There is no default.

    Returns:
        bool [..., length]: `ids != pad_id`.

    Raises:
        TypeError: ids are not integers, or pad_id is not a Python int.
        ValueError: pad_id is outside int32.

    Example:
        >>> import transformer_embed as te
        >>> te.padding_mask([[101, 7, 102, 0]], pad_id=0).tolist()
        [[True, True, True, False]]
    """
    return differs(arguments.as_int32("ids", ids), arguments.int32("pad_id", pad_id))


def causal_mask(length: int) -> Bool[Array, "t t"]:
    """The look-ahead mask of one whole sequence.

    Each position attends to itself and to those before it.

    Args:
        length: T, at least 0 and at most 2**30. For queries at an offset in a cache, use
            `AttentionMask`.

    Returns:
        bool [T, T]; entry [t, s] is `s <= t`.

    Raises:
        TypeError: length is not a Python int.
        ValueError: length is out of its range.

    Example:
        >>> import transformer_embed as te
        >>> te.causal_mask(3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3,
        https://arxiv.org/abs/1706.03762
    """
    # XLA aborts the process if the number of elements overflows.
    return _lower_triangle(arguments.length("length", length, at_most=2**30))


def mask_to_bias(
    mask: ArrayLike, dtype: DTypeLike = jnp.float32, *, value: float | None = None
) -> Float[Array, "..."]:
    """A bias to add to attention logits: 0 where attention is allowed, very negative elsewhere.

    The number elsewhere is half of the dtype's lowest: it leaves room to add another bias, ALiBi's
    for example, without an overflow to -inf. The bias is finite, so a fully masked row gives an
    even softmax rather than NaN, in the forward pass and in the gradient.

    Args:
        mask: bool [...], True = may attend.
        dtype: of the logits, a floating dtype.
        value: the bias where the mask is False, below 0 and finite in the dtype. None:
            `jnp.finfo(dtype).min / 2`. transformers uses `float(jnp.finfo(dtype).min)`, T5X and
            tensor2tensor -1e9.

    Returns:
        [...] of `dtype`: 0 or the value. If jax_enable_x64 is off, float64 becomes float32, with
        JAX's warning.

    Raises:
        TypeError: mask is not bool (a bias or 0/1 floats would be read the wrong way round), dtype
            is not a floating dtype, or value is not a Python number.
        ValueError: value is not below 0, or is not finite in the dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> te.mask_to_bias([True, False], jnp.float16).tolist()
        [0.0, -32752.0]
        >>> te.mask_to_bias([True, False], value=-1e9).tolist()
        [0.0, -1000000000.0]

    Source:
        The additive form of the mask of Vaswani et al., "Attention Is All You Need" (2017), section
        3.2.3, https://arxiv.org/abs/1706.03762, with a finite number for its minus infinity.
    """
    dtype = arguments.result_dtype(dtype)
    if value is not None:
        lowest, value = float(jnp.finfo(dtype).min), arguments.real("value", value)
        # Not only `value < 0`: a bias that is rounded to 0 would mask nothing.
        if not lowest <= value or not float(np.asarray(value).astype(dtype)) < 0:
            want = f"a number below 0 that {dtype} holds, at least {lowest:g}"
            raise arguments.value_error("value", want, f"{value:g}")
    return _bias(arguments.as_mask("mask", mask), dtype, value)


# The functions below are compiled even if the caller is not.
_lower_triangle = compiled(0)(functools.partial(jnp.tri, dtype=bool))


@compiled(1, 2)
def _bias(mask: Bool[Array, "..."], dtype: jnp.dtype, value: float | None) -> Float[Array, "..."]:
    low = jnp.finfo(dtype).min / 2 if value is None else value
    return jnp.where(mask, jnp.zeros((), dtype), jnp.array(low, dtype))
