"""The program bert.py in plain Haiku."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from bert import STEPS, WIDTH, hide, next_batch
from layers import run, source_lines, stack, training


def sinusoids(length, width):
    angles = np.arange(length)[:, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, width)


def model(ids, labels, is_chosen):
    embed = hk.Embed(256, WIDTH, w_init=hk.initializers.RandomNormal(0.02))
    x = embed(ids) + jnp.float32(sinusoids(ids.shape[1], WIDTH))
    x = stack(x, (ids != 0)[:, None, None])
    logits = x @ embed.embeddings.T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    is_right = logits.argmax(-1) == labels
    return losses.mean(where=is_chosen), is_right.mean(where=is_chosen)


transformed = hk.without_apply_rng(hk.transform(model))


def init(rng, ids):
    return transformed.init(rng, *hide(rng, ids))


def loss_fn(params, rng, ids):
    return transformed.apply(params, *hide(rng, ids))[0]


def setup(steps=STEPS, seed=0):
    return training(init, loss_fn, next_batch, steps, seed)


def held_out(params):
    _, lines = source_lines()
    return float(jax.jit(transformed.apply)(params, *hide(jax.random.key(0), lines))[1])


if __name__ == "__main__":
    params, losses, seconds = run(*setup(), next_batch=next_batch, steps=STEPS)
    print(f"loss {losses[0]:.2f} -> {losses[-50:].mean():.2f}, {1000 * seconds:.0f} ms per step")
    print(f"{held_out(params):.1%} of the masked bytes are right")
