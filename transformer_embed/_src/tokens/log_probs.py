"""The log-probability of each label under an output layer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.partitioning import index_along, split_like
from transformer_embed._src.sequences.runs import of_previous_token
from transformer_embed._src.tokens.chunks import Layer, Loss, map_chunks, split_layers
from transformer_embed._src.tokens.cross_entropy import CrossEntropy
from transformer_embed._src.tokens.lookup import Table
from transformer_embed._src.tokens.lookup_gradient import read_or_zero
from transformer_embed._src.tokens.losses import (
    Batch,
    along_length,
    as_batch,
    as_chunk_size,
    as_layer,
    as_steps,
    every_token,
    nan_outside,
    reduced,
    targets,
    without_unused,
)
from transformer_embed._src.tokens.output_layer import (
    OutputLayer,
    biased_and_capped,
)


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
            shift, the ids themselves. With one more axis [..., k], k candidates of each token, as
            for multiple choice, or a teacher's `linear_top_k`: one pass over the vocabulary serves
            all of them.
        shift, segment_ids, chunk_size: as in `linear_cross_entropy`.
        temperature: above 0, that of sampling: the logits are divided by it. A number, or a
            floating array that broadcasts to the labels, such as [batch, 1]; it may be traced, and
            has a gradient. With shift, that of `labels[..., t]` is at t.
        mask: as in `linear_cross_entropy`. Labels that a prompt gives are usually not counted. Of
            candidates, any shape that broadcasts to theirs: a mask of tokens is `mask[..., None]`.
        with_entropy: True returns entropies too.

    Returns:
        [...], in float32 (float64 if x or the table is): at each label, its log-probability given
        the token that predicts it. With shift, that of `labels[..., t]` is at t, and the first
        labels of a sequence have none. With `with_entropy=True` it is a pair, whose second array
        has at each label the entropy, in nats, of the distribution that predicts it.

        Both are 0 at labels that are not counted, where x has no effect. The log-probability of a
        counted label outside the vocabulary is NaN.

        Of candidates [..., k]: those that are not counted have -inf, so that they add nothing to a
        sum of probabilities, as `jax.nn.logsumexp` computes it. Entropies are [...].

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
    options, layer = as_layer(x, output)
    tokens, steps = layer.x.shape[:-1], as_steps(shift)
    ids = arguments.as_int32("labels", labels)
    batch = as_batch(tokens, ids, mask, None, steps, segment_ids, True, temperature=temperature)
    loss = CrossEntropy(
        (options,),
        steps,
        as_chunk_size(chunk_size),
        with_entropy=arguments.flag("with_entropy", with_entropy),
        with_candidates=ids.ndim > len(tokens),
    )
    return _log_probs(loss, layer, batch)


@functools.partial(jax.jit, static_argnums=0)
def _log_probs(loss: CrossEntropy, layer: Layer, batch: Batch) -> Any:
    (losses, *entropies), weights = reduced(loss, (layer,), batch)
    # A difference, because the negative of 0 is -0.
    log_probs = 0 - losses
    if loss.with_candidates:
        log_probs = jnp.where(weights == 0, -jnp.inf, log_probs)
    else:
        log_probs = log_probs[..., 0]
    return (log_probs, entropies[0][..., 0]) if loss.with_entropy else log_probs


def linear_kept_log_probs(
    x: ArrayLike,
    output: OutputLayer | ArrayLike | Table,
    kept: ArrayLike,
    *,
    temperature: ArrayLike = 1.0,
    mask: ArrayLike | None = None,
    shift: int = False,
    segment_ids: ArrayLike | None = None,
    chunk_size: int | None = None,
) -> Float[Array, "... k"]:
    """The log-probability of each kept id among those of its token, as of truncated sampling.

    What is left of a distribution after top-k or top-p is its softmax over the kept ids. Those of
    the others cancel, so only the rows of the kept ids are read: with few of them it takes a
    fraction of the time of `linear_log_probs`.

    Args:
        x: [..., d], a floating dtype.
        output: as in `linear_cross_entropy`.
        kept: [..., k], any integer dtype: the kept ids of each token. Fill short sets with the
            `pad_id` of the output layer, or with any ids that mask leaves out. With shift,
            `kept[..., t, :]` belongs to the token that predicts `ids[..., t]`.
        temperature, mask, shift, segment_ids: as for the candidates of `linear_log_probs`.
        chunk_size: the largest number of tokens in a chunk, which reads `chunk_size * k` rows.
            None: as many as read the size of the table.

    Returns:
        [..., k], in float32 (float64 if x or the table is), -inf at ids that are not counted. A
        counted id outside the vocabulary makes its token NaN.

    Raises:
        TypeError: as for `linear_log_probs`.
        ValueError: as for `linear_log_probs`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> table = jnp.array([[1.0], [1.0], [0.0], [1.0]])
        >>> kept = jnp.array([[3, 1, 0], [2, 0, 0]])
        >>> output = te.OutputLayer(table, pad_id=0)
        >>> print(jnp.exp(te.linear_kept_log_probs(jnp.ones([2, 1]), output, kept)))
        [[0.5 0.5 0. ]
         [1.  0.  0. ]]

    Source:
        Top-p: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020), section 3.1,
        https://arxiv.org/abs/1904.09751
    """
    options, layer = as_layer(x, output)
    tokens, steps = layer.x.shape[:-1], as_steps(shift)
    ids = arguments.as_int32("kept", kept)
    arguments.check_same("kept", "x's shape without its last axis", ids.shape[:-1], tokens)
    batch = as_batch(tokens, ids, mask, None, steps, segment_ids, True, temperature=temperature)
    most = max(options.vocab_size // max(ids.shape[-1], 1), 1)
    loss = Loss((options,), steps, as_chunk_size(chunk_size) or most)
    return _kept_log_probs(loss, layer, batch)


@functools.partial(jax.jit, static_argnums=0)
def _kept_log_probs(loss: Loss, layer: Layer, batch: Batch) -> Float[Array, "... k"]:
    found = targets(loss, layer.x, batch, arguments.compute_dtype(layer.x.dtype, layer.table.dtype))
    (split,), of_tokens, layers = split_layers(
        (found.labels, found.settings), [without_unused(layer, found)]
    )

    def of_chunk(of_tokens: Any, layers: tuple[Layer, ...]) -> Float[Array, "t k"]:
        ids, settings = of_tokens
        x, _, bias, rows = layers[0]
        columns = jnp.asarray(ids) - index_along(split.vocabulary) * len(rows)
        # As uint32, a negative column is past the end, like that of another device's row.
        columns = columns.astype(jnp.uint32)
        is_here = columns < len(rows)
        products = jnp.einsum("td,tkd->tk", x.astype(rows.dtype), read_or_zero(rows, columns))
        bias = None if bias is None else read_or_zero(bias[:, None], columns)[..., 0]
        logits, factor = biased_and_capped(loss.outputs[0], products, bias)
        if settings.temperature is not None:
            factor /= settings.temperature
        # Each row is on one of the devices.
        return jax.lax.psum(jnp.where(is_here, factor * logits, 0), split.vocabulary)

    logits = map_chunks(of_chunk, loss.chunk_size, (split,), of_tokens, layers)
    logits = split_like(logits, every_token(layer.x))
    logits = nan_outside(loss, found.labels, found.counted.astype(logits.dtype)) * logits
    counted = found.counted
    if loss.shift:
        back = along_length(of_previous_token, loss.shift)
        logits, counted = back(logits), back(counted)
    # Where none is counted, the sum is that of all: its gradient is finite.
    is_kept = counted | ~counted.any(-1, keepdims=True)
    log_z = jax.nn.logsumexp(jnp.where(is_kept, logits, -jnp.inf), axis=-1, keepdims=True)
    return jnp.where(counted, logits - log_z, -jnp.inf)
