"""What pictures show, how they look, and their errors."""

import functools
import os
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest
from compare import equal, near
from refused import each_raises

import transformer_embed as te
from transformer_embed import plots
from transformer_embed._src import plots as source

CAUSAL = np.tri(4, dtype=bool)
WAVES = np.cos(np.arange(9)[:, None] / np.arange(1, 7))
PICTURES = {
    plots.plot_encoding: [WAVES],
    plots.plot_mask: [CAUSAL],
    plots.plot_rotary: [[0, 1, 5], 16],
    plots.plot_bias: [WAVES[:2]],
}
LABELS = {
    "position (tokens)", "value", "channel", "first channel of the pair", "added to the logit",
    "second channel of the pair", "key (token attended to)", "query (token that attends)",
}  # fmt: skip
# Two programs for one rotation may round its products and their sum otherwise: half a unit in the
# last place of float32 below 16 each.
ROTATED = 3 * 2.0**-21


@pytest.fixture(autouse=True)
def pyplot():
    """Without a figure at the start and at the end of each test.

    Each worker of a run reads this file, and to import matplotlib takes a second.
    """
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    pyplot.close("all")
    yield pyplot
    pyplot.close("all")


def new_axes(*size):
    from matplotlib.figure import Figure  # noqa: PLC0415

    return Figure(*size, layout="constrained").subplots()


@pytest.fixture
def ax():
    return new_axes()


def image(ax):
    return ax.images[0].get_array()


def texts(labels):
    return [label.get_text() for label in labels]


def rendered(ax):
    """What a reader sees, RGB in [0, 1]; a warning while drawing is an error."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        canvas = FigureCanvasAgg(ax.figure)
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3] / 255


@functools.cache
def empty():
    """What a reader sees of new axes."""
    return rendered(new_axes())


@pytest.mark.slow
@pytest.mark.parametrize("draw", PICTURES)
def test_a_given_axes_is_drawn_on_and_without_one_pyplot_shows_a_figure(draw, ax, pyplot):
    """Its axes are named with their units, and in grey it keeps more than half of the tones."""
    assert draw(*PICTURES[draw], ax=ax) is ax
    assert pyplot.get_fignums() == []
    after = rendered(ax)
    assert (after != empty()).any()
    assert np.ptp(after @ [0.2126, 0.7152, 0.0722]) > 0.5
    others = [other.get_ylabel() for other in ax.figure.axes if other is not ax]
    assert {ax.get_xlabel(), ax.get_ylabel(), *others} <= LABELS
    assert ax.get_title() == ""
    figure = draw(*PICTURES[draw]).figure
    assert pyplot.get_fignums() == [figure.number]
    assert figure.get_layout_engine() is not None


WITHOUT_MATPLOTLIB = """
import sys
sys.modules["matplotlib"] = None
import transformer_embed as te

try:
    te.plots.plot_mask([[True]])
except ImportError as error:
    print(error)
