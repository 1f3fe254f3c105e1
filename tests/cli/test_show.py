import numpy as np
import pytest

pytest.importorskip("matplotlib")
import matplotlib
from matplotlib import pyplot
from matplotlib.figure import Figure

import transformer_embed as te
from transformer_embed.cli.main import main

WORDS = ["the", "cat", "sat"]


@pytest.fixture(autouse=True)
def no_figure_is_left():
    """Each test starts without a figure of pyplot's."""
    pyplot.close("all")
    yield
    pyplot.close("all")


def shown_by(ax):
    return ax.images[0].get_array()


def texts(labels):
    return [label.get_text() for label in labels]


SHOWN = {
    "encoding": (
        ["--length", "9", "--d-model", "6"],
        "sinusoidal positions (d_model 6)",
    ),
    "rotary": (
        ["--length", "3", "--head-dim", "8"],
        "points rotated by rotary embeddings (head_dim 8)",
    ),
    "mask": (
        ["--window", "4", "0", "--chunk", "3", "--prefix", "2"],
        "causal mask, window: 4 back, chunks of 3, prefix of 2",
    ),
    "error": (["--d-model", "2"], "error of sinusoidal positions (d_model 2, base 10,000)"),
}
MAGIC = {"png": b"\x89PNG\r\n", "svg": b"<?xml", "pdf": b"%PDF-"}


@pytest.mark.parametrize("picture", SHOWN)
def test_show_writes_a_picture(capsys, tmp_path, picture):
    flags, title = SHOWN[picture]
    out = tmp_path / "x.png"
    assert main(["show", picture, *flags, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{out}: {title}\n"
    assert captured.err == ""
    assert list(tmp_path.iterdir()) == [out]
    width, height = (int.from_bytes(out.read_bytes()[at : at + 4]) for at in (16, 20))
    assert (width, height) == (960, 720)
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


def test_show_encoding_draws_what_its_flags_ask_for(drawn):
    shown = shown_by(drawn("encoding", "--length", "9", "--d-model", "6", "--base", "50"))
    expected = np.asarray(te.sinusoidal_table(9, 6, base=50.0), np.float64)
    np.testing.assert_array_equal(shown, expected)


def test_show_mask_draws_what_its_flags_ask_for(drawn):
    query, key = np.mgrid[:16, :16]
    shown = shown_by(drawn("mask", "--window", "3", "1", "--chunk", "5", "--prefix", "2"))
    expected = (key <= query) & (key >= query - 3) & (key // 5 == query // 5) | (key < 2) & (
        query < 2
    )
    np.testing.assert_array_equal(shown, expected)
    np.testing.assert_array_equal(
        shown_by(drawn("mask", "--bidirectional", "--window", "0", "2")),
        (key >= query) & (key <= query + 2),
    )


def test_show_mask_names_its_tokens(drawn):
    ax = drawn("mask", "--bidirectional", "--tokens", *WORDS)
    assert texts(ax.get_xticklabels()) == texts(ax.get_yticklabels()) == WORDS
    assert shown_by(ax).all()
    assert shown_by(ax).shape == (3, 3)


@pytest.mark.parametrize("kind", MAGIC)
def test_the_suffix_names_the_kind_of_the_file(tmp_path, kind):
    for suffix in (kind, kind.upper()):
        out = tmp_path / f"x.{suffix}"
        assert main(["show", "rotary", "--length", "3", "--head-dim", "8", "--out", str(out)]) == 0
        assert out.read_bytes().startswith(MAGIC[kind])


def test_the_style_of_the_user_does_not_change_the_file(tmp_path):
    outs = [tmp_path / "first.png", tmp_path / "second.png"]
    for out, size in zip(outs, (10, 20), strict=True):
        with matplotlib.rc_context({"font.size": size, "figure.figsize": (size, size)}):
            assert main(["show", "mask", "--tokens", *WORDS, "--out", str(out)]) == 0
            assert matplotlib.rcParams["font.size"] == size
    assert outs[0].read_bytes() == outs[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["mask", "--out", "x.gif"],
            "--out: wanted a name that ends in .png, .svg, .pdf, got 'x.gif'",
        ),
        (["mask", "--out", "png"], "--out: wanted a name that ends in .png, .svg, .pdf, got 'png'"),
        (["mask", "--out", ""], "--out: wanted a name that ends in .png, .svg, .pdf, got ''"),
        (
            ["mask", "--out", "missing/x.png"],
            "cannot write missing/x.png: No such file or directory",
        ),
        (["mask"], "the following arguments are required: --out"),
        ([], "the following arguments are required: PICTURE"),
        (["sky", "--out", "x.png"], "invalid choice: 'sky'"),
        (
            ["rotary", "--length", "0", "--out", "x.png"],
            "argument --length: wanted an integer from 1 to 4096, got '0'",
        ),
        (["mask", "--window", "4", "--out", "x.png"], "argument --window: expected 2 arguments"),
        (
            ["mask", "--chunk", "0", "--out", "x.png"],
            "argument --chunk: wanted an integer from 1 to 1000000000, got '0'",
        ),
        (["mask", "--length", "3", "--out", "x.png"], "unrecognized arguments: --length 3"),
        (
            ["encoding", "--base", "nan", "--out", "x.png"],
            "base: wanted a finite number above 0, got nan",
        ),
        (
            ["rotary", "--head-dim", "3", "--out", "x.png"],
            "head_dim: wanted an even number of channels, to make pairs, got 3",
        ),
    ],
)
def test_show_errors_are_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["show", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("transformer-embed: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_picture_is_written_whole_or_not_at_all(monkeypatch, capsys, tmp_path):
    def half(figure, file, **options):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", half)
    out = tmp_path / "x.png"
    out.write_bytes(b"old")
    assert main(["show", "mask", "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "No space" in captured.err
    assert out.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("arguments", [[], *([name] for name in SHOWN)])
def test_help_fits_and_names_every_flag(capsys, monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main(["show", *arguments, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    wanted = SHOWN[arguments[0]][0] + ["--out"] if arguments else list(SHOWN)
    assert [word for word in wanted if not word.isdigit() and word not in out] == []


@pytest.mark.parametrize(
    ("flags", "title"),
    [
        ([], "causal mask"),
        (["--window", "3", "1"], "causal mask, window: 3 back"),
        (
            ["--window", "3", "1", "--bidirectional"],
            "bidirectional mask, window: 3 back, 1 ahead",
        ),
        (["--prefix", "1"], "causal mask, prefix of 1"),
    ],
)
def test_the_title_of_a_mask_says_its_flags_in_words(drawn, flags, title):
    assert drawn("mask", *flags).figure.get_suptitle() == title


def test_a_narrow_picture_has_as_many_pixels_and_a_title_that_fits(drawn):
    ax = drawn("mask", "--tokens", *WORDS, "--window", "2", "0", "--prefix", "2", "--width", "3")
    left, right = ax.figure.texts[0].get_window_extent().intervalx
    assert 0 <= left < right <= 960
    assert (ax.figure.get_size_inches() * ax.figure.dpi).tolist() == [960, 720]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--tokens", "a", "日本"],
            "Glyph 26085 (\\N{CJK UNIFIED IDEOGRAPH-65E5}) missing from font(s) DejaVu Sans",
        ),
        (["--width", "1"], "argument --width: wanted a number from 2 to 40, got '1'"),
        (["--width", "wide"], "argument --width: wanted a number from 2 to 40, got 'wide'"),
    ],
)
def test_a_picture_that_could_not_be_read_is_refused(fails, tmp_path, flags, message):
    assert message in fails("show", "mask", *flags, "--out", tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []
