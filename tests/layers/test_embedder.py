"""The compiled embedder: traces, values, transformations, exports, meshes, and the parameters that
it takes."""

import dataclasses
import functools

import haiku as hk
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import few
from compare import equal, near
from drawn import drawn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, mesh_of, put
from refused import refused
from sample import IDS, KEY, ROOT, TOKENS, TYPES

import transformer_embed as te
from transformer_embed._src.layers import embedder as source

CONFIG = te.EmbedderConfig(vocab_size=11, d_model=8, pad_id=0, dropout_rate=0.1)
BERT = te.EmbedderConfig(
    vocab_size=11,
    d_model=8,
    scheme=te.Learned(max_len=16),
    scale=1.0,
    num_token_types=2,
    layer_norm_eps=1e-12,
    embedding_width=6,
)
# Two programs for one function may fuse a product and a sum: one rounding less of each, of values
# below 16; a norm and a linear layer over 6 channels add their sums.
FUSION = 16 * 8 * float(np.finfo(np.float32).eps)


@functools.cache
def made(config=CONFIG):
    embedder = te.Embedder(config)
    return embedder, drawn(embedder.init)


def evaluate(ids=IDS, config=CONFIG, **options):
    embedder, params = made(config)
    return embedder.apply(params, None, ids, is_training=False, **options)


def assert_close(got, want):
    near(got, want, atol=FUSION)


# --- Traces.


@pytest.fixture
def traces(monkeypatch):
    """One entry for each trace."""
    traced, embed = [], source.embed
    monkeypatch.setattr(
        source,
        "embed",
        lambda *args: traced.append(args) or embed(*args),
    )
    return traced


def weak(shape):
    """Threes of a weak dtype."""
    threes = jnp.full(shape, 3)
    assert threes.weak_type
    return threes


def spellings(array):
    """The same integers as a list, of every dtype, of numpy and of jax."""
    yield array.tolist()
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        yield array.astype(name)
        if np.dtype(name).itemsize < 4:
            yield jax.device_put(array.astype(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"d_model": 101}, {"d_model": 102, "scheme": te.Learned(16), "num_token_types": 2}],
)
def test_one_trace_whatever_the_dtype_the_offset_the_key_and_an_equal_config(traces, changes):
    """The widths are nobody else's."""
    config = dataclasses.replace(CONFIG, **changes)
    params = drawn(te.Embedder(config).init)
    traces.clear()
    types = {"token_types": TYPES} if config.num_token_types else {}

    def apply(ids, key=None, is_training=False, **options):
        again = dataclasses.replace(config, param_dtype="float32", dropout_rate=np.float64(0.1))
        options = {"positions": np.arange(5), "is_training": is_training} | types | options
        return te.Embedder(again).apply(params, key, ids, **options)

    want = apply(IDS)
    for ids in spellings(IDS):
        equal(apply(ids), want)
    for offset in (1, 9):
        row = np.arange(5) + offset
        moved = apply(IDS, positions=row)
        assert not np.array_equal(moved, want)
        for positions in (*spellings(row), tuple(row)):
            equal(apply(IDS, KEY, positions=positions), moved)
    apply(weak([2, 5]), positions=weak([5]), **dict.fromkeys(types, weak([2, 5])))
    for other in spellings(TYPES) if types else ():
        equal(apply(IDS, token_types=other), want)
    assert len(traces) == 1
    for _ in range(2):
        apply(IDS[:1], **dict.fromkeys(types, TYPES[:1]))
        apply(IDS, KEY, is_training=True)
    assert len(traces) == 3


# --- Values.


@pytest.mark.slow
def test_init_and_training_follow_a_key_of_either_kind_and_evaluation_none():
    embedder, params = made()
    train = functools.partial(embedder.apply, params, ids=IDS, is_training=True)
    for draw, share in ((embedder.init, 0.9), (train, 0)):
        first, again, other = (
            jax.tree.leaves(draw(rng=key))[0]
            for key in (KEY, jax.random.PRNGKey(0), jax.random.key(1))
        )
        equal(first, again)
        assert (first != other).mean() > share
    equal(embedder.apply(params, KEY, IDS, is_training=np.False_), evaluate())
    no_rate, params = made(dataclasses.replace(CONFIG, dropout_rate=0.0))
    assert_close(no_rate.apply(params, None, IDS, is_training=True), evaluate())


# --- Transformations.


