"""Sinusoidal position encodings: of any positions, as tables and on grids, in every layout."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from decimal import Decimal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, DTypeLike, Vectors
from transformer_embed._src.compiled import compiled, nan_where
from transformer_embed._src.positions import phase

SINUSOID_LAYOUTS = ("interleaved", "sin_cos", "cos_sin")
ODD_WIDTHS = ("truncate", "round_up", "zero")


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

    Sequences may have any length, since nothing is precomputed. Positions may be traced, negative,
    fractional, and of any shape. The page "Conventions of other projects" has the arguments that
    reproduce each project.

    Args:
        positions: [...]; any integer dtype, or float32 for fractional positions. float64 is rounded
            to float32. If that would change an integer, it is an error on the host and gives NaN on
            a device.
        d_model: number of channels, at least 1, even or odd.
        base: above 0. The wavelengths grow from 2 pi towards 2 pi times this.
        layout: the order of the channels. `"interleaved"`: sine and cosine of each frequency side
            by side. `"sin_cos"`: all sines, then all cosines. `"cos_sin"`: all cosines, then all
            sines.
        shift: a number to subtract from the denominator of the exponents. `None`: frequency i is
            base ** (-2i / d_model). A number s, such as tensor2tensor's 1: it is base ** (-i /
            (d_model // 2 - s)).
        odd: what an odd d_model means. `"truncate"`: the exponents use d_model itself, and the last
            cosine (in `"cos_sin"`, sine) is left out. `"round_up"`: the encoding for d_model + 1
            without its last channel. `"zero"`: d_model // 2 pairs and a last channel of zeros.
        frequency_scale: above 0; multiplies every frequency.
        dtype: of the result. The encoding is computed in float32 and rounded once.

    Returns:
        [..., d_model] of `dtype`, in [-1, 1]. The absolute error in float32 is at most 6.0e-8 for
        every int32 and uint32 position, and for float32 positions below 2**24 in magnitude if
        frequency_scale is at most 1000. NaN for a 64-bit jax integer outside int32, and for a float
        that is not finite or is 2**31 or more in magnitude. Differentiable in float positions, to
        any order.

    Raises:
        TypeError: positions are neither integers nor float32; d_model is not a Python int; dtype is
            not a floating dtype.
        ValueError: layout or odd is unknown; base or frequency_scale is not above 0, or makes a
            frequency of 2**32 turns per position or more; shift is d_model // 2 or more; a host
            position is outside int32 (and uint32).

    Example:
        >>> import transformer_embed as te
        >>> import numpy as np
        >>> print(np.asarray(te.sinusoidal_encoding([0, 1_000_000_000], 4)).round(3))
        [[ 0.     1.     0.     1.   ]
         [ 0.546  0.838  0.421 -0.907]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.5,
        https://arxiv.org/abs/1706.03762
    """
    options = Sinusoids(
        base=base, layout=layout, shift=shift, odd=odd, frequency_scale=frequency_scale
    )
    d_model, dtype = arguments.size("d_model", d_model), arguments.result_dtype(dtype)
    return encode(phase.as_positions("positions", positions), d_model, options, dtype)


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
    return sinusoidal_encoding(
        jnp.arange(arguments.length("length", length), dtype=jnp.int32),
        d_model,
        base=base,
        layout=layout,
        shift=shift,
        odd=odd,
        frequency_scale=frequency_scale,
        dtype=dtype,
    )


