"""A language model with `hk.Embed`, learned positions of the model's own, and `hk.Linear`.

It has the names and shapes of dm-haiku's example. Its ends are written twice: by hand, and with
this package. The layers between them are the same function.
"""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import near
from drawn import drawn

import transformer_embed as te

VOCAB, LENGTH, WIDTH, HEADS = 37, 12, 16, 2
STDDEV = hk.initializers.TruncatedNormal(0.02)
IDS = np.random.default_rng(0).integers(1, VOCAB, (3, LENGTH + 1)).astype(np.int32)
IDS[1, -4:] = IDS[2, 5:] = 0
NAMES = {"language_model", "language_model/embed", "language_model/linear"}


def transformer(x, mask):
    """One layer, because both models have the same layers."""
    init = hk.initializers.VarianceScaling(2.0)
    h = hk.LayerNorm(-1, True, True)(x)
    x = x + hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=init)(h, h, h, mask)
    dense = hk.Sequential([hk.Linear(4 * WIDTH, w_init=init), jax.nn.gelu, hk.Linear(WIDTH)])
    x = x + dense(hk.LayerNorm(-1, True, True)(x))
    return hk.LayerNorm(-1, True, True)(x)


class OldModel(hk.Module):
    def __call__(self, ids):
        inputs, targets = ids[:, :-1], ids[:, 1:]
        # old
        embed = hk.Embed(VOCAB, WIDTH, w_init=STDDEV)
        x = embed(inputs)
        positions = hk.get_parameter("positional_embeddings", [LENGTH, WIDTH], init=STDDEV)
        x = x + positions[: inputs.shape[1]]
        causal = np.tril(np.ones((1, 1, LENGTH, LENGTH), bool))
        mask = causal & (inputs != 0)[:, None, None, :]
        x = transformer(x, mask)
        logits = hk.Linear(VOCAB)(x)
        log_probs = jax.nn.log_softmax(logits)
        one_hot = jax.nn.one_hot(targets, VOCAB)
        losses = -jnp.sum(one_hot * log_probs, axis=-1)
        weights = targets != 0
        return jnp.sum(losses * weights) / jnp.sum(weights)
        # end


class Head(hk.Module):
    """The parameters of an `hk.Linear`, as an output layer."""

    def __call__(self):
        w = hk.get_parameter("w", [WIDTH, VOCAB], init=STDDEV)
        b = hk.get_parameter("b", [VOCAB], init=jnp.zeros)
        return te.OutputLayer(w, b, vocab_axis=1)


class NewModel(hk.Module):
    def __call__(self, ids):
        inputs, targets = ids[:, :-1], ids[:, 1:]
        # new
        embed = te.TokenEmbedding(VOCAB, WIDTH, scale=1.0, w_init=STDDEV, name="embed")
        x = embed(inputs)
        table = hk.get_parameter("positional_embeddings", [LENGTH, WIDTH], init=STDDEV)
        x = x + te.lookup(table, np.arange(LENGTH))
        tokens = te.TokenPositions.from_mask(inputs != 0)
        x = transformer(x, te.AttentionMask(tokens, causal=True).dense())
        return te.linear_cross_entropy(x, Head(name="linear")(), targets, mask=targets != 0)
        # end


def built(module):
    return hk.without_apply_rng(hk.transform(lambda ids: module(name="language_model")(ids)))


@pytest.mark.slow
def test_a_language_model_keeps_its_parameters_values_and_gradients():
    old, new = built(OldModel), built(NewModel)
    params, new_params = (drawn(model.init, IDS, scale=0.3) for model in (old, new))
    shapes = functools.partial(jax.tree.map, jnp.shape)
    assert params.keys() >= NAMES
    assert shapes(new_params) == shapes(params)
    expected, gradients = jax.jit(jax.value_and_grad(old.apply))(params, IDS)
    found, new_gradients = jax.jit(jax.value_and_grad(new.apply))(params, IDS)
    near(found, expected, rtol=1e-6)
    near(new_gradients, gradients, rtol=2e-4, atol=2e-6)
