"""How tables are drawn: what the first loss is, and what one field of the config says."""

import dataclasses
import itertools
import math

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_embed as te

VOCAB_SIZE, LENGTH, TYPES = 512, 256, 2
SCHEMES = {
    "none": None,
    "sinusoids": te.Sinusoidal(),
    "learned": te.Learned(max_len=LENGTH),
}
NAMES = ["tied", "scale", "output_scale", "scheme", "with_norm"]
KINDS = [
    dict(zip(NAMES, values, strict=True))
    for values in itertools.product(
        [True, False], ["sqrt_d_model", 1.0, 12.0], [1.0, "d_model**-0.5"], SCHEMES, [False, True]
    )
]


def config_of(width, tied, scale, output_scale, scheme, with_norm):
    output_scale = width**-0.5 if isinstance(output_scale, str) else output_scale
    return te.EmbedderConfig(
        VOCAB_SIZE,
        width,
        SCHEMES[scheme],
        dropout_rate=0.0,
        scale=scale,
        num_token_types=TYPES if with_norm else None,
        layer_norm_eps=1e-12 if with_norm else None,
        output=te.OutputConfig(tied=tied, scale=output_scale),
    )


def first_losses(config):
    """The loss of a final norm of noise alone, and of the layer's own output with noise."""
    embedder = te.Embedder(config)
    params = embedder.init(jax.random.key(0))
    ids, labels = jax.random.randint(jax.random.key(1), (2, 1, LENGTH), 0, VOCAB_SIZE)
    types = None if config.num_token_types is None else jnp.zeros(LENGTH, jnp.int32)
    x = embedder.apply(params, None, ids, is_training=False, token_types=types)
    noise = jax.random.normal(jax.random.key(2), x.shape)
    for hidden in (noise, x + noise):
        normed = hidden / jnp.sqrt(jnp.mean(hidden**2, -1, keepdims=True))
        yield float(te.linear_cross_entropy(normed, embedder.output(params), labels))


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 1024])
def test_the_first_loss_is_near_that_of_a_guess(width):
    kinds = cases.few(KINDS, 8)
    losses = {str(kind): [*first_losses(config_of(width, **kind))] for kind in kinds}
    most = math.log(VOCAB_SIZE) + 0.7
    assert {kind: found for kind, found in losses.items() if max(found) > most} == {}


def drawn(config):
    """The standard deviation of each table."""
    params = te.Embedder(config).init(jax.random.key(0))
    tables = {
        f"{path.rsplit('/', 1)[-1]}/{name}": float(np.std(leaf))
        for path, leaves in params.items()
        for name, leaf in leaves.items()
    }
    return [
        tables["token_embedding/embeddings"],
        tables["learned_positional_encoding/embeddings"],
        tables["token_type_embedding/embeddings"],
        tables["token_embedding/output_embeddings"],
    ]


def test_tables_are_drawn_as_the_config_says():
    config = te.EmbedderConfig(
        2000,
        1024,
        te.Learned(max_len=500),
        num_token_types=500,
        output=te.OutputConfig(tied=False),
    )
    # Rows of size 1/2 on entry; half of that beside them; logits of size 1/2.
    expected = [0.5 / 32, 0.25, 0.25, 0.5 / 32]
    np.testing.assert_allclose(drawn(config), expected, rtol=0.01)
    scaled = dataclasses.replace(config, init_stddev=0.02)
    np.testing.assert_allclose(drawn(scaled), [0.02] * 4, rtol=0.01)


@pytest.mark.parametrize(
    ("width", "scale", "layer_norm_eps", "expected"),
    [
        # Rows enter at 1/2; logits are of size 1; a token's own logit is 4, or 6 behind a norm.
        (64, "sqrt_d_model", None, 0.5 / 8),
        (64, 1.0, None, 1 / 8),
        (1024, "sqrt_d_model", None, 2 / 1024**0.75),
        (1024, 1.0, 1e-12, 8 / 1024),
    ],
)
def test_a_tied_table_is_drawn_for_its_logits_too(width, scale, layer_norm_eps, expected):
    config = te.EmbedderConfig(2000, width, None, scale=scale, layer_norm_eps=layer_norm_eps)
    leaves = te.Embedder(config).init(jax.random.key(0))
    table = leaves["transformer_embedding/~/token_embedding"]["embeddings"]
    np.testing.assert_allclose(np.std(table), expected, rtol=0.01)