@functools.cache
def both_flags(embedder):
    """Evaluation and training on arrays of plain dtypes, as an exported program takes them."""

    def function(params, words, ids):
        return [embedder.apply(params, words, ids, is_training=flag) for flag in (False, True)]

    return jax.jit(function)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", few([te.Sinusoidal(), te.Sinusoidal(at_padding=1, pad_id=0), te.Learned(9), None], 2)
)
def test_export_for_any_batch_and_length_and_back(scheme):
    pytest.importorskip("flatbuffers", reason="jax serialises with it")
    batch, length = jax.export.symbolic_shape("b, t", constraints=["t <= 9"])
    embedder, params = made(dataclasses.replace(CONFIG, scheme=scheme, dropout_rate=0.5))
    shape = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    exported = jax.export.export(both_flags(embedder))(params, jax.random.PRNGKey(3), shape)
    exported = jax.export.deserialize(exported.serialize())
    for ids in (np.tile(IDS, (3, 1))[:, :2], IDS[:1, :1]):
        arguments = (params, jax.random.PRNGKey(3), ids)
        assert_close(exported.call(*arguments), both_flags(embedder)(*arguments))


@pytest.mark.slow
def test_no_constant_grows_with_the_length():
    embedder, params = made(dataclasses.replace(CONFIG, d_model=512))
    shapes = [jax.ShapeDtypeStruct([2, length], jnp.int32) for length in (512, 131_072)]
    short, long = (
        len(both_flags(embedder).lower(params, jax.random.PRNGKey(0), shape).as_text())
        for shape in shapes
    )
    # Longer numerals in the shapes are all that may differ.
    assert abs(long - short) < 0.05 * short
    assert long < 400_000


# --- Meshes.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "columns"),
    [(EXPLICIT, None), (EXPLICIT, "model"), (AUTO, "model")],
)
def test_on_a_mesh_the_values_are_one_device_s(kind, columns):
    """Ids have their rows over `data`, parameters perhaps their channels over `model`."""
    mesh, (embedder, params) = mesh_of((2, 4), ("data", "model"), kind), made()
    spread, ids = put(mesh, params, None, columns), put(mesh, IDS, "data")
    with jax.set_mesh(mesh):
        found = both_flags(embedder)(spread, jax.random.PRNGKey(0), ids)
    want = both_flags(embedder)(params, jax.random.PRNGKey(0), IDS)
    assert_close(found, want)
    sharding = NamedSharding(mesh, P("data", None, columns))
    assert all(each.sharding.is_equivalent_to(sharding, 3) for each in found)


# --- The parameters of a whole model, in other byte orders, of other configs.

WHOLE = dataclasses.replace(BERT, pad_id=0, layer_norm_eps=1e-6, dropout_rate=0.0)
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)


@functools.cache
def of_the_whole():
    return jax.tree.map(np.asarray, drawn(te.Embedder(WHOLE).init))


def module(initial_params=None):
    embed = te.TransformerEmbedding(
        WHOLE, initial_params=initial_params, name="transformer_embedding"
    )
    return embed(IDS, is_training=False, token_types=TYPES)


whole = te.Embedder(WHOLE)
# What each function that takes parameters makes of them.
DOORS = {
    "apply": lambda params: whole.apply(params, None, IDS, is_training=False, token_types=TYPES),
    "output": whole.output,
    "initial_params": lambda params: hk.transform(lambda: module(params)).init(KEY),
    "resize": lambda params: te.pretrained.resize(
        params, WHOLE, dataclasses.replace(WHOLE, vocab_size=13, scheme=te.Learned(12)), rng=KEY
    ),
}


each_door = pytest.mark.parametrize("door", DOORS)


def in_a_model(params):
    """The layer's parameters at the paths that they have in somebody's model, beside others."""
    inside = {f"model/~/{path}": leaves for path, leaves in params.items()}
    return inside | {"model/~/layer_norm": {"scale": jnp.ones(3)}, "head": {"w": jnp.ones(3)}}


@each_door
def test_every_door_finds_the_layer_in_the_parameters_of_a_model(door):
    params = of_the_whole()
    found, expected = (DOORS[door](tree) for tree in (in_a_model(params), params))
    if door.startswith("resize"):
        expected = in_a_model(expected)
    equal(found, expected)


@each_door
def test_parameters_that_do_not_hold_one_layer_of_the_config_are_refused(door):
    params, table = of_the_whole(), "token_embedding/embeddings"
    name = "initial_params" if door == "initial_params" else "params"
    layer_norm = {**params[f"{ROOT}layer_norm"], "w": X}
    one = "one token_embedding with embeddings"
    for tree, text in [
        (
            {**params, **in_a_model(params)},
            f"{one} (of a ... pass the modules of one), got model/~/{TOKENS} and {TOKENS}",
        ),
        ({"linear": {}}, f"{one}, got none among ['linear']"),
        (
            {**params, TOKENS: {"embeddings": X}},
            f"{{'{table}': (11, 6)}}, got {{'{table}': (2, 6)}}",
        ),
        ({**params, f"{ROOT}layer_norm": layer_norm}, "no others, got {'layer_norm/w': (2, 6)}"),
    ]:
        with refused(ValueError, f"{name}: wanted {text}"):
            DOORS[door](tree)
    with pytest.raises(
        ValueError, match=r"wanted \{'layer_norm/offset': \(6,\), .*, got none of them$"
    ):
        DOORS[door]({TOKENS: params[TOKENS]})


