"""The compiled embedder: traces, transformations, exports, meshes, configs."""

import dataclasses
import functools
import re
import reprlib

import haiku as hk
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import set_mesh, x64
from drawn import drawn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import transformer_embed as te
from transformer_embed._src.layers import embedder as source

KEY = jax.random.key(0)
IDS = np.array([[5, 6, 7, 0, 3], [1, 2, 10, 4, 4]], np.int32)
CONFIG = te.EmbedderConfig(vocab_size=11, d_model=8, pad_id=0)
BERT = te.EmbedderConfig(
    vocab_size=11,
    d_model=8,
    scheme=te.Learned(max_len=16),
    scale=False,
    num_token_types=2,
    layer_norm_eps=1e-12,
    embedding_width=6,
)
# Two programs for one function may fuse a product and a sum: one rounding less of each, of values
# below 16; a norm and a linear layer over 6 channels add their sums.
FUSION = 16 * 8 * float(np.finfo(np.float32).eps)

FLAG = "a Python bool"
SCALE = "True, False, or a number above 0 (1.0 is a number, the int 1 could mean True)"
TRACED_FLAG = f"{FLAG} known while tracing (bind it with functools.partial, or make it a static argument of jit)"
POLICIES = "one of 'nan', 'clip', 'zero'"
POSITIVE = "an int of at least 1"


@functools.cache
def made(config=CONFIG):
    embedder = te.Embedder(config)
    return embedder, drawn(embedder.init)


def evaluate(ids=IDS, config=CONFIG, **options):
    embedder, params = made(config)
    return embedder.apply(params, None, ids, is_training=False, **options)


def message(name, want, got):
    """The whole of a message; jax adds a note on its tracebacks, on a new line."""
    return "^" + re.escape(f"{name}: wanted {want}, got {got}") + r"(?:\n|$)"


@pytest.fixture
def traces(monkeypatch):
    """One entry for each module that is built with parameters, which happens once a trace."""
    built, build = [], source.TransformerEmbedding
    monkeypatch.setattr(
        source, "TransformerEmbedding", lambda config: built.append(config) or build(config)
    )
    return built


def fresh(**changes):
    """A config that no other test compiled: the width is nobody else's."""
    fresh.d_model += 1
    return dataclasses.replace(CONFIG, d_model=fresh.d_model, **changes)


fresh.d_model = 100


# Traces.


def test_equal_configs_share_their_compilations(traces):
    config = fresh()
    for again in (
        config,
        dataclasses.replace(config),
        dataclasses.replace(config, param_dtype="float32", dropout_rate=np.float64(0.1)),
    ):
        embedder = te.Embedder(again)
        params = embedder.init(KEY)
        embedder.apply(params, None, IDS, is_training=False)
    assert len(traces) == 1


@pytest.mark.slow
def test_one_trace_a_shape_and_flag(traces):
    embedder = te.Embedder(fresh())
    params = drawn(embedder.init)
    traces.clear()
    for _ in range(2):
        for count, call in enumerate(
            (
                lambda: embedder.apply(params, None, IDS, is_training=False),
                lambda: embedder.apply(params, KEY, IDS, is_training=False),
                lambda: embedder.apply(params, None, IDS[:1], is_training=False),
                lambda: embedder.apply(params, KEY, IDS, is_training=True),
            )
        ):
            call()
            assert len(traces) in ((1, 1, 2, 3)[count], 3)
    assert len(traces) == 3


@pytest.mark.slow
def test_every_integer_dtype_of_ids_shares_a_trace(traces):
    embedder = te.Embedder(fresh())
    params = drawn(embedder.init)
    want = embedder.apply(params, None, IDS, is_training=False)
    traces.clear()
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64):
        np.testing.assert_array_equal(
            embedder.apply(params, None, IDS.astype(dtype), is_training=False), want
        )
        if np.dtype(dtype).itemsize < 8:
            np.testing.assert_array_equal(
                embedder.apply(params, None, jax.device_put(IDS.astype(dtype)), is_training=False),
                want,
            )
    np.testing.assert_array_equal(
        embedder.apply(params, None, IDS.tolist(), is_training=False), want
    )
    embedder.apply(params, None, weak([2, 5]), is_training=False)
    assert traces == []


def weak(shape):
    """Threes of a weak dtype."""
    threes = jnp.full(shape, 3)
    assert threes.weak_type
    return threes


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", [te.Sinusoidal(), te.Learned(max_len=16)], ids=["sinusoidal", "learned"]
)
def test_another_offset_or_offset_dtype_does_not_retrace(traces, scheme):
    embedder = te.Embedder(fresh(scheme=scheme))
    params = drawn(embedder.init)
    call = functools.partial(embedder.apply, params, None, IDS, is_training=False)
    call(positions=np.arange(5, dtype=np.int32))
    traces.clear()
    for offset in (1, 3, 9):
        row = np.arange(5) + offset
        want = np.asarray(call(positions=row.tolist()))
        same = [
            jax.device_put(row.astype(dtype))
            for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32)
        ]
        same += [row.astype(dtype) for dtype in (np.int8, np.uint32, np.int64, np.uint64)] + [
            tuple(row)
        ]
        for other in same:
            np.testing.assert_array_equal(call(positions=other), want)
    np.testing.assert_array_equal(call(positions=weak([5])), call(positions=[3] * 5))
    assert traces == []


