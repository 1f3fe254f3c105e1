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

    Use it for attention with relative embeddings (Transformer-XL, XLNet, Music Transformer). In
    these models, one matrix product gives the dot product of each query with the embedding of each
    distance. The result has a row for each query and a column for each distance. But attention
    needs a column for each key. This function moves each product into the column of its key. For
    example, take the query of token 5. The key at the distance 3 is the key of token 2, so the
    product of this query with the distance 3 moves into the column of token 2. The T queries are
    the last T of the S keys, and the result is

        result[..., t, s] = logits[..., t, s + T - 1 - t]

    The columns of `logits` begin with the largest distance. For example, with S = 4 keys, the
    columns 0, 1, 2 and 3 are for the keys 3, 2, 1 and 0 tokens before the query. Column 3 is for
    the query's own key. If queries also attend to later keys, `logits` has more columns: column 4
    is for the key one token after the query.

    Args:
        logits: The products of the queries and the embeddings of the distances. Floats of shape
            [..., T, R], for example [batch, heads, T, R]. R is the number of distances. Column r is
            for the key that is S - 1 - r tokens before the query. For example, with S = 4 keys,
            column 0 is for the key 3 tokens before the query, column 3 for the query's own key, and
            column 4 for the next key. If queries attend only to the past, as in Transformer-XL,
            pass R = S distances. If queries also attend to later keys, as in XLNet, pass more
            distances, at most S + T - 1. For example, with T = 2 queries and S = 4 keys, pass R = 5
            distances, because the first query has one later key.
        num_keys: The number of keys, S. The first S - T keys are of earlier tokens (the memory of
            Transformer-XL), and the last T keys are of the same tokens as the queries. If None, S
            is the number of columns of `logits`.

    Returns:
        A logit for each query and key, of the dtype of `logits`. Shape [..., T, S]. Each column of
        `logits` is for one distance between a query and a key. If `logits` has no column for a
        distance, the keys at this distance get -inf. For example, if you pass as many distances as
        keys (R = S), the last column is for the query's own key, and no column is for a later key.
        So all keys after the query get -inf, and no query attends to them. The function is
        differentiable.

    Raises:
        TypeError: `logits` does not hold floats, or `num_keys` is not a Python int.
        ValueError: `logits` has fewer than two axes. Or the last axis of `logits`, which has a
            column for each distance, has a wrong length. With T queries and S keys, it must have at
            least S and at most S + T - 1 columns.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> logits = jnp.array([[-3.0, -2.0, -1.0, 0.0]] * 2)  # distances; two queries, four keys
        >>> te.relative_shift(logits).tolist()
        [[-2.0, -1.0, 0.0, -inf], [-3.0, -2.0, -1.0, 0.0]]

        The layer of Transformer-XL, with learned biases `u` and `v` of shape [heads, head_dim]:

        >>> def attention_logits(queries, keys, distance_keys, u, v):
        ...     content = jnp.einsum("bthd,bshd->bhts", queries + u, keys)
        ...     distance = jnp.einsum("bthd,rhd->bhtr", queries + v, distance_keys)
        ...     return content + te.relative_shift(distance)
        >>> distances = te.sinusoidal_encoding(jnp.arange(4)[::-1], 8).reshape(4, 1, 8)
        >>> queries, keys = jnp.ones((1, 2, 1, 8)), jnp.ones((1, 4, 1, 8))
        >>> attention_logits(queries, keys, distances, 0.0, 0.0).shape
        (1, 1, 2, 4)

    Source:
        The method is from Dai et al., "Transformer-XL" (2019), appendix B,
        https://arxiv.org/abs/1901.02860. The authors compute a logit for each query and distance.
        Then they shift each row of logits, so that each logit is in the column of its key. In the
        authors' code, keys after the query have wrong logits after the shift, so the code must mask
        these keys.
    """
    logits = arguments.as_floats("logits", logits)
    has_columns = logits.ndim > 1 and logits.shape[-1] > 0
    arguments.check_shape("logits", logits.shape, has_columns, "[..., queries, columns]")
    queries, columns = logits.shape[-2:]
    if num_keys is None:
        num_keys = columns
    elif not export.is_symbolic_dim(num_keys):
        num_keys = arguments.size("num_keys", num_keys)
    # Symbolic sizes of jax.export cannot be compared, and are assumed to fit.
    is_symbolic = any(map(export.is_symbolic_dim, (queries, columns, num_keys)))
    if not is_symbolic:
        # The most columns are num_keys + queries - 1. With 0 queries, this would be one less than
        # num_keys, but num_keys columns are allowed. So at least 0 is added.
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
    # Explicit mesh axes may split the columns or the queries over devices, but reshaping both needs
    # them whole.
    whole_columns = with_whole_rows(logits, -1)
    logits = with_whole_rows(whole_columns, -2)
    *batch, queries, columns = logits.shape
    width = num_keys + queries
    no_padding = [(0, 0)] * (logits.ndim - 1)
    padding_of_columns = (0, width - columns)
    padded = jnp.pad(logits, [*no_padding, padding_of_columns], constant_values=-jnp.inf)
    flat = padded.reshape(*batch, queries * width)
    # The result of query t begins at column queries - 1 - t, one column earlier than the result of
    # the query before. So in the flat array, each result begins `width - 1` entries after the last.
    step = width - 1
    start = max(queries - 1, 0)
    end = start + queries * step
    shifted_rows = flat[..., start:end].reshape(*batch, queries, step)
    return shifted_rows[..., :num_keys]
