"""Rows by exchange on 8 CPU devices: interleaved tables against a dense, lazy oracle in float64, what is
sent, overflow, loads and errors."""

import functools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import collectives
from contexts import set_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaved_tables import (
    AUTO,
    BATCHES,
    EXPLICIT,
    MESHES,
    PAD,
    RATE,
    SPEC,
    TABLE,
    TRAINED_ERROR,
    VOCAB,
    WEIGHTS,
    WIDTH,
    interleave,
    mesh_of,
    normal,
    owned_by_one,
    put,
)
from jax.sharding import NamedSharding
from oracle import loop_lookup
from placed import placed_state

import transformer_embed as te
from transformer_embed._src.sharded import hops, layout


def loss(params, ids, weights):
    return jnp.sum(te.lookup(params["t"], ids, pad_id=PAD, out_of_range="zero") * weights)


OPTIMIZER = optax.adam(RATE)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def row_step(params, state, ids, weights):
    value, grads = te.rows.value_and_grad(loss, ids={"t": ids})(params, ids, weights)
    return (
        *te.rows.update(OPTIMIZER, grads, state, params),
        value,
        jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads))),
    )


def oracle(batches=BATCHES, table=TABLE):
    """Lazy Adam in float64: rows with a gradient, their moments, and the norm of each gradient."""
    table, losses, norms = table.astype(np.float64), [], []
    first, second = np.zeros_like(table), np.zeros_like(table)
    for step, (ids, weights) in enumerate(zip(batches, WEIGHTS, strict=True), 1):
        counted = (ids >= 0) & (ids < len(table)) & (ids != PAD)
        losses.append(np.sum(table[ids[counted]] * weights[counted]))
        gradient = np.zeros_like(table)
        np.add.at(gradient, ids[counted], weights[counted])
        norms.append(np.sqrt(np.sum(gradient**2)))
        moved = gradient.any(-1)
        first[moved] = 0.9 * first[moved] + 0.1 * gradient[moved]
        second[moved] = 0.999 * second[moved] + 0.001 * gradient[moved] ** 2
        update = RATE * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        table[moved] -= update[moved]
    return table, first, second, losses, norms


def train(mesh, table, batches=BATCHES):
    params, losses, norms = {"t": table}, [], []
    state = placed_state(OPTIMIZER, params)
    for ids, weights in zip(batches, WEIGHTS, strict=True):
        params, state, value, norm = row_step(params, state, put(mesh, ids), put(mesh, weights))
        losses.append(float(value))
        norms.append(float(norm))
    return params["t"], state, losses, norms


# --- values, gradients, steps


# A mesh of one axis under each kind of axes: which of two axes has one device makes no other
# program.
CASES = [
    *((AUTO, shape, None) for shape in MESHES if shape != (8, 1)),
    *((EXPLICIT, shape, None) for shape in MESHES if shape != (1, 8)),
    (AUTO, (2, 4), "model"),
    (EXPLICIT, (2, 2, 2), ("extra", "data")),
]
# Its rows are on some of the axes of the batch: devices along the others sum their gradients.
QUICK = (EXPLICIT, (2, 2, 2), ("extra", "data"))
REST = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case != QUICK]


@pytest.mark.parametrize(("kind", "shape", "axes"), [QUICK, *REST], ids=str)
def test_training_by_exchange_is_lazy_adam_in_float64(kind, shape, axes):
    mesh = mesh_of(shape, kind)
    with set_mesh(mesh):
        table, state, losses, norms = train(
            mesh, interleave(mesh, None if axes is None else SPEC(axes))
        )
    expected, first, second, expected_losses, expected_norms = oracle()
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-3)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    np.testing.assert_allclose(table.in_vocabulary_order(), expected, rtol=0, atol=TRAINED_ERROR)
    np.testing.assert_allclose(state[0].mu["t"].in_vocabulary_order(), first, rtol=0, atol=1e-5)
    np.testing.assert_allclose(state[0].nu["t"].in_vocabulary_order(), second, rtol=0, atol=1e-5)
    moved = np.unique(np.concatenate([ids.ravel() for ids in BATCHES]))
    untouched = np.setdiff1d(np.arange(VOCAB), np.setdiff1d(moved, [PAD]))
    np.testing.assert_array_equal(table.in_vocabulary_order()[untouched], TABLE[untouched])
    assert not np.asarray(table.array)[
        table.layout.order.ids(np.arange(table.array.shape[0], dtype=np.int32)) >= VOCAB
    ].any()


