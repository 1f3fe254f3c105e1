"""The Haiku modules: their values in float64, what each promises, and a list of modules through
every contract."""

import functools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from cases import few
from compare import equal
from drawn import drawn
from refused import refused
from sample import IDS, KEY, TYPES

import transformer_embed as te

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "modules.json"
# TRANSFORMER_EMBED_REWRITE_GOLDEN=1 writes the file anew, to be read before it is kept.
REWRITE_GOLDEN = "TRANSFORMER_EMBED_REWRITE_GOLDEN"

X = np.linspace(-1, 1, 2 * 5 * 8, dtype=np.float32).reshape(2, 5, 8)


def sinusoidal(d_model=8, *, dropout_rate=0.1, **fields):
    return te.PositionalEncoding(te.Sinusoidal(**fields), d_model, dropout_rate=dropout_rate)


SIZES = {"vocab_size": 11, "d_model": 8, "dropout_rate": 0.1}


def learned(max_len=16, d_model=8, **options):
    return te.PositionalEncoding(te.Learned(max_len), d_model, **{"dropout_rate": 0.1} | options)


def whole(**fields):
    return te.TransformerEmbedding(te.EmbedderConfig(**SIZES | fields))


def tokens(**options):
    return te.TokenEmbedding(11, 8, **options)


class Case(NamedTuple):
    name: str
    build: Callable[[], hk.Module]
    data: np.ndarray = IDS
    dtype: Any = jnp.float32
    token_types: np.ndarray | None = None

    def call(self, module, data, is_training):
        flag = {} if isinstance(module, te.TokenEmbedding) else {"is_training": is_training}
        types = {} if self.token_types is None else {"token_types": self.token_types}
        return module(data, **flag, **types)


def of_tokens(name, dtype=jnp.float32, **options):
    return Case(f"token_embedding{name}", lambda: tokens(dtype=dtype, **options), IDS, dtype)


def of_the_whole(name, dtype=jnp.float32, token_types=None, **fields):
    build = functools.partial(whole, pad_id=0, dtype=dtype, **fields)
    return Case(f"transformer_embedding_{name}", build, IDS, dtype, token_types)


HALF = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
LEARNED = {"scheme": te.Learned(max_len=16)}
BERT = {"scale": 1.0, "num_token_types": 2, "layer_norm_eps": 1e-12} | LEARNED
CASES = [
    of_tokens(""),
    of_tokens("_padded", pad_id=0, scale=1.0, out_of_range="zero"),
    of_tokens("_bfloat16_table", param_dtype=jnp.bfloat16, out_of_range="clip"),
    Case("positional_encoding_bfloat16", sinusoidal, X.astype(jnp.bfloat16), jnp.bfloat16),
    Case("learned_positional_encoding", learned, X),
    Case(
        "learned_positional_encoding_float16",
        lambda: learned(param_dtype=jnp.bfloat16),
        X.astype(np.float16),
        jnp.float16,
    ),
    of_the_whole("learned", **LEARNED),
    of_the_whole("bert", token_types=TYPES, **BERT),
    of_the_whole("albert", token_types=TYPES, embedding_width=6, **BERT),
    # Its linear layer has parameters of float32.
    of_the_whole("float16", dtype=jnp.float16, embedding_width=6, **LEARNED),
]
BY_NAME = {case.name: case for case in CASES}
every_module = pytest.mark.parametrize("case", CASES)
few_modules = pytest.mark.parametrize("case", few(CASES, 4))


def transformed(case, is_training=False):
    return hk.transform(lambda data: case.call(case.build(), data, is_training))


@functools.cache
def params_of(name):
    return drawn(transformed(BY_NAME[name]).init, BY_NAME[name].data)


# --- The contracts of every module.


def parameter_tree(case, is_training=False, length=5):
    types = None if case.token_types is None else case.token_types[:, :length]
    init = transformed(case._replace(token_types=types), is_training).init
    params = jax.eval_shape(init, KEY, case.data[:, :length])
    return {
        path: {name: f"{a.dtype}{list(a.shape)}" for name, a in sorted(leaf.items())}
        for path, leaf in sorted(params.items())
    }


@pytest.mark.slow
def test_parameters_are_those_of_the_golden_file():
    """Names, shapes and dtypes are an interface; they depend neither on the flag nor on the
    length."""
    trees = {case.name: parameter_tree(case) for case in CASES}
    if os.environ.get(REWRITE_GOLDEN) == "1":
        GOLDEN.write_text(json.dumps(trees, indent=1) + "\n", encoding="utf-8")
    assert trees == json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert trees == {case.name: parameter_tree(case, True, length=1) for case in CASES}


