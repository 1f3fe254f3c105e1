"""Sinusoidal position encodings: of any positions, as tables and on grids, in every published
layout."""

import decimal
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Shaped

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, DTypeLike
from transformer_embed._src.functional import phase

LAYOUTS = ("interleaved", "sin_cos", "cos_sin")
ODD = ("truncate", "round_up", "zero")
MOST_AXES = 32


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

    There is no table and no longest position. Positions may be traced, negative, fractional, and of
    any shape.

    Args:
        positions: [...]; any integer dtype, or float32 for fractional positions. float64 is rounded
            to float32. If that would change an integer, it is an error on the host and gives NaN on
            a device.
        d_model: number of channels, at least 1, even or odd.
        base: above 0. The wavelengths grow from 2 pi towards 2 pi times this.
        layout: the order of the channels. `"interleaved"`: sine and cosine of each frequency side
            by side (Vaswani et al.; Keras, trax, XLM). `"sin_cos"`: all sines, then all cosines
            (tensor2tensor, fairseq, Marian, CTRL, Flax's examples, MaxText, Whisper). `"cos_sin"`:
            all cosines, then all sines (MusicGen; diffusers with `flip_sin_to_cos`).
        shift: a number to subtract from the denominator of the exponents. `None`: frequency i is
            base ** (-2i / d_model) (Vaswani et al.). A number s: it is base ** (-i / (d_model // 2
            - s)). tensor2tensor, fairseq and Whisper have s = 1; diffusers has 0 or 1
            (`downscale_freq_shift`).
        odd: what an odd d_model means. `"truncate"`: the exponents use d_model itself, and the last
            cosine (in `"cos_sin"`, sine) is left out (Keras, Marian, RoFormer). `"round_up"`: the
            encoding for d_model + 1 without its last channel (the positional-encodings package).
            `"zero"`: d_model // 2 pairs and a last channel of zeros (tensor2tensor, fairseq,
            MusicGen, diffusers).
        frequency_scale: above 0; multiplies every frequency, like tensor2tensor's `min_timescale`
            (its `max_timescale` is `base * min_timescale`) and diffusers' `scale`.
        dtype: of the result. The encoding is computed in float32 and rounded once.

    Returns:
        [..., d_model] of `dtype`, in [-1, 1]. The absolute error in float32 is at most 6.0e-8 for
        every int32 and uint32 position, and for float32 positions below 2**24 in magnitude if
        frequency_scale is at most 1000. NaN for a 64-bit integer outside int32, and for a float
        that is not finite or is 2**31 or more in magnitude. Differentiable in float positions, to
        any order.

    Raises:
        TypeError: positions are neither integers nor float32; d_model is not a Python int; dtype is
            not a floating dtype.
        ValueError: layout or odd is unknown; base or frequency_scale is not above 0, or makes a
            frequency of 2**32 turns per position or more; shift is d_model // 2 or more.

    Example:
        >>> import transformer_embed as te
        >>> import numpy as np
        >>> print(np.asarray(te.sinusoidal_encoding([0, 1_000_000_000], 4)).round(3))
        [[ 0.     1.     0.     1.   ]
         [ 0.546  0.838  0.421 -0.907]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.5,
        https://arxiv.org/abs/1706.03762. The other conventions are those of the named projects'
        code.
    """
    options = _checked_options(d_model, base, layout, shift, odd, frequency_scale)
    return _encoding(
        *_narrowed_and_outside(arguments.as_positions("positions", positions)),
        options,
        arguments.result_dtype("dtype", dtype),
    )


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
        length: number of positions, at least 0 and at most 2**31.
        d_model, base, layout, shift, odd, frequency_scale, dtype: see `sinusoidal_encoding`.

    Returns:
        [length, d_model] of `dtype`: `sinusoidal_encoding(jnp.arange(length), d_model, ...)`.

    Raises:
        TypeError: length is not a Python int; and as `sinusoidal_encoding`.
        ValueError: length is out of range; and as `sinusoidal_encoding`.

    Example:
        >>> import transformer_embed as te
        >>> import numpy as np
        >>> print(np.asarray(te.sinusoidal_table(2, 4)).round(3))
        [[0.    1.    0.    1.   ]
         [0.841 0.54  0.01  1.   ]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.5,
        https://arxiv.org/abs/1706.03762
    """
    options = _checked_options(d_model, base, layout, shift, odd, frequency_scale)
    return _table(
        arguments.length("length", length), options, arguments.result_dtype("dtype", dtype)
    )


def sinusoidal_grid(
    shape: tuple[int, ...],
    d_model: int,
    *,
    positions: ArrayLike | None = None,
    axes: tuple[int, ...] | None = None,
    axis_positions: Sequence[ArrayLike] | None = None,
    base: float = 10_000.0,
    layout: str = "interleaved",
    shift: float | None = None,
    odd: str = "truncate",
    frequency_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "... d"]:
    """The sinusoidal encodings of the points of a grid, 2-D for images or 3-D for video. Each axis
    gets an equal part of the channels.

    Part k of the channels is the `sinusoidal_encoding` of the coordinate along axis axes[k].

    Args:
        shape: number of points along each axis, [height, width] for an image; 1 to 32 axes, at most
            2**31 - 1 points.
        d_model: number of channels.
        positions: [...] integers: points of the grid, numbered in row-major order like a sequence
            of image tokens. None: all points, in the grid's shape.
        axes: the axis that each part encodes, a permutation. None: the first axis first
            (tensor2tensor, the positional-encodings package); (1, 0) is width first (MAE,
            diffusers, big_vision).
        axis_positions: for each axis of shape, the coordinates of its points, [shape[axis]],
            integers or float32. None: 0, 1, 2, ... diffusers' are `np.arange(n) * base_size / n /
            interpolation_scale` for an axis of n points.
        base, layout, shift, frequency_scale, dtype: see `sinusoidal_encoding`, for the channels of
        one part. MAE, diffusers and
            big_vision have `layout="sin_cos"`, big_vision with `shift=1`.
        odd: how d_model channels are split over n axes. `"truncate"`: d_model / n channels for each
            axis; d_model is a multiple of n. `"round_up"`: d_model / n rounded up to an even number
            for each axis, and the concatenation cut to d_model (the positional-encodings package).
            `"zero"`: d_model / n rounded down to an even number for each axis, and zeros in the
            last channels (tensor2tensor).

    Returns:
        [*shape, d_model], or [*positions.shape, d_model], of `dtype`, in [-1, 1], with the error of
        `sinusoidal_encoding`. NaN for a position outside the grid.

    Raises:
        TypeError: shape or axes is not a tuple of ints; and as `sinusoidal_encoding`.
        ValueError: shape is out of range; axes is not a permutation; axis_positions do not fit the
            shape; d_model cannot be split; and as `sinusoidal_encoding`.

    Example:
        >>> import transformer_embed as te
        >>> te.sinusoidal_grid((14, 14), 768, axes=(1, 0), layout="sin_cos").shape
        (14, 14, 768)

    Source:
        Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), appendix D.4,
        https://arxiv.org/abs/2010.11929; He et al., "Masked Autoencoders Are Scalable Vision
        Learners" (2022), https://arxiv.org/abs/2111.06377
    """
    lengths, order = _checked_axes(shape, axes)
    width = _part_width(d_model, len(lengths), odd)
    # The options are checked even if a part has no channels.
    options = _checked_options(max(width, 1), base, layout, shift, "truncate", frequency_scale)
    coordinates = _checked_coordinates(lengths, axis_positions)
    points = None if positions is None else arguments.as_int32("positions", positions)
    grid = _Grid(lengths, order, width, int(d_model))
    return _grid_encoding(
        points, coordinates, grid, options, arguments.result_dtype("dtype", dtype)
    )


class _Options(NamedTuple):
    d_model: int
    base: float
    layout: str
    shift: float | None
    odd: str
    frequency_scale: float


class _Grid(NamedTuple):
    lengths: tuple[int, ...]
    order: tuple[int, ...]
    width: int
    d_model: int


def sinusoidal_channels(
    d_model: int, base: float, layout: str, shift: float | None, odd: str, frequency_scale: float
) -> phase.Channels:
    """The constants of an encoding: each channel's frequency, and whether it is a sine (0) or a
    cosine (1)."""
    return _channels(_checked_options(d_model, base, layout, shift, odd, frequency_scale))


def _checked_options(
    d_model: int, base: float, layout: str, shift: float | None, odd: str, frequency_scale: float
) -> _Options:
    options = _Options(
        arguments.integer("d_model", d_model, at_least=1),
        arguments.real("base", base, above=0),
        arguments.choice("layout", layout, LAYOUTS),
        shift if shift is None else arguments.real("shift", shift),
        arguments.choice("odd", odd, ODD),
        arguments.real("frequency_scale", frequency_scale, above=0),
    )
    _channels(options)
    return options


def _narrowed_and_outside(
    positions: Shaped[Array | np.ndarray, "..."],
) -> tuple[Shaped[Array | np.ndarray, "..."], np.ndarray | None]:
    """Host positions as int32 for jit, which would silently narrow 64 bits, and a mask of those
    outside int32 (None if there are none)."""
    if not (isinstance(positions, np.ndarray) and positions.dtype.itemsize == 8):
        return positions, None
    narrow = positions.astype(np.int32)
    outside = (narrow != positions) | ((narrow < 0) & (positions > 0))
    return narrow, np.asarray(outside) if np.any(outside) else None


def _checked_axes(
    shape: tuple[int, ...], axes: tuple[int, ...] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not isinstance(shape, tuple | list) or not isinstance(axes, tuple | list | None):
        raise TypeError(
            arguments.wanted("shape and axes", "tuples of ints", f"{shape!r} and {axes!r}")
        )
    lengths = tuple(
        arguments.integer(f"shape[{axis}]", length, at_least=0) for axis, length in enumerate(shape)
    )
    if len(lengths) > MOST_AXES:
        raise ValueError(arguments.wanted("shape", f"at most {MOST_AXES} axes", len(lengths)))
    if math.prod(lengths) >= 2**31:
        raise ValueError(
            arguments.wanted(
                "shape",
                f"a grid of at most {2**31 - 1} points",
                f"{lengths}, {math.prod(lengths)} points",
            )
        )
    order = tuple(range(len(lengths)) if axes is None else axes)
    if (
        not lengths
        or len(order) != len(lengths)
        or not set(range(len(lengths))) <= {axis for axis in order if isinstance(axis, int)}
    ):
        raise ValueError(
            arguments.wanted(
                "axes", f"a permutation of the axes of shape {lengths}, at least one", axes
            )
        )
    return lengths, order


def _part_width(d_model: int, parts: int, odd: str) -> int:
    """The channels of each axis."""
    arguments.choice("odd", odd, ODD)
    if arguments.integer("d_model", d_model, at_least=1) % parts and odd == "truncate":
        raise ValueError(
            arguments.wanted(
                "d_model", f"a multiple of the {parts} axes (or odd='round_up' or 'zero')", d_model
            )
        )
    pairs = {"round_up": -(-d_model // (2 * parts)), "zero": d_model // (2 * parts)}
    return d_model // parts if odd == "truncate" else 2 * pairs[odd]


def _checked_coordinates(
    lengths: tuple[int, ...], axis_positions: Sequence[ArrayLike] | None
) -> tuple[ArrayLike, ...] | None:
    if axis_positions is None:
        return None
    given = arguments.sequence("axis_positions", axis_positions)
    arguments.same("axis_positions", "one array for each axis of shape", len(given), len(lengths))
    coordinates = []
    for axis, (each, length) in enumerate(zip(given, lengths, strict=True)):
        name = f"axis_positions[{axis}]"
        array = arguments.as_fitting_positions(name, each)
        if array.shape != (length,):
            raise ValueError(
                arguments.wanted(name, f"shape [{length}]", f"shape {list(array.shape)}")
            )
        coordinates.append(array)
    return tuple(coordinates)


@functools.lru_cache(maxsize=64)
def _channels(options: _Options) -> phase.Channels:
    d_model, base, layout, _, odd, frequency_scale = options
    pairs = d_model // 2 if odd == "zero" else (d_model + 1) // 2
    frequencies = phase.geometric_frequencies(
        pairs, base, _denominator(options, pairs), frequency_scale
    )
    if layout == "interleaved":
        order = [(i, quarter) for i in range(pairs) for quarter in (0, 1)]
    else:
        order = [
            (i, quarter)
            for quarter in ((0, 1) if layout == "sin_cos" else (1, 0))
            for i in range(pairs)
        ]
    order = order[:d_model]
    kept = [frequencies[i] for i, _ in order] + [phase.ZERO] * (d_model - len(order))
    quarters = [quarter for _, quarter in order] + [0] * (d_model - len(order))
    return phase.channels(kept, quarters)


def _denominator(options: _Options, pairs: int) -> decimal.Decimal:
    width = options.d_model + options.d_model % 2 if options.odd == "round_up" else options.d_model
    if options.shift is None:
        return decimal.Decimal(width) / 2
    with decimal.localcontext(phase.PRECISION):
        denominator = width // 2 - decimal.Decimal(options.shift)
    if pairs > 1 and denominator <= 0:
        raise ValueError(
            arguments.wanted(
                "shift", f"a number below d_model // 2 = {width // 2}", f"{options.shift:g}"
            )
        )
    return denominator


# The functions below are compiled even if the caller is not.


@functools.partial(jax.jit, inline=True, static_argnums=(2, 3))
def _encoding(
    positions: Shaped[Array, "..."],
    outside: Bool[Array, "..."] | None,
    options: _Options,
    dtype: jnp.dtype,
) -> Float[Array, "... d"]:
    encoding = phase.sinusoid(positions, _channels(options)).astype(dtype)
    return (
        encoding
        if outside is None
        else jnp.where(outside[..., None], jnp.array(jnp.nan, dtype), encoding)
    )


@functools.partial(jax.jit, inline=True, static_argnums=(0, 1, 2))
def _table(length: int, options: _Options, dtype: jnp.dtype) -> Float[Array, "t d"]:
    return _encoding(jnp.arange(length, dtype=jnp.int32), None, options, dtype)


@functools.partial(jax.jit, inline=True, static_argnums=(2, 3, 4))
def _grid_encoding(
    points: Int32[Array, "..."] | None,
    coordinates: tuple[Array, ...] | None,
    grid: _Grid,
    options: _Options,
    dtype: jnp.dtype,
) -> Float[Array, "... d"]:
    lengths, count = grid.lengths, math.prod(grid.lengths)
    if points is None:
        leading = lengths
        along = (
            [jnp.arange(n, dtype=jnp.int32) for n in lengths]
            if coordinates is None
            else coordinates
        )
        at = [
            jnp.expand_dims(each, [k for k in range(len(lengths)) if k != axis])
            for axis, each in enumerate(along)
        ]
    else:
        leading = points.shape
        at = _unravelled(jnp.clip(points, 0, max(count - 1, 0)), lengths)
        if coordinates is not None and count:
            at = [
                jnp.take(each, index, mode="clip")
                for each, index in zip(coordinates, at, strict=True)
            ]
    order = grid.order if grid.width else ()
    parts = [
        jnp.broadcast_to(_encoding(at[axis], None, options, dtype), (*leading, grid.width))
        for axis in order
    ]
    zeros = jnp.zeros((*leading, max(grid.d_model - len(parts) * grid.width, 0)), dtype)
    encoding = jnp.concatenate([*parts, zeros], -1)[..., : grid.d_model]
    return (
        encoding
        if points is None
        else jnp.where(
            ((points >= 0) & (points < count))[..., None], encoding, jnp.array(jnp.nan, dtype)
        )
    )


def _unravelled(points: Int32[Array, "..."], lengths: tuple[int, ...]) -> list[Int32[Array, "..."]]:
    """The index along each axis of points counted row by row."""
    indices = []
    for length in reversed(lengths):
        indices.append(points % max(length, 1))
        points = points // max(length, 1)
    return indices[::-1]
