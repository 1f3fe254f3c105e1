"""The Haiku modules: one descriptor list through every contract, then what each module promises."""

import contextlib
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from drawn import drawn

import transformer_embed as te

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
# TRANSFORMER_EMBED_REWRITE_GOLDEN=1 pytest tests/test_modules.py -k golden: writes the files anew,
# to be read before they are kept.
REWRITE_GOLDEN = "TRANSFORMER_EMBED_REWRITE_GOLDEN"

# XLA may fuse a product and a sum, which spares one rounding (half an ulp) of each part; a norm
# adds two reductions of 8 terms and a division. In units of the last place of the largest value.
FUSION_ULPS = {jnp.float32: 8, jnp.bfloat16: 1, jnp.float16: 1}
# A float64 reference: one rounding each for the encoding, the factor, the product and two sums;
# with a norm of 8 terms some 8 more.
ROUNDINGS = 8
# A linear layer over 6 channels sums 6 more rounded products.
ROUNDINGS_WIDENED = 16

KEY = jax.random.key(0)
IDS = np.array([[5, 6, 7, 0, 3], [1, 2, 10, 4, 4]], np.int32)
X = np.linspace(-1, 1, 2 * 5 * 8, dtype=np.float32).reshape(2, 5, 8)
WEIGHTS = np.sin(np.arange(80, dtype=np.float32)).reshape(2, 5, 8)
TYPES = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]], np.int32)


def sinusoidal(d_model, *, dropout_rate=0.1, **fields):
    return te.PositionalEncoding(te.Sinusoidal(**fields), d_model, dropout_rate=dropout_rate)


def learned(max_len, d_model, **options):
    return te.PositionalEncoding(te.Learned(max_len), d_model, **options)


def whole(*sizes, **fields):
    return te.TransformerEmbedding(te.EmbedderConfig(*sizes, **fields))


class Descriptor(NamedTuple):
    name: str
    module: Callable[[], hk.Module]
    data: np.ndarray = IDS
    dtype: Any = jnp.float32
    token_types: np.ndarray | None = None
    has_flag: bool = True

    def call(self, module, data, is_training):
        flag = {"is_training": is_training} if self.has_flag else {}
        types = {} if self.token_types is None else {"token_types": self.token_types}
        return module(data, **flag, **types)


def embedding(name, dtype=jnp.float32, token_types=None, **arguments):
    build = functools.partial(whole, 11, 8, pad_id=0, dtype=dtype, **arguments)
    return Descriptor(f"transformer_embedding_{name}", build, dtype=dtype, token_types=token_types)


def tokens(name, dtype=jnp.float32, **arguments):
    build = functools.partial(te.TokenEmbedding, 11, 8, dtype=dtype, **arguments)
    return Descriptor(f"token_embedding{name}", build, dtype=dtype, has_flag=False)


BERT = {
    "scheme": te.Learned(max_len=16),
    "scale": False,
    "num_token_types": 2,
    "layer_norm_eps": 1e-12,
}
DESCRIPTORS = [
    tokens(""),
    tokens("_padded", pad_id=0, scale=False, out_of_range="zero"),
    tokens("_bfloat16", dtype=jnp.bfloat16),
    tokens("_bfloat16_table", param_dtype=jnp.bfloat16, out_of_range="clip"),
    tokens("_one_hot", lookup_style="one_hot"),
    Descriptor("positional_encoding", functools.partial(sinusoidal, 8), X),
    Descriptor(
        "positional_encoding_sin_cos",
        functools.partial(sinusoidal, 8, layout="sin_cos", shift=1),
        X,
    ),
    Descriptor(
        "positional_encoding_bfloat16",
        functools.partial(sinusoidal, 8),
        X.astype(jnp.bfloat16),
        jnp.bfloat16,
    ),
    Descriptor("learned_positional_encoding", functools.partial(learned, 16, 8), X),
    Descriptor(
        "learned_positional_encoding_float16",
        functools.partial(learned, 16, 8, param_dtype=jnp.bfloat16),
        X.astype(np.float16),
        jnp.float16,
    ),
    embedding("sinusoidal"),
    embedding("learned", scheme=te.Learned(max_len=16)),
    embedding("no_positions", scheme=None),
    embedding("grid", scheme=te.SinusoidalGrid((2, 3))),
    embedding("bert", token_types=TYPES, **BERT),
    embedding("albert", token_types=TYPES, embedding_width=6, **BERT),
    embedding("layer_norm", layer_norm_eps=1e-6, dropout_rate=0.0),
    embedding("bfloat16", dtype=jnp.bfloat16, param_dtype=jnp.bfloat16),
    embedding("float16", dtype=jnp.float16, scheme=te.Learned(max_len=16)),
]
BY_NAME = {descriptor.name: descriptor for descriptor in DESCRIPTORS}


def over(descriptors):
    return pytest.mark.parametrize(
        "descriptor", descriptors, ids=[descriptor.name for descriptor in descriptors]
    )


NOT_DROPPED_LAST = {"transformer_embedding_albert", "transformer_embedding_layer_norm"}
every_module = over(DESCRIPTORS)
flagged_modules = over([descriptor for descriptor in DESCRIPTORS if descriptor.has_flag])
dropping_modules = over(
    [
        descriptor
        for descriptor in DESCRIPTORS
        if descriptor.has_flag and descriptor.name not in NOT_DROPPED_LAST
    ]
)
both_flags = pytest.mark.parametrize("is_training", [False, True])


def transformed(descriptor, is_training=False):
    return hk.transform(lambda data: descriptor.call(descriptor.module(), data, is_training))


@functools.cache
def params_of(name):
    return drawn(transformed(BY_NAME[name]).init, BY_NAME[name].data)


@functools.cache
def compiled(name):
    """The compiled apply of a descriptor, to an evaluated and a trained result, and the shapes that
    it was traced with."""
    descriptor, traces = BY_NAME[name], []

    def apply(params, key, data):
        traces.append(data.shape)
        return tuple(
            transformed(descriptor, is_training).apply(params, key, data)
            for is_training in (False, True)
        )

    return jax.jit(apply), traces


def loss(apply, params, data):
    """Weighted, for the plain sum of squares after a norm is a constant."""
    return (apply(params, KEY, data).astype(jnp.float32) * WEIGHTS).sum()


@functools.cache
def training_gradient(name):
    """Of the loss to the parameters, and to the data where they have a gradient."""
    descriptor = BY_NAME[name]
    of_data = jnp.issubdtype(descriptor.data.dtype, jnp.floating)
    function = functools.partial(loss, transformed(descriptor, is_training=True).apply)
    return jax.jit(jax.grad(function, argnums=(0, 1) if of_data else (0,)))(
        params_of(name), descriptor.data
    )


def assert_within_ulps(got, want, dtype):
    assert got.dtype == want.dtype == dtype
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    largest = np.abs(want).max()
    np.testing.assert_allclose(
        got, want, rtol=0, atol=FUSION_ULPS[dtype] * float(jnp.finfo(dtype).eps) * largest
    )


def message(name, want, got):
    """The whole of a message; jax adds a note on its tracebacks, on a new line."""
    return "^" + re.escape(f"{name}: wanted {want}, got {got}") + r"(?:\n|$)"


def evaluate(function, data, params=None):
    """The value of a function that makes a module, without a key."""
    pair = hk.transform(function)
    return pair.apply(drawn(pair.init, data) if params is None else params, None, data)


def embed(ids, vocab_size, d_model, params=None, **options):
    def function(ids):
        return te.TokenEmbedding(vocab_size, d_model, **options)(ids)

    return evaluate(function, ids, params)


# The matrix.


@pytest.mark.slow
@every_module
@both_flags
def test_jit_equals_eager(descriptor, is_training):
    arguments = params_of(descriptor.name), jax.random.key(1), descriptor.data
    got, want = (
        compiled(descriptor.name)[0](*arguments)[is_training],
        transformed(descriptor, is_training).apply(*arguments),
    )
    assert_within_ulps(got, want, descriptor.dtype)


@every_module
@both_flags
def test_eval_shape_gives_the_shape_and_dtype_of_the_call(descriptor, is_training):
    apply = transformed(descriptor, is_training).apply
    shape = jax.eval_shape(apply, params_of(descriptor.name), KEY, descriptor.data)
    assert (shape.shape, shape.dtype) == ((2, 5, 8), descriptor.dtype)


@pytest.mark.slow
@every_module
def test_vmap_over_models_and_keys_equals_a_loop(descriptor):
    each = [
        jax.tree.map(lambda a, factor=factor: factor * np.asarray(a), params_of(descriptor.name))
        for factor in (1, -1, 2)
    ]
    params = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    keys = jax.random.split(KEY, 3)
    loop = np.stack(
        [
            compiled(descriptor.name)[0](params, key, descriptor.data)[True]
            for params, key in zip(each, keys, strict=True)
        ]
    )
    apply = transformed(descriptor, is_training=True).apply
    mapped = jax.jit(jax.vmap(apply, in_axes=(0, 0, None)))(params, keys, descriptor.data)
    assert_within_ulps(mapped, loop, descriptor.dtype)
    assert not np.array_equal(loop[0], loop[1])


