"""Times the input layer beside the same layer in other libraries: one process, interleaved, every
ratio paired within a round.

Usage: python tests/benchmarks/input_layer.py [--rounds N] [--json OUT.json] [--only CASE ...]

Batch 32, length 512, d_model 512, vocabulary 32000, float32 and dropout 0.1, unless a case says
otherwise. A library that is not installed is named and left out, and so is one whose embeddings are
not ours: only equal work is timed.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peers
import programs
from harness import Report, interleave, run, timing_report
from peers import (
    BATCH,
    CONFIG,
    CONSTANT,
    GATHER,
    IN_TRACE,
    LENGTH,
    LINES,
    MODES,
    OURS,
    RATE,
    VOCAB_SIZE,
    calls_of,
    make_work,
)
from tqdm import tqdm

import transformer_embed as te
from transformer_embed._src.layers import embedder

PACKAGES = ("jax", "jaxlib", "dm-haiku", "numpy", "flax", "keras", "equinox", "torch")
LONG = 131_072
# How often one token is embedded for one sample.
CALLS = 200
# The lines differ in how they round the product and the sum; a wrong scale, layout or position
# differs by 0.1 and more.
TOLERANCE = 1e-4
# Of some 10**7 draws the share of zeros has a standard deviation of 1e-4; the norm of a gradient
# varies no more.
STATISTICAL_TOLERANCE = 1e-2


def unlike(line: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Why a line does other work than ours; nothing where it does the same."""
    results = {mode: (_host(line[mode]()), _host(ours[mode]())) for mode in MODES}
    theirs, mine = results["eval"]
    difference = np.max(np.abs(theirs - mine))
    if not difference <= TOLERANCE:
        return f"its embeddings differ from ours by {difference:.1g}"
    dropped, _ = results["train"]
    kept = np.where(dropped == 0, 0, theirs / (1 - RATE))
    wrong = np.max(np.abs(dropped - kept)) > 2 * TOLERANCE
    if wrong or abs(np.mean(dropped == 0) - RATE) > STATISTICAL_TOLERANCE:
        return f"in training it does not drop elements at rate {RATE}"
    theirs, mine = map(np.linalg.norm, results["grad"])
    if not abs(theirs / mine - 1) <= STATISTICAL_TOLERANCE:
        return f"its gradient's norm is {theirs / mine:.3f} of ours"
    return ""


def _host(result: Any) -> np.ndarray:
    leaf = jax.tree.leaves(result)[0]
    return np.asarray(leaf.detach() if hasattr(leaf, "detach") else leaf)


@functools.cache
def main_lines() -> tuple[dict[str, Any], list[str]]:
    """The lines' calls, each checked; and those left out, with the reason."""
    ready, skipped = {}, []
    for name in tqdm(LINES, desc="compile and compare", leave=False):
        try:
            calls = calls_of(name, make_work())
            reason = "" if name in (OURS, GATHER) else unlike(calls, ready[OURS])
        except Exception as error:
            if name in (OURS, GATHER):
                raise
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if reason:
            skipped.append(f"not timed: {name} ({reason})")
        else:
            ready[name] = calls
    return ready, skipped


def mode_case(mode: str, title: str) -> Callable[[int], Report]:
    """All lines in one mode."""

    def case(rounds: int) -> Report:
        lines, skipped = main_lines()
        samples = interleave({name: calls[mode] for name, calls in lines.items()}, rounds, mode)
        report = timing_report(title, samples, (OURS, GATHER))
        report.notes += skipped
        return report

    return case


def paired(title: str, calls: Mapping[str, Callable], rounds: int, by: str, repeats=1) -> Report:
    """Times of calls, and their ratios to one of them."""
    return timing_report(title, interleave(calls, rounds, title, repeats), (by,))


