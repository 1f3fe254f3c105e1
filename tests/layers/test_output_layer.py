"""The output layer of a config: its parameters and what it computes, in every module."""

import dataclasses
import functools
import pickle

import haiku as hk
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import equal, near
from drawn import drawn, normal
from refused import each_raises
from sample import IDS, KEY, TOKENS

import transformer_embed as te

VOCAB, WIDTH = 11, 8
X = normal(0, 2, 5, WIDTH)
LAYERS = {
    "tied": te.OutputConfig(),
    "bert": te.OutputConfig(bias=True),
    "phi": te.OutputConfig(tied=False, bias=True),
    "all": te.OutputConfig(tied=False, bias=True, softcap=2.0, scale=3.0),
}
LOWEST = np.finfo(np.float32).min / 2


def config(output, **fields):
    return te.EmbedderConfig(VOCAB, WIDTH, pad_id=0, output=output, **fields)


@functools.cache
def made(name):
    embedder = te.Embedder(config(LAYERS[name]))
    return embedder, drawn(embedder.init)


def loss_of(output):
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "shift": True, "mask": IDS < 7}
    return te.linear_cross_entropy(X, output, IDS, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "bert", "all"])
def test_output_layer_follows_the_config_in_every_module_and_trains_all_but_padding(name):
    """A user cannot forget the softcap or the scale."""
    output, (embedder, params) = LAYERS[name], made(name)
    layer = lambda: te.TransformerEmbedding(config(output)).output()
    tokens = lambda: te.TokenEmbedding(VOCAB, WIDTH, pad_id=0, output=output).output()
    leaves = params[TOKENS]
    table = leaves["embeddings" if output.tied else "output_embeddings"]
    options = {"softcap": output.softcap, "scale": output.scale, "pad_id": 0}
    wanted = te.OutputLayer(table, leaves.get("output_bias"), **options)
    of_tokens = hk.transform(tokens).apply({"token_embedding": leaves}, None)
    for found in embedder.output(params), hk.transform(layer).apply(params, None), of_tokens:
        equal(found, wanted)
    gradient = jax.jit(jax.grad(lambda params: loss_of(embedder.output(params))))(params)
    for leaf_name, leaf in jax.device_get(gradient[TOKENS]).items():
        assert leaf.any() == (leaf_name != "embeddings" or output.tied)
        equal(leaf[0], 0)


def test_padding_is_never_predicted():
    """Not by argmax, by samples, by the loss's normaliser, by smoothing; whatever its row holds, nor
    rows past the vocabulary."""
    embedder, params = made("all")
    rows = {name: np.array(leaf) for name, leaf in params[TOKENS].items()}
    for leaf in rows.values():
        leaf[0] = 1e4
    padded = te.Embedder(dataclasses.replace(embedder.config, row_multiple=16))

    @jax.jit
    def results(rows, params):
        low = te.pretrained.resize({**params, TOKENS: rows}, embedder.config, padded.config)
        output = padded.output(low)
        logits = te.linear_logits(-X, output)
        losses = loss_of(output), loss_of(embedder.output(params))
        return logits, jax.nn.softmax(logits), losses

    logits, shares, losses = jax.device_get(results(rows, params))
    assert (logits[..., [0, *range(VOCAB, 16)]] == LOWEST).all()
    assert shares[..., 0].max() == 0
    near(*losses, rtol=1e-5)


@pytest.mark.slow
def test_the_output_layer_changes_no_other_parameter():
    """Its own have the table's width and dtype."""
    fields = {"embedding_width": 6, "param_dtype": "bfloat16"}
    configs = [config(LAYERS[name], **fields) for name in ("tied", "all")]
    plain, other = jax.jit(lambda key: [te.Embedder(each).init(key) for each in configs])(KEY)
    equal(plain[TOKENS]["embeddings"], other[TOKENS]["embeddings"])
    equal(other[TOKENS]["output_bias"], np.zeros(VOCAB))
    assert {leaf.dtype for leaf in other[TOKENS].values()} == {jnp.dtype("bfloat16")}
    assert other[TOKENS]["output_embeddings"].shape == (VOCAB, 6)


def test_an_eager_loss_runs_no_haiku(monkeypatch):
    """From the second call on: it took most of its time."""
    embedder, params = made("phi")
    call = lambda: te.linear_cross_entropy(X, embedder.output(params), IDS.tolist(), shift=True)
    expected = call()
    monkeypatch.setattr(hk, "transform", None)
    equal(call(), expected)


# --- one value

OUTPUT = te.OutputLayer(
    normal(1, VOCAB, WIDTH),
    np.linspace(-1, 1, VOCAB, dtype=np.float32),
    softcap=2.0,
    scale=3.0,
    pad_id=0,
)
logits_of = functools.partial(te.linear_logits, X)


def with_a_row_each(output):
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), output)
    return jax.vmap(logits_of)(stacked)[1]


WAYS = {
    "scan": lambda output: logits_of(jax.lax.scan(lambda c, _: (c, None), output, length=2)[0]),
    "export": lambda output: jax.export.export(jax.jit(logits_of))(output).call(output),
    "vmap": with_a_row_each,
}


def test_an_output_layer_goes_through_transformations_and_pickle():
    pickled = pickle.loads(pickle.dumps(OUTPUT))
    ways = lambda *outputs: (
        *map(logits_of, outputs),
        *(way(outputs[0]) for way in WAYS.values()),
    )
    expected, *found = jax.device_get(jax.jit(ways)(OUTPUT, pickled))
    for name, logits in zip(["pickle", *WAYS], found, strict=True):
        np.testing.assert_allclose(logits, expected, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_an_output_layer_is_trained_beside_a_table_that_is_trained_by_rows():
    params = {"embed": OUTPUT.table, "output": OUTPUT}

    def loss(params):
        return te.linear_cross_entropy(te.lookup(params["embed"], IDS), params["output"], IDS)

    @jax.jit
    def step(params):
        value, grads = te.rows.value_and_grad(loss, ids={"embed": IDS})(params)
        sgd = optax.sgd(1.0)
        new, _ = te.rows.apply_gradients(sgd, grads, sgd.init(params), params)
        return (value, new), jax.value_and_grad(loss)(params)

    (value, new), (want, dense) = step(params)
    near(value, want, rtol=1e-6)
    assert isinstance(new["output"], te.OutputLayer)
    near(new["output"].table, OUTPUT.table - np.asarray(dense["output"].table), atol=1e-6)


WITHOUT = te.Embedder(config(None))
NONE = "ValueError: output: ... `no_output` says why ... got None"
STACKED = jax.tree.map(lambda leaf: np.asarray(leaf)[None], OUTPUT)
TABLE = np.zeros(X.shape[:-1], int)
REFUSED = {
    "WITHOUT.output(drawn(WITHOUT.init))": NONE,
    "hk.transform(te.TransformerEmbedding(WITHOUT.config).output).init(KEY)": NONE,
    # A leaf that was replaced is checked.
    "logits_of(STACKED)": f"ValueError: table: ... got shape [1, {VOCAB}, {WIDTH}]",
    # A plain table has the name of the argument.
    "te.linear_cross_entropy(X, TABLE, OUTPUT)": "TypeError: output: ... got int64",
    "te.linear_divergence(X, OUTPUT, X, TABLE)": "TypeError: teacher_output: ... got int64",
}


def test_value_that_is_no_output_layer_is_refused():
    hk.transform(lambda: each_raises(REFUSED, globals())).init(KEY)
