"""Times the input layer beside the same layer in other libraries: one process, interleaved, every
ratio paired within a round.

Usage: python tests/benchmarks/input_layer.py [--rounds N] [--quick] [--json OUT.json] [--only CASE
    ...]

Batch 32, length 512, d_model 512, vocabulary 32000, float32 and dropout 0.1, unless a case says
otherwise. A library that is not installed is named and left out, and so is one whose embeddings are
not ours: only equal work is timed.
"""

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import transformer_embed as te
from transformer_embed._src.layers import embedder

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import peers
from attention_inputs import ROTARY_FIGURE, mask_bytes, rotary
from harness import (
    Report,
    environment,
    interleave,
    markdown_table,
    not_timed,
    ratio,
    seconds_in_fresh_processes,
    timing_report,
    write_whole,
)
from peers import (
    BATCH,
    BUILDERS,
    COMPILED,
    CONSTANT,
    D_MODEL,
    GATHER,
    IN_TRACE,
    LENGTH,
    OURS,
    RATE,
    VOCAB_SIZE,
)

PACKAGES = ("jax", "jaxlib", "dm-haiku", "numpy", "flax", "keras", "equinox", "torch")
LONG = 131_072
MAX_LEN = 2048
MODES = ("eval", "train", "grad")
# The lines differ in how they round the product and the sum; a wrong scale, layout or position
# differs by 0.1 and more.
FLOAT32_TOLERANCE = 1e-4
# Below 8 in magnitude, four roundings (row, factor's product, sinusoid, sum) of half a last place,
# 2**-6, each.
BFLOAT16_TOLERANCE = 4 * 2.0**-6
# Of some 10**7 draws the share of zeros has a standard deviation of 1e-4; the norm of a gradient
# varies no more.
STATISTICAL_TOLERANCE = 1e-2
FIGURES = ((OURS, GATHER), (CONSTANT, OURS), (COMPILED, OURS))


class Options(NamedTuple):
    rounds: int
    processes: int
    calls: int


def alike(
    name: str,
    line: Mapping[str, Any],
    ours: Mapping[str, Any],
    modes: Iterable[str],
    tolerance: float,
) -> str | None:
    """Why a line does other work than ours; None where it does the same."""
    if name == GATHER:
        return None
    mine, theirs = (_host(calls["eval"]()) for calls in (ours, line))
    difference = float(np.max(np.abs(theirs - mine)))
    if not difference <= tolerance:
        return f"its embeddings differ from ours by {difference:.1g}"
    if "train" in modes:
        dropped = _host(line["train"]())
        kept = np.where(dropped == 0, 0, theirs / (1 - RATE))
        if (
            abs(np.mean(dropped == 0) - RATE) > STATISTICAL_TOLERANCE
            or not np.max(np.abs(dropped - kept)) <= 2 * tolerance
        ):
            return f"in training it is no dropout at rate {RATE}"
    if "grad" in modes:
        mine, theirs = (np.linalg.norm(_host(calls["grad"]())) for calls in (ours, line))
        if not abs(theirs / mine - 1) <= STATISTICAL_TOLERANCE:
            return f"its gradient's norm is {theirs / mine:.3f} of ours"
    return None


def _host(result: Any) -> np.ndarray:
    leaf = jax.tree.leaves(jax.block_until_ready(result))[0]
    return np.asarray(
        leaf.detach().float().numpy() if hasattr(leaf, "detach") else leaf, np.float32
    )


def ready_lines(
    work: peers.Work, modes: Iterable[str], names: Iterable[str] = tuple(BUILDERS)
) -> tuple[dict[str, Any], dict[str, str]]:
    """The lines' calls, each called once and checked; and the lines left out, with the reason."""
    tolerance = FLOAT32_TOLERANCE if work.dtype == "float32" else BFLOAT16_TOLERANCE
    ready, skipped = {}, {}
    for name in tqdm(names, desc="compile and compare", leave=False):
        try:
            calls = BUILDERS[name](work)
            reason = alike(name, calls, ready.get(OURS, calls), modes, tolerance)
            if not reason:
                jax.block_until_ready([calls[mode]() for mode in modes])
        except ImportError as error:
            reason = (
                f"not installed: {error}" if isinstance(error, ModuleNotFoundError) else str(error)
            )
        except Exception as error:
            if name in (OURS, GATHER):
                raise
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        if reason:
            skipped[name] = reason
        else:
            ready[name] = calls
    return ready, skipped