def padding(rounds: int) -> Report:
    """Positions that skip padding, which each row then has for itself, beside positions that all rows
    share."""
    work, calls = make_work(), {}
    for name, pad_id in (("without pad_id", None), ("with pad_id", VOCAB_SIZE)):
        apply = te.Embedder(dataclasses.replace(CONFIG, pad_id=pad_id)).apply
        arguments = peers.our_params(work.table), None, jnp.asarray(work.ids)
        calls[name] = functools.partial(apply, *arguments, is_training=False)
    np.testing.assert_allclose(*(call() for call in calls.values()), rtol=0, atol=1e-6)
    return paired("Positions that skip padding", calls, rounds, "without pad_id")


def calls_of_program(name: str, by: str) -> dict[str, Callable]:
    """The compiled lines of a program, ours and another one checked."""
    lines = programs.PROGRAMS[name]().items()
    calls = {
        line: functools.partial(jax.jit(function), *programs.drawn(arguments))
        for line, (function, arguments) in lines
    }
    np.testing.assert_allclose(calls[OURS](), calls[by](), rtol=0, atol=TOLERANCE)
    return calls


def program_case(name: str, by: str) -> Callable[[int], Report]:
    return lambda rounds: paired(name, calls_of_program(name, by), rounds, by)


def decoding(rounds: int) -> Report:
    """One token at a position that is data: `apply` outside of jit too, for what the call costs."""
    haiku = "Haiku and a precomputed table"
    calls = calls_of_program("decoding one token", haiku)
    arguments = programs.drawn(programs.decoding()[OURS][1])
    params, ids, offset = arguments
    calls["ours, apply"] = functools.partial(programs.evaluate, *arguments)
    calls[OURS] = functools.partial(embedder._apply, CONFIG, params, ids, False, None, offset, None)
    title = f"One token at a traced offset, {CALLS} calls a sample"
    report = paired(title, calls, rounds, haiku, CALLS)
    apply, inner = (np.array(report.samples[f"{name}, ms"]) for name in ("ours, apply", OURS))
    report.notes.append(f"call overhead of apply: {1e3 * np.median(apply - inner):.3g} us")
    return report


def temporaries(_: int) -> Report:
    """What the compiled programs allocate beside their inputs and results."""
    report = Report("Peak temporaries, MB", ["line", *MODES])
    for name in (OURS, GATHER, CONSTANT, IN_TRACE):
        compiled = [_lowered(call).compile() for call in calls_of(name, make_work()).values()]
        sizes = [program.memory_analysis().temp_size_in_bytes / 1e6 for program in compiled]
        report.rows.append([name, *(f"{size:.2f}" for size in sizes)])
    return report


def _lowered(call: functools.partial) -> Any:
    return jax.jit(call.func).lower(*call.args)


def lowered_text(_: int) -> Report:
    """How much program there is, by length of the sequence."""
    columns = ["", f"{BATCH} x {LENGTH}", f"{BATCH} x {LONG}"]
    report = Report("Program of apply handed to XLA, kB", columns)
    for mode in ("eval", "train"):
        call = calls_of(OURS, make_work(1))[mode]
        params, rng, _ = call.args
        arguments = [(params, rng, programs.of(BATCH, n, dtype=jnp.int32)) for n in (LENGTH, LONG)]
        short, long = (len(jax.jit(call.func).lower(*each).as_text()) / 1e3 for each in arguments)
        report.rows.append([f"ours, {mode}", f"{short:.1f}", f"{long:.1f}"])
    constant = len(_lowered(calls_of(CONSTANT, make_work())["eval"]).as_text()) / 1e3
    report.rows.append([f"{CONSTANT}, eval", f"{constant:.1f}", ""])
    return report


CASES: dict[str, Callable[[int], Report]] = {
    "eval": mode_case("eval", "Eval"),
    "train": mode_case("train", "Training, forward"),
    "grad": mode_case("grad", "Training, forward and backward"),
    "token_positions": program_case("positions per token", "precomputed table"),
    "padding": padding,
    "decoding": decoding,
    "temporaries": temporaries,
    "text": lowered_text,
    "rotary": program_case("rotary, float32", "precomputed tables of cos and sin"),
}

if __name__ == "__main__":
    run(__doc__, CASES, PACKAGES, 40)
