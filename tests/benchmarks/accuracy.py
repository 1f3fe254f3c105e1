"""Prints the largest errors of sinusoidal encodings against arbitrary precision, beside those of the
usual float32 formula.

Usage: python tests/benchmarks/accuracy.py [--positions N] [--d-model D]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import transformer_embed as te

sys.path.insert(0, str(Path(__file__).parents[1]))
import oracle
from harness import markdown_table, parser_of
from peers import float32_waves

RANGES = {"1e3": 10**3, "1e5": 10**5, "1e7": 10**7, "2^31 - 1": 2**31 - 1}


def errors(high, count, d_model, rng):
    """The largest errors (ours, the formula's) over random positions and both ends, in a random
    pair of channels each and the first."""
    pairs = d_model // 2
    positions = np.append(rng.integers(0, high + 1, count), [0, high]).astype(np.int32)
    ours = lambda p: jnp.split(te.sinusoidal_encoding(p, d_model, layout="sin_cos"), 2, -1)
    formula = lambda p: float32_waves(p, pairs, 1e4)
    found = np.array([jax.jit(encode)(positions) for encode in (ours, formula)])
    worst = np.zeros(2)
    for row, position in enumerate(tqdm(positions.tolist(), desc=f"to {high}", leave=False)):
        for pair in {0, int(rng.integers(pairs))}:
            frequency = oracle.frequency(pair, pairs)
            for quarters in (0, 1):
                exact = oracle.sine(position, frequency, quarters)
                both = found[:, quarters, row, pair]
                worst = np.maximum(worst, [oracle.error(value, exact) for value in both])
    return worst


def main():
    """Prints a Markdown table."""
    parser = parser_of(__doc__)
    parser.add_argument("--positions", type=int, default=10_000, help="a row (default: 10000)")
    parser.add_argument("--d-model", type=int, default=512, help="(default: 512)")
    options, rng, rows = parser.parse_args(), np.random.default_rng(0), []
    print(f"{options.positions} positions a row, {options.d_model} channels, base 1e4\n")
    for name, high in RANGES.items():
        worst = errors(high, options.positions, options.d_model, rng)
        rows.append([name, *(f"{error:.1e}" for error in worst)])
    print(markdown_table(["positions up to", "error, ours", "error, float32 product"], rows))


if __name__ == "__main__":
    main()