@functools.cache
def main_lines() -> tuple[dict[str, Any], dict[str, str]]:
    return ready_lines(peers.make_work(), MODES)


def mode_case(mode: str, title: str) -> Callable[[Options], Report]:
    """All lines in one mode."""

    def case(options: Options) -> Report:
        lines, skipped = main_lines()
        samples = interleave(
            {name: calls[mode] for name, calls in lines.items()}, options.rounds, mode
        )
        report = timing_report(title, samples, (OURS, GATHER), skipped)
        report.figures = {
            f"{mode}: {a} / {b}": ratio(samples, a, b) for a, b in FIGURES if a in samples
        }
        return report

    return case


def beside_gather(options: Options) -> Report:
    """Evaluation and the bare gather alone, in five times as many rounds, since they differ by less
    than one run from the next."""
    lines, skipped = ready_lines(peers.make_work(), ("eval",), (OURS, GATHER))
    samples = interleave(
        {name: calls["eval"] for name, calls in lines.items()},
        5 * options.rounds,
        "beside the gather",
    )
    report = timing_report("Eval beside the bare gather", samples, (GATHER,), skipped)
    report.figures["beside the gather: eval"] = ratio(samples, OURS, GATHER)
    return report


def equal_ids(options: Options) -> Report:
    """Every token the same: all of the gradient goes to one row."""
    works = {"uniform ids": peers.make_work(), "all ids equal": peers.make_work()}
    works["all ids equal"].ids[:] = 7
    calls = {
        f"{name}, {ids}": BUILDERS[name](work)["grad"]
        for name in (OURS, GATHER, CONSTANT)
        for ids, work in works.items()
    }
    for call in calls.values():
        jax.block_until_ready(call())
    samples = interleave(calls, options.rounds, "equal ids")
    uniform = f"{OURS}, uniform ids"
    report = timing_report("Forward and backward, all ids equal", samples, (uniform,), {})
    report.figures["equal ids: ours / uniform"] = ratio(samples, f"{OURS}, all ids equal", uniform)
    return report


def token_positions(options: Options) -> Report:
    """Positions [batch, length], a number of its own for each token."""
    work = peers.make_work()
    config, params = _ours(work)
    apply = te.Embedder(config).apply
    positions = jnp.asarray(
        np.random.default_rng(1).integers(0, LENGTH, (BATCH, LENGTH)), jnp.int32
    )
    ids, table, ready = jnp.asarray(work.ids), work.device_table, jnp.asarray(work.sinusoid())
    encode = jax.jit(lambda positions: te.sinusoidal_encoding(positions, D_MODEL))
    rows = jax.jit(lambda ready, positions: ready[positions])
    layer = jax.jit(
        lambda table, ready, ids, positions: table[ids] * np.float32(work.factor) + ready[positions]
    )
    calls = {
        "ours, encoding": lambda: encode(positions),
        "gather from a precomputed table": lambda: rows(ready, positions),
        "ours, apply": lambda: apply(params, None, ids, is_training=False, positions=positions),
        "two gathers, scale and sum": lambda: layer(table, ready, ids, positions),
    }
    results = {name: np.asarray(call()) for name, call in calls.items()}
    pairs = (
        ("ours, encoding", "gather from a precomputed table"),
        ("ours, apply", "two gathers, scale and sum"),
    )
    for ours, theirs in pairs:
        np.testing.assert_allclose(results[ours], results[theirs], rtol=0, atol=FLOAT32_TOLERANCE)
    samples = interleave(calls, options.rounds, "token positions")
    report = timing_report(
        f"Positions of each token's own, eval, a precomputed table of [{LENGTH}, {D_MODEL}]",
        samples,
        [b for _, b in pairs],
        {},
    )
    report.figures = {f"token positions: {a} / {b}": ratio(samples, a, b) for a, b in pairs}
    return report


def padding(options: Options) -> Report:
    """Positions that skip padding, which each row then has for itself, beside positions that all rows
    share."""
    work = peers.make_work()
    config, params = _ours(work)
    ids, calls = jnp.asarray(work.ids), {}
    for name, pad_id in (("without pad_id", None), ("with pad_id", VOCAB_SIZE)):
        apply = te.Embedder(dataclasses.replace(config, pad_id=pad_id)).apply
        calls[name] = functools.partial(apply, params, None, ids, is_training=False)
    np.testing.assert_allclose(*(call() for call in calls.values()), rtol=0, atol=1e-6)
    samples = interleave(calls, options.rounds, "padding")
    report = timing_report("Positions that skip padding", samples, ["without pad_id"], {})
    report.figures["padding: with / without"] = ratio(samples, "with pad_id", "without pad_id")
    return report


