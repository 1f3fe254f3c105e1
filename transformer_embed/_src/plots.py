"""Pictures of encodings, masks and biases; the public `plots` says how to read them."""

import decimal
import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.functional import phase
from transformer_embed._src.functional.rotary import apply_rotary
from transformer_embed._src.functional.rotary_scaling import (
    Scaling,
    check_scaling,
    scaled_frequencies,
    unscaled,
)
from transformer_embed._src.functional.sinusoidal import sinusoidal_encoding

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage
    from matplotlib.lines import Line2D

HIDDEN, SOME, ALLOWED = "#E6E6E6", "#6BAED6", "#0B3C5D"
DIVERGING, SEQUENTIAL = "RdBu_r", "cividis"
# Blue, vermilion, bluish green and black from Okabe and Ito's colour-blind-safe palette.
BLUE, VERMILION, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#000000"
STYLES = (("o", BLUE, "-"), ("s", VERMILION, "--"), ("^", GREEN, ":"), ("D", BLACK, "-."))
MOST_CELLS_WITH_LINES = 64
# Where a legend goes that would cover the picture.
BESIDE: Mapping[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (1.02, 1.0),
    "borderaxespad": 0.0,
}


def plot_encoding(
    encoding: ArrayLike,
    *,
    ax: "Axes | None" = None,
    tokens: Sequence[str] | None = None,
    limit: float | None = None,
) -> "Axes":
    """A heat map of vectors, a row for each position and a column for each channel.

    Args:
        encoding: [length, d_model], a floating dtype: an encoding, rows of a table, or their sum.
            Cells that are NaN are hatched.
        ax: where to draw; None: a new pyplot figure.
        tokens: [length] names for the rows; None: rows are numbered.
        limit: the colours run from -limit to limit; above 0. None: the largest magnitude.

    Returns:
        The Axes, with channel across, position (tokens) down, and a colour bar beside it.

    Raises:
        TypeError: encoding does not have a floating dtype, or is traced; ax is not an Axes; limit
            is not a Python number.
        ValueError: encoding is not of rank 2 or is empty; there is not one token for each row;
            limit is not above 0.

    Example:
        >>> import transformer_embed as te
        >>> ax = te.plots.plot_encoding(te.sinusoidal_table(128, 64))
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('channel', 'position (tokens)')

    Source:
        The picture of Alammar, "The Illustrated Transformer" (2018),
        https://jalammar.github.io/illustrated-transformer/
    """
    values = _table("encoding", encoding)
    largest = np.nanmax(np.abs(values), initial=0.0)
    most = largest or 1.0
    if limit is not None:
        most = arguments.real("limit", limit, above=0)
    extend = "both" if largest > most else "neither"
    names = {"position (tokens)": _names("tokens", tokens, len(values)), "channel": None}
    image = _image(ax, values, names, aspect="auto", cmap=DIVERGING, vmin=-most, vmax=most)
    image.axes.figure.colorbar(image, label="value", extend=extend)
    return image.axes