# Of the fields of `Sinusoids`.
SINUSOID_CONVERTERS = {
    "base": arguments.positive,
    "layout": functools.partial(arguments.choice, choices=SINUSOID_LAYOUTS),
    "shift": arguments.real,
    "odd": functools.partial(arguments.choice, choices=ODD_WIDTHS),
    "frequency_scale": arguments.positive,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinusoids:
    """The options of `sinusoidal_encoding`, converted and checked."""

    base: float = 10_000.0
    layout: str = "interleaved"
    shift: float | None = None
    odd: str = "truncate"
    frequency_scale: float = 1.0

    def __post_init__(self):
        arguments.convert_fields(self, **SINUSOID_CONVERTERS)


def as_grid(shape: Sequence[int], axes: Sequence[int] | None) -> tuple[tuple[int, ...], ...]:
    """The points along each axis of a grid, and the axes in the order of their channels."""
    lengths = arguments.entries("shape", shape, arguments.size)
    arguments.size("shape: its number of points", math.prod(lengths))
    first_first = range(len(lengths))
    order = arguments.entries("axes", first_first if axes is None else axes, arguments.integer)
    if not lengths or sorted(order) != list(first_first):
        want = f"a permutation of the axes of shape {lengths}, at least one"
        raise arguments.value_error("axes", want, axes)
    return lengths, order


def as_coordinates(
    axis_positions: Sequence[ArrayLike] | None, lengths: tuple[int, ...]
) -> tuple[Array | np.ndarray, ...] | None:
    """The coordinates of the points along each axis of a grid; None if they are 0, 1, 2, ..."""
    if axis_positions is None:
        return None
    coordinates = arguments.entries("axis_positions", axis_positions, phase.as_positions)
    shapes = [list(array.shape) for array in coordinates]
    expected = [[length] for length in lengths]
    arguments.check_same("axis_positions", "arrays as long as the axes", shapes, expected)
    return coordinates


@functools.lru_cache(maxsize=64)
def channels(options: Sinusoids, d_model: int) -> tuple[phase.Words, np.ndarray]:
    """The frequency of each channel, and its quarter: 0 for a sine, 1 for a cosine.

    A ValueError if the options make no encoding of d_model channels.
    """
    width = d_model + d_model % 2 if options.odd == "round_up" else d_model
    pairs = d_model // 2 if options.odd == "zero" else (d_model + 1) // 2
    denominator = Decimal(width) / 2
    if options.shift is not None:
        denominator = phase.PRECISION.subtract(width // 2, Decimal(options.shift))
    if pairs > 1 and denominator <= 0:
        want = f"a number below d_model // 2 = {width // 2}"
        raise arguments.value_error("shift", want, options.shift)
    frequencies = phase.geometric_frequencies(
        pairs, options.base, denominator, options.frequency_scale
    )
    units = np.array(phase.units(frequencies), object)
    quarters = np.array([[1], [0]] if options.layout == "cos_sin" else [[0], [1]], np.uint32)
    order = "F" if options.layout == "interleaved" else "C"

    def by_channel(by_pair):
        """Of [2, pairs]: all sines, then all cosines, or the other way round."""
        # With odd="zero", the last channel is the sine of 0.
        return np.pad(np.broadcast_to(by_pair, (2, pairs)).ravel(order), (0, 1))[:d_model]

    return phase.words(by_channel(units)), by_channel(quarters)


def part_width(d_model: int, axes: int, odd: str) -> int:
    """The channels of each axis of a grid."""
    if odd == "round_up":
        return 2 * math.ceil(d_model / (2 * axes))
    if odd == "zero":
        return 2 * (d_model // (2 * axes))
    if d_model % axes:
        want = f"a multiple of the {axes} axes (or odd='round_up' or 'zero')"
        raise arguments.value_error("d_model", want, d_model)
    return d_model // axes


# The functions below are compiled even if the caller is not.


@compiled(1, 2, 3)
def encode(positions, d_model, options, dtype) -> Vectors:
    return phase.sinusoid(positions[..., None], *channels(options, d_model)).astype(dtype)


@compiled(2, 3, 4, 5)
def encode_grid(points, coordinates, lengths, axes, d_model, options) -> Vectors:
    along = jnp.unravel_index(points, lengths)
    if coordinates is not None:
        along = [array[index] for array, index in zip(coordinates, along, strict=True)]
    width = part_width(d_model, len(lengths), options.odd)
    parts = [encode(along[axis], width, options, np.float32) for axis in axes]
    encoding = jnp.concatenate(parts, -1)[..., :d_model]
    padding = [(0, 0)] * (encoding.ndim - 1) + [(0, d_model - encoding.shape[-1])]
    inside = (points >= 0) & (points < math.prod(lengths))
    return nan_where(~inside, jnp.pad(encoding, padding))
