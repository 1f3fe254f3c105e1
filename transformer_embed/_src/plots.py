"""Pictures of encodings, masks and biases; the public `plots` says how to read them."""

import importlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.positions.rotary import apply_rotary
from transformer_embed._src.positions.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    YarnScaling,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

DrawnScaling = LinearScaling | NTKScaling | YarnScaling | Llama3Scaling | LongRopeScaling
# The names of the rows, and the names of the columns.
Tokens = tuple[Sequence[str] | None, Sequence[str] | None]
HIDDEN, SOME, ALLOWED = "#E6E6E6", "#6BAED6", "#0B3C5D"
# Blue, vermilion, bluish green and black from Okabe and Ito's colour-blind-safe palette.
STYLES = (("o", "#0072B2"), ("s", "#D55E00"), ("^", "#009E73"), ("D", "#000000"))
MOST_CELLS_WITH_LINES = 64
# `mask_to_bias` adds half of the lowest number of a dtype, and another bias may add a quarter. In
# float16, this number remains. The softmax of such a low logit is 0 in any dtype.
HIDING_BIAS = -16376
# A legend that would cover the picture goes beside it.
BESIDE: Any = {
    "loc": "upper left",
    "bbox_to_anchor": (1.02, 1),
    "borderaxespad": 0,
    "frameon": False,
}


def plot_encoding(
    encoding: ArrayLike,
    *,
    ax: "Axes | None" = None,
    tokens: Sequence[str] | None = None,
    limit: float | None = None,
) -> "Axes":
    """Draws a heat map of vectors, with a row for each position and a column for each channel.

    Use it to see how an encoding or a table changes from one position to the next.

    Args:
        encoding: An encoding, rows of a table, or their sum, [length, d_model]. Cells that are NaN
            are hatched.
        ax: The Axes to draw on. If None, a new pyplot figure is made.
        tokens: Names for the rows, [length]. If None, the rows are numbered.
        limit: A number above 0. The colours run from -limit to limit, so you can compare pictures.
            If None, the largest magnitude.

    Returns:
        The Axes, with channel across, position (tokens) down, and a colour bar beside it.

    Raises:
        TypeError: encoding is traced; limit is not a Python number.
        ValueError: encoding is not a matrix or is empty; there is not one token for each row; limit
            is not above 0.

    Example:
        >>> import transformer_embed as te
        >>> ax = te.plots.plot_encoding(te.sinusoidal_table(128, 64))
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('channel', 'position (tokens)')

    Source:
        The picture of Alammar, "The Illustrated Transformer" (2018),
        https://jalammar.github.io/illustrated-transformer/
    """
    values = _matrix("encoding", encoding)
    image = _image(ax, values, ("position (tokens)", "channel"), (tokens, None), aspect="auto")
    return _signed(image, "value", limit)


def plot_mask(
    mask: ArrayLike,
    *,
    ax: "Axes | None" = None,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
) -> "Axes":
    """Draws a mask in two tones: which keys each query may attend to.

    Use it to check a mask before you train with it.

    Args:
        mask: A bool mask [T, S], True = may attend. Axes of length 1 may come first, as
            `AttentionMask.dense` and `AttentionMask.tile` have them for a batch of one. Index one
            batch row of a larger batch. An int8 mask, as `AttentionMask.tile_kinds` makes it, is
            drawn in three tones: tiles in which no pair, some pairs or all pairs may attend.
        ax: The Axes to draw on. If None, a new pyplot figure is made.
        query_tokens: Names for the queries, [T]. If None, the queries are numbered.
        key_tokens: Names for the keys, [S]. If None, the keys are numbered.

    Returns:
        The Axes, with key (token attended to) across, query (token that attends) down, and a legend
        of the two tones beside it.

    Raises:
        TypeError: mask is not bool or int8, or is traced.
        ValueError: mask is not one matrix or is empty; there is not one token for each row or
            column.

    Example:
        >>> import transformer_embed as te
        >>> tokens = te.TokenPositions.from_offset(0, 6)
        >>> mask = te.AttentionMask(tokens, causal=True, window=(2, 0))
        >>> ax = te.plots.plot_mask(mask.dense(), key_tokens="the cat sat on the mat".split())
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['may attend', 'hidden']

    Source:
        Child et al., "Generating Long Sequences with Sparse Transformers" (2019), figure 3,
        https://arxiv.org/abs/1904.10509
    """
    if getattr(mask, "dtype", None) == np.int8:
        tones = {"no pair": HIDDEN, "some pairs": SOME, "all pairs": ALLOWED}
    else:
        tones = {"hidden": HIDDEN, "may attend": ALLOWED}
        mask = arguments.as_mask("mask", mask)
    # Each value is the index of its tone. Interpolation would mix them.
    colors = matplotlib("colors").ListedColormap(list(tones.values()))
    options = {"cmap": colors, "vmin": 0, "vmax": len(tones) - 1, "interpolation": "nearest"}
    names = (query_tokens, key_tokens)
    image = _queries_and_keys(ax, _matrix("mask", mask), names, **options)
    patches = [
        matplotlib("patches").Patch(facecolor=tone, edgecolor="grey", label=label)
        for label, tone in reversed(tones.items())
    ]
    image.axes.legend(handles=patches, **BESIDE)
    return image.axes