def plot_wavelengths(
    d_model: int,
    *,
    ax: "Axes | None" = None,
    base: float = 10_000.0,
    scaling: Scaling | None = None,
    label: str | None = None,
) -> "Axes":
    """The wavelength of each pair of channels, in positions.

    Draw several on one Axes to compare them.

        wavelength[i] = 2 * pi * base ** (2i / d_model)

    Args:
        d_model: number of channels, at least 1: of an encoding, or the rotated channels of a head.
        ax: where to draw; None: a new pyplot figure.
        base: as in `sinusoidal_encoding` and `apply_rotary`; above 0.
        scaling: as in `apply_rotary`; needs an even d_model. None: the formula above.
        label: name in the legend; None: no legend.

    Returns:
        The Axes, with pair of channels across and wavelength (tokens, logarithmic) up.

    Raises:
        TypeError: d_model is not a Python int; base is not a Python number; scaling is not a
            scaling of this package; ax is not an Axes.
        ValueError: d_model is below 1, or odd with a scaling; base is not above 0; the scaling does
            not fit d_model.

    Example:
        >>> import transformer_embed as te
        >>> ax = te.plots.plot_wavelengths(128, base=5e5, label="as trained")
        >>> scaling = te.Llama3Scaling(8.0)
        >>> ax = te.plots.plot_wavelengths(128, ax=ax, base=5e5, scaling=scaling, label="Llama 3.1")
        >>> ax.get_ylabel()
        'wavelength (tokens)'

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.5,
        https://arxiv.org/abs/1706.03762
    """
    d_model = arguments.integer("d_model", d_model, at_least=1)
    base = arguments.real("base", base, above=0)
    check_scaling(scaling)
    if scaling and d_model % 2:
        raise arguments.value_error("d_model", "an even number of channels, to scale", d_model)
    frequencies = scaled_frequencies(scaling, d_model, base).frequencies
    wavelengths = [float(2 * phase.PI / frequency) for frequency in frequencies]
    ax = _axes(ax)
    _plot(ax, range(len(wavelengths)), wavelengths, label, linestyle="")
    return _finished(ax, "pair of channels", "wavelength (tokens)", yscale="log")


def plot_similarity(
    encoding: ArrayLike, *, ax: "Axes | None" = None, label: str | None = None
) -> "Axes":
    """The dot product of two positions' vectors as a function of their distance.

    It shows how similar near and far positions are. The line is the mean over all pairs of
    positions at a distance; the band goes from the minimum to the maximum. Sinusoids have no band,
    because their dot product depends only on the distance. Needs memory for length * length
    numbers.

    Args:
        encoding: [length, d_model], a floating dtype: vectors of positions 0..length-1.
        ax: where to draw; None: a new pyplot figure.
        label: name in the legend; None: no legend.

    Returns:
        The Axes, with distance (tokens) across and dot product up.

    Raises:
        TypeError: encoding does not have a floating dtype, or is traced; ax is not an Axes.
        ValueError: encoding is not of rank 2, or is empty.

    Example:
        >>> import transformer_embed as te
        >>> ax = te.plots.plot_similarity(te.sinusoidal_table(128, 64))
        >>> round(float(ax.lines[0].get_ydata()[0]), 3)  # a vector with itself: d_model / 2
        32.0

    Source:
        Wang and Chen, "What Do Position Embeddings Learn?" (2020), figure 1,
        https://arxiv.org/abs/2010.04903, who show the whole matrix of cosines.
    """
    values = _table("encoding", encoding)
    products = values @ values.T
    diagonals = [np.diagonal(products, distance) for distance in range(len(values))]
    statistics = [(pairs.mean(), pairs.min(), pairs.max()) for pairs in diagonals]
    mean, low, high = np.transpose(statistics)
    ax = _axes(ax)
    line = _plot(ax, range(len(mean)), mean, label, marker="")
    ax.fill_between(range(len(mean)), low, high, color=line.get_color(), alpha=0.25, linewidth=0)
    return _finished(ax, "distance (tokens)", "dot product")


