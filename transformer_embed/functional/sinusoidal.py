"""Sinusoidal position encodings: any position, tables, every published layout and denominator."""

import functools
import math

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from transformer_embed import _checks
from transformer_embed.functional import phase

LAYOUTS = ("interleaved", "sin_cos", "cos_sin")
ODD = ("truncate", "round_up", "zero")


def sinusoidal_encoding(
    positions: ArrayLike,
    d_model: int,
    *,
    base: float = 10_000.0,
    layout: str = "interleaved",
    shift: float | None = None,
    odd: str = "truncate",
    frequency_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "... d"]:
    """The sinusoidal encoding of each position, exact at any position.

    With the defaults, for i in 0..d_model//2 - 1:

        encoding[..., 2i]     = sin(position * base ** (-2i / d_model))
        encoding[..., 2i + 1] = cos(position * base ** (-2i / d_model))

    There is no table and no longest position: positions may be traced, negative, fractional, of any shape.

    Args:
        positions: [...]; any integer dtype, or float32 for fractional positions. (Host float64, Python floats among them, is rounded to
            float32, and refused where that would be another integer; so is a jax float64, which gives NaN there.)
        d_model: channels, at least 1; odd ones too.
        base: the wavelengths grow from 2 pi towards 2 pi times this; above 0.
        layout: the order of the channels.
            `"interleaved"`: sine and cosine of each frequency side by side (Vaswani et al.; Keras, trax, XLM).
            `"sin_cos"`: all sines, then all cosines (tensor2tensor, fairseq, Marian, CTRL, Flax's examples, MaxText, Whisper).
            `"cos_sin"`: all cosines, then all sines (MusicGen; diffusers with `flip_sin_to_cos`).
        shift: the denominator of the exponents. `None`: frequency i is base ** (-2i / d_model) (Vaswani et al.). A number s:
            base ** (-i / (d_model // 2 - s)); 1 is tensor2tensor's, fairseq's and Whisper's, 0 and 1 are met in diffusers
            (`downscale_freq_shift`).
        odd: what an odd d_model means.
            `"truncate"`: d_model as it is, the last cosine (in `"cos_sin"`, sine) left out (Keras; Marian and RoFormer).
            `"round_up"`: the encoding for d_model + 1 without its last channel (the positional-encodings package).
            `"zero"`: d_model // 2 pairs and a last channel of zeros (tensor2tensor, fairseq, MusicGen, diffusers).
        frequency_scale: multiplies every frequency, as tensor2tensor's `min_timescale` does (its `max_timescale` is
            `base * min_timescale`) and diffusers' `scale`. Above 0.
        dtype: of the result; the encoding is computed in float32 and rounded once.

    Returns:
        [..., d_model] of `dtype`, in [-1, 1]. Maximum absolute error in float32: 6.0e-8, for every int32 and uint32
        position, and for float32 positions below 2**24 in magnitude (there with frequency_scale up to 1000). NaN for a
        64-bit integer outside int32, and for a float that is not finite or is 2**31 or more in magnitude. Differentiable
        in float positions, to any order.

    Raises:
        TypeError: positions are neither integers nor float32; d_model is no int; dtype is no floating dtype.
        ValueError: an unknown layout or odd; a base or frequency_scale that is not above 0; a shift that leaves no denominator.

    Example:
        >>> import transformer_embed as te
        >>> import numpy as np
        >>> print(np.asarray(te.sinusoidal_encoding([0, 1_000_000_000], 4)).round(3))
        [[ 0.     1.     0.     1.   ]
         [ 0.546  0.838  0.421 -0.907]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.5, https://arxiv.org/abs/1706.03762. The other
        conventions are those of the named projects' code.
    """
    encoding = phase.sinusoid(positions, sinusoidal_channels(d_model, base, layout, shift, odd, frequency_scale))
    return encoding.astype(_checks.floating_dtype("dtype", dtype))


def sinusoidal_table(
    length: int,
    d_model: int,
    *,
    base: float = 10_000.0,
    layout: str = "interleaved",
    shift: float | None = None,
    odd: str = "truncate",
    frequency_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "t d"]:
    """The sinusoidal encodings of positions 0..length-1.

    Args:
        length: number of positions, at least 0.
        d_model: as in `sinusoidal_encoding`, as are all options.
        base: as above.
        layout: as above.
        shift: as above.
        odd: as above.
        frequency_scale: as above.
        dtype: as above.

    Returns:
        [length, d_model] of `dtype`: `sinusoidal_encoding(jnp.arange(length), d_model, ...)`.

    Raises:
        TypeError: length is no int; and as `sinusoidal_encoding`.
        ValueError: length is negative; and as `sinusoidal_encoding`.

    Example:
        >>> import transformer_embed as te
        >>> import numpy as np
        >>> print(np.asarray(te.sinusoidal_table(2, 4)).round(3))
        [[0.    1.    0.    1.   ]
         [0.841 0.54  0.01  1.   ]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.5, https://arxiv.org/abs/1706.03762
    """
    positions = jnp.arange(_checks.length("length", length), dtype=jnp.int32)
    return sinusoidal_encoding(
        positions, d_model, base=base, layout=layout, shift=shift, odd=odd, frequency_scale=frequency_scale, dtype=dtype
    )


