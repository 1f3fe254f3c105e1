"""`te.TokenEmbedding` and `te.lookup` in place of `hk.Embed`: names, initial values, attributes."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal, near
from refused import each_raises
from sample import IDS, KEY

import transformer_embed as te

MATRIX = np.random.default_rng(0).normal(size=(11, 8)).astype(np.float32)
NORMAL = hk.initializers.TruncatedNormal()


def ours(vocab_size=None, embed_dim=None, **options):
    if "embedding_matrix" not in options:
        options["w_init"] = NORMAL
    return te.TokenEmbedding(vocab_size, embed_dim=embed_dim, scale=1.0, name="embed", **options)


def of_haiku(vocab_size=None, embed_dim=None, **options):
    return hk.Embed(vocab_size, embed_dim, **options)


def model(make, **options):
    """Two tables, a layer between them, and the attributes that programs read."""

    def function(ids):
        first, second = make(11, 8, **options), make(11, 8)
        x = hk.Linear(8)(first(ids)) + second(ids)
        assert (second.vocab_size, second.embed_dim) == (11, 8)
        logits = x @ first.embeddings.T
        return logits, hk.Linear(2)(x)

    return hk.without_apply_rng(hk.transform(function))


def with_lookup(ids):
    first, second = hk.Embed(11, 8), hk.Embed(11, 8)
    x = hk.Linear(8)(te.lookup(first.embeddings, ids)) + te.lookup(second.embeddings, ids)
    return x @ first.embeddings.T, hk.Linear(2)(x)


def assert_alike(old, new):
    """Asserts that both have the same parameters and results, and returns the parameters."""
    params = old.init(KEY, IDS)
    assert {"embed", "embed_1"} <= params.keys()
    equal(new.init(KEY, IDS), params)
    near(new.apply(params, IDS), old.apply(params, IDS), rtol=1e-6, atol=1e-6)
    return params


@pytest.mark.parametrize(
    "options",
    [{}, {"embedding_matrix": MATRIX}, {"lookup_style": hk.EmbedLookupStyle.ONE_HOT},
     {"lookup_style": "ONE_HOT"}, {"lookup_style": hk.EmbedLookupStyle.ARRAY_INDEX}],
)  # fmt: skip
def test_a_program_keeps_names_initial_values_and_results(options):
    assert_alike(model(of_haiku, **options), model(ours, **options))


def test_lookup_keeps_the_module_and_trains_by_rows():
    params = assert_alike(model(of_haiku), hk.without_apply_rng(hk.transform(with_lookup)))

    def loss(params):
        x = te.lookup(params["embed"]["embeddings"], IDS)
        return jnp.sum(jnp.tanh(x))

    @jax.jit
    def both(params):
        """The value and the norm of the gradient, by rows and dense."""
        value, grads = te.rows.value_and_grad(loss, ids={"embed/embeddings": IDS})(params)
        dense_value, dense = jax.value_and_grad(loss)(params)
        gradients = grads["embed"]["embeddings"].values, dense["embed"]["embeddings"]
        return (value, dense_value), [*map(jnp.linalg.norm, gradients)]

    for found in both(params):
        near(*found, rtol=1e-6)


@pytest.mark.parametrize("style", ["gather", hk.EmbedLookupStyle.ONE_HOT])
def test_the_lookup_style_is_read_as_it_was_given(style):
    read = lambda: jnp.array(ours(11, 8, lookup_style=style).lookup_style == style)
    assert hk.transform(read).apply({}, None)


@pytest.mark.parametrize("options", [{"row_multiple": 8}, {"row_multiple": 16, "spread": True}])
def test_a_matrix_of_initial_values_is_placed_as_the_rows_of_a_padded_table(options):
    make = functools.partial(
        te.TokenEmbedding, embedding_matrix=MATRIX, scale=1.0, output=None, **options
    )
    every = np.arange(11)
    embed = hk.without_apply_rng(hk.transform(lambda: (make()(every), make().embeddings)))
    rows, table = jax.jit(lambda: embed.apply(embed.init(KEY)))()
    equal(rows, MATRIX)
    assert table.shape == (16, 8)


REFUSED = {
    "te.TokenEmbedding(11)": "TypeError: d_model: wanted a Python int, got None",
    "te.TokenEmbedding(embed_dim=8)": "TypeError: vocab_size: wanted a Python int, got None",
    "te.TokenEmbedding(11, 8, embed_dim=9)": "ValueError: embed_dim: wanted another name for d_model, 8, got 9",
    "te.TokenEmbedding(12, embedding_matrix=MATRIX)": "ValueError: vocab_size: wanted the size of embedding_matrix, 11, got 12",
    "te.TokenEmbedding(11, 9, embedding_matrix=MATRIX)": "ValueError: d_model: wanted the size of embedding_matrix, 8, got 9",
    "te.TokenEmbedding(embedding_matrix=MATRIX[0])": "ValueError: embedding_matrix: wanted shape ... got shape [8]",
    "te.TokenEmbedding(embedding_matrix=MATRIX, w_init=NORMAL)": "ValueError: w_init: wanted None, since embedding_matrix",
    "te.TokenEmbedding(11, 8, lookup_style='one')": "ValueError: lookup_style: wanted one of 'gather', 'one_hot', got 'one'",
}  # fmt: skip


def test_sizes_that_contradict_each_other_are_refused():
    hk.transform(lambda: each_raises(REFUSED, globals())).init(KEY)
