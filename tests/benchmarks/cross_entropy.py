"""The losses of an output layer beside whole logits: peak temporaries, time, and how far apart the
values and gradients are.

Usage: python tests/benchmarks/cross_entropy.py [--rounds N] [--json OUT.json] [--only CASE ...]
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Report, interleave, ratio, run, timing_report
from programs import below, drawn, of

import transformer_embed as te

VOCAB_SIZE, TOKENS, D_MODEL, BATCH, K = 32_000, 4096, 256, 8, 64
PACKAGES = ("transformer-embed", "jax", "jaxlib", "optax", "tokamax", "numpy")
LENGTHS, VOCAB_SIZES = (TOKENS, 16_384, 131_072), (256, 1000, VOCAB_SIZE, 151_936)
SMALL_TOKENS, SMALL = 16_384, VOCAB_SIZES[:2]
# Logits are sums of 256 products in float32; the loss is some ten of them.
APART = 1e-5
Losses = dict[str, Callable[..., jax.Array]]


def chosen(values: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, labels[..., None], -1)[..., 0]


def losses(labels: jax.Array) -> Losses:
    """The mean cross-entropy as a function of x and the table, ours first; tokamax' if it is here."""

    def plain(x, table):
        logits = te.linear_logits(x, table)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen(logits, labels))

    def by_optax(x, table):
        logits = te.linear_logits(x, table)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    ours = functools.partial(te.linear_cross_entropy, labels=labels)
    lines = {"linear_cross_entropy": ours, "plain logits": plain, "optax": by_optax}
    if importlib.util.find_spec("tokamax") is None:
        return lines
    import tokamax  # noqa: PLC0415
    from absl import flags  # noqa: PLC0415

    # It reads those of the command, which has others.
    flags.FLAGS(["tokamax"])

    def by_tokamax(x, table):
        tokens = x.reshape(-1, D_MODEL), labels.reshape(-1), table.T
        return tokamax.linear_softmax_cross_entropy_loss(*tokens, reduction="mean")

    return lines | {"tokamax": by_tokamax}


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


def most_probable(labels: jax.Array) -> Losses:
    ours = lambda _, x, table: te.linear_top_k(x, table, 8)
    whole = lambda _, x, table: jax.lax.top_k(all_log_probs(x, table), 8)
    return ways("linear_top_k of 8", ours, whole, labels, lambda found: found[0])


def divergences(labels: jax.Array, kind: str) -> Losses:
    """Of a teacher who is surer than the student, and has no gradient."""

    def ours(_, x, table):
        return te.linear_divergence(x, table, *jax.lax.stop_gradient((1.5 * x, table)), kind=kind)

    def whole(_, x, table):
        s, t = all_log_probs(x, table), jax.lax.stop_gradient(all_log_probs(1.5 * x, table))
        kl = lambda a, b: (jnp.exp(a) * (a - b)).sum(-1)
        if kind != "js":
            return kl(t, s) if kind == "forward" else kl(s, t)
        mixture = jnp.logaddexp(s, t) - jnp.log(2.0)
        return (kl(t, mixture) + kl(s, mixture)) / 2

    return ways(f"linear_divergence, {kind}", ours, whole, labels, jnp.mean)


