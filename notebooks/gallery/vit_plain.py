"""The program vit.py in plain Haiku, with learned positions, as the paper has them."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from layers import run, stack, training
from vit import HELD_OUT, STEPS, WIDTH, next_batch


def model(patches):
    x = hk.Linear(WIDTH)(patches)
    w_init = hk.initializers.RandomNormal(0.02)
    x = x + hk.get_parameter("positions", x.shape[1:], init=w_init)
    x = stack(x, None).mean(axis=1)
    return hk.Linear(10)(x)


transformed = hk.without_apply_rng(hk.transform(model))


def init(rng, batch):
    return transformed.init(rng, batch[0])


def loss_fn(params, rng, batch):
    patches, labels = batch
    logits = transformed.apply(params, patches)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def setup(steps=STEPS, seed=0):
    return training(init, loss_fn, next_batch, steps, seed)


def held_out(params):
    patches, labels = HELD_OUT
    return float(jnp.mean(jax.jit(transformed.apply)(params, patches).argmax(-1) == labels))


if __name__ == "__main__":
    params, losses, seconds = run(*setup(), next_batch=next_batch, steps=STEPS)
    print(f"loss {losses[0]:.2f} -> {losses[-50:].mean():.2f}, {1000 * seconds:.0f} ms per step")
    print(f"{held_out(params):.1%} of the held-out digits are right")
