"""The documentation under notebooks/ builds without a warning, has every public name, and names no
machine."""

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zlib

import pytest

for package in ("sphinx", "myst_nb", "furo", "matplotlib"):
    pytest.importorskip(package)

import public

import transformer_embed as te

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ROOT / "notebooks"


def build(source, out):
    """Runs the command of Contributing in a fresh interpreter, since the tests' type checker
    changes annotations."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    }
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(source), str(out)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    out, before = tmp_path_factory.mktemp("docs") / "html", sources()
    done = build(SOURCE, out)
    assert done.stderr == ""
    assert done.returncode == 0
    assert sources() == before
    return out


def sources():
    """Building leaves the source as it was."""
    return {path for path in SOURCE.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize("name", public.EVERY)
def test_every_public_docstring_has_an_example(name):
    """tests/test_doctests.py runs them."""
    value = functools.reduce(getattr, name.split("."), te)
    assert re.search(r"Example:\n\s+>>> \S", value.__doc__)


def test_every_public_name_has_one_entry_in_the_reference():
    listed = [
        name
        for page in (SOURCE / "reference").glob("*.rst")
        for name in " ".join(re.findall(r"(?m)^\.\. public:: (.*)$", read(page))).split()
    ]
    assert sorted(listed) == sorted(public.EVERY)


@pytest.mark.slow
@pytest.mark.documentation
def test_every_public_name_is_on_a_page_as_users_write_it(pages):
    entries = inventory(pages)
    found = {name for name, kind in entries if kind in ("py:function", "py:class")}
    assert set(public.EVERY) <= found
    # A class is known by the file that it lives in too.
    assert {name.rsplit(".", 1)[-1] for name in found} == {
        name.rsplit(".", 1)[-1] for name in public.EVERY
    }
    assert ("PositionalEncoding.__call__", "py:method") in entries
    for page, prefix in (
        ("rotary", "te."),
        ("large_tables", "te.rows."),
        ("large_tables", "te.sharding."),
    ):
        assert f'<span class="pre">{prefix}</span>' in read(pages / "reference" / f"{page}.html")


def inventory(pages):
    """What other projects' pages may refer to: names without the package's, and their kinds."""
    body = (pages / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {
        tuple(line.removeprefix("transformer_embed.").split()[:2])
        for line in zlib.decompress(body).decode().splitlines()
    }


def read(page):
    return page.read_text(encoding="utf-8")


def text_of(html):
    return re.sub(r"<[^>]*>", "", html)


@pytest.mark.slow
@pytest.mark.documentation
def test_a_reference_page_starts_with_a_table_of_one_line_summaries(pages):
    text = text_of(read(pages / "reference" / "rotary.html"))
    assert text.index("te.permute_rotary_weights") < text.index("te.apply_rotary(")


@pytest.mark.slow
@pytest.mark.documentation
def test_reference_pages_show_sections_formulas_and_types_as_written(pages):
    text = text_of(read(pages / "reference" / "positions.html"))
    assert all(
        section in text
        for section in ("Parameters", "Returns", "Raises", "Example", "Source", "&gt;&gt;&gt; ")
    )
    assert (
        "encoding[..., 2i]     = sin(position * base ** (-2i / d_model))\nencoding[..., 2i + 1] = cos("
        in text
    )
    assert "[*shape, d_model]" in text
    assert "positions: ArrayLike" in text
    html = {page.stem: read(page) for page in pages.rglob("*.html")}
    assert [
        page
        for page, content in html.items()
        if "jaxlib" in content or "Alias for field" in content
    ] == []
    assert (
        'href="rotary.html#transformer_embed.apply_rotary" title="transformer_embed.apply_rotary">'
        in html["plots"]
    )


@pytest.mark.slow
@pytest.mark.documentation
def test_the_command_line_page_has_the_help_of_each_command(pages):
    text = text_of(read(pages / "command_line.html"))
    assert all(
        f"usage: transformer-embed {command} " in text
        for command in ("train", "embed", "inspect", "show")
    )


@pytest.mark.slow
@pytest.mark.documentation
def test_formulas_are_mathml_and_pages_load_nothing_from_elsewhere(pages):
    html = [read(page) for page in pages.rglob("*.html")]
    assert sum("<math " in page for page in html) >= 4
    assert [
        found
        for page in html
        for found in re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(https?:[^\"]*)\"", page)
    ] == []


@pytest.mark.slow
@pytest.mark.documentation
def test_pages_name_no_machine(pages):
    written = "".join(read(page) for page in pages.rglob("*.html"))
    assert [
        word
        for word in ("/home/", "/root/", "/tmp/", "site-packages", str(ROOT))
        if word in written
    ] == []


@pytest.mark.slow
@pytest.mark.documentation
def test_an_unknown_name_on_a_reference_page_or_an_unknown_command_in_a_formula_fails_the_build(
    tmp_path,
):
    source = tmp_path / "source"
    shutil.copytree(SOURCE / "static", source / "static")
    shutil.copy(SOURCE / "conf.py", source)
    (source / "index.rst").write_text(
        "Title\n=====\n\n:math:`\\nosuchcommand`\n\n.. public:: nothing_of_this_name\n",
        encoding="utf-8",
    )
    done = build(source, tmp_path / "out")
    assert "te.nothing_of_this_name: there is no such name" in done.stderr
    assert "nosuchcommand" in done.stderr
    assert done.returncode != 0


@pytest.mark.slow
@pytest.mark.documentation
def test_a_browser_opens_every_page_link_and_picture_and_finds_what_is_searched(pages):
    pytest.importorskip("selenium")
    import browse_docs  # noqa: PLC0415

    if not browse_docs.chromium():
        pytest.skip("Chromium and its driver are not installed")
    assert browse_docs.browse(pages) == []


def test_every_page_is_in_the_index_with_a_line():
    index = read(SOURCE / "index.md")
    files = [
        path.relative_to(SOURCE).as_posix()
        for pattern in ("*.md", "*.ipynb", "reference/*.rst")
        for path in SOURCE.glob(pattern)
    ]
    assert [
        file
        for file in files
        if file != "index.md" and not re.search(rf"\]\({re.escape(file)}\): \S", index)
    ] == []
