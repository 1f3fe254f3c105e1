"""Sharded tables on meshes of 8 CPU devices with automatic and explicit axes, against the same on
one device."""

import functools
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import collectives
from contexts import set_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from oracle import loop_lookup
from placed import placed_state

import transformer_embed as te

SPEC = PartitionSpec
KINDS = (AxisType.Auto, AxisType.Explicit)
MESHES = ((1, 8), (2, 4), (8, 1))
# Rows over an axis, columns over one, rows over both axes of the mesh.
SPECS = (SPEC("model"), SPEC(None, "model"), SPEC(("data", "model")))
# All specs on the mesh of two axes, and under each kind of axes one mesh that has but one.
CASES = [
    *((kind, (2, 4), spec) for kind in KINDS for spec in SPECS),
    *(
        (kind, shape, spec)
        for kind, shape in zip(KINDS, ((1, 8), (8, 1)), strict=True)
        for spec in SPECS[:2]
    ),
]

VOCAB, WIDTH = 13, 8
# A gradient row sums at most 32 cotangents below 4 in magnitude, in one order or another: each sum
# is rounded by 2**-24 of at most 128.
GRADIENT_ERROR = 2 * 32 * 128 * 2.0**-24
# A float32 sum of WIDTH products of numbers below 4 in magnitude, each partial sum rounded by
# 2**-24, in one order or another.
PRODUCT_ERROR = 2 * WIDTH * 8 * 16 * 2.0**-24
# The gradient of logits by the table sums 32 products, and that by x sums VOCAB products, of
# numbers below 4 and 1.
BACK_ERROR = 2 * 32 * 32 * 4 * 2.0**-24
# Adam's steps are at most the learning rate 0.01 a step whatever the gradient, and smooth in it
# away from 0: three steps from gradients that differ by float32 rounding (2**-24, times some
# hundred sums) differ by far less than a hundredth of one step.
TRAINED_ERROR = 1e-4

NAME = "transformer_embedding/~/token_embedding"
PATTERN = "*/token_embedding/embeddings"


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).clip(-4, 4)


TABLE = normal(0, VOCAB, WIDTH)
# Inside, repeated, and out of range at both ends: VOCAB and beyond lie in the padding.
IDS = np.random.default_rng(1).integers(-2, VOCAB + 4, (8, 4)).astype(np.int32)
COTANGENT = normal(2, *IDS.shape, WIDTH)
OPTIONS = ({"pad_id": 3, "out_of_range": "clip"}, {"pad_id": VOCAB + 1, "out_of_range": "zero"})


def mesh_of(shape, kind=AxisType.Auto):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2)


def mesh_of_first(shape):
    """Of fewer devices."""
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, ("data", "model"))


def put(mesh, array, *axes):
    return jax.device_put(array, NamedSharding(mesh, SPEC(*axes)))


def shard(mesh, spec, table=TABLE, **options):
    return te.sharding.shard_params(
        {"embed": {"embeddings": table}}, mesh, {"embed/embeddings": spec}, **options
    )["embed"]["embeddings"]


def whole(table):
    """The table, once its padding is found to be zeros."""
    array = np.asarray(table.array)
    assert not array[table.shape[0] :].any()
    return array[: table.shape[0]]


def is_sharded(leaf):
    return isinstance(leaf, te.sharding.Sharded)


def on_host(tree):
    return jax.tree.map(
        lambda leaf: whole(leaf) if is_sharded(leaf) else np.asarray(leaf), tree, is_leaf=is_sharded
    )


def data_axis(spec):
    """The mesh axis that ids may be split over, under a table's spec."""
    return None if "data" in jax.tree.leaves(tuple(spec)) else "data"


@jax.jit
def lookups(table, ids, cotangent):
    """For each of OPTIONS, the rows and the gradient of the table."""

    def step(options):
        rows, back = jax.vjp(functools.partial(te.lookup, ids=ids, **options), table)
        return rows, back(cotangent)[0]

    return [step(options) for options in OPTIONS]


@jax.jit
def outputs(table, x, weights):
    """The logits, and the gradients of the table and of x."""
    logits, back = jax.vjp(lambda table, x: te.linear_logits(x, table, pad_id=3), table, x)
    size = logits.shape[-1]
    return logits, *back(jnp.zeros_like(logits) + jnp.concatenate([weights, jnp.ones(size)])[:size])


def on_one_device(function, *args):
    return jax.tree.map(np.asarray, function(*map(jnp.asarray, args)))


WEIGHTS = np.linspace(-1, 1, VOCAB, dtype=np.float32)


# --- lookup


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape", "spec"), CASES, ids=str)
def test_lookup_in_a_sharded_table_equals_lookup_on_one_device(kind, shape, spec):
    mesh, batch = mesh_of(shape, kind), data_axis(spec)
    table = shard(mesh, spec)
    columns = spec[1] if len(spec) > 1 else None
    with set_mesh(mesh):
        found = lookups(table, put(mesh, IDS, batch), put(mesh, COTANGENT, batch, None, columns))
    for (rows, gradient), (expected, expected_gradient) in zip(
        found, on_one_device(lookups, TABLE, IDS, COTANGENT), strict=True
    ):
        assert rows.sharding.is_equivalent_to(NamedSharding(mesh, SPEC(batch, None, columns)), 3)
        np.testing.assert_array_equal(rows, expected)
        assert gradient.array.sharding.is_equivalent_to(table.sharding, 2)
        np.testing.assert_allclose(whole(gradient), expected_gradient, rtol=0, atol=GRADIENT_ERROR)


PLACES = [(None,), (("data", "model"),), (None, "model"), (("model", "data"),), ("model", "data")]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_lookup_returns_rows_sharded_like_the_ids(place):
    mesh = mesh_of((2, 4), AxisType.Explicit)
    table, ids = shard(mesh, SPEC("model")), np.tile(IDS, (1, 2))
    cotangent = np.tile(COTANGENT, (1, 2, 1))
    with set_mesh(mesh):
        found = lookups(table, put(mesh, ids, *place), put(mesh, cotangent, *place))
    for (rows, gradient), (expected, expected_gradient) in zip(
        found, on_one_device(lookups, TABLE, ids, cotangent), strict=True
    ):
        assert rows.sharding.is_equivalent_to(NamedSharding(mesh, SPEC(*place)), 3)
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_allclose(
            whole(gradient), expected_gradient, rtol=0, atol=2 * GRADIENT_ERROR
        )