def plot_mask(
    mask: ArrayLike,
    *,
    ax: "Axes | None" = None,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    batch_index: int | None = None,
    head: int | None = None,
) -> "Axes":
    """A mask in two tones: which keys each query may attend to.

    Args:
        mask: bool [T, S], [B, T, S] as `AttentionMask.tile` makes it, or [B, heads, T, S] as
            `AttentionMask.dense` does. True = may attend. Or int8 [B, T / size, S / size] as
            `AttentionMask.tile_kinds` makes it, drawn in three tones: tiles in which no pair, some
            pairs or all pairs may attend.
        ax: where to draw; None: a new pyplot figure.
        query_tokens: [T] names for the queries; None: queries are numbered. A mask with one row for
            all queries (T = 1) is drawn with a row for each name.
        key_tokens: [S] names for the keys; None: keys are numbered.
        batch_index: the row of the batch to draw, from 0; may be None if B is 1.
        head: the head to draw, from 0; may be None if there is one mask for all heads.

    Returns:
        The Axes, with key (token attended to) across, query (token that attends) down, and a legend
        of the two tones beside it.

    Raises:
        TypeError: mask is not bool or int8, or is traced; ax is not an Axes; an index is not a
            Python int.
        ValueError: mask is of another rank or is empty; an index is missing or out of range; there
            is not one token for each row or column.

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
        array = jnp.asarray(mask)
    else:
        tones = {"hidden": HIDDEN, "may attend": ALLOWED}
        array = arguments.as_mask("mask", mask)
    values = _one_matrix("mask", array, batch_index, head)
    colors = matplotlib_module("colors").ListedColormap(list(tones.values()))
    # Each value is the index of its tone. Interpolation would mix them.
    options = {"cmap": colors, "vmin": 0, "vmax": len(tones) - 1, "interpolation": "nearest"}
    axes = _queries_and_keys(ax, values, query_tokens, key_tokens, **options).axes
    patch = matplotlib_module("patches").Patch
    patches = [
        patch(facecolor=tone, edgecolor="grey", label=label)
        for label, tone in reversed(tones.items())
    ]
    axes.legend(handles=patches, frameon=False, **BESIDE)
    return axes


def plot_rotary(
    positions: ArrayLike,
    head_dim: int,
    *,
    ax: "Axes | None" = None,
    base: float = 10_000.0,
    scaling: Scaling | None = None,
    pairs: Sequence[int] | None = None,
) -> "Axes":
    """Points rotated by rotary embeddings: a circle for each pair, a dot for each position.

    `apply_rotary` rotates the point (1, 0) in the pair of the innermost circle, (2, 0) in the next
    pair, and so on; the radii only keep the circles apart. The first pair rotates fastest and is
    innermost.

    Args:
        positions: [length] integers, or float32.
        head_dim: channels of a head, even.
        ax: where to draw; None: a new pyplot figure.
        base: as in `apply_rotary`.
        scaling: as in `apply_rotary`. An attention factor moves the dots off their circles.
        pairs: the pairs to draw, in 0..head_dim // 2 - 1, from the innermost circle outwards. None:
            four, from the first, an eighth of the head apart.

    Returns:
        The Axes, with the first channel of a pair across and its second channel up, and a legend
        of the pairs. Dots of the innermost circle are labelled with their positions unless labels
        would overlap.

    Raises:
        TypeError: as `apply_rotary`; ax is not an Axes; a pair is not a Python int.
        ValueError: as `apply_rotary`; positions are not of rank 1 or are empty; pairs are empty or
            outside the head.

    Example:
        >>> import transformer_embed as te
        >>> ax = te.plots.plot_rotary(range(6), 64)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['pair 0', 'pair 4', 'pair 8', 'pair 12']

    Source:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), figure 1,
        https://arxiv.org/abs/2104.09864
    """
    half = arguments.integer("head_dim", head_dim, at_least=2) // 2
    if pairs is None:
        pairs = range(0, half, max(1, half // 8))[:4]
    chosen = arguments.entries("pairs", pairs, arguments.integer, at_least=0, at_most=half - 1)
    if not chosen:
        raise arguments.value_error("pairs", f"at least one of 0..{half - 1}", pairs)
    places = _places(positions)
    # The point (radius, 0) in each pair of channels.
    x = np.zeros([len(places), 1, head_dim], np.float32)
    x[..., chosen] = range(1, len(chosen) + 1)
    rotated = np.asarray(apply_rotary(x, places, base=base, scaling=scaling))[:, 0]
    ax = _axes(ax)
    ax.set(xlabel="first channel of the pair", ylabel="second channel of the pair")
    ax.set(aspect="equal", xmargin=0.1, ymargin=0.1)
    circle = matplotlib_module("patches").Circle
    for radius, pair in enumerate(chosen, 1):
        ax.add_patch(circle((0, 0), radius, fill=False, color="0.8", linewidth=1, zorder=0))
        _plot(ax, rotated[:, pair], rotated[:, pair + half], f"pair {pair}", linestyle="")
    title = "A circle for each pair;\nradii keep them apart.\nNumbers: positions."
    ax.legend(title=title, frameon=False, **BESIDE)
    _number_points(ax, places, rotated[:, [chosen[0], chosen[0] + half]])
    return ax


def plot_bias(
    bias: ArrayLike,
    *,
    ax: "Axes | None" = None,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    batch_index: int | None = None,
    head: int | None = None,
) -> "Axes":
    """A heat map of the bias that is added to the logit of each query and key.

    Args:
        bias: [T, S] or [B, heads, T, S], a floating dtype, as `alibi_bias` and
            `RelativePositionBias` make it. After `mask_to_bias` is added, masked cells are hatched.
        ax: where to draw; None: a new pyplot figure.
        query_tokens: [T] names for the queries; None: queries are numbered.
        key_tokens: [S] names for the keys; None: keys are numbered.
        batch_index: the row of the batch to draw, from 0; may be None if B is 1.
        head: the head to draw, from 0; may be None if there is only one.

    Returns:
        The Axes, with key (token attended to) across, query (token that attends) down, and a colour
        bar beside it.

    Raises:
        TypeError: bias does not have a floating dtype, or is traced; ax is not an Axes; an index is
            not a Python int.
        ValueError: as `plot_mask`.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> bias = te.alibi_bias(jnp.arange(8), jnp.arange(8), num_heads=4)
        >>> bias += te.mask_to_bias(te.causal_mask(8))
        >>> ax = te.plots.plot_bias(bias, head=0)
        >>> int(ax.images[0].get_array().mask.sum())  # the keys after their query
        28

    Source:
        Press et al., "Train Short, Test Long" (2022), figure 3, https://arxiv.org/abs/2108.12409
    """
    array = arguments.as_floats("bias", bias)
    largest = min(float(jnp.finfo(array.dtype).max), float(jnp.finfo(jnp.float32).max))
    values = _one_matrix("bias", array, batch_index, head).astype(np.float64)
    # mask_to_bias adds minus half of the largest number; a bias added to that may raise it by up to
    # a quarter.
    shown = np.ma.masked_where(~(values > -largest / 4), values)
    options: dict[str, Any] = {"cmap": SEQUENTIAL}
    if (shown < 0).any() and (shown > 0).any():
        most = np.abs(shown).max()
        options = {"cmap": DIVERGING, "vmin": -most, "vmax": most}
    image = _queries_and_keys(ax, shown, query_tokens, key_tokens, **options)
    image.axes.figure.colorbar(image, label="added to the logit")
    return image.axes


def plot_error(
    d_model: int,
    *,
    ax: "Axes | None" = None,
    positions: ArrayLike | None = None,
    base: float = 10_000.0,
) -> "Axes":
    """The largest error of a sinusoidal encoding at each position.

    One line is for this package, one for the usual float32 product. Exact values are computed with
    75 decimal digits, and whole turns are subtracted before the sine.

    Args:
        d_model: number of channels, at least 1.
        ax: where to draw; None: a new pyplot figure.
        positions: [n] integers, at least 1 because the axis is logarithmic. None: a hundred from 1
            to 2**31 - 1.
        base: as in `sinusoidal_encoding`.

    Returns:
        The Axes, with position (tokens) across and largest error up, both logarithmic, and a dotted
        line at the error of rounding a value near 1 to float32.

    Raises:
        TypeError: positions are not integers, or are traced; ax is not an Axes; d_model is not a
            Python int; base is not a Python number.
        ValueError: positions are not of rank 1, are empty, below 1 or outside int32; d_model is
            below 1; base is not above 0.

    Example:
        >>> import transformer_embed as te
        >>> ax = te.plots.plot_error(16, positions=[1, 1000, 1_000_000_000])
        >>> ours = ax.lines[0].get_ydata()
        >>> bool(ours.max() < 6.0e-8)
        True
    """
    d_model = arguments.integer("d_model", d_model, at_least=1)
    base = arguments.real("base", base, above=0)
    if positions is None:
        places = np.unique(np.geomspace(1, 2**31 - 1, 100, dtype=np.int64))
    else:
        places = _places(arguments.as_integers("positions", positions))
        what = "int32 and on a logarithmic axis"
        arguments.check_inside("positions", places, 1, 2**31 - 1, what)
    exact, usual = _exact_and_usual(places, d_model, base)
    ours = np.asarray(sinusoidal_encoding(places, d_model, base=base))
    ax = _axes(ax)
    for encoding, label in ((ours, "transformer_embed"), (usual, "float32 product")):
        _plot(ax, places, np.abs(encoding - exact).max(1), label, linestyle="-", linewidth=1)
    ax.axhline(2.0**-25, color=BLACK, linestyle=":", linewidth=1, label="rounding to float32")
    labels = "position (tokens)", "largest error of any channel"
    return _finished(ax, *labels, xscale="log", yscale="log")


def matplotlib_module(module: str) -> Any:
    """A module of matplotlib, which is optional and slow to load."""
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError(
            "transformer_embed.plots needs matplotlib: pip install '.[plots]' in a clone"
        ) from error


def _axes(ax: "Axes | None") -> "Axes":
    if ax is None:
        # pyplot chooses a backend; a given Axes already has one.
        return matplotlib_module("pyplot").subplots(layout="constrained")[1]
    kind = matplotlib_module("axes").Axes
    return arguments.instance("ax", ax, kind, "a matplotlib Axes, or None")


def _values(name: str, array: Any, shapes: str, *ranks: int) -> np.ndarray:
    """The values of an array of these shapes, not empty."""
    values = arguments.on_host(name, array)
    if values.ndim not in ranks or not values.size:
        got = f"shape {list(values.shape)}"
        raise arguments.value_error(name, f"{shapes}, not empty", got)
    return values


def _table(name: str, value: ArrayLike) -> np.ndarray:
    """[length, d_model], in float64."""
    array = arguments.as_floats(name, value)
    return _values(name, array, "shape [length, d_model]", 2).astype(np.float64)


def _one_matrix(name: str, array: Any, batch_index: int | None, head: int | None) -> np.ndarray:
    """[T, S]: one head of one row of the batch."""
    shapes = "shape [T, S], [B, T, S] or [B, heads, T, S]"
    values = _values(name, array, shapes, 2, 3, 4)
    values = np.expand_dims(values, {2: (0, 1), 3: (1,), 4: ()}[values.ndim])
    row = _index("batch_index", batch_index, len(values))
    return values[row, _index("head", head, values.shape[1])]


def _index(name: str, index: int | None, size: int) -> int:
    if index is None and size == 1:
        return 0
    if index is None or arguments.integer(name, index, at_least=0) >= size:
        raise arguments.value_error(name, f"an int from 0 to {size - 1}", index)
    return int(index)


def _image(
    ax: "Axes | None", values: np.ndarray, names: Mapping[str, list[str] | None], **options: Any
) -> "AxesImage":
    """A matrix with the labels of its rows and of its columns, and their names; None: numbers."""
    ax = _axes(ax)
    image = ax.imshow(values, **options)
    # It is seen where the matrix has no value.
    ax.patch.set(hatch="////", edgecolor="0.75", linewidth=0)
    locator = matplotlib_module("ticker").MaxNLocator
    for axis, label, rotation in zip((ax.yaxis, ax.xaxis), names, (0, 90), strict=True):
        axis.set_label_text(label)
        axis.set_major_locator(locator(integer=True, min_n_ticks=1))
        texts = names[label]
        if texts is not None:
            axis.set_ticks(range(len(texts)), texts, parse_math=False, rotation=rotation)
    return image


def _queries_and_keys(
    ax: "Axes | None",
    values: np.ndarray,
    query_tokens: Sequence[str] | None,
    key_tokens: Sequence[str] | None,
    **options: Any,
) -> "AxesImage":
    """[T, S] with lines between its cells; one row for all queries is repeated for each name."""
    if query_tokens is not None and len(values) == 1:
        values = np.ma.repeat(values, np.size(query_tokens) or 1, axis=0)
    names = {
        "query (token that attends)": _names("query_tokens", query_tokens, len(values)),
        "key (token attended to)": _names("key_tokens", key_tokens, values.shape[1]),
    }
    image = _image(ax, values, names, **options)
    if max(values.shape) <= MOST_CELLS_WITH_LINES:
        for axis, size in zip((image.axes.yaxis, image.axes.xaxis), values.shape, strict=True):
            axis.set_ticks(np.arange(size + 1) - 0.5, minor=True)
        image.axes.grid(which="minor", color="white", linewidth=1)
        image.axes.tick_params(which="minor", length=0)
    return image


def _names(name: str, tokens: Sequence[str] | None, count: int) -> list[str] | None:
    """The labels of `count` rows or columns."""
    if tokens is None:
        return None
    tokens = arguments.sequence(name, tokens)
    if len(tokens) != count:
        raise arguments.value_error(name, f"a sequence of length {count}", f"length {len(tokens)}")
    return [_printable(str(token)) for token in tokens]


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]


def _plot(ax: "Axes", x: Any, y: Any, label: str | None, **options: Any) -> "Line2D":
    """A series in the next style, without what the options say."""
    marker, color, dash = STYLES[len(ax.lines) % len(STYLES)]
    style = {"marker": marker, "color": color, "linestyle": dash, "markersize": 3.5}
    # matplotlib would take a list for labels of several lines.
    name = None if label is None else str(label)
    return ax.plot(x, y, label=name, **style | options)[0]


def _finished(ax: "Axes", x_label: str, y_label: str, **options: Any) -> "Axes":
    ax.set(xlabel=x_label, ylabel=y_label, **options)
    ax.grid(alpha=0.3)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False)
    return ax


def _places(positions: ArrayLike) -> np.ndarray:
    array = arguments.as_positions("positions", positions)
    return _values("positions", array, "shape [n]", 1)


def _number_points(ax: "Axes", positions: np.ndarray, points: np.ndarray) -> None:
    """Writes positions outside of their points; not those that would overlap an earlier one."""
    ax.apply_aspect()
    boxes = []
    for position, point in zip(positions.tolist(), points, strict=True):
        number = f"{position:g}"
        # In points: a letter is about 6 wide, and a dot 4.
        outwards = point / np.hypot(*point) * (5 + 3 * len(number))
        text = ax.annotate(number, point, outwards, textcoords="offset points", fontsize="small")
        text.set(ha="center", va="center")
        # A title or a legend may shrink the axes, which brings labels closer to each other.
        box = text.get_window_extent().expanded(1.4, 1.4)
        if box.count_overlaps(boxes):
            text.remove()
        else:
            boxes.append(box)


def _exact_and_usual(
    positions: np.ndarray, d_model: int, base: float
) -> tuple[np.ndarray, np.ndarray]:
    """[n, d_model] twice: in float64, and by the formula in float32, as it is usually written."""
    frequencies: Any = unscaled(d_model, base)
    with decimal.localcontext(phase.PRECISION):
        # Without the whole turns, which would cost digits.
        angles = np.multiply.outer(positions.astype(object), frequencies) % (2 * phase.PI)
    exponents = np.arange(0, d_model, 2, dtype=np.float32) / np.float32(d_model)
    usual_angles = positions.astype(np.float32)[:, None] * np.float32(base) ** -exponents
    return _interleaved(angles.astype(np.float64), d_model), _interleaved(usual_angles, d_model)


def _interleaved(angles: np.ndarray, d_model: int) -> np.ndarray:
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(len(angles), -1)[:, :d_model]
