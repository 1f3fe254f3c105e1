"""What kernels, published models and the command line import: public names, arguments, themselves."""

import ast
import pathlib

import pytest

import transformer_embed as te

PACKAGE = pathlib.Path(te.__file__).parent
OWN = {
    "_src/kernels": "transformer_embed._src.kernels",
    "_src/pretrained": "transformer_embed._src.pretrained",
    "cli": "transformer_embed.cli",
}
# No public name gives the values of an array on several devices, or the row of each id.
PRIVATE = {"gathered", "on_every_device", "rows_of_nearest_ids"}
# These have one definition in the package: conversions of arguments, and names in parameter trees.
PRIVATE |= {"conversions", "DTypeLike", "Params", "ROOT", "leaves_by_path"}


def imported(path):
    """The names that a file imports from the package, with the modules that have them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformer_embed"):
            yield from ((node.module, name.name) for name in node.names)


@pytest.mark.parametrize("folder", OWN)
def test_only_public_names_are_imported(folder):
    modules = {"transformer_embed", "transformer_embed._src.arguments"}
    found = set()
    for path in (PACKAGE / folder).glob("*.py"):
        for module, name in imported(path):
            is_own = module.startswith(OWN[folder]) or f"{module}.{name}".startswith(OWN[folder])
            is_allowed = module in modules or name in {*te.__all__, "arguments", "rotary_scaling"}
            if not is_own and not is_allowed:
                found.add(name)
    assert found <= PRIVATE