@pytest.mark.parametrize("place", PLACES[:3], ids=str)
def test_lookup_under_automatic_axes_takes_ids_of_any_sharding(place):
    mesh = mesh_of((2, 4))
    rows = jax.jit(te.lookup)(shard(mesh, SPEC("model")), put(mesh, IDS, *place))
    np.testing.assert_array_equal(rows, loop_lookup(TABLE, IDS))


def test_a_batch_over_the_axis_of_the_rows_stays_split_over_it():
    mesh = mesh_of((2, 4))
    table = shard(mesh, SPEC("model"), batch_axes=("data", "model"))
    compiled = jax.jit(te.lookup).lower(table, put(mesh, IDS, ("data", "model"))).compile()
    rows = compiled(table, put(mesh, IDS, ("data", "model")))
    assert rows.sharding.is_equivalent_to(NamedSharding(mesh, SPEC(("data", "model"))), 3)
    np.testing.assert_array_equal(rows, loop_lookup(TABLE, IDS))
    assert {"all-gather", "reduce-scatter"} == {each.kind for each in collectives(compiled)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (7, 1, 2)], ids=str)
def test_lookup_works_if_the_devices_do_not_divide_the_ids(kind, shape):
    mesh, ids = mesh_of((2, 4), kind), np.full(shape, 5, np.int32)
    tables = [shard(mesh, SPEC("model")), shard(mesh, SPEC(None, "model"))]

    def read(table, ids, x):
        return te.lookup(table, ids), te.linear_logits(x, table)

    with set_mesh(mesh):
        found = jax.jit(lambda tables, *args: [read(table, *args) for table in tables])(
            tables, ids, np.zeros((*shape, WIDTH), np.float32)
        )
    for table, (rows, logits) in zip(tables, found, strict=True):
        assert rows.shape == (*shape, WIDTH)
        # What jax copies from a mesh of explicit axes, it cannot where there is nothing.
        if rows.size:
            np.testing.assert_array_equal(rows, np.broadcast_to(TABLE[5], rows.shape))
        assert logits.shape == (*shape, table.array.shape[0])


@settings(max_examples=25)
@given(
    ids=st.lists(
        st.integers(-(2**31), 2**31 - 1) | st.integers(-1, VOCAB + 3), min_size=4, max_size=4
    ),
    policy=st.sampled_from(("nan", "clip", "zero")),
)
def test_a_sharded_table_treats_any_ids_like_a_plain_one(ids, policy):
    ids = np.array(ids, np.int32)
    expected = loop_lookup(TABLE, ids, out_of_range=policy)
    np.testing.assert_array_equal(te.lookup(contiguous_table(), ids, out_of_range=policy), expected)


@functools.cache
def contiguous_table():
    return shard(mesh_of((2, 4)), SPEC("model"))


@pytest.mark.parametrize("dtype", [pytest.param(jnp.bfloat16, marks=pytest.mark.slow), jnp.float16])
def test_16_bit_rows_are_copied_and_their_gradients_counted_in_float32(dtype):
    mesh, count = mesh_of((2, 4)), 1024
    table = shard(mesh, SPEC("model"), TABLE.astype(dtype))

    @jax.jit
    def rows_and_gradient(table):
        rows, back = jax.vjp(lambda table: te.lookup(table, np.full(count, 5)), table)
        return rows, back(jnp.ones_like(rows))[0]

    rows, gradient = rows_and_gradient(table)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, np.broadcast_to(TABLE.astype(dtype)[5], rows.shape))
    gradient = whole(gradient)
    assert gradient.dtype == dtype
    # 16 bits stop counting by ones at 256 (bfloat16), or at 2048 (float16): 128 to a device and
    # then their sum would not show it.
    np.testing.assert_array_equal(gradient[5].astype(np.float32), np.full(WIDTH, count))


def test_a_value_that_is_not_finite_reaches_its_own_row_alone():
    table = TABLE.copy()
    table[2], table[9] = np.nan, np.inf
    rows = jax.jit(te.lookup)(shard(mesh_of((1, 8)), SPEC("model"), table), np.arange(VOCAB))
    np.testing.assert_array_equal(rows, table)


def test_lookup_under_vmap_over_seeds():
    tables = normal(4, 3, VOCAB, WIDTH)
    mesh = mesh_of((2, 4))

    @jax.jit
    def looked_up(tables, ids):
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *tables)
        return jax.vmap(te.lookup, in_axes=(0, None))(stacked, ids)

    rows = looked_up([shard(mesh, SPEC("model"), table) for table in tables], IDS)
    np.testing.assert_array_equal(rows, np.stack([loop_lookup(table, IDS) for table in tables]))


# --- linear_logits


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape", "spec"), CASES, ids=str)
def test_logits_of_a_sharded_table_equal_those_of_one_device(kind, shape, spec):
    mesh, batch = mesh_of(shape, kind), data_axis(spec)
    table = shard(mesh, spec)
    with jax.default_matmul_precision("highest"):
        expected, expected_gradient, expected_x = on_one_device(outputs, TABLE, COTANGENT, WEIGHTS)
        with set_mesh(mesh):
            logits, gradient, x_gradient = outputs(table, put(mesh, COTANGENT, batch), WEIGHTS)
    axes = [axis for axis in jax.tree.leaves(tuple(spec)) if axis]
    assert logits.sharding.is_equivalent_to(NamedSharding(mesh, SPEC(batch, None, tuple(axes))), 3)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(
        np.asarray(logits)[..., :VOCAB], expected, rtol=0, atol=PRODUCT_ERROR
    )
    assert gradient.array.sharding.is_equivalent_to(table.sharding, 2)
    np.testing.assert_allclose(whole(gradient), expected_gradient, rtol=0, atol=BACK_ERROR)
    np.testing.assert_allclose(x_gradient, expected_x, rtol=0, atol=BACK_ERROR)


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        (SPECS[0], ("model",)),
        (SPECS[0], (("data", "model"),)),
        (SPECS[0], (None, "model")),
        (SPECS[1], (None, None, "model")),
    ],
    ids=str,
)
def test_logits_are_right_for_any_sharding_of_x(spec, place):
    mesh, x = mesh_of((2, 4), AxisType.Explicit), np.tile(COTANGENT, (1, 2, 1))
    with jax.default_matmul_precision("highest"):
        expected, expected_gradient, expected_x = on_one_device(outputs, TABLE, x, WEIGHTS)
        with set_mesh(mesh):
            logits, gradient, x_gradient = outputs(shard(mesh, spec), put(mesh, x, *place), WEIGHTS)
    np.testing.assert_allclose(
        np.asarray(logits)[..., :VOCAB], expected, rtol=0, atol=PRODUCT_ERROR
    )
    np.testing.assert_allclose(whole(gradient), expected_gradient, rtol=0, atol=2 * BACK_ERROR)
    assert x_gradient.sharding.is_equivalent_to(NamedSharding(mesh, SPEC(*place)), 3)
    np.testing.assert_allclose(x_gradient, expected_x, rtol=0, atol=BACK_ERROR)