def axis_by_axis(asked, axes, sizes, shard, devices, capacity):
    """The route that plans choose for more devices only."""
    legs = [((axis,), size) for axis, size in zip(axes, sizes, strict=True)]
    return hops._hops(asked, legs, shard, devices, capacity)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 4), (2, 2, 2)], ids=str)
def test_one_mesh_axis_after_the_other_trains_like_a_single_hop(shape, monkeypatch):
    monkeypatch.setattr(layout, "plan_hops", axis_by_axis)
    # No other test has this capacity, and so the programs of this one.
    mesh, capacity = mesh_of(shape), 1.0625
    table = interleave(mesh, capacity=capacity)
    assert not any(te.sharding.exchange_load(table, ids).dropped for ids in BATCHES)
    with set_mesh(mesh):
        trained, _, losses, _ = train(mesh, table)
    expected, _, _, expected_losses, _ = oracle()
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-3)
    np.testing.assert_allclose(trained.in_vocabulary_order(), expected, rtol=0, atol=TRAINED_ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [0, 1], ids=["first hop", "last hop"])
def test_rows_that_do_not_fit_on_either_hop_are_nan_and_counted(narrow, monkeypatch):
    def plan(*arguments):
        planned = list(axis_by_axis(*arguments))
        planned[narrow] = planned[narrow]._replace(room=8)
        return tuple(planned)

    monkeypatch.setattr(layout, "plan_hops", plan)
    # As above: 8 of the 18 ids that each device asks of one owner fit on the narrow hop.
    mesh = mesh_of((2, 4))
    table = interleave(mesh, capacity=16 + narrow)
    ids = np.tile(owned_by_one(18), (8, 1))
    weights = normal(20, *ids.shape, WIDTH)
    rows, gradient = lookup_and_gradient(table, put(mesh, ids), put(mesh, weights))
    lost = np.isnan(np.asarray(rows)).any(-1)
    assert (lost.sum(axis=1) == 10).all()
    # The devices of a column ask for the same rows: their requests merge before the last hop.
    dropped = te.sharding.exchange_load(table, ids).dropped
    assert dropped == {0: 8 * 10, 1: 4 * 10}[narrow] or dropped == 2 * 10
    expected, expected_gradient = lookup_and_gradient(
        jnp.asarray(TABLE), ids, np.where(lost[..., None], 0, weights)
    )
    np.testing.assert_array_equal(np.asarray(rows)[~lost], np.asarray(expected)[~lost])
    np.testing.assert_allclose(gradient.in_vocabulary_order(), expected_gradient, rtol=0, atol=1e-4)


@jax.jit
def lookup_and_gradient(table, ids, weights):
    rows, back = jax.vjp(lambda table: te.lookup(table, ids, pad_id=PAD), table)
    return rows, back(weights)[0]


@pytest.mark.parametrize(("kind", "shape", "axes"), [QUICK, *REST], ids=str)
def test_lookup_by_exchange_gives_the_rows_bit_for_bit_and_their_gradient(kind, shape, axes):
    mesh = mesh_of(shape, kind)
    table = interleave(mesh, None if axes is None else SPEC(axes))
    with set_mesh(mesh):
        rows, gradient = lookup_and_gradient(table, put(mesh, BATCHES[0]), put(mesh, WEIGHTS[0]))
    assert rows.sharding.is_equivalent_to(NamedSharding(mesh, SPEC(mesh.axis_names)), 3)
    expected, expected_gradient = lookup_and_gradient(jnp.asarray(TABLE), BATCHES[0], WEIGHTS[0])
    np.testing.assert_array_equal(rows, expected)
    assert gradient.array.sharding.is_equivalent_to(table.sharding, 2)
    np.testing.assert_allclose(
        gradient.in_vocabulary_order(), expected_gradient, rtol=0, atol=96 * 4 * 2.0**-22
    )


