"""The documentation under notebooks/ builds without a warning, has every public name, and names no
machine."""

import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import make_reference
import public
import pytest

import transformer_embed as te

NEEDS = ("sphinx", "myst_nb", "furo", "sphinx_copybutton", "matplotlib")
# Each worker of a run reads this file, and to import these takes half a second.
for package in NEEDS:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ROOT / "notebooks"
PAGES = [ROOT / "README.md", *sorted(SOURCE.rglob("*.md"))]
REFERENCE = sorted((SOURCE / "reference").glob("*.md"))
# Pages about the package itself and lists of names explain no words.
WITHOUT_WORDS = {
    "changelog",
    "command_line",
    "contributing",
    "glossary",
    "index",
    "supported_models",
}
GUIDES = [
    path
    for path in [ROOT / "README.md", *sorted(SOURCE.glob("*.md")), *sorted(SOURCE.glob("*.ipynb"))]
    if path.stem not in WITHOUT_WORDS
]
# Entries of the glossary that a newcomer may not know.
WORDS = ["packed", "segment id", "row-wise", "lazy", "tied", "softcap", "z-loss", "bucket", "sink"]
WORDS += ["tile", "KV cache", "ring cache", "traced", "on the host", "temporaries", "mesh"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """What the command of Contributing writes, in a fresh interpreter, since the tests' type checker
    changes annotations."""
    out, before = tmp_path_factory.mktemp("docs") / "html", sources()
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(SOURCE), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
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
    listed = [name for page in REFERENCE for name in make_reference.names_on(read(page))]
    assert sorted(set(listed) - set(public.PARTS)) == sorted(public.EVERY)


@pytest.mark.slow
def test_reference_and_help_of_commands_match_the_code():
    """If not: python tests/make_reference.py. (Newer versions of Python lay out help differently.)"""
    pages = make_reference.pages()
    if sys.version_info >= (3, 12):
        del pages[SOURCE / "command_line.md"]
    assert [path.name for path, text in pages.items() if read(path) != text] == []


def test_the_reference_shows_no_internals_and_no_union_that_an_alias_expands_to():
    text = "".join(map(read, REFERENCE))
    assert re.findall("_src|jaxlib|Alias for field|numpy.number|SupportsDType", text) == []


def test_pages_read_without_sphinx():
    """No directive or role is left over: they would show as they are on the web page of a repository."""
    for page in PAGES:
        assert (
            re.findall(r"^(?:```+|:::+)\{|^\.\. \w+::|\{\w+\}`", read(page), re.MULTILINE) == []
        ), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_to_a_heading(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", read(page)):
        path, _, anchor = target.partition("#")
        home = (page.parent / path) if path else page
        assert home.exists(), target
        if anchor and home.suffix == ".md":
            assert anchor in anchors_of(home), target


def anchors_of(page):
    """As the web pages of repositories write them."""
    headings = re.findall(r"^#+ (.*)$", read(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def read(page):
    return page.read_text(encoding="utf-8")


def text_of(html):
    return re.sub(r"<[^>]*>", "", html)


@pytest.mark.documentation
def test_pages_show_sections_formulas_and_types_as_written(pages):
    html = {page.stem: read(page) for page in pages.rglob("*.html")}
    text = text_of(html["positions"])
    for part in (
        "Arguments",
        "Returns",
        "Raises",
        "Source",
        "&gt;&gt;&gt; ",
        "positions: ArrayLike",
    ):
        assert part in text
    assert "encoding[..., 2i]     = sin(position * base ** (-2i / d_model))\nencoding[" in text
    assert 'href="rotary.html#te-apply-rotary"' in html["plots"]
    assert "usage: transformer-embed train " in text_of(html["command_line"])
    assert sum("<math " in page for page in html.values()) >= 3


@pytest.mark.documentation
def test_other_projects_can_link_to_each_public_name(pages):
    from sphinx.util.inventory import InventoryFile  # noqa: PLC0415

    inventory = InventoryFile.loads((pages / "objects.inv").read_bytes(), uri="").data
    declared = {name for kind, names in inventory.items() if kind[:3] == "py:" for name in names}
    assert {f"transformer_embed.{name}" for name in public.EVERY} <= declared
    assert "transformer_embed.TokenPositions.from_ids" in declared
    assert "te.TokenPositions.from_ids (classmethod)" in text_of(read(pages / "genindex.html"))


@pytest.mark.documentation
def test_pages_load_nothing_from_elsewhere_and_name_no_machine(pages):
    written = "".join(read(page) for page in pages.rglob("*.html"))
    loaded = r"<(?:script|link|img)[^>]*(?:src|href)=\"https?:[^\"]*\""
    machine = f"/home/|/root/|/tmp/|site-packages|{re.escape(str(ROOT))}"
    assert re.findall(f"{loaded}|{machine}", written) == []


def test_every_page_is_in_the_index_with_a_line():
    index = read(SOURCE / "index.md")
    for pattern in ("*.md", "*.ipynb", "reference/*.md"):
        for path in {*SOURCE.glob(pattern)} - {SOURCE / "index.md"}:
            file = path.relative_to(SOURCE).as_posix()
            assert re.search(rf"\]\({re.escape(file)}\): \S", index), file


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_first_use_of_a_word_links_to_its_section_of_the_glossary(page):
    text = prose_of(page)
    for word in WORDS:
        use = re.search(rf"(?<![\w-]){word}s?(?![\w-])", text)
        if use:
            link = rf"[^\[\]]*\]\((?:notebooks/)?glossary\.md#{section_of(word)}\)"
            assert re.match(link, text[use.end() :]), text[: use.end()][-60:]


def prose_of(page):
    """The sentences of a page or a notebook, without code, headings, tables and other links."""
    text = read(page)
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells).partition("Sources:\n")[0]
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    text = re.sub(r"^[#|].*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\[[^\]]*\]\((?![^)]*glossary\.md)[^)]*\)", "", text)


def section_of(word):
    """The anchor of the section of the glossary that has an entry which begins with the word."""
    section, *_ = re.split(rf"^\| {word}", read(SOURCE / "glossary.md"), flags=re.MULTILINE)
    heading = re.findall(r"^## (.*)$", section, re.MULTILINE)[-1]
    return heading.lower().replace(" ", "-")