def test_padded_logits_are_half_of_the_lowest_number():
    logits = jax.jit(te.linear_logits)(
        -np.ones((2, WIDTH), np.float32), shard(mesh_of((1, 8)), SPEC("model"), np.abs(TABLE))
    )
    logits = np.asarray(logits)
    assert logits.shape == (2, 128)
    np.testing.assert_array_equal(
        logits[:, VOCAB:], np.full((2, 128 - VOCAB), jnp.finfo(jnp.float32).min / 2)
    )
    # Every product is negative: a padded logit of 0 would be the largest.
    assert (np.argmax(logits, -1) < VOCAB).all()


@pytest.mark.slow
def test_padded_logits_leave_every_loss_as_it_is():
    mesh, labels = mesh_of((1, 8)), np.arange(VOCAB)
    x = -np.abs(normal(3, VOCAB, WIDTH))
    positive = np.abs(TABLE) + 0.1

    def losses(table):
        logits = te.linear_logits(x, table)
        likely = jax.nn.log_softmax(logits)
        mass = jax.nn.softmax(logits)
        return jnp.array(
            [
                jax.nn.logsumexp(logits, -1).sum(),
                -(jax.nn.one_hot(labels, logits.shape[-1]) * likely).sum(),
                optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum(),
                -(mass * likely).sum(),
                jnp.argmax(logits, -1).sum(),
            ]
        )

    @jax.jit
    def losses_and_gradients(table):
        found, back = jax.vjp(losses, table)
        return found, jax.vmap(back)(jnp.eye(len(found)))[0]

    with jax.default_matmul_precision("highest"):
        expected, expected_gradients = losses_and_gradients(positive)
        found, gradients = losses_and_gradients(shard(mesh, SPEC("model"), positive))
    # Sums over VOCAB rows of logits below 8 * 16 in magnitude.
    np.testing.assert_allclose(found, expected, rtol=0, atol=VOCAB * PRODUCT_ERROR)
    array = np.asarray(gradients.array)
    assert not array[:, VOCAB:].any()
    np.testing.assert_allclose(
        array[:, :VOCAB], expected_gradients, rtol=0, atol=VOCAB * BACK_ERROR
    )


def test_a_pad_id_in_the_padding_of_the_vocabulary_masks_no_logit():
    table = shard(mesh_of((1, 8)), SPEC("model"))
    masked, logits = jax.jit(
        lambda x, table: (te.linear_logits(x, table, pad_id=VOCAB + 1), te.linear_logits(x, table))
    )(COTANGENT, table)
    np.testing.assert_array_equal(masked, logits)


# --- models


def config(**options):
    return te.EmbedderConfig(
        **{"vocab_size": 37, "d_model": 16, "pad_id": 0, "dropout_rate": 0.25, **options}
    )


MODEL_IDS = np.random.default_rng(5).integers(0, 37, (8, 6)).astype(np.int32)


def training(embedder):
    """A step of Adam on the whole parameter tree: cross-entropy of a tied output layer."""
    optimizer = optax.adam(0.01)

    def loss(params, rng, ids):
        x = embedder.apply(params, rng, ids, is_training=True)
        logits = embedder.logits(params, x)
        return jnp.mean(
            jax.nn.logsumexp(logits, -1)
            - jnp.sum(logits * jax.nn.one_hot(ids, logits.shape[-1]), -1)
        )

    @jax.jit
    def step(params, state, seed, ids):
        value, gradients = jax.value_and_grad(loss)(params, jax.random.key(seed), ids)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return optimizer, step


def train(embedder, params, ids, steps=3):
    optimizer, step = training(embedder)
    state, losses = placed_state(optimizer, params), []
    for i in range(steps):
        params, state, loss = step(params, state, np.int32(i), ids)
        losses.append(float(loss))
    return params, state, losses


@functools.cache
def first_params(param_dtype=jnp.float32):
    return on_host(te.Embedder(config(param_dtype=param_dtype)).init(jax.random.key(7)))


@functools.cache
def trained_on_one_device(param_dtype=jnp.float32):
    params = jax.tree.map(jnp.asarray, first_params(param_dtype))
    return on_host(train(te.Embedder(config(param_dtype=param_dtype)), params, MODEL_IDS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape", "spec"),
    [
        (KINDS[0], (1, 8), SPECS[0]),
        (KINDS[0], (2, 4), SPECS[0]),
        (KINDS[1], (2, 4), SPECS[0]),
        (KINDS[1], (8, 1), SPECS[1]),
    ],
    ids=str,
)
def test_training_a_sharded_table_equals_training_on_one_device(kind, shape, spec):
    embedder, mesh = te.Embedder(config()), mesh_of(shape, kind)
    params = te.sharding.shard_params(first_params(), mesh, {PATTERN: spec})
    with set_mesh(mesh):
        params, state, losses = train(embedder, params, put(mesh, MODEL_IDS, "data"))
    expected, _, expected_losses = trained_on_one_device()
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=TRAINED_ERROR)
    np.testing.assert_allclose(
        whole(params[NAME]["embeddings"]), expected[NAME]["embeddings"], rtol=0, atol=TRAINED_ERROR
    )
    momentum = state[0].mu[NAME]["embeddings"]
    assert isinstance(momentum, te.sharding.Sharded)
    assert momentum.array.sharding.is_equivalent_to(momentum.sharding, 2)
    assert (
        momentum.array.addressable_shards[0].data.size == momentum.array.size // mesh.shape["model"]
    )


