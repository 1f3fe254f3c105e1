"""The compiled embedder: traces, keys, exports, meshes, and the parameters that it takes."""

import dataclasses
import functools

import haiku as hk
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal, near
from drawn import drawn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, mesh_of, put
from refused import each_raises, refused
from sample import IDS, KEY, POSITIONS, ROOT, TOKENS, TYPES

import transformer_embed as te
from transformer_embed._src.layers import embedder as source

CONFIG = te.EmbedderConfig(vocab_size=11, d_model=8, pad_id=0, dropout_rate=0.1)
# Two programs for one function may fuse a product and a sum: one rounding less of each, of values
# below 16, over 8 channels.
near = functools.partial(near, atol=16 * 8 * float(np.finfo(np.float32).eps))


@functools.cache
def made(**fields):
    embedder = te.Embedder(dataclasses.replace(CONFIG, **fields))
    return embedder, jax.device_get(drawn(embedder.init))


# --- Traces and keys.


@pytest.fixture
def traces(monkeypatch):
    """One entry for each trace."""
    traced, embed = [], source.embed
    monkeypatch.setattr(source, "embed", lambda *args: traced.append(args) or embed(*args))
    return traced


def spellings(array):
    """The same integers as a list, of every dtype, of numpy and of jax."""
    yield array.tolist()
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        yield array.astype(name)
        if np.dtype(name).itemsize < 4:
            yield jax.device_put(array.astype(name))


@pytest.mark.slow
def test_one_trace_whatever_the_dtype_the_offset_the_key_and_an_equal_config(traces):
    """The width is nobody else's."""
    fields = {"d_model": 101, "scheme": te.Learned(16), "num_token_types": 2}
    config = dataclasses.replace(CONFIG, **fields)
    params = drawn(te.Embedder(config).init)
    traces.clear()

    def apply(ids=IDS, key=None, *, positions=range(5), types=TYPES, is_training=False):
        again = dataclasses.replace(config, param_dtype="float32", dropout_rate=np.float64(0.1))
        options = {"positions": positions, "token_types": types, "is_training": is_training}
        return te.Embedder(again).apply(params, key, ids, **options)

    want, moved = apply(), apply(positions=np.arange(5) + 9)
    assert not np.array_equal(moved, want)
    for ids, positions, types in zip(*map(spellings, (IDS, np.arange(5) + 9, TYPES)), strict=True):
        equal(apply(ids, types=types), want)
        equal(apply(ids, KEY, positions=positions), moved)
    # Of a weak dtype.
    threes = jnp.full([2, 5], 3)
    apply(threes, positions=jnp.full([5], 3), types=threes)
    assert len(traces) == 1
    for _ in range(2):
        apply(IDS[:1], types=TYPES[:1])
        apply(key=KEY, is_training=True)
    assert len(traces) == 3


@pytest.mark.slow
def test_init_and_training_follow_a_key_of_either_kind_and_evaluation_none():
    embedder, params = made()
    apply = functools.partial(embedder.apply, params, ids=IDS)
    for draw, share in ((embedder.init, 0.9), (functools.partial(apply, is_training=True), 0)):
        first, again, other = (
            np.asarray(jax.tree.leaves(draw(rng=key))[0])
            for key in (KEY, jax.random.PRNGKey(0), jax.random.key(1))
        )
        equal(first, again)
        assert (first != other).mean() > share
    evaluated = apply(rng=None, is_training=False)
    equal(apply(rng=KEY, is_training=np.False_), evaluated)
    no_rate, params = made(dropout_rate=0.0)
    near(no_rate.apply(params, None, IDS, is_training=True), evaluated)


# --- Exports and meshes.