@pytest.mark.slow
def test_every_integer_dtype_of_token_types_shares_a_trace(traces):
    config = dataclasses.replace(BERT, d_model=fresh().d_model)
    embedder = te.Embedder(config)
    params = drawn(embedder.init)
    traces.clear()
    types = (IDS > 4).astype(np.int32)
    first, *others = (
        embedder.apply(params, None, IDS, is_training=False, token_types=same)
        for same in (
            types,
            types.tolist(),
            types.astype(np.int64),
            jax.device_put(types.astype(np.int8)),
        )
    )
    embedder.apply(params, None, IDS, is_training=False, token_types=weak([2, 5]))
    assert len(traces) == 1
    for other in others:
        np.testing.assert_array_equal(other, first)


# Values.


@pytest.mark.slow
def test_the_embedder_is_the_module():
    _, params = made()
    module = hk.transform(lambda ids: te.TransformerEmbedding(CONFIG)(ids, is_training=False))
    np.testing.assert_allclose(
        evaluate(), jax.jit(module.apply)(params, None, IDS), rtol=0, atol=FUSION
    )
    assert jax.tree.structure(params) == jax.tree.structure(jax.eval_shape(module.init, KEY, IDS))


@functools.cache
def initial():
    return te.Embedder(CONFIG).init(KEY)


def test_init_is_deterministic():
    embedder, params = te.Embedder(CONFIG), initial()
    jax.tree.map(np.testing.assert_array_equal, embedder.init(KEY), params)
    other = embedder.init(jax.random.key(1))
    assert not any(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(params), strict=True)
    )


def test_both_kinds_of_keys_give_the_same():
    embedder, params = te.Embedder(CONFIG), initial()
    jax.tree.map(np.testing.assert_array_equal, embedder.init(jax.random.PRNGKey(0)), params)
    typed, raw = (
        embedder.apply(params, key, IDS, is_training=True) for key in (KEY, jax.random.PRNGKey(0))
    )
    np.testing.assert_array_equal(typed, raw)


def test_parameters_may_be_numpy_arrays():
    embedder, params = made()
    got = embedder.apply(jax.tree.map(np.asarray, params), None, IDS, is_training=False)
    assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(got, evaluate())


def test_wide_host_ids_do_not_wrap():
    result = np.asarray(evaluate(np.array([5, 2**32 + 5, -(2**32) + 5, -1, 11])))
    assert np.isfinite(result[0]).all()
    assert np.isnan(result[1:]).all()
    assert np.isnan(evaluate([2**32 + 5])).all()
    assert np.isnan(evaluate(np.array([2**64 - 1], np.uint64))).all()


@pytest.mark.slow
def test_wide_host_token_types_do_not_wrap():
    types = np.array([[0, 1, 2**32 + 1, -(2**32), 2]] * 2)
    assert (
        np.isnan(evaluate(config=BERT, token_types=types)).all(-1).tolist()
        == [[False, False, True, True, True]] * 2
    )


def test_a_vocabulary_of_one():
    embedder, params = made(dataclasses.replace(CONFIG, vocab_size=1, pad_id=None))
    result = np.asarray(embedder.apply(params, None, [0, 1, -1], is_training=False))
    assert np.isfinite(result).all(-1).tolist() == [True, False, False]
    assert embedder.logits(params, result[:1]).shape == (1, 1)


def test_evaluation_ignores_the_key():
    embedder, params = made()
    np.testing.assert_array_equal(embedder.apply(params, KEY, IDS, is_training=False), evaluate())


def test_logits_are_tied():
    embedder, params = made()
    x = evaluate()
    table = params["transformer_embedding/~/token_embedding"]["embeddings"]
    got = embedder.logits(params, x)
    # Sums of 8 products of values below 8 and 2.
    np.testing.assert_allclose(
        got,
        te.linear_logits(x, table, pad_id=0),
        rtol=0,
        atol=8 * 16 * float(np.finfo(np.float32).eps),
    )
    assert got.dtype == jnp.float32


@pytest.mark.slow
def test_no_dropout_needs_no_key():
    config = dataclasses.replace(CONFIG, dropout_rate=0.0)
    embedder, params = made(config)
    np.testing.assert_array_equal(
        embedder.apply(params, None, IDS, is_training=True), evaluate(config=config)
    )


@pytest.mark.parametrize("length", [0, 1])
def test_short_sequences(length):
    assert evaluate(np.zeros([2, length], np.int32)).shape == (2, length, 8)


# Transformations.


@pytest.mark.slow
def test_vmap_over_seeds():
    embedder, _ = made()
    keys = jax.random.split(KEY, 3)
    params = jax.vmap(embedder.init)(keys)
    train = functools.partial(embedder.apply, is_training=True, positions=np.arange(3, 8))
    got = np.asarray(jax.vmap(train, in_axes=(0, 0, None))(params, keys, IDS))
    for n, key in enumerate(keys):
        want = np.asarray(train(embedder.init(key), key, IDS))
        np.testing.assert_allclose(got[n], want, rtol=0, atol=FUSION)
        np.testing.assert_array_equal(got[n] == 0, want == 0)


