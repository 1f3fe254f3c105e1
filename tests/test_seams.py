"""Whole programs in which one part's result is another part's argument."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import equal
from drawn import drawn
from meshes import EXPLICIT, mesh_of, put

import transformer_embed as te


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
    mesh, optimizer = mesh_of((8,), ("x",), EXPLICIT), optax.sgd(0.1, momentum=0.9)
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
def test_flax_may_hold_a_sharded_table(tmp_path):
    from flax import nnx  # noqa: PLC0415

    mesh, config = mesh_of((8,), ("x",)), te.EmbedderConfig(17, 16, row_multiple=8)
    ((path, layer),) = drawn(te.Embedder(config).init).items()
    table = put(mesh, layer["embeddings"], "x")
    x = np.ones(16, np.float32)
    for lookup in (te.lookup, jax.jit(te.lookup)):
        equal(lookup(nnx.Param(table), np.array([3])), te.lookup(table, [3]))
    equal(te.linear_logits(x, nnx.Param(table)), te.linear_logits(x, table))
    params = {path: {"embeddings": nnx.Param(table)}}
    te.pretrained.save_embedder(tmp_path / "a.safetensors", config, params)
    saved = te.pretrained.load_embedder(tmp_path / "a.safetensors").params
    equal(saved[path]["embeddings"], layer["embeddings"])


@pytest.mark.parametrize(("spec", "rows"), [((None, "x"), 4), (("y", "x"), 1)])
def test_a_cache_that_explicit_axes_split_takes_tokens_that_they_do_not_split(spec, rows):
    """As the offset of a step of decoding, which all rows may share."""
    mesh = mesh_of((2, 4), ("y", "x"), EXPLICIT)
    positions = np.arange(rows)[:, None] + np.arange(3)
    tokens = te.TokenPositions(positions, segment_ids=np.ones_like(positions))
    new = tokens, np.ones((rows, 3, 4, 2), np.float32)
    cache = te.TokenPositions.empty(4, 8), np.zeros((4, 8, 4, 2), np.float32)
    slot = jnp.asarray(np.int32([2, 0, 7, 8]))
    expected = te.write_cache(cache, new, slot)
    with jax.set_mesh(mesh):
        cache = put(mesh, cache[0], *spec), put(mesh, cache[1], *spec[:1], None, *spec[1:])
        written, is_written = jax.jit(te.write_cache)(cache, new, slot)
    equal((written, is_written), expected)
    before, after = ([*map(jax.typeof, jax.tree.leaves(tree))] for tree in (cache, written))
    assert before == after