def plot_rotary(
    positions: ArrayLike,
    head_dim: int,
    *,
    ax: "Axes | None" = None,
    base: float = 10_000.0,
    scaling: DrawnScaling | None = None,
) -> "Axes":
    """Draws points rotated by rotary embeddings: a circle per pair, a dot per position.

    Use it to see how fast each pair of channels turns, with a base or a scaling.

    `apply_rotary` rotates the point (1, 0) in the pair of the innermost circle, (2, 0) in the next
    pair, and so on; the radii only keep the circles apart. The first pair rotates fastest and is
    innermost.

    Args:
        positions: The positions, [length], integers or float32.
        head_dim: The channels of a head, even.
        ax: The Axes to draw on. If None, a new pyplot figure is made.
        base: As in `apply_rotary`.
        scaling: As in `apply_rotary`. An attention factor moves the dots off their circles.

    Returns:
        The Axes, with the first channel of a pair across and its second channel up, and a legend
        of the pairs: four, from the first, an eighth of the head apart. The first six dots of the
        innermost circle are labelled with their positions.

    Raises:
        TypeError: as `apply_rotary`.
        ValueError: as `apply_rotary`.

    Example:
        >>> import transformer_embed as te
        >>> ax = te.plots.plot_rotary(range(6), 64)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['pair 0', 'pair 4', 'pair 8', 'pair 12']

    Source:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), figure 1,
        https://arxiv.org/abs/2104.09864
    """
    array = arguments.as_array("positions", positions)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise arguments.type_error("positions", "numbers", array)
    points = np.atleast_1d(arguments.on_host("positions", array))
    head_dim = arguments.size("head_dim", head_dim)
    half = head_dim // 2
    pairs = range(0, half, max(1, half // 8))[:4]
    # The point (radius, 0) in each pair of channels.
    x = np.zeros([len(points), 1, head_dim], np.float32)
    x[..., pairs] = range(1, len(pairs) + 1)
    rotated = np.asarray(apply_rotary(x, points, base=base, scaling=scaling))[:, 0]
    ax = _axes(ax)
    ax.set(xlabel="first channel of the pair", ylabel="second channel of the pair")
    ax.set(aspect="equal", xmargin=0.1, ymargin=0.1)
    circle = matplotlib("patches").Circle
    for radius, pair in enumerate(pairs, 1):
        ax.add_patch(circle((0, 0), radius, fill=False, color="0.8", zorder=0))
        marker, color = STYLES[radius - 1]
        style = {"marker": marker, "color": color, "linestyle": "", "markersize": 3.5}
        ax.plot(rotated[:, pair], rotated[:, pair + half], label=f"pair {pair}", **style)
    title = "A circle for each pair;\nradii keep them apart.\nNumbers: positions."
    ax.legend(title=title, **BESIDE)
    # The first pair rotates by a radian at each position: a seventh number would lie on the first.
    _number(ax, points[:6], rotated[:, [0, half]])
    return ax


def plot_bias(
    bias: ArrayLike,
    *,
    ax: "Axes | None" = None,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
) -> "Axes":
    """Draws a heat map of the bias that is added to the logit of each query and key.

    Use it to see what ALiBi or T5's buckets do, or where a mask hides keys.

    Args:
        bias: A bias [T, S], such as one head of the result of `alibi_bias` or
            `RelativePositionBias`. Axes of length 1 may come first. Masked cells, with -16376 or
            less, are hatched.
        ax: The Axes to draw on. If None, a new pyplot figure is made.
        query_tokens: Names for the queries, [T]. If None, the queries are numbered.
        key_tokens: Names for the keys, [S]. If None, the keys are numbered.

    Returns:
        The Axes, with key (token attended to) across, query (token that attends) down, and a colour
        bar beside it.

    Raises:
        TypeError: bias is traced.
        ValueError: as `plot_mask`.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> bias = te.alibi_bias(jnp.arange(8), jnp.arange(8), num_heads=4, causal=True)
        >>> bias += te.mask_to_bias(te.causal_mask(8))
        >>> ax = te.plots.plot_bias(bias[0])
        >>> int(ax.images[0].get_array().mask.sum())  # the keys after their query
        28

    Source:
        Press et al., "Train Short, Test Long" (2022), figure 3, https://arxiv.org/abs/2108.12409
    """
    values = _matrix("bias", bias)
    shown = np.ma.masked_where(~(values > HIDING_BIAS), values)
    image = _queries_and_keys(ax, shown, (query_tokens, key_tokens))
    return _signed(image, "added to the logit")


def matplotlib(module: str) -> Any:
    """Returns a module of matplotlib, which is slow to load, and need not be installed."""
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError(f"{error}; pip install '.[plots]' installs it") from error


def _axes(ax: "Axes | None") -> "Axes":
    """Returns the Axes to draw on."""
    if ax is not None:
        return ax
    # pyplot chooses a backend; a given Axes already has one.
    _, new_ax = matplotlib("pyplot").subplots(layout="constrained")
    return new_ax


def _matrix(name: str, array: ArrayLike) -> Float64[np.ndarray, "rows columns"]:
    """Returns a matrix that is not empty, without leading axes of length 1."""
    values = np.asarray(arguments.on_host(name, arguments.as_array(name, array)), np.float64)
    if values.ndim < 2 or not values.size or math.prod(values.shape[:-2]) > 1:
        want = "a matrix that is not empty (choose one by an index, such as x[0])"
        raise arguments.value_error(name, want, f"shape {list(values.shape)}")
    return values.reshape(values.shape[-2:])


def _number(ax: "Axes", positions: Any, points: np.ndarray) -> None:
    """Writes numbers of positions outwards of their points."""
    for position, point in zip(positions, points, strict=False):
        number = f"{position:g}"
        # In points: a letter is about 6 wide, and a dot 4.
        outwards = point * (5 + 3 * len(number))
        text = ax.annotate(number, point, outwards, textcoords="offset points", fontsize="small")
        text.set(ha="center", va="center")


def _image(
    ax: Any, values: np.ndarray, labels: tuple[str, str], tokens: Tokens, **options: Any
) -> "AxesImage":
    """Draws a matrix with labels and names of its rows and columns; without names, numbers."""
    ax = _axes(ax)
    image = ax.imshow(values, **options)
    # The patch behind the image is seen where the matrix has no value.
    ax.patch.set(hatch="////", edgecolor="0.75", linewidth=0)
    sides = zip((ax.yaxis, ax.xaxis), labels, values.shape, tokens, (0, 90), strict=True)
    for axis, label, size, names, rotation in sides:
        axis.set_label_text(label)
        # A matrix with few rows would get ticks between them.
        axis.set_major_locator(matplotlib("ticker").MaxNLocator(integer=True, min_n_ticks=1))
        if names is not None:
            named = arguments.entries("tokens", names, lambda _, token: token)
            arguments.check_same("tokens", f"a name for each {label}", len(named), size)
            # "$x$" is a token, not a formula.
            axis.set_ticks(range(size), named, parse_math=False, rotation=rotation)
    return image


def _queries_and_keys(
    ax: "Axes | None", values: np.ndarray, tokens: Tokens, **options: Any
) -> "AxesImage":
    """Draws a matrix [T, S], with lines between the cells if they are few."""
    labels = ("query (token that attends)", "key (token attended to)")
    image = _image(ax, values, labels, tokens, **options)
    queries, keys = values.shape
    if max(queries, keys) <= MOST_CELLS_WITH_LINES:
        line = {"color": "white", "linewidth": 1}
        image.axes.hlines(np.arange(1, queries) - 0.5, -0.5, keys - 0.5, **line)
        image.axes.vlines(np.arange(1, keys) - 0.5, -0.5, queries - 0.5, **line)
    return image


def _signed(image: Any, label: str, limit: float | None = None) -> "Axes":
    """Returns the Axes of an image, with a colour bar for values from -limit to limit."""
    if limit is None:
        # If all values are zeros, or there is no value, the colours need a range all the same.
        most = np.abs(image.get_array()).max() or 1.0
        extend = "neither"
    else:
        # Values may lie beyond the limit, so the ends of the bar are arrows.
        most = arguments.positive("limit", limit)
        extend = "both"
    image.set(cmap="RdBu_r", clim=(-most, most))
    image.axes.figure.colorbar(image, label=label, extend=extend)
    return image.axes
