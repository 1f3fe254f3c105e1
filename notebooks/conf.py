"""Settings of the documentation, which this command builds:

python -m sphinx -W --keep-going notebooks build/docs
"""

import contextlib
import inspect
import io
import os
import re
from unittest import mock

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from jaxtyping import Array
from sphinx import addnodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import stringify_annotation

import transformer_embed as te
from transformer_embed.cli import main as command_line

project = "transformer-embed"
author = "the authors of transformer-embed"
version = release = te.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb"]
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
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3

default_role = "py:obj"
highlight_language = "none"
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = False
napoleon_custom_sections = ["Source"]
TYPES = {"Array": Array}


class PublicNames(SphinxDirective):
    """`.. public:: apply_rotary rows.update`: a table of summaries, then an entry for each name."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Returns the table and the entries."""
        objects = {name: self._find(name) for name in self.arguments[0].split()}
        rows = [
            f"   * - `te.{name} <{te.__name__}.{name}>`\n     - {_summary(value)}"
            for name, value in objects.items()
        ]
        entries = [
            f".. auto{'class' if inspect.isclass(value) else 'function'}:: {te.__name__}.{name}\n"
            for name, value in objects.items()
        ]
        table = ".. list-table::\n   :widths: 35 65\n   :class: names\n\n" + "\n".join(rows)
        return self.parse_text_to_nodes("\n\n".join([table, *entries]))

    def _find(self, name: str) -> object:
        value = te
        for part in name.split("."):
            value = getattr(value, part, None)
        if value is None:
            raise self.error(f"te.{name}: there is no such name")
        return value


class CommandHelp(SphinxDirective):
    """`.. help:: show mask`: what `transformer-embed show mask --help` prints."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Returns a literal block."""
        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            contextlib.suppress(SystemExit),
            mock.patch.dict(os.environ, COLUMNS="88"),
        ):
            command_line.main([*self.arguments[0].split(), "--help"])
        return [nodes.literal_block(text=printed.getvalue(), language="none")]


def _summary(value: object) -> str:
    """The first sentence of a docstring, marked up as the rest of it is."""
    return _markup(" ".join(inspect.getdoc(value).split("\n\n", 1)[0].split()))


def _markup(text: str) -> str:
    """Docstrings write shapes such as [*shape, d], which reStructuredText takes for emphasis."""
    return "\n".join(line if ">>>" in line else line.replace("[*", r"[\*") for line in text.split("\n"))


def make_markup(app, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Sets a docstring's formulas, the blocks indented from its left edge, as they are written."""
    text = re.sub(r"(?m)^(\S.*)\n\n(?=    )", r"\1\n\n::\n\n", "\n".join(lines))
    lines[:] = _markup(text).split("\n")


def shorten_types(
    app, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple:
    """Writes types and dtypes by the names that the code has for them."""
    return _shortened(signature), _shortened(returns)


def _shortened(text: str | None) -> str | None:
    for name, kind in TYPES.items():
        text = text and text.replace(stringify_annotation(kind, "smart"), name).replace(
            stringify_annotation(kind), name
        )
    return text and re.sub(r"<class 'jax\.numpy\.(\w+)'>", r"\1", text)


def shorten_names(app, doctree: nodes.document) -> None:
    """Writes `te.lookup`, as users do, and `Array` where jaxtyping names the class of jaxlib."""
    for text in list(doctree.findall(nodes.Text)):
        if isinstance(text.parent, addnodes.desc_addname):
            text.parent.replace(text, nodes.Text(text.replace(f"{te.__name__}.", "te.")))
        elif "jaxlib." in text:
            text.parent.replace(text, nodes.Text(re.sub(r"jaxlib\.[\w.]+\.Array\b", "Array", text)))


def skip_aliases(app, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """The fields of a NamedTuple are described under its arguments."""
    return True if (inspect.getdoc(obj) or "").startswith("Alias for field number") else None


def find_in_package(app, env, node: nodes.Element, content: nodes.Element) -> nodes.Element | None:
    """Finds a name that a docstring writes with `te.` or without any prefix."""
    domain, target = env.get_domain("py"), f"{te.__name__}.{node['reftarget'].removeprefix('te.')}"
    if target not in domain.objects:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, content)


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
    """Connects them; docstrings are marked up before napoleon reads the sections."""
    app.add_directive("public", PublicNames)
    app.add_directive("help", CommandHelp)
    app.add_html_math_renderer("mathml", (inline_mathml, None), (block_mathml, None))
    app.connect("doctree-read", shorten_names)
    app.connect("autodoc-process-docstring", make_markup, priority=100)
    app.connect("autodoc-process-signature", shorten_types)
    app.connect("missing-reference", find_in_package)
    app.connect("autodoc-skip-member", skip_aliases, priority=100)
