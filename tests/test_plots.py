import functools
import os
import subprocess
import sys
import warnings

import jax
import numpy as np
import oracle
import pytest
from compare import equal, near
from refused import pattern

pytest.importorskip("matplotlib")
import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import transformer_embed as te
from transformer_embed import plots
from transformer_embed._src import plots as source

matplotlib.use("Agg")

WORDS = ["the", "cat", "sat"]
POSITIONS = np.arange(12)
WAVES = np.cos(np.arange(9)[:, None] / np.arange(1, 7))
CAUSAL = np.tri(4, dtype=bool)
PICTURES = {
    "plot_encoding": functools.partial(plots.plot_encoding, WAVES),
    "plot_mask": functools.partial(plots.plot_mask, CAUSAL),
    "plot_rotary": functools.partial(plots.plot_rotary, [0, 1, 5], 16),
    "plot_bias": functools.partial(plots.plot_bias, WAVES[:2]),
}
LABELS = {
    "position (tokens)", "value", "channel", "first channel of the pair", "added to the logit",
    "second channel of the pair", "key (token attended to)", "query (token that attends)",
}  # fmt: skip

# Half a unit in the last place below 8, twice (the products and the sum of a rotation), of float32
# at magnitudes up to 4.
ROTATED = 4 * 2.0**-22
every_picture = pytest.mark.parametrize("name", PICTURES)


@pytest.fixture(autouse=True)
def no_figure_is_left():
    """Each test starts without a figure of pyplot's."""
    pyplot.close("all")
    yield
    pyplot.close("all")


def new_axes():
    return Figure(layout="constrained").subplots()


@pytest.fixture
def ax():
    return new_axes()


def image(ax):
    return ax.images[0].get_array()


def texts(labels):
    return [label.get_text() for label in labels]