def test_vmap_over_the_batch():
    embedder, params = made()
    by_row = jax.vmap(functools.partial(embedder.apply, is_training=False), in_axes=(None, None, 0))
    np.testing.assert_allclose(by_row(params, None, IDS), evaluate(), rtol=0, atol=FUSION)

    def row(ids, positions):
        return embedder.apply(params, None, ids, is_training=False, positions=positions)

    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    np.testing.assert_allclose(
        jax.vmap(row)(IDS, positions), evaluate(positions=positions), rtol=0, atol=FUSION
    )


def test_positions_that_vmap_maps_get_the_hint():
    embedder, params = made()
    by_row = jax.vmap(functools.partial(embedder.apply, is_training=False), in_axes=(None, None, 0))
    hint = (
        "shape []; add jnp.arange(length) to a scalar offset; "
        "jax.vmap maps keyword arguments over axis 0: bind them with functools.partial"
    )
    square = np.zeros([5, 5], np.int32)
    with pytest.raises(
        ValueError, match=message("positions", "a last axis of the ids' length, 5", hint)
    ):
        by_row(params, None, square, positions=np.arange(5))


def test_token_types_that_vmap_maps_are_refused():
    """One row of types for all, mapped, would be one type for all tokens of each row."""
    embedder, params = made(BERT)
    by_row = jax.vmap(functools.partial(embedder.apply, is_training=False), in_axes=(None, None, 0))
    with pytest.raises(ValueError, match=r"^token_types: wanted .*, got shape \[\]"):
        by_row(params, None, np.zeros([5, 5], np.int32), token_types=np.array([0, 0, 1, 1, 1]))


@pytest.mark.slow
def test_gradients():
    embedder, params = made(BERT)

    def loss(params, is_training):
        x = embedder.apply(
            params, KEY, IDS, is_training=is_training, token_types=(IDS > 4).astype(int)
        )
        return (x**2).mean() + (embedder.logits(params, x[..., :6]) ** 2).mean()

    gradient_of = jax.jit(jax.grad(loss), static_argnums=1)
    for is_training in (False, True):
        gradient = map(np.asarray, jax.tree.leaves(gradient_of(params, is_training)))
        assert all(np.isfinite(leaf).all() and leaf.any() for leaf in gradient)


def test_inside_another_jit():
    embedder, params = made()

    @jax.jit
    def step(params, key, ids, offset):
        positions = offset + jnp.arange(ids.shape[-1])
        train = embedder.apply(params, key, ids, is_training=True, positions=positions)
        return train, embedder.apply(params, None, ids, is_training=False, positions=positions)

    trained, evaluated = step(params, KEY, IDS, 4)
    options = {"positions": np.arange(4, 9)}
    np.testing.assert_allclose(evaluated, evaluate(**options), rtol=0, atol=FUSION)
    np.testing.assert_allclose(
        trained, embedder.apply(params, KEY, IDS, is_training=True, **options), rtol=0, atol=FUSION
    )


def of_raw_key(embedder, is_training):
    """What an exported program takes: arrays of plain dtypes."""

    def function(params, words, ids):
        return embedder.apply(params, words, ids, is_training=is_training)

    return function


@pytest.mark.slow
@pytest.mark.parametrize("serialised", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
def test_export_and_back(is_training, serialised):
    if serialised:
        pytest.importorskip("flatbuffers", reason="jax serialises with it")
    embedder, params = made()
    arguments = (params, jax.random.PRNGKey(3), IDS)
    function = jax.jit(of_raw_key(embedder, is_training))
    exported = jax.export.export(function)(*arguments)
    if serialised:
        exported = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(exported.call(*arguments), function(*arguments), rtol=0, atol=FUSION)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme",
    [te.Sinusoidal(), te.Sinusoidal(at_padding=1, pad_id=0), te.Learned(9), None],
    ids=str,
)
def test_export_for_any_batch_and_length(scheme):
    batch, length = jax.export.symbolic_shape("b, t", constraints=["t <= 9"])
    embedder, params = made(dataclasses.replace(CONFIG, scheme=scheme, dropout_rate=0.5))
    shape = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    function = jax.jit(
        lambda *arguments: [
            of_raw_key(embedder, is_training)(*arguments) for is_training in (False, True)
        ]
    )
    exported = jax.export.export(function)(params, jax.random.PRNGKey(3), shape)
    batches = (IDS, np.tile(IDS, (3, 1))[:, :2], IDS[:1, :1])

    def of_each_batch(function):
        return jax.jit(
            lambda params, key, batches: [function(params, key, ids) for ids in batches]
        )(params, jax.random.PRNGKey(3), batches)

    for ids, *results in zip(
        batches, of_each_batch(exported.call), of_each_batch(function), strict=True
    ):
        for got, expected in zip(*results, strict=True):
            np.testing.assert_allclose(
                got, expected, rtol=0, atol=FUSION, err_msg=f"ids of shape {ids.shape}"
            )


