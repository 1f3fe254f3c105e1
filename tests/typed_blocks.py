"""Runs pyright over the Python blocks of the README and the quick start, a file for each page.

Usage: python tests/typed_blocks.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from pages import QUICK_START, README, ROOT, blocks_of

# After `for step in ...:`, pages print the loss of the last step.
SETTINGS = {"typeCheckingMode": "standard", "reportPossiblyUnboundVariable": False}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        for page in (README, QUICK_START):
            (Path(folder) / f"{page.stem}.py").write_text(
                "\n".join(blocks_of(page)), encoding="utf-8"
            )
        settings = SETTINGS | {"extraPaths": [str(ROOT)]}
        (Path(folder) / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
        return subprocess.run(["pyright", "--project", folder], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
