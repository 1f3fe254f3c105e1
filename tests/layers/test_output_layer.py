"""The output layer of a config: its parameters, logits and loss, in every module."""

import functools
import json
import pathlib
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import set_mesh
from drawn import drawn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import transformer_embed as te

SPEC = PartitionSpec
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TOKENS = "transformer_embedding/~/token_embedding"
VOCAB, WIDTH = 11, 8
KEY = jax.random.key(0)
IDS = np.array([[5, 6, 7, 0, 3], [1, 2, 10, 4, 4]], np.int32)
X = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)
LAYERS = {
    "tied": te.OutputLayer(),
    "bert": te.OutputLayer(bias=True),
    "phi": te.OutputLayer(tied=False, bias=True),
    "gemma2": te.OutputLayer(softcap=2.5),
    "cohere": te.OutputLayer(scale=0.0625),
    "all": te.OutputLayer(tied=False, bias=True, softcap=2.0, scale=3.0),
}
every_layer = pytest.mark.parametrize("output", LAYERS.values(), ids=LAYERS)


def config(output, **fields):
    return te.EmbedderConfig(VOCAB, WIDTH, pad_id=0, output=output, **fields)


@functools.cache
def made(output):
    embedder = te.Embedder(config(output))
    return embedder, drawn(embedder.init)


def by_hand(params, output, x=X):
    """The logits in float64; padding, id 0, is never predicted."""
    module = {name: np.array(leaf, np.float64) for name, leaf in params[TOKENS].items()}
    table = module["embeddings" if output.tied else "output_embeddings"]
    u = output.scale * (np.float64(x) @ table.T + module.get("output_bias", 0.0))
    logits = u if output.softcap is None else output.softcap * np.tanh(u / output.softcap)
    logits[..., 0] = np.finfo(np.float32).min / 2
    return logits


# --- logits and loss


@every_layer
def test_logits_are_the_formula_in_float64(output):
    embedder, params = made(output)
    want = by_hand(params, output)
    layer = hk.transform(lambda: te.TransformerEmbedding(config(output)).logits(X))
    tokens = hk.transform(
        lambda: te.TokenEmbedding(VOCAB, WIDTH, pad_id=0, output=output).logits(X)
    )
    for logits in (
        embedder.logits(params, X),
        layer.apply(params, None),
        tokens.apply({"token_embedding": params[TOKENS]}, None),
        jax.jit(embedder.logits)(params, X),
    ):
        # Sums of 9 terms below 16, times the scale.
        np.testing.assert_allclose(logits, want, rtol=0, atol=output.scale * 2**-18)
        assert logits.dtype == jnp.float32


@every_layer
def test_the_loss_is_that_of_the_logits_with_every_setting(output):
    """A user cannot forget the softcap or the scale: the config has them."""
    embedder, params = made(output)
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "shift": True, "mask": IDS < 7}
    logits = by_hand(params, output)[:, :-1]
    labels, counted = IDS[:, 1:], ((IDS < 7) & (IDS != 0))[:, 1:]
    log_z = np.log(np.exp(logits).sum(-1))
    chosen = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    losses = log_z - 0.9 * chosen - 0.1 * logits[..., 1:].mean(-1) + 1e-2 * log_z**2
    want = losses[counted].mean()
    layer = hk.transform(
        lambda: te.TransformerEmbedding(config(output)).cross_entropy(X, IDS, **options)
    )
    tokens = hk.transform(
        lambda: te.TokenEmbedding(VOCAB, WIDTH, pad_id=0, output=output).cross_entropy(
            X, IDS, **options
        )
    )
    for loss in (
        embedder.cross_entropy(params, X, IDS, **options),
        layer.apply(params, None),
        tokens.apply({"token_embedding": params[TOKENS]}, None),
    ):
        np.testing.assert_allclose(loss, want, rtol=1e-5)


@every_layer
def test_every_parameter_of_the_output_layer_is_trained(output):
    embedder, params = made(output)
    gradient = jax.grad(lambda params: embedder.cross_entropy(params, X, IDS))(params)[TOKENS]
    for name, leaf in gradient.items():
        is_read = name != "embeddings" or output.tied
        assert np.any(leaf) == is_read
        np.testing.assert_array_equal(leaf[0], 0)


