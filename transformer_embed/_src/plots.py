"""Draws pictures of encodings, masks and biases. The public `plots` says how to read them."""

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
# The names of the rows, and the names of the columns. None means that they are numbered.
AxisNames = tuple[Sequence[str] | None, Sequence[str] | None]
# The tones of a mask.
HIDDEN, SOME, ALLOWED = "#E6E6E6", "#6BAED6", "#0B3C5D"
# The markers and colours of the pairs: blue, vermilion, bluish green and black from Okabe and Ito's
# palette, which colour-blind people can tell apart.
STYLES = (("o", "#0072B2"), ("s", "#D55E00"), ("^", "#009E73"), ("D", "#000000"))
# A matrix with more rows or columns than this has no lines between its cells.
MOST_CELLS_WITH_LINES = 64
# A bias of this or less hides a key: the softmax of such a low logit is 0 in any dtype. In float16,
# `mask_to_bias` adds -32752. With another bias of up to 16376, the key is still hidden, because
# -32752 + 16376 = -16376.
HIDING_BIAS = -16376
# The options of a legend beside the picture, since one inside would cover the picture.
LEGEND_BESIDE: Any = {
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
        encoding: The vectors, such as an encoding or the rows of a table. Shape [length, d_model].
            NaN is shown as a hatched cell.
        ax: The matplotlib Axes to draw on. If None, a new pyplot figure is made.
        tokens: A name for each of the rows. If None, the rows are numbered.
        limit: A number above 0. The colours run from -limit to limit, so two pictures with the same
            limit can be compared. If None, the limit is the largest magnitude in the array.

    Returns:
        The Axes, with channel across, position (tokens) down, and a colour bar beside it.

    Raises:
        TypeError: `encoding` is traced, or `limit` is not a Python number.
        ValueError: `encoding` is not a matrix, or is empty. The number of tokens differs from the
            number of rows. `limit` is not above 0.

    Example:
        >>> import transformer_embed as te
        >>> ax = te.plots.plot_encoding(te.sinusoidal_table(128, 64))
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('channel', 'position (tokens)')

    Source:
        The picture is from Alammar, "The Illustrated Transformer" (2018),
        https://jalammar.github.io/illustrated-transformer/
    """
    values = _as_matrix("encoding", encoding)
    axis_labels = ("position (tokens)", "channel")
    # Positions have names, and channels are numbered.
    axis_names = (tokens, None)
    image = _draw_matrix(ax, values, axis_labels, axis_names, aspect="auto")
    return _add_colour_bar(image, "value", limit)


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
        mask: A bool mask, in which True means that the query may attend to the key. Shape [T, S]
            for T queries and S keys, or with leading axes of length 1, as `AttentionMask.dense`
            returns for a batch of one. If the batch is larger, pass the mask of one batch row, such
            as `mask[0]`. You can also pass the int8 result of `AttentionMask.tile_kinds`, which
            divides a mask into rectangles, the tiles. The picture then has a cell for each tile.
            The tone of the cell says whether no pair, some pairs or all pairs of the tile may
            attend.
        ax: The matplotlib Axes to draw on. If None, a new pyplot figure is made.
        query_tokens: A name for each of the T queries. If None, the queries are numbered.
        key_tokens: A name for each of the S keys. If None, the keys are numbered.

    Returns:
        The Axes, with key (token attended to) across, query (token that attends) down, and a legend
        of the tones beside it.

    Raises:
        TypeError: `mask` is not bool or int8, or is traced.
        ValueError: `mask` is empty, has fewer than two axes, or holds several matrices (for
            example, with the shape [2, T, S]). The number of query tokens differs from the number
            of rows, or the number of key tokens differs from the number of columns.

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
    # Each value of the mask (0, 1, and 2 for kinds of tiles) is the index of a tone. Interpolation
    # would mix tones.
    color_map = matplotlib("colors").ListedColormap(list(tones.values()))
    last_tone = len(tones) - 1
    options = {"cmap": color_map, "vmin": 0, "vmax": last_tone, "interpolation": "nearest"}
    values = _as_matrix("mask", mask)
    image = _draw_queries_and_keys(ax, values, (query_tokens, key_tokens), **options)
    make_patch = matplotlib("patches").Patch
    patches = []
    for label, tone in reversed(tones.items()):
        patches.append(make_patch(facecolor=tone, edgecolor="grey", label=label))
    image.axes.legend(handles=patches, **LEGEND_BESIDE)
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

    The picture has a circle for each of up to four pairs of channels. The first pair, which rotates
    fastest, has the innermost circle. Each circle has a dot for each position. The dots of the
    innermost circle are the point (1, 0), rotated by `apply_rotary` at each position. On the next
    circle, the point (2, 0) is rotated, and so on. The radii 1, 2, 3 and 4 have no meaning: they
    only keep the circles apart.

    Args:
        positions: The positions, integers or float32. Shape [length].
        head_dim: The number of channels of a head, which is even.
        ax: The matplotlib Axes to draw on. If None, a new pyplot figure is made.
        base: The base of the rotation's frequencies, as `apply_rotary` takes it.
        scaling: The scaling of the frequencies for long texts, as `apply_rotary` takes it. If the
            scaling has an attention factor, such as 1.2, `apply_rotary` also multiplies the result
            by this factor. The dots of the circle with radius 1 are then at the distance 1.2 from
            the origin.

    Returns:
        The Axes. The x axis is the first channel of each pair, and the y axis is the second
        channel. Each drawn pair of channels has a circle, with a dot for each position. The legend
        lists the pairs, for example 0, 4, 8 and 12 of the 32 pairs of a head of 64 channels. The
        first six dots of the innermost circle are labelled with their positions.

    Raises:
        TypeError: `positions` are traced, or are neither integers nor floats. `head_dim` is not a
            Python int. `apply_rotary` refuses the type of `base` or `scaling`.
        ValueError: `head_dim` is odd, or `apply_rotary` refuses the value of `base` or `scaling`.

    Example:
        >>> import transformer_embed as te
        >>> ax = te.plots.plot_rotary(range(6), 64)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['pair 0', 'pair 4', 'pair 8', 'pair 12']

    Source:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), figure 1,
        https://arxiv.org/abs/2104.09864
    """
    position_array = arguments.as_array("positions", positions)
    if jnp.issubdtype(position_array.dtype, jax.dtypes.prng_key):
        raise arguments.type_error("positions", "numbers", position_array)
    drawn_positions = np.atleast_1d(arguments.on_host("positions", position_array))
    head_dim = arguments.size("head_dim", head_dim)
    pair_count = head_dim // 2
    # Of 32 pairs, the pairs 0, 4, 8 and 12 are drawn. Of 6 pairs, the pairs 0, 1, 2 and 3 are.
    step = max(1, pair_count // 8)
    pairs = range(0, pair_count, step)[:4]
    # The vectors are [position, head, channel]. In the layout "half", a pair has the channels
    # `pair` and `pair + pair_count`, which are the two coordinates of a point. The first drawn pair
    # is the point (1, 0) at each position, the second drawn pair is (2, 0), and so on.
    vectors = np.zeros([len(drawn_positions), 1, head_dim], np.float32)
    for radius, pair in enumerate(pairs, 1):
        vectors[..., pair] = radius
    rotated = np.asarray(apply_rotary(vectors, drawn_positions, base=base, scaling=scaling))
    ax = _axes_or_new(ax)
    ax.set(xlabel="first channel of the pair", ylabel="second channel of the pair")
    ax.set(aspect="equal", xmargin=0.1, ymargin=0.1)
    for radius, pair in enumerate(pairs, 1):
        points = rotated[:, 0, [pair, pair + pair_count]]
        _draw_circle(ax, radius, points, f"pair {pair}")
    title = "A circle for each pair;\nradii keep them apart.\nNumbers: positions."
    ax.legend(title=title, **LEGEND_BESIDE)
    # The first pair turns by a radian at each position, and 6 radians are almost a full turn. So a
    # seventh number would lie on the first.
    points_of_first_pair = rotated[:, 0, [0, pair_count]]
    _write_positions(ax, drawn_positions[:6], points_of_first_pair[:6])
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
        bias: The bias, such as one head of the result of `alibi_bias` or `RelativePositionBias`.
            Shape [T, S] for T queries and S keys, or with leading axes of length 1. If you added
            the result of `mask_to_bias`, the cells of hidden keys have no colour and are hatched
            with slanted lines. This holds for every cell with a bias of -16376 or less, because the
            softmax then gives the key a weight of 0. (By default, `mask_to_bias` adds -32752 in
            float16, and a lower number in other dtypes.)
        ax: The matplotlib Axes to draw on. If None, a new pyplot figure is made.
        query_tokens: A name for each of the T queries. If None, the queries are numbered.
        key_tokens: A name for each of the S keys. If None, the keys are numbered.

    Returns:
        The Axes, with key (token attended to) across, query (token that attends) down, and a colour
        bar beside it.

    Raises:
        TypeError: `bias` is traced.
        ValueError: `bias` is empty, has fewer than two axes, or holds several matrices (for
            example, with the shape [2, T, S]). The number of query tokens differs from the number
            of rows, or the number of key tokens differs from the number of columns.

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
    values = _as_matrix("bias", bias)
    # NaN compares as False, so cells that are NaN are masked too.
    is_shown = values > HIDING_BIAS
    shown_values = np.ma.masked_where(~is_shown, values)
    image = _draw_queries_and_keys(ax, shown_values, (query_tokens, key_tokens))
    return _add_colour_bar(image, "added to the logit")


def matplotlib(module: str) -> Any:
    """Returns a module of matplotlib, such as "colors".

    It is imported at the first call, because matplotlib is slow to load and need not be installed.
    """
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError(f"{error}; pip install '.[plots]' installs it") from error


def _axes_or_new(ax: "Axes | None") -> "Axes":
    """Returns the Axes that the caller passed, or the Axes of a new figure of pyplot."""
    if ax is not None:
        return ax
    # pyplot is loaded only here, because loading it chooses a backend for all figures. Axes that
    # the caller passes have a backend already.
    _, new_ax = matplotlib("pyplot").subplots(layout="constrained")
    return new_ax


def _as_matrix(name: str, array: ArrayLike) -> Float64[np.ndarray, "rows columns"]:
    """Returns an array as a matrix of float64, without leading axes of length 1.

    Raises a ValueError if the array is empty, or if its leading axes have more than one matrix.
    """
    host_array = arguments.on_host(name, arguments.as_array(name, array))
    values = np.asarray(host_array, np.float64)
    number_of_matrices = math.prod(values.shape[:-2])
    if values.ndim < 2 or values.size == 0 or number_of_matrices > 1:
        want = "a matrix that is not empty (choose one by an index, such as x[0])"
        raise arguments.value_error(name, want, f"shape {list(values.shape)}")
    matrix_shape = values.shape[-2:]
    return values.reshape(matrix_shape)


def _draw_circle(ax: "Axes", radius: int, points: np.ndarray, label: str) -> None:
    """Draws a circle around the origin, and points [n, 2] in the style of the circle."""
    patches = matplotlib("patches")
    circle = patches.Circle((0, 0), radius, fill=False, color="0.8", zorder=0)
    ax.add_patch(circle)
    # The circles have the radii 1, 2, 3 and 4, and different styles.
    marker, color = STYLES[radius - 1]
    x = points[:, 0]
    y = points[:, 1]
    ax.plot(x, y, label=label, marker=marker, color=color, linestyle="", markersize=3.5)


def _write_positions(ax: "Axes", positions: np.ndarray, points: np.ndarray) -> None:
    """Writes the number of each position beside its point [n, 2], away from the origin."""
    for position, point in zip(positions, points, strict=True):
        number = f"{position:g}"
        # The distance is in printer's points, of which a digit is about 6 wide and a dot 4.
        distance = 5 + 3 * len(number)
        offset = point * distance
        text = ax.annotate(number, point, offset, textcoords="offset points", fontsize="small")
        text.set(ha="center", va="center")


def _draw_matrix(
    ax: "Axes | None",
    values: np.ndarray,
    axis_labels: tuple[str, str],
    names: AxisNames,
    **options: Any,
) -> "AxesImage":
    """Draws a matrix, and hatches the cells that are NaN or masked.

    Args:
        ax: The Axes to draw on, or None for a new figure.
        values: The matrix.
        axis_labels: The label of the vertical axis, and the label of the horizontal one.
        names: The names of the rows, and the names of the columns. If one of them is None, the rows
            or the columns are numbered.
        **options: The options of `imshow`.
    """
    ax = _axes_or_new(ax)
    image = ax.imshow(values, **options)
    # Cells without a value are transparent, so the hatched background of the Axes shows there.
    ax.patch.set(hatch="////", edgecolor="0.75", linewidth=0)
    row_count, column_count = values.shape
    row_names, column_names = names
    row_label, column_label = axis_labels
    _label_axis(ax.yaxis, row_label, row_count, row_names, rotation=0)
    _label_axis(ax.xaxis, column_label, column_count, column_names, rotation=90)
    return image


def _label_axis(
    axis: Any, label: str, count: int, names: Sequence[str] | None, rotation: int
) -> None:
    """Labels an axis of a matrix's picture, and labels the ticks with names or numbers.

    Args:
        axis: The vertical or the horizontal axis of the picture.
        label: The label of the axis.
        count: The number of rows or columns along the axis.
        names: A name for each of them. If None, matplotlib numbers the ticks.
        rotation: The angle of the names, in degrees.
    """
    axis.set_label_text(label)
    # For a matrix with few rows, matplotlib would put ticks between the rows.
    axis.set_major_locator(matplotlib("ticker").MaxNLocator(integer=True, min_n_ticks=1))
    if names is None:
        return

    def accept_any(_: str, name: Any) -> Any:
        """Returns a name unchanged: it may be any object, because matplotlib shows its `str`."""
        return name

    # This raises an error if `names` is a str or no sequence. `entries` also wants a function that
    # checks each name, and here any name is right. The error says "tokens", because the public
    # functions get the names in arguments such as `query_tokens`.
    checked_names = arguments.entries("tokens", names, accept_any)
    arguments.check_same("tokens", f"a name for each {label}", len(checked_names), count)
    # "$x$" is a token, not a formula.
    axis.set_ticks(range(count), checked_names, parse_math=False, rotation=rotation)


def _draw_queries_and_keys(
    ax: "Axes | None", values: np.ndarray, names: AxisNames, **options: Any
) -> "AxesImage":
    """Draws a matrix [T, S], with lines between the cells if they are few."""
    axis_labels = ("query (token that attends)", "key (token attended to)")
    image = _draw_matrix(ax, values, axis_labels, names, **options)
    queries, keys = values.shape
    if max(queries, keys) <= MOST_CELLS_WITH_LINES:
        style = {"color": "white", "linewidth": 1}
        # The centre of the first cell is at 0, so the edges of the cells are at -0.5, 0.5, ...
        edges_between_queries = np.arange(1, queries) - 0.5
        edges_between_keys = np.arange(1, keys) - 0.5
        image.axes.hlines(edges_between_queries, -0.5, keys - 0.5, **style)
        image.axes.vlines(edges_between_keys, -0.5, queries - 0.5, **style)
    return image


def _add_colour_bar(image: Any, label: str, limit: float | None = None) -> "Axes":
    """Colours an image from blue at -limit to red at limit, and returns its Axes with a colour bar.

    If the limit is None, it is the largest magnitude in the image.
    """
    if limit is None:
        # If all values are zeros, or all are masked, the colours need a range all the same.
        highest = np.abs(image.get_array()).max() or 1.0
        extend = "neither"
    else:
        # Values may lie beyond the limit, so the ends of the bar are arrows.
        highest = arguments.positive("limit", limit)
        extend = "both"
    image.set(cmap="RdBu_r", clim=(-highest, highest))
    image.axes.figure.colorbar(image, label=label, extend=extend)
    return image.axes
