"""Makes masks as bool arrays, True = may attend, and converts them to a bias."""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, DTypeLike
from transformer_embed._src.compiled import compiled
from transformer_embed._src.sequences.runs import differs_from


def padding_mask(ids: ArrayLike, *, pad_id: int) -> Bool[Array, "..."]:
    """Says which ids are tokens and not padding.

    Args:
        ids: The ids, of any integer dtype. Shape [..., length].
        pad_id: The id of padding, any int32, for example -1. There is no default.

    Returns:
        bool [..., length]. Each entry is `ids != pad_id`, so True = a token.

    Raises:
        TypeError: `ids` are not integers, or `pad_id` is not a Python int.
        ValueError: `pad_id` is outside int32.

    Example:
        >>> import transformer_embed as te
        >>> te.padding_mask([[101, 7, 102, 0]], pad_id=0).tolist()
        [[True, True, True, False]]
    """
    return differs_from(arguments.as_int32("ids", ids), arguments.int32("pad_id", pad_id))


def causal_mask(length: int) -> Bool[Array, "t t"]:
    """Makes the look-ahead mask of one whole sequence.

    Each token attends to itself and to the tokens before it. If you also have padding, packed rows,
    or queries at an offset in a cache, use `AttentionMask`.

    Args:
        length: The number of tokens, T, at least 0 and at most 2**30.

    Returns:
        bool [T, T]. Entry [t, s] is `s <= t`.

    Raises:
        TypeError: `length` is not a Python int.
        ValueError: `length` is negative, or is above 2**30.

    Example:
        >>> import transformer_embed as te
        >>> te.causal_mask(3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]

    Source:
        The mask is from Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3,
        https://arxiv.org/abs/1706.03762
    """
    # XLA aborts the process if the number of elements overflows.
    return _lower_triangle(arguments.length("length", length, at_most=2**30))


def mask_to_bias(
    mask: ArrayLike, dtype: DTypeLike = jnp.float32, *, value: float | None = None
) -> Float[Array, "..."]:
    """Converts a mask to a bias: 0 if attention is allowed, and a very negative number if not.

    Add the bias to the attention logits if your attention layer takes no mask. By default, a pair
    that may not attend gets half of the lowest number of the dtype, for example -32752 in float16.
    With the lowest number itself, the sum with a second negative bias, for example ALiBi's, could
    become -inf. A query that sees no key gets equal attention weights for all keys, with a finite
    gradient. With -inf, the softmax and the gradient would be NaN.

    Args:
        mask: Which pairs may attend. Bools of any shape, True = may attend.
        dtype: The floating dtype of the logits.
        value: The bias of pairs that may not attend, below 0 and finite in the dtype. Set it to get
            the same numbers as another project: transformers uses `float(jnp.finfo(dtype).min)`,
            and T5X and tensor2tensor use -1e9. If None, the bias is `jnp.finfo(dtype).min / 2`.

    Returns:
        An array of `dtype`, in the shape of `mask`: 0 where the mask is True, and `value` where the
        mask is False.

    Raises:
        TypeError: `mask` is not bool. (A float bias is refused, because 0 means "may attend" in a
            bias, but "may not attend" in a mask.) `dtype` is not a floating dtype, or `value` is
            not a Python number.
        ValueError: `value` is not below 0, or is not finite in the dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> te.mask_to_bias([True, False], jnp.float16).tolist()
        [0.0, -32752.0]
        >>> te.mask_to_bias([True, False], value=-1e9).tolist()
        [0.0, -1000000000.0]

    Edge cases:
        If jax_enable_x64 is off, float64 becomes float32, with jax's warning.

    Source:
        The bias is the mask of Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3,
        https://arxiv.org/abs/1706.03762, with a finite number in place of minus infinity.
    """
    dtype = arguments.result_dtype(dtype)
    if value is not None:
        value = arguments.real("value", value)
        lowest = float(jnp.finfo(dtype).min)
        # The rounded value is compared with 0, because a bias that is rounded to 0 masks nothing.
        is_valid = lowest <= value and float(np.asarray(value).astype(dtype)) < 0
        if not is_valid:
            want = f"a number below 0 that {dtype} holds, at least {lowest:g}"
            raise arguments.value_error("value", want, f"{value:g}")
    return _bias(arguments.as_mask("mask", mask), dtype, value)


# The functions below are compiled even if the caller is not.
_lower_triangle = compiled(0)(functools.partial(jnp.tri, dtype=bool))


@compiled(1, 2)
def _bias(mask: Bool[Array, "..."], dtype: jnp.dtype, value: float | None) -> Float[Array, "..."]:
    """Computes `mask_to_bias` from checked arguments."""
    low = jnp.finfo(dtype).min / 2 if value is None else value
    return jnp.where(mask, jnp.zeros((), dtype), jnp.array(low, dtype))