@pytest.mark.parametrize("option", ["softcap", "scale", "bias", "table", "pad_id"])
def test_the_loss_of_a_config_takes_no_other_settings(option):
    embedder, params = made(LAYERS["tied"])
    hint = r" \(to leave out labels of -100: mask=labels != -100\)" * (option == "pad_id")
    want = f"^{option}: wanted no value here, since the config says it{hint}, got 1.0$"
    with pytest.raises(TypeError, match=want):
        embedder.cross_entropy(params, X, IDS, **{option: 1.0})


@pytest.mark.parametrize("table", ["whole", "sharded"])
def test_padding_is_never_predicted(table):
    """Not by argmax, by samples, by the loss's normaliser, by smoothing; whatever its row holds."""
    embedder, params = made(LAYERS["all"])
    rows = {name: leaf.at[0].set(1e4) for name, leaf in params[TOKENS].items()}
    low = {**params, TOKENS: rows}
    if table == "sharded":
        mesh = jax.make_mesh((1, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        low = te.sharding.shard_params(low, mesh, {"*embeddings": SPEC("model")})
    logits = embedder.logits(low, -X)
    assert (np.asarray(logits)[..., 0] == np.finfo(np.float32).min / 2).all()
    assert np.asarray(jax.nn.softmax(logits))[..., 0].max() == 0
    assert (np.argmax(logits, -1) > 0).all()
    loss = functools.partial(embedder.cross_entropy, labels=IDS, label_smoothing=0.1)
    np.testing.assert_allclose(loss(low, X), loss(params, X), rtol=1e-5)


# --- parameters


@pytest.mark.parametrize("name", ["tied", "bert", "phi"])
def test_parameters_are_those_of_the_golden_file(name):
    for fields in ({}, {"embedding_width": 6, "param_dtype": "bfloat16"}):
        embedder = te.Embedder(config(LAYERS[name], **fields))
        params = jax.eval_shape(embedder.init, KEY)
        tree = {leaf: f"{a.dtype}{list(a.shape)}" for leaf, a in sorted(params[TOKENS].items())}
        golden = json.loads((GOLDEN / "output_layers.json").read_text(encoding="utf-8"))
        assert tree == golden[f"{name}, narrow" if fields else name]


def test_the_output_layer_changes_no_other_parameter():
    plain, other = (te.Embedder(config(LAYERS[name])).init(KEY) for name in ("tied", "all"))
    np.testing.assert_array_equal(plain[TOKENS]["embeddings"], other[TOKENS]["embeddings"])
    np.testing.assert_array_equal(other[TOKENS]["output_bias"], np.zeros(VOCAB))
    deviation = (
        te.Embedder(te.EmbedderConfig(4096, 64, output=LAYERS["phi"]))
        .init(KEY)[TOKENS]["output_embeddings"]
        .std()
    )
    np.testing.assert_allclose(deviation, 1 / 8, rtol=0.01)


def test_initial_parameters_include_the_output_layer():
    output = LAYERS["all"]
    _, params = made(output)
    loaded = hk.transform(
        lambda: te.TransformerEmbedding(config(output), initial_params=params).logits(X)
    )
    drawn_anew = loaded.init(KEY)
    np.testing.assert_allclose(
        loaded.apply(drawn_anew, None), by_hand(params, output), rtol=0, atol=1e-4
    )


def test_a_larger_vocabulary_has_a_larger_output_layer():
    output = LAYERS["all"]
    _, params = made(output)
    larger = te.resize_vocabulary(params, 400, jax.random.key(1))
    shapes = jax.eval_shape(te.Embedder(te.EmbedderConfig(400, WIDTH, output=output)).init, KEY)
    assert jax.tree.map(jnp.shape, larger) == jax.tree.map(jnp.shape, shapes)
    for name, leaf in params[TOKENS].items():
        np.testing.assert_array_equal(larger[TOKENS][name][:VOCAB], leaf)
        new = np.asarray(larger[TOKENS][name][VOCAB:])
        np.testing.assert_allclose(new.mean(0), leaf.mean(0), atol=4 * np.max(leaf.std(0)) / 19)
    rows = (larger[TOKENS][name][VOCAB:] for name in ("embeddings", "output_embeddings"))
    assert abs(np.corrcoef(*map(np.ravel, rows))[0, 1]) < 0.5
    smaller = te.resize_vocabulary(params, 4)
    assert smaller[TOKENS]["output_bias"].shape == (4,)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [SPEC("model"), SPEC(None, "model"), SPEC(("data", "model"))])
@pytest.mark.parametrize("name", ["bert", "all"])
def test_a_sharded_output_layer_gives_the_logits_and_the_loss_of_one_device(kind, spec, name):
    output = LAYERS[name]
    embedder, params = made(output)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)

    def step(params, x):
        loss = functools.partial(embedder.cross_entropy, labels=IDS, shift=True, chunk_size=2)
        return embedder.logits(params, x), jax.grad(loss, (0, 1))(params, x)

    with set_mesh(mesh):
        placed = te.sharding.shard_params(params, mesh, {"*embeddings": spec})
        x = jax.device_put(X, NamedSharding(mesh, SPEC("data")))
        logits, (of_params, of_x) = jax.jit(step)(placed, x)
    want_logits, (want_params, want_x) = jax.jit(step)(params, X)
    np.testing.assert_allclose(np.asarray(logits)[..., :VOCAB], want_logits, atol=1e-5)
    np.testing.assert_allclose(of_x, want_x, atol=1e-5)
    for leaf, want in want_params[TOKENS].items():
        got = of_params[TOKENS][leaf]
        rows = got.in_vocabulary_order() if isinstance(got, te.sharding.Sharded) else got
        np.testing.assert_allclose(rows, want, atol=1e-5)
    assert isinstance(placed[TOKENS]["embeddings"], te.sharding.Sharded)
    if not output.tied:
        assert isinstance(placed[TOKENS]["output_embeddings"], te.sharding.Sharded)