def sinusoidal_grid(
    shape: tuple[int, ...],
    d_model: int,
    *,
    positions: ArrayLike | None = None,
    axes: tuple[int, ...] | None = None,
    base: float = 10_000.0,
    layout: str = "interleaved",
    shift: float | None = None,
    frequency_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "... d"]:
    """The sinusoidal encodings of a grid's points, in 2-D for images, 3-D for video: each axis has an equal part of the channels.

    Part k, d_model / len(shape) channels wide, is the `sinusoidal_encoding` of the coordinate along axis axes[k].

    Args:
        shape: points along each axis, [height, width] for an image; at least one axis.
        d_model: channels, a multiple of the number of axes.
        positions: [...] integers, points of the grid counted row by row (the last axis fastest), as a sequence of tokens has
            them. None: all points, in the grid's shape.
        axes: the axis that each part encodes, a permutation. None: the first axis first (tensor2tensor, the positional-encodings
            package); (1, 0) is width first (MAE, diffusers, big_vision).
        base: as in `sinusoidal_encoding`, for a part's channels, as are the next ones.
        layout: as above; MAE's, diffusers' and big_vision's is `"sin_cos"`.
        shift: as above; 1 in big_vision.
        frequency_scale: as above.
        dtype: of the result.

    Returns:
        [*shape, d_model], or [*positions.shape, d_model], of `dtype`, in [-1, 1]; the error is that of `sinusoidal_encoding`. NaN for a
        position outside the grid.

    Raises:
        TypeError: as `sinusoidal_encoding`.
        ValueError: a negative length, no axis, a d_model that the axes do not divide, axes that are no permutation; and as
            `sinusoidal_encoding`.

    Example:
        >>> import transformer_embed as te
        >>> te.sinusoidal_grid((14, 14), 768, axes=(1, 0), layout="sin_cos").shape
        (14, 14, 768)

    Source:
        Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), appendix D.4, https://arxiv.org/abs/2010.11929;
        He et al., "Masked Autoencoders Are Scalable Vision Learners" (2022), https://arxiv.org/abs/2111.06377
    """
    if not isinstance(shape, tuple | list) or not isinstance(axes, tuple | list | None):
        raise TypeError(_checks.wanted("shape and axes", "tuples of ints", f"{shape!r} and {axes!r}"))
    lengths = [_checks.integer(f"shape[{axis}]", length, at_least=0) for axis, length in enumerate(shape)]
    order = tuple(range(len(lengths))) if axes is None else tuple(axes)
    if not lengths or sorted(order) != list(range(len(lengths))):
        raise ValueError(_checks.wanted("axes", f"a permutation of the axes of shape {tuple(lengths)}, at least one", axes))
    if _checks.integer("d_model", d_model, at_least=1) % len(lengths):
        raise ValueError(_checks.wanted("d_model", f"a multiple of the {len(lengths)} axes", d_model))
    encode = functools.partial(
        sinusoidal_encoding,
        d_model=d_model // len(lengths),
        base=base,
        layout=layout,
        shift=shift,
        frequency_scale=frequency_scale,
        dtype=dtype,
    )
    if positions is None:
        axis_positions = [jnp.arange(length, dtype=jnp.int32) for length in lengths]
        parts = [_along(encode(axis_positions[axis]), axis, lengths) for axis in order]
        return jnp.concatenate(parts, -1)
    points = _checks.as_int32("positions", positions)
    coordinates = jnp.unravel_index(jnp.clip(points, 0, max(math.prod(lengths) - 1, 0)), tuple(lengths))
    encoding = jnp.concatenate([encode(coordinates[axis].astype(jnp.int32)) for axis in order], -1)
    inside = (points >= 0) & (points < math.prod(lengths))
    return jnp.where(inside[..., None], encoding, jnp.nan)


def _along(part: Float[Array, "n w"], axis: int, lengths: list[int]) -> Float[Array, "... w"]:
    """A part that varies along one axis of the grid, on all of the grid."""
    width = part.shape[-1]
    shape = [length if other == axis else 1 for other, length in enumerate(lengths)]
    return jnp.broadcast_to(part.reshape(*shape, width), (*lengths, width))


def sinusoidal_channels(d_model: int, base: float, layout: str, shift: float | None, odd: str, frequency_scale: float) -> phase.Channels:
    """The constants of an encoding: each channel's frequency, and whether it is a sine (0) or a cosine (1)."""
    _checks.integer("d_model", d_model, at_least=1)
    _checks.choice("layout", layout, LAYOUTS)
    _checks.choice("odd", odd, ODD)
    base = _checks.real("base", base, above=0)
    frequency_scale = _checks.real("frequency_scale", frequency_scale, above=0)
    shift = shift if shift is None else _checks.real("shift", shift)
    return _channels(int(d_model), base, layout, shift, odd, frequency_scale)


@functools.lru_cache(maxsize=64)
def _channels(d_model: int, base: float, layout: str, shift: float | None, odd: str, frequency_scale: float) -> phase.Channels:
    pairs = d_model // 2 if odd == "zero" else (d_model + 1) // 2
    denominator = _denominator(d_model, shift, odd, pairs)
    frequencies = phase.geometric_frequencies(pairs, base, denominator, frequency_scale)
    if layout == "interleaved":
        order = [(i, quarter) for i in range(pairs) for quarter in (0, 1)]
    else:
        order = [(i, quarter) for quarter in ((0, 1) if layout == "sin_cos" else (1, 0)) for i in range(pairs)]
    order = order[:d_model]
    kept = [frequencies[i] for i, _ in order] + [phase.ZERO] * (d_model - len(order))
    quarters = [quarter for _, quarter in order] + [0] * (d_model - len(order))
    return phase.channels(kept, quarters)


def _denominator(d_model: int, shift: float | None, odd: str, pairs: int) -> float:
    if shift is None:
        return (d_model + d_model % 2 if odd == "round_up" else d_model) / 2
    denominator = (d_model + 1 if odd == "round_up" else d_model) // 2 - shift
    if pairs > 1 and denominator <= 0:
        raise ValueError(_checks.wanted("shift", f"a number below d_model // 2 = {d_model // 2}", f"{shift:g}"))
    return denominator
