"""Times the first eager call of each public function, each in a fresh process.

Usage: python tests/benchmarks/first_call.py [--repeats N] [NAME ...]

Medians of the processes' CPU time are printed, which other processes disturb less than the time of a
clock. Small arrays: what is timed is tracing and compiling.
The process has imported the package and has run a first small program of jax.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import markdown_table, parser_of, print_machine

# Each function, and the arrays that it is called with.
CALLS = {
    "alibi_bias": "lambda q, k: te.alibi_bias(q, k, num_heads=4, causal=True), positions, positions",
    "apply_rotary": "te.apply_rotary, heads, positions",
    "AttentionMask.dense": "lambda q, k: te.AttentionMask(te.TokenPositions(q), te.TokenPositions(k), causal=True).dense(), positions, positions",
    "AttentionMask.tile_kinds": "lambda q: te.AttentionMask(te.TokenPositions(q), causal=True).tile_kinds((8, 8)), positions",
    "causal_mask": "lambda: te.causal_mask(32),",
    "check_batch": "lambda: te.check_batch(ids, vocab_size=100),",
    "dropout": "lambda rng, x: te.dropout(rng, 0.1, x), rng, x",
    "lookup": "te.lookup, table, ids",
    "mask_to_bias": "te.mask_to_bias, mask",
    "padding_mask": "lambda ids: te.padding_mask(ids, pad_id=0), ids",
    "permute_rotary_weights": "lambda w: te.permute_rotary_weights(w, num_heads=4, source='half', target='interleaved'), weights",
    "relative_position_buckets": "lambda q, k: te.relative_position_buckets(q, k, causal=False), positions, positions",
    "sinusoidal_encoding": "lambda p: te.sinusoidal_encoding(p, 64), positions",
    "SinusoidalGrid.encoding": "lambda p: te.SinusoidalGrid((4, 8)).encoding(p, 64), positions",
    "sinusoidal_table": "lambda: te.sinusoidal_table(32, 64),",
    "linear_cross_entropy": "te.linear_cross_entropy, x, table, ids",
    "linear_divergence": "te.linear_divergence, x, table, x, table",
    "linear_log_probs, candidates": "te.linear_log_probs, x, table, ids[..., None]",
    "linear_log_probs": "te.linear_log_probs, x, table, ids",
    "linear_logits": "te.linear_logits, x, table",
    "linear_top_k": "lambda x, table: te.linear_top_k(x, table, 4), x, table",
    "TokenPositions.from_ids": "lambda ids: te.TokenPositions.from_ids(ids, pad_id=0), ids",
    "TokenPositions.from_lengths": "lambda n: te.TokenPositions.from_lengths(n, 32), lengths",
    "TokenPositions.from_offset": "lambda n: te.TokenPositions.from_offset(n, 32), lengths",
    "TokenPositions.from_parents": "te.TokenPositions.from_parents, positions[None] - 1",
    "TokenPositions.from_segment_ids": "te.TokenPositions.from_segment_ids, ids",
    "write_cache": "te.write_cache, heads, heads[:, :8], 0",
}
PROGRAM = """
import time
import jax, jax.numpy as jnp, numpy as np
import transformer_embed as te
ids, positions, lengths, rng = np.ones((2, 32), np.int32), np.arange(32), np.array([32, 5]), jax.random.key(0)
x, table, weights = np.ones((2, 32, 64), np.float32), np.ones((100, 64), np.float32), np.ones((64, 64), np.float32)
heads, mask = np.ones((2, 32, 4, 16), np.float32), np.ones((2, 1, 32, 32), bool)
jax.block_until_ready(jnp.ones(3) * 2)
function, *arguments = ({call})
start = time.process_time()
jax.block_until_ready(function(*arguments))
print(time.process_time() - start)
"""


def milliseconds(program, repeats):
    """The median of fresh processes, after one that fills the caches of files."""
    command = [sys.executable, "-c", program]
    runs = [subprocess.check_output(command).split()[-1] for _ in range(repeats + 1)]
    return 1e3 * float(np.median(np.array(runs[1:], float)))


def main():
    """Prints a Markdown table."""
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(CALLS)}")
    parser.add_argument("--repeats", type=int, default=5, help="processes a line (default: 5)")
    arguments, rows = parser.parse_args(), []
    print_machine(("transformer-embed", "jax", "jaxlib", "numpy"), f"{arguments.repeats} repeats")
    for name in arguments.names or CALLS:
        time = milliseconds(PROGRAM.format(call=CALLS[name]), arguments.repeats)
        rows.append([name, f"{time:.0f}"])
    print(markdown_table(["function", "first eager call, ms of CPU"], rows))


if __name__ == "__main__":
    main()