@pytest.mark.slow
def test_positions_of_other_widths():
    highest = np.array([2**32 - 1, 2**31, 5, 4, 3], np.uint32)
    embedder, params = made(dataclasses.replace(CONFIG, scheme=te.Sinusoidal()))
    both = highest, np.zeros_like(highest)
    found, at_zero = (
        np.asarray(embedder.apply(params, None, IDS, is_training=False, positions=each))
        for each in both
    )
    encoding, of_zero = (np.asarray(te.sinusoidal_encoding(each, CONFIG.d_model)) for each in both)
    np.testing.assert_allclose(
        found - at_zero, np.broadcast_to(encoding - of_zero, found.shape), rtol=0, atol=4 * FUSION
    )
    with x64():
        lost = embedder.apply(
            params,
            None,
            IDS,
            is_training=False,
            positions=jax.device_put(np.arange(5) + 2.0**24 + 0.5),
        )
    assert np.isnan(lost).all()


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize(
    "config", [CONFIG, dataclasses.replace(CONFIG, dtype="bfloat16")], ids=["float32", "bfloat16"]
)
def test_lowers_for_other_platforms(platform, is_training, config):
    embedder, params = made(config)
    traced = jax.jit(of_raw_key(embedder, is_training)).trace(params, jax.random.PRNGKey(3), IDS)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.gather" in text
    assert f"x8x{'bf16' if config.dtype == jnp.bfloat16 else 'f32'}>" in text


def lowered_size(length, is_training):
    embedder, params = made(dataclasses.replace(CONFIG, d_model=512))
    function = jax.jit(of_raw_key(embedder, is_training))
    return len(
        function.lower(
            params, jax.random.PRNGKey(0), jax.ShapeDtypeStruct([2, length], jnp.int32)
        ).as_text()
    )


@pytest.mark.parametrize("is_training", [False, True])
def test_no_constant_grows_with_the_length(is_training):
    short, long = lowered_size(512, is_training), lowered_size(131_072, is_training)
    # Longer numerals in the shapes are all that may differ.
    assert abs(long - short) < 0.05 * short
    assert long < 200_000


# Meshes.


def meshes():
    for kind in (AxisType.Explicit, AxisType.Auto):
        for shape in ((8, 1), (2, 4)):
            mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind))
            yield pytest.param(mesh, set_mesh, id=f"{kind.name.lower()}-{shape[0]}x{shape[1]}")


def spread(mesh, columns):
    """Parameters (replicated, or their channels over `model`) and ids (rows over `data`) on a
    mesh."""
    _, params = made()
    ids = np.tile(IDS, (4, 1))
    table = NamedSharding(mesh, P(None, columns))
    return (
        jax.tree.map(lambda a: jax.device_put(a, table), params),
        jax.device_put(ids, NamedSharding(mesh, P("data"))),
        ids,
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("columns", [None, "model"], ids=["replicated", "columns"])
@pytest.mark.parametrize(("mesh", "set_mesh"), list(meshes()))
def test_on_a_mesh_the_values_are_one_device_s(mesh, set_mesh, columns, is_training):
    embedder, params = made()
    key = KEY if is_training else None
    spread_params, spread_ids, ids = spread(mesh, columns)
    want = embedder.apply(params, key, ids, is_training=is_training)
    with set_mesh(mesh):
        got = embedder.apply(spread_params, key, spread_ids, is_training=is_training)
    np.testing.assert_allclose(got, want, rtol=0, atol=FUSION)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None, columns)), 3)


# The door.


def test_training_with_dropout_needs_a_key():
    embedder, params = made()
    with pytest.raises(
        ValueError,
        match=message("rng", "a key such as jax.random.key(0), to train with dropout", "None"),
    ):
        embedder.apply(params, None, IDS, is_training=True)


def test_the_flag_is_a_python_bool():
    embedder, params = made()
    step = jax.jit(lambda flag: embedder.apply(params, KEY, IDS, is_training=flag))
    with pytest.raises(TypeError, match=message("is_training", TRACED_FLAG, "a traced bool[]")):
        step(True)
    with pytest.raises(TypeError, match=message("is_training", FLAG, "int 0")):
        embedder.apply(params, None, IDS, is_training=0)
    with pytest.raises(TypeError, match=r"missing .*argument: 'is_training'"):
        embedder.apply(params, None, IDS)
    np.testing.assert_array_equal(
        embedder.apply(params, None, IDS, is_training=np.False_), evaluate()
    )


