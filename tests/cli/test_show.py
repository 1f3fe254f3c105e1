import numpy as np
import pytest
from compare import equal

pytest.importorskip("matplotlib")
import matplotlib
from matplotlib import pyplot
from matplotlib.figure import Figure

import transformer_embed as te
from transformer_embed.cli.main import main

WORDS = ["the", "cat", "sat"]
SHOWN = [
    ("encoding --length 9 --d-model 6", "sinusoidal positions (d_model 6)", "x.svg", b"<?xml"),
    ("rotary --length 3 --head-dim 8", "points rotated by rotary embeddings (head_dim 8)", "x.PDF", b"%PDF-"),
    ("mask --chunk 3 --prefix 2", "causal mask, chunks of 3, prefix of 2", "x.PNG", b"\x89PNG\r\n"),
    ("error --d-model 2", "error of sinusoidal positions (d_model 2, base 10,000)", "x.png", b"\x89PNG\r\n"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("command", "title", "name", "start"), SHOWN)
def test_show_writes_a_picture_and_prints_its_title(prints, tmp_path, command, title, name, start):
    pyplot.close("all")
    out = tmp_path / name
    assert prints("show", *command.split(), "--out", out) == (f"{out}: {title}\n", "")
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_bytes().startswith(start)
    assert pyplot.get_fignums() == []


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """The Axes that a command drew."""

    def show(*arguments):
        seen = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: seen.append(figure))
        assert main(["show", *arguments, "--out", str(tmp_path / "x.png")]) == 0
        return seen[0].axes[0]

    return show


def shown_by(ax):
    return ax.images[0].get_array()


def test_show_encoding_draws_what_its_flags_ask_for(drawn):
    shown = shown_by(drawn("encoding", "--length", "9", "--d-model", "6", "--base", "50"))
    expected = np.asarray(te.sinusoidal_table(9, 6, base=50.0), np.float64)
    equal(shown, expected)


QUERY, KEY = np.mgrid[:16, :16]
CAUSAL = KEY <= QUERY


@pytest.mark.parametrize(
    ("flags", "title", "expected"),
    [
        ("", "causal mask", CAUSAL),
        ("--window 3 1", "causal mask, window: 3 back", CAUSAL & (KEY >= QUERY - 3)),
        ("--chunk 5", "causal mask, chunks of 5", CAUSAL & (KEY // 5 == QUERY // 5)),
        ("--prefix 2", "causal mask, prefix of 2", CAUSAL | (KEY < 2) & (QUERY < 2)),
        (
            "--bidirectional --window 0 2",
            "bidirectional mask, window: 0 back, 2 ahead",
            (KEY >= QUERY) & (KEY <= QUERY + 2),
        ),
    ],
)
def test_show_mask_draws_what_its_flags_ask_for_and_says_so(drawn, flags, title, expected):
    ax = drawn("mask", *flags.split())
    assert ax.figure.get_suptitle() == title
    equal(shown_by(ax), expected)


def test_a_narrow_picture_names_its_tokens_and_has_a_title_that_fits(drawn):
    """It has as many pixels."""
    ax = drawn("mask", "--tokens", *WORDS, "--window", "2", "0", "--prefix", "2", "--width", "3")
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        assert [label.get_text() for label in labels] == WORDS
    left, right = ax.figure.texts[0].get_window_extent().intervalx
    assert 0 <= left < right <= 960
    assert (ax.figure.get_size_inches() * ax.figure.dpi).tolist() == [960, 720]


@pytest.mark.slow
def test_the_style_of_the_user_does_not_change_the_file(prints, tmp_path):
    outs = [tmp_path / "first.png", tmp_path / "second.png"]
    for out, size in zip(outs, (10, 20), strict=True):
        with matplotlib.rc_context({"font.size": size, "figure.figsize": (size, size)}):
            prints("show", "mask", "--tokens", *WORDS, "--out", out)
            assert matplotlib.rcParams["font.size"] == size
    assert outs[0].read_bytes() == outs[1].read_bytes()


SUFFIXES = "--out: wanted a name that ends in .png, .svg, .pdf, got"
TO = ["--out", "x.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mask", "--out", "x.gif"], f"{SUFFIXES} 'x.gif'"),
        (["mask", "--out", "png"], f"{SUFFIXES} 'png'"),
        (["mask", "--out", "missing/x.png"], "cannot write missing/x.png: No such file or directory; name a file in a folder"),
        ([], "the following arguments are required: PICTURE"),
        (["sky", *TO], "invalid choice: 'sky'"),
        (["rotary", "--head-dim", "3", *TO], "head_dim: wanted an even number of channels, to make pairs, got 3"),
        (["mask", "--chunk", "0", *TO], "chunk: wanted an int of at least 1, got 0"),
        (["mask", "--prefix", "-1", *TO], "prefix: wanted an int of at least 0, got -1"),
        (["mask", "--width", "0", *TO], "width: wanted 2 to 40 inches, got 0.0"),
        (["rotary", "--length", "0", *TO], "length: wanted an int of at least 1, got 0"),
        (["encoding", "--d-model", "4097", *TO], "d_model: wanted an int of at most 4096, got 4097"),
        (["mask", "--length", "3", *TO], "unrecognized arguments: --length 3"),
    ],
)  # fmt: skip
def test_show_errors_are_one_line(monkeypatch, fails, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in fails("show", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_picture_is_written_whole_or_not_at_all(monkeypatch, fails, tmp_path):
    def half(figure, file, **options):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", half)
    out = tmp_path / "x.png"
    out.write_bytes(b"old")
    assert "No space" in fails("show", "mask", "--out", out)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
