"""Lookups in contiguous tables and logits of them, on meshes of CPU devices with automatic and
explicit axes, against the same on one device; any ids in sharded tables of both orders."""

import functools
import itertools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from compare import equal, near
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from oracle import loop_lookup
from refused import refused
from sharded_tables import (
    AUTO,
    BATCHES,
    BOTH,
    EXPLICIT,
    PAD,
    SPEC,
    TABLE,
    VOCAB,
    WEIGHTS,
    WIDTH,
    mesh_of,
    normal,
    on_host,
    put,
    shard,
    stripe,
)

import transformer_embed as te

# Sums of some hundred products of numbers below 4, in one order or another.
ERROR = 1e-4
IDS, X, COTANGENT = BATCHES[0], WEIGHTS[0], WEIGHTS[1]
OF_LOGITS = np.linspace(-1, 1, VOCAB, dtype=np.float32)

# The axes, the table's spec, the mesh axes of each dimension of ids and x, and the spec of logits: x
# is gathered over the table's axes.
LOGITS = SPEC("data", None, "model")
CASES = {
    "rows": (EXPLICIT, SPEC("model"), ("data",), LOGITS),
    "columns": (EXPLICIT, SPEC(None, "model"), ("data",), LOGITS),
    "rows over the whole mesh": (EXPLICIT, SPEC(BOTH), (), SPEC(None, None, BOTH)),
    "batch over the whole mesh": (EXPLICIT, SPEC("model"), (BOTH,), LOGITS),
    "positions over the axis of the rows": (
        EXPLICIT,
        SPEC("model"),
        (None, "model"),
        SPEC(None, None, "model"),
    ),
    "batch over the axes in another order": (
        EXPLICIT,
        SPEC("data"),
        (("model", "data"),),
        SPEC("model", None, "data"),
    ),
    "channels over the axis of the columns": (
        EXPLICIT,
        SPEC(None, "model"),
        (None, None, "model"),
        SPEC(None, None, "model"),
    ),
    "automatic, rows": (AUTO, SPEC("model"), ("data",), LOGITS),
    "automatic, columns": (AUTO, SPEC(None, "model"), ("data",), LOGITS),
    "automatic, batch over the whole mesh": (
        AUTO,
        SPEC("data"),
        (BOTH,),
        SPEC("model", None, "data"),
    ),
}


@jax.jit
def rows_and_logits(table, ids, cotangent, x, of_logits):
    """The rows and their gradient, the logits and theirs, of the table and of x."""
    look = functools.partial(te.lookup, ids=ids, pad_id=PAD, out_of_range="zero")
    rows, of_table = jax.vjp(look, table)
    logits, back = jax.vjp(
        lambda table, x: te.linear_logits(x, te.OutputLayer(table, pad_id=PAD)), table, x
    )
    size = logits.shape[-1]
    of_logits = jnp.zeros_like(logits) + jnp.concatenate([of_logits, jnp.ones(size)])[:size]
    return rows, of_table(cotangent)[0], logits, *back(of_logits)


@functools.cache
def on_one_device():
    return on_host(rows_and_logits(TABLE, IDS, COTANGENT, X, OF_LOGITS))