@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 2)], ids=str)
def test_ids_that_the_devices_do_not_divide_are_looked_up_in_every_shard(shape):
    ids = np.full(shape, 5, np.int32)
    np.testing.assert_array_equal(jax.jit(te.lookup)(interleave(mesh_of((2, 4))), ids), TABLE[ids])


@settings(max_examples=20)
@given(
    ids=st.lists(
        st.integers(-(2**31), 2**31 - 1) | st.integers(-2, VOCAB + 2), min_size=16, max_size=16
    ),
    policy=st.sampled_from(("nan", "clip", "zero")),
)
def test_lookup_by_exchange_of_any_ids(ids, policy):
    ids = np.array(ids, np.int32)
    np.testing.assert_array_equal(
        te.lookup(roomy_table(), ids, out_of_range=policy),
        loop_lookup(TABLE, ids, out_of_range=policy),
    )


@functools.cache
def roomy_table():
    return interleave(mesh_of((2, 4)), capacity=8.0)


@pytest.mark.slow
def test_a_bfloat16_table_sums_the_gradients_of_all_devices_before_it_rounds():
    mesh = mesh_of((2, 4))
    table = interleave(mesh, table=TABLE.astype(jnp.bfloat16))
    ids = np.full((1024, 1), 5, np.int32)
    sgd = optax.sgd(2.0**-10)

    @jax.jit
    def step(params, ids):
        value = lambda params: jnp.sum(te.lookup(params["t"], ids).astype(jnp.float32))
        grads = te.rows.value_and_grad(value, ids={"t": ids}, max_rows=1)(params)[1]
        return te.rows.update(sgd, grads, sgd.init(params), params)[0], grads["t"].values

    params, values = step({"t": table}, put(mesh, ids))
    assert params["t"].dtype == values.dtype == jnp.bfloat16
    # 16 bits would stop counting at 256.
    assert np.asarray(values).max() == 1024
    np.testing.assert_array_equal(
        params["t"].in_vocabulary_order()[5],
        TABLE.astype(jnp.bfloat16)[5] - np.ones((), jnp.bfloat16),
    )


@pytest.mark.slow
def test_gradients_accumulate_over_several_interleaved_tables_and_lookups():
    mesh = mesh_of((2, 4))
    other = normal(30, 50, 4)
    params = te.sharding.shard_params(
        {"t": TABLE, "u": other},
        mesh,
        {"*": SPEC(mesh.axis_names)},
        tables="?",
        interleave="?",
        virtual_shards=16,
    )
    sgd = optax.sgd(0.5)

    def value(params, ids, more):
        first, second = te.lookup(params["t"], ids[:, :2]), te.lookup(params["t"], ids[:, 2:])
        return jnp.sum(first * second) + jnp.sum(te.lookup(params["u"], more) ** 2)

    @jax.jit
    def step(params, ids, more):
        halves = [
            te.rows.value_and_grad(value, ids={"t": i, "u": j})(params, i, j)[1]
            for i, j in zip(ids, more, strict=True)
        ]
        return te.rows.update(sgd, te.rows.add(*halves), sgd.init(params), params)[0]

    # Few enough ids that some repeat: in one lookup, in both of a batch, and in both batches.
    ids = [np.random.default_rng(seed).integers(0, 30, (8, 4)).astype(np.int32) for seed in (1, 2)]
    more = [np.random.default_rng(seed).integers(0, 50, (8, 1)).astype(np.int32) for seed in (3, 4)]
    found = step(params, [put(mesh, each) for each in ids], [put(mesh, each) for each in more])
    plain, gradient = {"t": TABLE, "u": other}, jax.jit(jax.grad(value))
    gradients = [gradient(plain, i, j) for i, j in zip(ids, more, strict=True)]
    for name, leaf in plain.items():
        expected = leaf - 0.5 * (np.asarray(gradients[0][name]) + np.asarray(gradients[1][name]))
        np.testing.assert_allclose(found[name].in_vocabulary_order(), expected, rtol=0, atol=1e-4)


