"""Prints the largest errors of sinusoids and rotations against arbitrary precision, beside those of
the usual float32 formula.

Usage: python tests/benchmarks/accuracy.py [--positions N] [--d-model D] [--base B] [--head-dim H]
    [--rotary-base R]
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import transformer_embed as te

sys.path.insert(0, str(Path(__file__).parents[1]))
import oracle
from harness import markdown_table, parser_of
from peers import float32_waves

WHOLE = (
    ("0 .. 1e3", 0, 10**3),
    ("0 .. 1e5", 0, 10**5),
    ("0 .. 1e7", 0, 10**7),
    ("0 .. 2^31 - 1", 0, 2**31 - 1),
    ("-2^31 .. -1", -(2**31), -1),
)
# Random positions a row; channels and bases of the sinusoids and of the rotations, Llama 3's.
DEFAULTS = {"positions": 10_000, "d-model": 512, "base": 1e4, "head-dim": 128, "rotary-base": 5e5}
FRACTIONAL = (("0 .. 1e3, fractional", 0, 10**3), ("0 .. 2^24, fractional", 0, 2**24))


class Kind(NamedTuple):
    """An encoding of [N] positions as sines and cosines, each [N, pairs], in ours and in the
    float32 formula."""

    name: str
    ranges: tuple[tuple[str, int, int], ...]
    dtype: type
    pairs: int
    base: float
    ours: Callable


def sines_and_cosines(positions, d_model, base):
    """Of the sinusoidal encoding."""
    table = te.sinusoidal_encoding(positions, d_model, base=base, layout="sin_cos")
    return jnp.split(table, 2, -1)


def rotations(positions, head_dim, base):
    """What `apply_rotary` makes of pairs (1, 0): the sines and the cosines it multiplies by."""
    x = jnp.concatenate([jnp.ones([head_dim // 2]), jnp.zeros([head_dim // 2])])
    rotated = te.apply_rotary(
        jnp.broadcast_to(x, (len(positions), 1, head_dim)), positions, base=base
    )
    cosines, sines = jnp.split(rotated[:, 0], 2, -1)
    return sines, cosines


def errors(kind, low, high, count, rng):
    """The largest errors (ours, the formula's) over random positions and both ends, in a random
    pair of channels each and the first."""
    random = (
        rng.integers(low, high + 1, count)
        if kind.dtype is np.int32
        else rng.uniform(low, high, count)
    )
    positions = np.append(random, [low, high]).astype(kind.dtype)
    encode = (
        lambda p: kind.ours(p, 2 * kind.pairs, kind.base),
        lambda p: float32_waves(p, kind.pairs, kind.base),
    )
    found = [np.stack([np.asarray(each) for each in jax.jit(f)(positions)]) for f in encode]
    worst = [0.0, 0.0]
    for row, position in enumerate(tqdm(positions.tolist(), desc=f"{low} .. {high}", leave=False)):
        for pair in {0, int(rng.integers(kind.pairs))}:
            frequency = oracle.frequency(pair, kind.pairs, kind.base)
            for quarters in (0, 1):
                exact = oracle.sine(position, frequency, quarters)
                for which, values in enumerate(found):
                    worst[which] = max(
                        worst[which], oracle.error(values[quarters, row, pair], exact)
                    )
    return worst


def main():
    """Prints a Markdown table."""
    parser = parser_of(__doc__)
    for name, default in DEFAULTS.items():
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help=f"(default: {default:g})"
        )
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    sinusoids = (options.d_model // 2, options.base, sines_and_cosines)
    kinds = (
        Kind("sinusoidal", WHOLE, np.int32, *sinusoids),
        Kind("sinusoidal", FRACTIONAL, np.float32, *sinusoids),
        Kind("rotary", WHOLE, np.int32, options.head_dim // 2, options.rotary_base, rotations),
    )
    print(f"{options.positions} positions a row, jax {jax.__version__}\n")
    rows = []
    for kind in kinds:
        name = f"{kind.name}, {2 * kind.pairs} channels, base {kind.base:g}"
        for label, low, high in kind.ranges:
            worst = errors(kind, low, high, options.positions, rng)
            rows.append([name, label, *(f"{error:.1e}" for error in worst)])
    columns = ["encoding", "positions", "max error, ours", "max error, float32 product"]
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    main()