# --- Errors, by message.

FLAG = "is_training: wanted a Python bool ..."
LENGTH = "positions: ... its last axis"
LISTED = "params: wanted {'layer_norm/offset': (6,), ... got {'token_embedding/embeddings': None}"
KEYS = "rng: wanted one key of jax.random.key or jax.random.PRNGKey, got"
TREE = "params: ... got list [1]"
LISTS = {TOKENS: {"embeddings": [[0.0, 0.0]]}}


def trained(key, **options):
    return made()[0].apply(made()[1], key, IDS, is_training=True)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: te.Embedder({"d_model": 8}), TypeError, "config: ... got dict {'d_model': 8}"),
        (lambda: whole.init(jax.random.split(KEY, 3)), TypeError, f"{KEYS} an array key<fry>[3]"),
        (lambda: trained("x"), TypeError, f"{KEYS} str 'x'"),
        (lambda: trained(None), ValueError, "rng: ... got None"),
        (lambda: made()[0].apply(made()[1], None, IDS, is_training=0), TypeError, f"{FLAG}, got int 0"),
        (lambda: jax.jit(lambda flag: made()[0].apply(made()[1], KEY, IDS, is_training=flag))(True), TypeError,
         f"{FLAG}, got a traced bool[]"),
        *[(functools.partial(DOORS[door], [1]), TypeError, TREE) for door in ("apply", "output", "resize")],
        *[(functools.partial(DOORS[door], LISTS), ValueError, LISTED) for door in ("apply", "output")],
        (lambda: evaluate(IDS / 2), TypeError, "ids: ... got float64"),
        (lambda: evaluate(positions=3), ValueError, f"{LENGTH}, got shape []"),
        (lambda: evaluate(positions=[0, 1, 2, 3, 2**31]), ValueError,
         "positions: ... -2147483648..2147483647, got 2147483648 at index [4]"),
        (lambda: evaluate(config=BERT, token_types=1), ValueError,
         "token_types: ... its last axis, got shape []"),
        (lambda: evaluate(token_types=jnp.asarray(TYPES)), ValueError, f"token_types: ... None, got an array int32{[*TYPES.shape]}"),
    ],
)  # fmt: skip
def test_bad_calls_are_refused(call, error, text):
    with refused(error, text):
        call()


def test_initial_params_of_another_dtype_are_rounded_to_the_config_s():
    config = te.EmbedderConfig(5, 4, scheme=None, param_dtype=jnp.bfloat16)
    wide = te.Embedder(dataclasses.replace(config, param_dtype=jnp.float32)).init(KEY)
    layer = lambda: te.TransformerEmbedding(config, initial_params=wide)(IDS, is_training=False)
    made = hk.transform(layer).init(KEY)
    equal(made, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide))
    assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {jnp.dtype(jnp.bfloat16)}


def test_initial_params_with_a_mask_are_refused():
    """jax would read what the mask hides."""
    masked = jax.tree.map(lambda leaf: np.ma.masked_array(leaf, leaf > 0), of_the_whole())
    with refused(TypeError, "initial_params: ... without a mask, got a masked array"):
        hk.transform(lambda: module(masked)).init(KEY)


def test_a_sharded_table_among_initial_params_is_taken_as_it_is():
    embedder, mesh = te.Embedder(te.EmbedderConfig(128, 4)), mesh_of((2,), ("model",))
    placed = put(mesh, embedder.init(KEY), "model")
    layer = functools.partial(te.TransformerEmbedding, embedder.config, initial_params=placed)
    made = hk.transform(lambda: layer()(IDS, is_training=False)).init(KEY)
    equal(made, placed)


def test_parameters_that_are_not_floats_are_named():
    """They were called by the names of arguments of other functions: table, bias."""
    output = te.OutputConfig(tied=False, bias=True)
    embedder, params = made(dataclasses.replace(BERT, embedding_width=None, output=output))
    apply = functools.partial(embedder.apply, rng=None, ids=IDS, is_training=False)
    names = ("embeddings", "output_embeddings", "output_bias")
    rows = [
        *[("token_embedding", name, embedder.output) for name in names[1:]],
        *[
            (module, names[0], functools.partial(apply, token_types=TYPES))
            for module in ("token_embedding", "token_type_embedding", "learned_positional_encoding")
        ],
    ]
    for module, name, call in rows:
        path = f"transformer_embedding/~/{module}"
        leaves = params[path] | {name: params[path][name].astype(int)}
        owner = f"{module}/" if name == "embeddings" else ""
        with refused(TypeError, f"{owner}{name}: ... got int32"):
            call(params | {path: leaves})