# --- what is sent


# Programs that tests of training and of overflow run as well: jax compiles them once.
@pytest.mark.parametrize(
    ("kind", "shape", "ids"),
    [
        (AUTO, (1, 8), 18),
        pytest.param(AUTO, (2, 4), 4, marks=pytest.mark.slow),
        (EXPLICIT, (2, 2, 2), 4),
    ],
    ids=str,
)
def test_a_step_by_exchange_sends_all_to_alls_of_the_stated_sizes_and_nothing_larger(
    kind, shape, ids
):
    mesh = mesh_of(shape, kind)
    params = {"t": interleave(mesh)}
    batch, weights = (
        put(mesh, np.zeros((8, ids), np.int32)),
        put(mesh, np.zeros((8, ids, WIDTH), np.float32)),
    )
    with set_mesh(mesh):
        program = row_step.lower(params, placed_state(OPTIMIZER, params), batch, weights).compile()
    sent = collectives(program)
    # The loss and the norm of two leaves of its gradient are sums of a number from each device.
    sums = [each for each in sent if each.largest == 1]
    assert {each.kind for each in sums} == {"all-reduce"}
    assert sum(len(each.operands) for each in sums) == 3
    sent = [each for each in sent if each not in sums]
    planned = params["t"].layout.hops(8, ids)
    assert {each.kind for each in sent} == {"all-to-all"}
    assert len(sent) == 3 * len(planned)
    places = [hop.parts * hop.room for hop in planned]
    assert sorted(sum(math.prod(shape) for _, shape in each.operands) for each in sent) == sorted(
        [*places, *(2 * [place * WIDTH for place in places])]
    )


# --- overflow and loads


@pytest.mark.slow
def test_ids_that_find_no_room_read_as_nan_and_get_no_update():
    mesh = mesh_of((1, 8))
    same = owned_by_one(18)
    ids = np.tile(same, (8, 1))
    crowded, roomy = interleave(mesh), interleave(mesh, capacity=8.0)
    room = crowded.layout.hops(8, 18)[0].room
    assert room < len(same)
    load = te.sharding.exchange_load(crowded, ids)
    assert load.dropped == 8 * (len(same) - room)
    assert load.rows.tolist() == [[0, 0, 8 * room, 0, 0, 0, 0, 0]]
    assert te.sharding.exchange_load(roomy, ids).dropped == 0
    look = jax.jit(te.lookup)
    rows = np.asarray(look(crowded, put(mesh, ids)))
    held = same[np.argsort(crowded.layout.order.slots(same))[:room]]
    assert np.isnan(rows).any(-1).sum() == load.dropped
    np.testing.assert_array_equal(rows[np.isin(ids, held)], TABLE[ids[np.isin(ids, held)]])
    np.testing.assert_array_equal(look(roomy, put(mesh, ids)), TABLE[ids])

    params, ones = {"t": crowded}, np.ones((*ids.shape, WIDTH), np.float32)
    with set_mesh(mesh):
        params, state, value, _ = row_step(
            params, placed_state(OPTIMIZER, params), put(mesh, ids), put(mesh, ones)
        )
    assert np.isnan(value)
    gradient, expected = np.zeros_like(TABLE), TABLE.copy()
    gradient[held], expected[held] = 8, TABLE[held] - RATE
    np.testing.assert_allclose(
        state[0].mu["t"].in_vocabulary_order(), 0.1 * gradient, rtol=1e-6, atol=0
    )
    np.testing.assert_allclose(params["t"].in_vocabulary_order(), expected, rtol=0, atol=1e-5)