def test_a_table_and_a_batch_of_two_meshes_are_refused():
    """They were a KeyError, or an error of jax that names neither."""
    tables = [
        shard(mesh_of(shape, kind), SPEC("data"))
        for shape, kind in (((8,), AUTO), ((4, 2), EXPLICIT))
    ]
    mesh = mesh_of((2, 4), EXPLICIT)
    ids, x = put(mesh, IDS, "data"), put(mesh, X, "data")
    loss = lambda params: te.lookup(params["t"], ids).sum()
    rows_of = lambda table: te.rows.value_and_grad(loss, ids={"t": ids})({"t": table})
    calls = [
        lambda table: te.lookup(table, ids),
        lambda table: te.linear_logits(x, table),
        lambda table: te.linear_cross_entropy(x, table, ids),
        rows_of,
    ]
    for table, call in itertools.product(tables, calls):
        message = f"table: ... AbstractMesh('data': 2, 'model': 4... got ... {table.split.mesh}"
        with refused(ValueError, message):
            call(table)
        with jax.set_mesh(mesh), refused(ValueError, message):
            call(table)
    with (
        jax.set_mesh(mesh_of((2, 4))),
        refused(ValueError, "table: ... AbstractMesh('data': 2,..."),
    ):
        te.lookup(tables[0], IDS)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n != "rows" else ()) for n in CASES]
)
def test_lookup_and_logits_equal_those_on_one_device_and_stay_split(name):
    kind, spec, place, of_logits = CASES[name]
    mesh, is_whole = mesh_of((2, 4), kind), kind == AUTO and place == (BOTH,)
    table = shard(mesh, spec, batch_axes=BOTH if is_whole else None)
    batch, columns = (*place, None, None)[:2], (*spec, None)[1]
    with jax.set_mesh(mesh):
        cotangent = put(mesh, COTANGENT, *batch, columns)
        found = rows_and_logits(
            table, put(mesh, IDS, *batch), cotangent, put(mesh, X, *place), OF_LOGITS
        )
    rows, gradient, logits, of_table, of_x = on_host(found)
    expected_rows, expected_gradient, expected_logits, *expected = on_one_device()
    equal(rows, expected_rows)
    near(gradient, expected_gradient, atol=ERROR)
    near(logits[..., :VOCAB], expected_logits, atol=ERROR)
    assert logits.dtype == np.float32
    equal(logits[..., VOCAB:], np.finfo(np.float32).min / 2)
    near((of_table, of_x), tuple(expected), atol=ERROR)

    assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, SPEC(*batch, columns)), 3)
    for each in (found[1], found[3]):
        assert each.array.sharding.is_equivalent_to(table.sharding, 2)
    assert found[2].sharding.is_equivalent_to(NamedSharding(mesh, of_logits), 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_the_devices_need_not_divide_the_ids(kind):
    mesh = mesh_of((2, 4), kind)
    tables = [shard(mesh, SPEC("model")), shard(mesh, SPEC(None, "model")), stripe(mesh)]

    @jax.jit
    def read(table, ids):
        x = jnp.zeros((*ids.shape, WIDTH))
        logits = None if table.split.order.is_striped else te.linear_logits(x, table)
        return te.lookup(table, ids), logits

    for table, shape in itertools.product(tables, [(), (0,), (7, 1, 2)]):
        ids = np.full(shape, 5, np.int32)
        with jax.set_mesh(mesh):
            rows, logits = read(table, ids)
        assert rows.shape == (*shape, WIDTH)
        assert logits is None or logits.shape == (*shape, 384)
        # What jax copies from a mesh of explicit axes, it cannot where there is nothing.
        if ids.size:
            equal(rows, TABLE[ids])


@functools.cache
def with_infinite_rows():
    table = TABLE.copy()
    table[2], table[299] = np.nan, np.inf
    mesh = mesh_of((1, 2))
    return table, shard(mesh, SPEC("model"), table), stripe(mesh, table=table, capacity=8.0)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    ids=st.lists(
        st.integers(-(2**31), 2**31 - 1) | st.integers(-2, VOCAB + 3), min_size=12, max_size=12
    ),
    policy=st.sampled_from(("nan", "clip", "zero")),
)
def test_sharded_tables_treat_any_ids_like_a_plain_one(ids, policy):
    """A value that is not finite reaches its own row alone."""
    ids, (plain, *tables) = np.array([*ids, 2, 3, 298, 299], np.int32), with_infinite_rows()
    expected = loop_lookup(plain, ids, out_of_range=policy)
    for table in tables:
        equal(te.lookup(table, ids, out_of_range=policy), expected)


