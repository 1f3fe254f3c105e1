"""Pictures of encodings, masks and biases; the public `plots` says how to read them."""

import decimal
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.functional import phase
from transformer_embed._src.functional.rotary import apply_rotary
from transformer_embed._src.functional.rotary_scaling import Scaling, scaled_frequencies, unscaled
from transformer_embed._src.functional.sinusoidal import sinusoidal_encoding

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.legend import Legend

HIDDEN, SOME, ALLOWED = "#E6E6E6", "#6BAED6", "#0B3C5D"
DIVERGING, SEQUENTIAL = "RdBu_r", "cividis"
# Blue, vermilion, bluish green and black from Okabe and Ito's colour-blind-safe palette.
BLUE, VERMILION, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#000000"
STYLES = (("o", BLUE, "-"), ("s", VERMILION, "--"), ("^", GREEN, ":"), ("D", BLACK, "-."))
MOST_CELLS_WITH_LINES = 64
# The width and height of a letter in a small label, with a margin, as fractions of the font size in
# points.
LETTER_WIDTH, LETTER_HEIGHT = 0.65, 1.0


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
    most = (
        np.nanmax(np.abs(values), initial=0.0) or 1.0
        if limit is None
        else arguments.real("limit", limit, above=0)
    )
    names = _names("tokens", tokens, len(values))
    ax = _axes(ax)
    _heat_map(ax, values, most, "value")
    _integer_ticks(ax.xaxis, ax.yaxis)
    ax.set(xlabel="channel", ylabel="position (tokens)")
    if names is not None:
        ax.set_yticks(range(len(values)), names, parse_math=False)
    return ax


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
    wavelengths = [float(2 * phase.PI / f) for f in _frequencies(d_model, base, scaling)]
    ax = _axes(ax)
    marker, color, _ = _style(len(ax.lines))
    name = None if label is None else str(label)
    ax.plot(range(len(wavelengths)), wavelengths, marker, color=color, markersize=4, label=name)
    ax.set(xlabel="pair of channels", ylabel="wavelength (tokens)", yscale="log")
    _integer_ticks(ax.xaxis)
    return _finished_lines(ax)


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
    _, color, dash = _style(len(ax.lines))
    ax.fill_between(range(len(mean)), low, high, color=color, alpha=0.25, linewidth=0)
    name = None if label is None else str(label)
    ax.plot(range(len(mean)), mean, dash, color=color, label=name)
    ax.set(xlabel="distance (tokens)", ylabel="dot product")
    return _finished_lines(ax)


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
        mask: bool [T, S], or [B, heads, T, S] as `AttentionMask.dense` makes it. True = may attend.
            Or int8 [B, T / size, S / size] as `AttentionMask.tile_kinds` makes it, drawn in three
            tones: tiles in which no pair, some pairs or all pairs may attend.
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
    tones = {"hidden": HIDDEN, "may attend": ALLOWED}
    if getattr(mask, "dtype", None) == np.int8:
        tones = {"no pair": HIDDEN, "some pairs": SOME, "all pairs": ALLOWED}
        array = jnp.asarray(mask)
        array = array[:, None] if array.ndim == 3 else array
    else:
        array = arguments.as_mask("mask", mask)
    values = _one_matrix("mask", array, batch_index, head)
    axes, values = _queries_and_keys(ax, values, query_tokens, key_tokens)
    colors = matplotlib_module("colors").ListedColormap(list(tones.values()))
    axes.imshow(values, cmap=colors, vmin=0, vmax=len(tones) - 1, interpolation="nearest")
    patch = matplotlib_module("patches").Patch
    handles = [
        patch(facecolor=tone, edgecolor="grey" if tone == HIDDEN else None, label=label)
        for label, tone in reversed(tones.items())
    ]
    _legend_beside(axes, handles=handles)
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
    chosen, places = _pairs(pairs, half), _places(positions)
    # The point (radius, 0) in each pair of channels.
    x = np.zeros([len(places), 1, head_dim], np.float32)
    x[..., chosen] = range(1, len(chosen) + 1)
    rotated = np.asarray(apply_rotary(x, places, base=base, scaling=scaling))[:, 0]
    points = [rotated[:, [pair, pair + half]] for pair in chosen]
    edge = max(len(chosen) + 0.75, 1.1 * np.abs(points).max())
    ax = _axes(ax)
    circle = matplotlib_module("patches").Circle
    for n, pair in enumerate(chosen):
        marker, color, _ = _style(n)
        ax.add_patch(circle((0, 0), n + 1, fill=False, color="0.8", linewidth=1, zorder=0))
        ax.plot(*points[n].T, marker, color=color, markersize=3.5, label=f"pair {pair}")
    _number_points(ax, places, points[0], edge)
    ax.set(xlabel="first channel of the pair", ylabel="second channel of the pair")
    ax.set(xlim=(-edge, edge), ylim=(-edge, edge), aspect="equal")
    _legend_beside(ax).set_title(
        "A circle for each pair;\nradii keep them apart.\nNumbers: positions."
    )
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
    axes, shown = _queries_and_keys(ax, shown, query_tokens, key_tokens)
    signed = bool((shown < 0).any() and (shown > 0).any())
    limit = float(np.abs(shown).max()) if signed else None
    _heat_map(axes, shown, limit, "added to the logit", aspect="equal")
    return axes


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
    places = _error_positions(positions)
    exact = _exact_encoding(places, d_model, base)
    ours = np.asarray(sinusoidal_encoding(places, d_model, base=base), np.float64)
    usual = _float32_encoding(places, d_model, base)
    ax = _axes(ax)
    for n, (encoding, label) in enumerate(
        ((ours, "transformer_embed"), (usual, "float32 product"))
    ):
        marker, color, _ = _style(n)
        style = {"color": color, "markersize": 3.5, "linewidth": 1, "label": label}
        ax.plot(places, np.abs(encoding - exact).max(1), f"{marker}-", **style)
    ax.axhline(2.0**-25, color=BLACK, linestyle=":", linewidth=1, label="rounding to float32")
    ax.set(
        xlabel="position (tokens)",
        ylabel="largest error of any channel",
        xscale="log",
        yscale="log",
    )
    return _finished_lines(ax)


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
    if not isinstance(ax, matplotlib_module("axes").Axes):
        raise arguments.type_error("ax", "a matplotlib Axes, or None", type(ax).__name__)
    return ax


