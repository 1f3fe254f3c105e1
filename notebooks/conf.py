"""Settings of the documentation, which this command builds:

python -m sphinx -W --keep-going notebooks build/docs
"""

import functools
import inspect
import re

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

import transformer_embed as te

project = "transformer-embed"
author = "the authors of transformer-embed"
version = release = te.__version__
extensions = ["myst_nb", "sphinx_copybutton"]
exclude_patterns = ["**.ipynb_checkpoints"]

html_theme = "furo"
html_title = f"transformer-embed {te.__version__}"
html_show_sourcelink = html_copy_source = html_show_copyright = html_show_sphinx = False
html_favicon = "static/icon.svg"
html_static_path, html_css_files = ["static"], ["pages.css"]
# A date would make two builds of the same source differ.
html_last_updated_fmt = None
# MathML needs no script and no network.
html_math_renderer = "mathml"

# The outputs stored in the notebooks are shown. tests/test_notebooks.py runs the notebooks.
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. |\$ ", True
copybutton_only_copy_prompt_lines = True

highlight_language = "none"


def add_contents(app, page: str, source: list[str]) -> None:
    """Adds to the index the table of contents that its lists of links make, for the sidebar."""
    if page == "index":
        sections = re.findall(r"^## (.*)\n\n((?: *- .*\n)+)", source[0], re.MULTILINE)
        source[0] += "".join(_contents(title, links) for title, links in sections)


def _contents(title: str, links: str) -> str:
    entries = re.findall(r"^- \[(.*?)\]\((.*?)\.(?:md|ipynb)\)", links, re.MULTILINE)
    lines = "\n".join(f"{name} <{target}>" for name, target in entries)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{lines}\n```\n"


def declare_names(app, doctree: nodes.document) -> None:
    """Declares the public names of a reference page to Sphinx.

    A heading `te.name` is a public name, and a heading below it may be a method of this name. So
    the index of the site lists all of them, and other projects can link to them by intersphinx.
    """
    page = app.env.current_document.docname
    python, index = app.env.get_domain("py"), app.env.get_domain("index")
    for section in doctree.findall(nodes.section):
        owner = section.parent[0].astext() if isinstance(section.parent, nodes.section) else ""
        title = section[0].astext()
        name = title if title.startswith("te.") else f"{owner}.{title}"
        if not page.startswith("reference/") or not name.startswith("te."):
            continue
        node_id = section["ids"][0]
        kind, full_name = _kind(name), name.replace("te.", "transformer_embed.", 1)
        python.note_object(full_name, kind, node_id, location=section)
        entry = ("single", f"{name} ({kind})", node_id, "", None)
        index.entries.setdefault(page, []).append(entry)


def _kind(name: str) -> str:
    """What Sphinx calls the object of a public name."""
    *owners, last = name.removeprefix("te.").split(".")
    owner = functools.reduce(getattr, owners, te)
    value = inspect.getattr_static(owner, last)
    if inspect.isclass(owner):
        kinds = {property: "property", classmethod: "classmethod", staticmethod: "staticmethod"}
        return kinds.get(type(value), "method")
    if inspect.ismodule(value):
        return "module"
    return "class" if inspect.isclass(value) else "function"


def inline_mathml(translator, node: nodes.math) -> None:
    """Writes a formula inside a sentence."""
    translator.body.append(_mathml(node))
    raise nodes.SkipNode


def block_mathml(translator, node: nodes.math_block) -> None:
    """Writes a formula on a line of its own."""
    translator.body.append(f'<div class="math">{_mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def _mathml(node: nodes.Element, as_block: bool = False) -> str:
    try:
        return latex2mathml.tex2mathml(node.astext(), as_block)
    except MathError as error:
        logging.getLogger(__name__).warning("%s in %s", error, node.astext(), location=node)
        return ""


def setup(app) -> None:
    """Connects the functions of this file to Sphinx."""
    app.add_html_math_renderer("mathml", (inline_mathml, None), (block_mathml, None))
    app.connect("source-read", add_contents)
    app.connect("doctree-read", declare_names)