@pytest.mark.slow
def test_lookup_under_vmap_over_seeds():
    tables, mesh = normal(4, 3, VOCAB, WIDTH), mesh_of((1, 2))

    @jax.jit
    def look(tables):
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *tables)
        return jax.vmap(te.lookup, in_axes=(0, None))(stacked, IDS)

    rows = look([shard(mesh, SPEC("model"), table) for table in tables])
    equal(rows, np.stack([loop_lookup(table, IDS) for table in tables]))


@pytest.mark.slow
def test_a_tied_model_with_dropout_has_the_loss_and_the_gradient_of_one_device():
    embedder = te.Embedder(te.EmbedderConfig(37, 16, pad_id=0, dropout_rate=0.25))
    ids = np.random.default_rng(5).integers(0, 37, (8, 6)).astype(np.int32)

    @jax.jit
    @jax.value_and_grad
    def loss(params, ids):
        x = embedder.apply(params, jax.random.key(0), ids, is_training=True)
        return te.linear_cross_entropy(x, embedder.output(params), ids)

    params = on_host(embedder.init(jax.random.key(7)))
    mesh = mesh_of((2, 4), EXPLICIT)
    with jax.set_mesh(mesh):
        rules = {"*/token_embedding/embeddings": SPEC("model")}
        placed = te.sharding.shard_params(params, mesh, rules)
        found = loss(placed, put(mesh, ids, "data"))
    near(on_host(found), on_host(loss(params, ids)), atol=ERROR)


@pytest.mark.slow
def test_hk_embed_raises_an_error_for_a_sharded_table():
    embed = hk.without_apply_rng(hk.transform(lambda ids: hk.Embed(VOCAB, WIDTH)(ids)))
    params, rules = {"embed": {"embeddings": TABLE}}, {"embed/embeddings": SPEC("model")}
    place = functools.partial(te.sharding.shard_params, params, mesh_of((1, 2)), rules)
    message = r"to be read by lookup .* shard_params .*, got another use of Sharded"
    with pytest.raises(TypeError, match=f"^table: wanted {message}$"):
        embed.apply(place(), IDS)
    equal(embed.apply(place(tables=""), IDS % VOCAB), TABLE[IDS % VOCAB])


# --- what is sent

BIG, BATCH = 4096, (8, 16)
ROWS_OF_BATCH = 8 * 16 * WIDTH


def untied(table, ids):
    return jnp.sum(te.lookup(table, ids) ** 2)


def tied(table, ids):
    return jnp.sum(jax.nn.logsumexp(te.linear_logits(te.lookup(table, ids), table), -1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape", "spec", "loss", "largest"),
    [
        (AUTO, (2, 4), SPEC("model"), tied, BIG * WIDTH // 4),
        (EXPLICIT, (2, 4), SPEC(None, "model"), tied, BIG * WIDTH // 4),
        # Without data parallelism, ids and rows alone.
        (AUTO, (1, 8), SPEC("model"), untied, ROWS_OF_BATCH),
        # As a check of the reader: the gradient of a whole table.
        (AUTO, (8, 1), SPEC(), untied, BIG * WIDTH),
    ],
    ids=["rows", "columns", "rows of a batch", "whole gradient"],
)
def test_no_dense_step_sends_more_than_a_shard_nor_gathers_it(kind, shape, spec, loss, largest):
    mesh = mesh_of(shape, kind)
    table = shard(mesh, spec, jax.ShapeDtypeStruct((BIG, WIDTH), jnp.float32))
    with jax.set_mesh(mesh):
        ids = put(mesh, np.zeros(BATCH, np.int32), "data")
        sent = collectives(jax.jit(jax.grad(loss)).lower(table, ids).compile())
    assert max(each.largest for each in sent) <= largest
    if loss is untied:
        assert max(each.largest for each in sent) == largest
        assert max(each.bytes for each in sent) >= 4 * largest
    gathered = [each for each in sent if each.kind == "all-gather"]
    assert all(each.largest <= ROWS_OF_BATCH for each in gathered)
