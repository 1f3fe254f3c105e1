"""BERT: a model learns to fill in masked bytes of Python source."""

import haiku as hk
import jax
import jax.numpy as jnp
from layers import run, source_lines, stack, training

import transformer_embed as te

STEPS, ROWS, WIDTH, MASK = 500, 16, 64, 1
config = te.EmbedderConfig(vocab_size=256, d_model=WIDTH, pad_id=0)


def model(ids, labels, is_chosen):
    """Returns the loss of the chosen labels, and the accuracy."""
    embed = te.TransformerEmbedding(config)
    tokens = te.TokenPositions.from_ids(ids, pad_id=0)
    x = embed(ids, is_training=False, positions=tokens.positions)
    x = stack(x, te.AttentionMask(tokens, causal=False).dense())
    options = {"mask": is_chosen, "with_metrics": True}
    loss, metrics = te.linear_cross_entropy(x, embed.output(), labels, **options)
    return loss, metrics.accuracy


transformed = hk.without_apply_rng(hk.transform(model))


def hide(rng, ids):
    """Chooses 15 % of the tokens. Most of them become `MASK`, some another id, and some stay."""
    choose_rng, action_rng, id_rng = jax.random.split(rng, 3)
    is_chosen = jax.random.bernoulli(choose_rng, 0.15, ids.shape) & (ids != 0)
    action = jax.random.uniform(action_rng, ids.shape)
    random_ids = jax.random.randint(id_rng, ids.shape, 32, 127)
    shown = jnp.where(action < 0.8, MASK, jnp.where(action < 0.9, random_ids, ids))
    return jnp.where(is_chosen, shown, ids), ids, is_chosen


def init(rng, ids):
    return transformed.init(rng, *hide(rng, ids))


def loss_fn(params, rng, ids):
    return transformed.apply(params, *hide(rng, ids))[0]


def next_batch(random):
    lines, _ = source_lines()
    return lines[random.integers(0, len(lines), ROWS)]


def setup(steps=STEPS, seed=0):
    return training(init, loss_fn, next_batch, steps, seed)


def held_out(params):
    """Returns the share of masked bytes of other lines that the model fills in rightly."""
    _, lines = source_lines()
    return float(jax.jit(transformed.apply)(params, *hide(jax.random.key(0), lines))[1])


if __name__ == "__main__":
    params, losses, seconds = run(*setup(), next_batch=next_batch, steps=STEPS)
    print(f"loss {losses[0]:.2f} -> {losses[-50:].mean():.2f}, {1000 * seconds:.0f} ms per step")
    print(f"{held_out(params):.1%} of the masked bytes are right")
