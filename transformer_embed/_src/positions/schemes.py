"""Position schemes: how an input layer counts and encodes positions, as frozen dataclasses."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from transformer_embed._src import arguments
from transformer_embed._src.positions.sinusoidal import (
    SINUSOID_CONVERTERS,
    Sinusoids,
    as_coordinates,
    as_grid,
    channels,
    encode,
    encode_grid,
    part_width,
)
from transformer_embed._src.sequences.runs import positions_of_tokens
from transformer_embed._src.sequences.token_arrays import check_last_position

_reals = functools.partial(arguments.entries, convert=arguments.real)
# A field of this name has the same meaning in every scheme.
_CONVERTERS = SINUSOID_CONVERTERS | {
    # Python ints, because sums with a narrow numpy integer would wrap.
    "start": arguments.int32,
    "at_padding": arguments.int32,
    "pad_id": arguments.int32,
    "max_len": arguments.size,
    "axis_positions": functools.partial(arguments.entries, convert=_reals),
}


class PositionScheme:
    """How an input layer counts and encodes positions, for `EmbedderConfig` and the modules.

    `Sinusoidal`, `SinusoidalGrid` and `Learned` are schemes. One of your own is a subclass that is
    a frozen dataclass, with an `encoding` and the fields that it needs. Fields that have the names
    of fields of these schemes are converted and checked like theirs. `save_embedder` writes the
    name of the class, and `load_embedder` finds it once the class is defined.

    Args:
        start: the position of the first token, when no positions are given.
        at_padding: the position of padding, which is not counted. None: `start`.
        pad_id: the id of padding. None: the `pad_id` of the `EmbedderConfig`.
        max_len: the number of positions. None: any number.
        is_learned: whether the encodings are the rows of a parameter, [max_len, d_model], so that
            `encoding` is not called.

    Example:
        >>> import dataclasses
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> @dataclasses.dataclass(frozen=True)
        ... class Ramp(te.PositionScheme):
        ...     step: float
        ...
        ...     def encoding(self, positions, d_model):
        ...         return jnp.repeat(self.step * positions[..., None], d_model, axis=-1)
        >>> embedder = te.Embedder(te.EmbedderConfig(9, 4, scheme=Ramp(0.001)))
        >>> params = embedder.init(jax.random.key(0))
        >>> embedder.apply(params, None, [[1, 2, 3]], is_training=False).shape
        (1, 3, 4)
    """

    start: int = 0
    at_padding: int | None = None
    pad_id: int | None = None
    max_len: Any = None
    is_learned = False

    def __post_init__(self):
        arguments.convert_fields(self, **_CONVERTERS)

    def check(self, d_model: int) -> None:
        """Raises unless the scheme encodes d_model channels."""

    def positions(
        self, ids: Shaped[Array, "... t"], pad_id: int | None = None
    ) -> Int32[Array, "..."]:
        """The positions of ids, [t] or [..., t], in a layer with this padding id.

        Without a padding id, only their length counts. An error if `max_len` is less.
        """
        length = ids.shape[-1]
        if self.max_len is not None and length > self.max_len - self.start:
            most, name = self.max_len - self.start, type(self).__name__
            want = f"at most {most} tokens in a row, the positions of {name} (max_len)"
            raise arguments.value_error("ids or x", want, length)
        check_last_position("start", self.start, length)
        pad_id = pad_id if self.pad_id is None else self.pad_id
        if pad_id is None:
            return jnp.arange(self.start, self.start + length, dtype=jnp.int32)
        at_padding = self.start if self.at_padding is None else self.at_padding
        return positions_of_tokens(ids != pad_id, self.start, at_padding)

    def encoding(self, positions: Any, d_model: int) -> Float[Array, "... d"]:
        """The encodings of positions, an array of integers or float32, in float32 or wider."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinusoidal(PositionScheme, Sinusoids):
    """Sinusoidal positions, for `EmbedderConfig` and `PositionalEncoding`.

    Args:
        base, layout, shift, odd, frequency_scale: see `sinusoidal_encoding`.
        start: the position of the first token, when no positions are given.
        at_padding: the position of padding, which is not counted. None: `start`.
        pad_id: the id of padding. None: the `pad_id` of the `EmbedderConfig`; if that is None too,
            every id is counted.

    Raises:
        TypeError: start, at_padding or pad_id is not a Python int; and as `sinusoidal_encoding`.
        ValueError: as `sinusoidal_encoding`; if it takes d_model to know, when a layer is made.

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

    def check(self, d_model: int) -> None:
        """See `PositionScheme`."""
        channels(self, d_model)

    def encoding(self, positions: Any, d_model: int) -> Float[Array, "... d"]:
        """`sinusoidal_encoding` with the fields of the scheme."""
        return encode(positions, d_model, self, np.float32)


@dataclasses.dataclass(frozen=True)
class SinusoidalGrid(PositionScheme, Sinusoids):
    """Sinusoidal positions on a grid, for the tokens of an image or a video.

    It is a scheme of `EmbedderConfig` and `PositionalEncoding`.

    Tokens are in row-major order: position p of a grid (h, w) is the point (p // w, p % w). A
    position outside the grid gives NaN; a length beyond its number of points is an error. Each axis
    gets an equal part of the channels: part k is the `sinusoidal_encoding` of the coordinate along
    axis axes[k].

    The layer takes flattened patches, [..., h * w, d_model]: a shorter row has the first points.
    Add a class token after the layer. Without a layer, `encoding` is a pure function of positions.

    Args:
        shape: points along each axis, a tuple of ints, [height, width] for an image; at least one
            axis, at most 2**31 - 1 points.
        axes: the axis that each part encodes, a permutation. None: the first axis first
            (tensor2tensor, the positional-encodings package); (1, 0) is width first (MAE,
            diffusers, big_vision).
        axis_positions: for each axis of shape, the coordinates of its points, as numbers that are
            known while tracing; kept as tuples of floats. None: 0, 1, 2, ... For n points in place
            of the m of training, `np.arange(n) * m / n` interpolates. diffusers' are `np.arange(n)
            * base_size / n / interpolation_scale`.
        base, layout, shift, frequency_scale: see `sinusoidal_encoding`, for one part. MAE,
            diffusers and big_vision have `layout="sin_cos"`, big_vision with `shift=1`.
        odd: how d_model channels are split over n axes. `"truncate"`: d_model / n channels for each
            axis; d_model is a multiple of n. `"round_up"`: d_model / n rounded up to an even number
            for each axis, and the concatenation cut to d_model (the positional-encodings package).
            `"zero"`: d_model / n rounded down to an even number for each axis, and zeros in the
            last channels (tensor2tensor).

    Raises:
        TypeError: shape or axes is not a tuple of ints; axis_positions are not sequences of Python
            numbers; and as `sinusoidal_encoding`.
        ValueError: shape is out of range; axes is not a permutation; axis_positions do not fit the
            shape; as `sinusoidal_encoding`; if it takes d_model to know, when a layer is made.

    Example:
        >>> import numpy as np
        >>> import transformer_embed as te
        >>> grid = te.SinusoidalGrid((14, 14), axes=(1, 0), layout="sin_cos")
        >>> te.EmbedderConfig(1024, 256, scheme=grid).scheme.shape
        (14, 14)
        >>> grid.encoding(np.arange(14 * 14).reshape(14, 14), d_model=768).shape
        (14, 14, 768)

    Source:
        Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), appendix D.4,
        https://arxiv.org/abs/2010.11929; He et al., "Masked Autoencoders Are Scalable Vision
        Learners" (2022), https://arxiv.org/abs/2111.06377
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...] | None = None
    axis_positions: Sequence[Sequence[float]] | None = None

    def __post_init__(self):
        super().__post_init__()
        shape, axes = as_grid(self.shape, self.axes)
        arguments.set_fields(self, shape=shape, axes=axes)
        as_coordinates(self.axis_positions, shape)

    def check(self, d_model: int) -> None:
        """See `PositionScheme`."""
        channels(self, part_width(d_model, len(self.shape), self.odd))

    @property
    def max_len(self) -> int:
        """The number of points."""
        return math.prod(self.shape)

    def positions(
        self, ids: Shaped[Array, "... t"], pad_id: int | None = None
    ) -> Int32[Array, "t"]:
        """0, 1, 2, ...: a point of the grid stays where it is, whatever its id."""
        return super().positions(ids)

    def encoding(self, positions: Any, d_model: int) -> Float[Array, "... d"]:
        """[..., d_model] float32 of points [...] of the grid; NaN outside of it."""
        points = arguments.as_int32("positions", positions)
        coordinates = as_coordinates(self.axis_positions, self.shape)
        d_model = arguments.size("d_model", d_model)
        return encode_grid(points, coordinates, self.shape, self.axes, d_model, self)


@dataclasses.dataclass(frozen=True)
class Learned(PositionScheme):
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

    is_learned = True

    def __post_init__(self):
        super().__post_init__()
        position = functools.partial(arguments.integer, at_least=0, at_most=self.max_len - 1)
        arguments.convert_fields(self, start=position, at_padding=position)