# --- Dtypes and mixed precision. A model behind its input layer has 2 products: a linear layer on
# what the input layer returns, and the logits.


class Model(hk.Module):
    def __init__(self, build):
        super().__init__(name="model")
        self.build = build

    def __call__(self, ids):
        x, output = self.build(ids)
        return te.linear_logits(hk.Linear(8)(x), output())


def by_parts(ids):
    embed = tokens(pad_id=0)
    return learned(dropout_rate=0.5)(embed(ids), is_training=True), embed.output


def by_the_whole(ids, **fields):
    embed = whole(pad_id=0, **fields)
    return embed(ids, is_training=True), embed.output


def flat(equations):
    for equation in equations:
        yield equation
        for leaf in jax.tree.leaves(list(equation.params.values())):
            yield from flat(getattr(getattr(leaf, "jaxpr", leaf), "eqns", ()))


def products(build, compute):
    """The dtypes of each matrix product of the model under a policy."""
    pair = hk.transform(lambda ids: Model(build)(ids))
    policy = jmp.get_policy(f"params=float32,compute={compute},output=float32")
    with hk.mixed_precision.push_policy(Model, policy):
        params = drawn(pair.init, IDS)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
        equations = flat(jax.make_jaxpr(pair.apply)(params, KEY, IDS).jaxpr.eqns)
        found = [each for each in equations if each.primitive.name == "dot_general"]
    return [tuple(operand.aval.dtype for operand in each.invars) for each in found]


@pytest.mark.parametrize("compute", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("build", "fields"),
    [
        (by_parts, {}),
        (by_the_whole, LEARNED | {"layer_norm_eps": 1e-6}),
        (by_the_whole, {"embedding_width": 8}),
    ],
)
def test_every_product_has_the_dtype_of_a_policy_on_the_model(build, fields, compute):
    count = 2 + ("embedding_width" in fields)
    found = products(functools.partial(build, **fields), jnp.dtype(compute).name)
    assert found == [(compute, compute)] * count


def test_a_dtype_asked_for_by_name_wins_over_the_policy():
    build = functools.partial(by_the_whole, dtype="float32")
    assert products(build, "bfloat16")[0][0] == jnp.float32


@every_module
def test_a_policy_on_the_module_itself(case):
    cls = type(hk.transform(lambda _: case.build()).apply({}, None, None))
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float16")
    with hk.mixed_precision.push_policy(cls, policy):
        tree, params = parameter_tree(case), params_of(case.name)
        assert tree.keys() == params.keys()
        assert all("float32" in text for leaf in tree.values() for text in leaf.values())
        got = jax.eval_shape(transformed(case).apply, params, None, case.data)
    assert got.dtype == jnp.float16


def test_a_batch_reads_encodings_that_are_computed_once():
    """See `computed_once`. A batch of one row would only copy them."""
    pair = hk.transform(lambda x: sinusoidal()(x, is_training=False))
    for batch in 1, 2:
        text = jax.jit(pair.apply).lower({}, None, X[:batch]).as_text()
        assert ("stablehlo.gather" in text) == (batch == 2)


# --- Dropout.


@few_modules
def test_evaluation_takes_no_key_and_draws_none(case):
    def function(data):
        result = case.call(case.build(), data, is_training=False)
        return result, hk.maybe_next_rng_key()

    apply = functools.partial(hk.transform(function).apply, params_of(case.name))
    with_key, after = apply(KEY, case.data)
    without_key, no_key = apply(None, case.data)
    assert no_key is None
    assert after == hk.transform(hk.next_rng_key).apply({}, KEY)
    equal(with_key, without_key)


@pytest.mark.parametrize(
    "name",
    ["positional_encoding_bfloat16", "transformer_embedding_learned", "transformer_embedding_bert"],
)
def test_training_equals_hk_dropout_of_evaluation(name):
    """Also the key that the next dropout draws."""
    case, key = BY_NAME[name], jax.random.key(2)

    def by_haiku(data):
        evaluated = case.call(case.build(), data, is_training=False)
        dropped = jax.jit(hk.dropout, static_argnums=1)(hk.next_rng_key(), 0.1, evaluated)
        return dropped, hk.next_rng_key()

    def ours(data):
        return case.call(case.build(), data, is_training=np.True_), hk.next_rng_key()

    (got, after), (want, next_key) = (
        hk.transform(function).apply(params_of(name), key, case.data)
        for function in (ours, by_haiku)
    )
    equal(got, want)
    assert (np.asarray(got) == 0).any()
    assert after == next_key