@pytest.mark.slow
@every_module
def test_gradients_are_finite(descriptor):
    leaves = [
        np.asarray(leaf).astype(np.float64)
        for leaf in jax.tree.leaves(training_gradient(descriptor.name))
    ]
    assert leaves
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert any((leaf != 0).any() for leaf in leaves)


@every_module
def test_a_module_is_traced_once_for_a_shape(descriptor):
    apply, traces = compiled(descriptor.name)
    for seed, data in enumerate((descriptor.data, descriptor.data[::-1].copy())):
        apply(params_of(descriptor.name), jax.random.key(seed), data)
    assert traces == [descriptor.data.shape]


@every_module
def test_lists_and_numpy_arrays_are_taken(descriptor):
    apply = functools.partial(transformed(descriptor).apply, params_of(descriptor.name), None)
    want = apply(jnp.asarray(descriptor.data))
    got = apply(descriptor.data)
    assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(got, want)
    if descriptor.data.dtype.itemsize == 4:
        np.testing.assert_array_equal(apply(descriptor.data.tolist()), want)
        assert apply(descriptor.data.tolist()).dtype == descriptor.dtype


def parameter_tree(descriptor, is_training=False, length=5):
    types = None if descriptor.token_types is None else descriptor.token_types[:, :length]
    init = transformed(descriptor._replace(token_types=types), is_training).init
    params = jax.eval_shape(init, KEY, descriptor.data[:, :length])
    return {
        path: {name: f"{a.dtype}{list(a.shape)}" for name, a in sorted(leaf.items())}
        for path, leaf in sorted(params.items())
    }


@every_module
def test_golden_parameter_tree(descriptor):
    """Names, shapes and dtypes of parameters are an interface; they depend neither on the flag nor
    on the length."""
    file = GOLDEN / f"{descriptor.name}.json"
    tree = parameter_tree(descriptor)
    if os.environ.get(REWRITE_GOLDEN) == "1":
        file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    assert tree == json.loads(file.read_text(encoding="utf-8"))
    assert tree == parameter_tree(descriptor, is_training=True)
    assert tree == parameter_tree(descriptor, length=1)


@pytest.mark.slow
@every_module
def test_remat_changes_neither_values_nor_gradients(descriptor):
    def rematerialised(data):
        module = descriptor.module()
        return hk.remat(lambda data: descriptor.call(module, data, is_training=True))(data)

    gradient = jax.jit(jax.grad(functools.partial(loss, hk.transform(rematerialised).apply)))
    got, want = (
        gradient(params_of(descriptor.name), descriptor.data),
        training_gradient(descriptor.name)[0],
    )
    assert jax.tree.structure(got) == jax.tree.structure(want)
    # 16-bit data round each of the 10 terms of a gradient once.
    eps = max(
        float(jnp.finfo(dtype).eps)
        for dtype in (descriptor.dtype, *(leaf.dtype for leaf in jax.tree.leaves(got)))
    )
    wide_got, wide_want = (
        [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)] for tree in (got, want)
    )
    for leaf, wanted in zip(wide_got, wide_want, strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol=0, atol=10 * eps * np.abs(wanted).max())


@pytest.mark.slow
@every_module
def test_haiku_vmap_over_the_batch(descriptor):
    def mapped(data):
        module = descriptor.module()

        def one(data, token_types):
            return descriptor._replace(token_types=token_types).call(
                module, data, is_training=False
            )

        return hk.vmap(one, split_rng=False)(data, descriptor.token_types)

    apply = jax.jit(hk.transform(mapped).apply)
    want, _ = compiled(descriptor.name)[0](params_of(descriptor.name), KEY, descriptor.data)
    assert_within_ulps(
        apply(params_of(descriptor.name), None, descriptor.data), want, descriptor.dtype
    )


POLICY = jmp.get_policy("params=float32,compute=bfloat16,output=float16")


@every_module
def test_mixed_precision_policy(descriptor):
    cls = type(hk.transform(lambda _: descriptor.module()).apply({}, None, None))
    with hk.mixed_precision.push_policy(cls, POLICY):
        tree = parameter_tree(descriptor)
        result = jax.jit(transformed(descriptor).apply)(
            params_of(descriptor.name), None, descriptor.data
        )
    assert result.dtype == jnp.float16
    assert np.isfinite(result).all()
    assert tree.keys() == params_of(descriptor.name).keys()
    assert {text.split("[")[0] for leaf in tree.values() for text in leaf.values()} <= {"float32"}


# The 7 products of a model behind its input layer, each on what the layer before it returns: query,
# key, value, scores, the weighted sum, a feed-forward layer, the logits.


class Model(hk.Module):
    """A small model; what stands in for the input layer is one of ours, or hk.Embed."""

    def __init__(self, build):
        super().__init__(name="model")
        self.build = build

    def __call__(self, ids):
        x, logits = self.build(ids)
        query, key, value = (hk.Linear(8, name=name)(x) for name in ("query", "key", "value"))
        weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", query, key))
        return logits(hk.Linear(8)(jnp.einsum("bts,bsd->btd", weights, value)))


def model(build):
    def function(ids):
        return Model(build)(ids)

    return hk.transform(function)


def by_hk_embed(ids):
    embed = hk.Embed(11, 8)
    return embed(ids), lambda x: x @ embed.embeddings.T


def by_tokens(ids):
    embed = te.TokenEmbedding(11, 8, pad_id=0)
    return embed(ids), embed.logits


def by_tokens_and_positions(ids):
    embed = te.TokenEmbedding(11, 8)
    return te.PositionalEncoding(te.Learned(16), 8, dropout_rate=0.5)(
        embed(ids), is_training=True
    ), embed.logits


def by_the_whole(ids, **fields):
    embed = whole(11, 8, pad_id=0, **fields)
    return embed(ids, is_training=True), embed.logits


def products(build, params):
    """The dtypes that each matrix product of the model's program takes, the input layer's own left
    out."""
    equations = jax.make_jaxpr(model(build).apply)(params, KEY, IDS).jaxpr.eqns
    return [
        tuple(v.aval.dtype for v in e.invars)
        for e in flat(equations)
        if e.primitive.name == "dot_general"
    ]


def flat(equations):
    for equation in equations:
        yield equation
        for leaf in jax.tree.leaves(list(equation.params.values())):
            yield from flat(getattr(getattr(leaf, "jaxpr", leaf), "eqns", ()))


BUILDS = {
    "hk_embed": by_hk_embed,
    "tokens": by_tokens,
    "tokens_and_positions": by_tokens_and_positions,
    "whole": by_the_whole,
    "norm": functools.partial(by_the_whole, scheme=te.Learned(16), layer_norm_eps=1e-6),
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_every_product_behind_the_layer_is_bfloat16_under_a_policy_on_the_model(build):
    with hk.mixed_precision.push_policy(
        Model, jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    ):
        params = drawn(model(build).init, IDS)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
        assert products(build, params) == [(jnp.bfloat16, jnp.bfloat16)] * 7
    assert products(build, params) == [(jnp.float32, jnp.float32)] * 7


def test_a_narrow_table_is_widened_in_the_dtype_of_the_policy():
    build = functools.partial(by_the_whole, embedding_width=8)
    with hk.mixed_precision.push_policy(
        Model, jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    ):
        params = drawn(model(build).init, IDS)
        assert products(build, params) == [(jnp.bfloat16, jnp.bfloat16)] * 8


def test_a_dtype_asked_for_by_name_wins_over_the_policy():
    build = functools.partial(by_the_whole, dtype="float32")
    with hk.mixed_precision.push_policy(
        Model, jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    ):
        assert products(build, drawn(model(build).init, IDS))[0][0] == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_without_a_policy_the_result_has_the_dtype_of_the_table(dtype):
    def by_the_whole(ids):
        return whole(11, 8, param_dtype=dtype, num_token_types=2)(
            ids, is_training=False, token_types=TYPES
        )

    assert jax.eval_shape(lambda: embed(IDS, 11, 8, param_dtype=dtype)).dtype == dtype
    assert jax.eval_shape(lambda: evaluate(by_the_whole, IDS)).dtype == dtype
    params = jax.eval_shape(
        lambda: relative_position_bias(2, param_dtype=dtype).init(KEY, [0], [0])
    )
    assert params["relative_position_bias"]["embeddings"].dtype == dtype


def test_parameters_cast_by_hand_are_a_policy_too():
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16),
        params_of("transformer_embedding_learned"),
    )
    module = hk.transform(
        lambda ids: whole(11, 8, pad_id=0, scheme=te.Learned(16))(ids, is_training=False)
    )
    assert jax.eval_shape(module.apply, params, None, IDS).dtype == jnp.bfloat16