def rendered(ax):
    """What a reader sees, RGB in [0, 1]; a warning while drawing is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        canvas = matplotlib.backends.backend_agg.FigureCanvasAgg(ax.figure)
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3] / 255


@pytest.mark.slow
@every_picture
def test_a_given_axes_is_drawn_on_named_and_returned(name, ax):
    """Its axes are named with their units, and in grey it keeps more than half of the tones."""
    before = rendered(ax)
    assert PICTURES[name](ax=ax) is ax
    assert pyplot.get_fignums() == []
    after = rendered(ax)
    assert (after != before).any()
    assert np.ptp(after @ [0.2126, 0.7152, 0.0722]) > 0.5
    others = [other.get_ylabel() for other in ax.figure.axes if other is not ax]
    assert {ax.get_xlabel(), ax.get_ylabel(), *others} <= LABELS
    assert ax.get_title() == ""


@every_picture
def test_no_axes_makes_one_figure_that_pyplot_shows(name):
    ax = PICTURES[name]()
    assert isinstance(ax, Axes)
    assert pyplot.get_fignums() == [ax.figure.number]
    assert ax.figure.get_layout_engine() is not None


def test_lines_are_told_apart_by_marker_colour_and_dash():
    for column in zip(*source.STYLES, strict=True):
        assert len(set(column)) == len(source.STYLES)


@pytest.mark.parametrize("draw", [plots.plot_encoding, plots.plot_bias])
def test_zero_is_white_and_either_sign_has_a_colour_of_its_own(ax, draw):
    draw(np.array([[-2.0, -1.0, 0.0, 1.0]]), ax=ax)
    assert ax.images[0].get_clim() == (-2, 2)
    assert ax.images[0].get_cmap().name == "RdBu_r"


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
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    first, *others = run.stdout.splitlines()
    assert "matplotlib" in first
    assert first.endswith("; pip install '.[plots]' installs it")
    assert others == ["[[ True]]"]


# plot_encoding


@pytest.mark.slow
def test_encoding_shows_the_array(ax):
    table = np.asarray(te.sinusoidal_table(9, 6)).astype("bfloat16")
    plots.plot_encoding(table, ax=ax, tokens=list("abcdefghi"))
    assert texts(ax.get_yticklabels()) == list("abcdefghi")
    equal(image(ax), table.astype(np.float64))
    assert ax.images[0].get_clim() == (-1, 1)
    assert ax.get_xlim() == (-0.5, 5.5)
    assert ax.get_ylim() == (8.5, -0.5)


@pytest.mark.parametrize(
    ("values", "options", "limit", "arrows"),
    [
        ([[0.5, -3.0]], {}, 3, "neither"),
        ([[0.5, -3.0]], {"limit": 2.0}, 2, "both"),
        ([[0.0]], {}, 1, "neither"),
        ([[np.nan]], {}, 1, "neither"),
    ],
)
def test_colours_end_at_the_limit_and_say_what_is_past_it(ax, values, options, limit, arrows):
    plots.plot_encoding(values, ax=ax, **options)
    assert ax.images[0].get_clim() == (-limit, limit)
    assert ax.images[0].colorbar.extend == arrows
    rendered(ax)


def test_cells_without_a_value_are_hatched(ax):
    """They are transparent."""
    plots.plot_encoding([[np.nan, 0.0]], ax=ax)
    drawn = ax.images[0]
    assert drawn.to_rgba(drawn.get_array())[0, :, 3].tolist() == [0, 1]
    assert ax.patch.get_hatch() == "////"


def test_any_token_can_be_drawn(ax):
    tokens = ["$x$", "Ġthe", 7]
    plots.plot_mask(np.eye(3) > 0, ax=ax, key_tokens=tokens, query_tokens=tokens)
    rendered(ax)
    assert texts(ax.get_xticklabels()) == texts(ax.get_yticklabels()) == ["$x$", "Ġthe", "7"]


WRONG = [
    (plots.plot_mask, [[True]], {"query_tokens": []}, "tokens: ... 1, got 0"),
    (plots.plot_mask, [[True]], {"key_tokens": ["a", "b"]}, "tokens: ... 1, got 2"),
    (plots.plot_encoding, [1.0, 2.0], {}, "encoding: ... got shape [2]"),
    (plots.plot_encoding, np.zeros([0, 4]), {}, "encoding: ... got shape [0, 4]"),
    (plots.plot_encoding, np.zeros([2, 2, 3]), {}, "encoding: ... got shape [2, 2, 3]"),
    (plots.plot_encoding, [[1.0]], {"limit": 0}, "limit: ... got 0"),
    (plots.plot_mask, [[1, 0]], {}, "mask: ... got int64"),
    (plots.plot_mask, np.ones([1, 3, 2, 2], bool), {}, "mask: ... got shape [1, 3, 2, 2]"),
    (plots.plot_rotary, [0], {"head_dim": 5}, "head_dim: ... got 5"),
    (plots.plot_rotary, [True], {"head_dim": 4}, "positions: ... got bool"),
    (plots.plot_bias, np.zeros(3), {}, "bias: ... got shape [3]"),
    (plots.plot_mask, [[True]], {"query_tokens": 5}, "tokens: ... got int 5"),
    (plots.plot_encoding, [[1.0]], {"tokens": []}, "tokens: ... 1, got 0"),
]  # fmt: skip


def test_bad_arguments_raise_errors():
    for draw, argument, options, message in WRONG:
        with pytest.raises((TypeError, ValueError), match=pattern(message)):
            draw(argument, **options)


@pytest.mark.parametrize(
    "draw",
    [
        plots.plot_encoding,
        lambda values: plots.plot_mask(values > 0),
        lambda values: plots.plot_rotary(values.ravel(), 4),
    ],
)
def test_traced_arrays_are_refused(draw):
    with pytest.raises(TypeError, match="trace"):
        jax.jit(lambda x: draw(x) and x)(np.ones([4, 4], np.int32))


# plot_mask


def test_mask_shows_the_array_and_a_legend_of_its_tones(ax):
    """Its last two axes: those of length 1 may come first."""
    plots.plot_mask(CAUSAL[None, None], ax=ax, query_tokens=list("abcd"), key_tokens=list("efgh"))
    equal(image(ax), CAUSAL)
    assert texts(ax.get_yticklabels()) == list("abcd")
    assert texts(ax.get_xticklabels()) == list("efgh")
    shown = ax.images[0].to_rgba(np.array([True, False]), norm=True)
    legend = ax.get_legend()
    assert texts(legend.get_texts()) == ["may attend", "hidden"]
    equal(shown, np.array([patch.get_facecolor() for patch in legend.get_patches()]))


def test_a_block_mask_is_drawn_in_three_tones(ax):
    kinds = np.int8([[0, 1], [2, 0]])
    plots.plot_mask(kinds, ax=ax)
    equal(image(ax), kinds)
    legend = ax.get_legend()
    assert texts(legend.get_texts()) == ["all pairs", "some pairs", "no pair"]
    shown = ax.images[0].to_rgba(np.array([2, 1, 0]))
    equal(shown, np.array([patch.get_facecolor() for patch in legend.get_patches()]))
    assert len({*map(tuple, shown)}) == 3


@pytest.mark.parametrize(("size", "lines"), [(64, True), (65, False)])
def test_cells_have_lines_between_them_while_they_are_few(ax, size, lines):
    plots.plot_mask(np.ones([size, 3], bool), ax=ax)
    assert (len(ax.collections) == 2) is lines


# plot_rotary


@pytest.mark.slow
@pytest.mark.parametrize("positions", [[0, 1, 7], [-3, 2_000_000_000], np.float32([0.5])])
def test_rotary_points_are_rotated_by_position_times_frequency(ax, positions):
    plots.plot_rotary(positions, 32, ax=ax)
    for line, pair, radius in zip(ax.lines, (0, 2, 4, 6), (1, 2, 3, 4), strict=True):
        frequency = oracle.frequency(pair, 16)
        for point, position in zip(line.get_xydata(), positions, strict=True):
            sides = [oracle.sine(float(position), frequency, quarters) for quarters in (1, 0)]
            near(point, radius * np.array(sides, float), atol=ROTATED)
    assert texts(ax.texts) == [f"{position:g}" for position in positions]


@pytest.mark.parametrize(("head_dim", "pairs"), [(64, [0, 4, 8, 12]), (8, [0, 1, 2, 3]), (2, [0])])
def test_the_pairs_that_are_drawn(ax, head_dim, pairs):
    plots.plot_rotary([0, 1], head_dim, ax=ax)
    assert texts(ax.texts) == ["0", "1"]
    assert texts(ax.get_legend().get_texts()) == [f"pair {pair}" for pair in pairs]


@pytest.mark.slow
def test_rotary_with_a_scaling(ax):
    """Positions interpolated by 2 stand where half of them stood; an attention factor is seen
    whole."""
    plots.plot_rotary([8], 16, ax=ax, scaling=te.LinearScaling(2.0))
    plots.plot_rotary([4], 16, ax=ax)
    for first, second in zip(ax.lines[:4], ax.lines[4:], strict=True):
        near(first.get_xydata(), second.get_xydata(), atol=ROTATED)
    plots.plot_rotary(
        [0], 16, ax=ax, scaling=te.YarnScaling(2.0, original_length=64, attention_factor=3.0)
    )
    assert ax.lines[11].get_xdata()[0] == 12.0 < ax.get_xlim()[1]


@pytest.mark.slow
@pytest.mark.parametrize(("length", "head_dim", "inches"), [(50, 64, 6.4), (12, 8, 4.5), (1, 2, 3)])
def test_no_text_of_a_rotary_picture_lies_on_another(length, head_dim, inches):
    ax = Figure((inches, 0.75 * inches), layout="constrained").subplots()
    plots.plot_rotary(np.arange(length), head_dim, ax=ax)
    rendered(ax)
    boxes = [text.get_window_extent() for text in ax.texts]
    assert len(boxes) == min(length, 6)
    assert not any(one.overlaps(other) for n, one in enumerate(boxes) for other in boxes[:n])


# plot_bias


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bias_shows_the_head_and_leaves_out_what_is_masked(ax, dtype):
    allowed = np.tri(12, dtype=bool)
    bias = te.alibi_bias(POSITIONS, POSITIONS, num_heads=4, dtype=dtype)
    masked = bias + te.mask_to_bias(allowed, dtype)
    plots.plot_bias(masked[0, 2], ax=ax)
    equal(image(ax).mask, ~allowed)
    equal(image(ax).compressed(), np.asarray(bias[0, 2], np.float64)[allowed])
    other = new_axes()
    plots.plot_bias(np.float32([[0.0, -np.inf, -16376.0, -16375.0]]), ax=other)
    assert image(other).mask.tolist() == [[False, True, True, False]]


def test_a_bias_that_is_masked_everywhere_is_drawn(ax):
    plots.plot_bias(te.mask_to_bias(np.zeros([2, 2], bool)), ax=ax)
    assert image(ax).mask.all()
    rendered(ax)