# --- The parameters of a checkpoint under the module's own path.


CHECKPOINT = te.EmbedderConfig(
    11, 8, num_token_types=2, layer_norm_eps=1e-6, embedding_width=6, **LEARNED
)


def in_a_model(initial_params):
    def model(ids):
        embed = te.TransformerEmbedding(CHECKPOINT, initial_params=initial_params, name="embed")
        return hk.Linear(3)(embed(ids, is_training=False, token_types=TYPES))

    return hk.transform(model)


@pytest.mark.slow
def test_a_checkpoint_s_parameters_start_a_module_inside_a_model():
    params = drawn(te.Embedder(CHECKPOINT).init)
    started = in_a_model(params).init(KEY, IDS)
    inside = {path.replace("transformer_embedding", "embed"): params[path] for path in params}
    assert started.keys() == {*inside, "linear"}
    equal({path: started[path] for path in inside}, inside)
    # What is trained wins over what it started from.
    moved = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf) + 1), started)
    got, want, before = (
        in_a_model(initial).apply(tree, None, IDS)
        for initial, tree in ((params, moved), (None, moved), (params, started))
    )
    equal(got, want)
    assert not np.array_equal(got, before)


# --- RelativePositionBias


def test_relative_position_bias_is_the_table_at_the_buckets():
    options = {"num_buckets": 8, "max_distance": 20, "causal": True}
    bias = hk.transform(lambda *both: te.RelativePositionBias(3, **options)(*both))
    queries, keys = np.array([[4, 5], [30, 0]]), np.arange(6)
    params = drawn(bias.init, queries, keys)
    leaf = params["relative_position_bias"]["embeddings"]
    assert (leaf.shape, leaf.dtype) == ((8, 3), jnp.float32)
    buckets = np.asarray(te.relative_position_buckets(queries, keys, **options))
    want = np.moveaxis(np.asarray(leaf)[buckets], -1, 1)
    equal(bias.apply(params, None, queries, keys), want)


# --- Errors, by message.


def bias(num_heads=1, **options):
    return te.RelativePositionBias(num_heads, **options)([0], [0])


TOO_LONG = "ids or x: ... got 5"
AT = {"is_training": False}
apart = functools.partial(te.Learned, 16)


def added(x=X, scheme=None, **options):
    return te.PositionalEncoding(scheme or te.Sinusoidal(), 8, dropout_rate=0.1)(x, **AT | options)


def embedded(ids=IDS, fields=(), **options):
    return whole(**dict(fields))(ids, **AT | options)


TYPED = {"num_token_types": 2}


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        *[(functools.partial(build, w_init=""), TypeError, "w_init: ... got str ''") for build in (tokens, learned, bias)],
        (lambda: sinusoidal(0), ValueError, "d_model: ... 1, got 0"),
        (lambda: te.PositionalEncoding(8, 8), TypeError, "scheme: ... got int 8"),
        (lambda: te.PositionalEncoding(te.Sinusoidal(), 8, w_init="zeros"), ValueError,
         "w_init: ... got str 'zeros'"),
        (lambda: bias(0), ValueError, "num_heads: ... 1, got 0"),
        (lambda: bias(dtype=jnp.int32), TypeError, "dtype: ... got int32"),
        (lambda: te.TransformerEmbedding(11), TypeError,
         "config: ... got int 11"),
        (lambda: added(IDS), TypeError, "x: ... got int32"),
        (lambda: added(X[..., :7]), ValueError, "x: ... 8], got shape [2, 5, 7]"),
        (lambda: added(positions=np.zeros([3, 5], int)), ValueError, "positions: ... [2, 5], ... got shape [3, 5]"),
        (lambda: added(scheme=apart(), positions=jnp.arange(5.0)), TypeError, "positions: ... got float32"),
        (lambda: added(scheme=te.Learned(4)), ValueError, TOO_LONG),
        *[(functools.partial(added, scheme=apart(**{name: 0})), ValueError,
           "positions: ... got None") for name in ("at_padding", "pad_id")],
        (lambda: added(is_training=1), TypeError, "is_training: ... got int 1"),
        (lambda: hk.transform(lambda: added(is_training=True)).apply({}, None), ValueError,
         "rng: ... got None"),
        (lambda: embedded(3), ValueError, "ids: ... got shape []"),
        (lambda: embedded(IDS[0], TYPED, token_types=TYPES), ValueError,
         "token_types: ... [5], ... got shape [2, 5]"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(build, error, text):
    with refused(error, text):
        hk.transform(build).init(KEY)
