"""The program decoder.py in plain Haiku."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from bert_plain import sinusoids
from decoder import HEADS, LENGTH, STEPS, WIDTH, next_batch
from layers import run, source_lines, stack, training


def embed_and_positions():
    embed = hk.Embed(256, WIDTH, w_init=hk.initializers.RandomNormal(0.02))
    return embed, jnp.float32(sinusoids(2 * LENGTH, WIDTH))


def loss_of(ids):
    embed, encodings = embed_and_positions()
    x = embed(ids) + encodings[: ids.shape[1]]
    mask = jnp.tril(jnp.ones((ids.shape[1], ids.shape[1]), bool)) & (ids != 0)[:, None, None]
    logits = stack(x, mask)[:, :-1] @ embed.embeddings.T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
    return losses.mean(where=ids[:, 1:] != 0)


def read(ids, positions, is_token, cache, slot):
    """`is_token` says which slots have a token; `slot` is where the first of `ids` goes."""
    embed, encodings = embed_and_positions()
    x = embed(ids) + encodings[positions]
    queries, slots = slot + jnp.arange(ids.shape[1]), jnp.arange(is_token.shape[1])
    mask = (slots <= queries[:, None]) & is_token[:, None, None]
    written = []

    def update(*pair):
        old = cache[len(written)]
        written.append(tuple(map(write, old, pair)))
        return written[-1]

    def write(old, new):
        return jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=1)

    x = stack(x, mask, update=update)
    return x[:, -1] @ embed.embeddings.T, tuple(written)


model = hk.without_apply_rng(hk.multi_transform(lambda: (loss_of, (loss_of, read))))


def init(rng, ids):
    return model.init(rng, ids)


def loss_fn(params, rng, ids):
    return model.apply[0](params, ids)


def setup(steps=STEPS, seed=0):
    return training(init, loss_fn, next_batch, steps, seed)


def held_out(params):
    _, lines = source_lines()
    return float(jax.jit(model.apply[0])(params, lines))


def generate(params, prompts, steps):
    rows, length = prompts.shape
    empty = jnp.zeros((rows, length + steps, HEADS, WIDTH // HEADS))
    is_prompt = prompts != 0
    is_token = jnp.concatenate([is_prompt, jnp.ones((rows, steps), bool)], axis=1)
    positions = jnp.maximum(jnp.cumsum(is_prompt, axis=1) - 1, 0)
    cache = ((empty, empty),) * 2
    logits, cache = model.apply[1](params, prompts, positions, is_token, cache, 0)

    def step(carry, number):
        logits, cache = carry
        ids = logits.argmax(-1)[:, None]
        positions = is_prompt.sum(axis=1, keepdims=True) + number
        options = positions, is_token, cache, length + number
        return model.apply[1](params, ids, *options), ids[:, 0]

    _, ids = jax.lax.scan(step, (logits, cache), jnp.arange(steps))
    return ids.T


if __name__ == "__main__":
    params, losses, seconds = run(*setup(), next_batch=next_batch, steps=STEPS)
    print(f"loss {losses[0]:.2f} -> {losses[-50:].mean():.2f}, {1000 * seconds:.0f} ms per step")
    print(f"held out: {held_out(params):.3f} nats per byte")
    texts = [b"        return ", b"    def ", b"import "]
    prompts = jnp.array([[*text.rjust(16, b"\0")] for text in texts])
    continued = jax.jit(generate, static_argnames="steps")(params, prompts, steps=30)
    for text, ids in zip(texts, continued, strict=True):
        print(repr(text + bytes(ids.tolist())))
