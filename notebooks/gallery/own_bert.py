"""A BERT on your own text: packed documents, weight decay, saving, and words to fill in.

Usage: python own_bert.py [FOLDER [TEXT ...]]

FOLDER has .txt, .md or .rst files. By default, the program reads the docstrings of Python's own
library. TEXT is a text to fill in, such as "Move the [MASK] to the end."
"""

import functools
import pathlib
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from layers import run, stack, training
from own_text import LENGTH, MASK, PAD, VOCAB, cut, encode, hide, pack, read_data, sample

import transformer_embed as te

STEPS, ROWS, WIDTH = 1500, 8, 128
# 15 % of the tokens are chosen in each step, and hardly ever 20 %.
MOST_CHOSEN = ROWS * LENGTH // 5
FOLDER = None
TEXTS = ["Return [MASK] if the path is a file.", "Raise an error [MASK] it is missing."]
output = te.OutputConfig(bias=True)
config = te.EmbedderConfig(vocab_size=VOCAB, d_model=WIDTH, pad_id=PAD, output=output)


def hidden_of(ids, segment_ids):
    """Returns the hidden vectors and the output layer. No document sees another."""
    embed = te.TransformerEmbedding(config)
    tokens = te.TokenPositions.from_segment_ids(segment_ids)
    x = embed(ids, is_training=False, positions=tokens.positions)
    return stack(x, te.AttentionMask(tokens, causal=False).dense()), embed.output()


def loss_of(ids, segment_ids, labels, is_chosen):
    """Returns the loss and the accuracy of the chosen tokens. Only their logits are computed."""
    x, output = hidden_of(ids, segment_ids)
    is_chosen = is_chosen.ravel()
    chosen_first = jnp.argsort(~is_chosen)[:MOST_CHOSEN]
    chosen_x = x.reshape(-1, WIDTH)[chosen_first]
    chosen_labels = labels.ravel()[chosen_first]
    options = {"mask": is_chosen[chosen_first], "with_metrics": True}
    loss, metrics = te.linear_cross_entropy(chosen_x, output, chosen_labels, **options)
    return loss, metrics.accuracy


def logits_of(ids, segment_ids):
    return te.linear_logits(*hidden_of(ids, segment_ids))


model = hk.without_apply_rng(hk.multi_transform(lambda: (loss_of, (loss_of, logits_of))))


def init(rng, batch):
    return model.init(rng, *hide(rng, *batch))


def loss_and_accuracy(params, rng, batch):
    return model.apply[0](params, *hide(rng, *batch))


def loss_fn(params, rng, batch):
    return loss_and_accuracy(params, rng, batch)[0]


def next_batch(random):
    _, packed, _ = read_data(FOLDER)
    return sample(random, packed, ROWS)


def decays(params):
    """Says which parameters decay: the matrices of layers, but no table, norm or bias."""

    def is_matrix(module, name, value):
        return value.ndim >= 2 and name not in ("embeddings", "output_embeddings")

    return hk.data_structures.map(is_matrix, params)


def setup(steps=STEPS, seed=0):
    adamw = functools.partial(optax.adamw, weight_decay=0.1, mask=decays)
    return training(init, loss_fn, next_batch, steps, seed, make_optimizer=adamw)


def held_out(params):
    """Returns the share of masked words that the model fills in rightly, in text kept apart."""
    _, _, packed = read_data(FOLDER)
    random, evaluate = np.random.default_rng(0), jax.jit(loss_and_accuracy)
    keys = jax.random.split(jax.random.key(0), 40)
    return np.mean([evaluate(params, key, sample(random, packed, ROWS))[1] for key in keys])


def fill_in(params, vocabulary, text, count=4):
    """Returns the most probable words for each [MASK] of a text."""
    ids, segment_ids = pack(cut(encode(vocabulary, [text])))
    logits = jax.jit(model.apply[1])(params, ids, segment_ids)
    best = np.argsort(-logits[ids == MASK, : len(vocabulary)])[:, :count]
    return [[vocabulary[n] for n in row] for row in best]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        FOLDER = sys.argv[1]
    vocabulary, (ids, _), (others, _) = read_data(FOLDER)
    print(f"{(ids != PAD).sum()} words in {len(ids)} batch rows")
    params, losses, seconds = run(*setup(), next_batch=next_batch, steps=STEPS)
    print(f"loss {losses[0]:.2f} -> {losses[-50:].mean():.2f}, {1000 * seconds:.0f} ms per step")
    assert np.isfinite(losses).all(), "a loss is NaN, so the model is not saved"
    frequent = (others == MASK + 1).sum() / (others != PAD).sum()
    print(f"right: {held_out(params):.1%}, and with the most frequent word always: {frequent:.1%}")
    te.pretrained.save_embedder("own_bert.safetensors", config, params)
    pathlib.Path("own_bert.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    loaded = te.pretrained.load_embedder("own_bert.safetensors").params
    for text in sys.argv[2:] or TEXTS:
        print(text, *fill_in(loaded, vocabulary, text))