@pytest.mark.slow
def test_a_sharded_bfloat16_table_trains_like_one_on_one_device():
    embedder, mesh = te.Embedder(config(param_dtype=jnp.bfloat16)), mesh_of((2, 4))
    params = te.sharding.shard_params(first_params(jnp.bfloat16), mesh, {PATTERN: SPEC("model")})
    params, _, losses = train(embedder, params, put(mesh, MODEL_IDS, "data"))
    expected, _, expected_losses = trained_on_one_device(jnp.bfloat16)
    table = params[NAME]["embeddings"]
    assert table.dtype == jnp.bfloat16
    # Weights below 1 have units of at most 2**-8 in the last place: gradients that round apart move
    # a weight by one of them a step.
    np.testing.assert_allclose(
        whole(table).astype(np.float32),
        expected[NAME]["embeddings"].astype(np.float32),
        rtol=0,
        atol=3 * 2.0**-8,
    )
    # A logit sums 16 products with weights that are so apart, of elements of x below 8.
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=16 * 8 * 3 * 2.0**-8)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_draws_what_it_draws_on_one_device(kind):
    embedder, mesh = te.Embedder(config()), mesh_of((2, 4), kind)
    params = first_params()
    expected = np.asarray(embedder.apply(params, jax.random.key(3), MODEL_IDS, is_training=True))
    with set_mesh(mesh):
        sharded = te.sharding.shard_params(params, mesh, {PATTERN: SPEC("model")})
        x = embedder.apply(
            sharded, jax.random.key(3), put(mesh, MODEL_IDS, "data"), is_training=True
        )
    np.testing.assert_array_equal(np.asarray(x) == 0, expected == 0)
    # One rounding of a product and of a sum of numbers below 8: XLA may fuse the two.
    np.testing.assert_allclose(x, expected, rtol=0, atol=2 * 8 * 2.0**-24)


@pytest.mark.slow
def test_a_haiku_model_runs_on_sharded_parameters():
    def model(ids):
        embed = te.TransformerEmbedding(te.EmbedderConfig(37, 16, pad_id=0))
        return embed.logits(hk.Linear(16)(embed(ids, is_training=False)))

    model, mesh = hk.without_apply_rng(hk.transform(model)), mesh_of((2, 4))
    params = jax.jit(model.init)(jax.random.key(0), MODEL_IDS)
    sharded = te.sharding.shard_params(
        params, mesh, {PATTERN: SPEC("model"), "linear/w": SPEC(None, "model")}
    )
    assert sharded["linear"]["w"].sharding.spec == SPEC(None, "model")
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(jax.jit(model.apply)(sharded, MODEL_IDS))
        np.testing.assert_allclose(
            logits[..., :37],
            jax.jit(model.apply)(params, MODEL_IDS),
            rtol=0,
            atol=4 * PRODUCT_ERROR,
        )


def test_hk_embed_raises_an_error_for_a_sharded_table():
    def model(ids):
        return hk.Embed(VOCAB, WIDTH)(ids)

    embed = hk.without_apply_rng(hk.transform(model))
    params = {"embed": {"embeddings": TABLE}}
    sharded = te.sharding.shard_params(params, mesh_of((1, 8)), {"embed/embeddings": SPEC("model")})
    with pytest.raises(
        TypeError,
        match=r"^table: wanted to be read by lookup or linear_logits alone, got another use of Sharded$",
    ):
        embed.apply(sharded, IDS)
    plain = te.sharding.shard_params(
        params, mesh_of((1, 8)), {"embed/embeddings": SPEC(None, "model")}, tables=""
    )
    np.testing.assert_array_equal(jax.jit(embed.apply)(plain, IDS % VOCAB), TABLE[IDS % VOCAB])


# --- what is sent


BIG, BIG_WIDTH, BATCH = 4095, 16, (8, 16)


@functools.cache
def compiled_step(kind, shape, spec, loss):
    embedder, mesh = (
        te.Embedder(te.EmbedderConfig(BIG, BIG_WIDTH, dropout_rate=0.0)),
        mesh_of(shape, kind),
    )
    optimizer = optax.adam(0.01)

    def init(rng):
        params = embedder.init(rng)
        return params, optimizer.init(params)

    params, state = te.sharding.shard_params(
        jax.eval_shape(init, jax.random.key(0)), mesh, {PATTERN: spec}
    )

    def step(params, state, ids):
        gradients = jax.grad(functools.partial(loss, embedder))(params, ids)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    with set_mesh(mesh):
        ids = put(mesh, np.zeros(BATCH, np.int32), "data")
        return jax.jit(step).lower(params, state, ids).compile()


def untied(embedder, params, ids):
    return jnp.sum(embedder.apply(params, None, ids, is_training=True) ** 2)


def tied(embedder, params, ids):
    return jnp.sum(
        jax.nn.logsumexp(
            embedder.logits(params, embedder.apply(params, None, ids, is_training=True)), -1
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "spec", "shape"),
    [
        *((kind, SPECS[0], shape) for kind in KINDS for shape in MESHES),
        *((kind, SPECS[1], (2, 4)) for kind in KINDS),
    ],
    ids=str,
)
def test_no_step_sends_more_than_a_shard(kind, spec, shape):
    shard_size = (BIG + 1) * BIG_WIDTH // shape[1]
    for loss in (untied, tied):
        sent = collectives(compiled_step(kind, shape, spec, loss))
        assert sent
        for each in sent:
            assert each.largest <= shard_size, each.line
        # Of the table, only its gradient is reduced, over the data axis; nothing gathers it.
        gathered = [each for each in sent if each.kind == "all-gather"]
        assert all(each.largest <= np.prod(BATCH) * BIG_WIDTH for each in gathered)


