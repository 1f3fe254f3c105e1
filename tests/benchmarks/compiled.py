"""Compiles the main programs, each beside its usual counterpart, for TPUs and GPUs that are not
there, and says what XLA made of them.

Usage: python tests/benchmarks/compiled.py [--target NAME] [--only PROGRAM ...]

NAME is cuda:h200, or a TPU topology such as tpu:v5e:2x2; programs are compiled for one chip of it.
Nothing is run, so nothing is timed.
"""

import functools
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
if any("cuda" in argument for argument in sys.argv):
    os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda")
    # Before jax is imported: some versions look for the GPU then.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    os.environ.setdefault("XLA_FLAGS", flags)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from harness import markdown_table, parser_of, print_machine
from programs import OURS, PROGRAMS
from targets import target

import transformer_embed as te

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")


def programs_table(on, names):
    """Each program, ours first, then its usual counterparts."""
    rows = []
    for name in names:
        ours = None
        for line, (function, arguments) in PROGRAMS[name]().items():
            try:
                facts = on.facts(function, *on.like(arguments))
            except jax.errors.JaxRuntimeError as error:
                needed = re.search(r"HLO temporaries \((\S+)\) exceeds", str(error))
                if not needed:
                    raise
                cells = [f"{needed[1]}B, more than the chip has", "-", "-"]
            else:
                ours = ours or facts.cycles
                cells = [f"{facts.temporaries / 1e6:.1f}", "-", "-"]
                if facts.cycles:
                    cells[1:] = [f"{facts.cycles:,}", f"{facts.cycles / ours:.2f}"]
            rows.append([name if line == OURS else "", line, *cells])
    columns = ["program", "line", "temporaries, MB", "estimated cycles", "/ ours"]
    return markdown_table(columns, rows)


def whole_logits(x, table, labels):
    log_probs = jax.nn.log_softmax((x @ table.T).astype(jnp.float32))
    return -jnp.take_along_axis(log_probs, labels[:, None], 1).mean()


LOSSES = {
    "linear_cross_entropy": te.linear_cross_entropy,
    "linear_log_probs": lambda *arguments: te.linear_log_probs(*arguments).mean(),
    "linear_divergence": lambda x, table, _: te.linear_divergence(
        x, table, *jax.lax.stop_gradient((1.5 * x, table))
    ),
    "whole logits": whole_logits,
}


def losses_table(on):
    """Megabytes of temporaries of values and gradients, in bfloat16, by the number of tokens."""
    lengths, rows = (4096, 16_384, 131_072), []
    array = functools.partial(on.array, dtype=jnp.bfloat16)
    for name, loss in LOSSES.items():
        step, cells = jax.value_and_grad(loss, (0, 1)), []
        for tokens in lengths:
            labels = on.array((tokens,), jnp.int32)
            facts = on.facts(step, array((tokens, 1024)), array((32_000, 1024)), labels)
            cells.append(f"{facts.temporaries / 1e6:.0f}")
        rows.append([name, *cells])
    return markdown_table(["loss", *map(str, lengths)], rows)


def main():
    """Prints a Markdown table."""
    parser = parser_of(__doc__)
    parser.add_argument("--target", default="tpu:v5e:2x2", help="(default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, metavar="PROGRAM")
    arguments = parser.parse_args()
    on = target(arguments.target)
    print_machine(PACKAGES, f"compiled, not run, for {arguments.target} ({len(on.devices)} chips)")
    print(programs_table(on, arguments.only or list(PROGRAMS)))
    if on.platform == "cuda" and not arguments.only:
        print(f"\n{losses_table(on)}")


if __name__ == "__main__":
    main()
