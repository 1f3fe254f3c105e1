"""The linear cross-entropy, and a loss of PPO over the log-probability of each token, beside whole
logits: peak temporaries, time, and how far apart the values and gradients are.

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
LOG_PROBS, WHOLE, BLOCKS = "linear_log_probs", "whole logits", "lax.map and checkpoint"
LENGTHS = (4096, 16_384, 131_072)
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


def policy_losses(labels: jax.Array) -> dict[str, Loss]:
    """The clipped loss of PPO (Schulman et al., 2017, section 3), whose old log-probabilities and
    advantages are drawn."""
    old, advantages = np.random.default_rng(1).normal(size=(2, *labels.shape)).astype(np.float32)

    def loss(log_probs, x, table):
        ratios = jnp.exp(log_probs(labels, x, table) + 10 + 0.1 * old)
        clipped = jnp.clip(ratios, 0.8, 1.2)
        return -jnp.minimum(ratios * advantages, clipped * advantages).mean()

    def whole(labels, x, table):
        log_probs = jax.nn.log_softmax(te.linear_logits(x, table))
        return jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]

    def blocks(labels, x, table):
        """As many tokens at a time as `linear_log_probs` takes."""
        step = jax.checkpoint(lambda block: whole(*block, table))
        cut = lambda array: array.reshape(-1, 256, *array.shape[2:])
        return jax.lax.map(step, (cut(labels), cut(x))).reshape(labels.shape)

    ours = lambda labels, x, table: te.linear_log_probs(x, table, labels)
    ways = {LOG_PROBS: ours, WHOLE: whole, BLOCKS: blocks}
    return {name: functools.partial(loss, way) for name, way in ways.items()}


def memory_by_length() -> str:
    """Temporaries of PPO's loss and its gradients, compiled for more and more tokens."""
    rows = []
    for length in LENGTHS:
        shapes = [(8, length // 8, D_MODEL), (VOCAB_SIZE, D_MODEL)]
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        functions = policy_losses(jnp.zeros((8, length // 8), jnp.int32))
        sizes = [
            temporaries(jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile())
            for loss in functions.values()
        ]
        rows.append([str(length), *(f"{size / 1e6:.0f}" for size in sizes)])
    return markdown_table(["tokens", *(f"{name}, MB" for name in functions)], rows)


def temporaries(program: jax.stages.Compiled) -> int:
    return program.memory_analysis().temp_size_in_bytes


def compare(
    title: str,
    functions: Mapping[str, Callable],
    arguments: tuple[jax.Array, jax.Array],
    rounds: int,
    references: tuple[str, str] = (PLAIN, OPTAX),
) -> Report:
    """Temporaries of the compiled functions, the first of which is ours, and their times."""
    compiled = {
        name: jax.jit(function).lower(*arguments).compile() for name, function in functions.items()
    }
    sizes = {name: temporaries(program) for name, program in compiled.items()}
    calls = {name: functools.partial(program, *arguments) for name, program in compiled.items()}
    for call in calls.values():
        jax.block_until_ready(call())
    samples = interleave(calls, rounds, title)
    report = timing_report(title, samples, references, {})
    ours, (plain, _) = next(iter(functions)), references
    report.columns = [*report.columns, "peak temporaries, MB", f"/ {plain}"]
    for row in report.rows:
        row += [f"{sizes[row[0]] / 1e6:.1f}", f"{sizes[row[0]] / sizes[plain]:.3f}"]
    for other in references:
        report.figures[f"{title}: time / {other}"] = ratio(samples, ours, other)
        report.figures[f"{title}: temporaries / {other}"] = sizes[ours] / sizes[other]
    return report


def difference(steps: Mapping[str, Callable], arguments: tuple[jax.Array, jax.Array]) -> float:
    """Of the first step from the second, the largest of: the relative error of the value, those of
    both gradients, each by the gradient's largest element."""
    ours, plain, *_ = (jax.tree.leaves(jax.jit(step)(*arguments)) for step in steps.values())
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
    labels = jnp.asarray(random.integers(0, VOCAB_SIZE, (8, TOKENS // 8)), jnp.int32)
    functions, policy = losses(labels), policy_losses(labels)
    steps, policy_steps = (
        {name: jax.value_and_grad(loss, (0, 1)) for name, loss in each.items()}
        for each in (functions, policy)
    )
    values = {name: functions[name] for name in (OURS, PLAIN, OPTAX)}
    print(f"\nV = {VOCAB_SIZE}, {TOKENS} tokens, d = {D_MODEL}, float32")
    apart = max(difference(each, (x, table)) for each in (steps, policy_steps))
    figures = {"apart": apart}
    for title, lines, references in (
        ("Value and gradients", steps, (PLAIN, OPTAX)),
        ("Value alone", values, (PLAIN, OPTAX)),
        ("PPO, value and gradients", policy_steps, (WHOLE, BLOCKS)),
    ):
        report = compare(title, lines, (x, table), rounds, references)
        tqdm.write(report.markdown(), file=sys.stdout)
        figures |= report.figures
    print(f"\n## PPO, temporaries by the number of tokens\n\n{memory_by_length()}", flush=True)
    targets = [
        (
            "temporaries, value and gradients, ours / plain",
            f"Value and gradients: temporaries / {PLAIN}",
            1 / 8,
        ),
        ("time, value and gradients, ours / plain", f"Value and gradients: time / {PLAIN}", 1.0),
        ("temporaries, value alone, ours / plain", f"Value alone: temporaries / {PLAIN}", 1 / 8),
        (
            "temporaries, PPO, ours / whole",
            f"PPO, value and gradients: temporaries / {WHOLE}",
            1 / 8,
        ),
        ("time, PPO, ours / checkpoint", f"PPO, value and gradients: time / {BLOCKS}", 1.1),
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
