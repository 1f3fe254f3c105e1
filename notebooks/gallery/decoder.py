"""Decoder: a model learns lines of Python source, then continues lines with a KV cache."""

import haiku as hk
import jax
import jax.numpy as jnp
from layers import run, source_lines, stack, training

import transformer_embed as te

STEPS, ROWS, WIDTH, HEADS, LENGTH = 500, 16, 64, 4, 64
config = te.EmbedderConfig(vocab_size=256, d_model=WIDTH, pad_id=0)


def loss_of(ids):
    embed = te.TransformerEmbedding(config)
    tokens = te.TokenPositions.from_ids(ids, pad_id=0)
    x = embed(ids, is_training=False, positions=tokens.positions)
    x = stack(x, te.AttentionMask(tokens, causal=True).dense())
    return te.linear_cross_entropy(x, embed.output(), ids, shift=True)


def read(ids, tokens, cache, slot):
    """Reads tokens into a cache. Returns the logits of the next ids, and the cache."""
    embed = te.TransformerEmbedding(config)
    x = embed(ids, is_training=False, positions=tokens.positions)
    slots, keys_values = cache
    slots, _ = te.write_cache(slots, tokens, slot)
    mask = te.AttentionMask(tokens, slots, causal=True).dense()
    written = []

    def update(*pair):
        pair, _ = te.write_cache(keys_values[len(written)], pair, slot)
        written.append(pair)
        return pair

    x = stack(x, mask, update=update)
    return te.linear_logits(x[:, -1], embed.output()), (slots, tuple(written))


model = hk.without_apply_rng(hk.multi_transform(lambda: (loss_of, (loss_of, read))))


def init(rng, ids):
    return model.init(rng, ids)


def loss_fn(params, rng, ids):
    return model.apply[0](params, ids)


def next_batch(random):
    lines, _ = source_lines()
    return lines[random.integers(0, len(lines), ROWS)]


def setup(steps=STEPS, seed=0):
    return training(init, loss_fn, next_batch, steps, seed)


def held_out(params):
    """Returns nats per byte of lines that the model was not trained on."""
    _, lines = source_lines()
    return float(jax.jit(model.apply[0])(params, lines))


def generate(params, prompts, steps):
    """Continues prompts, which are padded on the left, by the most probable bytes."""
    rows, length = prompts.shape
    empty = jnp.zeros((rows, length + steps, HEADS, WIDTH // HEADS))
    cache = te.TokenPositions.empty(rows, length + steps), ((empty, empty),) * 2
    tokens = te.TokenPositions.from_ids(prompts, pad_id=0)
    logits, cache = model.apply[1](params, prompts, tokens, cache, 0)

    def step(carry, slot):
        logits, cache = carry
        ids = logits.argmax(-1)[:, None]
        tokens = te.TokenPositions.from_offset(cache[0].padding_mask.sum(axis=1), 1)
        return model.apply[1](params, ids, tokens, cache, slot), ids[:, 0]

    _, ids = jax.lax.scan(step, (logits, cache), length + jnp.arange(steps))
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
