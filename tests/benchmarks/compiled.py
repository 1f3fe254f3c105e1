"""Compiles the main programs, each beside its usual counterpart, for TPUs and GPUs that are not
there, and says what XLA made of them.

Usage: python tests/benchmarks/compiled.py [--target NAME] [--only PROGRAM ...]

NAME is cuda:h200, or a TPU topology such as tpu:v5e:2x2; programs are compiled for one chip of it.
Nothing is run, so nothing is timed.
"""

import itertools
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
from targets import Target, TargetError, target
from tqdm import tqdm

import transformer_embed as te

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")
# Of losses on a GPU.
LOSS_TOKENS, LOSS_WORDS, LOSS_WIDTH = (4096, 16_384, 131_072), (256, 1000, 32_000, 151_936), 1024


def programs_table(on: Target, names: list[str]) -> str:
    """Each program, ours first, then its usual counterparts."""
    columns = ["program", "line", "kernels", "temporaries, MB", "estimated cycles", "/ ours"]
    rows = []
    for name in tqdm(names, desc="compile", leave=False):
        ours = None
        for line, (function, arguments) in PROGRAMS[name]().items():
            try:
                facts = on.facts(function, *on.like(arguments))
            except jax.errors.JaxRuntimeError as error:
                needed = re.search(r"HLO temporaries \((\S+)\) exceeds", str(error))
                if not needed:
                    raise
                cells = ["-", f"{needed[1]}B, more than the chip has", "-", "-", "-"]
            else:
                ours = ours or facts.cycles
                cells = [str(facts.kernels), f"{facts.temporaries / 1e6:.1f}", "-", "-"]
                if facts.cycles:
                    cells[2:] = [f"{facts.cycles:,}", f"{facts.cycles / ours:.2f}"]
                cells.append(f"{facts.seconds:.1f}")
            rows.append([name if line == OURS else "", line, *cells])
    return markdown_table([*columns, "compiled in, s"], rows)


def of_losses(x, table, labels):
    """By name, losses in the mean, and the same loss by whole logits."""

    def whole():
        log_probs = jax.nn.log_softmax((x @ table.T).astype(jnp.float32))
        return -jnp.take_along_axis(log_probs, labels[:, None], 1).mean()

    teacher = jax.lax.stop_gradient((1.5 * x, table))
    return {
        "linear_cross_entropy": lambda: te.linear_cross_entropy(x, table, labels),
        "linear_log_probs": lambda: te.linear_log_probs(x, table, labels).mean(),
        "linear_divergence": lambda: te.linear_divergence(x, table, *teacher),
        "whole logits": whole,
    }


def losses_table(on: Target) -> str:
    """Megabytes of temporaries of values and gradients, in bfloat16."""
    rows, dtype = [], jnp.bfloat16
    names = "linear_cross_entropy", "linear_log_probs", "linear_divergence", "whole logits"
    for name, words in itertools.product(names, LOSS_WORDS):
        cells = []
        for tokens in tqdm(LOSS_TOKENS, desc=f"{name}, {words}", leave=False):
            arrays = on.array((tokens, LOSS_WIDTH), dtype), on.array((words, LOSS_WIDTH), dtype)
            loss = lambda x, table, labels, name=name: of_losses(x, table, labels)[name]()
            step = jax.value_and_grad(loss, (0, 1))
            compiled = on.compile(step, *arrays, on.array((tokens,), jnp.int32))
            cells.append(f"{compiled.memory_analysis().temp_size_in_bytes / 1e6:.0f}")
        rows.append([name, f"{words}", *cells])
    return markdown_table(["loss", "words", *(f"{each} tokens" for each in LOSS_TOKENS)], rows)


def main():
    """Prints a Markdown table."""
    parser = parser_of(__doc__)
    parser.add_argument("--target", default="tpu:v5e:2x2", help="(default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=PROGRAMS, metavar="PROGRAM",
        help=f"some of: {', '.join(PROGRAMS)}",
    )  # fmt: skip
    arguments = parser.parse_args()
    try:
        on = target(arguments.target)
    except TargetError as error:
        sys.exit(str(error))
    print_machine(PACKAGES, f"compiled, not run, for {arguments.target} ({len(on.devices)} chips)")
    print(programs_table(on, arguments.only or list(PROGRAMS)))
    if on.platform == "cuda" and not arguments.only:
        print(f"\n{losses_table(on)}")


if __name__ == "__main__":
    main()
