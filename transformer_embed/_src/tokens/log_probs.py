"""The log-probability of each label under an output layer."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.tokens.chunks import Layer
from transformer_embed._src.tokens.cross_entropy import CrossEntropy
from transformer_embed._src.tokens.lookup import Table
from transformer_embed._src.tokens.losses import Batch, as_batch, as_setting, as_steps, reduced
from transformer_embed._src.tokens.output_layer import OutputLayer, as_output_layer


def linear_log_probs(
    x: ArrayLike,
    output: OutputLayer | ArrayLike | Table,
    labels: ArrayLike,
    *,
    temperature: ArrayLike = 1.0,
    mask: ArrayLike | None = None,
    shift: int = False,
    segment_ids: ArrayLike | None = None,
    with_entropy: bool = False,
    chunk_size: int | None = None,
) -> Float[Array, "..."] | tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The log-probability of each label under `linear_logits`, one chunk of tokens at a time.

    Reinforcement learning on language models takes gradients through functions of them: ratios of
    two policies, clips, KL terms. Logits of the whole batch never exist, neither in the forward nor
    in the backward pass. "What the loss costs", a section of the reference page, has time and
    memory, and what devices exchange.

    Args:
        x: [..., d], a floating dtype.
        output: as in `linear_cross_entropy`.
        labels: [...], any integer dtype: the id whose log-probability each token asks for; with
            shift, the ids themselves.
        shift, segment_ids, chunk_size: as in `linear_cross_entropy`.
        temperature: above 0, that of sampling: the logits are divided by it. A number, or a
            floating array that broadcasts to the labels, such as [batch, 1]; it may be traced, and
            has a gradient. With shift, that of `labels[..., t]` is at t.
        mask: as in `linear_cross_entropy`. Labels that a prompt gives are usually not counted.
        with_entropy: True returns entropies too.

    Returns:
        [...], in float32 (float64 if x or the table is): at each label, its log-probability given
        the token that predicts it. With shift, that of `labels[..., t]` is at t, and the first
        labels of a sequence have none. With `with_entropy=True` it is a pair, whose second array
        has at each label the entropy, in nats, of the distribution that predicts it.

        Both are 0 at labels that are not counted, where x has no effect. The log-probability of a
        counted label outside the vocabulary is NaN.

        The same compiled function gives equal bits for equal arguments. With and without gradients,
        or inside another function, the results may differ by a few units in the last place, because
        XLA fuses them with other operations: the ratio of a policy to itself is 1 to about 1e-6.
        The same holds for another `chunk_size`, batch shape, mesh or `with_entropy`.

    Raises:
        TypeError: as for `linear_cross_entropy`; with_entropy is not a Python bool.
        ValueError: as for `linear_cross_entropy`; a temperature is a number that is not above 0.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> table = jnp.array([[0.0, 0.0], [3.0, 4.0]])
        >>> x = jnp.zeros([1, 3, 2])
        >>> ids = jnp.array([[0, 1, 1]])
        >>> log_probs, entropy = te.linear_log_probs(x, table, ids, shift=True, with_entropy=True)
        >>> print(log_probs, entropy)  # log(1 / 2), and log(2)
        [[ 0.        -0.6931472 -0.6931472]] [[0.        0.6931472 0.6931472]]

        >>> def ppo_loss(x, old_log_probs, advantages):
        ...     log_probs = te.linear_log_probs(x, table, ids, shift=True)
        ...     ratio = jnp.exp(log_probs - old_log_probs)
        ...     clipped = jnp.clip(ratio, 0.8, 1.2)
        ...     return -jnp.minimum(ratio * advantages, clipped * advantages).mean()
        >>> jax.grad(ppo_loss)(x, log_probs, jnp.ones([1, 3])).shape
        (1, 3, 2)
    """
    x, output = as_output_layer(x, output)
    of_labels = as_setting("temperature", temperature, 1, arguments.positive)
    steps = as_steps(shift)
    batch = as_batch(x.shape[:-1], labels, mask, None, steps, segment_ids, temperature=of_labels)
    loss = CrossEntropy(
        (output._options,),
        steps,
        None if chunk_size is None else arguments.size("chunk_size", chunk_size),
        with_entropy=arguments.flag("with_entropy", with_entropy),
    )
    return _log_probs(loss, Layer(x, output.table, output.bias), batch)


@functools.partial(jax.jit, static_argnums=0)
def _log_probs(loss: CrossEntropy, layer: Layer, batch: Batch) -> Any:
    (losses, *entropies), _ = reduced(loss, (layer,), batch)
    # A difference, because the negative of 0 is -0.
    log_probs = 0 - losses[..., 0]
    return (log_probs, entropies[0][..., 0]) if loss.with_entropy else log_probs