# The loss of the tied output layer.


@pytest.mark.parametrize(
    "options",
    [{}, {"mask": IDS > 3, "label_smoothing": 0.1, "reduction": "sum", "chunk_size": 3}],
    ids=["", "options"],
)
def test_cross_entropy_of_the_modules_is_that_of_their_table(options):
    def of_tokens(x):
        return te.TokenEmbedding(11, 8, pad_id=0).cross_entropy(x, IDS, **options)

    def of_the_whole(x):
        return whole(11, 8, pad_id=0).cross_entropy(x, IDS, **options)

    embedder = te.Embedder(te.EmbedderConfig(11, 8, pad_id=0))
    params = drawn(embedder.init)
    table = params["transformer_embedding/~/token_embedding"]["embeddings"]
    value, gradient = jax.value_and_grad(
        lambda table: te.linear_cross_entropy(X, table, IDS, pad_id=0, **options)
    )(table)
    assert np.asarray(gradient).any()
    for function, own in (
        (
            lambda params: hk.transform(of_tokens).apply(params, None, X),
            {"token_embedding": {"embeddings": table}},
        ),
        (lambda params: hk.transform(of_the_whole).apply(params, None, X), params),
        (lambda params: embedder.cross_entropy(params, X, IDS, **options), params),
    ):
        found, gradients = jax.value_and_grad(function)(own)
        np.testing.assert_array_equal(found, value)
        (found,) = jax.tree.leaves(gradients)
        np.testing.assert_array_equal(found, gradient)


# The parameters of a checkpoint under the module's own path.


CHECKPOINT = te.EmbedderConfig(
    11, 8, num_token_types=2, layer_norm_eps=1e-6, embedding_width=6, scheme=te.Learned(16)
)


def in_a_model(initial_params, config=CHECKPOINT):
    def model(ids, token_types=TYPES):
        embed = te.TransformerEmbedding(config, initial_params=initial_params, name="embed")
        return hk.Linear(3)(embed(ids, is_training=False, token_types=token_types))

    def transformed(ids):
        return hk.to_module(model)("decoder")(ids)

    return hk.transform(transformed)


def test_a_checkpoint_s_parameters_start_a_module_inside_a_model():
    params = drawn(te.Embedder(CHECKPOINT).init)
    started = in_a_model(params).init(KEY, IDS)
    inside = {
        path.replace("transformer_embedding", "decoder/embed"): leaf
        for path, leaf in params.items()
    }
    assert started.keys() == {*inside, "decoder/linear"}
    jax.tree.map(np.testing.assert_array_equal, {path: started[path] for path in inside}, inside)
    # What is trained wins over what it started from.
    moved = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf) + 1), started)
    assert not np.array_equal(
        in_a_model(params).apply(moved, None, IDS), in_a_model(params).apply(started, None, IDS)
    )
    np.testing.assert_array_equal(
        in_a_model(params).apply(moved, None, IDS), in_a_model(None).apply(moved, None, IDS)
    )


def test_initial_parameters_of_another_config_are_refused():
    params = drawn(te.Embedder(CHECKPOINT).init)
    tokens = "transformer_embedding/~/token_embedding"
    table = params[tokens]["embeddings"]
    shape = "token_embedding/embeddings [11, 6]"

    def start(initial_params):
        return in_a_model(initial_params).init(KEY, IDS)

    for others, want, got in [
        ({tokens: {"w": table, **params[tokens]}}, "no others", "token_embedding/w [11, 6]"),
        ({tokens: {"embeddings": table[:10]}}, shape, "token_embedding/embeddings [10, 6]"),
        (
            {"a/token_embedding": params[tokens]},
            "one token_embedding with embeddings",
            f"a/token_embedding and {tokens}",
        ),
    ]:
        with pytest.raises(ValueError, match=message("initial_params", want, got)):
            start({**params, **others})
    with pytest.raises(ValueError, match=r"wanted layer_norm/offset \[6\], .*, got none of them$"):
        start({tokens: params[tokens]})
    with pytest.raises(
        TypeError,
        match=r"^initial_params: wanted a Haiku parameter tree, a dict of dicts, got list \[",
    ):
        start([params])


# jax's strict modes.

STRICT = {
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_debug_nans": True,
    "jax_debug_key_reuse": True,
    "jax_legacy_prng_key": "error",
    "jax_transfer_guard": "disallow",
}


@contextlib.contextmanager
def strict(*options):
    before = {option: getattr(jax.config, option) for option in options}
    for option in options:
        jax.config.update(option, STRICT[option])
    try:
        yield
    finally:
        for option, value in before.items():
            jax.config.update(option, value)


def total(x):
    return sum(leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(x))


def trace_all_of(descriptor):
    """Initialisation, evaluation, and training with its gradient."""
    params, data = params_of(descriptor.name), jax.device_put(descriptor.data)
    evaluate, train = (transformed(descriptor, is_training) for is_training in (False, True))
    jax.make_jaxpr(evaluate.init)(KEY, data)
    jax.make_jaxpr(evaluate.apply)(params, KEY, data)
    jax.make_jaxpr(jax.value_and_grad(lambda params: total(train.apply(params, KEY, data))))(params)


@every_module
def test_all_strict_modes_of_jax_at_once(descriptor):
    """Traced and compiled, for jax itself transfers the constants of what runs operation by
    operation."""
    params, key, data = (
        params_of(descriptor.name),
        jax.random.key(1),
        jax.device_put(descriptor.data),
    )
    with strict(*STRICT):
        trace_all_of(descriptor)
    apply, _ = compiled(descriptor.name)
    apply(params, key, data)
    with strict("jax_transfer_guard"):
        apply(params, key, data)


@pytest.mark.slow
@pytest.mark.parametrize("option", STRICT)
@every_module
def test_each_strict_mode_of_jax(descriptor, option):
    params, key, data = (
        params_of(descriptor.name),
        jax.random.key(1),
        jax.device_put(descriptor.data),
    )
    with strict(option):
        trace_all_of(descriptor)
    if option == "jax_debug_nans":
        with strict(option):
            jax.block_until_ready(compiled(descriptor.name)[0](params, key, data))


HEADS = {
    "logits": lambda x: whole(11, 8, pad_id=0).logits(x),
    "cross_entropy": lambda x: whole(11, 8, pad_id=0).cross_entropy(
        x, IDS, mask=IDS != 3, label_smoothing=0.1
    ),
    "relative_position_bias": lambda x: te.RelativePositionBias(8)(range(5), range(5)),
    "relative_position_bias_16_bits": lambda x: te.RelativePositionBias(
        8, bidirectional=False, dtype=jnp.bfloat16
    )([[7]], range(5)),
}


@pytest.mark.parametrize("name", HEADS)
def test_output_layers_and_biases_under_all_strict_modes_of_jax_at_once(name):
    pair, x = (
        hk.without_apply_rng(hk.transform(HEADS[name])),
        jax.device_put(X.astype(jnp.bfloat16)),
    )
    params = drawn(pair.init, x)
    with strict(*STRICT):
        jax.make_jaxpr(pair.init)(KEY, x)
        jax.make_jaxpr(
            jax.value_and_grad(lambda params, x: total(pair.apply(params, x)), argnums=(0, 1))
        )(params, x)


# Layers.


def stacked(is_training, dropout_rate=0.5):
    def function(x):
        def layer(x):
            return sinusoidal(8, dropout_rate=dropout_rate)(x, is_training=is_training)

        return hk.layer_stack(3)(layer)(x)

    return hk.transform(function)


def test_layer_stack_adds_once_a_layer():
    pair = stacked(is_training=False)
    assert hk.data_structures.tree_size(jax.eval_shape(pair.init, KEY, X)) == 0
    table = np.asarray(te.sinusoidal_table(5, 8))
    assert_within_ulps(pair.apply({}, None, X), ((X + table) + table) + table, jnp.float32)


def test_layer_stack_gives_each_layer_its_key():
    result = np.asarray(
        stacked(is_training=True).apply({}, KEY, np.full([64, 5, 8], 1e3, np.float32))
    )
    # With one key for all layers an element survives three times (8000) or never; with three keys
    # it may be dropped last alone.
    survived = (result > 7000).mean()
    expected, elements = 1 / 8, result.size
    assert abs(survived - expected) < 5 * np.sqrt(expected * (1 - expected) / elements)


def test_two_dropouts_use_two_keys():
    def function(x):
        first, second = sinusoidal(8, dropout_rate=0.5), sinusoidal(8, dropout_rate=0.5)
        return first(x, is_training=True), second(x, is_training=True)

    first, second = hk.transform(function).apply({}, KEY, np.full_like(X, 9))
    assert not np.array_equal(first == 0, second == 0)


