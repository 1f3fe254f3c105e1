"""Times training steps of large tables by rows beside the dense step of optax and beside PyTorch's
SparseAdam, interleaved.

Usage: python tests/benchmarks/rows.py [--rounds N] [--smoke] [--json OUT.json]
"""

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import (
    Report,
    environment,
    interleave,
    markdown_table,
    ratio,
    timing_report,
    write_whole,
)

import transformer_embed as te

PACKAGES = ("jax", "optax", "torch", "numpy")
BATCH, WIDTH, NARROW, RATE = 16384, 128, 32, 1e-3
# More batches than a cache holds rows of.
BATCHES = 32
# One after another, as in training.
STEPS = 4
OPTIMIZER = optax.adam(RATE)
OURS, DENSE, TORCH = "rows", "dense optax", "PyTorch SparseAdam"


class Sizes(NamedTuple):
    vocab_size: int
    least: int
    most: int
    rounds: int


def loss(params: Any, ids: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum of the rows looked up times fixed weights: what is timed is the table, not a
    model."""
    return jnp.vdot(te.lookup(params["embeddings"], ids), weights)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def row_step(params, state, ids, weights):
    _, grads = te.rows.value_and_grad(loss, ids={"embeddings": ids})(params, ids, weights)
    return te.rows.update(OPTIMIZER, grads, state, params)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def dense_step(params, state, ids, weights):
    updates, state = OPTIMIZER.update(jax.grad(loss)(params, ids, weights), state, params)
    return optax.apply_updates(params, updates), state


def batches(vocab_size: int, convert: Callable[[np.ndarray], Any]) -> Iterator[Any]:
    rng = np.random.default_rng(0)
    return itertools.cycle([convert(rng.integers(0, vocab_size, BATCH)) for _ in range(BATCHES)])


def host_weights(width: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(BATCH, width)).astype(np.float32)


def host_table(vocab_size: int, width: int) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((vocab_size, width), np.float32)


def jax_line(step: Callable, vocab_size: int, width: int) -> Callable[[], Any]:
    params = {"embeddings": jnp.asarray(host_table(vocab_size, width))}
    held = [params, jax.jit(OPTIMIZER.init)(params)]
    ids, weights = (
        batches(vocab_size, lambda ids: jnp.asarray(ids, jnp.int32)),
        jnp.asarray(host_weights(width)),
    )

    def call():
        held[:] = step(*held, next(ids), weights)
        return held[0]

    jax.block_until_ready(call())
    return call


def torch_line(vocab_size: int, width: int) -> Callable[[], Any]:
    import torch  # noqa: PLC0415

    embed = torch.nn.Embedding(
        vocab_size, width, sparse=True, _weight=torch.from_numpy(host_table(vocab_size, width))
    )
    optimizer = torch.optim.SparseAdam(embed.parameters(), lr=RATE)
    ids = batches(vocab_size, torch.from_numpy)
    weights = torch.from_numpy(host_weights(width))

    def call():
        optimizer.zero_grad()
        (embed(next(ids)) * weights).sum().backward()
        optimizer.step()
        return embed.weight.detach().numpy()

    call()
    return call


def against_dense(sizes: Sizes) -> Report:
    """Each step's time and temporaries at one large vocabulary."""
    calls = {
        name: jax_line(step, sizes.vocab_size, WIDTH)
        for name, step in ((OURS, row_step), (DENSE, dense_step))
    }
    samples = interleave(calls, sizes.rounds, "dense", STEPS)
    report = timing_report(
        f"Adam, table [{sizes.vocab_size}, {WIDTH}], {BATCH} ids", samples, (OURS, DENSE), {}
    )
    report.figures["dense / rows"] = ratio(samples, DENSE, OURS)
    memory = {
        name: temporaries(step, sizes.vocab_size)
        for name, step in ((OURS, row_step), (DENSE, dense_step))
    }
    report.figures["temporaries: rows / dense"] = memory[OURS] / memory[DENSE]
    report.notes += [
        f"compiled temporaries, {name}: {size / 1e6:.1f} MB" for name, size in memory.items()
    ]
    return report


def temporaries(step: Callable, vocab_size: int) -> int:
    params = {"embeddings": jax.ShapeDtypeStruct((vocab_size, WIDTH), jnp.float32)}
    shapes = params, jax.eval_shape(OPTIMIZER.init, params)
    ids, weights = (
        jax.ShapeDtypeStruct((BATCH,), jnp.int32),
        jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
    )
    return step.lower(*shapes, ids, weights).compile().memory_analysis().temp_size_in_bytes


def against_torch(sizes: Sizes) -> Report:
    """The same steps in PyTorch, which also updates the rows of the batch alone."""
    title = f"Adam by rows in two libraries, table [{sizes.vocab_size}, {WIDTH}], {BATCH} ids"
    try:
        calls = {
            OURS: jax_line(row_step, sizes.vocab_size, WIDTH),
            TORCH: torch_line(sizes.vocab_size, WIDTH),
        }
    except ImportError as error:
        return timing_report(title, {}, (), {TORCH: str(error)})
    tables = [np.asarray(jax.tree.leaves(call())[0])[:1000] for call in calls.values()]
    # Both took the same two steps, of at most RATE a coordinate, on values below 8.
    np.testing.assert_allclose(*tables, rtol=0, atol=1e-5)
    samples = interleave(calls, sizes.rounds, "PyTorch", STEPS)
    report = timing_report(title, samples, (OURS,), {})
    report.figures["PyTorch / rows"] = ratio(samples, TORCH, OURS)
    return report


def against_vocabulary(sizes: Sizes) -> Report:
    """The same batch in a small and in a large table: what is left is the latency of memory."""
    names = [f"{OURS}, table [{size}, {NARROW}]" for size in (sizes.least, sizes.most)]
    calls = {
        name: jax_line(row_step, size, NARROW)
        for name, size in zip(names, (sizes.least, sizes.most), strict=True)
    }
    samples = interleave(calls, sizes.rounds, "vocabulary", STEPS)
    report = timing_report(f"Adam by rows, {BATCH} ids, two vocabularies", samples, names, {})
    report.figures["large / small vocabulary"] = ratio(samples, names[1], names[0])
    return report


TARGETS = (
    ("dense optax step / row step", "dense / rows", 12, math.inf),
    ("compiled temporaries, row step / dense step", "temporaries: rows / dense", -math.inf, 1 / 12),
    ("row step, large / small vocabulary", "large / small vocabulary", -math.inf, 1.6),
    ("PyTorch's SparseAdam / row step", "PyTorch / rows", 1.0, math.inf),
)


def summary(figures: Mapping[str, float]) -> list[list[str]]:
    rows = []
    for what, figure, least, most in TARGETS:
        value = figures.get(figure, math.nan)
        bound = f">= {least:g}" if least > -math.inf else f"<= {most:.3g}"
        met = "not measured" if math.isnan(value) else "met" if least <= value <= most else "MISSED"
        rows.append([what, bound, f"{value:.3g}", met])
    return rows


def main():
    """Prints a Markdown table a case, and one of the targets."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="rounds a case (default: 30)")
    parser.add_argument(
        "--smoke", action="store_true", help="3 rounds of small tables: to see that all runs"
    )
    parser.add_argument("--json", type=Path, help="write all samples, figures and tables here")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or (arguments.json and not arguments.json.parent.is_dir()):
        parser.error("wanted 1 round or more, and for --json a folder that exists")
    sizes = (
        Sizes(20_000, 20_000, 40_000, 3)
        if arguments.smoke
        else Sizes(1_000_000, 100_000, 10_000_000, arguments.rounds)
    )
    machine = environment(PACKAGES)
    print(
        f"{machine['cpus']} CPUs, {machine['platform']}, jax on {machine['backend']}, {sizes.rounds} rounds\n"
    )
    print(
        ", ".join(f"{name} {version}" for name, version in machine["versions"].items()), flush=True
    )
    reports = {}
    for case in (against_dense, against_torch, against_vocabulary):
        reports[case.__name__] = case(sizes)
        print(reports[case.__name__].markdown(), flush=True)
    figures = {key: value for report in reports.values() for key, value in report.figures.items()}
    print(
        f"\n## Summary\n\n{markdown_table(['target', 'bound', 'measured', ''], summary(figures))}"
    )
    if arguments.json:
        cases = {
            name: {**vars(report), "columns": list(report.columns)}
            for name, report in reports.items()
        }
        write_whole(
            arguments.json,
            {
                "machine": machine,
                "sizes": sizes._asdict(),
                "cases": cases,
                "summary": summary(figures),
            },
        )


if __name__ == "__main__":
    main()
