"""The program grpo.py in plain Haiku."""

import functools

import grpo
import haiku as hk
import jax
import jax.numpy as jnp
from bert_plain import sinusoids
from grpo import STEPS, WORDS, next_batch
from layers import run, stack, training


def next_logits(ids):
    embed = hk.Embed(WORDS, 64, w_init=hk.initializers.RandomNormal(0.02))
    length = ids.shape[1]
    x = embed(ids) + jnp.float32(sinusoids(length, 64))
    return stack(x, jnp.tril(jnp.ones((length, length), bool))) @ embed.embeddings.T


def log_probs_of(ids):
    log_probs = jax.nn.log_softmax(next_logits(ids)[:, :-1])
    return jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1)[..., 0]


model = hk.without_apply_rng(hk.multi_transform(lambda: (next_logits, (next_logits, log_probs_of))))
loss_fn = functools.partial(grpo.loss_fn, apply=model.apply)


def init(rng, prompts):
    return model.init(rng, prompts[:, None])


def setup(steps=STEPS, seed=0):
    return training(init, loss_fn, next_batch, steps, seed)


def held_out(params):
    return grpo.held_out(params, model.apply)


if __name__ == "__main__":
    params, losses, seconds = run(*setup(), next_batch=next_batch, steps=STEPS)
    print(f"{1000 * seconds:.0f} ms per step")
    print(f"reward {held_out(params):.2f}, by chance {1 / WORDS:.2f}")
