"""Two towers: a model recommends the next item to a user. The table is trained row-wise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from layers import run

import transformer_embed as te

STEPS, USERS, SEEN = 300, 256, 6
ITEMS, WIDTH, TOPICS = 1_000_000, 32, 500
optimizer = optax.adam(3e-2)


def items_of(random, topics, count):
    """Samples items of topics. Few items are popular, as in a shop, and a topic is id % TOPICS."""
    ranks = (ITEMS // TOPICS) ** random.random((len(topics), count))
    return np.int32(topics[:, None] + TOPICS * (ranks.astype(int) - 1))


def next_batch(random):
    """Returns the items that each user has seen, the next item, and other items (same for all)."""
    items = items_of(random, random.integers(0, TOPICS, USERS), SEEN + 1)
    others = items_of(random, random.integers(0, TOPICS, 256), 1)[:, 0]
    return items[:, :SEEN], items[:, SEEN], others


def scores_of(params, seen, items):
    """Scores items for users: the product of the mean of what a user has seen and the item."""
    users = te.lookup(params["items"], seen).mean(axis=1) @ params["user"]
    return users @ te.lookup(params["items"], items).T


def loss_fn(params, seen, right, others):
    scores = scores_of(params, seen, jnp.concatenate([right, others]))
    # Another user's item counts as a wrong one, unless it is the same item.
    is_same = jnp.concatenate([right, others]) == right[:, None]
    is_own = jnp.arange(scores.shape[1]) == jnp.arange(len(right))[:, None]
    scores = jnp.where(is_same & ~is_own, -jnp.inf, scores)
    return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(right))).mean()


def init(rng):
    return {"items": 0.1 * jax.random.normal(rng, (ITEMS, WIDTH)), "user": jnp.eye(WIDTH)}


def loss_and_grads(params, seen, right, others):
    ids = jnp.concatenate([seen.ravel(), right, others])
    return te.rows.value_and_grad(loss_fn, ids={"items": ids})(params, seen, right, others)


def apply_gradients(grads, state, params):
    return te.rows.apply_gradients(optimizer, grads, state, params)


def setup(steps=STEPS, seed=0, functions=(loss_and_grads, apply_gradients)):
    """Returns a training step, and the parameters and optimizer state to start from."""
    loss_and_grads, apply_gradients = functions

    @functools.partial(jax.jit, donate_argnums=(0, 1))  # the table is updated in place
    def step(params, state, rng, batch):
        loss, grads = loss_and_grads(params, *batch)
        return *apply_gradients(grads, state, params), loss

    params = jax.jit(init)(jax.random.key(seed))
    return step, params, jax.jit(optimizer.init)(params)


def held_out(params):
    """Returns how often the right item is among the ten best of 1,000, for other users."""
    random = np.random.default_rng(10**6)
    items = items_of(random, random.integers(0, TOPICS, 1000), SEEN + 1)
    scores = scores_of(params, items[:, :SEEN], items[:, SEEN])
    better = (scores > jnp.diagonal(scores)[:, None]).sum(axis=1)
    return float((better < 10).mean())


if __name__ == "__main__":
    params, losses, seconds = run(*setup(), next_batch=next_batch, steps=STEPS)
    print(f"loss {losses[0]:.2f} -> {losses[-50:].mean():.2f}, {1000 * seconds:.1f} ms per step")
    print(f"recall@10 {held_out(params):.2f}, by chance 0.01")