# --- errors

POSITIVE = "a finite number above 0"


@pytest.mark.parametrize(
    ("field", "value", "error", "want", "got"),
    [
        ("tied", 0, TypeError, "a Python bool", "int 0"),
        ("bias", None, TypeError, "a Python bool", "NoneType None"),
        ("softcap", 0.0, ValueError, POSITIVE, "0.0"),
        ("softcap", -30, ValueError, POSITIVE, "-30"),
        ("softcap", float("nan"), ValueError, POSITIVE, "nan"),
        ("softcap", "30", TypeError, "a Python number", "str '30'"),
        ("scale", 0, ValueError, POSITIVE, "0"),
        ("scale", float("inf"), ValueError, POSITIVE, "inf"),
        ("scale", True, TypeError, "a Python number", "bool True"),
        ("scale", None, TypeError, "a Python number", "NoneType None"),
    ],
)
def test_bad_settings_raise_errors(field, value, error, want, got):
    with pytest.raises(error, match="^" + re.escape(f"{field}: wanted {want}, got {got}") + "$"):
        te.OutputLayer(**{field: value})
    if field in ("softcap", "scale"):
        for function in (te.linear_logits, functools.partial(te.linear_cross_entropy, labels=IDS)):
            if value is not None:
                with pytest.raises(error, match=f"^{field}: wanted {want}, got {re.escape(got)}$"):
                    function(X, np.ones((VOCAB, WIDTH), np.float32), **{field: value})


@pytest.mark.parametrize("function", ["logits", "cross_entropy"])
def test_a_config_without_an_output_layer_has_no_logits(function):
    embedder = te.Embedder(config(None))
    params = embedder.init(KEY)
    assert set(params[TOKENS]) == {"embeddings"}
    with pytest.raises(
        ValueError,
        match=rf"^{function}: wanted config\.output, an OutputLayer \(or call te\.linear_{function} with other weights\), got None$",
    ):
        getattr(embedder, function)(params, *[X, IDS][: 1 + (function == "cross_entropy")])


def test_an_eager_loss_runs_no_haiku(monkeypatch):
    """It took most of the time of a call."""
    embedder, params = made(LAYERS["phi"])
    expected = jax.jit(functools.partial(embedder.cross_entropy, shift=True))(params, X, IDS)
    monkeypatch.setattr(hk, "transform", None)
    loss = embedder.cross_entropy(params, X, IDS.tolist(), shift=True)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert embedder.logits(params, X).shape == (*IDS.shape, VOCAB)


def test_a_word_is_not_a_reason_for_no_output_layer():
    want = "te.OutputLayer(...), None, or the reason why there is none, in words"
    with pytest.raises(ValueError, match=f"^output: wanted {re.escape(want)}, got 'tied'$"):
        te.EmbedderConfig(VOCAB, WIDTH, output="tied")
