"""Times the input layer beside the same layer in other libraries: one process, interleaved, every
ratio paired within a round.

Usage: python tests/benchmarks/input_layer.py [--rounds N] [--json OUT.json] [--only CASE ...]

Batch 32, length 512, d_model 512, vocabulary 32000, float32 and dropout 0.1, unless a case says
otherwise. A library that is not installed is named and left out, and so is one whose embeddings are
not ours: only equal work is timed.
"""

import dataclasses
import functools

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


def check(line, ours):
    """That a line does the work of ours."""
    found = {mode: (_host(line[mode]()), _host(ours[mode]())) for mode in MODES}
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=TOLERANCE)
    near(*found["eval"])
    dropped, embeddings = found["train"][0], found["eval"][0]
    near(dropped, np.where(dropped == 0, 0, embeddings / (1 - RATE)), atol=2 * TOLERANCE)
    near(np.mean(dropped == 0), RATE, atol=STATISTICAL_TOLERANCE)
    near(*map(np.linalg.norm, found["grad"]), rtol=STATISTICAL_TOLERANCE)


def _host(result):
    leaf = jax.tree.leaves(result)[0]
    return np.asarray(leaf.detach() if hasattr(leaf, "detach") else leaf)


@functools.cache
def main_lines():
    """The lines' calls, each checked; and those left out, with the reason."""
    ready, skipped = {}, []
    for name in tqdm(LINES, desc="compile and compare", leave=False):
        try:
            calls = calls_of(name, make_work())
            if name not in (OURS, GATHER):
                check(calls, ready[OURS])
            ready[name] = calls
        except Exception as error:
            skipped.append(f"not timed: {name} ({error!r:.200})")
    return ready, skipped


def mode_case(mode, title):
    """All lines in one mode."""

    def case(rounds):
        lines, skipped = main_lines()
        samples = interleave({name: calls[mode] for name, calls in lines.items()}, rounds, mode)
        report = timing_report(title, samples, (OURS, GATHER))
        report.notes += skipped
        return report

    return case


def paired(title, calls, rounds, by, repeats=1):
    """Times of calls, and their ratios to one of them."""
    return timing_report(title, interleave(calls, rounds, title, repeats), (by,))


def padding(rounds):
    """Positions that skip padding, which each row then has for itself, beside positions that all rows
    share."""
    work, calls = make_work(), {}
    for name, pad_id in {"without pad_id": None, "with pad_id": VOCAB_SIZE}.items():
        apply = te.Embedder(dataclasses.replace(CONFIG, pad_id=pad_id)).apply
        arguments = peers.our_params(work.table), None, jnp.asarray(work.ids)
        calls[name] = functools.partial(apply, *arguments, is_training=False)
    return paired("Positions that skip padding", calls, rounds, "without pad_id")


def calls_of_program(name, by):
    """The compiled lines of a program, ours and another one checked."""
    lines = programs.PROGRAMS[name]().items()
    calls = {
        line: functools.partial(jax.jit(function), *programs.drawn(arguments))
        for line, (function, arguments) in lines
    }
    np.testing.assert_allclose(calls[OURS](), calls[by](), rtol=0, atol=TOLERANCE)
    return calls


def program_case(name, by):
    return lambda rounds: paired(name, calls_of_program(name, by), rounds, by)


def decoding(rounds):
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


def temporaries(_):
    """What the compiled programs allocate beside their inputs and results."""
    report = Report("Peak temporaries, MB", ["line", *MODES])
    for name in (OURS, CONSTANT):
        calls = calls_of(name, make_work()).values()
        lowered = [jax.jit(call.func).lower(*call.args) for call in calls]
        sizes = [each.compile().memory_analysis().temp_size_in_bytes / 1e6 for each in lowered]
        report.rows.append([name, *(f"{size:.2f}" for size in sizes)])
    return report


def lowered_text(_):
    report = Report("Program of apply handed to XLA", ["line", "mode", "length", "kB"])
    for name, mode, length in (
        (OURS, "eval", LONG),
        (OURS, "train", LONG),
        (CONSTANT, "eval", LENGTH),
    ):
        call = calls_of(name, make_work(1))[mode]
        params, rng, _ = call.args
        ids = programs.of(BATCH, length, dtype=jnp.int32)
        text = jax.jit(call.func).lower(params, rng, ids).as_text()
        report.rows.append([name, mode, f"{length}", f"{len(text) / 1e3:.1f}"])
    return report


CASES = {
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
