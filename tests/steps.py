"""Training by rows on a mesh, and the same densely on one device with numpy's gradients."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P
from layouts import mesh
from meshes import put

import transformer_embed as te
from transformer_embed._src.tables.row_order import rows_of_nearest_ids

VOCAB, WIDTH, PAD, STEPS = 300, 8, 3, 3
NAME = "transformer_embedding/~/token_embedding"


def row_wise_adagrad(rate):
    """Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
    Systems" (2019), https://arxiv.org/abs/1906.00091: one sum of squares for each row."""

    def init(params):
        return jax.tree.map(lambda table: jnp.full_like(table.sum(1), 0.1), params)

    def update(gradients, sums, params=None):
        sums = jax.tree.map(lambda g, s: s + jnp.mean(g**2, axis=1), gradients, sums)
        step = lambda g, s: -rate * g / jnp.sqrt(s)[:, None]
        return jax.tree.map(step, gradients, sums), sums

    return optax.GradientTransformation(init, update)


def batches(seed):
    """For each step two parts: ids with repeats, padding and foreign ones, and cotangents."""
    random = np.random.default_rng(seed)
    ids = random.integers(-3, VOCAB + 5, (STEPS, 2, 8, 2)).astype(np.int32)
    ids[..., 0], ids[:, :, 2:4, 1], ids[:, :, :2, 1] = 7, PAD, (-2, VOCAB + 1)
    return ids, random.normal(size=(*ids.shape, WIDTH)).astype(np.float32)


def config(dtype="float32", **options):
    return te.EmbedderConfig(
        VOCAB, WIDTH, scheme=None, scale=1.0, output=None, param_dtype=dtype, **options
    )


def start(config, seed):
    """A table in the order of ids."""
    table = np.random.default_rng(seed).normal(size=(VOCAB, WIDTH)).astype(np.float32)
    return table.astype(config.param_dtype)


# --- on one device, without this package


def dense_gradient(config, ids, weights):
    """Of the loss, which is linear in the table."""
    gradient = np.zeros((VOCAB, WIDTH))
    inside = ids.clip(0, VOCAB - 1)
    is_read = (ids != config.pad_id) & ((ids == inside) | (config.out_of_range == "clip"))
    np.add.at(gradient, inside[is_read], weights[is_read])
    return gradient


def expected(seed, config, optimizer, form):
    """The table after each row with a gradient took the dense step, and the losses."""
    table = start(config, seed)
    state, losses = optimizer.init(table), []

    @jax.jit
    def dense_step(gradient, moved, state, table):
        """The step of all rows, then the old rows where nothing moved."""
        updates, new_state = optimizer.update(gradient, state, table)
        new_table = optax.apply_updates(table, updates)

        def keep(old, new):
            is_row = moved.reshape(-1, *[1] * (old.ndim - 1)) if old.ndim else True
            return jnp.where(is_row, new, old)

        return jax.tree.map(keep, (table, state), (new_table, new_state))

    for ids, weights in zip(*batches(seed), strict=True):
        count = 1 if form in ("one", "bounded") else 2
        gradient = dense_gradient(config, ids[:count], weights[:count])
        losses.append(np.sum(gradient * np.asarray(table, np.float64)))
        narrow_gradient = gradient.astype(table.dtype)
        table, state = dense_step(narrow_gradient, gradient.any(1), state, table)
    return np.asarray(table, np.float64), losses


# --- by rows


def add(grads, more):
    is_rows = lambda leaf: isinstance(leaf, te.rows.RowGradient)
    return jax.tree.map(operator.add, grads, more, is_leaf=is_rows)


def trained(seed, config, optimizer, form, *, kind, table, ids, where="none", capacity=None):
    """The same by rows, with a table and ids that a mesh splits by these specs."""
    embedder, on = te.Embedder(config), mesh(kind)
    options = {
        "capacity": capacity,
        "max_rows": 12 if form == "bounded" else None,
        "config": config,
    }

    def loss(params, parts):
        read = lambda ids: embedder.apply(params, None, ids, is_training=False)
        of_part = lambda part: jnp.sum(read(part[0]).astype(jnp.float32) * part[1])
        if form == "together":
            # As layers that are scanned, and computed again for gradients.
            stacked = [jnp.stack(arrays) for arrays in zip(*parts, strict=True)]
            total = jnp.sum(jax.lax.map(jax.checkpoint(of_part), stacked))
        else:
            total = sum(map(of_part, parts))
        return jax.lax.psum(total, "data") if where == "inside" else total

    def gradient(params, parts):
        every = jnp.stack([ids for ids, _ in parts], 1) if len(parts) > 1 else parts[0][0]
        by_rows = te.rows.value_and_grad(loss, ids={"embeddings": every}, **options)
        return by_rows(params, parts)

    def step(params, state, parts):
        if form == "added":
            values, grads = zip(*(gradient(params, [part]) for part in parts), strict=True)
            value, grads = sum(values), add(*grads)
        else:
            value, grads = gradient(params, parts[: 1 if form in ("one", "bounded") else 2])
            # Scaled as by a loss scale: the powers of two round nothing.
            grads = jax.tree.map(lambda leaf: leaf * 8 / 8, grads)
        return *te.rows.apply_gradients(optimizer, grads, state, params), value

    if where == "inside":
        over, whole = [(P("data"), P("data"))] * 2, P()
        specs = {"in_specs": (whole, whole, over), "out_specs": whole, "axis_names": {"data"}}
        step = jax.shard_map(step, **specs)
    step = jax.jit(step, donate_argnums=(0, 1))
    row_of_id = rows_of_nearest_ids(np.arange(VOCAB), config.rows, config.row_order)
    padded = np.zeros((config.rows, WIDTH), config.param_dtype)
    padded[row_of_id] = start(config, seed)
    params = {NAME: {"embeddings": padded}}
    # On the host, because each draw splits it in another way, which is compiled again.
    start_of_carry = jax.device_get((params, optimizer.init(params)))
    with jax.set_mesh(on):
        split = lambda leaf: put(on, leaf, *table[: leaf.ndim])
        carry, losses = jax.tree.map(split, start_of_carry), []
        if form == "scanned":

            def one(carry, parts):
                *carry, value = step(*carry, parts)
                return tuple(carry), value

            by_part = zip(*(array.swapaxes(0, 1) for array in batches(seed)), strict=True)
            parts = [put(on, part, None, *ids) for part in by_part]
            carry, losses = jax.jit(functools.partial(jax.lax.scan, one))(carry, parts)
        else:
            placement = jax.tree.map(lambda leaf: leaf.sharding, [*carry])
            for batch in zip(*batches(seed), strict=True):
                parts = [put(on, part, *ids) for part in zip(*batch, strict=True)]
                *carry, value = step(*carry, parts)
                # XLA may split them in another way, for which the next step would be compiled again.
                carry = jax.device_put(carry, placement)
                losses.append(float(value))
    return np.asarray(carry[0][NAME]["embeddings"], np.float64)[row_of_id], losses
