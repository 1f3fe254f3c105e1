"""How tables are drawn: what the first loss is, and what one field of the config says."""

import dataclasses
import itertools
import math

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import near
from embeddings import by_name

import transformer_embed as te

VOCAB_SIZE, LENGTH = 256, 64
SCHEMES = [None, te.Sinusoidal(), te.Learned(max_len=LENGTH)]
NORM = {"num_token_types": 2, "layer_norm_eps": 1e-12}
KINDS = itertools.product(
    [True, False], ["sqrt_d_model", 1.0, 12.0], [0, -0.5], SCHEMES, [{}, NORM], [64, 512]
)


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "scale", "power", "scheme", "more", "width"), cases.few(KINDS, 6))
def test_first_loss_is_near_a_uniform_guess(tied, scale, power, scheme, more, width):
    """Of a final norm of noise alone, and of the layer's own output with noise."""
    output = te.OutputConfig(tied=tied, scale=width**power)
    config = te.EmbedderConfig(VOCAB_SIZE, width, scheme, scale=scale, output=output, **more)
    embedder, random = te.Embedder(config), np.random.default_rng(0)
    ids, labels = random.integers(0, VOCAB_SIZE, (2, LENGTH))
    types = np.zeros(LENGTH, np.int32) if more else None
    noise = random.normal(size=(LENGTH, width)).astype(np.float32)

    @jax.jit
    def losses(key):
        params = embedder.init(key)
        x = embedder.apply(params, None, ids, is_training=False, token_types=types)
        hidden = jnp.stack([noise, x + noise])
        normed = hidden / jnp.sqrt(jnp.mean(hidden**2, -1, keepdims=True))
        of_both, output = np.stack([labels, labels]), embedder.output(params)
        return te.linear_cross_entropy(normed, output, of_both, reduction="none")

    means = np.asarray(losses(jax.random.key(0))).mean(-1)
    assert (means < math.log(VOCAB_SIZE) + 0.7).all()


def drawn(*configs):
    """The standard deviation of each table of each config, by its name."""
    init = lambda key: [te.Embedder(config).init(key) for config in configs]
    return [
        {name: np.std(leaf) for name, leaf in by_name(params).items()}
        for params in jax.jit(init)(jax.random.key(0))
    ]


@pytest.mark.slow
def test_tables_are_drawn_as_the_config_says():
    config = te.EmbedderConfig(
        100, 1024, te.Learned(100), num_token_types=100, output=te.OutputConfig(tied=False)
    )
    # Rows of size 1/2 on entry; half of that beside them; logits of size 1/2.
    expected = {
        "token_embedding/embeddings": 0.5 / 32,
        "learned_positional_encoding/embeddings": 0.25,
        "token_type_embedding/embeddings": 0.25,
        "token_embedding/output_embeddings": 0.5 / 32,
    }
    scaled = dataclasses.replace(config, init_stddev=0.02)
    for found, stddevs in zip(
        drawn(config, scaled), (expected, dict.fromkeys(expected, 0.02)), strict=True
    ):
        near(found, stddevs, rtol=0.01)


# The width, the scale and the epsilon of a norm; and how the table is drawn. Rows enter at 1/2; logits
# are of size 1; a token's own logit is 4, or 6 behind a norm.
TIED = [
    (64, "sqrt_d_model", None, 0.5 / 8),
    (64, 1.0, None, 1 / 8),
    (1024, "sqrt_d_model", None, 2 / 1024**0.75),
    (1024, 1.0, 1e-12, 8 / 1024),
]


def test_a_tied_table_is_drawn_for_its_logits_too():
    configs = [
        te.EmbedderConfig(500, width, None, scale=scale, layer_norm_eps=layer_norm_eps)
        for width, scale, layer_norm_eps, _ in TIED
    ]
    found = [each["token_embedding/embeddings"] for each in drawn(*configs)]
    np.testing.assert_allclose(found, [expected for *_, expected in TIED], rtol=0.01)
