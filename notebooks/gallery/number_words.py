"""Encoder-decoder: a model learns to write numbers in digits that it reads in words."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from layers import run, stack, training

import transformer_embed as te

STEPS, ROWS, WIDTH = 600, 32, 64
SMALL = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen"""
LARGE = "zero ten twenty thirty forty fifty sixty seventy eighty ninety"
ONES, TENS = SMALL.split(), LARGE.split()
START, LENGTH, DIGITS = 1, 44, 5  # letters and digits are their ASCII codes; 0 is padding


def in_words(number):
    """Writes a number from 0 to 9999 in words."""
    if number >= 1000:
        return f"{ONES[number // 1000]} thousand {in_words(number % 1000)}"
    if number >= 100:
        return f"{ONES[number // 100]} hundred {in_words(number % 100)}"
    if number < 20:
        return ONES[number]
    return f"{TENS[number // 10]} {ONES[number % 10]}"


def as_ids(text, length):
    return [*text.encode()[:length], *[0] * (length - len(text))]


def pairs_of(numbers):
    """Returns the words of numbers as source ids, and the digits as target ids."""
    source = [as_ids(in_words(number), LENGTH) for number in numbers]
    target = [[START, *as_ids(str(number), DIGITS)] for number in numbers]
    return np.array(source, np.int32), np.array(target, np.int32)


ORDER = np.random.default_rng(0).permutation(10_000)
TRAIN, HELD_OUT = ORDER[:2000], ORDER[2000:3000]
# There is no pad_id: the model should learn to write padding after the last digit.
config = te.EmbedderConfig(vocab_size=128, d_model=WIDTH)


def hidden(source_ids, target_ids):
    """Returns a vector for each target token, and the output layer. Both stacks share one table."""
    embed = te.TransformerEmbedding(config)
    source = te.TokenPositions.from_ids(source_ids, pad_id=0)
    target = te.TokenPositions(np.arange(target_ids.shape[1]))
    memory = embed(source_ids, is_training=False, positions=source.positions)
    memory = stack(memory, te.AttentionMask(source, causal=False).dense())
    x = embed(target_ids, is_training=False, positions=target.positions)
    cross = te.AttentionMask(target, source, causal=False).dense()
    mask = te.AttentionMask(target, causal=True).dense()
    return stack(x, mask, memory=memory, memory_mask=cross), embed.output()


def loss_of(source_ids, target_ids):
    x, output = hidden(source_ids, target_ids)
    return te.linear_cross_entropy(x, output, target_ids, shift=True)


def next_ids(source_ids, target_ids):
    x, output = hidden(source_ids, target_ids)
    return te.linear_logits(x, output).argmax(-1)


model = hk.multi_transform(lambda: (loss_of, (loss_of, next_ids)))


def init(rng, batch):
    return model.init(rng, *batch)


def loss_fn(params, rng, batch):
    return model.apply[0](params, rng, *batch)


def next_batch(random):
    return pairs_of(TRAIN[random.integers(0, len(TRAIN), ROWS)])


def setup(steps=STEPS, seed=0):
    return training(init, loss_fn, next_batch, steps, seed)


def held_out(params, next_ids=model.apply[1]):
    """Returns the share of other numbers that the model writes rightly, digit by digit."""
    source_ids, wanted = pairs_of(HELD_OUT)
    read = jax.jit(lambda ids: next_ids(params, None, source_ids, ids))
    ids = jnp.zeros_like(wanted).at[:, 0].set(START)
    for place in range(DIGITS):
        ids = ids.at[:, place + 1].set(read(ids)[:, place])
    return float((ids == wanted).all(axis=1).mean())


if __name__ == "__main__":
    params, losses, seconds = run(*setup(), next_batch=next_batch, steps=STEPS)
    print(f"loss {losses[0]:.2f} -> {losses[-50:].mean():.3f}, {1000 * seconds:.0f} ms per step")
    print(f"{held_out(params):.1%} of the held-out numbers are right")
