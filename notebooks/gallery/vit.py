"""ViT: a model learns to read handwritten digits, cut into patches of 2 x 2 pixels."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from layers import run, stack, training
from sklearn.datasets import load_digits

import transformer_embed as te

STEPS, ROWS, WIDTH = 400, 64, 64


def split_data():
    """Returns patches [image, 16, 4] and labels, to train on and held out."""
    images, labels = load_digits(return_X_y=True)
    patches = images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4) / 16
    order = np.random.default_rng(0).permutation(len(labels))
    patches, labels = np.float32(patches[order]), np.int32(labels[order])
    return (patches[500:], labels[500:]), (patches[:500], labels[:500])


TRAIN, HELD_OUT = split_data()


def model(patches):
    """Returns the logits of the ten digits."""
    add_positions = te.PositionalEncoding(te.SinusoidalGrid((4, 4)), WIDTH)
    x = add_positions(hk.Linear(WIDTH)(patches), is_training=False)
    x = stack(x, None).mean(axis=1)
    return hk.Linear(10)(x)


transformed = hk.without_apply_rng(hk.transform(model))


def init(rng, batch):
    return transformed.init(rng, batch[0])


def loss_fn(params, rng, batch):
    patches, labels = batch
    logits = transformed.apply(params, patches)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def next_batch(random):
    chosen = random.integers(0, len(TRAIN[1]), ROWS)
    return TRAIN[0][chosen], TRAIN[1][chosen]


def setup(steps=STEPS, seed=0):
    return training(init, loss_fn, next_batch, steps, seed)


def held_out(params):
    """Returns the share of held-out images that the model reads rightly."""
    patches, labels = HELD_OUT
    return float(jnp.mean(jax.jit(transformed.apply)(params, patches).argmax(-1) == labels))


if __name__ == "__main__":
    params, losses, seconds = run(*setup(), next_batch=next_batch, steps=STEPS)
    print(f"loss {losses[0]:.2f} -> {losses[-50:].mean():.2f}, {1000 * seconds:.0f} ms per step")
    print(f"{held_out(params):.1%} of the held-out digits are right")