# Token embeddings.


def test_the_factor_is_not_rounded_to_bfloat16():
    table = np.random.default_rng(0).normal(size=[4, 3072]).astype(jnp.bfloat16)
    params = {"token_embedding": {"embeddings": jax.device_put(table)}}
    got = embed(np.arange(4), 4, 3072, params, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    product = np.asarray(table, np.float32) * np.float32(np.sqrt(3072.0))
    np.testing.assert_array_equal(got, product.astype(jnp.bfloat16))
    rounded_factor = np.sqrt(3072.0).astype(jnp.bfloat16)
    assert rounded_factor == 55.5
    assert not np.array_equal(table * rounded_factor, got)


@pytest.mark.parametrize("scale", [True, False])
def test_default_outputs_have_unit_variance(scale):
    pair = hk.transform(lambda: te.TokenEmbedding(500, 256, scale=scale)(np.arange(500)))
    outputs = np.asarray(pair.apply(pair.init(KEY), None), np.float64)
    # Of n normal samples the mean has deviation n**-0.5 and the variance (2 / n)**0.5; five of
    # each.
    assert abs(outputs.mean()) < 5 * outputs.size**-0.5
    assert abs(outputs.var() - 1) < 5 * (2 / outputs.size) ** 0.5


@pytest.mark.parametrize("scale", [12, 12.0, np.float32(12), 0.5])
def test_a_free_multiplier_scales_rows(scale):
    table = np.arange(99, dtype=np.float32).reshape(11, 9)
    got = embed(IDS, 11, 9, {"token_embedding": {"embeddings": jax.device_put(table)}}, scale=scale)
    np.testing.assert_array_equal(got, table[IDS] * np.float32(scale))


def test_a_multiplier_of_one_does_not_scale_and_is_not_taken_for_true():
    config = te.EmbedderConfig(11, 9, scheme=None, scale=1.0)
    assert config.scale is False
    assert config != te.EmbedderConfig(11, 9, scheme=None, scale=True)
    with pytest.raises(ValueError, match=r"^scale: wanted a finite number above 0, got 0\.0$"):
        te.EmbedderConfig(11, 9, scale=0.0)


def test_a_checkpoint_of_hk_embed_loads():
    haiku = hk.transform(lambda: hk.Embed(11, 9)(IDS))
    params = drawn(haiku.init)
    rows = np.asarray(jax.jit(haiku.apply)(params, None))
    for scale, factor in ((True, 3), (False, 1)):
        got = embed(IDS, 11, 9, {"token_embedding": params["embed"]}, scale=scale)
        np.testing.assert_array_equal(got, rows * factor, err_msg=f"{scale=}")


def test_logits_are_tied_to_the_table():
    def function(x):
        embed = te.TokenEmbedding(11, 8, pad_id=3)
        return embed(IDS), embed.logits(x)

    pair = hk.transform(function)
    params = drawn(pair.init, X)
    assert hk.data_structures.tree_size(params) == 11 * 8
    table = np.asarray(params["token_embedding"]["embeddings"], np.float64)
    # Sums of 8 products: each rounded, and each partial sum.
    bound = 16 * np.finfo(np.float32).eps * np.abs(X).sum(-1).max() * np.abs(table).max()
    want = X.astype(np.float64) @ table.T
    want[..., 3] = LOWEST
    np.testing.assert_allclose(pair.apply(params, None, X)[1], want, rtol=0, atol=bound)


def test_transformer_embedding_ties_its_token_table():
    def function(ids):
        embed = whole(11, 8, pad_id=0)
        return embed.logits(embed(ids, is_training=False)), embed(ids, is_training=False)

    pair = hk.transform(function)
    params = drawn(pair.init, IDS)
    logits, x = pair.apply(params, None, IDS)
    np.testing.assert_array_equal(
        logits,
        te.linear_logits(
            x, params["transformer_embedding/~/token_embedding"]["embeddings"], pad_id=0
        ),
    )
    assert (np.asarray(logits)[..., 0] == LOWEST).all()


LOWEST = np.finfo(np.float32).min / 2


def padded():
    def function(ids):
        embed = te.TokenEmbedding(11, 8, pad_id=4, w_init=hk.initializers.Constant(2.0))
        x = embed(ids)
        return x, embed.logits(x + 1)

    return hk.transform(function)


@jax.jit
@jax.grad
def padding_gradient(params):
    x, logits = padded().apply(params, None, IDS)
    return (x**2).sum() + jax.nn.logsumexp(logits)


OPTIMISERS = {
    "none": optax.sgd(0.0),
    "weight_decay": optax.adamw(0.1, weight_decay=0.5),
    "momentum": optax.sgd(0.01, momentum=0.9),
}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_the_padding_row_stays_zero(optimiser):
    pair, update = padded(), OPTIMISERS[optimiser]
    params = pair.init(KEY, IDS)
    state = update.init(params)

    @jax.jit
    def step(gradient, state, params):
        steps, state = update.update(gradient, state, params)
        return optax.apply_updates(params, steps), state

    for _ in range(2):
        gradient = padding_gradient(params)
        table_gradient = np.asarray(gradient["token_embedding"]["embeddings"])
        assert not table_gradient[4].any()
        assert table_gradient[5].any()
        params, state = step(gradient, state, params)
    x, logits = map(np.asarray, pair.apply(params, None, IDS))
    assert not x[IDS == 4].any()
    assert x[IDS != 4].all()
    assert (logits[..., 4] == LOWEST).all()


def test_the_table_of_the_weight_decay_test_moves_at_padding():
    pair, update = padded(), OPTIMISERS["weight_decay"]
    params = pair.init(KEY, IDS)
    steps, _ = jax.jit(
        lambda params: update.update(
            jax.tree.map(jnp.zeros_like, params), update.init(params), params
        )
    )(params)
    assert np.asarray(steps["token_embedding"]["embeddings"])[4].all()


def test_a_padding_id_may_lie_outside_the_vocabulary():
    result = np.asarray(embed([[-1, 3], [11, -2]], 11, 8, pad_id=-1))
    assert not result[0, 0].any()
    assert result[0, 1].all()
    assert np.isnan(result[1]).all()


@pytest.mark.parametrize("policy", ["nan", "clip", "zero"])
def test_ids_outside_the_vocabulary_follow_the_policy(policy):
    def function(ids):
        embed = te.TokenEmbedding(11, 8, out_of_range=policy)
        return embed(ids), embed([0, 10, 10])

    outside, ends = evaluate(function, [-1, 11, 2**32 + 5])
    wanted = {"nan": np.full([3, 8], np.nan), "clip": ends, "zero": np.zeros([3, 8])}[policy]
    np.testing.assert_array_equal(outside, wanted)


# Positions.


def encode(module, x, **options):
    return evaluate(lambda x: module()(x, is_training=False, **options), x)


LEARNED = functools.partial(learned, 16, 8)
SINUSOIDAL = functools.partial(sinusoidal, 8)
both_encodings = pytest.mark.parametrize(
    "module", [SINUSOIDAL, LEARNED], ids=["sinusoidal", "learned"]
)


def test_a_fixed_table_is_not_a_parameter():
    pair = hk.transform(lambda x: sinusoidal(8)(x, is_training=False))
    assert pair.init(KEY, X) == {}
    params = jax.eval_shape(
        hk.transform(lambda ids: whole(11, 8)(ids, is_training=False)).init, KEY, IDS
    )
    assert list(params) == ["transformer_embedding/~/token_embedding"]


def test_the_encoding_is_added_after_the_scaling():
    def function(ids):
        embed = te.TokenEmbedding(11, 8)
        return sinusoidal(8)(embed(ids), is_training=False), embed(ids)

    total, scaled = evaluate(function, IDS)
    np.testing.assert_array_equal(total, np.asarray(scaled) + te.sinusoidal_table(5, 8))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_sums_round_once(dtype):
    x = np.random.default_rng(0).normal(size=[4, 64, 32]).astype(dtype)
    table = np.asarray(te.sinusoidal_table(64, 32))
    got = encode(functools.partial(sinusoidal, 32), x)
    np.testing.assert_array_equal(got, (x.astype(np.float32) + table).astype(dtype))
    rounded_twice = x + table.astype(dtype)
    assert not np.array_equal(rounded_twice, got)


def test_a_16_bit_embedding_rounds_once():
    def function(ids):
        embed = whole(
            11, 64, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, num_token_types=2, scale=False
        )
        return embed(ids, is_training=False, token_types=TYPES)

    pair = hk.transform(function)
    params = drawn(pair.init, IDS)
    table, types = (
        np.asarray(params[f"transformer_embedding/~/{name}"]["embeddings"], np.float32)
        for name in ("token_embedding", "token_type_embedding")
    )
    total = table[IDS] + np.asarray(te.sinusoidal_table(5, 64)) + types[TYPES]
    np.testing.assert_array_equal(pair.apply(params, None, IDS), total.astype(jnp.bfloat16))


@both_encodings
def test_positions_of_one_row_and_of_each(module):
    whole = np.asarray(encode(module, np.zeros([1, 16, 8], np.float32)))[0]
    zeros = np.zeros([2, 5, 8], np.float32)
    one_row, each_row = (
        np.array([3, 9, 0, 15, 1]),
        np.array([[0, 1, 2, 3, 4], [11, 12, 13, 14, 15]]),
    )
    np.testing.assert_array_equal(encode(module, zeros), np.stack([whole[:5]] * 2))
    np.testing.assert_array_equal(
        encode(module, zeros, positions=one_row), np.stack([whole[one_row]] * 2)
    )
    np.testing.assert_array_equal(encode(module, zeros, positions=each_row), whole[each_row])
    np.testing.assert_array_equal(
        encode(module, zeros, positions=each_row.tolist()), whole[each_row]
    )


@both_encodings
def test_a_traced_offset_traces_once(module):
    traces = []

    def function(x, offset):
        traces.append(offset)
        return module()(x, is_training=False, positions=offset + jnp.arange(x.shape[-2]))

    pair = hk.transform(function)
    params = drawn(pair.init, X, 0)
    whole = np.asarray(encode(module, np.zeros([1, 16, 8], np.float32)))[0]
    traces.clear()
    apply = jax.jit(pair.apply)
    for offset in (0, 4, 11):
        got = apply(params, None, np.zeros([5, 8], np.float32), offset)
        np.testing.assert_allclose(
            got, whole[offset : offset + 5], rtol=0, atol=np.finfo(np.float32).eps
        )
    assert len(traces) == 1


@pytest.mark.parametrize(
    "positions",
    [[-(2**31), -1, 0, 1, 2**31 - 1], [10_000, 65_537, 1_000_003, 123_456_789, -987_654_321]],
)
def test_any_int32_position_is_encoded(positions):
    got = encode(SINUSOIDAL, np.zeros([5, 8], np.float32), positions=np.array(positions, np.int32))
    angle = np.array(positions, np.longdouble)[:, None] / 10_000.0 ** (
        np.arange(0, 8, 2, dtype=np.longdouble) / 8
    )
    wanted = np.stack([np.sin(angle), np.cos(angle)], -1).reshape(5, 8)
    # The encoding's own bound; a long double holds 2**31 to 2**-32 and its sine is good to that.
    np.testing.assert_allclose(got, wanted.astype(np.float64), rtol=0, atol=6.1e-8)


@both_encodings
@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (2, 0, 8), (3, 2, 1, 8)])
def test_lengths_0_and_1_and_any_leading_axes(module, shape):
    first = encode(module, np.zeros([1, 8], np.float32))
    np.testing.assert_array_equal(
        encode(module, np.zeros(shape, np.float32)),
        np.broadcast_to(first, shape) if 0 not in shape else np.zeros(shape),
    )


