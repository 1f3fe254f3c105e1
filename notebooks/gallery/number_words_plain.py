"""The program number_words.py in plain Haiku."""

import haiku as hk
import jax.numpy as jnp
import optax
from bert_plain import sinusoids
from layers import run, stack, training
from number_words import STEPS, WIDTH, next_batch
from number_words import held_out as held_out_of


def logits_of(source_ids, target_ids):
    embed = hk.Embed(128, WIDTH, w_init=hk.initializers.RandomNormal(0.02))
    positions = jnp.float32(sinusoids(source_ids.shape[1], WIDTH))
    is_source = (source_ids != 0)[:, None, None]
    memory = stack(embed(source_ids) + positions, is_source)
    length = target_ids.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    x = embed(target_ids) + positions[:length]
    x = stack(x, causal, memory=memory, memory_mask=is_source)
    return x @ embed.embeddings.T


def loss_of(source_ids, target_ids):
    logits = logits_of(source_ids, target_ids)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, target_ids[:, 1:]).mean()


def next_ids(source_ids, target_ids):
    return logits_of(source_ids, target_ids).argmax(-1)


model = hk.multi_transform(lambda: (loss_of, (loss_of, next_ids)))


def init(rng, batch):
    return model.init(rng, *batch)


def loss_fn(params, rng, batch):
    return model.apply[0](params, rng, *batch)


def setup(steps=STEPS, seed=0):
    return training(init, loss_fn, next_batch, steps, seed)


def held_out(params):
    return held_out_of(params, model.apply[1])


if __name__ == "__main__":
    params, losses, seconds = run(*setup(), next_batch=next_batch, steps=STEPS)
    print(f"loss {losses[0]:.2f} -> {losses[-50:].mean():.3f}, {1000 * seconds:.0f} ms per step")
    print(f"{held_out(params):.1%} of the held-out numbers are right")
