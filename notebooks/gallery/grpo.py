"""GRPO: from rewards alone, a model learns to count on from a number."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from layers import run, stack, training

import transformer_embed as te

STEPS, PROMPTS, GROUP, ANSWER, WORDS = 300, 8, 16, 4, 20
config = te.EmbedderConfig(vocab_size=WORDS, d_model=64)


def hidden(ids):
    """Returns the hidden vectors of texts, which all have the same length, and the output layer."""
    embed = te.TransformerEmbedding(config)
    tokens = te.TokenPositions(np.arange(ids.shape[1]))
    x = embed(ids, is_training=False, positions=tokens.positions)
    return stack(x, te.AttentionMask(tokens, causal=True).dense()), embed.output()


def next_logits(ids):
    x, output = hidden(ids)
    return te.linear_logits(x, output)


def log_probs_of(ids):
    """Returns the log-probability of each sampled token, [text, ANSWER]."""
    x, output = hidden(ids)
    return te.linear_log_probs(x, output, ids, shift=True)[:, 1:]


model = hk.without_apply_rng(hk.multi_transform(lambda: (next_logits, (next_logits, log_probs_of))))


def init(rng, prompts):
    return model.init(rng, prompts[:, None])


def sample(apply, params, rng, prompts):
    """Samples an answer to each prompt. Returns texts, [text, 1 + ANSWER]."""
    ids = jnp.zeros((len(prompts), 1 + ANSWER), jnp.int32).at[:, 0].set(prompts)
    for place in range(ANSWER):
        logits = apply[0](params, ids)[:, place]
        chosen = jax.random.categorical(jax.random.fold_in(rng, place), logits)
        ids = ids.at[:, place + 1].set(chosen)
    return ids


def rewards_of(ids):
    """Returns the share of right tokens: the prompt n asks for n + 1, n + 2, n + 3, n + 4."""
    wanted = (ids[:, :1] + jnp.arange(1, 1 + ANSWER)) % WORDS
    return (ids[:, 1:] == wanted).mean(axis=1)


def loss_fn(params, rng, prompts, apply=model.apply):
    """Samples answers, and raises the log-probability of those that are better than their group."""
    frozen = jax.lax.stop_gradient(params)
    ids = sample(apply, frozen, rng, jnp.repeat(prompts, GROUP))
    rewards = rewards_of(ids).reshape(PROMPTS, GROUP)
    spread = rewards.std(axis=1, keepdims=True) + 1e-4
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / spread
    log_probs = apply[1](params, ids)
    # Samples come from the policy itself, so the ratio is 1, and only the gradient matters.
    ratio = jnp.exp(log_probs - jax.lax.stop_gradient(log_probs))
    objective = (ratio * advantages.reshape(-1, 1)).mean()
    # The value says how much reward is missing. The gradient is the gradient of the objective.
    return 1 - rewards.mean() - (objective - jax.lax.stop_gradient(objective))


def next_batch(random):
    return random.integers(0, WORDS, PROMPTS).astype(np.int32)


def setup(steps=STEPS, seed=0):
    return training(init, loss_fn, next_batch, steps, seed)


def held_out(params, apply=model.apply):
    """Returns the mean reward of 500 sampled answers."""
    prompts = jnp.arange(500) % WORDS
    return float(rewards_of(sample(apply, params, jax.random.key(99), prompts)).mean())


if __name__ == "__main__":
    params, losses, seconds = run(*setup(), next_batch=next_batch, steps=STEPS)
    print(f"{1000 * seconds:.0f} ms per step")
    print(f"reward {held_out(params):.2f}, by chance {1 / WORDS:.2f}")
