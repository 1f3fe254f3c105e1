"""Settings of the API documentation; `sphinx-build -W --keep-going .docs build/docs` writes its pages."""

import inspect
import re

from docutils import nodes
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array
from sphinx.util.typing import stringify_annotation

import transformer_embed as te

project = "transformer-embed"
author = "the authors of transformer-embed"
version = release = te.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "alabaster"
html_theme_options = {"description": "The input layer of a Transformer for JAX and Haiku", "fixed_sidebar": True, "page_width": "1200px"}
html_sidebars = {"**": ["about.html", "navigation.html", "searchbox.html"]}
html_show_sourcelink = html_copy_source = False
# A date or a year would make two builds of one source differ.
html_last_updated_fmt = None
default_role = "py:obj"
highlight_language = "none"
toc_object_entries_show_parents = "hide"
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = False
napoleon_custom_sections = ["Source"]
TYPES = {"ArrayLike": ArrayLike, "DTypeLike": DTypeLike, "Array": Array}
MORE_FILES = {"rotary": ("rotary_scaling",), "lookup": ("cross_entropy",)}


def add_public_names(app, docname: str, content: list[str]) -> None:
    """A page lists the public names that its files of the package bring to te: by the name to import, not by where it lives."""
    files = {docname, *MORE_FILES.get(docname, ())}
    for name in (name for name in te.__all__ if getattr(te, name).__module__.rsplit(".", 1)[-1] in files):
        kind = "class" if inspect.isclass(getattr(te, name)) else "function"
        content[0] += f"\n.. auto{kind}:: {te.__name__}.{name}\n"


def make_markup(app, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Sets a docstring's formulas, the blocks indented from its left edge, as they stand, and shapes such as [*shape, d] as text."""
    text = re.sub(r"(?m)^(\S.*)\n\n(?=    )", r"\1\n\n::\n\n", "\n".join(lines))
    lines[:] = [line if ">>>" in line else line.replace("[*", r"[\*") for line in text.split("\n")]


def shorten_types(app, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None) -> tuple:
    """Types and dtypes by the names that the code has for them."""
    return _shortened(signature), _shortened(returns)


def _shortened(text: str | None) -> str | None:
    for name, kind in TYPES.items():
        text = text and text.replace(stringify_annotation(kind, "smart"), name).replace(stringify_annotation(kind), name)
    return text and re.sub(r"<class 'jax\.numpy\.(\w+)'>", r"\1", text)


def shorten_arrays(app, doctree: nodes.document) -> None:
    """jaxtyping shows an array by where jaxlib has its class, in properties too."""
    for text in list(doctree.findall(nodes.Text)):
        if "jaxlib." in text:
            text.parent.replace(text, nodes.Text(re.sub(r"jaxlib\.[\w.]+\.Array\b", "Array", text)))


def skip_aliases(app, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """The fields of a NamedTuple are described under its arguments."""
    return True if (inspect.getdoc(obj) or "").startswith("Alias for field number") else None


def find_in_package(app, env, node: nodes.Element, content: nodes.Element) -> nodes.Element | None:
    """A name of te's own, said on the page of one of its parts."""
    domain, target = env.get_domain("py"), f"{te.__name__}.{node['reftarget']}"
    if target not in domain.objects:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, content)


def setup(app) -> None:
    """Connects them; markup is made before napoleon reads the sections."""
    app.connect("doctree-read", shorten_arrays)
    app.connect("source-read", add_public_names)
    app.connect("autodoc-process-docstring", make_markup, priority=100)
    app.connect("autodoc-process-signature", shorten_types)
    app.connect("missing-reference", find_in_package)
    app.connect("autodoc-skip-member", skip_aliases, priority=100)
