"""Runs pyright once over the package, and over the Python blocks of the README and the first page,
a file for each page.

Usage: python tests/typed_blocks.py
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from pages import README, ROOT, START, blocks_of

# After `for step in ...:`, pages print the loss of the last step.
UNBOUND_IS_FINE = "# pyright: reportPossiblyUnboundVariable=false\n"


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    settings = project["tool"]["pyright"]
    with tempfile.TemporaryDirectory() as folder:
        for page in (README, START):
            text = UNBOUND_IS_FINE + "\n".join(blocks_of(page))
            (Path(folder) / f"{page.stem}.py").write_text(text, encoding="utf-8")
        # pyright takes relative paths only.
        package = [os.path.relpath(ROOT / name, folder) for name in settings["include"]]
        settings |= {"include": [".", *package], "extraPaths": [str(ROOT)]}
        (Path(folder) / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
        return subprocess.run(["pyright", "--project", folder], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
