"""Whole programs in which one part's result is another part's argument."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import equal, near
from flax import nnx
from meshes import AUTO, EXPLICIT, mesh_of, put

import transformer_embed as te

CONFIG = te.EmbedderConfig(17, 16, dropout_rate=0.0)


def test_the_first_steps_of_a_loop_share_one_compilation():
    """A cache from the constructor and one that `write_cache` made are the same tree."""

    @jax.jit
    def step(slots, slot):
        return te.write_cache(slots, te.TokenPositions.from_offset(slot, 1), slot)[0]

    slots = te.TokenPositions.empty(2, 4)
    for slot in range(3):
        slots = step(slots, slot)
    assert step._cache_size() == 1
    assert slots.padding_mask.tolist() == [[True, True, True, False]] * 2


@pytest.mark.slow
def test_training_goes_on_after_an_exchange_that_overflows():
    """8 devices: the step is skipped, with parameters and state as they were."""
    mesh, optimizer = mesh_of((8,), ("x",), EXPLICIT), optax.adam(0.1)
    params = {"table": jnp.ones((32_768, 16))}
    place = lambda leaf: put(mesh, leaf, *["x"] * (leaf.ndim == 2))
    held = jax.tree.map(place, (params, optimizer.init(params)))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(held, ids):
        params, state = held
        loss = lambda params: jnp.mean(te.lookup(params["table"], ids))
        options = {"ids": {"table": ids}, "max_rows": 4, "capacity": 1.0}
        value, grads = te.rows.value_and_grad(loss, **options)(params)
        update = lambda: te.rows.apply_gradients(optimizer, grads, state, params)
        return jax.lax.cond(jnp.isfinite(value), update, lambda: (params, state)), value

    def batch(ids):
        # Neighbours belong to one device: each asks for one of its own.
        return put(mesh, (ids * 4096 % 32_767).reshape(8, -1).astype(np.int32), "x")

    few, many = batch(np.tile(np.arange(4), 32)), batch(np.arange(128))
    held, first = step(held, few)
    before = jax.device_get(held)
    held, overflow = step(held, many)
    equal(jax.device_get(held), before)
    assert jnp.isnan(overflow)
    assert step(held, few)[1] < first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "split"), [((EXPLICIT, AUTO), "x"), ((AUTO, EXPLICIT), ("y", "x"))], ids=str
)
def test_some_axes_of_a_mesh_are_explicit_and_others_automatic(kinds, split):
    """Types say how the batch is split, and the compiler splits the model, for example."""
    mesh = jax.make_mesh((2, 4), ("y", "x"), axis_types=kinds)
    embedder = te.Embedder(dataclasses.replace(CONFIG, row_multiple=8))
    optimizer = optax.sgd(0.01, momentum=0.9)
    params = embedder.init(jax.random.key(0))
    ids = jnp.arange(32, dtype=jnp.int32).reshape(8, 4) % 17
    (path,) = params

    @jax.jit
    def run(params, ids):
        apply = functools.partial(embedder.apply, rng=None, ids=ids, is_training=False)

        def loss(params, reduction="mean"):
            output, options = embedder.output(params), {"reduction": reduction}
            return te.linear_cross_entropy(apply(params), output, ids, shift=True, **options)

        square = lambda params: jnp.sum(apply(params) ** 2)
        rows = te.rows.value_and_grad(square, ids={f"{path}/embeddings": ids})(params)[1]
        updated = te.rows.apply_gradients(optimizer, rows, optimizer.init(params), params)[0]
        return jax.value_and_grad(loss)(params), loss(params, "none"), loss(updated)

    expected = run(params, ids)
    with jax.set_mesh(mesh):
        params = put(mesh, params, split)
        found = jax.device_get(run(params, put(mesh, ids, "y")))
    near(found, expected, atol=1e-5)


def test_flax_may_hold_a_sharded_table(tmp_path):
    mesh, config = mesh_of((8,), ("x",)), dataclasses.replace(CONFIG, row_multiple=8)
    ((path, layer),) = te.Embedder(config).init(jax.random.key(0)).items()
    table = put(mesh, layer["embeddings"], "x")
    x = jnp.ones(CONFIG.d_model)
    for lookup in (te.lookup, jax.jit(te.lookup)):
        equal(lookup(nnx.Param(table), np.array([3])), te.lookup(table, [3]))
    equal(te.linear_logits(x, nnx.Param(table)), te.linear_logits(x, table))
    params = {path: {"embeddings": nnx.Param(table)}}
    te.pretrained.save_embedder(tmp_path / "a.safetensors", config, params)
    saved = te.pretrained.load_embedder(tmp_path / "a.safetensors").params
    equal(saved[path]["embeddings"], layer["embeddings"])


@pytest.mark.parametrize("spec", [("y", None), (None, "x"), ("y", "x")], ids=str)
@pytest.mark.parametrize("rows", [1, 4], ids=["one row", "all rows"])
def test_a_cache_that_explicit_axes_split_takes_tokens_that_they_do_not_split(spec, rows):
    """As the offset of a step of decoding, which all rows may share."""
    mesh = mesh_of((2, 4), ("y", "x"), EXPLICIT)
    tokens = te.TokenPositions.from_offset(np.arange(rows), 3)
    cache = te.TokenPositions.empty(4, 8), jnp.zeros((4, 8, 4, 2))
    new, slot = (tokens, jnp.ones((rows, 3, 4, 2))), jnp.array([2, 0, 7, 8])
    expected = te.write_cache(cache, new, slot)
    with jax.set_mesh(mesh):
        cache = put(mesh, cache[0], *spec), put(mesh, cache[1], *spec[:1], None, *spec[1:])
        written, is_written = jax.jit(te.write_cache)(cache, new, slot)
    equal((written, is_written), expected)
    for before, after in zip(*map(jax.tree.leaves, (cache, written)), strict=True):
        assert jax.typeof(after) == jax.typeof(before)
