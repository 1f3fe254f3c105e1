"""Position schemes: what `TransformerEmbedding` adds to the tokens, as small frozen dataclasses."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32

from transformer_embed import _checks
from transformer_embed.functional.positions import positions_of_tokens
from transformer_embed.functional.sinusoidal import sinusoidal_channels, sinusoidal_encoding, sinusoidal_grid


@dataclasses.dataclass(frozen=True)
class Sinusoidal:
    """Sinusoidal positions, as a field of `EmbedderConfig` and an argument of `TransformerEmbedding`.

    Args:
        base: as in `sinusoidal_encoding`, as are the next ones.
        layout: as above.
        shift: as above.
        odd: as above.
        frequency_scale: as above.
        start: the first position, where none are given; see `TokenPositions.from_ids`.
        at_padding: the position of padding, which is then not counted. None: padding is counted like tokens.
        pad_id: the id of padding, wanted exactly where at_padding is set. (That the token table's row of an id reads as zeros is
            another thing, and another pad_id.)

    Raises:
        TypeError: start, at_padding or pad_id is no Python int.
        ValueError: as `sinusoidal_encoding`; at_padding without pad_id, or the reverse.

    Example:
        >>> import transformer_embed as te
        >>> te.Sinusoidal(layout="sin_cos", shift=1).base
        10000.0

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.5, https://arxiv.org/abs/1706.03762
    """

    base: float = 10_000.0
    layout: str = "interleaved"
    shift: float | None = None
    odd: str = "truncate"
    frequency_scale: float = 1.0
    start: int = 0
    at_padding: int | None = None
    pad_id: int | None = None

    def __post_init__(self):
        self.check(1)
        _check_start(self.start, self.at_padding, self.pad_id)

    def check(self, d_model: int) -> None:
        """Raises if these options do not make an encoding of d_model channels."""
        sinusoidal_channels(d_model, self.base, self.layout, self.shift, self.odd, self.frequency_scale)

    def encoding(self, positions: ArrayLike, d_model: int) -> Float[Array, "... d"]:
        """The float32 encoding of positions."""
        options = {"base": self.base, "layout": self.layout, "shift": self.shift, "odd": self.odd}
        return sinusoidal_encoding(positions, d_model, frequency_scale=self.frequency_scale, **options)

    def count(self, length: int) -> Int32[Array, "t"]:
        """The positions of a row without padding."""
        _checks.last_position_fits("start", self.start, length)
        return jnp.arange(self.start, self.start + length, dtype=jnp.int32)

    def positions(self, ids: Int32[Array, "... t"]) -> Int32[Array, "... t"]:
        """The positions of ids, where none are given."""
        return _positions(self, ids)


@dataclasses.dataclass(frozen=True)
class SinusoidalGrid:
    """Sinusoidal positions on a grid, as a field of `EmbedderConfig` and an argument of `TransformerEmbedding`: for tokens of an image.

    Tokens stand row by row, the last axis fastest: position p of a grid (h, w) is the point (p // w, p % w). A position outside the
    grid gives NaN; a length past its points is an error.

    Args:
        shape: points along each axis; see `sinusoidal_grid`, as for all fields.
        axes: as above.
        base: as above.
        layout: as above.
        shift: as above.
        frequency_scale: as above.

    Raises:
        TypeError: shape or axes is no tuple; and as `sinusoidal_grid`.
        ValueError: as `sinusoidal_grid`.

    Example:
        >>> import transformer_embed as te
        >>> te.EmbedderConfig(1024, 256, positions=te.SinusoidalGrid((16, 16), axes=(1, 0))).positions.shape
        (16, 16)

    Source:
        Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), appendix D.4, https://arxiv.org/abs/2010.11929
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...] | None = None
    base: float = 10_000.0
    layout: str = "interleaved"
    shift: float | None = None
    frequency_scale: float = 1.0

    def __post_init__(self):
        for name, value, wanted in (("shape", self.shape, tuple), ("axes", self.axes, tuple | None)):
            if not isinstance(value, wanted):
                raise TypeError(_checks.wanted(name, "a tuple of ints", repr(value)))
        self.check(max(2 * len(self.shape), 1))

    def check(self, d_model: int) -> None:
        """Raises if these options do not make an encoding of d_model channels."""
        jax.eval_shape(lambda: self.encoding(np.zeros(1, np.int32), d_model))

    def encoding(self, positions: ArrayLike, d_model: int) -> Float[Array, "... d"]:
        """The float32 encoding of positions."""
        options = dataclasses.asdict(self)
        return sinusoidal_grid(options.pop("shape"), d_model, positions=positions, **options)

    def positions(self, ids: Int32[Array, "... t"]) -> Int32[Array, "t"]:
        """0..length-1, for a length of at most the points of the grid."""
        length, points = ids.shape[-1], math.prod(self.shape)
        if length > points:
            raise ValueError(_checks.wanted("ids", f"a length of at most the {points} points of the grid", f"length {length}"))
        return jnp.arange(length, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Learned:
    """Learned positions, as a field of `EmbedderConfig` and an argument of `TransformerEmbedding`.

    Args:
        max_len: number of positions, at least 1.
        start: the first position, where none are given: BART and OPT count from 2; see `TokenPositions.from_ids`.
        at_padding: the position of padding, which is then not counted (RoBERTa and OPT: 1). None: padding is counted like tokens.
        pad_id: the id of padding, wanted exactly where at_padding is set. (That the token table's row of an id reads as zeros is
            another thing, and another pad_id.)

    Raises:
        TypeError: an argument is no Python int.
        ValueError: max_len is below 1; start or at_padding outside [0, max_len); at_padding without pad_id, or the reverse.

    Example:
        >>> import transformer_embed as te
        >>> roberta = te.Learned(max_len=514, start=2, at_padding=1, pad_id=1)
        >>> te.EmbedderConfig(50265, 768, positions=roberta).positions.start
        2

    Source:
        Gehring et al., "Convolutional Sequence to Sequence Learning" (2017), section 3.1, https://arxiv.org/abs/1705.03122
    """

    max_len: int
    start: int = 0
    at_padding: int | None = None
    pad_id: int | None = None

    def __post_init__(self):
        _checks.integer("max_len", self.max_len, at_least=1)
        _check_start(self.start, self.at_padding, self.pad_id)
        for name, position in (("start", self.start), ("at_padding", self.at_padding)):
            if position is not None and not 0 <= position < self.max_len:
                raise ValueError(_checks.wanted(name, f"an int in [0, max_len = {self.max_len})", position))

    def check(self, d_model: int) -> None:
        """Any d_model will do."""

    def count(self, length: int) -> Int32[Array, "t"]:
        """The positions of a row without padding, for a length that the table holds."""
        rows = self.max_len - self.start
        if length > rows:
            what = "max_len" if self.start == 0 else "max_len - start"
            raise ValueError(_checks.wanted("ids or x", f"a length of at most {what} = {rows}", f"length {length}"))
        return jnp.arange(self.start, self.start + length, dtype=jnp.int32)

    def positions(self, ids: Int32[Array, "... t"]) -> Int32[Array, "... t"]:
        """The positions of ids, where none are given."""
        return _positions(self, ids)


Scheme = Sinusoidal | SinusoidalGrid | Learned


def _positions(scheme: Sinusoidal | Learned, ids: Int32[Array, "... t"]) -> Int32[Array, "... t"]:
    counted = scheme.count(ids.shape[-1])
    return counted if scheme.at_padding is None else positions_of_tokens(ids != scheme.pad_id, scheme.start, scheme.at_padding)


def _check_start(start: int, at_padding: int | None, pad_id: int | None) -> None:
    _checks.int32("start", start)
    if at_padding is None:
        _checks.unwanted("pad_id", pad_id, "at_padding is not set")
        return
    _checks.int32("at_padding", at_padding)
    if pad_id is None:
        raise ValueError(_checks.wanted("pad_id", "the id of padding, since at_padding is set", "None"))
    _checks.int32("pad_id", pad_id)
