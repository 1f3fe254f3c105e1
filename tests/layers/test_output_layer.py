"""The output layer of a config: its parameters and what it computes, in every module."""

import dataclasses
import functools
import json
import pathlib
import pickle

import haiku as hk
import jax
import jax.export
import numpy as np
import optax
import pytest
from compare import equal, near
from drawn import drawn
from jax.sharding import PartitionSpec
from refused import refused
from sample import IDS, KEY, TOKENS

import transformer_embed as te

SPEC = PartitionSpec
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "output_layers.json"
VOCAB, WIDTH = 11, 8
X = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)
LAYERS = {
    "tied": te.OutputConfig(),
    "bert": te.OutputConfig(bias=True),
    "phi": te.OutputConfig(tied=False, bias=True),
    "all": te.OutputConfig(tied=False, bias=True, softcap=2.0, scale=3.0),
}
LOWEST = np.finfo(np.float32).min / 2
COOLED = {"temperature": 0.5}
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "shift": True, "mask": IDS < 7}


def config(output, **fields):
    return te.EmbedderConfig(VOCAB, WIDTH, pad_id=0, output=output, **fields)


@functools.cache
def made(name):
    embedder = te.Embedder(config(LAYERS[name]))
    return embedder, drawn(embedder.init)


def all_of(output):
    loss = te.linear_cross_entropy(X, output, IDS, **OPTIONS)
    return te.linear_logits(X, output), loss, te.linear_log_probs(X, output, IDS, **COOLED)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_logits_and_loss_are_those_of_the_output_layer_in_every_module(name):
    """A user cannot forget the softcap or the scale."""
    output, (embedder, params) = LAYERS[name], made(name)
    layer = lambda: te.TransformerEmbedding(config(output))
    tokens = lambda: te.TokenEmbedding(VOCAB, WIDTH, pad_id=0, output=output)

    def of_module(build):
        def call():
            return all_of(build().output())

        return hk.transform(call).apply

    @jax.jit
    def of_each(params):
        return [
            all_of(embedder.output(params)),
            of_module(layer)(params, None),
            of_module(tokens)({"token_embedding": params[TOKENS]}, None),
        ]

    leaves, of_logits = params[TOKENS], {"softcap": output.softcap, "scale": output.scale}
    table = leaves["embeddings" if output.tied else "output_embeddings"]
    of_logits |= {"bias": leaves.get("output_bias"), "pad_id": 0}
    wanted = jax.jit(all_of)(te.OutputLayer(table, **of_logits))
    for found in of_each(params):
        jax.tree.map(functools.partial(near, rtol=1e-5, atol=1e-5), found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_every_parameter_that_is_read_is_trained_but_at_padding(name):
    embedder, params = made(name)
    loss = lambda params: te.linear_cross_entropy(X, embedder.output(params), IDS, **OPTIONS)
    for leaf_name, leaf in jax.jit(jax.grad(loss))(params)[TOKENS].items():
        assert np.any(leaf) == (leaf_name != "embeddings" or LAYERS[name].tied)
        equal(leaf[0], 0)


@pytest.mark.slow
@pytest.mark.parametrize("is_padded", [False, True])
def test_padding_is_never_predicted(is_padded):
    """Not by argmax, by samples, by the loss's normaliser, by smoothing; whatever its row holds."""
    embedder, params = made("all")
    rows = {name: leaf.at[0].set(1e4) for name, leaf in params[TOKENS].items()}
    low = {**params, TOKENS: rows}
    if is_padded:
        new = dataclasses.replace(embedder.config, row_multiple=16)
        low, embedder = te.pretrained.resize(low, embedder.config, new), te.Embedder(new)
    logits = np.asarray(te.linear_logits(-X, embedder.output(low)))
    assert (logits[..., VOCAB:] == LOWEST).all()
    assert (logits[..., 0] == LOWEST).all()
    assert np.asarray(jax.nn.softmax(logits))[..., 0].max() == 0
    loss = functools.partial(te.linear_cross_entropy, X, labels=IDS, label_smoothing=0.1)
    plain, params = made("all")
    near(loss(embedder.output(low)), loss(plain.output(params)), rtol=1e-5)


@pytest.mark.parametrize("name", ["tied", "bert", "phi"])
def test_parameters_are_those_of_the_golden_file(name):
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    narrow = {"embedding_width": 6, "param_dtype": "bfloat16"}
    for fields, title in (({}, name), (narrow, f"{name}, narrow")):
        params = jax.eval_shape(te.Embedder(config(LAYERS[name], **fields)).init, KEY)
        leaves = sorted(params[TOKENS].items())
        assert {leaf: f"{a.dtype}{list(a.shape)}" for leaf, a in leaves} == golden[title]


@pytest.mark.slow
def test_the_output_layer_changes_no_other_parameter():
    plain, other = (te.Embedder(config(LAYERS[name])).init(KEY) for name in ("tied", "all"))
    equal(plain[TOKENS]["embeddings"], other[TOKENS]["embeddings"])
    equal(other[TOKENS]["output_bias"], np.zeros(VOCAB))
    large = te.Embedder(te.EmbedderConfig(4096, 64, output=LAYERS["phi"])).init(KEY)
    near(large[TOKENS]["output_embeddings"].std(), 0.5 / 8, rtol=0.01)


def test_initial_parameters_include_the_output_layer():
    embedder, params = made("all")
    layer = lambda: te.TransformerEmbedding(embedder.config, initial_params=params).output()
    started = hk.transform(layer).init(KEY)
    equal(started, params)


def test_a_config_without_an_output_layer_has_none():
    embedder = te.Embedder(config(None))
    module = hk.transform(lambda: te.TransformerEmbedding(config(None)).output())
    params = drawn(embedder.init)
    assert set(params[TOKENS]) == {"embeddings"}
    for call in (lambda: embedder.output(params), lambda: module.init(KEY)):
        with refused(ValueError, "output: ... `no_output` says why ... got None"):
            call()


def test_an_eager_loss_runs_no_haiku(monkeypatch):
    """From the second call on: it took most of its time."""
    embedder, params = made("phi")
    call = lambda: te.linear_cross_entropy(X, embedder.output(params), IDS.tolist(), shift=True)
    expected = call()
    monkeypatch.setattr(hk, "transform", None)
    equal(call(), expected)


# --- one value

OUTPUT = te.OutputLayer(
    np.random.default_rng(1).normal(size=(VOCAB, WIDTH)).astype(np.float32),
    np.linspace(-1, 1, VOCAB, dtype=np.float32),
    softcap=2.0,
    scale=3.0,
    pad_id=0,
)


def logits_of(output):
    return te.linear_logits(X, output)


def scanned(output):
    carry, _ = jax.lax.scan(lambda carry, _: (carry, None), output, length=2)
    return logits_of(carry)


def with_a_row_each(output):
    stacked = jax.tree.map(lambda leaf: jax.numpy.stack([leaf, leaf]), output)
    return jax.vmap(logits_of)(stacked)[1]


def exported(output):
    return jax.export.export(jax.jit(logits_of))(output).call(output)


@pytest.mark.parametrize("way", [jax.jit(logits_of), scanned, with_a_row_each, exported])
def test_an_output_layer_goes_through_transformations(way):
    near(way(OUTPUT), logits_of(OUTPUT), atol=1e-5)


def test_an_output_layer_is_pickled_whole():
    near(logits_of(pickle.loads(pickle.dumps(OUTPUT))), logits_of(OUTPUT))


@pytest.mark.slow
def test_an_output_layer_is_trained_beside_a_table_that_is_trained_by_rows():
    params = {"embed": OUTPUT.table, "output": OUTPUT}

    def loss(params):
        return te.linear_cross_entropy(te.lookup(params["embed"], IDS), params["output"], IDS)

    value, grads = te.rows.value_and_grad(loss, ids={"embed": IDS})(params)
    adam = optax.adam(0.1)
    new, _ = te.rows.apply_gradients(adam, grads, adam.init(params), params)
    want, dense = jax.value_and_grad(loss)(params)
    near(value, want, rtol=1e-6)
    near(grads["output"].table, dense["output"].table, atol=1e-6)
    assert isinstance(new["output"], te.OutputLayer)


def test_a_leaf_that_was_replaced_is_checked():
    stacked = jax.tree.map(lambda leaf: leaf[None], OUTPUT)
    with refused(
        ValueError,
        f"table: ... got shape [1, {VOCAB}, {WIDTH}]",
    ):
        logits_of(stacked)


def test_a_plain_table_has_the_name_of_the_argument():
    """It was called table, which no such function has."""
    ids = np.zeros(X.shape[:-1], int)
    with refused(TypeError, "output: ... got int64"):
        te.linear_cross_entropy(X, ids, OUTPUT)
    with refused(TypeError, "teacher_output: ... got int64"):
        te.linear_divergence(X, OUTPUT, X, ids)