def _ours(work: peers.Work) -> tuple[te.EmbedderConfig, Any]:
    config = te.EmbedderConfig(
        VOCAB_SIZE, work.d_model, dropout_rate=RATE, param_dtype=work.dtype, dtype=work.dtype
    )
    return config, peers.our_params(config, work.device_table)


def decoding(options: Options) -> Report:
    """One token at a position that is data."""
    work = peers.make_work(1, 1)
    config, params = _ours(work)
    apply = te.Embedder(config).apply
    ids, offset = jnp.array([[5]], jnp.int32), jnp.array([[77]], jnp.int32)
    ready = jnp.asarray(peers.usual_sinusoid(MAX_LEN, D_MODEL))
    theirs = {"embed": {"embeddings": work.device_table}}

    def embed(params, ready, ids, offset):
        forward = hk.transform(
            lambda: (
                hk.Embed(VOCAB_SIZE, D_MODEL, name="embed")(ids) * np.float32(work.factor)
                + ready[offset]
            )
        )
        return forward.apply(params, None)

    embed = jax.jit(embed)
    calls = {
        "ours, apply": lambda: apply(params, None, ids, is_training=False, positions=offset),
        # The compiled function behind the door, for what the door costs.
        "ours, compiled function": lambda: embedder._apply(
            config, False, params, None, ids, offset, None
        ),
        "hk.Embed and a row of a precomputed table": lambda: embed(theirs, ready, ids, offset),
    }
    results = [np.asarray(call()) for call in calls.values()]
    np.testing.assert_allclose(results[0], results[2], rtol=0, atol=FLOAT32_TOLERANCE)
    samples = interleave(calls, options.rounds, "decoding", options.calls)
    door, inner, haiku = samples
    report = timing_report(
        f"One token at a traced offset, eval, {options.calls} calls a sample",
        samples,
        (haiku,),
        {},
        "us",
    )
    report.figures["decoding: ours / Haiku"] = ratio(samples, inner, haiku)
    report.figures["decoding: door, us"] = 1e3 * float(np.median(samples[door] - samples[inner]))
    report.notes.append(
        f"call overhead of apply: {report.figures['decoding: door, us']:.1f} us a call"
    )
    return report