def test_a_mesh_without_data_parallelism_sends_only_ids_and_rows():
    sent = collectives(compiled_step(AxisType.Auto, (1, 8), SPEC("model"), untied))
    assert max(each.largest for each in sent) == np.prod(BATCH) * BIG_WIDTH


def test_the_reader_of_collectives_sees_the_gradient_of_a_whole_table():
    sent = collectives(compiled_step(AxisType.Auto, (8, 1), SPEC(), untied))
    assert max(each.largest for each in sent) == BIG * BIG_WIDTH
    assert max(each.bytes for each in sent) >= 4 * BIG * BIG_WIDTH


@pytest.mark.parametrize(
    "place", [(("model", "data"),), (None, None, "data"), (("data", "model"),)], ids=str
)
def test_logits_accept_every_sharding_of_x_that_the_loss_accepts(place):
    mesh, x = mesh_of((2, 4), AxisType.Explicit), np.tile(COTANGENT, (1, 2, 1))
    with jax.default_matmul_precision("highest"):
        expected, expected_gradient, expected_x = on_one_device(outputs, TABLE, x, WEIGHTS)
    with jax.default_matmul_precision("highest"), set_mesh(mesh):
        for spec in (SPEC("model"), SPEC("data")):
            table = shard(mesh, spec)
            logits, gradient, x_gradient = outputs(table, put(mesh, x, *place), WEIGHTS)
            assert np.isfinite(
                te.linear_cross_entropy(
                    put(mesh, x, *place), table, np.zeros(x.shape[:2], np.int32)
                )
            )
            np.testing.assert_allclose(
                np.asarray(logits)[..., :VOCAB], expected, rtol=0, atol=PRODUCT_ERROR
            )
            np.testing.assert_allclose(
                whole(gradient), expected_gradient, rtol=0, atol=2 * BACK_ERROR
            )
            np.testing.assert_allclose(x_gradient, expected_x, rtol=0, atol=BACK_ERROR)


def test_logits_of_a_batch_over_both_axes_and_a_table_over_the_first():
    mesh = mesh_of((2, 4))
    table = shard(mesh, SPEC("data"), batch_axes=("data", "model"))
    with jax.default_matmul_precision("highest"):
        logits, gradient, x_gradient = outputs(
            table, put(mesh, COTANGENT, ("data", "model")), WEIGHTS
        )
        expected, expected_gradient, expected_x = on_one_device(outputs, TABLE, COTANGENT, WEIGHTS)
    np.testing.assert_allclose(
        np.asarray(logits)[..., :VOCAB], expected, rtol=0, atol=PRODUCT_ERROR
    )
    np.testing.assert_allclose(whole(gradient), expected_gradient, rtol=0, atol=BACK_ERROR)
    np.testing.assert_allclose(x_gradient, expected_x, rtol=0, atol=BACK_ERROR)


# --- rows


ROW_OPTIMIZERS = {"adam": optax.adam(0.01), "momentum": optax.sgd(0.1, momentum=0.9)}
# The rows of a batch are fewer than those of an eighth of the table.
ROW_VOCAB = 397
ROW_IDS = np.random.default_rng(6).integers(0, ROW_VOCAB, (8, 6)).astype(np.int32)
# Out of range at both ends, in the padding up to the mesh, padding, and a repeat on every device.
ROW_IDS[0, :4], ROW_IDS[:, 5] = (ROW_VOCAB, -1, ROW_VOCAB + 2, 0), 7
ROW_WEIGHTS = normal(7, 8, 6, 16)


def row_embedder(dtype):
    return te.Embedder(
        config(
            vocab_size=ROW_VOCAB,
            dropout_rate=0.0,
            layer_norm_eps=1e-6,
            out_of_range="zero",
            param_dtype=dtype,
        ),
    )


@functools.cache
def row_params(dtype):
    return on_host(row_embedder(dtype).init(jax.random.key(7)))


@functools.cache
def row_step(name, dtype):
    """A step on the rows that a batch touches."""
    embedder = row_embedder(dtype)

    def loss(params, ids, weights):
        return jnp.sum(embedder.apply(params, None, ids, is_training=True) * weights)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids, weights):
        _, grads = te.rows.value_and_grad(loss, ids={NAME: {"embeddings": ids}})(
            params, ids, weights
        )
        return te.rows.update(ROW_OPTIMIZERS[name], grads, state, params)

    return step


def train_rows(name, dtype, params, ids, weights):
    state = placed_state(ROW_OPTIMIZERS[name], params)
    for _ in range(3):
        params, state = row_step(name, dtype)(params, state, ids, weights)
    return on_host((params, state))


@functools.cache
def rows_on_one_device(name, dtype):
    params = jax.tree.map(jnp.asarray, row_params(dtype))
    return train_rows(name, dtype, params, jnp.asarray(ROW_IDS), ROW_WEIGHTS)


def check_rows(kind, shape, name="adam", dtype=jnp.float32, spec=SPECS[0]):
    mesh, batch = mesh_of(shape, kind), data_axis(spec)
    with set_mesh(mesh):
        params = te.sharding.shard_params(row_params(dtype), mesh, {PATTERN: spec})
        found = train_rows(
            name, dtype, params, put(mesh, ROW_IDS, batch), put(mesh, ROW_WEIGHTS, batch)
        )
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(rows_on_one_device(name, dtype)), strict=True
    ):
        assert one.dtype == other.dtype
        # bfloat16 weights and moments below 8 move by a unit of their last place where gradients
        # round apart.
        error = TRAINED_ERROR if dtype == jnp.float32 else 3 * 8 * 2.0**-8
        np.testing.assert_allclose(
            one.astype(np.float32), other.astype(np.float32), rtol=0, atol=error
        )
    untouched = np.setdiff1d(np.arange(ROW_VOCAB), ROW_IDS)
    np.testing.assert_array_equal(
        found[0][NAME]["embeddings"][untouched], row_params(dtype)[NAME]["embeddings"][untouched]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [(KINDS[0], (1, 8)), (KINDS[0], (2, 4)), (KINDS[0], (8, 1)), (KINDS[1], (2, 4))],
    ids=str,
)
def test_training_by_rows_equals_training_on_one_device(kind, shape):
    check_rows(kind, shape)