@pytest.mark.parametrize("d_model", [1, 7])
def test_odd_widths_are_encoded(d_model):
    x = np.ones([5, d_model], np.float32)
    np.testing.assert_array_equal(
        encode(functools.partial(sinusoidal, d_model), x), x + te.sinusoidal_table(5, d_model)
    )
    result = evaluate(lambda ids: whole(11, d_model)(ids, is_training=False), IDS)
    assert result.shape == (2, 5, d_model)
    assert np.isfinite(result).all()


def test_all_padding_leaves_the_positions():
    result = evaluate(
        lambda ids: whole(11, 8, pad_id=0)(ids, is_training=False), np.zeros([2, 5], np.int8)
    )
    first = te.sinusoidal_table(1, 8)
    np.testing.assert_array_equal(result, np.broadcast_to(first, (2, 5, 8)))


@pytest.mark.parametrize("policy", ["nan", "clip", "zero"])
def test_a_position_past_max_len_follows_the_policy(policy):
    module = functools.partial(learned, 5, 8, out_of_range=policy)
    whole = np.asarray(encode(module, np.zeros([5, 8], np.float32)))
    pair = hk.transform(
        lambda x, offset: module()(x, is_training=False, positions=offset + jnp.arange(5))
    )
    zeros = np.zeros([5, 8], np.float32)
    got = np.asarray(jax.jit(pair.apply)(drawn(pair.init, zeros, 0), None, zeros, 2))
    np.testing.assert_array_equal(got[:3], whole[2:])
    wanted = {
        "nan": np.full([2, 8], np.nan),
        "clip": np.stack([whole[-1]] * 2),
        "zero": np.zeros([2, 8]),
    }[policy]
    np.testing.assert_array_equal(got[3:], wanted)


# Dropout.


@every_module
def test_evaluation_takes_no_key_and_draws_none(descriptor):
    def function(data):
        result = descriptor.call(descriptor.module(), data, is_training=False)
        return result, hk.maybe_next_rng_key()

    apply = functools.partial(hk.transform(function).apply, params_of(descriptor.name))
    with_key, after = apply(KEY, descriptor.data)
    without_key, no_key = apply(None, descriptor.data)
    untouched = hk.transform(hk.next_rng_key).apply({}, KEY)
    assert no_key is None
    assert after == untouched
    np.testing.assert_array_equal(with_key, without_key)


@both_encodings
def test_training_draws_one_key(module):
    def function(x):
        module()(x, is_training=True)
        return hk.next_rng_key()

    pair = hk.transform(function)
    second = hk.transform(lambda: (hk.next_rng_key(), hk.next_rng_key())[1]).apply({}, KEY)
    assert pair.apply(drawn(pair.init, X), KEY, X) == second


@dropping_modules
def test_training_equals_hk_dropout_of_evaluation(descriptor):
    def by_haiku(data):
        evaluated = descriptor.call(descriptor.module(), data, is_training=False)
        return jax.jit(hk.dropout, static_argnums=1)(hk.next_rng_key(), 0.1, evaluated)

    # Only the dropouts are compiled, for XLA might fuse the sums before the two in two ways.
    want, got = (
        pair.apply(params_of(descriptor.name), jax.random.key(2), descriptor.data)
        for pair in (hk.transform(by_haiku), transformed(descriptor, is_training=True))
    )
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
    assert (np.asarray(got) == 0).any()


def test_no_rate_needs_no_key():
    trained, evaluated = (
        evaluate(lambda x, flag=flag: sinusoidal(8, dropout_rate=0)(x, is_training=flag), X)
        for flag in (True, False)
    )
    np.testing.assert_array_equal(trained, evaluated)


@dropping_modules
def test_training_without_a_key_is_refused(descriptor):
    with pytest.raises(
        ValueError,
        match=message(
            "rng", "a key, to train with dropout (pass is_training=False to evaluate)", "None"
        ),
    ):
        transformed(descriptor, is_training=True).apply(
            params_of(descriptor.name), None, descriptor.data
        )


FLAG = "a Python bool"
SCALE = "True, False, or a number above 0 (1.0 is a number, the int 1 could mean True)"
TRACED_FLAG = f"{FLAG} known while tracing (bind it with functools.partial, or make it a static argument of jit)"


@flagged_modules
def test_a_traced_flag_is_refused(descriptor):
    pair = hk.transform(lambda data, flag: descriptor.call(descriptor.module(), data, flag))
    with pytest.raises(TypeError, match=message("is_training", TRACED_FLAG, "a traced bool[]")):
        jax.jit(pair.apply)(params_of(descriptor.name), KEY, descriptor.data, True)
    with pytest.raises(TypeError, match=message("is_training", FLAG, "int 1")):
        pair.apply(params_of(descriptor.name), KEY, descriptor.data, 1)


# The whole, by hand in float64.


