"""The losses of an output layer beside whole logits: time and peak temporaries.

Usage: python tests/benchmarks/cross_entropy.py [--rounds N] [--json OUT.json] [--only CASE ...]
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Report, interleave, run, timing_report
from programs import below, drawn, of

import transformer_embed as te

VOCAB_SIZE, TOKENS, D_MODEL, BATCH, K = 32_000, 4096, 256, 8, 64
PACKAGES = ("transformer-embed", "jax", "jaxlib", "optax", "numpy")
LENGTHS = TOKENS, 131_072
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


def ways(name: str, ours: Callable, whole: Callable, labels: jax.Array, loss: Callable) -> Losses:
    """A loss of values by ours, by whole logits, and by 256 tokens of them at a time; the first
    three are functions of labels, x and the table."""

    def blocks(labels, x, table):
        step = jax.checkpoint(lambda block: whole(*block, table))
        cut = lambda array: array.reshape(-1, 256, *array.shape[2:])
        join = lambda array: array.reshape(*labels.shape[:2], *array.shape[2:])
        return jax.tree.map(join, jax.lax.map(step, (cut(labels), cut(x))))

    made = {name: ours, "whole logits": whole, "lax.map and checkpoint": blocks}
    return {
        way: functools.partial(lambda values, x, table: loss(values(labels, x, table)), values)
        for way, values in made.items()
    }


def all_log_probs(x, table):
    return jax.nn.log_softmax(te.linear_logits(x, table))


def policy_losses(labels: jax.Array) -> Losses:
    """The clipped loss of PPO (Schulman et al., 2017, section 3), whose old log-probabilities and
    advantages are drawn."""
    old, advantages = np.random.default_rng(1).normal(size=(2, *labels.shape)).astype(np.float32)

    def loss(log_probs):
        ratios = jnp.exp(log_probs + 10 + 0.1 * old)
        clipped = jnp.clip(ratios, 0.8, 1.2)
        return -jnp.minimum(ratios * advantages, clipped * advantages).mean()

    ours = lambda labels, x, table: te.linear_log_probs(x, table, labels)
    whole = lambda labels, x, table: chosen(all_log_probs(x, table), labels)
    return ways("linear_log_probs", ours, whole, labels, loss)


def candidates(labels: jax.Array, table: jax.Array) -> jax.Array:
    """Of each token, distinct ids."""
    return (labels[..., None] + jnp.arange(K)) % len(table)


def candidate_losses(labels: jax.Array) -> Losses:
    ours = lambda labels, x, table: te.linear_log_probs(x, table, candidates(labels, table))

    def whole(labels, x, table):
        return jnp.take_along_axis(all_log_probs(x, table), candidates(labels, table), -1)

    loss = lambda log_probs: jax.nn.logsumexp(log_probs, -1).mean()
    return ways(f"linear_log_probs of {K}", ours, whole, labels, loss)


def kept_losses(labels: jax.Array) -> Losses:
    def ours(labels, x, table):
        return te.linear_log_probs(x, table, candidates(labels, table), truncated=True)

    def whole(labels, x, table):
        ids = candidates(labels, table)
        return jax.nn.log_softmax(jnp.take_along_axis(te.linear_logits(x, table), ids, -1))

    loss = lambda log_probs: log_probs[..., 0].mean()
    return ways(f"linear_log_probs of {K}, truncated", ours, whole, labels, loss)


def compiled(make: Callable[..., Losses], tokens: int) -> dict[str, jax.stages.Compiled]:
    """The value and the gradients of each line."""
    labels = below(VOCAB_SIZE, BATCH, tokens // BATCH)
    shapes = of(*labels.shape, D_MODEL), of(VOCAB_SIZE, D_MODEL)
    functions = make(jnp.asarray(labels)).items()
    step = functools.partial(jax.value_and_grad, argnums=(0, 1))
    return {name: jax.jit(step(loss)).lower(*shapes).compile() for name, loss in functions}


def temporaries(program: jax.stages.Compiled) -> int:
    return program.memory_analysis().temp_size_in_bytes


def case(title: str, make: Callable) -> Callable[[int], Report]:
    """Times and temporaries of lines of which the first two are alike."""

    def report_of(rounds: int) -> Report:
        programs = compiled(make, TOKENS)
        ours, plain, other = programs
        x, table = drawn((of(BATCH, TOKENS // BATCH, D_MODEL), of(VOCAB_SIZE, D_MODEL)))
        arguments = x, table / D_MODEL**0.5
        calls = {name: functools.partial(each, *arguments) for name, each in programs.items()}
        for a, b in zip(*(jax.tree.leaves(calls[name]()) for name in (ours, plain)), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=APART * np.abs(b).max())
        report = timing_report(title, interleave(calls, rounds, title), (plain, other))
        report.columns = [*report.columns, "peak temporaries, MB"]
        for row in report.rows:
            row.append(f"{temporaries(programs[row[0]]) / 1e6:.1f}")
        return report

    return report_of


def memory_by_length(_: int) -> Report:
    """Temporaries of PPO's loss and its gradients, compiled for more tokens."""
    columns = ["tokens", "linear_log_probs, MB", "whole logits, MB", "lax.map, MB"]
    report = Report("temporaries by the number of tokens", columns)
    for length in LENGTHS:
        programs = compiled(policy_losses, length).values()
        report.rows.append([str(length), *(f"{temporaries(each) / 1e6:.0f}" for each in programs)])
    return report


CASES = {
    "gradients": case("value and gradients", losses),
    "ppo": case("PPO, value and gradients", policy_losses),
    "candidates": case("candidates, value and gradients", candidate_losses),
    "kept": case("kept ids, value and gradients", kept_losses),
    "memory": memory_by_length,
}

if __name__ == "__main__":
    run(__doc__, CASES, PACKAGES, 15)
