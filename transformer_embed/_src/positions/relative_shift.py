"""Moves logits from relative distances to keys, as Transformer-XL needs them."""

import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import with_whole_rows


def relative_shift(logits: ArrayLike, num_keys: int | None = None) -> Float[Array, "*b t s"]:
    """Moves the logits of relative distances to the keys at these distances.

    Use it for attention with relative embeddings (Transformer-XL, XLNet, Music Transformer). You
    multiply each query by the embedding of each distance, which is one matrix product, and this
    function puts each product to its key. With T queries that are the last of S keys,

        result[..., t, s] = logits[..., t, s + T - 1 - t]

    so column r of the logits stands for the key that is `r - (S - 1)` tokens after the query. That
    is 0 for the query's own key, in column S - 1, and negative for the keys before the query.

    Args:
        logits: Floats, [..., T, R], for example [batch, heads, T, R]. Column 0 is of the largest
            distance. R is at least S (columns for the query's own key and the keys before it, as in
            Transformer-XL) and at most S + T - 1 (columns also for the keys after it, as in XLNet).
        num_keys: The number of keys, S: the queries and the tokens of a memory before them. If
            None, there are as many keys as columns.

    Returns:
        [..., T, S], of the dtype of `logits`. A key for which there is no column gets -inf, so with
        R = S no query attends to a later key. The gradient of each column goes to the pairs of its
        distance.

    Raises:
        TypeError: `logits` are not floats, or `num_keys` is not a Python int.
        ValueError: `logits` have no axes of queries and columns, or R is not between S and
            S + T - 1.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> logits = jnp.array([[-3.0, -2.0, -1.0, 0.0]] * 2)  # distances; two queries, four keys
        >>> te.relative_shift(logits).tolist()
        [[-2.0, -1.0, 0.0, -inf], [-3.0, -2.0, -1.0, 0.0]]

        The layer of Transformer-XL, where `u` and `v` are learned [heads, head_dim] and `memory`
        holds what the layer read for the tokens before:

        >>> def attention_logits(queries, keys, distance_keys, u, v):
        ...     content = jnp.einsum("bthd,bshd->bhts", queries + u, keys)
        ...     distance = jnp.einsum("bthd,rhd->bhtr", queries + v, distance_keys)
        ...     return content + te.relative_shift(distance)
        >>> distances = te.sinusoidal_encoding(jnp.arange(4)[::-1], 8).reshape(4, 1, 8)
        >>> queries, keys = jnp.ones((1, 2, 1, 8)), jnp.ones((1, 4, 1, 8))
        >>> attention_logits(queries, keys, distances, 0.0, 0.0).shape
        (1, 1, 2, 4)

    Source:
        Dai et al., "Transformer-XL" (2019), appendix B, https://arxiv.org/abs/1901.02860. Where
        there is no column, the authors' code leaves a logit of another query, and needs a mask.
    """
    logits = arguments.as_floats("logits", logits)
    has_columns = logits.ndim > 1 and logits.shape[-1] > 0
    arguments.check_shape("logits", logits.shape, has_columns, "[..., queries, columns]")
    queries, columns = logits.shape[-2:]
    if num_keys is None:
        num_keys = columns
    elif not export.is_symbolic_dim(num_keys):
        num_keys = arguments.size("num_keys", num_keys)
    # Symbolic sizes have no order, and are assumed to fit.
    is_symbolic = any(map(export.is_symbolic_dim, (queries, columns, num_keys)))
    if not is_symbolic:
        # Logits of no queries may have as many columns as logits of one query.
        most_columns = num_keys + max(queries - 1, 0)
        if not num_keys <= columns <= most_columns:
            want = f"{num_keys} to {num_keys + queries - 1} columns for {num_keys} keys"
            raise arguments.value_error("logits", want, f"shape {list(logits.shape)}")
    return _shifted(logits, num_keys)


# The function is compiled even if the caller is not.
@compiled(1)
def _shifted(logits: Float[Array, "*b t r"], num_keys: int) -> Float[Array, "*b t s"]:
    """Computes `relative_shift` by reshaping, so that nothing has to be gathered.

    For example, of two queries and two keys with columns a b and c d, the rows are padded to

        a b - -
        c d - -

    and the flat array a b - - c d - -, read from the index 1 on in rows of 3, is

        b - -
        c d -

    whose first two columns are the result.
    """
    logits = with_whole_rows(with_whole_rows(logits, -1), -2)
    *batch, queries, columns = logits.shape
    width = num_keys + queries
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, width - columns)]
    padded = jnp.pad(logits, padding, constant_values=-jnp.inf)
    flat = padded.reshape(*batch, queries * width)
    # The result of query t begins at column queries - 1 - t, one column earlier than the result of
    # the query before. So in the flat array, each result begins `width - 1` entries after the last.
    start = max(queries - 1, 0)
    shifted = flat[..., start : start + queries * (width - 1)]
    return shifted.reshape(*batch, queries, width - 1)[..., :num_keys]