def sinusoids(length, width):
    angle = np.arange(length)[:, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    return np.stack([np.sin(angle), np.cos(angle)], -1).reshape(length, width)


def wide(params, name, leaf="embeddings"):
    return np.asarray(params[f"transformer_embedding/~/{name}"][leaf], np.float64)


def normed(total, params, eps):
    centred = total - total.mean(-1, keepdims=True)
    unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return unit * wide(params, "layer_norm", "scale") + wide(params, "layer_norm", "offset")


def assert_equals_reference(function, reference, roundings):
    pair = hk.transform(function)
    params = drawn(pair.init, IDS)
    want, largest = reference(params)
    np.testing.assert_allclose(
        pair.apply(params, None, IDS),
        want,
        rtol=0,
        atol=roundings * np.finfo(np.float32).eps * largest,
    )


def test_transformer_embedding_equals_a_numpy_reference_for_vaswani():
    def reference(params):
        rows = wide(params, "token_embedding")[IDS] * (IDS != 0)[..., None] * np.sqrt(8)
        positions = te.TokenPositions.from_ids(IDS, pad_id=0).positions
        want = rows + sinusoids(5, 8)[positions]
        return want, np.abs(rows).max() + 1

    assert_equals_reference(
        lambda ids: whole(11, 8, pad_id=0)(ids, is_training=False), reference, ROUNDINGS
    )


def bert_sum(params):
    return (
        wide(params, "token_embedding")[IDS]
        + wide(params, "learned_positional_encoding")[:5]
        + wide(params, "token_type_embedding")[TYPES]
    )


def largest_after_norm(total, want):
    """A norm divides by the deviation, and so lets the roundings of the sum grow."""
    return np.abs(want).max() * (1 + np.abs(total).max() / total.std(-1).min())


def test_transformer_embedding_equals_a_numpy_reference_for_bert():
    def reference(params):
        total = bert_sum(params)
        want = normed(total, params, 1e-12)
        return want, largest_after_norm(total, want)

    build = functools.partial(whole, 11, 8, **BERT)
    assert_equals_reference(
        lambda ids: build()(ids, is_training=False, token_types=TYPES), reference, ROUNDINGS
    )


def test_transformer_embedding_equals_a_numpy_reference_for_albert():
    def reference(params):
        total = bert_sum(params)
        norm = normed(total, params, 1e-12)
        want = norm @ wide(params, "widen", "w") + wide(params, "widen", "b")
        return want, largest_after_norm(total, norm) * np.abs(wide(params, "widen", "w")).sum(
            0
        ).max()

    build = functools.partial(whole, 11, 8, embedding_width=6, **BERT)
    assert_equals_reference(
        lambda ids: build()(ids, is_training=False, token_types=TYPES), reference, ROUNDINGS_WIDENED
    )


def test_the_scale_follows_the_width_of_the_table():
    build = functools.partial(whole, 11, 8, embedding_width=4, scheme=None)

    def reference(params):
        rows = wide(params, "token_embedding")[IDS] * 2
        weights = wide(params, "widen", "w")
        return rows @ weights + wide(params, "widen", "b"), np.abs(rows).max() * np.abs(
            weights
        ).sum(0).max() + 1

    assert_equals_reference(
        lambda ids: build()(ids, is_training=False), reference, ROUNDINGS_WIDENED
    )


def test_the_modules_compose_to_the_whole():
    def parts(ids):
        x = te.TokenEmbedding(11, 8, pad_id=0)(ids)
        positions = te.TokenPositions.from_ids(ids, pad_id=0).positions
        return learned(16, 8)(x, is_training=True, positions=positions)

    composed = hk.transform(
        lambda ids: whole(11, 8, pad_id=0, scheme=te.Learned(16))(ids, is_training=True)
    )
    params = drawn(composed.init, IDS)
    own = {path.rsplit("/", 1)[-1]: leaf for path, leaf in params.items()}
    np.testing.assert_array_equal(
        hk.transform(parts).apply(own, KEY, IDS), composed.apply(params, KEY, IDS)
    )


# Errors, by message.


def refused(error, text, build):
    with pytest.raises(error, match=text):
        hk.transform(build).init(KEY)


POLICIES = "one of 'nan', 'clip', 'zero'"
UNIT = "a number in [0, 1)"
POSITIVE = "an int of at least 1"
TOKENS = functools.partial(te.TokenEmbedding, 11, 8)
WHOLE = functools.partial(whole, 11, 8)

INITIALISER = "a function of a shape and a dtype, such as hk.initializers.RandomNormal()"
BAD_ARGUMENTS = [
    (lambda: te.TokenEmbedding(0, 8), ValueError, "vocab_size", POSITIVE, "0"),
    (lambda: te.TokenEmbedding(11.0, 8), TypeError, "vocab_size", "a Python int", "float 11.0"),
    (lambda: te.TokenEmbedding(11, 0), ValueError, "d_model", POSITIVE, "0"),
    (lambda: te.TokenEmbedding(11, True), TypeError, "d_model", "a Python int", "bool True"),
    (lambda: TOKENS(scale=1), TypeError, "scale", SCALE, "1"),
    (lambda: TOKENS(pad_id="0"), TypeError, "pad_id", "a Python int", "str '0'"),
    (
        lambda: TOKENS(pad_id=2**31 - 1),
        ValueError,
        "pad_id",
        "an int of at most 2147483646",
        "2147483647",
    ),
    (
        lambda: TOKENS(pad_id=-(2**31)),
        ValueError,
        "pad_id",
        "an int of at least -2147483647",
        "-2147483648",
    ),
    (lambda: TOKENS(out_of_range="wrap"), ValueError, "out_of_range", POLICIES, "'wrap'"),
    (
        lambda: TOKENS(lookup_style="sum"),
        ValueError,
        "lookup_style",
        "one of 'gather', 'one_hot'",
        "'sum'",
    ),
    (
        lambda: TOKENS(param_dtype=jnp.int32),
        TypeError,
        "param_dtype",
        "a floating dtype of 16 to 64 bits",
        "int32",
    ),
    (
        lambda: TOKENS(dtype=jnp.int8),
        TypeError,
        "dtype",
        "a floating dtype of 16 to 64 bits",
        "int8",
    ),
    (lambda: sinusoidal(0), ValueError, "d_model", POSITIVE, "0"),
    (lambda: sinusoidal("8"), TypeError, "d_model", "a Python int", "str '8'"),
    (lambda: SINUSOIDAL(dropout_rate=1.0), ValueError, "dropout_rate", UNIT, "1.0"),
    (lambda: SINUSOIDAL(dropout_rate=-0.1), ValueError, "dropout_rate", UNIT, "-0.1"),
    (
        lambda: SINUSOIDAL(dropout_rate=float("nan")),
        ValueError,
        "dropout_rate",
        "a finite number",
        "nan",
    ),
    (
        lambda: SINUSOIDAL(dropout_rate="0.1"),
        TypeError,
        "dropout_rate",
        "a Python number",
        "str '0.1'",
    ),
    (lambda: SINUSOIDAL(base=0), ValueError, "base", "a finite number above 0", "0"),
    (
        lambda: SINUSOIDAL(layout="halves"),
        ValueError,
        "layout",
        "one of 'interleaved', 'sin_cos', 'cos_sin'",
        "'halves'",
    ),
    (lambda: SINUSOIDAL(shift=4), ValueError, "shift", "a number below d_model // 2 = 4", "4.0"),
    (
        lambda: SINUSOIDAL(odd="drop"),
        ValueError,
        "odd",
        "one of 'truncate', 'round_up', 'zero'",
        "'drop'",
    ),
    (
        lambda: SINUSOIDAL(frequency_scale=-1.0),
        ValueError,
        "frequency_scale",
        "a finite number above 0",
        "-1.0",
    ),
    (lambda: learned(0, 8), ValueError, "max_len", POSITIVE, "0"),
    (lambda: learned(16, 0), ValueError, "d_model", POSITIVE, "0"),
    (lambda: LEARNED(dropout_rate=1), ValueError, "dropout_rate", UNIT, "1"),
    (lambda: LEARNED(out_of_range="raise"), ValueError, "out_of_range", POLICIES, "'raise'"),
    (
        lambda: LEARNED(param_dtype=jnp.uint8),
        TypeError,
        "param_dtype",
        "a floating dtype of 16 to 64 bits",
        "uint8",
    ),
    (
        lambda: te.PositionalEncoding(8, 8),
        TypeError,
        "scheme",
        "Sinusoidal(...), SinusoidalGrid(...) or Learned(max_len=...)",
        "int 8",
    ),
    (
        lambda: te.PositionalEncoding(te.Sinusoidal(), 8, w_init="zeros"),
        ValueError,
        "w_init",
        "None, since the scheme has no parameters",
        "str 'zeros'",
    ),
    (lambda: TOKENS(w_init="abc"), TypeError, "w_init", INITIALISER, "str 'abc'"),
    (lambda: TOKENS(w_init=0), TypeError, "w_init", INITIALISER, "int 0"),
    (lambda: LEARNED(w_init=[1]), TypeError, "w_init", INITIALISER, "list [1]"),
    (lambda: te.RelativePositionBias(2, w_init=""), TypeError, "w_init", INITIALISER, "str ''"),
    (lambda: te.Learned(max_len=0), ValueError, "max_len", POSITIVE, "0"),
    (lambda: te.Learned(max_len=16.0), TypeError, "max_len", "a Python int", "float 16.0"),
    (
        lambda: te.TransformerEmbedding(11),
        TypeError,
        "config",
        "an EmbedderConfig, such as te.EmbedderConfig(vocab_size=256, d_model=64)",
        "int 11",
    ),
    (lambda: whole(0, 8), ValueError, "vocab_size", POSITIVE, "0"),
    (lambda: whole(11, 0), ValueError, "d_model", POSITIVE, "0"),
    (
        lambda: WHOLE(scheme="sinusoidal"),
        TypeError,
        "scheme",
        "Sinusoidal(...), SinusoidalGrid(...) or Learned(max_len=...), or None",
        "str 'sinusoidal'",
    ),
    (
        lambda: WHOLE(scheme=te.Sinusoidal(base=-1.0)),
        ValueError,
        "base",
        "a finite number above 0",
        "-1.0",
    ),
    (lambda: WHOLE(dropout_rate=1.5), ValueError, "dropout_rate", UNIT, "1.5"),
    (lambda: WHOLE(pad_id=0.5), TypeError, "pad_id", "a Python int", "float 0.5"),
    (lambda: WHOLE(scale="yes"), TypeError, "scale", SCALE, "'yes'"),
    (lambda: WHOLE(num_token_types=0), ValueError, "num_token_types", POSITIVE, "0"),
    (
        lambda: WHOLE(layer_norm_eps=0.0),
        ValueError,
        "layer_norm_eps",
        "a finite number above 0",
        "0.0",
    ),
    (
        lambda: WHOLE(layer_norm_eps="1e-12"),
        TypeError,
        "layer_norm_eps",
        "a Python number",
        "str '1e-12'",
    ),
    (lambda: WHOLE(embedding_width=0), ValueError, "embedding_width", POSITIVE, "0"),
    (lambda: WHOLE(out_of_range="wrap"), ValueError, "out_of_range", POLICIES, "'wrap'"),
    (
        lambda: WHOLE(lookup_style=None),
        ValueError,
        "lookup_style",
        "one of 'gather', 'one_hot'",
        "None",
    ),
    (
        lambda: WHOLE(param_dtype=jnp.int32),
        TypeError,
        "param_dtype",
        "a floating dtype of 16 to 64 bits",
        "int32",
    ),
    (
        lambda: WHOLE(dtype=jnp.int32),
        TypeError,
        "dtype",
        "a floating dtype of 16 to 64 bits",
        "int32",
    ),
]


@pytest.mark.parametrize(
    ("build", "error", "name", "want", "got"),
    BAD_ARGUMENTS,
    ids=[f"{n}-{bad[2]}" for n, bad in enumerate(BAD_ARGUMENTS)],
)
def test_bad_arguments_are_refused(build, error, name, want, got):
    refused(error, message(name, want, got), build)


@pytest.mark.parametrize("d_model", [8.0, np.float32(8)])
def test_a_float_d_model_is_refused_after_its_integer_was_taken(d_model):
    encode(SINUSOIDAL, X)
    refused(TypeError, "^d_model: wanted a Python int, got ", lambda: sinusoidal(d_model))


@both_encodings
def test_a_traced_rate_is_refused(module):
    build = hk.transform(lambda rate: module(dropout_rate=rate)(X, is_training=False))
    with pytest.raises(
        TypeError,
        match=message("dropout_rate", "a Python number", "a traced float32[]"),
    ):
        jax.jit(build.init)(KEY, 0.5)


VMAP = "; add jnp.arange(length) to a scalar offset; jax.vmap maps keyword arguments over axis 0: bind them with functools.partial"


@both_encodings
def test_bad_calls_of_encodings_are_refused(module):
    def call(x, **options):
        return lambda: module()(x, is_training=False, **options)

    length = "a last axis of x's tokens' length, 5"
    refused(TypeError, message("x", "a floating dtype of 16 to 64 bits", "int32"), call(IDS))
    refused(
        ValueError,
        message("x", "shape [..., length, d_model = 8]", "shape [2, 5, 7]"),
        call(X[..., :7]),
    )
    refused(
        ValueError, message("x", "shape [..., length, d_model = 8]", "shape [8]"), call(X[0, 0])
    )
    refused(ValueError, message("positions", length, "shape []" + VMAP), call(X, positions=3))
    refused(ValueError, message("positions", length, "shape [4]"), call(X, positions=np.arange(4)))
    refused(ValueError, message("positions", length, "shape [2, 1]"), call(X, positions=[[0], [1]]))
    refused(
        ValueError,
        message(
            "positions", "a shape that broadcasts to that of x's tokens, [2, 5]", "shape [3, 5]"
        ),
        call(X, positions=np.zeros([3, 5], int)),
    )
    refused(
        ValueError,
        message("positions", "a shape that broadcasts to that of x's tokens, [5]", "shape [2, 5]"),
        call(X[0], positions=np.zeros([2, 5], int)),
    )
    refused(
        ValueError,
        message(
            "positions", "an array, or nested lists of equal lengths", "lists of unequal lengths"
        ),
        call(X, positions=[[1], [2, 3]]),
    )


def test_positions_of_a_wrong_dtype_are_refused():
    want = "an integer dtype, or float32 (16-bit floats skip integers)"
    refused(
        TypeError,
        message("positions", want, "float16"),
        lambda: SINUSOIDAL()(X, is_training=False, positions=np.arange(5, dtype=np.float16)),
    )
    refused(
        TypeError,
        message("positions", "an integer dtype", "float32"),
        lambda: LEARNED()(X, is_training=False, positions=jnp.arange(5.0)),
    )


def test_a_length_past_max_len_is_refused():
    long = np.zeros([17, 8], np.float32)
    want = "a length of at most 16, where Learned ends"
    refused(ValueError, message("x", want, "length 17"), lambda: LEARNED()(long, is_training=False))
    refused(
        ValueError,
        message("ids", want, "length 17"),
        lambda: WHOLE(scheme=te.Learned(16))(np.zeros([2, 17], int), is_training=False),
    )


def test_bad_calls_of_the_whole_are_refused():
    def call(ids, build=WHOLE, **options):
        return lambda: build()(ids, is_training=False, **options)

    typed = functools.partial(WHOLE, num_token_types=2)
    refused(TypeError, message("ids", "an integer dtype", "float32"), call(X))
    refused(TypeError, message("ids", "an integer dtype", "bool"), call(IDS == 0))
    refused(
        TypeError,
        message("ids", "an array of real numbers of at most 64 bits", "NoneType None"),
        call(None),
    )
    refused(ValueError, message("ids", "shape [..., length]", "shape []"), call(3))
    refused(
        ValueError,
        message("positions", "a last axis of the ids' length, 5", "shape []" + VMAP),
        call(IDS, positions=7),
    )
    refused(
        ValueError,
        message("token_types", "None, since num_token_types is not set", "an array int32[2, 5]"),
        call(IDS, token_types=TYPES),
    )
    refused(
        ValueError,
        message("token_types", "an array, since num_token_types is set", "None"),
        call(IDS, typed),
    )
    refused(
        TypeError,
        message("token_types", "an integer dtype", "float64"),
        call(IDS, typed, token_types=TYPES / 2),
    )
    refused(
        ValueError,
        message("token_types", "a shape that broadcasts to that of the ids, [5]", "shape [2, 5]"),
        call(IDS[0], typed, token_types=TYPES),
    )
    refused(
        ValueError,
        message("token_types", "a last axis of the ids' length, 5", "shape [2, 4]"),
        call(IDS, typed, token_types=TYPES[:, :4]),
    )


@pytest.mark.parametrize("padding", [{"at_padding": 1}, {"pad_id": 0}])
def test_a_scheme_that_counts_padding_apart_needs_positions_where_there_are_no_ids(padding):
    scheme = te.Learned(16, **padding)

    def call(**options):
        return lambda: te.PositionalEncoding(scheme, 8)(X, is_training=False, **options)

    refused(
        ValueError,
        message("positions", "an array, since x does not show what is padding", "None"),
        call(),
    )
    hk.transform(call(positions=[0, 1, 2, 3, 4])).init(KEY)


def test_logits_of_another_width_are_refused():
    refused(
        ValueError,
        message("x", "a last axis of the table's width, (8,)", "(7,)"),
        lambda: WHOLE().logits(X[..., :7]),
    )
    refused(
        TypeError,
        message("x", "a floating dtype of 16 to 64 bits", "int32"),
        lambda: TOKENS().logits(IDS),
    )


# --- RelativePositionBias


def relative_position_bias(*arguments, **options):
    def bias(query_positions, key_positions):
        return te.RelativePositionBias(*arguments, **options)(query_positions, key_positions)

    return hk.without_apply_rng(hk.transform(bias))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_relative_position_bias_is_the_table_at_the_buckets(bidirectional):
    bias = relative_position_bias(3, num_buckets=8, max_distance=20, bidirectional=bidirectional)
    queries, keys = np.array([[4, 5], [30, 0]]), np.arange(6)
    params = drawn(bias.init, queries, keys)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == {
        "relative_position_bias": {"embeddings": ((8, 3), jnp.float32)}
    }
    buckets = te.relative_position_buckets(
        queries, keys, num_buckets=8, max_distance=20, bidirectional=bidirectional
    )
    table = np.asarray(params["relative_position_bias"]["embeddings"])
    np.testing.assert_array_equal(
        bias.apply(params, queries, keys), np.moveaxis(table[np.asarray(buckets)], -1, 1)
    )


def test_relative_position_bias_gradient_counts_each_pair():
    bias = relative_position_bias(2, num_buckets=4, max_distance=5, dtype=jnp.bfloat16)
    params = drawn(bias.init, range(6), range(6))
    gradient = jax.jit(
        jax.grad(lambda params: bias.apply(params, range(6), range(6)).astype(jnp.float32).sum())
    )(params)
    buckets = np.asarray(
        te.relative_position_buckets(range(6), range(6), num_buckets=4, max_distance=5)
    )
    counts = np.bincount(buckets.ravel(), minlength=4)
    np.testing.assert_array_equal(
        gradient["relative_position_bias"]["embeddings"], np.stack([counts, counts], 1)
    )
    assert jax.eval_shape(lambda: bias.apply(params, range(6), range(6))).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (ValueError, "num_heads: wanted an int of at least 1, got 0", {"num_heads": 0}),
        (
            ValueError,
            "num_buckets: wanted an int of at least 4, got 3",
            {"num_heads": 1, "num_buckets": 3},
        ),
        (
            ValueError,
            "max_distance: wanted an int of at least 9, got 8",
            {"num_heads": 1, "max_distance": 8},
        ),
        (TypeError, "bidirectional: wanted a Python bool", {"num_heads": 1, "bidirectional": 1}),
        (
            TypeError,
            "dtype: wanted a floating dtype of 16 to 64 bits, got int32",
            {"num_heads": 1, "dtype": jnp.int32},
        ),
    ],
)
def test_bad_arguments_of_relative_position_bias_raise_errors(kind, message, options):
    with pytest.raises(kind, match=rf"^{re.escape(message)}"):
        relative_position_bias(**options).init(KEY, range(3), range(3))