# --- parameter trees and checkpoints


NAME = "transformer_embedding/~/token_embedding"
PATTERN = "*/token_embedding/embeddings"
CONFIG = te.EmbedderConfig(vocab_size=37, d_model=8, pad_id=0)


def place(params, mesh, **options):
    return te.sharding.shard_params(
        params,
        mesh,
        {PATTERN: SPEC(mesh.axis_names)},
        interleave=PATTERN,
        virtual_shards=16,
        **options,
    )


def assert_same_draws(found, wanted):
    """Bit for bit in programs that XLA optimizes; else it may round a product and a sum once in one
    program and twice in another."""
    if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and jnp.issubdtype(
        wanted.dtype, jnp.floating
    ):
        np.testing.assert_array_max_ulp(np.asarray(found), np.asarray(wanted), maxulp=4)
    else:
        np.testing.assert_array_equal(found, wanted)


def test_interleaved_rows_are_drawn_as_on_one_device():
    embedder, mesh = te.Embedder(CONFIG), mesh_of((2, 4), EXPLICIT)
    drawn, params = (
        place(embedder.init, mesh, rng=jax.random.key(7)),
        embedder.init(jax.random.key(7)),
    )
    placed = place(params, mesh)
    assert jax.tree.structure(drawn) == jax.tree.structure(placed)
    for one, other in zip(jax.tree.leaves(drawn), jax.tree.leaves(placed), strict=True):
        assert one.sharding == other.sharding
        assert_same_draws(one, other)
    assert_same_draws(drawn[NAME]["embeddings"].in_vocabulary_order(), params[NAME]["embeddings"])


@pytest.mark.parametrize(
    "spec", [pytest.param("interleaved", marks=pytest.mark.slow), "contiguous"]
)
def test_resizing_and_saving_use_vocabulary_order(tmp_path, spec):
    embedder, mesh = te.Embedder(CONFIG), mesh_of((2, 4))
    params = embedder.init(jax.random.key(7))
    placed = (
        place(params, mesh)
        if spec == "interleaved"
        else te.sharding.shard_params(params, mesh, {PATTERN: SPEC("model")})
    )
    expected = te.resize_vocabulary(params, 50, jax.random.key(1))[NAME]["embeddings"]
    resized = te.resize_vocabulary(placed, 50, jax.random.key(1))[NAME]["embeddings"]
    assert resized.shape == (50, 8)
    assert resized.sharding == placed[NAME]["embeddings"].sharding
    # The mean and the spread are summed in another order.
    np.testing.assert_allclose(resized.in_vocabulary_order(), expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(
        jax.jit(te.lookup)(resized, np.arange(40)), resized.in_vocabulary_order()[:40]
    )
    smaller = te.resize_vocabulary(placed, 20)[NAME]["embeddings"]
    np.testing.assert_array_equal(smaller.in_vocabulary_order(), params[NAME]["embeddings"][:20])
    te.pretrained.save_embedder(tmp_path / "model.safetensors", CONFIG, placed)
    loaded = te.pretrained.load_embedder(tmp_path / "model.safetensors").params
    np.testing.assert_array_equal(loaded[NAME]["embeddings"], params[NAME]["embeddings"])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="today's Orbax asks for a newer jax")
