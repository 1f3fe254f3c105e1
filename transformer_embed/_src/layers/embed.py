"""Computes the input layer and makes the output layer, as pure functions of config and parameters.

In this file, `params` is {name of a module: leaves}, and `leaves` is {name of a parameter: array}.

Shapes are written with these letters:

    t  tokens
    d  channels of the tables
    e  channels of the result, which differ from d if the config has an `embedding_width`
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments, conversions
from transformer_embed._src.array_types import ArrayLike, Ids
from transformer_embed._src.compiled import computed_once
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.positions.phase import as_positions
from transformer_embed._src.positions.schemes import PositionScheme
from transformer_embed._src.tokens.dropout import dropout
from transformer_embed._src.tokens.lookup import LookupOptions, as_table, lookup, read_table
from transformer_embed._src.tokens.output_layer import OutputLayer


def embed(
    config: EmbedderConfig,
    params: Mapping[str, Any],
    ids: ArrayLike,
    is_training: bool,
    rng: Array | None,
    positions: ArrayLike | None,
    token_types: ArrayLike | None,
) -> Float[Array, "... t e"]:
    """Computes the input layer of a config, for the arguments of `Embedder.apply`.

    The sum of tokens, positions and token types is computed in float32 or wider, and is rounded
    once to the dtype of the result.
    """
    ids = arguments.as_int32("ids", ids)
    if ids.ndim == 0:
        raise arguments.value_error("ids", "shape [..., length]", "shape []")
    tokens = token_rows(config, params["token_embedding"], ids)
    # The table rows of the ids times the factor of the config, in float32 or wider. Positions and
    # token types are added below, in float32 or wider, too.
    total = tokens.scaled
    # The scheme says how positions are encoded, such as `Learned(512)`.
    if config.scheme is not None:
        if positions is None:
            positions = config.scheme.positions(ids, config.pad_id)
        learned_leaves = params.get("learned_positional_encoding")
        encoding = encode_positions(
            config.scheme, learned_leaves, positions, config.table_width, config.out_of_range
        )
        total = add_encoding(total, encoding, "the ids")
    type_ids = as_token_types(config, token_types)
    if type_ids is not None:
        arguments.check_broadcasts("token_types", type_ids.shape, ids.shape, with_length=True)
        type_vectors = type_rows(config, params["token_type_embedding"], type_ids)
        total = wide_sum(total, type_vectors)
    if config.layer_norm_eps is not None:
        total = layer_norm(total, params["layer_norm"], config.layer_norm_eps)
    dtype = tokens.table_dtype if config.dtype is None else config.dtype
    x = apply_dropout(total.astype(dtype), config.dropout_rate, is_training, rng)
    if config.embedding_width is None:
        return x
    # A linear layer gives x more channels, [..., t, e].
    x_with_all_channels = linear(x.astype(tokens.table_dtype), params["widen"])
    return x_with_all_channels.astype(dtype)


def as_token_types(config: EmbedderConfig, token_types: ArrayLike | None) -> Any:
    """Converts token types to int32.

    Raises a ValueError if the config needs token types and gets None, or the other way round.
    """
    are_given = token_types is not None
    are_needed = config.num_token_types is not None
    if are_given != are_needed:
        want = "None, because num_token_types is None"
        if are_needed:
            want = "an array, because num_token_types is set (zeros, if no token has another type)"
        raise arguments.value_error("token_types", want, arguments.describe(token_types))
    return arguments.as_int32("token_types", token_types) if are_given else None


class TokenRows(NamedTuple):
    """Holds the scaled table rows of ids, in float32 or wider, and the dtype of the table."""

    scaled: Float[Array, "... d"]
    table_dtype: jnp.dtype


def token_rows(config: EmbedderConfig, leaves: Any, ids: Ids) -> TokenRows:
    """Looks up the rows of ids, and multiplies them by the factor of the config."""
    # The table, checked. Inside a loss of `te.rows`, it may be an object with some of the rows.
    table = as_table("token_embedding/embeddings", leaves["embeddings"])
    options = LookupOptions(
        pad_id=config.pad_id,
        out_of_range=config.out_of_range,
        lookup_style=config.lookup_style,
        order=config.row_order,
    )
    rows = read_table(table, ids, options)
    # The product is computed in float32 or wider.
    return TokenRows(scaled=conversions.widened(rows) * config.factor, table_dtype=table.dtype)


def type_rows(config: EmbedderConfig, leaves: Any, type_ids: Ids) -> Float[Array, "... d"]:
    """Looks up the rows of token types. No type is padding, and the rows are not scaled."""
    table = as_table("token_type_embedding/embeddings", leaves["embeddings"])
    options = LookupOptions(
        pad_id=None, out_of_range=config.out_of_range, lookup_style=config.lookup_style
    )
    return read_table(table, type_ids, options)


def encode_positions(
    scheme: PositionScheme, leaves: Any, positions: ArrayLike, width: int, out_of_range: str
) -> Float[Array, "... d"]:
    """Encodes positions [...] as vectors [..., width], in float32 or wider.

    If the scheme is learned, the vectors are rows of the table in `leaves`.
    """
    if not scheme.is_learned:
        return scheme.encoding(as_positions("positions", positions), width)
    # A learned scheme has a table with a row for each position.
    table = as_table("learned_positional_encoding/embeddings", leaves["embeddings"])
    indices = arguments.as_int32("positions", positions)
    return conversions.widened(lookup(table, indices, out_of_range=out_of_range))


def add_encoding(
    x: Float[Array, "... t d"], encoding: Float[Array, "... d"], tokens_name: str
) -> Float[Array, "... t d"]:
    """Adds the encodings of positions to x.

    `tokens_name` says in an error what the positions must fit, such as "the ids".
    """
    position_shape = encoding.shape[:-1]
    token_shape = x.shape[:-1]
    arguments.check_broadcasts(
        "positions", position_shape, token_shape, tokens_name, with_length=True
    )
    batch_shape = token_shape[:-1]
    has_several_batch_rows = any(size != 1 for size in batch_shape)
    if encoding.ndim == 2 and has_several_batch_rows:
        # Without this call, a CPU would compute the encoding again for each batch row.
        encoding = computed_once(encoding)
    return wide_sum(x, encoding)


def wide_sum(x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Adds two arrays in float32 or wider. y may have fewer axes, and broadcasts to x."""
    wide_dtype = conversions.compute_dtype(x.dtype, y.dtype)
    # y gets the rank of x, because users may disable jax's rank promotion.
    y = jax.lax.expand_dims(y, range(x.ndim - y.ndim))
    return x.astype(wide_dtype) + y.astype(wide_dtype)


