"""The input layer and its output layer as pure functions of a config and parameters."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, Ids
from transformer_embed._src.compiled import computed_once
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.positions.phase import as_positions
from transformer_embed._src.positions.schemes import PositionScheme
from transformer_embed._src.tokens.dropout import dropout
from transformer_embed._src.tokens.lookup import Reading, as_table, look_up, lookup
from transformer_embed._src.tokens.output_layer import OutputLayer


def embed(
    config: EmbedderConfig,
    params: Mapping[str, Any],
    ids: ArrayLike,
    is_training: bool,
    rng: Array | None,
    positions: ArrayLike | None,
    token_types: ArrayLike | None,
) -> Float[Array, "... t d"]:
    """The input layer of a config; see `Embedder.apply`. Parameters are by the names of modules."""
    ids = arguments.as_int32("ids", ids)
    if ids.ndim == 0:
        raise arguments.value_error("ids", "shape [..., length]", "shape []")
    total, table_dtype = token_rows(config, params["token_embedding"], ids)
    if config.scheme is not None:
        if positions is None:
            positions = config.scheme.positions(ids, config.pad_id)
        learned = params.get("learned_positional_encoding")
        width, out_of_range = config.table_width, config.out_of_range
        encoding = encode(config.scheme, learned, positions, width, out_of_range)
        total = add_encoding(total, encoding, "the ids")
    types = as_token_types(config, token_types)
    if types is not None:
        arguments.check_broadcasts("token_types", types.shape, ids.shape, with_length=True)
        total = wide_sum(total, type_rows(config, params["token_type_embedding"], types))
    if config.layer_norm_eps is not None:
        total = layer_norm(total, params["layer_norm"], config.layer_norm_eps)
    dtype = table_dtype if config.dtype is None else config.dtype
    x = apply_dropout(total.astype(dtype), config.dropout_rate, is_training, rng)
    if config.embedding_width is None:
        return x
    return linear(x.astype(table_dtype), params["widen"]).astype(dtype)


def as_token_types(config: EmbedderConfig, token_types: ArrayLike | None) -> Any:
    """The token types as int32; a ValueError unless the config has them or there are none."""
    if (token_types is None) != (config.num_token_types is None):
        want = "an array if num_token_types is set, otherwise None"
        raise arguments.value_error("token_types", want, arguments.describe(token_types))
    return None if token_types is None else arguments.as_int32("token_types", token_types)


def token_rows(
    config: EmbedderConfig, leaves: Any, ids: Ids
) -> tuple[Float[Array, "... d"], jnp.dtype]:
    """The scaled rows of ids in float32 or wider, and the dtype of the table."""
    table = as_table("token_embedding/embeddings", leaves["embeddings"])
    style = config.out_of_range, config.lookup_style
    rows = look_up(table, ids, Reading(config.pad_id, *style, config.row_order))
    return arguments.widened(rows) * config.factor, table.dtype


def type_rows(config: EmbedderConfig, leaves: Any, types: Ids) -> Float[Array, "... d"]:
    """The rows of token types."""
    table = as_table("token_type_embedding/embeddings", leaves["embeddings"])
    return look_up(table, types, Reading(None, config.out_of_range, config.lookup_style))


def encode(
    scheme: PositionScheme, leaves: Any, positions: ArrayLike, width: int, out_of_range: str
) -> Float[Array, "... d"]:
    """The encodings of positions in float32 or wider; learned ones are rows of a table."""
    if not scheme.is_learned:
        return scheme.encoding(as_positions("positions", positions), width)
    table = as_table("learned_positional_encoding/embeddings", leaves["embeddings"])
    rows = arguments.as_int32("positions", positions)
    return arguments.widened(lookup(table, rows, out_of_range=out_of_range))


def add_encoding(
    x: Float[Array, "... t d"], encoding: Float[Array, "... d"], tokens: str
) -> Float[Array, "... t d"]:
    """The sum of tokens and the encodings of their positions."""
    arguments.check_broadcasts(
        "positions", encoding.shape[:-1], x.shape[:-1], tokens, with_length=True
    )
    # A row that is used once is computed once anyway.
    if encoding.ndim == 2 and any(size != 1 for size in x.shape[:-2]):
        encoding = computed_once(encoding)
    return wide_sum(x, encoding)


def wide_sum(x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """The sum in the wider dtype to compute in; y may have fewer axes."""
    wide = arguments.compute_dtype(x.dtype, y.dtype)
    # Users may disable jax's rank promotion.
    y = jax.lax.expand_dims(y, range(x.ndim - y.ndim))
    return x.astype(wide) + y.astype(wide)


def layer_norm(x: Float[Array, "... d"], leaves: Any, eps: float) -> Float[Array, "... d"]:
    """Each vector with mean 0 and variance 1, then scaled and shifted."""
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.var(x, -1, keepdims=True)
    scale = broadcast("layer_norm/scale", leaves["scale"], x) * jax.lax.rsqrt(variance + eps)
    return scale * (x - mean) + broadcast("layer_norm/offset", leaves["offset"], x)


def linear(x: Float[Array, "... d"], leaves: Any) -> Float[Array, "... e"]:
    """The product with weights, and an offset."""
    x = x @ arguments.as_floats("widen/w", leaves["w"])
    return x + broadcast("widen/b", leaves["b"], x)


def broadcast(name: str, vector: ArrayLike, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """Returns a vector in the shape and dtype of x, since users may disable jax's promotion."""
    return jnp.broadcast_to(arguments.as_floats(name, vector).astype(x.dtype), x.shape)


def apply_dropout(
    x: Float[Array, "..."], rate: float, is_training: bool, rng: Array | None
) -> Float[Array, "..."]:
    if not is_training or rate == 0:
        return x
    if rng is None:
        want = (
            "a key such as jax.random.key(0), to train with dropout (is_training=False evaluates)"
        )
        raise arguments.value_error("rng", want, "None")
    return dropout(rng, rate, x)


def check_spread(name: str, config: EmbedderConfig) -> None:
    """A ValueError if the rows of a tied output layer are spread."""
    if config.spread and config.output is not None and config.output.tied:
        want = "False for a tied output layer (or output=None, or te.OutputConfig(tied=False))"
        raise arguments.value_error(name, want, True)


def output_layer(config: EmbedderConfig, leaves: Any) -> OutputLayer:
    """The output layer of a config, from the parameters of the module of its token table."""
    output = config.output
    if output is None:
        want = (
            "config.output, an OutputConfig (a loaded model's `no_output` says why it has none; "
            "te.OutputLayer takes other weights)"
        )
        raise arguments.value_error("output", want, "None")
    check_spread("spread", config)
    # An untied model, too, has a table of tokens, which Haiku makes when it is read.
    name, table = "embeddings", leaves["embeddings"]
    if not output.tied:
        name, table = "output_embeddings", leaves["output_embeddings"]
    return OutputLayer(
        as_table(name, table),
        arguments.as_floats("output_bias", leaves["output_bias"]) if output.bias else None,
        softcap=output.softcap,
        scale=output.scale,
        pad_id=config.pad_id,
        vocab_size=None if config.rows == config.vocab_size else config.vocab_size,
    )