LENGTH = "a last axis of the ids' length, 5"
BAD_CALLS = [
    (CONFIG, {"ids": 3}, ValueError, ("ids", "shape [..., length]", "shape []")),
    (CONFIG, {"ids": IDS / 2}, TypeError, ("ids", "an integer dtype", "float64")),
    (CONFIG, {"ids": IDS > 0}, TypeError, ("ids", "an integer dtype", "bool")),
    (
        CONFIG,
        {"ids": [[1], [2, 3]]},
        ValueError,
        ("ids", "an array, or nested lists of equal lengths", "lists of unequal lengths"),
    ),
    (CONFIG, {"positions": np.arange(4)}, ValueError, ("positions", LENGTH, "shape [4]")),
    (CONFIG, {"positions": [[3], [4]]}, ValueError, ("positions", LENGTH, "shape [2, 1]")),
    (
        CONFIG,
        {"positions": np.zeros([3, 5], int)},
        ValueError,
        ("positions", "a shape that broadcasts to that of the ids, [2, 5]", "shape [3, 5]"),
    ),
    (
        CONFIG,
        {"positions": [0, 1, 2, 3, 2**31]},
        ValueError,
        ("positions", "integers inside int32, -2147483648..2147483647", "2147483648 at index [4]"),
    ),
    (
        CONFIG,
        {"positions": np.arange(5, dtype=np.float16)},
        TypeError,
        ("positions", "an integer dtype, or float32 (16-bit floats skip integers)", "float16"),
    ),
    (
        dataclasses.replace(CONFIG, scheme=te.Learned(4)),
        {},
        ValueError,
        ("ids", "a length of at most 4, where Learned ends", "length 5"),
    ),
    (
        dataclasses.replace(CONFIG, scheme=te.Learned(16)),
        {"positions": np.arange(5.0)},
        TypeError,
        ("positions", "an integer dtype", "float32"),
    ),
    (
        CONFIG,
        {"token_types": IDS},
        ValueError,
        ("token_types", "None, since num_token_types is not set", "a traced int32[2, 5]"),
    ),
    (BERT, {}, ValueError, ("token_types", "an array, since num_token_types is set", "None")),
    (BERT, {"token_types": IDS / 2}, TypeError, ("token_types", "an integer dtype", "float64")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "options", "error", "parts"),
    BAD_CALLS,
    ids=[f"{n}-{bad[3][0]}" for n, bad in enumerate(BAD_CALLS)],
)
def test_bad_calls_are_refused(config, options, error, parts):
    with pytest.raises(error, match=message(*parts)):
        evaluate(**{"ids": IDS, "config": config, **options})


def test_logits_refuse_bad_inputs():
    embedder, params = made()
    with pytest.raises(TypeError, match=message("x", "a floating dtype of 16 to 64 bits", "int32")):
        embedder.logits(params, IDS)
    with pytest.raises(
        ValueError, match=message("x", "a last axis of the table's width, (8,)", "(5,)")
    ):
        embedder.logits(params, IDS.astype(np.float32))


def test_an_embedder_refuses_anything_but_a_config():
    with pytest.raises(
        TypeError,
        match=message("config", "an EmbedderConfig", "dict {'d_model': 8, 'vocab_size': 11}"),
    ):
        te.Embedder({"vocab_size": 11, "d_model": 8})


# The config.


def test_configs_are_frozen_hashable_and_equal_by_value():
    same = te.EmbedderConfig(vocab_size=11, d_model=8, pad_id=0, param_dtype=np.float32)
    assert same == CONFIG
    assert hash(same) == hash(CONFIG)
    assert {CONFIG: 1}[same] == 1
    assert dataclasses.replace(CONFIG, d_model=9) != CONFIG
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'd_model'"):
        CONFIG.d_model = 9


def test_a_dtype_may_be_spelled_in_words():
    words, types = (
        te.EmbedderConfig(11, 8, dtype=a, param_dtype=b)
        for a, b in (("bfloat16", "float16"), (jnp.bfloat16, jnp.float16))
    )
    assert words == types
    embedder, params = made(words)
    assert embedder.apply(params, None, IDS, is_training=False).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float16)}


BAD_FIELDS = [
    ("vocab_size", 0, ValueError, POSITIVE, "0"),
    ("vocab_size", 11.0, TypeError, "a Python int", "float 11.0"),
    ("d_model", -1, ValueError, POSITIVE, "-1"),
    ("d_model", True, TypeError, "a Python int", "bool True"),
    (
        "scheme",
        "learned",
        TypeError,
        "Sinusoidal(...), SinusoidalGrid(...) or Learned(max_len=...), or None",
        "str 'learned'",
    ),
    (
        "scheme",
        te.Sinusoidal,
        TypeError,
        "Sinusoidal(...), SinusoidalGrid(...) or Learned(max_len=...), or None",
        f"type {reprlib.repr(te.Sinusoidal)}",
    ),
    ("dropout_rate", 1.0, ValueError, "a number in [0, 1)", "1.0"),
    ("dropout_rate", -0.5, ValueError, "a number in [0, 1)", "-0.5"),
    ("dropout_rate", None, TypeError, "a Python number", "NoneType None"),
    ("pad_id", 0.0, TypeError, "a Python int", "float 0.0"),
    ("pad_id", 2**31, ValueError, "an int of at most 2147483646", "2147483648"),
    ("scale", 0, TypeError, SCALE, "0"),
    ("scale", 1, TypeError, SCALE, "1"),
    ("num_token_types", 0, ValueError, POSITIVE, "0"),
    ("num_token_types", 2.0, TypeError, "a Python int", "float 2.0"),
    ("layer_norm_eps", 0.0, ValueError, "a finite number above 0", "0.0"),
    ("layer_norm_eps", float("inf"), ValueError, "a finite number above 0", "inf"),
    ("layer_norm_eps", True, TypeError, "a Python number", "bool True"),
    ("embedding_width", 0, ValueError, POSITIVE, "0"),
    ("embedding_width", "6", TypeError, "a Python int", "str '6'"),
    ("out_of_range", "wrap", ValueError, POLICIES, "'wrap'"),
    ("lookup_style", "matmul", ValueError, "one of 'gather', 'one_hot'", "'matmul'"),
    ("param_dtype", jnp.int32, TypeError, "a floating dtype of 16 to 64 bits", "int32"),
    ("dtype", "int8", TypeError, "a floating dtype of 16 to 64 bits", "int8"),
    ("output", False, TypeError, "an OutputLayer, a str, or None", "bool False"),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "want", "got"),
    BAD_FIELDS,
    ids=[f"{n}-{bad[0]}" for n, bad in enumerate(BAD_FIELDS)],
)
def test_bad_fields_are_refused(name, value, error, want, got):
    with pytest.raises(error, match=message(name, want, got)):
        dataclasses.replace(CONFIG, **{name: value})


