"""The pages of the API documentation are built without a warning and leave no public name out."""

import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zlib

import pytest

pytest.importorskip("sphinx")
pytest.importorskip("matplotlib")

import transformer_embed as te

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ROOT / ".docs"
PARTS = ["plots", "pretrained", "rows", "sharding"]


def build(source, out):
    """The command of README, from elsewhere: a fresh interpreter, for the tests' type checker changes annotations."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(source), str(out)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    out = tmp_path_factory.mktemp("docs")
    done = build(SOURCE, out)
    assert done.stderr == ""
    assert done.returncode == 0
    return out


def part_names(part):
    """Functions and classes of a part's own, without a leading underscore."""
    module = getattr(te, part)
    own = ((name, value) for name, value in vars(module).items() if str(getattr(value, "__module__", "")).startswith(module.__name__))
    return [name for name, value in own if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))]


PUBLIC = [*te.__all__, *(f"{part}.{name}" for part in PARTS for name in part_names(part))]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_docstring_has_an_example(name):
    """tests/test_doctests.py runs them."""
    value = te
    for attribute in name.split("."):
        value = getattr(value, attribute)
    assert re.search(r"Example:\n\s+>>> \S", value.__doc__)


def test_every_public_name_is_on_a_page(pages):
    entries = inventory(pages)
    found = {name for name, kind in entries if kind in ("py:function", "py:class")}
    assert set(PUBLIC) <= found
    # A class is known by the file that it lives in too.
    assert {name.rsplit(".", 1)[-1] for name in found} == {name.rsplit(".", 1)[-1] for name in PUBLIC}
    assert {("TokenPositions.queries", "py:method"), ("PositionalEncoding.__call__", "py:method")} <= entries


def inventory(pages):
    """What other projects' pages may refer to: names without the package's, and their kinds."""
    body = (pages / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {
        tuple(line.removeprefix("transformer_embed.").removeprefix("large_tables.").split()[:2])
        for line in zlib.decompress(body).decode().splitlines()
    }


def test_pages_show_the_sections_the_formulas_and_the_types_as_written(pages):
    html = {page.stem: page.read_text(encoding="utf-8") for page in pages.glob("*.html")}
    text = re.sub(r"<[^>]*>", "", html["sinusoidal"])
    assert all(section in text for section in ("Parameters", "Returns", "Raises", "Example", "Source", "&gt;&gt;&gt; "))
    assert "encoding[..., 2i]     = sin(position * base ** (-2i / d_model))\nencoding[..., 2i + 1] = cos(" in text
    assert "[*shape, d_model]" in text
    assert "positions: ArrayLike" in text
    assert [page for page, content in html.items() if "jaxlib" in content or "Alias for field" in content] == []
    assert 'href="#transformer_embed.sinusoidal_encoding" title="transformer_embed.sinusoidal_encoding">' in html["sinusoidal"]
    assert 'href="rotary.html#transformer_embed.apply_rotary" title="transformer_embed.apply_rotary">' in html["plots"]


def test_pages_name_no_machine(pages):
    written = "".join(page.read_text(encoding="utf-8") for page in pages.glob("*.html"))
    assert [word for word in ("/home/", "/root/", "/tmp/", "site-packages", str(ROOT)) if word in written] == []


def test_a_warning_is_an_error(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(SOURCE / "conf.py", source)
    (source / "index.rst").write_text("Title\n=====\n\n.. autofunction:: transformer_embed.nothing_of_this_name\n", encoding="utf-8")
    done = build(source, tmp_path / "out")
    assert "nothing_of_this_name" in done.stderr
    assert done.returncode != 0


def test_building_leaves_the_source_as_it_was(pages):
    assert {path.suffix for path in SOURCE.iterdir()} == {".py", ".rst"}
    assert pages.joinpath("index.html").exists()
