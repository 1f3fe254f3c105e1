"""The design, held by reading the code: which file may import which, and what the package shows."""

import ast
import inspect
import pathlib
import subprocess
import sys

import pytest

import transformer_embed as te

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "transformer_embed"

FLOORS = {
    "_checks": 0,
    "_mesh": 0,
    "phase": 0,
    "_files": 1,
    "positions": 1,
    "masks": 1,
    "sinusoidal": 1,
    "rotary_scaling": 1,
    "rotary": 1,
    "bias": 1,
    "lookup": 1,
    "cross_entropy": 1,
    "schemes": 1,
    "dropout": 1,
    "modules": 2,
    "_architectures": 2,
    "_row_wise": 2,
    "embedder": 3,
    "rows": 3,
    "sharding": 3,
    "_config_json": 4,
    "pretrained": 4,
    "plots": 4,
    "__main__": 4,
    "_user": 4,
    "_train": 4,
    "_show": 4,
}
SAME_FLOOR = {
    ("phase", "_checks"),
    ("cross_entropy", "lookup"),
    ("rotary", "rotary_scaling"),
    ("schemes", "sinusoidal"),
    ("schemes", "positions"),
    ("sharding", "rows"),
    ("pretrained", "_config_json"),
    ("__main__", "_train"),
    ("__main__", "_show"),
    ("__main__", "_user"),
    ("_show", "_user"),
    ("_show", "plots"),
    ("__main__", "plots"),
    ("__main__", "pretrained"),
}
ON_FIRST_USE = ("rows", "sharding", "pretrained", "plots")
MAY_IMPORT_OPTAX = {"rows", "_row_wise", "__main__", "_train"}
MAX_PUBLIC_NAMES = 61
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "transformer_embed", "tests", "notebooks"}
HEAVY = ("optax", "tqdm", "safetensors", "matplotlib")

FILES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def tree_of(name):
    return ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))


def imported(name):
    """Dotted names that a file imports anywhere, `from a import b` as a.b."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = "transformer_embed" if node.level else ""
            prefix = ".".join(filter(None, (package, node.module)))
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def siblings(name):
    """Files of the package that a file imports; the package itself, or a public name of it, reads as `__init__`."""
    for dotted in imported(name):
        first, *rest = dotted.split(".")
        if first == "transformer_embed":
            yield rest[0] if rest and rest[0] in FLOORS else "__init__"


def roots(name):
    return {dotted.split(".")[0] for dotted in imported(name)}


def may_import(name, other):
    if other == "__init__":
        return FLOORS[name] == 4
    return FLOORS[other] < FLOORS[name] or (name, other) in SAME_FLOOR


def test_every_file_has_a_floor():
    assert set(FILES) <= set(FLOORS)
    assert {"_checks", "phase", "lookup", "modules", "embedder"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_imports_go_down(name):
    assert [other for other in siblings(name) if not may_import(name, other)] == []


def test_the_reader_of_imports_sees_them():
    assert set(siblings("phase")) == {"_checks"}
    assert {"_checks", "lookup", "modules"} <= set(siblings("embedder"))
    assert "haiku" in roots("modules")


@pytest.mark.parametrize("name", [name for name in FILES if FLOORS[name] < 2])
def test_pure_files_import_no_haiku(name):
    assert "haiku" not in roots(name)


@pytest.mark.parametrize("name", [name for name in FILES if name not in MAY_IMPORT_OPTAX])
def test_only_rows_and_the_command_line_import_optax(name):
    assert "optax" not in roots(name)


def test_init_imports_floors_0_to_3_and_shows_what_it_imports():
    nodes = [node for node in tree_of("__init__").body if isinstance(node, ast.ImportFrom) and node.module.startswith("transformer_embed.")]
    assert {FLOORS[node.module.split(".")[1]] for node in nodes} <= {0, 1, 2, 3}
    names = [alias.asname or alias.name for node in nodes for alias in node.names]
    assert te.__all__ == sorted(names)
    assert all(hasattr(te, name) for name in te.__all__)


def public_names(name):
    """Functions and classes at the top of a file, without a leading underscore."""
    kinds = ast.FunctionDef | ast.ClassDef
    return [node.name for node in tree_of(name).body if isinstance(node, kinds) and not node.name.startswith("_")]


def test_few_public_names():
    names = te.__all__ + [f"{file}.{name}" for file in ON_FIRST_USE if file in FILES for name in public_names(file)]
    assert len(names) <= MAX_PUBLIC_NAMES


@pytest.mark.parametrize("name", te.__all__)
def test_public_names_have_a_docstring_with_example_and_source(name):
    # An inherited docstring says nothing about the name at hand.
    text = inspect.cleandoc(getattr(te, name).__doc__ or "")
    sections = [line for line in text.splitlines() if line in ("Example:", "Source:")]
    assert sections == ["Example:", "Source:"]
    assert ">>> " in text.split("Example:")[1].split("Source:")[0]


def test_importing_the_package_loads_nothing_heavy():
    code = f"""
import sys
import haiku
before = set(sys.modules)
import transformer_embed
print([name for name in {HEAVY} if name in set(sys.modules) - before])
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_top_level_holds_what_the_design_names():
    # A build leaves these behind, and git ignores them.
    left_behind = {"build", "dist"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".") and not path.name.endswith(".egg-info")}
    assert found - left_behind - {"__pycache__"} <= TOP_LEVEL