@functools.cache
def both_flags(embedder):
    """Evaluation and training on arrays of plain dtypes, as an exported program takes them."""

    def function(params, words, ids):
        return [embedder.apply(params, words, ids, is_training=flag) for flag in (False, True)]

    return jax.jit(function)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "ids"),
    [
        (te.Sinusoidal(at_padding=1, pad_id=0), np.tile(IDS, (3, 1))[:, :2]),
        (te.Learned(9), IDS[:1, :1]),
    ],
)
def test_export_for_any_batch_and_length_and_back(scheme, ids):
    """So no constant grows with the length."""
    pytest.importorskip("flatbuffers", reason="jax serialises with it")
    batch, length = jax.export.symbolic_shape("b, t", constraints=["t <= 9"])
    embedder, params = made(scheme=scheme, dropout_rate=0.5)
    shape = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    exported = jax.export.export(both_flags(embedder))(params, jax.random.PRNGKey(3), shape)
    exported = jax.export.deserialize(exported.serialize())
    arguments = (params, jax.random.PRNGKey(3), ids)
    near(exported.call(*arguments), both_flags(embedder)(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
def test_on_a_mesh_the_values_are_one_device_s(kind):
    """Ids have their rows over `data`, parameters their channels over `model`."""
    mesh, (embedder, params) = mesh_of((2, 4), ("data", "model"), kind), made()
    spread, ids = put(mesh, params, None, "model"), put(mesh, IDS, "data")
    with jax.set_mesh(mesh):
        found = both_flags(embedder)(spread, jax.random.PRNGKey(0), ids)
    near(found, both_flags(embedder)(params, jax.random.PRNGKey(0), IDS))
    sharding = NamedSharding(mesh, P("data", None, "model"))
    assert all(each.sharding.is_equivalent_to(sharding, 3) for each in found)


# --- The parameters of a whole model, in other byte orders, of other configs.

BERT = {"scheme": te.Learned(16), "scale": 1.0, "num_token_types": 2, "layer_norm_eps": 1e-6}
whole = te.Embedder(
    dataclasses.replace(CONFIG, dropout_rate=0.0, embedding_width=6, **BERT),
)
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)


@functools.cache
def of_the_whole():
    return jax.device_get(drawn(whole.init))


def started(params, config=whole.config):
    """The parameters of a module that starts from others, and of its output layer."""

    def module():
        embed = te.TransformerEmbedding(config, initial_params=params, name="transformer_embedding")
        types = TYPES if config.num_token_types else None
        embed(IDS, is_training=False, token_types=types)
        return config.output and embed.output()

    return hk.transform(module).init(KEY)


# What each function that takes parameters makes of them.
DOORS = {
    "apply": lambda params: whole.apply(params, None, IDS, is_training=False, token_types=TYPES),
    "output": whole.output,
    "initial_params": started,
    "find_parameters": lambda params: te.find_parameters(params, whole.config).params,
    "resize": lambda params: te.pretrained.resize(
        params,
        whole.config,
        dataclasses.replace(whole.config, vocab_size=13, scheme=te.Learned(12)),
        rng=KEY,
    ),
}


each_door = pytest.mark.parametrize("door", DOORS)


def in_a_model(params):
    """The layer's parameters at the paths that they have in somebody's model, beside others.

    Some of the others are further outside than the layer, and some are further inside.
    """
    inside = {f"model/~/{path}": leaves for path, leaves in params.items()}
    others = ("model/~/layer_norm", f"model/~/{ROOT}block/layer_norm", "head")
    return inside | {path: {"scale": np.ones(3, np.float32)} for path in others}


@each_door
def test_every_door_finds_the_layer_in_the_parameters_of_a_model(door):
    params = of_the_whole()
    # Not arguments, which jax would sort by their names.
    trees = in_a_model(params), params
    found, expected = jax.jit(lambda: [DOORS[door](tree) for tree in trees])()
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
        ({"linear": {}}, f"{one} (see the page ...), got none among ['linear']"),
        (
            {**params, TOKENS: {"embeddings": X}},
            f"{{'{table}': (11, 6)}}, got {{'{table}': (2, 6)}}",
        ),
        ({**params, f"{ROOT}layer_norm": layer_norm}, "no others, got {'layer_norm/w': (2, 6)}"),
        ({TOKENS: params[TOKENS]}, "{'layer_norm/offset': (6,), ... got none of them"),
    ]:
        with refused(ValueError, f"{name}: wanted {text}"):
            DOORS[door](tree)


