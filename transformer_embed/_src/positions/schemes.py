"""Position schemes: how an input layer counts and encodes positions, as frozen dataclasses."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.positions.phase import as_positions
from transformer_embed._src.positions.sinusoidal import (
    CONVERTERS,
    Sinusoids,
    as_coordinates,
    as_grid,
    channels,
    encode,
    encode_grid,
    part_width,
)
from transformer_embed._src.sequences.runs import positions_of_tokens
from transformer_embed._src.sequences.token_positions import check_last_position

_reals = functools.partial(arguments.entries, convert=arguments.real)
# A field of this name has the same meaning in every scheme.
_CONVERTERS = CONVERTERS | {
    # Python ints, because sums with a narrow numpy integer would wrap.
    "start": arguments.int32,
    "at_padding": arguments.int32,
    "pad_id": arguments.int32,
    "max_len": arguments.size,
    "axis_positions": functools.partial(arguments.entries, convert=_reals),
}


class _Scheme:
    """What `EmbedderConfig` and the modules ask of a scheme.

    The methods are private because they are not for users, who see a scheme's fields only.
    """

    _module_name = "positional_encoding"
    _as_positions = staticmethod(arguments.as_int32)
    # What a scheme without fields of these names has. Only learned positions have a max_len.
    start: int = 0
    at_padding: int | None = None
    pad_id: int | None = None
    max_len: Any = None

    def __post_init__(self):
        arguments.convert_fields(self, **_CONVERTERS)

    def _check(self, d_model: int) -> None:
        """Raises unless the scheme encodes d_model channels."""

    def _longest(self) -> int | None:
        """The greatest length of a row; None: any length."""
        return None

    def _counted(self, name: str, length: int) -> Int32[Array, "t"]:
        """The positions of a row without padding; an error if it is longer than `_longest`."""
        longest = self._longest()
        if longest is not None and length > longest:
            want = f"a length of at most {longest}, where {type(self).__name__} ends"
            raise arguments.value_error(name, want, f"length {length}")
        check_last_position("start", self.start, length)
        return jnp.arange(self.start, self.start + length, dtype=jnp.int32)

    def _positions(self, ids: Int32[Array, "... t"], pad_id: int | None) -> Int32[Array, "... t"]:
        """The positions of ids, in a layer with this padding id."""
        counted = self._counted("ids", ids.shape[-1])
        pad_id = pad_id if self.pad_id is None else self.pad_id
        if pad_id is None:
            return counted
        at_padding = self.start if self.at_padding is None else self.at_padding
        return positions_of_tokens(ids != pad_id, self.start, at_padding)

    def _encoding(self, positions: Any, d_model: int) -> Float[Array, "... d"]:
        """The float32 encoding of positions that `_as_positions` returned."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinusoidal(_Scheme, Sinusoids):
    """Sinusoidal positions, for `EmbedderConfig` and `PositionalEncoding`.

    Args:
        base, layout, shift, odd, frequency_scale: see `sinusoidal_encoding`.
        start: the position of the first token, when no positions are given.
        at_padding: the position of padding, which is not counted. None: `start`.
        pad_id: the id of padding. None: the `pad_id` of the `EmbedderConfig`; if that is None too,
            every id is counted.

    Raises:
        TypeError: start, at_padding or pad_id is not a Python int; and as `sinusoidal_encoding`.
        ValueError: as `sinusoidal_encoding`.

    Example:
        >>> import transformer_embed as te
        >>> te.Sinusoidal(layout="sin_cos", shift=1).base
        10000.0

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.5,
        https://arxiv.org/abs/1706.03762
    """

    start: int = 0
    at_padding: int | None = None
    pad_id: int | None = None

    _as_positions = staticmethod(as_positions)

    def __post_init__(self):
        super().__post_init__()
        # Two channels have a frequency under any `odd`, and no shift is too large for them.
        self._check(2)

    def _check(self, d_model: int) -> None:
        channels(self, d_model)

    def _encoding(self, positions: Any, d_model: int) -> Float[Array, "... d"]:
        return encode(positions, d_model, self, np.float32)