def bfloat16(options: Options) -> Report:
    """Tables and results in bfloat16."""
    lines, skipped = ready_lines(peers.make_work(dtype="bfloat16"), MODES)
    rounds = max(1, options.rounds // 4)
    samples = {
        mode: interleave(
            {name: calls[mode] for name, calls in lines.items()}, rounds, f"bfloat16 {mode}"
        )
        for mode in MODES
    }
    columns = [column for mode in MODES for column in (f"{mode}, ms", f"/ {OURS}", f"/ {GATHER}")]
    report = Report("bfloat16 tables and results", ["line", *columns], notes=not_timed(skipped))
    for name in lines:
        cells = [
            cell
            for times in samples.values()
            for cell in (
                f"{np.median(times[name]):.4g}",
                f"{ratio(times, name, OURS):.2f}",
                f"{ratio(times, name, GATHER):.2f}",
            )
        ]
        report.rows.append([name, *cells])
        report.samples |= {
            f"{name}, {mode}, ms": times[name].tolist() for mode, times in samples.items()
        }
    return report


def long_sequence(options: Options) -> Report:
    """One sequence of 131072 tokens."""
    names = (OURS, GATHER, CONSTANT, IN_TRACE, "PyTorch eager", COMPILED)
    lines, skipped = ready_lines(peers.make_work(1, LONG), ("eval",), names)
    samples = interleave(
        {name: calls["eval"] for name, calls in lines.items()}, max(1, options.rounds // 4), "long"
    )
    return timing_report(f"1 x {LONG}, eval", samples, (OURS, GATHER), skipped)


# Two rows of ids: the program is that of a batch, and the run takes a millisecond or so: all else
# is tracing and compiling.
FIRST_CALL = """
import sys, time
sys.path.insert(0, {here!r})
import jax, peers
call = jax.block_until_ready(peers.BUILDERS[{line!r}](peers.make_work(2))[{mode!r}])
start = time.perf_counter()
jax.block_until_ready(call())
print(time.perf_counter() - start)
"""
IMPORT = (
    "import time; start = time.perf_counter(); import {package}; print(time.perf_counter() - start)"
)


def cold_start(options: Options) -> Report:
    """Fresh processes: the import, and the first call, for parameters that are there."""
    programs = {
        name: IMPORT.format(package=package)
        for name, package in (("ours", "transformer_embed"), ("Haiku", "haiku"))
    }
    imports = seconds_in_fresh_processes(programs, options.processes, "imports")
    report = Report(
        f"Cold start, {options.processes} fresh processes each",
        ["", "ours, ms", "Haiku, table a constant, ms", "ratio"],
    )
    found = {"import": ("ours", "Haiku", imports)}
    for mode in ("eval", "train"):
        programs = {
            line: FIRST_CALL.format(here=str(HERE), line=line, mode=mode)
            for line in (OURS, CONSTANT)
        }
        found[f"first call, {mode}"] = (
            OURS,
            CONSTANT,
            seconds_in_fresh_processes(programs, options.processes, f"first call, {mode}"),
        )
    for name, (ours, theirs, samples) in found.items():
        value = report.figures[f"{name}: ours / Haiku"] = ratio(samples, ours, theirs)
        report.rows.append(
            [
                name,
                f"{np.median(samples[ours]):.4g}",
                f"{np.median(samples[theirs]):.4g}",
                f"{value:.2f}",
            ]
        )
        report.samples |= {f"{name}, {line}, ms": times.tolist() for line, times in samples.items()}
    return report


def temporaries(options: Options) -> Report:
    """What the compiled programs allocate beside their inputs and results."""
    del options
    report = Report("Peak temporaries, MB", ["line", *MODES])
    for name in (OURS, GATHER, CONSTANT, IN_TRACE):
        calls = BUILDERS[name](peers.make_work())
        sizes = [
            _lowered(calls[mode]).compile().memory_analysis().temp_size_in_bytes / 1e6
            for mode in MODES
        ]
        report.rows.append([name, *(f"{size:.2f}" for size in sizes)])
        report.figures |= {
            f"temporaries: {name}, {mode}, MB": size
            for mode, size in zip(MODES, sizes, strict=True)
        }
    return report


def _lowered(call: functools.partial) -> Any:
    return jax.jit(functools.partial(call.func, **call.keywords)).lower(*call.args)


def lowered_text(options: Options) -> Report:
    """How much program there is, by length of the sequence."""
    del options
    report = Report(
        "Program of apply handed to XLA, kB",
        ["", f"{BATCH} x {LENGTH}", f"{BATCH} x {LONG}", "ratio"],
    )
    config, params = _ours(peers.make_work(1, 1))
    for mode in ("eval", "train"):
        apply = functools.partial(te.Embedder(config).apply, is_training=mode == "train")
        lengths = (jax.ShapeDtypeStruct((BATCH, length), jnp.int32) for length in (LENGTH, LONG))
        short, long = (
            len(jax.jit(apply).lower(params, jax.random.key(1), ids).as_text()) / 1e3
            for ids in lengths
        )
        report.rows.append([f"ours, {mode}", f"{short:.1f}", f"{long:.1f}", f"{long / short:.3f}"])
        report.figures |= {
            f"text: {mode}, kB": long,
            f"text: {mode}, |ratio - 1|": abs(long / short - 1),
        }
    constant = len(_lowered(BUILDERS[CONSTANT](peers.make_work())["eval"]).as_text()) / 1e3
    report.rows.append([f"{CONSTANT}, eval", f"{constant:.1f}", "", ""])
    return report


CASES: dict[str, Callable[[Options], Report]] = {
    "eval": mode_case("eval", "Eval"),
    "train": mode_case("train", "Training, forward"),
    "grad": mode_case("grad", "Training, forward and backward"),
    "beside_gather": beside_gather,
    "equal_ids": equal_ids,
    "token_positions": token_positions,
    "padding": padding,
    "decoding": decoding,
    "bfloat16": bfloat16,
    "long": long_sequence,
    "cold_start": cold_start,
    "temporaries": temporaries,
    "text": lowered_text,
    "rotary": rotary,
    "mask_bytes": mask_bytes,
}


class Target(NamedTuple):
    what: str
    figure: str
    least: float = -math.inf
    most: float = math.inf

    def row(self, figures: Mapping[str, float]) -> list[str]:
        bound = f">= {self.least:g}" if self.least > -math.inf else f"<= {self.most:g}"
        value = figures.get(self.figure, math.nan)
        met = (
            "not measured"
            if math.isnan(value)
            else "met"
            if self.least <= value <= self.most
            else "MISSED"
        )
        return [self.what, bound, "" if math.isnan(value) else f"{value:.3g}", met]


def targets() -> list[Target]:
    # The bound that each release of jax is held to.
    backward = 3.0 if tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12) else 2.2
    return [
        Target("eval, ours / bare gather", "beside the gather: eval", most=1.05),
        Target("train, ours / bare gather", f"train: {OURS} / {GATHER}", most=2.0),
        Target("train, Haiku with a constant table / ours", f"train: {CONSTANT} / {OURS}", least=5),
        Target("train, PyTorch compiled / ours", f"train: {COMPILED} / {OURS}", least=2.5),
        Target(
            "forward and backward, Haiku with a constant table / ours",
            f"grad: {CONSTANT} / {OURS}",
            least=backward,
        ),
        Target(
            "forward and backward, all ids equal / uniform, ours",
            "equal ids: ours / uniform",
            most=1.5,
        ),
        Target(
            "positions of each token, encoding / gather",
            "token positions: ours, encoding / gather from a precomputed table",
            most=1.3,
        ),
        Target(
            "positions of each token, apply / two gathers",
            "token positions: ours, apply / two gathers, scale and sum",
            most=1.3,
        ),
        Target("one token, ours compiled / Haiku", "decoding: ours / Haiku", most=1.3),
        Target("one token, call overhead of apply, us", "decoding: door, us", most=15),
        Target("program handed to XLA, eval, kB", "text: eval, kB", most=200),
        Target("program handed to XLA, train, kB", "text: train, kB", most=200),
        Target("lowered text, eval, change with length", "text: eval, |ratio - 1|", most=0.05),
        Target("lowered text, train, change with length", "text: train, |ratio - 1|", most=0.05),
        Target("rotary, ours / precomputed tables", ROTARY_FIGURE, most=1.1),
        Target("import, ours / Haiku", "import: ours / Haiku", most=1.15),
        Target("first call, eval, ours / Haiku", "first call, eval: ours / Haiku", most=1.2),
        Target("first call, train, ours / Haiku", "first call, train: ours / Haiku", most=1.2),
    ]


def summary(figures: Mapping[str, float]) -> list[list[str]]:
    return [target.row(figures) for target in targets()]


def main():
    """Prints a Markdown table a case, and one of the targets."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="rounds a case (default: 40)")
    parser.add_argument(
        "--quick", action="store_true", help="5 rounds, 2 processes: to see that all runs"
    )
    parser.add_argument("--json", type=Path, help="write all samples, figures and tables here")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="CASE",
        help=f"some of: {', '.join(CASES)}",
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1 or (arguments.json and not arguments.json.parent.is_dir()):
        parser.error("wanted 1 round or more, and for --json a folder that exists")
    options = Options(5, 2, 50) if arguments.quick else Options(arguments.rounds, 7, 200)
    machine = environment(PACKAGES)
    print(
        f"{machine['cpus']} CPUs, {machine['platform']}, jax on {machine['backend']}, {options.rounds} rounds\n"
    )
    print(
        ", ".join(f"{name} {version}" for name, version in machine["versions"].items()), flush=True
    )
    reports = {}
    for name in tqdm(arguments.only, desc="cases"):
        reports[name] = CASES[name](options)
        tqdm.write(reports[name].markdown(), file=sys.stdout)
        sys.stdout.flush()
    figures = {key: value for report in reports.values() for key, value in report.figures.items()}
    columns = ["target", "bound", "measured", ""]
    print(f"\n## Summary\n\n{markdown_table(columns, summary(figures))}")
    if arguments.json:
        cases = {
            name: {**vars(report), "columns": list(report.columns)}
            for name, report in reports.items()
        }
        write_whole(
            arguments.json,
            {
                "machine": machine,
                "options": options._asdict(),
                "cases": cases,
                "summary": summary(figures),
            },
        )


if __name__ == "__main__":
    main()