@pytest.mark.slow
def test_a_sharded_bfloat16_table_trains_by_rows_like_one_on_one_device():
    check_rows(AxisType.Auto, (2, 4), dtype=jnp.bfloat16)


@pytest.mark.slow
def test_training_by_rows_with_momentum_of_a_table_over_the_whole_mesh():
    check_rows(AxisType.Auto, (2, 4), "momentum", spec=SPEC(("data", "model")))


@functools.partial(jax.jit, static_argnames="max_rows")
def taken(params, ids, max_rows=None):
    """The parameters as a loss sees them."""
    see = te.rows.value_and_grad(
        lambda params: (jnp.zeros([]), params), ids=ids, has_aux=True, max_rows=max_rows
    )
    return see(params)[0][1]


@pytest.mark.slow
def test_taken_rows_equal_table_rows_even_if_a_shard_has_none():
    params = {"embed": {"embeddings": shard(mesh_of((1, 8)), SPEC("model"))}}
    ids = np.array([[12, 3, 12], [-5, 99, 3]])
    rows = taken(params, {"embed": {"embeddings": ids}})["embed"]["embeddings"]
    expected = taken({"embeddings": jnp.asarray(TABLE)}, {"embeddings": ids})["embeddings"]
    np.testing.assert_array_equal(rows.ids, expected.ids)
    np.testing.assert_array_equal(np.asarray(rows.values)[:3], TABLE[[0, 3, 12]])
    bounded = taken(params, {"embed": {"embeddings": np.array([[1, 2, 3]])}}, max_rows=2)["embed"][
        "embeddings"
    ]
    found = np.asarray(jax.jit(te.lookup)(bounded, np.array([1, 2, 3])))
    np.testing.assert_array_equal(found[:2], TABLE[1:3])
    assert np.isnan(found[2]).all()


@pytest.mark.slow
def test_rows_raises_an_error_for_tables_it_cannot_train():
    table = shard(mesh_of((2, 4)), SPEC(None, "model"))
    with pytest.raises(
        ValueError,
        match=r"^table: wanted rows over mesh axes, and whole columns, got .*None, 'model'\)$",
    ):
        taken({"embed": table}, {"embed": IDS})
    params = {"embed": shard(mesh_of((2, 4)), SPEC("model"))}
    clip, rows = optax.clip_by_global_norm(1.0), taken(params, {"embed": IDS})["embed"]
    with pytest.raises(
        ValueError,
        match=r"^optimizer: wanted each row updated from that row alone, got clip_by_global_norm: reduce_sum",
    ):
        jax.eval_shape(
            lambda params: te.rows.update(
                clip, {"embed": rows.gradient(rows.values)}, clip.init(params), params
            ),
            params,
        )
    with pytest.raises(TypeError, match=r"wanted to be read by te.lookup or te.TokenEmbedding"):
        taken({"embed": rows}, {"embed": IDS})
    with pytest.raises(
        TypeError,
        match=r"^table: wanted a whole table, trained densely, since the output layer is tied to it",
    ):
        te.linear_logits(COTANGENT, rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [(KINDS[0], (1, 8)), (KINDS[0], (2, 4)), (KINDS[1], (2, 4)), (KINDS[0], (8, 1))],
    ids=str,
)
def test_a_step_by_rows_sends_ids_and_rows(kind, shape):
    mesh = mesh_of(shape, kind)
    with set_mesh(mesh):
        params = te.sharding.shard_params(row_params(jnp.float32), mesh, {PATTERN: SPEC("model")})
        state = placed_state(ROW_OPTIMIZERS["adam"], params)
        # The program that the test above runs.
        step = row_step("adam", jnp.float32).lower(
            params, state, put(mesh, ROW_IDS, "data"), put(mesh, ROW_WEIGHTS, "data")
        )
    sent = collectives(step.compile())
    assert sent
    # The rows of the whole batch, less than the smallest shard of the table, which has an eighth.
    batch = ROW_WEIGHTS.size
    assert batch < ROW_VOCAB * ROW_WEIGHTS.shape[-1] // 8
    for each in sent:
        assert each.largest <= batch, each.line
        assert (each.kind == "all-gather") == (each.operands[0][0] == "s32"), each.line


def by_columns():
    """Gradient descent at a rate of its own for each column, which the state holds."""

    def update(gradients, state, params=None):
        return jax.tree.map(
            lambda g: g * -state if g.ndim == 2 and g.shape[1] == WIDTH else -0.1 * g, gradients
        ), state

    return optax.GradientTransformation(lambda params: jnp.linspace(0.1, 0.2, WIDTH), update)


BESIDE = {"kernel": normal(8, WIDTH, 512), "tokens": TABLE, "types": normal(9, VOCAB, WIDTH)}
BESIDE_COTANGENT = normal(10, *IDS.shape, 512)
BESIDE_OPTIMIZERS = {"adam": optax.adam(0.01), "by_columns": by_columns()}


@functools.partial(jax.jit, static_argnums=0)
def beside_step(name, params, state, ids, cotangent):
    def loss(params):
        x = te.lookup(params["tokens"], ids, out_of_range="zero") + te.lookup(
            params["types"], ids, out_of_range="clip"
        )
        return jnp.sum(x @ params["kernel"] * cotangent)

    _, grads = te.rows.value_and_grad(loss, ids={"tokens": ids})(params)
    return te.rows.update(BESIDE_OPTIMIZERS[name], grads, state, params)


def trained_beside(name, params, ids, cotangent):
    state = placed_state(BESIDE_OPTIMIZERS[name], params)
    for _ in range(2):
        params, state = beside_step(name, params, state, ids, cotangent)
    return on_host((params, state))


@functools.cache
def beside_on_one_device(name):
    return trained_beside(name, jax.tree.map(jnp.asarray, BESIDE), IDS, BESIDE_COTANGENT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BESIDE_OPTIMIZERS)