def test_found_parameters_say_where_they_go_back():
    """The leaves may be shapes."""
    params = of_the_whole()
    model = in_a_model(params)
    found = te.find_parameters(jax.eval_shape(lambda: model), whole.config)
    assert found.paths == {path: f"model/~/{path}" for path in params}
    equal({path: jax.tree.map(jnp.shape, model[found.paths[path]]) for path in found.params},
          jax.tree.map(jnp.shape, params))  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [{"param_dtype": "bfloat16"}, {"output": te.OutputConfig(tied=False, bias=True)}, {"vocab_size": 12}],
)  # fmt: skip
def test_initial_params_start_a_module(fields):
    """They are rounded to the config's dtype, stay on their mesh, and what is trained goes first."""
    config = dataclasses.replace(whole.config, **fields)
    narrow = te.Embedder(config).init
    wide = drawn(te.Embedder(dataclasses.replace(config, param_dtype="float32")).init)
    expected = jax.tree.map(
        lambda leaf, like: np.asarray(leaf).astype(like.dtype), wide, jax.eval_shape(narrow, KEY)
    )
    if "vocab_size" in fields:
        wide = put(mesh_of((2,), ("model",)), jax.device_get(wide), "model")
    trained = jax.tree.map(np.ones_like, expected)
    layer = lambda initial: hk.transform(
        lambda: te.TransformerEmbedding(config, initial_params=initial)(IDS, is_training=False, token_types=TYPES)
    )  # fmt: skip
    both = lambda trained: [layer(initial).apply(trained, None) for initial in (wide, None)]
    found, results = jax.jit(lambda trained: (started(wide, config), both(trained)))(trained)
    equal(found, expected)
    equal(*results)


def evaluated(params):
    return whole.apply(params, None, IDS, is_training=False, token_types=TYPES)


def test_parameters_in_another_byte_order_are_read_right():
    """jax reads their bytes as they are, once it has seen the shapes."""
    other_order = lambda leaf: leaf.astype(leaf.dtype.newbyteorder())
    params = of_the_whole()
    equal(evaluated(jax.tree.map(other_order, params)), evaluated(params))
    bare, params = made(scheme=None, scale=1.0, pad_id=None)
    with jax.disable_jit():
        found = bare.apply(jax.tree.map(other_order, params), None, IDS, is_training=False)
    equal(found, params[TOKENS]["embeddings"][IDS])


@pytest.mark.parametrize("path", [TOKENS, POSITIONS, f"{ROOT}layer_norm", f"{ROOT}widen"])
def test_masked_parameters_are_refused(path):
    params = of_the_whole()
    for name, leaf in params[path].items():
        masked = {**params[path], name: np.ma.masked_array(leaf, mask=leaf > 0)}
        with pytest.raises(TypeError, match="wanted an array without a mask, got a masked"):
            evaluated({**params, path: masked})


# --- Errors, by message.