def test_an_interleaved_checkpoint_of_one_mesh_is_restored_on_another_and_on_one_device(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is of the test extra")

    def init(rng):
        params = te.Embedder(CONFIG).init(rng)
        return params, jax.tree.map(lambda leaf: leaf + 1, OPTIMIZER.init(params))

    saved = place(init, mesh_of((2, 4)), rng=jax.random.key(0))
    one_device = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", saved)
        for mesh in (mesh_of((1, 8)), mesh_of((2, 2, 2), EXPLICIT), one_device):
            target = place(jax.eval_shape(init, jax.random.key(0)), mesh)
            args = jax.tree.map(
                lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape),
                target,
            )
            restored = checkpointer.restore(
                tmp_path / "step", args=ocp.args.PyTreeRestore(item=target, restore_args=args)
            )
            assert jax.tree.structure(restored) == jax.tree.structure(target)
            for found, leaf, kept in zip(
                *map(jax.tree.leaves, (restored, target, saved)), strict=True
            ):
                assert found.sharding == leaf.sharding
                np.testing.assert_array_equal(found, kept)


@pytest.mark.slow
def test_a_hundred_steps_of_a_language_model_by_exchange_are_those_by_replicated_rows():
    mesh, steps = mesh_of((2, 4)), 100
    tokens = np.random.default_rng(0).zipf(1.3, (steps, 8, 9)).clip(max=36).astype(np.int32)
    embedder, adam = te.Embedder(CONFIG), optax.adam(0.01)

    def negative_log_likelihood(params, ids):
        x = embedder.apply(params["embed"], None, ids[:, :-1], is_training=False)
        likely = jax.nn.log_softmax(jnp.cumsum(x, axis=1) @ params["out"])
        return -jnp.mean(jnp.take_along_axis(likely, ids[:, 1:, None], axis=-1))

    def losses(options, batch):
        params = {"embed": embedder.init(jax.random.key(0)), "out": normal(1, 8, 37)}
        params = te.sharding.shard_params(
            params, mesh, {PATTERN: SPEC(options.pop("axes"))}, **options
        )
        state = placed_state(adam, params)

        def step(carry, ids):
            params, state = carry
            ids_of = {"embed": {NAME: {"embeddings": ids[:, :-1]}}}
            value, grads = te.rows.value_and_grad(negative_log_likelihood, ids=ids_of)(params, ids)
            return te.rows.update(adam, grads, state, params), value

        (params, _), found = jax.jit(functools.partial(jax.lax.scan, step))(
            (params, state), put(mesh, tokens, None, batch)
        )
        return np.asarray(found), params["embed"][NAME]["embeddings"].in_vocabulary_order()

    # All 37 ids of a batch of 8: a room of its own for each.
    exchanged = losses(
        {"axes": mesh.axis_names, "interleave": PATTERN, "virtual_shards": 16, "capacity": 8.0},
        mesh.axis_names,
    )
    replicated = losses({"axes": "model"}, "data")
    assert exchanged[0][-1] < exchanged[0][0]
    # Gradients that round apart part the trajectories a little further with each step.
    np.testing.assert_allclose(exchanged[0], replicated[0], rtol=0, atol=1e-3)
    np.testing.assert_allclose(exchanged[1], replicated[1], rtol=0, atol=1e-2)


# --- errors


