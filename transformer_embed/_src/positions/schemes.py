"""Holds the position schemes: how an input layer counts and encodes positions."""

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
    # The three converters below make Python ints, because sums with a narrow numpy integer would
    # wrap.
    "start": arguments.int32,
    "at_padding": arguments.int32,
    "pad_id": arguments.int32,
    "max_len": arguments.size,
    "axis_positions": functools.partial(arguments.entries, convert=_reals),
}


class PositionScheme:
    """Says how an input layer counts and encodes positions, for `EmbedderConfig` and the modules.

    A scheme says which position vectors are added to the token vectors. `Sinusoidal`,
    `SinusoidalGrid` and `Learned` are schemes. To make a scheme of your own, write a subclass of
    `PositionScheme` as a frozen dataclass. Give it the method `encoding`, and the fields that this
    method needs. If you use a field name of the three schemes, such as `start` or `base`, your
    field is converted and checked in the same way. `save_embedder` writes the name of your class
    into the file, so define the class before you call `load_embedder`.

    Args:
        start: The position of the first token, if you pass no positions.
        at_padding: The position of all padding, which is not counted. If None, the position of
            padding is `start`.
        pad_id: The id of padding. If None, the `pad_id` of the `EmbedderConfig` is used.
        max_len: The number of positions. If None, there is no limit.
        is_learned: Whether the encodings are the rows of a parameter of shape [max_len, d_model].
            If True, the layer looks the rows up, and does not call `encoding`.

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

    def __post_init__(self) -> None:
        """Converts and checks the fields."""
        arguments.convert_fields(self, **_CONVERTERS)

    def check(self, d_model: int) -> None:
        """Raises a ValueError unless the scheme can encode d_model channels."""

    def positions(
        self, ids: Shaped[Array, "... t"], pad_id: int | None = None
    ) -> Int32[Array, "..."]:
        """Counts the positions of ids. A layer calls this if you pass no positions.

        Args:
            ids: The ids. Shape [length] or [..., length].
            pad_id: The id of padding in the layer, which is used if the `pad_id` of the scheme is
                None.

        Returns:
            The positions, int32 [..., length]. If both `pad_id`s are None, all batch rows have the
            same positions, and the shape is [length].

        Raises:
            ValueError: A batch row has more ids than the scheme has positions.
        """
        length = ids.shape[-1]
        self._check_length(length)
        if self.pad_id is not None:
            pad_id = self.pad_id
        if pad_id is None:
            return jnp.arange(self.start, self.start + length, dtype=jnp.int32)
        position_of_padding = self.start if self.at_padding is None else self.at_padding
        is_token = ids != pad_id
        return positions_of_tokens(is_token, self.start, position_of_padding)

    def _check_length(self, length: int) -> None:
        """Raises a ValueError if a row of this length has more tokens than there are positions."""
        if self.max_len is not None:
            most_tokens = self.max_len - self.start
            if length > most_tokens:
                name = type(self).__name__
                want = f"at most {most_tokens} tokens in a row, the positions of {name} (max_len)"
                raise arguments.value_error("ids or x", want, length)
        check_last_position("start", self.start, length)

    def encoding(self, positions: Any, d_model: int) -> Float[Array, "... d"]:
        """Computes the encodings of positions. A scheme of your own defines this method.

        Args:
            positions: The positions. Integers or float32, of any shape.
            d_model: The number of channels.

        Returns:
            The encodings, in float32 or a wider dtype. Shape [..., d_model].
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinusoidal(PositionScheme, Sinusoids):
    """Adds sinusoidal encodings, as a scheme of `EmbedderConfig` and `PositionalEncoding`.

    Use it for texts of any length, because it needs no table.

    Args:
        base, layout, shift, odd, frequency_scale: The arguments of `sinusoidal_encoding` with these
            names.
        start: The position of the first token, if you pass no positions.
        at_padding: The position of all padding, which is not counted. If None, the position of
            padding is `start`.
        pad_id: The id of padding. If None, the `pad_id` of the `EmbedderConfig` is used. If both
            are None, every id is counted as a token.

    Raises:
        TypeError: `start`, `at_padding` or `pad_id` is not a Python int. An option of
            `sinusoidal_encoding` has a wrong type.
        ValueError: An option of `sinusoidal_encoding` is out of its range. If an option does not
            fit the `d_model` of a layer, the error is raised when you make the layer.

    Example:
        >>> import transformer_embed as te
        >>> te.Sinusoidal(layout="sin_cos", shift=1).base
        10000.0

    Source:
        The encoding is from Vaswani et al., "Attention Is All You Need" (2017), section 3.5,
        https://arxiv.org/abs/1706.03762
    """

    start: int = 0
    at_padding: int | None = None
    pad_id: int | None = None

    def check(self, d_model: int) -> None:
        """See `PositionScheme`."""
        channels(self, d_model)

    def encoding(self, positions: Any, d_model: int) -> Float[Array, "... d"]:
        """Computes `sinusoidal_encoding` with the fields of the scheme."""
        return encode(positions, d_model, self, np.float32)


