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
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peers
import programs
from harness import Report, interleave, ratio, run, seconds_in_fresh_processes, timing_report
from peers import (
    BATCH,
    COMPILED,
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

HERE = Path(__file__).resolve().parent
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
# The bound that each release of jax is held to.
BACKWARD = 3.0 if tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12) else 2.2
# Each bounds the ratio of the first line to the second.
HELD = {
    "train": [(OURS, GATHER, {"most": 2.0}), (CONSTANT, OURS, {"least": 5}), (COMPILED, OURS, {"least": 2.5})],
    "grad": [(CONSTANT, OURS, {"least": BACKWARD})],
}  # fmt: skip


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
        for line, by, bound in HELD.get(mode, ()):
            report.hold(f"{mode}, {line} / {by}", ratio(samples, line, by), **bound)
        return report

    return case


def paired(
    title: str,
    calls: Mapping[str, Callable],
    rounds: int,
    line: str,
    by: str,
    most: float,
    repeats=1,
) -> Report:
    """Times of calls, and a bound on the ratio of two."""
    samples = interleave(calls, rounds, title, repeats)
    report = timing_report(title, samples, (by,))
    report.hold(f"{title}: {line} / {by}", ratio(samples, line, by), most=most)
    return report


def beside_gather(rounds: int) -> Report:
    """In five times as many rounds, since they differ by less than one run from the next."""
    calls = {name: calls_of(name, make_work())["eval"] for name in (OURS, GATHER)}
    return paired("Eval beside the bare gather", calls, 5 * rounds, OURS, GATHER, 1.05)


def equal_ids(rounds: int) -> Report:
    """Every token the same: all of the gradient goes to one row."""
    work, calls = make_work(), {}
    for ids, each in (("uniform ids", work), ("equal ids", work._replace(ids=0 * work.ids + 7))):
        for name in (OURS, GATHER, CONSTANT):
            calls[f"{name}, {ids}"] = calls_of(name, each)["grad"]
    lines = f"{OURS}, equal ids", f"{OURS}, uniform ids"
    return paired("Forward and backward, all ids equal", calls, rounds, *lines, 1.5)


def padding(rounds: int) -> Report:
    """Positions that skip padding, which each row then has for itself, beside positions that all rows
    share."""
    work, calls = make_work(), {}
    for name, pad_id in (("without pad_id", None), ("with pad_id", VOCAB_SIZE)):
        apply = te.Embedder(dataclasses.replace(CONFIG, pad_id=pad_id)).apply
        arguments = peers.our_params(work.table), None, jnp.asarray(work.ids)
        calls[name] = functools.partial(apply, *arguments, is_training=False)
    np.testing.assert_allclose(*(call() for call in calls.values()), rtol=0, atol=1e-6)
    title = "Positions that skip padding"
    return paired(title, calls, rounds, "with pad_id", "without pad_id", 2.0)


def calls_of_program(name: str, by: str) -> dict[str, Callable]:
    """The compiled lines of a program, ours and the one that it is held to checked."""
    lines = programs.PROGRAMS[name]().items()
    calls = {
        line: functools.partial(jax.jit(function), *programs.drawn(arguments))
        for line, (function, arguments) in lines
    }
    np.testing.assert_allclose(calls[OURS](), calls[by](), rtol=0, atol=TOLERANCE)
    return calls


def program_case(name: str, by: str, most: float) -> Callable[[int], Report]:
    return lambda rounds: paired(name, calls_of_program(name, by), rounds, OURS, by, most)


def decoding(rounds: int) -> Report:
    """One token at a position that is data: `apply` outside of jit too, for what the call costs."""
    haiku = "Haiku and a precomputed table"
    calls = calls_of_program("decoding one token", haiku)
    arguments = programs.drawn(programs.decoding()[OURS][1])
    params, ids, offset = arguments
    calls["ours, apply"] = functools.partial(programs.evaluate, *arguments)
    calls[OURS] = functools.partial(embedder._apply, CONFIG, params, ids, False, None, offset, None)
    title = f"One token at a traced offset, {CALLS} calls a sample"
    report = paired(title, calls, rounds, OURS, haiku, 1.3, CALLS)
    apply, inner = (np.array(report.samples[f"{name}, ms"]) for name in ("ours, apply", OURS))
    report.hold("call overhead of apply, us", 1e3 * float(np.median(apply - inner)), most=15)
    return report


# Two rows of ids: the program is that of a batch, and the run takes a millisecond or so: all else
# is tracing and compiling.
FIRST_CALL = """
import sys, time
sys.path.insert(0, {here!r})
import jax, peers
call = jax.block_until_ready(peers.calls_of({line!r}, peers.make_work(2))[{mode!r}])
start = time.perf_counter()
jax.block_until_ready(call())
print(time.perf_counter() - start)
"""
IMPORT = (
    "import time; start = time.perf_counter(); import {package}; print(time.perf_counter() - start)"
)


def cold_start(rounds: int) -> Report:
    """Fresh processes: the import, and the first call, for parameters that are there."""
    packages = {OURS: "transformer_embed", CONSTANT: "haiku"}
    cases = {"import": {line: IMPORT.format(package=packages[line]) for line in packages}}
    for mode in ("eval", "train"):
        programs = {
            line: FIRST_CALL.format(here=str(HERE), line=line, mode=mode) for line in packages
        }
        cases[f"first call, {mode}"] = programs
    report = Report("Cold start, fresh processes", ["", *(f"{line}, ms" for line in packages)])
    for name, programs in cases.items():
        samples = seconds_in_fresh_processes(programs, min(rounds, 7), name)
        report.rows.append([name, *(f"{np.median(times):.4g}" for times in samples.values())])
        most = 1.15 if name == "import" else 1.2
        report.hold(f"{name}, ours / Haiku", ratio(samples, *packages), most=most)
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
        report.hold(f"program handed to XLA, {mode}, kB", long, most=200)
        report.hold(f"its change with length, {mode}", abs(long / short - 1), most=0.05)
    constant = len(_lowered(calls_of(CONSTANT, make_work())["eval"]).as_text()) / 1e3
    report.rows.append([f"{CONSTANT}, eval", f"{constant:.1f}", ""])
    return report


CASES: dict[str, Callable[[int], Report]] = {
    "eval": mode_case("eval", "Eval"),
    "train": mode_case("train", "Training, forward"),
    "grad": mode_case("grad", "Training, forward and backward"),
    "beside_gather": beside_gather,
    "equal_ids": equal_ids,
    "token_positions": program_case("positions per token", "precomputed table", 1.3),
    "apply_positions": program_case("eval, positions per token", "two precomputed tables", 1.3),
    "padding": padding,
    "decoding": decoding,
    "cold_start": cold_start,
    "temporaries": temporaries,
    "text": lowered_text,
    "rotary": program_case("rotary, float32", "precomputed tables of cos and sin", 1.1),
}

if __name__ == "__main__":
    run(__doc__, CASES, PACKAGES, 40)