def test_invalid_interleavings_and_exchanges_raise_errors():
    mesh = mesh_of((2, 4))
    with pytest.raises(
        ValueError,
        match=r"^interleave: wanted rows over mesh axes, and whole columns, for t, got .*None, 'model'\)$",
    ):
        interleave(mesh, SPEC(None, "model"))
    with pytest.raises(
        ValueError,
        match=r"^batch_axes: wanted the mesh axes of the rows of t, \('model',\), among others.*got \('data',\)$",
    ):
        interleave(mesh, SPEC("model"), batch_axes=("data",))
    three = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("data",))
    with pytest.raises(
        ValueError,
        match=r"^mesh: wanted a number of devices along \('data',\) that divides 16 virtual shards, to interleave t, got 3$",
    ):
        interleave(three)
    with pytest.raises(ValueError, match=r"^patterns: wanted each to match one of t, got 'u'$"):
        te.sharding.shard_params(
            {"t": TABLE}, mesh, {"*": SPEC("model")}, tables="t", interleave="u"
        )
    with pytest.raises(ValueError, match=r"^virtual_shards: wanted a power of two, got 12$"):
        interleave(mesh, shards=12)
    with pytest.raises(ValueError, match=r"^capacity: wanted a finite number above 0, got 0$"):
        interleave(mesh, capacity=0)
    large = {"t": interleave(mesh, table=jax.ShapeDtypeStruct((2**31 - 20, 1), jnp.float32))}
    value_and_grad = te.rows.value_and_grad(lambda params: 0.0, ids={"t": np.arange(160)})
    with pytest.raises(
        ValueError,
        match=r"^table: wanted at most 2147483627 rows, to take 20 of them, got 2147483632$",
    ):
        jax.eval_shape(value_and_grad, large)
    table = interleave(mesh)
    for use in (
        lambda: te.linear_logits(TABLE, table),
        lambda: te.linear_cross_entropy(TABLE, table, np.arange(VOCAB)),
    ):
        with pytest.raises(
            TypeError,
            match=r"^table: wanted rows in vocabulary order for a tied output layer: leave it out of `interleave`, got",
        ):
            use()
    with pytest.raises(
        ValueError,
        match=r"^ids: wanted split over the mesh axes of the table's rows, \('data', 'model'\), to exchange them",
    ):
        te.rows.value_and_grad(lambda params: 0.0, ids={"t": np.arange(5)})({"t": table})
    contiguous = te.sharding.shard_params({"t": TABLE}, mesh, {"*": SPEC("model")}, tables="t")
    with pytest.raises(
        ValueError,
        match=r"^table: wanted an interleaved table \(see `interleave` of shard_params\), got a contiguous table$",
    ):
        te.sharding.exchange_load(contiguous["t"], BATCHES[0])
    with pytest.raises(
        ValueError, match=r"^ids: wanted a first dimension that 8 devices divide, got shape \[5\]$"
    ):
        te.sharding.exchange_load(table, np.arange(5))
    with pytest.raises(
        TypeError, match=r"^ids: wanted values on the host, outside of jit, got a traced int32\[8\]"
    ):
        jax.jit(lambda ids: te.sharding.exchange_load(table, ids).dropped)(jnp.zeros(8, jnp.int32))


def test_a_gradient_that_does_not_know_the_owners_is_refused():
    params, sgd = {"t": interleave(mesh_of((1, 8)))}, optax.sgd(1.0)
    grads = {"t": te.rows.RowGradient(jnp.array([1, 3]), jnp.ones([2, WIDTH]), vocab_size=VOCAB)}
    with pytest.raises(
        TypeError,
        match=r"^grads: wanted the gradient of an interleaved table as `value_and_grad` returns it: .*, got plain",
    ):
        te.rows.update(sgd, grads, sgd.init(params), params)


def test_the_mean_over_devices_refuses_a_gradient_that_lies_on_a_mesh():
    params, ids = {"t": interleave(mesh_of((1, 8)))}, np.zeros((1, 8, 1), np.int32)

    def mean(ids):
        step = te.rows.value_and_grad(lambda p: te.lookup(p["t"], ids).sum(), ids={"t": ids})
        return te.rows.pmean(step(params)[1], "i")["t"].values

    message = r"^grads: wanted rows of a table that is whole on each device, got those of an inter"
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(jax.vmap(mean, axis_name="i"), ids)


@pytest.mark.slow
def test_looking_up_other_ids_than_given_raises_an_error_or_reads_nan():
    mesh = mesh_of((2, 4))
    params, ids = {"t": interleave(mesh)}, put(mesh, np.zeros((8, 2), np.int32))
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(
            te.rows.value_and_grad(
                lambda params: te.lookup(params["t"], np.arange(5)).sum(), ids={"t": ids}
            ),
            params,
        )
    shifted = lambda params, ids: te.rows.value_and_grad(
        lambda params: te.lookup(params["t"], ids + 1).sum(), ids={"t": ids}
    )(params)[0]
    assert np.isnan(jax.jit(shifted)(params, ids))
