"""The pages with Python blocks, their blocks, and the functions that pages define."""

import ast
import json
import re
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
    needed, kept = set(names), []
    for statement in reversed(statements):
        defined = _defined(statement) - given.keys()
        if defined & needed:
            needed = needed - defined | _read(statement)
            kept.append(statement)
    namespace = dict(given)
    for statement in reversed(kept):
        exec(compile(ast.Module([statement], []), path.name, "exec"), namespace)
        namespace |= given
    return types.SimpleNamespace(**{name: namespace[name] for name in names})


def code_of(path: Path) -> list[str]:
    if path.suffix == ".md":
        return blocks_of(path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(each.asname or each.name).split(".")[0] for each in statement.names}
    nodes = ast.walk(statement) if isinstance(statement, ast.Assign) else ()
    return {node.id for node in nodes if _is_name(node, ast.Store)}


def _read(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if _is_name(node, ast.Load)}


def _is_name(node: ast.AST, context: type) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, context)