# --- SinusoidalGrid


def test_a_grid_is_added_to_embeddings_too():
    scheme = te.SinusoidalGrid((2, 3), axes=(1, 0))
    encode = hk.transform(lambda x: te.PositionalEncoding(scheme, 8)(x, is_training=False))
    assert encode.init(KEY, X) == {}
    grid = np.asarray(te.sinusoidal_grid((2, 3), 8, axes=(1, 0))).reshape(6, 8)
    np.testing.assert_array_equal(encode.apply({}, None, X), X + grid[:5])
    refused(
        ValueError,
        message("x", "a length of at most 6, where SinusoidalGrid ends", "length 7"),
        lambda: te.PositionalEncoding(scheme, 8)(np.zeros([7, 8], np.float32), is_training=False),
    )


def test_a_grid_with_more_points_than_int32_counts_is_refused():
    points = message("shape: its number of points", f"an int of at most {2**31 - 1}", 2147488281)
    with pytest.raises(ValueError, match=points):
        te.SinusoidalGrid((46341, 46341))
    te.SinusoidalGrid((46341, 46340))


def grid_embedding(scheme, d_model=8):
    return hk.transform(
        lambda ids, **options: whole(11, d_model, scheme=scheme)(ids, is_training=False, **options)
    )


def test_a_grid_of_tokens_is_the_flattened_grid():
    scheme = te.SinusoidalGrid((2, 3), axes=(1, 0), layout="sin_cos")
    embed, ids = grid_embedding(scheme), np.zeros((2, 6), int)
    params = drawn(embed.init, ids)

    @jax.jit
    def of_all_and_of_the_first(params):
        return embed.apply(params, None, ids), embed.apply(
            params, None, ids[:, :1], positions=np.zeros((2, 1), int)
        )

    whole, first = of_all_and_of_the_first(params)
    encoding = np.asarray(whole) - np.asarray(first)
    grid = np.asarray(te.sinusoidal_grid((2, 3), 8, axes=(1, 0), layout="sin_cos")).reshape(6, 8)
    # Both sums round once, of numbers below 4.
    np.testing.assert_allclose(
        encoding, np.broadcast_to(grid - grid[0], (2, 6, 8)), rtol=0, atol=4 * 2**-23
    )
    np.testing.assert_array_equal(
        te.sinusoidal_grid((2, 3), 8, axes=(1, 0), layout="sin_cos", positions=np.arange(6)), grid
    )