def _table(name: str, value: ArrayLike) -> np.ndarray:
    """[length, d_model], not empty, in float64."""
    array = arguments.on_host(name, arguments.as_floats(name, value))
    if array.ndim != 2 or not array.size:
        raise arguments.value_error(
            name, "shape [length, d_model], not empty", f"shape {list(array.shape)}"
        )
    return array.astype(np.float64)


def _one_matrix(
    name: str, device_array: jax.Array, batch_index: int | None, head: int | None
) -> np.ndarray:
    """[T, S], not empty: one head of one row of the batch."""
    array = arguments.on_host(name, device_array)
    if array.ndim == 2:
        array = array[None, None]
    if array.ndim != 4 or not array.size:
        raise arguments.value_error(
            name, "shape [T, S] or [B, heads, T, S], not empty", f"shape {list(array.shape)}"
        )
    batch_size, heads, *_ = array.shape
    return array[_index("batch_index", batch_index, batch_size), _index("head", head, heads)]


def _index(name: str, index: int | None, size: int) -> int:
    if index is None and size == 1:
        return 0
    if index is None or arguments.integer(name, index, at_least=0) >= size:
        raise arguments.value_error(name, f"an int from 0 to {size - 1}", index)
    return int(index)


def _heat_map(
    ax: "Axes",
    values: np.ndarray,
    limit: float | None,
    unit: str,
    aspect: Literal["auto", "equal"] = "auto",
) -> None:
    """A heat map from -limit to limit in diverging colours.

    If limit is None, it has sequential colours over the range of the values.
    """
    low, high, colors = (None, None, SEQUENTIAL) if limit is None else (-limit, limit, DIVERGING)
    image = ax.imshow(values, vmin=low, vmax=high, cmap=colors, aspect=aspect)
    ax.patch.set(hatch="////", edgecolor="0.75", linewidth=0)
    beyond = limit is not None and bool((np.abs(values) > limit).any())
    ax.figure.colorbar(image, ax=ax, label=unit, extend="both" if beyond else "neither")


def _integer_ticks(*axes: Any, **options: Any) -> None:
    for axis in axes:
        axis.set_major_locator(matplotlib_module("ticker").MaxNLocator(integer=True, **options))


def _queries_and_keys(
    ax: "Axes | None",
    values: np.ndarray,
    query_tokens: Sequence[str] | None,
    key_tokens: Sequence[str] | None,
) -> tuple[Any, np.ndarray]:
    """Axes for [T, S] with names and lines; one row for all queries is repeated for each name."""
    if query_tokens is not None and len(values) == 1:
        count = len(arguments.sequence("query_tokens", query_tokens))
        values = np.ma.repeat(values, max(count, 1), axis=0)
    query_names = _names("query_tokens", query_tokens, values.shape[0])
    key_names = _names("key_tokens", key_tokens, values.shape[1])
    ax = _axes(ax)
    ax.set(xlabel="key (token attended to)", ylabel="query (token that attends)")
    _integer_ticks(ax.xaxis, ax.yaxis, min_n_ticks=1)
    if query_names is not None:
        ax.set_yticks(range(len(query_names)), query_names, parse_math=False)
    if key_names is not None:
        ax.set_xticks(range(len(key_names)), key_names, parse_math=False, rotation=90)
    if max(values.shape) <= MOST_CELLS_WITH_LINES:
        for axis, size in zip((ax.yaxis, ax.xaxis), values.shape, strict=True):
            axis.set_ticks(np.arange(size + 1) - 0.5, minor=True)
        ax.grid(which="minor", color="white", linewidth=1)
        ax.tick_params(which="minor", length=0)
    return ax, values