@dataclasses.dataclass(frozen=True)
class SinusoidalGrid(PositionScheme, Sinusoids):
    """Adds sinusoidal encodings of the points of a grid, for the tokens of an image or a video.

    Pass a `SinusoidalGrid` as the scheme of an `EmbedderConfig` or a `PositionalEncoding`. The
    layer then takes flattened patches, [..., h * w, d_model], in row-major order: position p of a
    grid (h, w) is the point `(p // w, p % w)`. If you pass only n patches to the layer, and the
    grid has more points, the patches get the positions 0 to n - 1. If the model has a class token,
    add the token after the layer. If you have no layer, call the method `encoding` of the scheme,
    which is a pure function of positions.

    Each axis gets an equal part of the channels. Part k is the `sinusoidal_encoding` of the
    coordinate along axis axes[k].

    Args:
        shape: The number of points along each axis, a tuple of ints, (height, width) for an image.
            There is at least one axis, and there are at most 2**31 - 1 points.
        axes: Which axis each part of the channels encodes, a permutation of 0, 1, ... For an image,
            (0, 1) encodes the height in the first half of the channels and the width in the second
            half. Pass (1, 0) for the code of MAE, diffusers and big_vision, which encodes the width
            first. If None, the order is 0, 1, ..., as in tensor2tensor and the package
            positional-encodings.
        axis_positions: The coordinates of the points along each axis, one sequence of numbers per
            axis. The numbers cannot be traced. Set it to run a model on a grid of a new size. If
            you have n points along an axis and the model was trained with m points, pass
            `np.arange(n) * m / n` for this axis. For diffusers, pass
            `np.arange(n) * base_size / n / interpolation_scale`, where `base_size` and
            `interpolation_scale` are attributes of the model's `PatchEmbed`. If None, the
            coordinates are 0, 1, 2, ...
        base, layout, shift, frequency_scale: The arguments of `sinusoidal_encoding` with these
            names. The values are the same for all axes. Pass `layout="sin_cos"` for the code of
            MAE, diffusers and big_vision, and for big_vision also `shift=1`.
        odd: How d_model channels are split over n axes. In the examples, d_model = 10 and n = 2.

            - `"truncate"` gives each axis d_model / n channels, so d_model must be a multiple of n.
              For example, each axis gets 5 channels.
            - `"round_up"` rounds d_model / n up to an even number of channels for each axis, and
              leaves out the last channels, as in the package positional-encodings. For example,
              each axis gets 6 channels, and the last 2 of the 12 channels are left out.
            - `"zero"` rounds d_model / n down to an even number of channels for each axis, and puts
              zeros into the last channels, as in tensor2tensor. For example, each axis gets 4
              channels, and the last 2 of the 10 channels are zeros.

    Raises:
        TypeError: `shape` or `axes` is not a tuple of ints, or `axis_positions` does not hold
            sequences of numbers. An option of `sinusoidal_encoding` has a wrong type.
        ValueError: `shape` is out of its range, or `axes` is not a permutation. Along some axis,
            `axis_positions` has more or fewer numbers than the grid has points. A batch row has
            more patches than the grid has points. An option of `sinusoidal_encoding` is out of its
            range. If an option does not fit the `d_model` of a layer, the error is raised when you
            make the layer.

    Example:
        >>> import numpy as np
        >>> import transformer_embed as te
        >>> grid = te.SinusoidalGrid((14, 14), axes=(1, 0), layout="sin_cos")
        >>> te.EmbedderConfig(1024, 256, scheme=grid).scheme.shape
        (14, 14)
        >>> grid.encoding(np.arange(14 * 14).reshape(14, 14), d_model=768).shape
        (14, 14, 768)

    Edge cases:
        The encoding of a position outside the grid is NaN.

    Source:
        Encodings of two axes are in Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021),
        appendix D.4, https://arxiv.org/abs/2010.11929. Sinusoids of a grid are used by He et al.,
        "Masked Autoencoders Are Scalable Vision Learners" (2022), https://arxiv.org/abs/2111.06377
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...] | None = None
    axis_positions: Sequence[Sequence[float]] | None = None

    def __post_init__(self) -> None:
        """Converts and checks the fields."""
        super().__post_init__()
        shape, axes = as_grid(self.shape, self.axes)
        arguments.set_fields(self, shape=shape, axes=axes)
        as_coordinates(self.axis_positions, shape)

    def check(self, d_model: int) -> None:
        """See `PositionScheme`."""
        channels(self, part_width(d_model, len(self.shape), self.odd))

    @property
    def max_len(self) -> int:
        """Returns the number of points."""
        return math.prod(self.shape)

    def positions(
        self, ids: Shaped[Array, "... t"], pad_id: int | None = None
    ) -> Int32[Array, "t"]:
        """Returns 0, 1, 2, ..., because a point of the grid is never padding."""
        return super().positions(ids)

    def encoding(self, positions: Any, d_model: int) -> Float[Array, "... d"]:
        """Computes the encodings, float32 [..., d_model], of points [...] of the grid."""
        points = arguments.as_int32("positions", positions)
        coordinates = as_coordinates(self.axis_positions, self.shape)
        d_model = arguments.size("d_model", d_model)
        return encode_grid(points, coordinates, self.shape, self.axes, d_model, self)


@dataclasses.dataclass(frozen=True)
class Learned(PositionScheme):
    """Adds a learned vector for each position, as a scheme of `EmbedderConfig`.

    Use it for models with a table of positions, such as BERT and GPT-2. You can also pass this
    scheme to `PositionalEncoding`.

    Args:
        max_len: The number of positions, at least 1. The table has one row for each position.
        start: The position of the first token, if you pass no positions. Pass 2 for BART, OPT and
            RoBERTa.
        at_padding: The position of all padding, which is not counted. Pass 1 for OPT and RoBERTa.
            If None, the position of padding is `start`.
        pad_id: The id of padding. If None, the `pad_id` of the `EmbedderConfig` is used. If both
            are None, every id is counted as a token.

    Raises:
        TypeError: An argument is not a Python int.
        ValueError: `max_len` is below 1, or `start` or `at_padding` is outside [0, max_len).

    Example:
        >>> import transformer_embed as te
        >>> roberta = te.Learned(max_len=514, start=2, at_padding=1, pad_id=1)
        >>> te.EmbedderConfig(50265, 768, scheme=roberta).scheme.start
        2

    Source:
        Learned positions are from Gehring et al., "Convolutional Sequence to Sequence Learning"
        (2017), section 3.1, https://arxiv.org/abs/1705.03122
    """

    # Other schemes have a default.
    max_len: int = dataclasses.field()
    _: dataclasses.KW_ONLY
    start: int = 0
    at_padding: int | None = None
    pad_id: int | None = None

    is_learned = True

    def __post_init__(self) -> None:
        """Converts and checks the fields."""
        super().__post_init__()
        position = functools.partial(arguments.integer, at_least=0, at_most=self.max_len - 1)
        arguments.convert_fields(self, start=position, at_padding=position)
