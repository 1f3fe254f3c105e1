"""Prints how many values of options, and how many pairs of values, the draws of each space meet.

Usage: python tests/draw_coverage.py [--draws N] [--of N] [--all]

A value is one value of one option, such as `causal=True`. A pair is two values of two options in the
same draw. What can occur is what the first 1,000 draws meet, or as many as `--of` says: some values
are only allowed beside others, so no list holds them.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import draws

TESTS = Path(__file__).parent
SHOWN = 8


def spaces(but=()):
    """Returns the spaces of all test files but these, by names such as `test_steps.SPACE`."""
    found = {}
    sys.path += [str(folder) for folder in TESTS.iterdir() if folder.is_dir()]
    for path in sorted(TESTS.rglob("test_*.py")):
        if "draws.Space(" not in path.read_text() or path.stem in ("test_draws", *but):
            continue
        module = importlib.import_module(path.stem)
        for name, value in vars(module).items():
            if isinstance(value, draws.Space):
                found[f"{path.stem}.{name}"] = value
    return found


def missed_values(space, known):
    """Returns the values that the default run does not meet, of those of the first `known` draws."""
    return sorted(space.values_met(known) - space.values_met(space.default))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=200, help="draws whose pairs are counted")
    parser.add_argument("--of", type=int, default=1000, help="draws that show what can occur")
    parser.add_argument("--all", action="store_true", help="print every pair that is missing")
    given = parser.parse_args()
    for name, space in spaces().items():
        values, pairs = space.values_met(given.of), space.pairs_met(given.of)
        missing = missed_values(space, given.of)
        met = space.pairs_met(given.draws)
        print(
            f"{name}: {len(values) - len(missing)} of {len(values)} values in {space.default} draws,"
            f" {len(met)} of {len(pairs)} pairs in {given.draws}"
        )
        for option, value in missing:
            print(f"  missing value: {option}={value}")
        missing_pairs = sorted(pairs - met)
        for (option, value), (other, other_value) in missing_pairs[: None if given.all else SHOWN]:
            print(f"  missing pair: {option}={value} and {other}={other_value}")
        if len(missing_pairs) > SHOWN and not given.all:
            print(f"  and {len(missing_pairs) - SHOWN} other pairs")


if __name__ == "__main__":
    main()