def layer_norm(x: Float[Array, "... d"], leaves: Any, eps: float) -> Float[Array, "... d"]:
    """Normalises each vector to mean 0 and variance 1, then scales and shifts it.

    `leaves` are the parameters `scale` and `offset`, a number for each channel.
    """
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.var(x, -1, keepdims=True)
    scale = broadcast_parameter("layer_norm/scale", leaves["scale"], x)
    inverse_stddev = jax.lax.rsqrt(variance + eps)
    scaled = scale * inverse_stddev * (x - mean)
    offset = broadcast_parameter("layer_norm/offset", leaves["offset"], x)
    return scaled + offset


def linear(x: Float[Array, "... d"], leaves: Any) -> Float[Array, "... e"]:
    """Multiplies x by the weights `w`, and adds the offset `b`."""
    weights = arguments.as_floats("widen/w", leaves["w"])
    products = x @ weights
    return products + broadcast_parameter("widen/b", leaves["b"], products)


def broadcast_parameter(
    name: str, vector: ArrayLike, x: Float[Array, "... d"]
) -> Float[Array, "... d"]:
    """Broadcasts a parameter [d] to the shape of x, in the dtype of x.

    jax would do the same by itself, unless the user disables promotion of ranks and dtypes.
    """
    parameter = arguments.as_floats(name, vector).astype(x.dtype)
    return jnp.broadcast_to(parameter, x.shape)


def apply_dropout(
    x: Float[Array, "..."], rate: float, is_training: bool, rng: Array | None
) -> Float[Array, "..."]:
    """Applies dropout to x in training, unless the rate is 0.

    Raises a ValueError if dropout needs a key and there is none.
    """
    if not is_training or rate == 0:
        return x
    if rng is None:
        want = (
            "a key such as jax.random.key(0), to train with dropout (is_training=False evaluates)"
        )
        raise arguments.value_error("rng", want, "None")
    return dropout(rng, rate, x)


def check_spread(name: str, config: EmbedderConfig) -> None:
    """Raises a ValueError if a config has both `spread` and a tied output layer."""
    if config.spread and config.output is not None and config.output.tied:
        want = "False for a tied output layer (or output=None, or te.OutputConfig(tied=False))"
        raise arguments.value_error(name, want, True)


def output_layer(config: EmbedderConfig, leaves: Any) -> OutputLayer:
    """Makes the output layer of a config.

    `leaves` are the parameters of the module `token_embedding`: the token table, and what an output
    layer adds to it.
    """
    output = config.output
    if output is None:
        want = (
            "config.output, an OutputConfig (a loaded model's `no_output` says why it has none; "
            "te.OutputLayer takes other weights)"
        )
        raise arguments.value_error("output", want, "None")
    # `spread` changes the order of the table rows, which a tied output layer does not allow.
    check_spread("spread", config)
    # The token table is read in an untied model too, because Haiku makes a parameter when it is
    # read.
    table_name = "embeddings"
    table = leaves["embeddings"]
    if not output.tied:
        table_name = "output_embeddings"
        table = leaves["output_embeddings"]
    bias = None
    if output.bias:
        bias = arguments.as_floats("output_bias", leaves["output_bias"])
    # `row_multiple` may give the table more rows than there are ids. These must not be predicted.
    has_padding_rows = config.rows != config.vocab_size
    return OutputLayer(
        as_table(table_name, table),
        bias,
        softcap=output.softcap,
        scale=output.scale,
        pad_id=config.pad_id,
        vocab_size=config.vocab_size if has_padding_rows else None,
    )
