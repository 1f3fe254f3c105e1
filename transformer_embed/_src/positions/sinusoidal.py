"""Computes sinusoidal encodings: of any positions, as tables and on grids, in every layout."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

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
    """Computes the sinusoidal encoding of each position, exact at any position.

    Add it to token embeddings. With the defaults, for i in 0..d_model//2 - 1:

        encoding[..., 2i]     = sin(position * base ** (-2i / d_model))
        encoding[..., 2i + 1] = cos(position * base ** (-2i / d_model))

    No table is precomputed, so sequences may have any length. The page "Conventions of other
    projects" has the arguments that reproduce each project.

    Args:
        positions: The positions, of any shape. Integers of any dtype, or float32 for fractional
            positions. Positions may be negative, and may be traced.
        d_model: The number of channels, at least 1, even or odd.
        base: The base of the frequencies, above 0. The wavelengths grow from 2 pi towards
            2 pi times the base.
        layout: The order of the channels. `"interleaved"` puts the sine and the cosine of each
            frequency side by side. `"sin_cos"` puts all sines first, then all cosines. `"cos_sin"`
            puts all cosines first, then all sines.
        shift: A change of the frequencies. If None, frequency i is base ** (-2i / d_model). If you
            pass a number s, frequency i is base ** (-i / (d_model // 2 - s)). Pass 1 for
            tensor2tensor.
        odd: What to do if d_model is odd.

            - `"truncate"` keeps the odd d_model in the formula above, and leaves out the last
              cosine (in `"cos_sin"`, the last sine).
            - `"round_up"` makes the encoding for d_model + 1, and drops the last channel.
            - `"zero"` makes d_model // 2 pairs of a sine and a cosine, and a last channel of zeros.
        frequency_scale: A number above 0 that multiplies every frequency.
        dtype: The dtype of the result. The encoding is computed in float32 and rounded once.

    Returns:
        The encodings, of `dtype`, in [-1, 1]. Shape [..., d_model]. You can differentiate them in
        float positions, to any order.

    Raises:
        TypeError: `positions` are neither integers nor float32. `d_model` is not a Python int, or
            `dtype` is not a floating dtype.
        ValueError: `layout` or `odd` is not one of the strings above. `base` or `frequency_scale`
            is not above 0. A frequency is 2**32 full turns per position or more, because
            `frequency_scale` is huge or `base` is tiny. `shift` is d_model // 2 or more. A list or
            a numpy array has an integer position outside int32, or an integer in float64 that
            float32 cannot represent. (But an array of uint32 may hold any number.)

    Example:
        >>> import transformer_embed as te
        >>> import numpy as np
        >>> print(np.asarray(te.sinusoidal_encoding([0, 1_000_000_000], 4)).round(3))
        [[ 0.     1.     0.     1.   ]
         [ 0.546  0.838  0.421 -0.907]]

    Edge cases:
        - In float32, the absolute error is at most 6.0e-8 at every int32 and uint32 position. The
          error is as small at float32 positions below 2**24 in magnitude, if `frequency_scale` is
          at most 1000.
        - Positions in float64 are rounded to float32, which can change integers above 2**24. If
          rounding would change an integer in a list or a numpy array, you get a ValueError. If it
          would change an integer in a jax array, the encoding of this position is NaN.
        - The encoding of a float position is NaN if the position is NaN, infinite, or at least
          2**31 in magnitude.
        - The encoding of an integer position outside int32 is NaN in a 64-bit jax array.

    Source:
        The encoding is from Vaswani et al., "Attention Is All You Need" (2017), section 3.5,
        https://arxiv.org/abs/1706.03762
    """
    options = Sinusoids(
        base=base, layout=layout, shift=shift, odd=odd, frequency_scale=frequency_scale
    )
    d_model = arguments.size("d_model", d_model)
    dtype = arguments.result_dtype(dtype)
    positions = phase.as_positions("positions", positions)
    return encode(positions, d_model, options, dtype)


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
    """Computes the sinusoidal encodings of positions 0..length-1.

    Use it if you want the table of the paper. To encode a batch, call `sinusoidal_encoding`, which
    needs no table.

    Args:
        length: The number of positions, at least 0 and at most 2**31.
        d_model, base, layout, shift, odd, frequency_scale, dtype: The arguments of
            `sinusoidal_encoding` with these names.

    Returns:
        The table, of `dtype`. Shape [length, d_model]. Row p is
        `sinusoidal_encoding(p, d_model, ...)`.

    Raises:
        TypeError: `length` or `d_model` is not a Python int, or `dtype` is not a floating dtype.
        ValueError: `length` is out of its range. An option is wrong in a way that
            `sinusoidal_encoding` lists.

    Example:
        >>> import transformer_embed as te
        >>> import numpy as np
        >>> print(np.asarray(te.sinusoidal_table(2, 4)).round(3))
        [[0.    1.    0.    1.   ]
         [0.841 0.54  0.01  1.   ]]

    Source:
        The table is from Vaswani et al., "Attention Is All You Need" (2017), section 3.5,
        https://arxiv.org/abs/1706.03762
    """
    length = arguments.length("length", length)
    return sinusoidal_encoding(
        jnp.arange(length, dtype=jnp.int32),
        d_model,
        base=base,
        layout=layout,
        shift=shift,
        odd=odd,
        frequency_scale=frequency_scale,
        dtype=dtype,
    )


# Converts and checks each field of `Sinusoids`.
SINUSOID_CONVERTERS = {
    "base": arguments.positive,
    "layout": functools.partial(arguments.choice, choices=SINUSOID_LAYOUTS),
    "shift": arguments.real,
    "odd": functools.partial(arguments.choice, choices=ODD_WIDTHS),
    "frequency_scale": arguments.positive,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinusoids:
    """Holds the options of `sinusoidal_encoding`, converted and checked."""

    base: float = 10_000.0
    layout: str = "interleaved"
    shift: float | None = None
    odd: str = "truncate"
    frequency_scale: float = 1.0

    def __post_init__(self) -> None:
        """Converts and checks the options."""
        arguments.convert_fields(self, **SINUSOID_CONVERTERS)


def as_grid(shape: Sequence[int], axes: Sequence[int] | None) -> tuple[tuple[int, ...], ...]:
    """Checks the shape and the axes of a `SinusoidalGrid`.

    Returns:
        The length of each axis, and the axes in the order in which the channels encode them.
    """
    lengths = arguments.entries("shape", shape, arguments.size)
    arguments.size("shape: its number of points", math.prod(lengths))
    all_axes = tuple(range(len(lengths)))
    axes_or_all = all_axes if axes is None else axes
    order = arguments.entries("axes", axes_or_all, arguments.integer)
    if not lengths or sorted(order) != list(all_axes):
        want = f"a permutation of the axes of shape {lengths}, at least one"
        raise arguments.value_error("axes", want, axes)
    return lengths, order


def as_coordinates(
    axis_positions: Sequence[ArrayLike] | None, lengths: tuple[int, ...]
) -> tuple[Array | np.ndarray, ...] | None:
    """Checks the `axis_positions` of a `SinusoidalGrid`: an array of positions for each axis.

    Returns:
        The positions along each axis, in int32 or float32. If `axis_positions` is None, the result
        is None, and the grid counts 0, 1, 2, ... along each axis.
    """
    if axis_positions is None:
        return None
    coordinates = arguments.entries("axis_positions", axis_positions, phase.as_positions)
    shapes = [list(array.shape) for array in coordinates]
    expected_shapes = [[length] for length in lengths]
    arguments.check_same("axis_positions", "arrays as long as the axes", shapes, expected_shapes)
    return coordinates


class Channels(NamedTuple):
    """Says what each channel computes: `sin(position * frequency + quarter * pi / 2)`."""

    # The frequency of each channel as three words: whole turns, high, low (see `phase`).
    frequencies: phase.Words
    # How many quarter turns are added: 0 for a sine, 1 for a cosine.
    quarters: np.ndarray


@functools.lru_cache(maxsize=64)
def channels(options: Sinusoids, d_model: int) -> Channels:
    """Computes the frequency of each channel, and which channels are cosines.

    For example, four channels have two pairs of a sine and a cosine, with the frequencies f and g.
    In the layout "interleaved", the channels are sin f, cos f, sin g, cos g. In the layout
    "sin_cos", they are sin f, sin g, cos f, cos g.

    Raises:
        ValueError: The options make no encoding of d_model channels.
    """
    pair_frequencies = _pair_frequencies(options, d_model)
    # An integer for each pair, in units of 2**-64 turns.
    fixed_point = phase.as_fixed_point(pair_frequencies, "base and frequency_scale")
    # The two rows are the sines and the cosines, and the columns are the pairs. A sine and a cosine
    # of a pair have the same frequency.
    pairs = len(fixed_point)
    frequency_rows = np.array([fixed_point, fixed_point], object)
    # No quarter turn is added for a sine, and one for a cosine.
    sine_row = [0] * pairs
    cosine_row = [1] * pairs
    is_cosine_first = options.layout == "cos_sin"
    rows = [cosine_row, sine_row] if is_cosine_first else [sine_row, cosine_row]
    quarter_rows = np.array(rows, np.uint32)
    # Reading column by column ("F") puts the sine and the cosine of a pair side by side.
    order = "F" if options.layout == "interleaved" else "C"

    def spread_to_channels(rows: np.ndarray) -> np.ndarray:
        """Puts the numbers of the two rows, [2, pairs], into the order of the channels."""
        in_order_of_channels = rows.ravel(order)
        # With odd="zero", an odd d_model has a last channel with the sine of the frequency 0. So a
        # 0 is added, and cut off in all other cases.
        with_zero = np.pad(in_order_of_channels, (0, 1))
        return with_zero[:d_model]

    frequencies = phase.words_of_fixed_point(spread_to_channels(frequency_rows))
    return Channels(frequencies=frequencies, quarters=spread_to_channels(quarter_rows))


def _pair_frequencies(options: Sinusoids, d_model: int) -> np.ndarray:
    """Computes the frequency of each pair of a sine and a cosine, as an array of `Decimal`.

    The frequency of pair i is `frequency_scale * base ** (-i / denominator)`. The denominator is
    d_model / 2, or d_model // 2 - shift.
    """
    # With odd="round_up", the formula is the one for the next even d_model.
    width = d_model
    if options.odd == "round_up":
        width = d_model + d_model % 2
    # An odd d_model has a last channel without a partner. It is half of one more pair, or is 0.
    pairs = (d_model + 1) // 2
    if options.odd == "zero":
        pairs = d_model // 2
    if options.shift is None:
        denominator = Decimal(width) / 2
    else:
        # The operator - of decimals would round to the user's decimal context, which may have few
        # digits.
        denominator = phase.PRECISION.subtract(width // 2, Decimal(options.shift))
    # A single pair has the exponent 0, whatever the denominator is.
    if pairs > 1 and denominator <= 0:
        want = f"a number below d_model // 2 = {width // 2}"
        raise arguments.value_error("shift", want, options.shift)
    return phase.geometric_frequencies(pairs, options.base, denominator, options.frequency_scale)


def part_width(d_model: int, axes: int, odd: str) -> int:
    """Returns the number of channels of each axis of a grid, before they are cut to d_model.

    Args:
        d_model: The number of channels of all axes together.
        axes: The number of axes.
        odd: How channels are split over axes. See `SinusoidalGrid`.
    """
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
def encode(positions: Array, d_model: int, options: Sinusoids, dtype: Any) -> Vectors:
    """Computes `sinusoidal_encoding` for checked options, [..., d_model]."""
    frequencies, quarters = channels(options, d_model)
    encoding = phase.sinusoid(positions[..., None], frequencies, quarters)
    return encoding.astype(dtype)


@compiled(2, 3, 4, 5)
def encode_grid(
    points: Array,
    coordinates: tuple[Array | np.ndarray, ...] | None,
    lengths: tuple[int, ...],
    axes: tuple[int, ...],
    d_model: int,
    options: Sinusoids,
) -> Vectors:
    """Computes the encodings of points of a grid. A point outside the grid gets NaN.

    Args:
        points: The number of each point in row-major order, int32 [...].
        coordinates: The coordinates along each axis. If None, they are 0, 1, 2, ...
        lengths: The number of points along each axis.
        axes: The axis of each part of the channels. (1, 0) means that the first half of the
            channels encodes the position along axis 1.
        d_model: The number of channels.
        options: The options of one part.
    """
    # For each axis, the index of each point along this axis.
    indices_by_axis = jnp.unravel_index(points, lengths)
    # For each axis, the position that is encoded: the index, or the coordinate at this index.
    positions_by_axis = list(indices_by_axis)
    if coordinates is not None:
        for axis, coordinates_of_axis in enumerate(coordinates):
            positions_by_axis[axis] = coordinates_of_axis[indices_by_axis[axis]]
    # The number of channels that encode one axis.
    width = part_width(d_model, len(lengths), options.odd)
    encodings = [encode(positions_by_axis[axis], width, options, np.float32) for axis in axes]
    encoding = jnp.concatenate(encodings, -1)[..., :d_model]
    is_inside = (points >= 0) & (points < math.prod(lengths))
    is_outside = ~is_inside
    # With odd="zero", the axes together may have fewer channels than d_model. For example, 2 axes
    # of a d_model of 7 have 2 channels each. Then zeros are added.
    missing_channels = d_model - encoding.shape[-1]
    no_padding = [(0, 0)] * (encoding.ndim - 1)
    with_all_channels = jnp.pad(encoding, [*no_padding, (0, missing_channels)])
    return nan_where(is_outside, with_all_channels)
