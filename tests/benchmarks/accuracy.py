"""Prints the largest error of sinusoidal encodings against arbitrary precision, beside that of the usual float32 formula.

Usage: python tests/benchmarks/accuracy.py [--positions N] [--d-model D] [--base B]
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import transformer_embed as te

sys.path.insert(0, str(Path(__file__).parents[1]))
import oracle

RANGES = (
    ("0 .. 1e3", 0, 10**3),
    ("0 .. 1e5", 0, 10**5),
    ("0 .. 1e7", 0, 10**7),
    ("0 .. 2^31 - 1", 0, 2**31 - 1),
    ("-2^31 .. -1", -(2**31), -1),
)


def float32_formula(positions, d_model, base):
    """The angle as a float32 product, as it is usually written."""
    frequencies = jnp.exp(jnp.arange(0, d_model, 2, dtype=jnp.float32) * np.float32(-np.log(base) / d_model))
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(len(positions), -1)


def errors(low, high, options, rng):
    """The largest errors (ours, the formula's) over random positions and both ends, in a random channel pair each and the first."""
    positions = np.append(rng.integers(low, high + 1, options.positions), [low, high]).astype(np.int32)
    ours = np.asarray(jax.jit(lambda p: te.sinusoidal_encoding(p, options.d_model, base=options.base))(positions))
    theirs = np.asarray(jax.jit(lambda p: float32_formula(p, options.d_model, options.base))(positions))
    worst = [0.0, 0.0]
    for row, position in enumerate(tqdm(positions, desc=f"{low} .. {high}", leave=False)):
        for pair in {0, int(rng.integers(options.d_model // 2))}:
            frequency = oracle.frequency(pair, options.d_model / 2, options.base)
            for quarters in (0, 1):
                exact = oracle.sine(int(position), frequency, quarters)
                for which, table in enumerate((ours, theirs)):
                    worst[which] = max(worst[which], oracle.error(table[row, 2 * pair + quarters], exact))
    return worst


def main():
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--positions", type=int, default=10_000, help="random positions a row (default: 10000)")
    parser.add_argument("--d-model", type=int, default=512, help="channels, even (default: 512)")
    parser.add_argument("--base", type=float, default=10_000.0, help="default: 10000")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    print(f"d_model {options.d_model}, base {options.base:g}, {options.positions} positions a row, jax {jax.__version__}\n")
    print("| positions | max error, ours | max error, float32 product |")
    print("|---|---|---|")
    for name, low, high in RANGES:
        ours, theirs = errors(low, high, options, rng)
        print(f"| {name} | {ours:.1e} | {theirs:.1e} |", flush=True)


if __name__ == "__main__":
    main()
