"""The pages with Python blocks, and their blocks."""

import re
from pathlib import Path

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
