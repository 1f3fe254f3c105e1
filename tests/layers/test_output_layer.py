"""The output layer of a config: its parameters, logits and loss, in every module."""

import functools
import json
import pathlib

import haiku as hk
import jax
import numpy as np
import pytest
from compare import equal, near
from drawn import drawn
from jax.sharding import PartitionSpec
from meshes import EXPLICIT, mesh_of, put
from references import assert_right
from refused import refused
from sample import IDS, KEY, TOKENS

import transformer_embed as te

SPEC = PartitionSpec
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "output_layers.json"
VOCAB, WIDTH = 11, 8
X = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)
LAYERS = {
    "tied": te.OutputLayer(),
    "bert": te.OutputLayer(bias=True),
    "phi": te.OutputLayer(tied=False, bias=True),
    "all": te.OutputLayer(tied=False, bias=True, softcap=2.0, scale=3.0),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_logits_and_loss_are_the_formula_in_float64_in_every_module(name):
    """A user cannot forget the softcap or the scale; every parameter that is read is trained."""
    output, (embedder, params) = LAYERS[name], made(name)
    layer = lambda: te.TransformerEmbedding(config(output))
    tokens = lambda: te.TokenEmbedding(VOCAB, WIDTH, pad_id=0, output=output)

    def of_module(build):
        def call():
            module = build()
            log_probs = module.log_probs(X, IDS, **COOLED)
            return module.logits(X), module.cross_entropy(X, IDS, **OPTIONS), log_probs

        return hk.transform(call).apply

    @jax.jit
    def of_each(params):
        loss = lambda params: embedder.cross_entropy(params, X, IDS, **OPTIONS)
        value, gradient = jax.value_and_grad(loss)(params)
        found = [
            (embedder.logits(params, X), value, embedder.log_probs(params, X, IDS, **COOLED)),
            of_module(layer)(params, None),
            of_module(tokens)({"token_embedding": params[TOKENS]}, None),
        ]
        return found, gradient[TOKENS]

    leaves, of_logits = params[TOKENS], {"softcap": output.softcap, "scale": output.scale}
    table = leaves["embeddings" if output.tied else "output_embeddings"]
    of_logits |= {"bias": leaves.get("output_bias"), "pad_id": 0}
    found, gradient = of_each(params)
    for logits, loss, log_probs in found:
        assert_right(te.linear_logits, logits, X, table, **of_logits)
        assert_right(te.linear_cross_entropy, loss, X, table, IDS, **of_logits, **OPTIONS)
        assert_right(te.linear_log_probs, log_probs, X, table, IDS, **of_logits, **COOLED)
    for leaf_name, leaf in gradient.items():
        assert np.any(leaf) == (leaf_name != "embeddings" or output.tied)
        equal(leaf[0], 0)


def test_the_loss_of_a_config_takes_no_other_settings():
    embedder, params = made("tied")
    for option in ("softcap", "scale", "bias", "table", "pad_id"):
        hint = " (to leave out labels of -100: mask=labels != -100)" * (option == "pad_id")
        with refused(
            TypeError, f"{option}: wanted no value here, since the config says it{hint}, got 1.0"
        ):
            embedder.cross_entropy(params, X, IDS, **{option: 1.0})


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True])
def test_padding_is_never_predicted(is_sharded):
    """Not by argmax, by samples, by the loss's normaliser, by smoothing; whatever its row holds."""
    embedder, params = made("all")
    rows = {name: leaf.at[0].set(1e4) for name, leaf in params[TOKENS].items()}
    low = {**params, TOKENS: rows}
    if is_sharded:
        mesh = mesh_of((1, 2), ("data", "model"))
        low = te.sharding.shard_params(low, mesh, {"*embeddings": SPEC("model")})
    logits = np.asarray(embedder.logits(low, -X))
    assert (logits[..., 0] == LOWEST).all()
    assert np.asarray(jax.nn.softmax(logits))[..., 0].max() == 0
    loss = functools.partial(embedder.cross_entropy, labels=IDS, label_smoothing=0.1)
    near(loss(low, X), loss(params, X), rtol=1e-5)


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
    near(large[TOKENS]["output_embeddings"].std(), 1 / 8, rtol=0.01)


def test_initial_parameters_include_the_output_layer():
    embedder, params = made("all")
    layer = lambda: te.TransformerEmbedding(embedder.config, initial_params=params).logits(X)
    started = hk.transform(layer).init(KEY)
    equal(started, params)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC("model"), SPEC(None, "model")])
def test_a_sharded_output_layer_gives_the_logits_and_the_loss_of_one_device(spec):
    embedder, params = made("all")
    mesh = mesh_of((2, 4), ("data", "model"), EXPLICIT)

    def step(params, x):
        loss = functools.partial(embedder.cross_entropy, labels=IDS, shift=True, chunk_size=2)
        return embedder.logits(params, x), jax.grad(loss, (0, 1))(params, x)

    with jax.set_mesh(mesh):
        placed = te.sharding.shard_params(params, mesh, {"*embeddings": spec})
        logits, (of_params, of_x) = jax.jit(step)(placed, put(mesh, X, "data"))
    is_table = lambda leaf: isinstance(leaf, te.sharding.Sharded)
    rows = lambda leaf: leaf.in_vocabulary_order() if is_table(leaf) else leaf
    # The rest is the padding of the vocabulary.
    logits = np.asarray(logits)[..., :VOCAB]
    got = logits, (jax.tree.map(rows, of_params, is_leaf=is_table), of_x)
    near(got, jax.jit(step)(params, X), atol=1e-5)


@pytest.mark.parametrize("method", ["logits", "cross_entropy"])
@pytest.mark.parametrize(
    ("output", "got"), [(None, "None"), ("it has none", "none, since it has none")]
)
def test_a_config_without_an_output_layer_says_why(output, got, method):
    arguments = [X, IDS][: 1 + (method == "cross_entropy")]
    embedder = te.Embedder(config(output))
    module = hk.transform(
        lambda: getattr(te.TransformerEmbedding(config(output)), method)(*arguments)
    )
    params = drawn(embedder.init)
    assert set(params[TOKENS]) == {"embeddings"}
    text = (
        f"{method}: wanted config.output, an OutputLayer (or call te.linear_{method} with other "
        f"weights), got {got}"
    )
    with refused(ValueError, text):
        getattr(embedder, method)(params, *arguments)
    with refused(ValueError, text):
        module.init(KEY)


def test_an_eager_loss_runs_no_haiku(monkeypatch):
    """From the second call on: it took most of its time."""
    embedder, params = made("phi")
    calls = (
        lambda: embedder.cross_entropy(params, X, IDS.tolist(), shift=True),
        lambda: embedder.logits(params, X),
    )
    shapes = [call().shape for call in calls]
    monkeypatch.setattr(hk, "transform", None)
    assert [call().shape for call in calls] == shapes == [(), (*IDS.shape, VOCAB)]