plain, PLAIN = made()
evaluate = functools.partial(plain.apply, PLAIN, None, is_training=False)
train = functools.partial(plain.apply, PLAIN, ids=IDS, is_training=True)
LISTS = {TOKENS: {"embeddings": [[0.0, 0.0]]}}
KEYS = "TypeError: rng: wanted one key of jax.random.key or jax.random.PRNGKey, got"
FLAG = "TypeError: is_training: wanted a Python bool ..., got"
LISTED = "ValueError: params: wanted {'layer_norm/offset': (6,), ... got {'token_embedding/embeddings': None}"
REFUSED = {
    "te.Embedder({'d_model': 8})": "TypeError: config: ... got dict {'d_model': 8}",
    "whole.init(jax.random.split(KEY, 3))": f"{KEYS} an array key<fry>[3]",
    "train(rng='x')": f"{KEYS} str 'x'",
    "train(rng=None)": "ValueError: rng: ... got None",
    "evaluate(IDS, is_training=0)": f"{FLAG} int 0",
    "jax.jit(lambda flag: evaluate(IDS, is_training=flag))(True)": f"{FLAG} a traced bool[]",
    "DOORS['apply']([1])": "TypeError: params: ... got list [1]",
    "DOORS['output']([1])": "TypeError: params: ... got list [1]",
    "DOORS['resize']([1])": "TypeError: params: ... got list [1]",
    "DOORS['apply'](LISTS)": LISTED,
    "DOORS['output'](LISTS)": LISTED,
    "evaluate(IDS / 2)": "TypeError: ids: ... got float64",
    "evaluate(IDS, positions=3)": "ValueError: positions: ... its last axis, got shape []",
    "evaluate(IDS, positions=[0, 1, 2, 3, 2**31])": "ValueError: positions: ... -2147483648..2147483647, got 2147483648 at index [4]",
    "whole.apply(of_the_whole(), None, IDS, is_training=False, token_types=1)": "ValueError: token_types: ... its last axis, got shape []",
    "evaluate(IDS, token_types=jnp.asarray(TYPES))": "ValueError: token_types: wanted None, because num_token_types is None, got an array int32[2, 5]",
    # jax would read what the mask hides.
    "started(jax.tree.map(lambda leaf: np.ma.masked_array(leaf, leaf > 0), of_the_whole()))":
        "TypeError: initial_params: ... without a mask, got a masked array",
}  # fmt: skip


def test_bad_calls_are_refused():
    each_raises(REFUSED, globals())


def of_integers(module, name):
    """All that reads parameters, one of which has integers."""
    embedder, params = made(output=te.OutputConfig(tied=False, bias=True), **BERT)
    leaves = params[ROOT + module] | {name: params[ROOT + module][name].astype("int32")}
    params = params | {ROOT + module: leaves}
    apply = functools.partial(embedder.apply, is_training=False, token_types=TYPES)
    jax.eval_shape(lambda: apply(params, None, IDS))
    embedder.output(params)


# They were called by the names of arguments of other functions: table, bias.
NOT_FLOATS = {
    "of_integers('token_embedding', 'output_embeddings')": "TypeError: output_embeddings: ... got int32",
    "of_integers('token_embedding', 'output_bias')": "TypeError: output_bias: ... got int32",
    "of_integers('token_embedding', 'embeddings')": "TypeError: token_embedding/embeddings: ... got int32",
    "of_integers('token_type_embedding', 'embeddings')": "TypeError: token_type_embedding/embeddings: ... got int32",
    "of_integers('learned_positional_encoding', 'embeddings')": "TypeError: learned_positional_encoding/embeddings: ... got int32",
}  # fmt: skip


def test_parameters_that_are_not_floats_are_named():
    each_raises(NOT_FLOATS, globals())


@pytest.mark.parametrize(("out_of_range", "row"), [("nan", np.nan), ("clip", 2.0), ("zero", 0.0)])
def test_a_learned_position_past_the_table_is_read_as_the_config_says(out_of_range, row):
    config = te.EmbedderConfig(
        9, 4, te.Learned(max_len=3), scale=1.0, out_of_range=out_of_range, output=None
    )
    embedder = te.Embedder(config)
    positions_table = np.arange(3, dtype=np.float32)[:, None] * np.ones(4, np.float32)
    params = {
        path: {"embeddings": positions_table if "learned" in path else np.zeros((9, 4), np.float32)}
        for path in jax.eval_shape(embedder.init, KEY)
    }
    positions = np.array([[2, 3]])
    found = embedder.apply(params, None, [[1, 1]], is_training=False, positions=positions)
    equal(np.asarray(found)[0, :, 0], [2.0, row])


@pytest.mark.parametrize("spread", [False, True])
def test_an_id_past_the_vocabulary_is_clipped_to_the_last_id_and_not_to_a_row_of_padding(spread):
    config = te.EmbedderConfig(
        5, 4, None, out_of_range="clip", row_multiple=8, spread=spread, output=None
    )
    embedder = te.Embedder(config)
    params = drawn(embedder.init)
    found = np.asarray(embedder.apply(params, None, [[4, 5, 7, 100, -3, 0]], is_training=False))[0]
    equal(found[1:4], np.stack([found[0]] * 3))
    equal(found[4], found[5])