def compiled(
    make: Callable[..., Losses], tokens: int, with_gradients: bool, vocab_size: int = VOCAB_SIZE
) -> dict:
    labels = below(vocab_size, BATCH, tokens // BATCH)
    shapes = of(*labels.shape, D_MODEL), of(vocab_size, D_MODEL)
    wrap = functools.partial(jax.value_and_grad, argnums=(0, 1)) if with_gradients else lambda f: f
    functions = make(jnp.asarray(labels)).items()
    return {name: jax.jit(wrap(loss)).lower(*shapes).compile() for name, loss in functions}


def temporaries(program: jax.stages.Compiled) -> int:
    return program.memory_analysis().temp_size_in_bytes


def case(
    title: str, make: Callable, slower: float, with_gradients: bool = True, larger: float = 1 / 8
) -> Callable[[int], Report]:
    """Times and temporaries, and the largest difference from the second line."""

    def report_of(rounds: int) -> Report:
        programs = compiled(make, TOKENS, with_gradients)
        ours, plain, other, *_ = programs
        x, table = drawn((of(BATCH, TOKENS // BATCH, D_MODEL), of(VOCAB_SIZE, D_MODEL)))
        arguments = x, table / D_MODEL**0.5
        calls = {name: functools.partial(each, *arguments) for name, each in programs.items()}
        samples = interleave(calls, rounds, title)
        report = timing_report(title, samples, (plain, other))
        report.columns = [*report.columns, "peak temporaries, MB"]
        sizes = {name: temporaries(program) for name, program in programs.items()}
        for row in report.rows:
            row.append(f"{sizes[row[0]] / 1e6:.1f}")
        report.hold(
            f"temporaries, {title}, ours / {plain}", sizes[ours] / sizes[plain], most=larger
        )
        by = plain if make is losses else other
        if with_gradients:
            report.hold(f"time, {title}, ours / {by}", ratio(samples, ours, by), most=slower)
        pairs = zip(*(jax.tree.leaves(calls[name]()) for name in (ours, plain)), strict=True)
        errors = [float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs]
        report.hold(f"difference, {title}, ours from {plain}", max(errors), most=APART)
        return report

    return report_of


def small_vocabularies(rounds: int) -> Report:
    """Beside whole logits, which fit into memory: all tokens are one chunk."""
    columns = ["vocabulary", "line", "median, ms", "/ whole logits"]
    report = Report(f"small vocabularies, {SMALL_TOKENS} tokens", columns)
    for (name, make), words in itertools.product(MAKERS.items(), SMALL):
        programs = compiled(make, SMALL_TOKENS, name != "top_k", words)
        x, table = drawn((of(BATCH, SMALL_TOKENS // BATCH, D_MODEL), of(words, D_MODEL)))
        arguments = x, table / D_MODEL**0.5
        calls = {way: functools.partial(program, *arguments) for way, program in programs.items()}
        ours, whole = [*calls][:2]
        samples = interleave({way: calls[way] for way in (ours, whole)}, rounds, f"{name}, {words}")
        found = ratio(samples, ours, whole)
        report.rows.append([str(words), ours, f"{np.median(samples[ours]):.4g}", f"{found:.2f}"])
        report.hold(f"time, {ours}, {words} words, ours / {whole}", found, most=1.1)
    return report


def memory_by_length(_: int) -> Report:
    """Temporaries of losses and their gradients, compiled for more tokens and words."""
    columns = ["loss", "tokens", "vocabulary", "ours, MB", "whole logits, MB", "lax.map, MB"]
    report = Report("temporaries by the number of tokens and words", columns)
    for make in MAKERS.values():
        for vocab_size, length in itertools.product(VOCAB_SIZES, LENGTHS):
            programs = compiled(make, length, True, vocab_size)
            sizes = [f"{temporaries(program) / 1e6:.0f}" for program in programs.values()]
            report.rows.append([next(iter(programs)), str(length), str(vocab_size), *sizes])
    return report


OF_KINDS = {
    kind: functools.partial(divergences, kind=kind) for kind in ("forward", "reverse", "js")
}
MAKERS: dict[str, Callable] = {
    "gradients": losses,
    "ppo": policy_losses,
    "candidates": candidate_losses,
    "kept": kept_losses,
    "top_k": most_probable,
    **OF_KINDS,
}
CASES = {
    "gradients": case("value and gradients", losses, 1.0),
    "value": case("value alone", losses, 1.0, with_gradients=False),
    "ppo": case("PPO, value and gradients", policy_losses, 1.1),
    "candidates": case("candidates, value and gradients", candidate_losses, 1.1),
    "kept": case("kept ids, value and gradients", kept_losses, 0.5),
    "top_k": case("most probable ids", most_probable, 1.0, with_gradients=False),
    **{
        kind: case(f"{kind} divergence, value and gradients", make, 0.8, larger=1 / 5)
        for kind, make in OF_KINDS.items()
    },
    "small": small_vocabularies,
    "memory": memory_by_length,
}

if __name__ == "__main__":
    run(__doc__, CASES, PACKAGES, 15)