def test_every_field_has_a_bad_value():
    assert {bad[0] for bad in BAD_FIELDS} == {
        field.name for field in dataclasses.fields(te.EmbedderConfig)
    }


def test_options_of_positions_are_checked_with_the_config():
    with pytest.raises(
        ValueError,
        match=message("layout", "one of 'interleaved', 'sin_cos', 'cos_sin'", "'halves'"),
    ):
        te.EmbedderConfig(11, 8, scheme=te.Sinusoidal(layout="halves"))
    with pytest.raises(
        ValueError, match=message("shift", "a number below d_model // 2 = 2", "3.0")
    ):
        te.EmbedderConfig(11, 8, scheme=te.Sinusoidal(shift=3), embedding_width=4)


# Resizing.

PATH = "transformer_embedding/~/token_embedding"


@pytest.mark.slow
def test_a_grown_vocabulary_keeps_its_rows_and_draws_like_them():
    big = te.Embedder(dataclasses.replace(CONFIG, vocab_size=200, d_model=16))
    params = drawn(big.init)
    # Channels of different means and deviations show whether new rows follow each channel's own.
    old = np.asarray(params[PATH]["embeddings"]) * np.arange(1, 17, dtype=np.float32) + np.arange(
        16, dtype=np.float32
    )
    grown = np.asarray(
        te.resize_vocabulary({PATH: {"embeddings": jax.device_put(old)}}, 4200, jax.random.key(1))[
            PATH
        ]["embeddings"]
    )
    np.testing.assert_array_equal(grown[:200], old)
    new, old = grown[200:].astype(np.float64), old.astype(np.float64)
    # Of 4000 normal samples the mean has deviation 4000**-0.5 and the deviation 8000**-0.5; five of
    # each.
    assert (np.abs(new.mean(0) - old.mean(0)) < 5 * 4000**-0.5 * old.std(0)).all()
    assert (np.abs(new.std(0) / old.std(0) - 1) < 5 * 8000**-0.5).all()


@pytest.mark.slow
def test_a_resized_vocabulary_fits_its_config():
    _, params = made()
    for size in (9, 11, 14):
        resized = te.resize_vocabulary(params, size, jax.random.key(1))
        embedder = te.Embedder(dataclasses.replace(CONFIG, vocab_size=size))
        last, past = np.asarray(embedder.apply(resized, None, [size - 1, size], is_training=False))
        assert np.isfinite(last).all()
        assert np.isnan(past).all()
        kept = min(size, 11)
        got, expected = (np.asarray(each[PATH]["embeddings"])[:kept] for each in (resized, params))
        np.testing.assert_array_equal(got, expected)


def test_resizing_touches_only_the_table():
    _, params = made(BERT)
    resized = te.resize_vocabulary(params, 9)
    assert resized.keys() == params.keys()
    for path in params.keys() - {PATH}:
        assert all(resized[path][name] is leaf for name, leaf in params[path].items())
    assert params[PATH]["embeddings"].shape == (11, 6)


@pytest.mark.slow
def test_a_resized_table_keeps_its_dtype():
    _, params = made(dataclasses.replace(CONFIG, param_dtype=jnp.bfloat16))
    for size in (5, 15):
        assert te.resize_vocabulary(params, size, KEY)[PATH]["embeddings"].dtype == jnp.bfloat16


def test_resize_vocabulary_refuses_bad_arguments():
    _, params = made()
    with pytest.raises(ValueError, match=message("vocab_size", POSITIVE, "0")):
        te.resize_vocabulary(params, 0)
    with pytest.raises(TypeError, match=message("vocab_size", "a Python int", "float 12.0")):
        te.resize_vocabulary(params, 12.0)
    with pytest.raises(ValueError, match=message("rng", "a key, to draw 3 new rows", "None")):
        te.resize_vocabulary(params, 14)
    with pytest.raises(
        ValueError,
        match=message("params", "one token_embedding with embeddings", "none among ['linear']"),
    ):
        te.resize_vocabulary({"linear": {}}, 14)
    two = {"a/token_embedding": params[PATH], "b/token_embedding": params[PATH]}
    with pytest.raises(
        ValueError,
        match=message("params", "one token_embedding with embeddings", " and ".join(two)),
    ):
        te.resize_vocabulary(two, 14)


LISTED = "params: transformer_embedding/~/token_embedding/embeddings: wanted an array (use jnp.asarray), got list [[0.0, 0.0, 0.0, 0.0]]"