@dataclasses.dataclass(frozen=True)
class SinusoidalGrid(_Scheme, Sinusoids):
    """Sinusoidal positions on a grid, for the tokens of an image or a video.

    It is a scheme of `EmbedderConfig` and `PositionalEncoding`.

    Tokens are in row-major order: position p of a grid (h, w) is the point (p // w, p % w). A
    position outside the grid gives NaN; a length beyond its number of points is an error.

    The layer takes flattened patches, [..., h * w, d_model]: a shorter row has the first points.
    Add a class token after the layer.

    Args:
        shape: points along each axis, a tuple of ints; at most 2**31 - 1 points in all.
        axes: the order of the axes; see `sinusoidal_grid`.
        odd: how d_model channels are split over the axes; see `sinusoidal_grid`.
        axis_positions: for each axis of shape, the coordinates of its points, as numbers that are
            known while tracing; kept as tuples of floats. None: 0, 1, 2, ... See `sinusoidal_grid`.
            For n points in place of the m of training, `np.arange(n) * m / n` interpolates.
        base, layout, shift, frequency_scale: see `sinusoidal_encoding`.

    Raises:
        TypeError: axis_positions are not sequences of Python numbers; and as `sinusoidal_grid`.
        ValueError: as `sinusoidal_grid`.

    Example:
        >>> import transformer_embed as te
        >>> grid = te.SinusoidalGrid((16, 16), axes=(1, 0))
        >>> te.EmbedderConfig(1024, 256, scheme=grid).scheme.shape
        (16, 16)

    Source:
        Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), appendix D.4,
        https://arxiv.org/abs/2010.11929
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...] | None = None
    axis_positions: Sequence[Sequence[float]] | None = None

    def __post_init__(self):
        super().__post_init__()
        shape, order = as_grid(self.shape, self.axes)
        arguments.set_fields(self, shape=shape, axes=None if self.axes is None else order)
        as_coordinates(self.axis_positions, shape)
        self._check(2 * len(shape))

    def _check(self, d_model: int) -> None:
        channels(self, part_width(d_model, len(self.shape), self.odd))

    def _longest(self) -> int:
        return math.prod(self.shape)

    def _positions(self, ids: Int32[Array, "... t"], pad_id: int | None) -> Int32[Array, "t"]:
        # A point of the grid stays where it is, whatever its id.
        return self._counted("ids", ids.shape[-1])

    def _encoding(self, positions: Any, d_model: int) -> Float[Array, "... d"]:
        coordinates = as_coordinates(self.axis_positions, self.shape)
        order = self.axes or tuple(range(len(self.shape)))
        return encode_grid(positions, coordinates, self.shape, order, d_model, self, np.float32)


@dataclasses.dataclass(frozen=True)
class Learned(_Scheme):
    """Learned positions, for `EmbedderConfig` and `PositionalEncoding`: a vector for each position.

    Args:
        max_len: number of positions, at least 1.
        start: the position of the first token, when no positions are given (BART, OPT and RoBERTa:
            2).
        at_padding: the position of padding, which is not counted (OPT and RoBERTa: 1). None:
            `start`.
        pad_id: the id of padding, as in `Sinusoidal`.

    Raises:
        TypeError: an argument is not a Python int.
        ValueError: max_len is below 1; start or at_padding outside [0, max_len).

    Example:
        >>> import transformer_embed as te
        >>> roberta = te.Learned(max_len=514, start=2, at_padding=1, pad_id=1)
        >>> te.EmbedderConfig(50265, 768, scheme=roberta).scheme.start
        2

    Source:
        Gehring et al., "Convolutional Sequence to Sequence Learning" (2017), section 3.1,
        https://arxiv.org/abs/1705.03122
    """

    # Without the default of other schemes.
    max_len: int = dataclasses.field()
    _: dataclasses.KW_ONLY
    start: int = 0
    at_padding: int | None = None
    pad_id: int | None = None

    _module_name = "learned_positional_encoding"

    def __post_init__(self):
        super().__post_init__()
        for name, position in (("start", self.start), ("at_padding", self.at_padding)):
            if position is not None and not 0 <= position < self.max_len:
                want = f"an int in [0, max_len = {self.max_len})"
                raise arguments.value_error(name, want, position)

    def _longest(self) -> int:
        return self.max_len - self.start


SCHEMES = "Sinusoidal(...), SinusoidalGrid(...) or Learned(max_len=...)"
Scheme = Sinusoidal | SinusoidalGrid | Learned