def test_a_table_trains_by_rows_beside_a_sharded_table_and_a_sharded_kernel(kind, name):
    mesh, specs = mesh_of((2, 4), kind), {"kernel": SPEC(None, "model"), "t*": SPEC("model")}
    with set_mesh(mesh):
        args = put(mesh, IDS, "data"), put(mesh, BESIDE_COTANGENT, "data", None, "model")
        placed = te.sharding.shard_params(BESIDE, mesh, specs, tables="t*")
        sent = collectives(
            beside_step.lower(
                name, placed, placed_state(BESIDE_OPTIMIZERS[name], placed), *args
            ).compile()
        )
        found = trained_beside(name, placed, *args)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(beside_on_one_device(name)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=TRAINED_ERROR)
    assert not any(each.kind == "all-gather" and each.operands[0][0] == "f32" for each in sent)


# --- parameter trees


@pytest.mark.parametrize(
    ("kind", "shape", "spec", "dtype"),
    [
        (KINDS[0], (2, 4), SPECS[0], jnp.float32),
        (KINDS[1], (2, 4), SPECS[1], jnp.float32),
        (KINDS[1], (2, 4), SPECS[2], jnp.float32),
        pytest.param(KINDS[0], (1, 8), SPECS[0], jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param(KINDS[1], (8, 1), SPECS[1], jnp.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_shards_are_drawn_as_on_one_device(kind, shape, spec, dtype):
    embedder, mesh, params = (
        te.Embedder(config(param_dtype=dtype)),
        mesh_of(shape, kind),
        first_params(dtype),
    )
    drawn = te.sharding.shard_params(embedder.init, mesh, {PATTERN: spec}, rng=jax.random.key(7))
    placed = te.sharding.shard_params(params, mesh, {PATTERN: spec})
    assert jax.tree.structure(drawn) == jax.tree.structure(placed)
    for one, other in zip(jax.tree.leaves(drawn), jax.tree.leaves(placed), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(whole(drawn[NAME]["embeddings"]), params[NAME]["embeddings"])


def test_no_device_draws_the_whole_table(monkeypatch):
    texts, jit = [], jax.jit

    def spy(function, **options):
        def run(rng):
            texts.append(jit(function, **options).lower(rng).compile().as_text())
            return jit(function, **options)(rng)

        return run

    embedder = te.Embedder(te.EmbedderConfig(BIG, BIG_WIDTH))
    monkeypatch.setattr(jax, "jit", spy)
    te.sharding.shard_params(
        embedder.init, mesh_of((1, 8)), {PATTERN: SPEC("model")}, rng=jax.random.key(0)
    )
    (text,) = texts
    sizes = [
        np.prod([int(size) for size in shape.split(",")])
        for shape in re.findall(r"[fsu]32\[([\d,]+)\]", text)
    ]
    # A shard has an eighth; the partitioner moves its border by less than a row a device.
    assert max(sizes) <= (BIG + 1) * BIG_WIDTH // 8 + 8 * BIG_WIDTH


def test_names_choose_specs_and_the_first_rule_counts():
    params = {
        "a/~/token_embedding": {"embeddings": TABLE},
        "linear": {"w": TABLE, "b": TABLE[0], "c": TABLE},
    }
    rules = {
        "*/embeddings": SPEC("model"),
        "linear/w": SPEC(None, "model"),
        "*/b": SPEC("data"),
        "linear/*": SPEC(),
    }
    placed = te.sharding.shard_params(params, mesh_of((2, 4)), rules)
    assert isinstance(placed["a/~/token_embedding"]["embeddings"], te.sharding.Sharded)
    assert placed["a/~/token_embedding"]["embeddings"].sharding.spec == SPEC("model")
    assert {name: array.sharding.spec for name, array in placed["linear"].items()} == {
        "w": SPEC(None, "model"),
        "b": SPEC("data"),
        "c": SPEC(),
    }
    for name, array in placed["linear"].items():
        np.testing.assert_array_equal(array, params["linear"][name])


def test_a_table_moves_to_another_mesh():
    first = {"embed": {"embeddings": shard(mesh_of((1, 8)), SPEC("model"))}}
    second = te.sharding.shard_params(first, mesh_of((2, 4)), {"*": SPEC(("data", "model"))})[
        "embed"
    ]["embeddings"]
    third = te.sharding.shard_params(first, mesh_of((4, 2)), {"*": SPEC("model")})["embed"][
        "embeddings"
    ]
    for table in (second, third):
        assert table.array.shape == (128, WIDTH)
        np.testing.assert_array_equal(whole(table), TABLE)


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 397, 50257, 10**9])
def test_padding_is_the_same_on_every_mesh_of_a_power_of_two(vocab_size):
    table = jax.ShapeDtypeStruct((vocab_size, WIDTH), jnp.float32)
    sizes = set()
    for shape in ((1, 1), (1, 2), (2, 4), (1, 8), (8, 1)):
        mesh = mesh_of_first(shape)
        for spec in (SPEC("model"), SPEC(None, "model")):
            size = shard(mesh, spec, table).array.shape[0]
            assert size % mesh.shape["model"] == 0
            sizes.add(size)
    (size,) = sizes
    assert vocab_size <= size < vocab_size + 128


def test_devices_that_do_not_divide_the_padding_get_more_of_it():
    table = jax.ShapeDtypeStruct((129, WIDTH), jnp.float32)
    assert shard(mesh_of_first((1, 3)), SPEC("model"), table).array.shape == (384, WIDTH)


def test_shard_params_maps_shapes_to_shapes():
    mesh = mesh_of((2, 4))
    table = shard(mesh, SPEC("model"), jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.bfloat16))
    assert table.shape == (VOCAB, WIDTH)
    assert table.dtype == jnp.bfloat16
    assert table.array == jax.ShapeDtypeStruct(
        (128, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, SPEC("model"))
    )
    moved = te.sharding.shard_params(
        {"embed": {"embeddings": table}}, mesh_of((4, 2)), {"*": SPEC("model")}
    )
    assert moved["embed"]["embeddings"].array.shape == (128, WIDTH)


def test_every_device_holds_its_shard_alone():
    table = shard(mesh_of((2, 4)), SPEC("model"))
    assert {each.data.shape for each in table.array.addressable_shards} == {(32, WIDTH)}
    for each in table.array.addressable_shards:
        np.testing.assert_array_equal(
            each.data, np.pad(TABLE, ((0, 128 - VOCAB), (0, 0)))[each.index]
        )


def test_numbers_in_a_tree_are_placed():
    state = optax.adam(0.1).init({"embed": {"embeddings": TABLE}})
    placed = te.sharding.shard_params(state, mesh_of((2, 4)), {"*/embeddings": SPEC("model")})
    assert placed[0].count.tolist() == 0
    np.testing.assert_array_equal(whole(placed[0].mu["embed"]["embeddings"]), np.zeros_like(TABLE))


def test_bad_trees_and_rules_raise_errors():
    mesh, params = (
        mesh_of((2, 4)),
        {"embed": {"embeddings": TABLE}, "linear": {"w": TABLE, "b": TABLE[0]}},
    )

    def place(rules, **options):
        te.sharding.shard_params(params, mesh, rules, **options)

    with pytest.raises(
        ValueError,
        match=r"^patterns: wanted each to match one of embed/embeddings, linear/b, linear/w, got 'embedding/\*'$",
    ):
        place({"embedding/*": SPEC("model")})
    with pytest.raises(
        ValueError,
        match=r"^rules: wanted a PartitionSpec that fits embed/embeddings of shape \[13, 8\], got .*'tensor'.*: .*tensor .*not found in mesh",
    ):
        place({"embed/*": SPEC("tensor")})
    with pytest.raises(
        TypeError, match=r"^rules: wanted a PartitionSpec for each pattern, got str 'model'$"
    ):
        place({"embed/*": "model"})
    for batch_axes in (("tensor",), "data", ""):
        with pytest.raises(
            ValueError,
            match=r"^batch_axes: wanted a tuple of axes of the mesh, \('data', 'model'\), or None, got ",
        ):
            place({"embed/*": SPEC("model")}, batch_axes=batch_axes)
    assert te.sharding.shard_params({"scale": 1.5}, mesh, {})["scale"] == 1.5
    with pytest.raises(
        ValueError,
        match=r"^rules: wanted a PartitionSpec that fits linear/b of shape \[8\], got .*None, 'model'\)",
    ):
        place({"linear/b": SPEC(None, "model")})
    with pytest.raises(
        ValueError,
        match=r"^rules: wanted a PartitionSpec that fits linear/w of shape \[13, 8\], got .*partitioned 4 times, but the dimension size is 13",
    ):
        place({"linear/w": SPEC("model")})
    with pytest.raises(
        ValueError,
        match=r"^rules: wanted a PartitionSpec that fits embed/embeddings of shape \[13, 6\], got .*partitioned 4 times, but the dimension size is 6",
    ):
        te.sharding.shard_params(
            {"embed": {"embeddings": TABLE[:, :6]}}, mesh, {"*": SPEC(None, "model")}
        )
    with pytest.raises(
        Exception,
        match="duplicate entries for `model`",
    ):
        te.lookup(shard(mesh, SPEC(None, "model"), batch_axes=("model",)), np.arange(8))
    with pytest.raises(
        ValueError, match=r"^rng: wanted None, since params is not a function, got "
    ):
        place({}, rng=jax.random.key(0))
    with pytest.raises(
        TypeError,
        match=r"^rng: wanted one key of jax.random.key or jax.random.PRNGKey, got NoneType None$",
    ):
        te.sharding.shard_params(lambda rng: params, mesh, {})
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda params: te.sharding.shard_params(params, mesh, {}))(params)


def test_columns_over_an_axis_of_the_ids_raise_an_error():
    mesh = mesh_of((2, 4), AxisType.Explicit)
    with (
        set_mesh(mesh),
        pytest.raises(
            Exception,
            match="duplicate entries for `model`",
        ),
    ):
        te.lookup(shard(mesh, SPEC(None, "model")), put(mesh, IDS, None, "model"))


# --- checkpoints


GPT2_VOCAB = 50257
CHECKPOINT_IDS = np.array([[0, 1, GPT2_VOCAB - 1, 1], [7, 300, 50000, -1]], np.int32)


def params_and_state(rng):
    params = {"embed": {"embeddings": jax.random.normal(rng, (GPT2_VOCAB, 4))}}
    return params, ROW_OPTIMIZERS["adam"].init(params)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def checkpoint_step(params, state, ids):
    def loss(params):
        return jnp.sum(te.lookup(params["embed"]["embeddings"], ids, out_of_range="zero") ** 2)

    grads = te.rows.value_and_grad(loss, ids={"embed": {"embeddings": ids}})(params)[1]
    return te.rows.update(ROW_OPTIMIZERS["adam"], grads, state, params)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="today's Orbax asks for a newer jax")