def as_lists(params):
    return {
        path: {name: np.zeros([1, 4]).tolist() for name in module}
        for path, module in params.items()
    }


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (
            "rng: wanted one key of jax.random.key or jax.random.PRNGKey, got keys of shape [3]",
            lambda e, p: e.init(jax.random.split(KEY, 3)),
        ),
        (
            "rng: wanted one key of jax.random.key or jax.random.PRNGKey, got int 0",
            lambda e, p: e.init(0),
        ),
        (
            "rng: wanted one key of jax.random.key or jax.random.PRNGKey, got str 'x'",
            lambda e, p: e.apply(p, "x", [[1]], is_training=True),
        ),
        (
            "params: wanted a Haiku parameter tree, a dict of dicts, got list [1]",
            lambda e, p: e.apply([1], None, [[1]], is_training=False),
        ),
        (
            "params: wanted a Haiku parameter tree, a dict of dicts, got list [1]",
            lambda e, p: e.logits([1], np.ones((1, 4), np.float32)),
        ),
        (
            "params: wanted a Haiku parameter tree, a dict of dicts, got NoneType None",
            lambda e, p: te.resize_vocabulary(None, 4),
        ),
        (
            "rng: wanted one key of jax.random.key or jax.random.PRNGKey, got int 0",
            lambda e, p: te.resize_vocabulary(p, 400, 0),
        ),
        (LISTED, lambda e, p: e.apply(as_lists(p), None, [[1]], is_training=False)),
        (LISTED, lambda e, p: e.logits(as_lists(p), np.ones((1, 4), np.float32))),
        (LISTED, lambda e, p: e.cross_entropy(as_lists(p), np.ones((1, 4), np.float32), [1])),
    ],
)
def test_keys_and_params_of_another_kind_are_refused(message, call):
    embedder = te.Embedder(te.EmbedderConfig(8, 4))
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        call(embedder, drawn(embedder.init))


class TestResizePositions:
    config = te.EmbedderConfig(8, 4, scheme=te.Learned(max_len=4))

    def resized(self, table, max_len, **options):
        path = "transformer_embedding/~/learned_positional_encoding"
        params = drawn(te.Embedder(self.config).init)
        params = te.resize_positions(
            {**params, path: {"embeddings": jax.device_put(table.astype(np.float32))}},
            max_len,
            **options,
        )
        return np.asarray(params[path]["embeddings"])

    @pytest.mark.slow
    def test_a_line_stays_a_line(self):
        line = np.arange(4.0)[:, None] * np.array([1.0, -2.0, 0.5, 0.0])
        stretched = self.resized(line, 8)
        # Rows stand at the middles of their cells; at both ends the last row is held.
        places = np.clip((np.arange(8) + 0.5) / 2 - 0.5, 0, 3)
        np.testing.assert_allclose(
            stretched, places[:, None] * np.array([1.0, -2.0, 0.5, 0.0]), atol=1e-6
        )

    def test_the_same_length_changes_nothing(self):
        table = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
        np.testing.assert_allclose(self.resized(table, 4), table, rtol=1e-6)

    def test_the_longer_config_runs(self):
        params = te.resize_positions(drawn(te.Embedder(self.config).init), 9)
        longer = te.Embedder(dataclasses.replace(self.config, scheme=te.Learned(max_len=9)))
        assert np.isfinite(
            longer.apply(params, None, np.zeros((1, 9), int), is_training=False)
        ).all()

    def test_rows_before_the_start_are_kept(self):
        table = np.array(
            [[1000.0] * 4, [2000.0] * 4, *np.random.default_rng(0).normal(size=(3, 4))]
        )
        stretched = self.resized(table, 7, start=2)
        np.testing.assert_array_equal(stretched[:2], table[:2].astype(np.float32))
        np.testing.assert_array_equal(stretched[2:], self.resized(table[2:], 5))
        with pytest.raises(ValueError, match=r"^max_len: wanted an int of at least 3, got 2$"):
            self.resized(table, 2, start=2)
        with pytest.raises(ValueError, match=r"^start: wanted an int of at most 4, got 5$"):
            self.resized(table, 9, start=5)

    def test_bad_arguments_raise_errors(self):
        params = drawn(te.Embedder(te.EmbedderConfig(8, 4)).init)
        with pytest.raises(
            ValueError,
            match=r"^params: wanted one learned_positional_encoding with embeddings, got none among ",
        ):
            te.resize_positions(params, 9)
        with pytest.raises(ValueError, match=r"^max_len: wanted an int of at least 1, got 0$"):
            te.resize_positions(drawn(te.Embedder(self.config).init), 0)


# Arrays of numpy that jax would misread: in the other byte order, or with a mask.

WHOLE = te.EmbedderConfig(
    11,
    8,
    pad_id=0,
    num_token_types=2,
    layer_norm_eps=1e-6,
    embedding_width=6,
    scheme=te.Learned(9),
    dropout_rate=0.0,
)
FOREIGN = ">" if np.dtype("<f4").isnative else "<"


def in_another_byte_order(params):
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(f"{FOREIGN}f4"), params)


