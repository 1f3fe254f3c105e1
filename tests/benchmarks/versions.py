"""Times this checkout beside another one: both packages in one process, interleaved, every ratio
paired within a round.

Usage: python tests/benchmarks/versions.py OTHER [--rounds N] [--only CASE ...]

OTHER is the folder of the other checkout, such as one that `git worktree add ../other main~5` makes.
A ratio is the time of this checkout divided by that of the other; above 1, this one is slower. A
case that one of them cannot run is named and left out.
"""

import functools
import importlib
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from harness import interleave, markdown_table, parser_of

HERE = Path(__file__).resolve().parents[2]
PACKAGE = "transformer_embed"
# Called by users outside of jit: their cost is Python's.
EAGER = {"decoding one token": 200}


def load(folder):
    """The programs of a checkout, beside one that is already loaded."""
    for name in [*sys.modules]:
        if name.split(".")[0] in (PACKAGE, "peers", "programs"):
            del sys.modules[name]
    path = [str(folder / "tests" / "benchmarks"), str(folder), *sys.path]
    # jax.export would refuse the second class of a name.
    kinds = ("pytree_node", "namedtuple")
    names = {f"register_{kind}_serialization": mock.DEFAULT for kind in kinds}
    with mock.patch.object(sys, "path", path), mock.patch.multiple("jax.export", **names):
        package = importlib.import_module(PACKAGE)
        # What it imports when it is first used, too.
        for part in ("kernels", "rows"):
            importlib.import_module(f"{PACKAGE}.{part}")
        if not Path(package.__file__).is_relative_to(folder.resolve()):
            raise FileNotFoundError(f"no package {PACKAGE} in {folder}")
        return importlib.import_module("programs")


def call_of(programs, name):
    if name == "Adam step by rows":
        return programs.stepping(programs.row_step, programs.ROWS)
    program = programs.PROGRAMS.get(name, lambda: {programs.OURS: programs.OTHERS[name]})()
    function, arguments = program[programs.OURS]
    function = function if name in EAGER else jax.jit(function)
    return functools.partial(function, *programs.drawn(arguments))


def main():
    """Prints a Markdown table."""
    parser = parser_of(__doc__)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=41, help="rounds a case (default: 41)")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="some cases of programs.py")
    arguments = parser.parse_args()
    versions = {"other": load(arguments.other), "this": load(HERE)}
    # Kernels for TPUs do not run here.
    every = [*versions["this"].PROGRAMS, *versions["this"].OTHERS]
    every = [name for name in every if not name.startswith("attention")]
    rows, left_out = [], ""
    for name in arguments.only or every:
        try:
            calls = {version: call_of(programs, name) for version, programs in versions.items()}
            samples = interleave(calls, arguments.rounds, name, EAGER.get(name, 1))
        except Exception as error:
            left_out += f"- not timed: {name}: {error!r:.120}\n"
            continue
        low, median, high = np.percentile(samples["this"] / samples["other"], (25, 50, 75))
        times = [f"{np.median(samples[version]):.3g}" for version in versions]
        rows.append([name, *times, f"{median:.3f}", f"{low:.2f} to {high:.2f}"])
    columns = ["case", "other, ms", "this, ms", "this / other", "middle half"]
    print(f"{markdown_table(columns, rows)}\n{left_out}", end="")


if __name__ == "__main__":
    main()