def test_a_position_outside_the_grid_is_nan():
    embed, ids = grid_embedding(te.SinusoidalGrid((2, 3))), np.zeros((1, 3), int)
    params = drawn(embed.init, ids)
    embedded = jax.jit(lambda positions: embed.apply(params, None, ids, positions=positions))(
        np.array([-1, 5, 6])
    )
    assert np.isnan(embedded).all(-1).tolist() == [[True, False, True]]


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (
            "ids: wanted a length of at most 6, where SinusoidalGrid ends, got length 7",
            lambda: grid_embedding(te.SinusoidalGrid((2, 3))),
        ),
        (
            "d_model: wanted a multiple of the 2 axes (or odd='round_up' or 'zero'), got 7",
            lambda: te.EmbedderConfig(8, 7, scheme=te.SinusoidalGrid((2, 3))),
        ),
        (
            "axes: wanted a permutation of the axes of shape (2, 3), at least one, got (0, 0)",
            lambda: te.SinusoidalGrid((2, 3), axes=(0, 0)),
        ),
        ("layout: wanted one of", lambda: te.SinusoidalGrid((2, 3), layout="rows")),
    ],
)
def test_bad_arguments_of_grids_raise_errors(message, call):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call().init(KEY, np.zeros((1, 7), int))


def test_a_grid_splits_its_channels_as_the_function_does():
    scheme = te.SinusoidalGrid((2, 3), odd="round_up")
    grid = np.asarray(te.sinusoidal_grid((2, 3), 7, odd="round_up")).reshape(6, 7)
    np.testing.assert_array_equal(scheme._encoding(np.arange(6), 7), grid)


def test_a_grid_with_coordinates_of_its_own_as_in_diffusers():
    """get_2d_sincos_pos_embed: indices times base_size / grid / interpolation_scale."""
    coordinates = [np.arange(n) * 16 / n / 2.0 for n in (4, 8)]
    options = {"axes": (1, 0), "layout": "sin_cos"}
    scheme = te.SinusoidalGrid((4, 8), axis_positions=coordinates, **options)
    assert hash(scheme) == hash(
        te.SinusoidalGrid((4, 8), axis_positions=tuple(map(tuple, coordinates)), **options)
    )
    assert scheme.axis_positions[0] == (0.0, 2.0, 4.0, 6.0)
    grid = np.asarray(
        te.sinusoidal_grid((4, 8), 24, axis_positions=coordinates, **options)
    ).reshape(32, 24)
    embed, ids = grid_embedding(scheme, 24), np.zeros((1, 32), int)
    params = drawn(embed.init, ids)
    (table,) = jax.tree.leaves(params)
    tokens = np.asarray(table)[0] * np.sqrt(24).astype(np.float32)
    # The token's row, times the factor, and its sum with the encoding: two roundings of numbers
    # below 8.
    (embedded,) = np.asarray(embed.apply(params, None, ids))
    np.testing.assert_allclose(embedded, tokens + grid, rtol=0, atol=8 * 2**-23)


@pytest.mark.parametrize(
    ("coordinates", "error", "text"),
    [
        (
            [[0, 1]],
            ValueError,
            "axis_positions: wanted arrays as long as the axes, [[2], [3]], got [[2]]",
        ),
        (
            [[0, 1], [0, 1]],
            ValueError,
            "axis_positions: wanted arrays as long as the axes, [[2], [3]], got [[2], [2]]",
        ),
        (2, TypeError, "axis_positions: wanted a sequence, got int 2"),
        ([0, 1], TypeError, "axis_positions[0]: wanted a sequence, got int 0"),
        (
            [[0, "a"], [0, 1, 2]],
            TypeError,
            "axis_positions[0][1]: wanted a Python number, got str 'a'",
        ),
        (
            [[0, np.nan], [0, 1, 2]],
            ValueError,
            "axis_positions[0][1]: wanted a finite number, got nan",
        ),
    ],
)
def test_coordinates_of_a_grid_are_checked(coordinates, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        te.SinusoidalGrid((2, 3), axis_positions=coordinates)


def test_a_grid_that_is_not_a_tuple_is_refused():
    with pytest.raises(TypeError, match=r"^shape: wanted a sequence, got int 4$"):
        te.SinusoidalGrid(4)
    assert te.SinusoidalGrid([2, 3], axes=[1, 0]) == te.SinusoidalGrid((2, 3), axes=(1, 0))
