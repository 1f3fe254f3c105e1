"""The Haiku modules: a list of them through every contract, and what each promises. Their values in
float64 are in test_draws_layers.py."""

import functools
import json
import os
import pathlib

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from compare import equal
from drawn import drawn
from refused import each_raises
from sample import IDS, KEY, TYPES

import transformer_embed as te

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "modules.json"
# TRANSFORMER_EMBED_REWRITE_GOLDEN=1 writes the file anew, to be read before it is kept.
REWRITE_GOLDEN = "TRANSFORMER_EMBED_REWRITE_GOLDEN"

X = np.linspace(-1, 1, 2 * 5 * 8, dtype=np.float32).reshape(2, 5, 8)
RATE = 0.1


def tokens(**options):
    return te.TokenEmbedding(11, 8, **options)


def added(scheme=te.Sinusoidal(), **options):  # noqa: B008 (it is frozen)
    return te.PositionalEncoding(scheme, 8, **{"dropout_rate": RATE} | options)


def whole(**fields):
    return te.TransformerEmbedding(te.EmbedderConfig(11, 8, pad_id=0, dropout_rate=RATE, **fields))


def bias(num_heads=1, **options):
    return te.RelativePositionBias(num_heads, **{"causal": False} | options)


LEARNED = {"scheme": te.Learned(max_len=16)}
BERT = {"scale": 1.0, "num_token_types": 2, "layer_norm_eps": 1e-12} | LEARNED
FLOAT16, BFLOAT16 = X.astype(np.float16), X.astype(jnp.bfloat16)
CASES = {
    "token_embedding": (tokens, {}, IDS),
    "token_embedding_padded": (tokens, {"pad_id": 0, "scale": 1.0, "out_of_range": "zero"}, IDS),
    "token_embedding_bfloat16_table": (tokens, {"param_dtype": "bfloat16"}, IDS),
    "positional_encoding_bfloat16": (added, {}, BFLOAT16),
    "learned_positional_encoding": (added, LEARNED, X),
    "learned_positional_encoding_float16": (added, LEARNED | {"param_dtype": "bfloat16"}, FLOAT16),
    "transformer_embedding_learned": (whole, LEARNED, IDS),
    "transformer_embedding_bert": (whole, BERT, IDS),
    "transformer_embedding_albert": (whole, BERT | {"embedding_width": 6}, IDS),
    # Its linear layer has parameters of float32.
    "transformer_embedding_float16": (
        whole,
        LEARNED | {"dtype": "float16", "embedding_width": 6},
        IDS,
    ),
}


def called(name, is_training=False, length=5):
    """What a module gives for its data."""
    build, options, data = CASES[name]
    given = {} if build is tokens else {"is_training": is_training}
    if "num_token_types" in options:
        given["token_types"] = TYPES[:, :length]
    return build(**options)(data[:, :length], **given)


def transformed(name, **options):
    return hk.transform(functools.partial(called, name, **options))


# --- The contracts of every module.


def parameter_tree(name, **options):
    params = jax.eval_shape(transformed(name, **options).init, KEY)
    return {
        path: {leaf: f"{a.dtype}{list(a.shape)}" for leaf, a in sorted(leaves.items())}
        for path, leaves in sorted(params.items())
    }