def doors(params):
    """What each function that takes parameters makes of them."""
    embedder, types = te.Embedder(WHOLE), IDS % 2
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)

    def module(initial_params=None):
        embed = te.TransformerEmbedding(
            WHOLE, initial_params=initial_params, name="transformer_embedding"
        )
        return embed(IDS, is_training=False, token_types=types)

    return {
        "apply": lambda: embedder.apply(params, None, IDS, is_training=False, token_types=types),
        "logits": lambda: embedder.logits(params, x),
        "cross_entropy": lambda: embedder.cross_entropy(params, x, [1, 2]),
        "resize_vocabulary": lambda: te.resize_vocabulary(params, 13, KEY),
        "resize_positions": lambda: te.resize_positions(params, 12),
        "transform": lambda: hk.transform(module).apply(params, None),
        "initial_params": lambda: hk.transform(lambda: module(params)).init(KEY),
        "token_embedding": lambda: hk.transform(lambda: te.TokenEmbedding(11, 6)(IDS)).apply(
            {"token_embedding": params["transformer_embedding/~/token_embedding"]}, None
        ),
        "positional_encoding": lambda: hk.transform(
            lambda: te.PositionalEncoding(te.Learned(9), 6)(x, is_training=False)
        ).apply(
            {
                "learned_positional_encoding": params[
                    "transformer_embedding/~/learned_positional_encoding"
                ]
            },
            None,
        ),
        "relative_position_bias": lambda: hk.transform(
            lambda: te.RelativePositionBias(6, num_buckets=11)([0], [1, 2])
        ).apply(
            {"relative_position_bias": params["transformer_embedding/~/token_embedding"]}, None
        ),
    }


@pytest.mark.parametrize("door", doors({"": 0}))
def test_parameters_in_another_byte_order_are_read_as_numbers(door):
    params = jax.tree.map(np.asarray, drawn(te.Embedder(WHOLE).init))
    expected = doors(params)[door]()
    for _ in range(2):
        found = doors(in_another_byte_order(params))[door]()
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert one.dtype.isnative or door.startswith("resize")
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "door", ["apply", "logits", "cross_entropy", "initial_params", "transform"]
)
def test_parameters_with_a_mask_are_refused(door):
    params = jax.tree.map(np.ma.masked_array, drawn(te.Embedder(WHOLE).init))
    with pytest.raises(TypeError, match=r": wanted an array without a mask \(fill it first: "):
        doors(params)[door]()


def in_a_model(params):
    """The layer's parameters at the paths that they have in somebody's model, beside others."""
    inside = {f"model/~/{path}": leaves for path, leaves in params.items()}
    return inside | {"model/~/layer_norm": {"scale": jnp.ones(3)}, "head": {"w": jnp.ones(3)}}


@pytest.mark.parametrize(
    "door",
    ["apply", "logits", "cross_entropy", "resize_vocabulary", "resize_positions", "initial_params"],
)
def test_every_door_finds_the_layer_in_the_parameters_of_a_model(door):
    params = drawn(te.Embedder(WHOLE).init)
    found, expected = (doors(tree)[door]() for tree in (in_a_model(params), params))
    if door.startswith("resize"):
        expected = in_a_model(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("door", ["apply", "cross_entropy", "initial_params", "resize_vocabulary"])
def test_two_layers_in_one_tree_are_both_named(door):
    params = drawn(te.Embedder(WHOLE).init)
    want = message("params", "one token_embedding with embeddings", f"model/~/{PATH} and {PATH}")
    with pytest.raises(ValueError, match=want.replace("params", "(initial_)?params", 1)):
        doors({**params, **in_a_model(params)})[door]()


def test_parameters_of_another_config_are_refused():
    embedder, params = te.Embedder(WHOLE), drawn(te.Embedder(WHOLE).init)
    table = "token_embedding/embeddings"
    without = {path: leaves for path, leaves in params.items() if path != PATH}
    narrow = {**params, PATH: {"embeddings": params[PATH]["embeddings"][:, :5]}}
    for method in (embedder.logits, functools.partial(embedder.cross_entropy, labels=[1, 2])):
        with pytest.raises(
            ValueError, match=r"^params: wanted one token_embedding with embeddings, got none among"
        ):
            method(without, np.zeros((2, 6), np.float32))
        with pytest.raises(ValueError, match=rf"^params: wanted {table} \[.*, got {table} \["):
            method(narrow, np.zeros((2, 6), np.float32))
    plain = te.Embedder(dataclasses.replace(WHOLE, scheme=te.Sinusoidal()))
    with pytest.raises(ValueError, match=r"got .*learned_positional_encoding"):
        plain.apply(params, None, IDS, is_training=False, token_types=IDS % 2)
    beside = {**params, "my_model/linear": {"w": np.zeros(3, np.float32)}}
    types = {"token_types": IDS % 2, "is_training": False}
    np.testing.assert_array_equal(
        embedder.apply(beside, None, IDS, **types), embedder.apply(params, None, IDS, **types)
    )


def test_positions_may_be_passed_where_nothing_reads_them():
    """So that one line of code serves models with and without added positions."""
    embedder = te.Embedder(dataclasses.replace(CONFIG, scheme=None))
    params = embedder.init(KEY)
    apply = functools.partial(embedder.apply, params, None, IDS, is_training=False)
    np.testing.assert_array_equal(apply(positions=np.arange(5)), apply())