print(te.causal_mask(1))
"""


@pytest.mark.gate
def test_without_matplotlib_it_is_named_and_the_package_works(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WITHOUT_MATPLOTLIB]
    printed = subprocess.check_output(command, text=True, cwd=tmp_path, env=environment)
    assert "matplotlib" in printed
    assert printed.endswith("; pip install '.[plots]' installs it\n[[ True]]\n")


@pytest.mark.parametrize(
    ("draw", "values", "options", "limit", "arrows"),
    [
        (plots.plot_encoding, [[0.5, -3.0]], {}, 3, "neither"),
        (plots.plot_encoding, [[0.5, -3.0]], {"limit": 2.0}, 2, "both"),
        (plots.plot_encoding, [[0.0, np.nan]], {}, 1, "neither"),
        (plots.plot_bias, [[np.nan]], {}, 1, "neither"),
    ],
)
def test_colours_end_at_the_limit_and_name_the_values_past_it(
    ax, draw, values, options, limit, arrows
):
    """Zero is white, either sign has a colour of its own, and cells without a value are hatched."""
    draw(values, ax=ax, **options)
    drawn = ax.images[0]
    assert drawn.get_clim() == (-limit, limit)
    assert drawn.get_cmap().name == "RdBu_r"
    assert drawn.colorbar.extend == arrows
    equal(drawn.to_rgba(image(ax))[..., 3] == 0, np.isnan(values))
    assert ax.patch.get_hatch() == "////"
    rendered(ax)


WRONG = {
    "plot_mask([[True]], query_tokens=[])": "ValueError: tokens: ... 1, got 0",
    "plot_mask([[True]], query_tokens=5)": "TypeError: tokens: ... got int 5",
    "plot_mask([[True]], key_tokens=['a', 'b'])": "ValueError: tokens: ... 1, got 2",
    "plot_mask([[1, 0]])": "TypeError: mask: ... got int64",
    "plot_mask(np.ones([1, 3, 2, 2], bool))": "ValueError: mask: ... got shape [1, 3, 2, 2]",
    "plot_encoding([[1.0]], tokens=[])": "ValueError: tokens: ... 1, got 0",
    "plot_encoding([1.0, 2.0])": "ValueError: encoding: ... got shape [2]",
    "plot_encoding(np.zeros([0, 4]))": "ValueError: encoding: ... got shape [0, 4]",
    "plot_encoding(np.zeros([2, 2, 3]))": "ValueError: encoding: ... got shape [2, 2, 3]",
    "plot_encoding([[1.0]], limit=0)": "ValueError: limit: ... got 0",
    "plot_rotary([0], head_dim=5)": "ValueError: head_dim: ... got 5",
    "plot_rotary([True], head_dim=4)": "TypeError: positions: ... got bool",
    "plot_bias(np.zeros(3))": "ValueError: bias: ... got shape [3]",
}


def test_bad_arguments_raise_errors():
    each_raises(WRONG, vars(source))


@pytest.mark.parametrize("draw", PICTURES)
def test_traced_arrays_are_refused(draw):
    array, *others = PICTURES[draw]
    with pytest.raises(TypeError, match="trace"):
        jax.jit(lambda array: draw(array, *others) and array)(np.asarray(array))


@pytest.mark.slow
def test_an_encoding_is_drawn_with_any_names_of_tokens(ax):
    table, names = np.asarray(te.sinusoidal_table(3, 6)).astype("bfloat16"), ["$x$", "Ġthe", 7]
    plots.plot_encoding(table, ax=ax, tokens=names)
    assert texts(ax.get_yticklabels()) == [*map(str, names)]
    equal(image(ax), table.astype(np.float64))
    assert (*ax.get_xlim(), *ax.get_ylim()) == (-0.5, 5.5, 2.5, -0.5)
    rendered(ax)


@pytest.mark.parametrize(
    ("mask", "tones"),
    [
        (CAUSAL[None, None], ["may attend", "hidden"]),
        (np.int8([[0, 1, 2, 0]] * 4), ["all pairs", "some pairs", "no pair"]),
    ],
)
def test_a_mask_has_a_legend_of_its_tones(ax, mask, tones):
    """Axes of length 1 may come first."""
    plots.plot_mask(mask, ax=ax, query_tokens=[*"abcd"], key_tokens=[*"efgh"])
    equal(image(ax), mask.reshape(4, 4))
    assert texts(ax.get_yticklabels()) == [*"abcd"]
    assert texts(ax.get_xticklabels()) == [*"efgh"]
    legend = ax.get_legend()
    assert texts(legend.get_texts()) == tones
    shown = ax.images[0].to_rgba(np.arange(len(tones))[::-1])
    equal(shown, np.array([patch.get_facecolor() for patch in legend.get_patches()]))
    assert len({*map(tuple, shown)}) == len(tones)


@pytest.mark.parametrize(("size", "lines"), [(64, True), (65, False)])
def test_cells_have_lines_between_them_while_they_are_few(ax, size, lines):
    plots.plot_mask(np.ones([size, 3], bool), ax=ax)
    assert (len(ax.collections) == 2) is lines


# Yarn with a factor of cosines and sines that moves the dots off their circles.
FAR = te.YarnScaling(2.0, original_length=64, attention_factor=3.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "head_dim", "pairs", "scaling"),
    [
        ([0, 1, 7], 32, [0, 2, 4, 6], FAR),
        ([-3, 2_000_000_000], 64, [0, 4, 8, 12], None),
        (np.float32([0.5]), 8, [0, 1, 2, 3], te.LinearScaling(2.0)),
        ([4, 5], 2, [0], None),
    ],
)
def test_rotary_points_are_rotated_heads(ax, positions, head_dim, pairs, scaling):
    plots.plot_rotary(positions, head_dim, ax=ax, scaling=scaling)
    for line, pair, radius in zip(ax.lines, pairs, (1, 2, 3, 4), strict=False):
        channels = [pair, pair + head_dim // 2]
        heads = np.zeros([len(positions), 1, head_dim], np.float32)
        heads[..., pair] = radius
        rotated = np.asarray(te.apply_rotary(heads, positions, scaling=scaling))[:, 0, channels]
        near(line.get_xydata(), rotated, atol=ROTATED)
        assert np.abs(line.get_xdata()).max() < ax.get_xlim()[1]
    assert texts(ax.texts) == [f"{position:g}" for position in positions]
    assert texts(ax.get_legend().get_texts()) == [f"pair {pair}" for pair in pairs]
    for column in zip(*source.STYLES, strict=True):
        assert len({*column}) == len(source.STYLES)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "head_dim", "inches"), [(50, 64, 6.4), (1, 2, 3)])
def test_no_text_of_a_rotary_picture_lies_on_another(length, head_dim, inches):
    ax = new_axes((inches, 0.75 * inches))
    plots.plot_rotary(np.arange(length), head_dim, ax=ax)
    rendered(ax)
    boxes = [text.get_window_extent() for text in ax.texts]
    assert len(boxes) == min(length, 6)
    assert not any(one.overlaps(other) for n, one in enumerate(boxes) for other in boxes[:n])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bias_shows_the_head_and_leaves_out_masked_pairs(ax, dtype):
    allowed = np.tri(12, dtype=bool)
    allowed[0, :2] = False, True
    biases = te.alibi_bias(np.arange(12), np.arange(12), num_heads=4, causal=True, dtype=dtype)
    bias = np.asarray(biases)[2]
    plots.plot_bias(bias + np.asarray(te.mask_to_bias(allowed, dtype)), ax=ax)
    equal(image(ax).mask, ~allowed)
    equal(image(ax).compressed(), np.asarray(bias, np.float64)[allowed])


@pytest.mark.parametrize("last", [0.0, -16375.0, -16376.0])
def test_a_bias_is_drawn_even_where_all_is_masked(ax, last):
    plots.plot_bias(np.float32([[-np.inf, last]]), ax=ax)
    assert image(ax).mask.tolist() == [[True, last == -16376]]
    rendered(ax)
