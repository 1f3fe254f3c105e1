"""The losses of an output layer beside whole logits: time and peak temporaries.

Usage: python tests/benchmarks/cross_entropy.py [--rounds N] [--json OUT.json] [--only CASE ...]
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Report, interleave, run, timing_report
from programs import below, drawn, of

import transformer_embed as te

VOCAB_SIZE, TOKENS, D_MODEL, BATCH, K = 32_000, 4096, 256, 8, 64
LENGTHS = TOKENS, 131_072
# Logits are sums of 256 products in float32; the loss is some ten of them.
APART = 1e-5


def mean_losses(labels):
    """The mean cross-entropy as a function of x and the table, ours first."""

    def by_optax(x, table):
        logits = te.linear_logits(x, table)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    ours = functools.partial(te.linear_cross_entropy, labels=labels)
    return {"linear_cross_entropy": ours, "optax on plain logits": by_optax}


def ways(labels, loss, ours, whole):
    """A loss of values by ours, by whole logits, and by 256 tokens of them at a time: of functions of
    x, the table and labels."""

    def blocks(x, table, labels):
        step = jax.checkpoint(lambda block: whole(block[0], table, block[1]))
        cut = lambda array: array.reshape(-1, 256, *array.shape[2:])
        values = jax.lax.map(step, (cut(x), cut(labels)))
        return values.reshape(*labels.shape, *values.shape[2:])

    made = {"linear_log_probs": ours, "whole logits": whole, "lax.map and checkpoint": blocks}
    return {
        name: lambda x, table, values=values: loss(values(x, table, labels))
        for name, values in made.items()
    }


def policy_losses(labels):
    """The clipped loss of PPO (Schulman et al., 2017, section 3), whose old log-probabilities and
    advantages are drawn."""
    old, advantages = np.random.default_rng(1).normal(size=(2, *labels.shape)).astype(np.float32)

    def loss(log_probs):
        ratios = jnp.exp(log_probs + 10 + 0.1 * old)
        clipped = jnp.clip(ratios, 0.8, 1.2)
        return -jnp.minimum(ratios * advantages, clipped * advantages).mean()

    def whole(x, table, labels):
        log_probs = jax.nn.log_softmax(te.linear_logits(x, table))
        return jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]

    return ways(labels, loss, te.linear_log_probs, whole)


def candidate_losses(labels, are_kept=False):
    """Losses of K distinct ids a token, or of the first one among them, if no other id was kept."""
    candidates = lambda labels: (labels[..., None] + jnp.arange(K)) % VOCAB_SIZE

    def ours(x, table, labels):
        if are_kept:
            rows = te.lookup(table, candidates(labels))
            return jax.nn.log_softmax(jnp.einsum("...d,...kd->...k", x, rows))
        return te.linear_log_probs(x, table, candidates(labels))

    def whole(x, table, labels):
        logits, ids = te.linear_logits(x, table), candidates(labels)
        if are_kept:
            return jax.nn.log_softmax(jnp.take_along_axis(logits, ids, -1))
        return jnp.take_along_axis(jax.nn.log_softmax(logits), ids, -1)

    if are_kept:
        loss = lambda log_probs: log_probs[..., 0].mean()
    else:
        loss = lambda log_probs: jax.nn.logsumexp(log_probs, -1).mean()
    return ways(labels, loss, ours, whole)


def compiled(make, tokens):
    """The value and the gradients of each line."""
    labels = jnp.asarray(below(VOCAB_SIZE, BATCH, tokens // BATCH))
    shapes = of(*labels.shape, D_MODEL), of(VOCAB_SIZE, D_MODEL)
    step = functools.partial(jax.value_and_grad, argnums=(0, 1))
    return {
        name: jax.jit(step(loss)).lower(*shapes).compile() for name, loss in make(labels).items()
    }


def temporaries(program):
    return program.memory_analysis().temp_size_in_bytes / 1e6


def case(title, make):
    """Times and temporaries of lines of which the first two are compared."""

    def report_of(rounds):
        programs = compiled(make, TOKENS)
        x, table = drawn((of(BATCH, TOKENS // BATCH, D_MODEL), of(VOCAB_SIZE, D_MODEL)))
        arguments = x, table / D_MODEL**0.5
        calls = {name: functools.partial(each, *arguments) for name, each in programs.items()}
        found = [jax.tree.leaves(call()) for call in [*calls.values()][:2]]
        for a, b in zip(*found, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=APART * np.abs(b).max())
        report = timing_report(title, interleave(calls, rounds, title), [*programs][1:])
        report.columns = [*report.columns, "peak temporaries, MB"]
        for row in report.rows:
            row.append(f"{temporaries(programs[row[0]]):.1f}")
        return report

    return report_of


def memory_by_length(_):
    """Of PPO's loss and its gradients, compiled for more tokens."""
    columns = ["tokens", "linear_log_probs, MB", "whole logits, MB", "lax.map, MB"]
    report = Report("temporaries by the number of tokens", columns)
    for length in LENGTHS:
        programs = compiled(policy_losses, length).values()
        report.rows.append([str(length), *(f"{temporaries(each):.0f}" for each in programs)])
    return report


CASES = {
    "gradients": case("value and gradients", mean_losses),
    "candidates": case(f"{K} candidates, value and gradients", candidate_losses),
    "kept": case(
        f"{K} kept ids, value and gradients", functools.partial(candidate_losses, are_kept=True)
    ),
    "memory": memory_by_length,
}

if __name__ == "__main__":
    run(__doc__, CASES, ("jax", "jaxlib", "optax", "numpy"), 15)
