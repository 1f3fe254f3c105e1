"""Adds T5's learned bias of attention logits, as a module."""

from typing import Any

import haiku as hk
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, DTypeLike
from transformer_embed._src.layers.module_parameters import Initializer, as_initializer
from transformer_embed._src.positions.relative_bias import relative_position_buckets
from transformer_embed._src.tokens.lookup import as_table, lookup


class RelativePositionBias(hk.Module):
    """Computes T5's learned bias of attention logits: a number for each head and distance bucket.

    Add the result to the attention logits. The numbers are learned, as the parameter `embeddings`
    of shape [num_buckets, num_heads]. This is the shape in transformers. (T5X stores the
    transpose.) In T5, all layers of the encoder share one module, and all layers of the decoder
    share another module. T5 does not divide the logits by sqrt(head_dim).

    Args:
        num_heads: The number of attention heads, at least 1.
        causal: Whether all keys after the query get the same bias, one number per head. Set True in
            a decoder, whose mask hides these keys, and False in an encoder. There is no default.
            See `relative_position_buckets`.
        num_buckets, max_distance: How distances are put into buckets. See
            `relative_position_buckets`.
        w_init: The initializer of the table. If None, the initial values are uniform with variance
            1 / fan_avg, as in T5X.
        param_dtype: The dtype of the table.
        dtype: The dtype of the result. If None, it is the dtype of the table, after a Haiku
            mixed-precision policy has cast it.
        name: The name of the module.

    Raises:
        ValueError: `num_heads` is below 1. A call of the module raises the errors of
            `relative_position_buckets` for the other arguments and for the positions.

    Example:
        >>> import haiku as hk, jax
        >>> import transformer_embed as te
        >>> def bias_of_encoder(queries, keys):
        ...     return te.RelativePositionBias(8, causal=False)(queries, keys)
        >>> bias = hk.without_apply_rng(hk.transform(bias_of_encoder))
        >>> params = bias.init(jax.random.key(0), range(5), range(5))
        >>> bias.apply(params, [4], range(5)).shape
        (8, 1, 5)

    Source:
        Raffel et al., "T5" (2020), section 2.1, https://arxiv.org/abs/1910.10683
    """

    def __init__(
        self,
        num_heads: int,
        *,
        causal: bool,
        num_buckets: int = 32,
        max_distance: int = 128,
        w_init: Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.num_heads = arguments.size("num_heads", num_heads)
        # These arguments are not checked here. `relative_position_buckets` checks them, each time
        # the module is called.
        self.bucket_options = {
            "num_buckets": num_buckets,
            "max_distance": max_distance,
            "causal": causal,
        }
        default = hk.initializers.VarianceScaling(1.0, "fan_avg", "uniform")
        self.w_init = as_initializer(w_init, default)
        self.param_dtype = arguments.floating_dtype("param_dtype", param_dtype)
        self.dtype = dtype if dtype is None else arguments.floating_dtype("dtype", dtype)

    def __call__(
        self, query_positions: ArrayLike, key_positions: ArrayLike
    ) -> Float[Array, "*b h t s"]:
        """Returns the bias of `dtype`, [B or 1, num_heads, T, S].

        If the positions of queries and keys have no batch axis, the bias is [num_heads, T, S].

        Args:
            query_positions: The positions of the queries, integers. Shape [T] or [B, T].
            key_positions: The positions of the keys, integers. Shape [S] or [B, S].
        """
        options = self.bucket_options
        # The bucket of each pair of a query and a key, [..., T, S].
        buckets = relative_position_buckets(query_positions, key_positions, **options)
        shape = (options["num_buckets"], self.num_heads)
        parameter: Any = hk.get_parameter("embeddings", shape, self.param_dtype, self.w_init)
        table = as_table(f"{self.name}/embeddings", parameter)
        # A bucket is never out of range, so out_of_range="nan" would only cost time.
        heads_last = lookup(table, buckets, out_of_range="clip")  # [..., T, S, num_heads]
        bias = jnp.moveaxis(heads_last, -1, -3)
        return bias if self.dtype is None else bias.astype(self.dtype)
