"""Times programs on this machine's NVIDIA GPU, each beside its usual counterparts, by its profiler:
the time of the kernels, without that of launching them.

Usage: python tests/benchmarks/gpu.py [--rounds N] [--json OUT.json] [--only CASE ...]
"""

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The profiler would see a graph of kernels as one.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
from harness import Report, interleave, ratio, run, timing_report
from programs import OURS, drawn, of

import transformer_embed as te
from transformer_embed._src.tokens import lookup_gradient

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "dm-haiku", "optax")
LOSSES = {
    "16384 tokens, 32000 words, d 1024": (16_384, 32_000, 1024),
    "8192 tokens, 151936 words, d 2048": (8192, 151_936, 2048),
}
TABLES, IDS = ((32_000, 512), (128_256, 4096)), 16_384
LENGTH, DOCUMENTS, HEADS, CHANNELS = 16_384, 16, 8, 64


def kernels(call: Callable, rounds: int) -> tuple[float, float]:
    """Milliseconds of kernels and copies a call, and their number."""
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(rounds):
                jax.block_until_ready(call())
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        lines = [line for plane in planes if "/device:GPU" in plane.name for line in plane.lines]
        streams = [line for line in lines if line.name.startswith("Stream")]
        times = [event.duration_ns for line in streams for event in line.events]
    return sum(times) / rounds / 1e6, len(times) / rounds


def table_of(title: str, lines: dict[str, tuple[Callable, tuple[Any, ...]]], rounds: int) -> Report:
    """Each line's kernels and temporaries; the first is ours."""
    report = Report(title, ["line", "kernels, ms", "/ ours", "kernels", "temporaries, MB"])
    ours = None
    for name, (function, arguments) in lines.items():
        compiled = jax.jit(function).lower(*arguments).compile()
        time, count = kernels(functools.partial(compiled, *arguments), rounds)
        ours = ours or time
        megabytes = compiled.memory_analysis().temp_size_in_bytes / 1e6
        cells = [f"{time:.4g}", f"{time / ours:.2f}", f"{count:.0f}", f"{megabytes:.0f}"]
        report.rows.append([name, *cells])
    return report


def all_programs(rounds: int) -> Report:
    """Those of programs.py that are not for TPUs alone."""
    report = Report("programs", ["program", "line", "kernels, ms", "/ ours", "kernels", "MB"])
    for name, make in programs.PROGRAMS.items():
        if not name.startswith(("attention", "Adam")):
            lines = {
                line: (function, drawn(arguments)) for line, (function, arguments) in make().items()
            }
            report.rows += [[name, *row] for row in table_of(name, lines, rounds).rows]
    return report


def losses(rounds: int) -> Report:
    """Values and gradients in bfloat16."""
    report = Report("losses", ["size", "line", "kernels, ms", "/ ours", "kernels", "MB"])
    for size, (tokens, words, d_model) in LOSSES.items():
        x, table = drawn([of(tokens, d_model), of(words, d_model)])
        x, table = (array.astype(jnp.bfloat16) for array in (x, table * d_model**-0.5))
        labels = jnp.asarray(programs.below(words, tokens))

        def by_optax(x, table, labels=labels):
            logits = (x @ table.T).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        def products(x, table):
            logits = x @ table.T
            return logits.sum(dtype=jnp.float32), (logits @ table, logits.T @ x)

        functions = {
            "linear_cross_entropy": functools.partial(te.linear_cross_entropy, labels=labels),
            "linear_log_probs": lambda *arrays, labels=labels: te.linear_log_probs(
                *arrays, labels
            ).mean(),
            "linear_divergence": lambda x, table: te.linear_divergence(x, table, x, -table),
            "optax on x @ table.T": by_optax,
        }
        lines = {
            name: (jax.value_and_grad(function, (0, 1)), (x, table))
            for name, function in functions.items()
        }
        lines["its three products alone"] = products, (x, table)
        report.rows += [[size, *row] for row in table_of(size, lines, rounds).rows]
    return report


def lookup_gradients(rounds: int) -> Report:
    """Of repeated ids: summed in one order, and by atomic additions.

    For XLA's own sums in one order, set XLA_FLAGS=--xla_gpu_deterministic_ops=true.
    """
    columns = ["table, ids", "line", "kernels, ms", "/ ours", "kernels", "MB"]
    report = Report(f"gradients of lookup, {IDS} ids, float32", columns)
    rng = np.random.default_rng(0)
    for rows, width in TABLES:
        for kind, ids in {
            "uniform": rng.integers(0, rows, IDS),
            "Zipf": np.minimum(rng.zipf(1.2, IDS) - 1, rows - 1),
            "equal": np.full(IDS, 7),
        }.items():
            arguments = drawn([of(rows, width), ids, of(IDS, width)])
            size = f"[{rows}, {width}], {kind}"

            def summed(table, ids, weights):
                return jnp.vdot(te.lookup(table, ids), weights)

            def scattered(table, ids, weights):
                # Its transpose is a scatter-add.
                rows = lookup_gradient._read_each_repeat(table, ids.astype(jnp.uint32))
                return jnp.vdot(rows, weights)

            lines = {
                name: (jax.grad(function), arguments)
                for name, function in {OURS: summed, "scatter-add": scattered}.items()
            }
            report.rows += [[size, *row] for row in table_of(size, lines, rounds).rows]
    return report


def steps_by_rows(rounds: int) -> Report:
    """Adam steps by rows beside dense ones, with the launches."""
    title = f"Adam, {programs.STEP_IDS} ids, width {programs.WIDTH}, wall time"
    report = Report(title, ["rows", "line", "median, ms", "/ rows"])
    for rows in (10**5, 10**6):
        steps = {"rows": programs.row_step, "dense optax": programs.dense_step}
        calls = {name: programs.stepping(step, rows) for name, step in steps.items()}
        samples = interleave(calls, rounds, f"{rows} rows", 20)
        found = timing_report(title, samples, ["rows"])
        report.rows += [[f"{rows}", *row] for row in found.rows]
        report.notes.append(
            f"{rows} rows, dense / rows: {ratio(samples, 'dense optax', 'rows'):.2f}"
        )
    return report


def attention(rounds: int) -> Report:
    """The dense mask of packed documents, bfloat16, by XLA and by cuDNN."""
    queries = drawn(of(1, LENGTH, HEADS, CHANNELS, dtype=jnp.bfloat16))
    ids = np.repeat(np.arange(1, DOCUMENTS + 1, dtype=np.int32), LENGTH // DOCUMENTS)[None]

    def attend(heads, ids, implementation):
        mask = te.AttentionMask(te.TokenPositions.from_segment_ids(ids), causal=True).dense()
        options = {"mask": mask, "implementation": implementation}
        return jax.nn.dot_product_attention(heads, heads, heads, **options)

    def loss(*arguments):
        return attend(*arguments).sum(dtype=jnp.float32)

    lines = {}
    for name in ("cudnn", "xla"):
        for what, function in {"forward": attend, "and backward": jax.grad(loss)}.items():
            call = functools.partial(function, implementation=name)
            lines[f"{name}, {what}"] = call, (queries, jnp.asarray(ids))
    return table_of(f"attention, {LENGTH} tokens, {DOCUMENTS} documents", lines, rounds)


CASES = {
    "programs": all_programs,
    "losses": losses,
    "gradients": lookup_gradients,
    "rows": steps_by_rows,
    "attention": attention,
}

if __name__ == "__main__":
    if jax.default_backend() != "gpu":
        sys.exit("no GPU that jax sees: jax.default_backend() is " + jax.default_backend())
    run(__doc__, CASES, PACKAGES, 10)
