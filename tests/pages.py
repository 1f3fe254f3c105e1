"""The pages with Python blocks, their blocks, and the functions that pages define."""

import ast
import json
import re
import symtable
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
START = ROOT / "notebooks" / "start.md"
FOLDER = ROOT / "notebooks"
PAGES = [
    page
    for page in sorted(FOLDER.glob("*.md"))
    if "```python\n" in page.read_text(encoding="utf-8")
]


def blocks_of(path: Path) -> list[str]:
    """The Python blocks of a page, in order."""
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def functions_of(path: Path, *names: str, **given: Any) -> types.SimpleNamespace:
    """What a page or a notebook calls by these names, made by the statements that they need alone.

    A name that is defined again has its last definition before the one that needs it. Those that
    are given take the place of the page's own.
    """
    statements = [each for block in code_of(path) for each in ast.parse(block).body]
    everywhere = set().union(*map(_defined, statements)) - given.keys()
    wanted, missing = set(), set(names)
    # A function may call one that stands below it.
    while missing:
        wanted |= missing
        kept, missing = _needed(statements, wanted, given)
        missing = missing & everywhere - wanted
    namespace = dict(given)
    for statement in kept:
        exec(compile(ast.Module([statement], []), path.name, "exec"), namespace)
        namespace |= given
    return types.SimpleNamespace(**{name: namespace[name] for name in names})


def _needed(statements: list[ast.stmt], wanted: set[str], given: Any) -> tuple[list, set[str]]:
    """The statements that define what is wanted, and the names that they lack."""
    needed, kept = set(wanted), []
    for statement in reversed(statements):
        defined = _defined(statement) - given.keys()
        if defined & needed:
            needed = needed - defined | _read(statement)
            kept.append(statement)
    return kept[::-1], needed


def code_of(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".md", ".py"):
        return blocks_of(path) if path.suffix == ".md" else [text]
    cells = json.loads(text)["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(each.asname or each.name).split(".")[0] for each in statement.names}
    nodes = ast.walk(statement) if isinstance(statement, ast.Assign) else ()
    return {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _read(statement: ast.stmt) -> set[str]:
    """The global names that a statement reads, also inside its functions."""
    tables, names = [symtable.symtable(ast.unparse(statement), "page", "exec")], set()
    for table in tables:
        tables += table.get_children()
        is_top = table.get_type() == "module"
        symbols = [each for each in table.get_symbols() if each.is_referenced()]
        names |= {each.get_name() for each in symbols if is_top or each.is_global()}
    return names