def _names(name: str, tokens: Sequence[str] | None, count: int) -> list[str] | None:
    """The labels of an axis with `count` rows or columns."""
    if tokens is None:
        return None
    tokens = arguments.sequence(name, tokens)
    if len(tokens) != count:
        raise arguments.value_error(name, f"a sequence of length {count}", f"length {len(tokens)}")
    return [_printable(token) for token in tokens]


def _printable(token: str) -> str:
    text = str(token)
    return text if text.isprintable() else repr(text)[1:-1]


def _legend_beside(ax: "Axes", **options: Any) -> "Legend":
    place = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.0), "borderaxespad": 0.0}
    return ax.legend(frameon=False, **place, **options)


def _style(n: int) -> tuple[str, str, str]:
    """The marker, colour and dash of the n-th series."""
    return STYLES[n % len(STYLES)]


def _finished_lines(ax: "Axes") -> "Axes":
    ax.grid(alpha=0.3)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False)
    return ax


def _frequencies(d_model: int, base: float, scaling: Scaling | None) -> Sequence[decimal.Decimal]:
    d_model = arguments.integer("d_model", d_model, at_least=1)
    base = arguments.real("base", base, above=0)
    if not isinstance(scaling, Scaling | None):
        want = "a scaling of this package such as LinearScaling(2.0)"
        raise arguments.type_error("scaling", want, type(scaling).__name__)
    if scaling and d_model % 2:
        raise arguments.value_error("d_model", "an even number of channels, to scale", d_model)
    return scaled_frequencies(scaling, d_model, base).frequencies


def _pairs(pairs: Sequence[int] | None, half: int) -> list[int]:
    if pairs is None:
        return list(range(0, half, max(1, half // 8))[:4])
    chosen = [_index("pairs", pair, half) for pair in arguments.sequence("pairs", pairs)]
    if not chosen:
        raise arguments.value_error("pairs", f"at least one of 0..{half - 1}", pairs)
    return chosen


def _places(positions: ArrayLike) -> np.ndarray:
    """[n] positions, not empty."""
    places = arguments.on_host("positions", arguments.as_positions("positions", positions))
    if places.ndim != 1 or not len(places):
        raise arguments.value_error(
            "positions", "shape [n], at least one", f"shape {list(places.shape)}"
        )
    return places


def _number_points(ax: "Axes", positions: np.ndarray, points: np.ndarray, edge: float) -> None:
    """Writes positions outside of their points, on axes from -edge to edge.

    A number that would overlap an earlier one, or reach outside the axes, is left out.
    """
    boxes = []
    axes_size = 72 * min(ax.bbox.width, ax.bbox.height) / ax.figure.dpi
    font_size = matplotlib_module("pyplot").rcParams["font.size"] * 2 * edge / axes_size
    for position, point in zip(positions.tolist(), points, strict=True):
        number = f"{position:g}"
        size = font_size * np.array([LETTER_WIDTH * len(number), LETTER_HEIGHT])
        center = point * (1 + size.max() / np.hypot(*point))
        box = matplotlib_module("transforms").Bbox([center - size / 2, center + size / 2])
        if not box.count_overlaps(boxes) and np.abs(box).max() <= edge:
            ax.text(center[0], center[1], number, ha="center", va="center", fontsize="small")
            boxes.append(box)


def _error_positions(positions: ArrayLike | None) -> np.ndarray:
    if positions is None:
        return np.unique(np.geomspace(1, 2**31 - 1, 100).round().astype(np.int64))
    places = _places(arguments.as_integers("positions", positions))
    arguments.check_inside("positions", places, 1, 2**31 - 1, "int32 and on a logarithmic axis")
    return places


def _exact_encoding(positions: np.ndarray, d_model: int, base: float) -> np.ndarray:
    """[n, d_model] in float64, from angles without the whole turns, which would cost digits."""
    frequencies: Any = unscaled(d_model, base)
    with decimal.localcontext(phase.PRECISION):
        angles = np.multiply.outer(positions.astype(object), frequencies) % (2 * phase.PI)
    return _interleaved(angles.astype(np.float64), d_model)


def _float32_encoding(positions: np.ndarray, d_model: int, base: float) -> np.ndarray:
    """The formula in float32, as it is usually written."""
    exponents = np.arange(0, d_model, 2, dtype=np.float32) / np.float32(d_model)
    angles = positions.astype(np.float32)[:, None] * np.float32(base) ** -exponents
    return _interleaved(angles, d_model).astype(np.float64)


def _interleaved(angles: np.ndarray, d_model: int) -> np.ndarray:
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(len(angles), -1)[:, :d_model]
