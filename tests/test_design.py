"""What the package shows; import-linter holds who may import whom
(pyproject.toml)."""

import ast
import collections
import contextlib
import pathlib
import subprocess

import public
import pytest

import transformer_embed as te

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "transformer_embed"

TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "transformer_embed", "tests", "notebooks"}


def test_all_lists_every_imported_public_name():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in nodes for alias in node.names]
    names = [name for name in names if not name.startswith("_")]
    assert te.__all__ == sorted(names)
    assert all(hasattr(te, name) for name in te.__all__)


def is_reexport(node):
    """Whether a statement is a docstring, an import, or the value of `__all__` or `__version__`."""
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets] in (["__all__"], ["__version__"])
    return isinstance(node, ast.ImportFrom) or isinstance(node.value, ast.Constant)


@pytest.mark.parametrize("part", ["__init__", *public.PARTS])
def test_public_modules_hold_no_logic(part):
    tree = ast.parse((PACKAGE / f"{part}.py").read_text(encoding="utf-8"))
    assert [ast.unparse(node) for node in tree.body if not is_reexport(node)] == []
    assert part == "__init__" or getattr(te, part).__name__ == f"transformer_embed.{part}"


def test_top_level_holds_the_names_of_the_design():
    # What git tracks counts: a user's clone may hold anything else. Without git, nothing does.
    with contextlib.suppress(OSError):
        listed = subprocess.run(
            ["git", "ls-files"], check=False, cwd=ROOT, capture_output=True, text=True
        )
        found = {line.partition("/")[0] for line in listed.stdout.splitlines()}
        assert {name for name in found if not name.startswith(".")} <= TOP_LEVEL


# A module of the command line has these, which its parser calls.
COMMAND = {"add_to", "run"}


def names_of(statement):
    """The names that a top-level statement defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    found = [node for target in targets for node in ast.walk(target)]
    return [node.id for node in found if isinstance(node, ast.Name)]


def test_each_top_level_name_has_one_definition():
    """A reader who searches for a name finds one thing. Names with an underscore stay in a file."""
    places = collections.defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name in {name for statement in tree.body for name in names_of(statement)}:
            places[name].append(str(path.relative_to(PACKAGE)))
    public = {name for name in places if not name.startswith("_")} - COMMAND
    assert {name: places[name] for name in public if len(places[name]) > 1} == {}


def test_kernels_read_only_public_attributes_of_masks_and_tokens():
    """So a kernel of a user can do what the kernels of this package do."""
    private = [
        f"{path.name}: {ast.unparse(node)}"
        for path in sorted((PACKAGE / "_src" / "kernels").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_")
    ]
    # Those of an object itself, and the one that a NamedTuple of jax has.
    others = [text for text in private if ": self._" not in text and "._replace" not in text]
    assert others == []
