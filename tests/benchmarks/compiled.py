"""Compiles the main programs, each beside its usual counterpart, for TPUs and GPUs that are not
there, and says what XLA made of them.

Usage: python tests/benchmarks/compiled.py [--target NAME] [--only PROGRAM ...]

NAME is cuda:h200, or any TPU topology: tpu:v5e:2x2, tpu:v5p:8x8x8, ... A target of at most four
chips prints the main programs, compiled for one of them. One of several chips also prints what a
training step of a big table and the tied loss send, beside the formulae of sharding.py. Nothing is
run, so nothing is timed.
"""

import functools
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
from jax.sharding import PartitionSpec
from meshes import AUTO, EXPLICIT
from programs import OPTIMIZER, OURS, PROGRAMS
from sharding import IDS, WAYS, WIDTH, all_reduce, arguments_of, step_of
from targets import Facts, Target, TargetError, target
from tqdm import tqdm

import transformer_embed as te

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")
# The largest target whose programs are compiled on one of its chips.
FEW = 4
# Of losses on a GPU.
LOSS_TOKENS, LOSS_WORDS, LOSS_WIDTH = (4096, 16_384, 131_072), (256, 1000, 32_000, 151_936), 1024
# Of the tied loss on a mesh, the tokens to each part of the batch.
WORDS, TOKENS = 262_144, 1024


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


def sharded_loss(on: Target, mesh: jax.sharding.Mesh) -> tuple[Facts, float]:
    """Value and gradients of the tied loss, in one chunk: what a loop sends is counted once. On
    paper: three numbers and the gradient of x for each token, summed over the shards; the gradient
    of a shard, over the data axis."""
    data, shards = mesh.shape.values()
    tokens, split = data * TOKENS, (mesh, PartitionSpec("data"))
    table = on.array((WORDS, WIDTH), jnp.float32, mesh, PartitionSpec("model"))
    x, labels = (
        on.array((tokens, WIDTH), jnp.float32, *split),
        on.array((tokens,), jnp.int32, *split),
    )
    loss = functools.partial(te.linear_cross_entropy, chunk_size=tokens)
    facts = on.facts(jax.value_and_grad(loss, (0, 1)), x, table, labels)
    gradient = all_reduce(4 * -(-WORDS // shards) * WIDTH, data) + 2 * all_reduce(4, data)
    return facts, all_reduce(4 * TOKENS * (3 + WIDTH), shards) + gradient


def mesh_table(on: Target) -> str:
    """What each chip sends and holds beside its arguments, as compiled and on paper."""
    chips = len(on.devices)
    shards = 2 ** (chips.bit_length() // 2)
    # On v5e, 16 GB a chip hold the rows, both moments and what the steps need beside them.
    data, vocab_size = chips // shards, 10**8 * min(chips, 256) // 256
    found = {}
    automatic, explicit = (on.mesh(kind, data=data, model=shards) for kind in (AUTO, EXPLICIT))
    ways = [(way, explicit, "") for way in ("sharded", "by rows", "by exchange")]
    for way, mesh, kind in [*ways, ("by rows", automatic, ", automatic axes")]:
        arguments = arguments_of(way, mesh, OPTIMIZER, vocab_size, WIDTH, IDS)
        facts = on.facts(step_of(way, OPTIMIZER), *arguments)
        line = f"Adam step {way}, table [{vocab_size:.2g}, {WIDTH}]{kind}"
        found[line] = facts, WAYS[way](vocab_size, data, shards)
    for mesh, kind in ((explicit, ""), (automatic, ", automatic axes")):
        found[f"tied cross-entropy, table [{WORDS}, {WIDTH}]{kind}"] = sharded_loss(on, mesh)
    rows = []
    for line, (facts, paper) in found.items():
        sizes = [f"{size / 1e6:,.1f}" for size in (facts.sent, paper, facts.temporaries)]
        sends = "; ".join(each.summary for each in facts.collectives)
        cycles = f"{facts.cycles:,}" if facts.cycles else "-"
        rows.append([line, *sizes, cycles, f"{facts.seconds:.1f}", sends])
    columns = ["sent by a chip, MB", "on paper, MB", "temporaries, MB", "estimated cycles"]
    columns.append("compiled in, s")
    return markdown_table([f"program, {data} x {shards}", *columns, "collectives"], rows)


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
    if len(on.devices) <= FEW:
        print(programs_table(on, arguments.only or list(PROGRAMS)))
    if on.platform == "cuda" and not arguments.only:
        print(f"\n{losses_table(on)}")
    if len(on.devices) > 1 and not arguments.only:
        print(f"\n{mesh_table(on)}")


if __name__ == "__main__":
    main()
