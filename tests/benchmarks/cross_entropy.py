"""The linear cross-entropy beside whole logits: peak temporaries, time, and how far apart the values
and gradients are.

python tests/benchmarks/cross_entropy.py

With tokamax installed, its `linear_softmax_cross_entropy_loss` stands beside them (on a CPU its own
XLA implementation, which holds whole logits).
"""

import argparse
import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Report, environment, interleave, markdown_table, ratio, timing_report
from tqdm import tqdm

import transformer_embed as te

VOCAB_SIZE, TOKENS, D_MODEL = 32_000, 4096, 256
PACKAGES = ("transformer-embed", "jax", "jaxlib", "optax", "numpy", "tokamax")
OURS, PLAIN, OPTAX = "linear_cross_entropy", "linear_logits, logsumexp", "linear_logits, optax"
SETTINGS = {"softcap": 30.0, "scale": 0.5, "z_loss": 1e-4, "shift": True}
TOKAMAX = "tokamax.linear_softmax_cross_entropy_loss"
SMOOTHED, CHUNK = "linear_cross_entropy, label_smoothing=0.1", "linear_cross_entropy, chunk_size={}"
Loss = Callable[[jax.Array, jax.Array], jax.Array]


def losses(labels: jax.Array) -> dict[str, Loss]:
    """The mean cross-entropy as a function of x and the table."""

    def plain(x, table):
        logits = te.linear_logits(x, table)
        return jnp.mean(
            jax.nn.logsumexp(logits, -1)
            - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        )

    def usual(x, table):
        return optax.softmax_cross_entropy_with_integer_labels(
            te.linear_logits(x, table), labels
        ).mean()

    ours = functools.partial(te.linear_cross_entropy, labels=labels)
    sizes = {CHUNK.format(size): functools.partial(ours, chunk_size=size) for size in (128, 512)}
    functions = {
        OURS: ours,
        PLAIN: plain,
        OPTAX: usual,
        SMOOTHED: functools.partial(ours, label_smoothing=0.1),
        **sizes,
    }
    for name, value in SETTINGS.items():
        functions[f"{OURS}, {name}={value}"] = functools.partial(ours, **{name: value})
    bias = jnp.linspace(-1, 1, VOCAB_SIZE)
    functions[f"{OURS}, all of these and a bias"] = functools.partial(ours, bias=bias, **SETTINGS)
    if importlib.util.find_spec("tokamax"):
        # It reads its own flags from the command line, and knows no --rounds.
        importlib.import_module("absl.flags").FLAGS(sys.argv[:1])
        functions[TOKAMAX] = functools.partial(_by_tokamax, labels)
    return functions


def _by_tokamax(labels: jax.Array, x: jax.Array, table: jax.Array) -> jax.Array:
    function = importlib.import_module("tokamax").linear_softmax_cross_entropy_loss
    flat = x.reshape(-1, x.shape[-1])
    return function(flat, labels.ravel(), table.T, reduction="mean", implementation="xla")


def compare(
    title: str,
    functions: Mapping[str, Callable],
    arguments: tuple[jax.Array, jax.Array],
    rounds: int,
) -> Report:
    """Temporaries of the compiled functions, and their times."""
    compiled = {
        name: jax.jit(function).lower(*arguments).compile() for name, function in functions.items()
    }
    sizes = {
        name: program.memory_analysis().temp_size_in_bytes for name, program in compiled.items()
    }
    calls = {name: functools.partial(program, *arguments) for name, program in compiled.items()}
    for call in calls.values():
        jax.block_until_ready(call())
    samples = interleave(calls, rounds, title)
    report = timing_report(title, samples, (PLAIN, OPTAX), {})
    report.columns = [*report.columns, "peak temporaries, MB", f"/ {PLAIN}"]
    for row in report.rows:
        row += [f"{sizes[row[0]] / 1e6:.1f}", f"{sizes[row[0]] / sizes[PLAIN]:.3f}"]
    for other in (PLAIN, OPTAX):
        report.figures[f"{title}: time / {other}"] = ratio(samples, OURS, other)
        report.figures[f"{title}: temporaries / {other}"] = sizes[OURS] / sizes[other]
    return report


def difference(functions: Mapping[str, Loss], arguments: tuple[jax.Array, jax.Array]) -> float:
    """The largest of: the relative error of the value, those of both gradients, each by the
    gradient's largest element."""
    ours, plain = (
        jax.tree.leaves(jax.jit(jax.value_and_grad(functions[name], (0, 1)))(*arguments))
        for name in (OURS, PLAIN)
    )
    return max(
        float(jnp.max(jnp.abs(one - other)) / jnp.max(jnp.abs(other)))
        for one, other in zip(ours, plain, strict=True)
    )


def main():
    """Prints a Markdown table for the step with gradients and for the value alone, and one of the
    targets."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds a table (default: 15)")
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error("wanted 1 round or more")
    machine = environment(PACKAGES)
    where = f"{machine['cpus']} CPUs, {machine['platform']}, jax on {machine['backend']}"
    print(f"{where}, {rounds} rounds")
    print(
        ", ".join(f"{name} {version}" for name, version in machine["versions"].items()), flush=True
    )
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(8, TOKENS // 8, D_MODEL)), jnp.float32)
    table = jnp.asarray(random.normal(size=(VOCAB_SIZE, D_MODEL)) / math.sqrt(D_MODEL), jnp.float32)
    functions = losses(jnp.asarray(random.integers(0, VOCAB_SIZE, (8, TOKENS // 8)), jnp.int32))
    steps = {name: jax.value_and_grad(loss, (0, 1)) for name, loss in functions.items()}
    values = {name: functions[name] for name in (OURS, PLAIN, OPTAX)}
    print(f"\nV = {VOCAB_SIZE}, {TOKENS} tokens, d = {D_MODEL}, float32")
    figures = {"apart": difference(functions, (x, table))}
    for title, lines in (("Value and gradients", steps), ("Value alone", values)):
        report = compare(title, lines, (x, table), rounds)
        tqdm.write(report.markdown(), file=sys.stdout)
        figures |= report.figures
    targets = [
        (
            "temporaries, value and gradients, ours / plain",
            f"Value and gradients: temporaries / {PLAIN}",
            1 / 8,
        ),
        ("time, value and gradients, ours / plain", f"Value and gradients: time / {PLAIN}", 1.0),
        ("temporaries, value alone, ours / plain", f"Value alone: temporaries / {PLAIN}", 1 / 8),
        ("value and gradients, largest relative difference", "apart", 1e-5),
    ]
    rows = [
        [
            what,
            f"<= {most:g}",
            f"{figures[figure]:.3g}",
            "met" if figures[figure] <= most else "MISSED",
        ]
        for what, figure, most in targets
    ]
    print(f"\n## Summary\n\n{markdown_table(['target', 'bound', 'measured', ''], rows)}")


if __name__ == "__main__":
    main()
