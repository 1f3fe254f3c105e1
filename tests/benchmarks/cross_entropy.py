"""The linear cross-entropy, and a loss of PPO over the log-probability of each token, beside whole
logits: peak temporaries, time, and how far apart the values and gradients are.

Usage: python tests/benchmarks/cross_entropy.py [--rounds N] [--json OUT.json] [--only CASE ...]
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Report, interleave, ratio, run, timing_report
from programs import below, drawn, of

import transformer_embed as te

VOCAB_SIZE, TOKENS, D_MODEL, BATCH = 32_000, 4096, 256, 8
PACKAGES = ("transformer-embed", "jax", "jaxlib", "optax", "numpy")
LENGTHS = (TOKENS, 16_384, 131_072)
# Logits are sums of 256 products in float32; the loss is some ten of them.
APART = 1e-5
Losses = dict[str, Callable[..., jax.Array]]


def chosen(values: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, labels[..., None], -1)[..., 0]


def losses(labels: jax.Array) -> Losses:
    """The mean cross-entropy as a function of x and the table, ours first."""

    def plain(x, table):
        logits = te.linear_logits(x, table)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen(logits, labels))

    def by_optax(x, table):
        logits = te.linear_logits(x, table)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    ours = functools.partial(te.linear_cross_entropy, labels=labels)
    return {"linear_cross_entropy": ours, "plain logits": plain, "optax": by_optax}


def policy_losses(labels: jax.Array) -> Losses:
    """The clipped loss of PPO (Schulman et al., 2017, section 3), whose old log-probabilities and
    advantages are drawn."""
    old, advantages = np.random.default_rng(1).normal(size=(2, *labels.shape)).astype(np.float32)

    def loss(log_probs, x, table):
        ratios = jnp.exp(log_probs(labels, x, table) + 10 + 0.1 * old)
        clipped = jnp.clip(ratios, 0.8, 1.2)
        return -jnp.minimum(ratios * advantages, clipped * advantages).mean()

    def whole(labels, x, table):
        return chosen(jax.nn.log_softmax(te.linear_logits(x, table)), labels)

    def blocks(labels, x, table):
        """As many tokens at a time as `linear_log_probs` takes."""
        step = jax.checkpoint(lambda block: whole(*block, table))
        cut = lambda array: array.reshape(-1, 256, *array.shape[2:])
        return jax.lax.map(step, (cut(labels), cut(x))).reshape(labels.shape)

    ours = lambda labels, x, table: te.linear_log_probs(x, table, labels)
    ways = {"linear_log_probs": ours, "whole logits": whole, "lax.map and checkpoint": blocks}
    return {name: functools.partial(loss, way) for name, way in ways.items()}


def compiled(make: Callable[..., Losses], tokens: int, with_gradients: bool) -> dict:
    labels = below(VOCAB_SIZE, BATCH, tokens // BATCH)
    shapes = of(*labels.shape, D_MODEL), of(VOCAB_SIZE, D_MODEL)
    wrap = functools.partial(jax.value_and_grad, argnums=(0, 1)) if with_gradients else lambda f: f
    functions = make(jnp.asarray(labels)).items()
    return {name: jax.jit(wrap(loss)).lower(*shapes).compile() for name, loss in functions}


def temporaries(program: jax.stages.Compiled) -> int:
    return program.memory_analysis().temp_size_in_bytes


def case(
    title: str, make: Callable, slower: float, with_gradients: bool = True
) -> Callable[[int], Report]:
    """Times and temporaries, and the largest difference from the second line."""

    def report_of(rounds: int) -> Report:
        programs = compiled(make, TOKENS, with_gradients)
        ours, plain, other = programs
        x, table = drawn((of(BATCH, TOKENS // BATCH, D_MODEL), of(VOCAB_SIZE, D_MODEL)))
        arguments = x, table / D_MODEL**0.5
        calls = {name: functools.partial(each, *arguments) for name, each in programs.items()}
        samples = interleave(calls, rounds, title)
        report = timing_report(title, samples, (plain, other))
        report.columns = [*report.columns, "peak temporaries, MB"]
        sizes = {name: temporaries(program) for name, program in programs.items()}
        for row in report.rows:
            row.append(f"{sizes[row[0]] / 1e6:.1f}")
        report.hold(f"temporaries, {title}, ours / {plain}", sizes[ours] / sizes[plain], most=1 / 8)
        by = other if make is policy_losses else plain
        if with_gradients:
            report.hold(f"time, {title}, ours / {by}", ratio(samples, ours, by), most=slower)
        pairs = zip(*(jax.tree.leaves(calls[name]()) for name in (ours, plain)), strict=True)
        errors = [float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs]
        report.hold(f"difference, {title}, ours from {plain}", max(errors), most=APART)
        return report

    return report_of


def memory_by_length(_: int) -> Report:
    """Temporaries of PPO's loss and its gradients, compiled for more and more tokens."""
    programs = {length: compiled(policy_losses, length, True) for length in LENGTHS}
    columns = ["tokens", *(f"{name}, MB" for name in programs[TOKENS])]
    report = Report("PPO, temporaries by the number of tokens", columns)
    for length, lines in programs.items():
        sizes = [f"{temporaries(program) / 1e6:.0f}" for program in lines.values()]
        report.rows.append([str(length), *sizes])
    return report


CASES = {
    "gradients": case("value and gradients", losses, 1.0),
    "value": case("value alone", losses, 1.0, with_gradients=False),
    "ppo": case("PPO, value and gradients", policy_losses, 1.1),
    "memory": memory_by_length,
}

if __name__ == "__main__":
    run(__doc__, CASES, PACKAGES, 15)
