"""Position schemes: how `TransformerEmbedding` and `PositionalEncoding` encode positions, as small
frozen dataclasses."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.functional.sinusoidal import (
    sinusoidal_channels,
    sinusoidal_encoding,
    sinusoidal_grid,
)
from transformer_embed._src.functional.token_positions import positions_of_tokens

MOST_POINTS = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sinusoids:
    """The options of `sinusoidal_encoding` that `sinusoidal_grid` shares."""

    base: float = 10_000.0
    layout: str = "interleaved"
    shift: float | None = None
    frequency_scale: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CountedPositions:
    """How positions are counted when none are given."""

    start: int = 0
    at_padding: int | None = None
    pad_id: int | None = None

    def count(self, length: int, name: str) -> Int32[Array, "t"]:
        """The positions of a row without padding; `name` is the argument to blame in an error."""
        raise NotImplementedError

    def positions(self, ids: Int32[Array, "... t"]) -> Int32[Array, "... t"]:
        """The positions of ids, when none are given."""
        counted = self.count(ids.shape[-1], "ids")
        return (
            counted
            if self.at_padding is None
            else positions_of_tokens(ids != self.pad_id, self.start, self.at_padding)
        )

    def _check_counting(self) -> None:
        self._set_int32("start")
        if self.at_padding is None:
            arguments.unwanted("pad_id", self.pad_id, "at_padding is not set")
            return
        self._set_int32("at_padding")
        if self.pad_id is None:
            raise ValueError(
                arguments.wanted("pad_id", "the id of padding, since at_padding is set", "None")
            )
        self._set_int32("pad_id")

    def _set_int32(self, name: str) -> None:
        """Sets a field to a Python int, because sums with a narrow numpy integer would wrap."""
        object.__setattr__(self, name, arguments.int32(name, getattr(self, name)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinusoidal(_CountedPositions, _Sinusoids):
    """Sinusoidal positions, for `EmbedderConfig` and `PositionalEncoding`.

    Args:
        base, layout, shift, odd, frequency_scale: see `sinusoidal_encoding`.
        start: the first position, when none are given.
        at_padding: the position of padding, which is then not counted: the first token has position
            `start` wherever the padding is. None: padding is counted like tokens.
        pad_id: the id of padding, required if `at_padding` is set; otherwise must be None. It is
            independent of the `pad_id` of `EmbedderConfig`, which zeroes a row of the token table.

    Raises:
        TypeError: start, at_padding or pad_id is not a Python int; and as `sinusoidal_encoding`.
        ValueError: at_padding without pad_id, or the reverse; and as `sinusoidal_encoding`.

    Example:
        >>> import transformer_embed as te
        >>> te.Sinusoidal(layout="sin_cos", shift=1).base
        10000.0

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.5,
        https://arxiv.org/abs/1706.03762
    """

    odd: str = "truncate"

    def __post_init__(self):
        # Two channels have a frequency under any `odd`, and no shift is too large for them.
        self.check(2)
        self._check_counting()

    def check(self, d_model: int) -> None:
        """Raises if these options do not make an encoding of d_model channels."""
        sinusoidal_channels(
            d_model, self.base, self.layout, self.shift, self.odd, self.frequency_scale
        )

    def encoding(self, positions: ArrayLike, d_model: int) -> Float[Array, "... d"]:
        """The float32 encoding of positions."""
        options = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(_Sinusoids)
        }
        return sinusoidal_encoding(positions, d_model, odd=self.odd, **options)

    def count(self, length: int, name: str) -> Int32[Array, "t"]:
        """The positions of a row without padding."""
        arguments.last_position_fits("start", self.start, length)
        return jnp.arange(self.start, self.start + length, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class SinusoidalGrid(_Sinusoids):
    """Sinusoidal positions on a grid, for `EmbedderConfig` and `PositionalEncoding`: for the tokens
    of an image or a video.

    Tokens are in row-major order: position p of a grid (h, w) is the point (p // w, p % w). A
    position outside the grid gives NaN; a length beyond its number of points is an error.

    Args:
        shape: points along each axis, a tuple of ints; at most 2**31 - 1 points in all.
        axes: the order of the axes; see `sinusoidal_grid`.
        odd: how d_model channels are split over the axes; see `sinusoidal_grid`.
        axis_positions: for each axis of shape, the coordinates of its points, as numbers that are
            known while tracing; kept as tuples of floats. None: 0, 1, 2, ... See `sinusoidal_grid`.
        base, layout, shift, frequency_scale: see `sinusoidal_encoding`.

    Raises:
        TypeError: shape or axes is not a tuple; axis_positions are not sequences of Python numbers;
            and as `sinusoidal_grid`.
        ValueError: too many points; and as `sinusoidal_grid`.

    Example:
        >>> import transformer_embed as te
        >>> te.EmbedderConfig(1024, 256, scheme=te.SinusoidalGrid((16, 16), axes=(1, 0))).scheme.shape
        (16, 16)

    Source:
        Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), appendix D.4,
        https://arxiv.org/abs/2010.11929
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...] | None = None
    odd: str = "truncate"
    axis_positions: Sequence[Sequence[float]] | None = None

    def __post_init__(self):
        for name, value, kind in (("shape", self.shape, tuple), ("axes", self.axes, tuple | None)):
            if not isinstance(value, kind):
                raise TypeError(arguments.wanted(name, "a tuple of ints", repr(value)))
        shape = tuple(
            arguments.integer(f"shape[{axis}]", length, at_least=0)
            for axis, length in enumerate(self.shape)
        )
        object.__setattr__(self, "shape", shape)
        if math.prod(self.shape) > MOST_POINTS:
            raise ValueError(
                arguments.wanted(
                    "shape",
                    f"at most 2**31 - 1 = {MOST_POINTS} points",
                    f"{self.shape}, {math.prod(self.shape)}",
                )
            )
        if self.axis_positions is not None:
            axes = enumerate(arguments.sequence("axis_positions", self.axis_positions))
            object.__setattr__(
                self,
                "axis_positions",
                tuple(_coordinates(f"axis_positions[{n}]", each) for n, each in axes),
            )
        self.check(max(2 * len(self.shape), 1))

    def check(self, d_model: int) -> None:
        """Raises if these options do not make an encoding of d_model channels."""
        jax.eval_shape(lambda: self.encoding(np.zeros(1, np.int32), d_model))

    def encoding(self, positions: ArrayLike, d_model: int) -> Float[Array, "... d"]:
        """The float32 encoding of positions."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return sinusoidal_grid(options.pop("shape"), d_model, positions=positions, **options)

    def count(self, length: int, name: str) -> Int32[Array, "t"]:
        """0..length-1; `name` is the argument to blame in an error."""
        points = math.prod(self.shape)
        if length > points:
            raise ValueError(
                arguments.wanted(
                    name, f"a length of at most the {points} points of the grid", f"length {length}"
                )
            )
        return jnp.arange(length, dtype=jnp.int32)

    def positions(self, ids: Int32[Array, "... t"]) -> Int32[Array, "t"]:
        """The positions of ids, when none are given."""
        return self.count(ids.shape[-1], "ids")


def _coordinates(name: str, values: Sequence[float]) -> tuple[float, ...]:
    return tuple(
        arguments.real(f"{name}[{n}]", each)
        for n, each in enumerate(arguments.sequence(name, values))
    )


@dataclasses.dataclass(frozen=True)
class Learned(_CountedPositions):
    """Learned positions, for `EmbedderConfig` and `PositionalEncoding`: a vector for each position.

    Args:
        max_len: number of positions, at least 1.
        start: the first position, when none are given (BART, OPT and RoBERTa count from 2).
        at_padding: the position of padding, which is then not counted (OPT and RoBERTa: 1). None:
            padding is counted like tokens.
        pad_id: the id of padding, as in `Sinusoidal`: required if `at_padding` is set; otherwise
            must be None.

    Raises:
        TypeError: an argument is not a Python int.
        ValueError: max_len is below 1; start or at_padding outside [0, max_len); at_padding without
            pad_id, or the reverse.

    Example:
        >>> import transformer_embed as te
        >>> roberta = te.Learned(max_len=514, start=2, at_padding=1, pad_id=1)
        >>> te.EmbedderConfig(50265, 768, scheme=roberta).scheme.start
        2

    Source:
        Gehring et al., "Convolutional Sequence to Sequence Learning" (2017), section 3.1,
        https://arxiv.org/abs/1705.03122
    """

    max_len: int

    def __post_init__(self):
        object.__setattr__(self, "max_len", arguments.integer("max_len", self.max_len, at_least=1))
        self._check_counting()
        for name, position in (("start", self.start), ("at_padding", self.at_padding)):
            if position is not None and not 0 <= position < self.max_len:
                raise ValueError(
                    arguments.wanted(name, f"an int in [0, max_len = {self.max_len})", position)
                )

    def check(self, d_model: int) -> None:
        """Accepts any d_model."""

    def count(self, length: int, name: str) -> Int32[Array, "t"]:
        """The positions of a row without padding, if the table has that many; `name` is the
        argument to blame in an error."""
        rows = self.max_len - self.start
        if length > rows:
            what = "max_len" if self.start == 0 else "max_len - start"
            raise ValueError(
                arguments.wanted(name, f"a length of at most {what} = {rows}", f"length {length}")
            )
        return jnp.arange(self.start, self.start + length, dtype=jnp.int32)


Scheme = Sinusoidal | SinusoidalGrid | Learned