@pytest.mark.slow
def test_parameters_equal_the_golden_file():
    """Names, shapes and dtypes are an interface; they depend neither on the flag nor on the
    length."""
    trees = {name: parameter_tree(name) for name in CASES}
    if os.environ.get(REWRITE_GOLDEN) == "1":
        GOLDEN.write_text(json.dumps(trees, indent=1) + "\n", encoding="utf-8")
    assert trees == json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert trees == {name: parameter_tree(name, is_training=True, length=1) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_policy_on_the_module_itself(name):
    build, options, _ = CASES[name]
    kind = hk.transform(lambda: type(build(**options))).apply({}, None)
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float16")
    params = jax.eval_shape(transformed(name).init, KEY)
    with hk.mixed_precision.push_policy(kind, policy):
        tree = parameter_tree(name)
        got = jax.eval_shape(transformed(name).apply, params, None)
    assert tree.keys() == params.keys()
    assert all("float32" in text for leaf in tree.values() for text in leaf.values())
    assert got.dtype == jnp.float16


@pytest.mark.parametrize(
    "name",
    ["positional_encoding_bfloat16", "transformer_embedding_learned", "transformer_embedding_bert"],
)
def test_training_equals_hk_dropout_of_evaluation_which_draws_no_key(name):
    """Also the key that the next dropout draws."""
    params = drawn(transformed(name).init)

    def by_haiku():
        evaluated, key = called(name), hk.next_rng_key()
        return hk.dropout(key, RATE, evaluated), hk.next_rng_key(), evaluated

    def ours():
        return called(name, is_training=np.True_), hk.next_rng_key()

    @jax.jit
    def every(params):
        both = [hk.transform(each).apply(params, KEY) for each in (ours, by_haiku)]
        return *both, transformed(name).apply(params, None)

    (got, after), (want, next_key, evaluated), without_key = every(params)
    equal(got, want)
    assert (np.asarray(got) == 0).any()
    assert after == next_key
    equal(without_key, evaluated)


# --- Mixed precision. A model behind its input layer has 2 products: a linear layer on what the
# input layer returns, and the logits.


@hk.to_module
def model(build):
    x, output = build()
    return te.linear_logits(hk.Linear(8)(x), output())


def by_parts():
    embed = tokens(pad_id=0)
    return added(dropout_rate=0.5, **LEARNED)(embed(IDS), is_training=True), embed.output


def by_the_whole(**fields):
    embed = whole(**fields)
    return embed(IDS, is_training=True), embed.output


def flat(equations):
    for equation in equations:
        yield equation
        for leaf in jax.tree.leaves(list(equation.params.values())):
            yield from flat(getattr(getattr(leaf, "jaxpr", leaf), "eqns", ()))


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("build", "fields", "count"),
    [
        (by_parts, {}, 2),
        (by_the_whole, LEARNED | {"layer_norm_eps": 1e-6}, 2),
        (by_the_whole, {"embedding_width": 8}, 3),
        # A dtype asked for by name wins over the policy.
        (by_the_whole, {"dtype": "float32"}, 2),
    ],
)
def test_every_product_has_the_dtype_of_a_policy_on_the_model(build, fields, count, compute):
    pair = hk.transform(lambda: model()(functools.partial(build, **fields)))
    policy = jmp.get_policy(f"params=float32,compute={compute},output=float32")
    with hk.mixed_precision.push_policy(model, policy):
        params = drawn(pair.init)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        equations = flat(jax.make_jaxpr(pair.apply)(params, KEY).jaxpr.eqns)
    products = [each.invars for each in equations if each.primitive.name == "dot_general"]
    dtypes = [str(operand.aval.dtype) for operands in products for operand in operands]
    assert dtypes[0] == fields.get("dtype", compute)
    assert "dtype" in fields or dtypes == [compute] * (2 * count)


def test_a_batch_reads_encodings_that_are_computed_once():
    """See `computed_once`. A batch of one row would only copy them."""
    pair = hk.transform(lambda x: added()(x, is_training=False))
    rows = {(5, 8): 1, (1, 5, 8): 1, (2, 5, 8): 2, (1, 2, 5, 8): 2}
    for shape, count in rows.items():
        text = jax.jit(pair.apply).lower({}, None, np.resize(X, shape)).as_text()
        assert ("stablehlo.gather" in text) == (count == 2)


# --- Errors, by message.

REFUSED = {
    "tokens(w_init='')": "TypeError: w_init: ... got str ''",
    "bias(w_init='')": "TypeError: w_init: ... got str ''",
    "added(te.Learned(9), w_init='')": "TypeError: w_init: ... got str ''",
    "added(te.Sinusoidal(), w_init='zeros')": "ValueError: w_init: ... got str 'zeros'",
    "te.PositionalEncoding(te.Sinusoidal(), 0)": "ValueError: d_model: ... 1, got 0",
    "added(8)": "TypeError: scheme: ... got int 8",
    "bias(0)": "ValueError: num_heads: ... 1, got 0",
    "bias(dtype='int32')": "TypeError: dtype: ... got int32",
    "te.TransformerEmbedding(11)": "TypeError: config: ... got int 11",
    "added()(IDS, is_training=False)": "TypeError: x: ... got int32",
    "added()(X[..., :7], is_training=False)": "ValueError: x: ... 8], got shape [2, 5, 7]",
    "added()(X, is_training=1)": "TypeError: is_training: ... got int 1",
    "hk.transform(lambda: added()(X, is_training=True)).apply({}, None)": "ValueError: rng: ... got None",
    "added()(X, is_training=False, positions=np.zeros([3, 5], int))": "ValueError: positions: ... [2, 5], ... got shape [3, 5]",
    "added(te.Learned(16))(X, is_training=False, positions=X[0, :, 0])": "TypeError: positions: ... got float32",
    "added(te.Learned(4))(X, is_training=False)": "ValueError: ids or x: ... got 5",
    "added(te.Learned(16, at_padding=0))(X, is_training=False)": "ValueError: positions: ... got None",
    "added(te.Learned(16, pad_id=0))(X, is_training=False)": "ValueError: positions: ... got None",
    "whole()(3, is_training=False)": "ValueError: ids: ... got shape []",
    "whole(num_token_types=2)(IDS[0], is_training=False, token_types=TYPES)": "ValueError: token_types: ... [5], ... got shape [2, 5]",
}  # fmt: skip


def test_bad_arguments_are_refused():
    # Under eval_shape, nothing that comes before an error is compiled.
    jax.eval_shape(hk.transform(lambda: each_raises(REFUSED, globals())).init, KEY)