def test_a_checkpoint_of_one_mesh_trains_on_as_on_every_other(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is of the test extra")
    rules, spec = {"*/embeddings": SPEC("model")}, SPEC("model")
    place = functools.partial(te.sharding.shard_params, rules=rules)
    saved = place(params_and_state, mesh_of((1, 8)), rng=jax.random.key(0))
    saved = checkpoint_step(*saved, put(mesh_of((1, 8)), CHECKPOINT_IDS))
    shapes, kept = jax.eval_shape(params_and_state, jax.random.key(0)), on_host(saved)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", saved)
        expected = on_host(checkpoint_step(*saved, put(mesh_of((1, 8)), CHECKPOINT_IDS)))
        for data, model in ((1, 4), (4, 2), (8, 1), (1, 1)):
            mesh = mesh_of_first((data, model))
            target = place(shapes, mesh)
            args = jax.tree.map(
                lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape),
                target,
            )
            restored = checkpointer.restore(
                tmp_path / "step", args=ocp.args.PyTreeRestore(item=target, restore_args=args)
            )
            assert jax.tree.structure(restored) == jax.tree.structure(target)
            for found, leaf in zip(*map(jax.tree.leaves, (restored, target)), strict=True):
                assert (found.shape, found.sharding) == (leaf.shape, leaf.sharding)
            assert restored[1][0].mu["embed"]["embeddings"].sharding.spec == spec
            jax.tree.map(np.testing.assert_array_equal, on_host(restored), kept)
            trained = on_host(checkpoint_step(*restored, put(mesh, CHECKPOINT_IDS)))
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, atol=1e-6), trained, expected
            )
