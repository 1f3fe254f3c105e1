"""Makes compiled functions of the input layer that a config describes."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.embed import as_token_types, embed, output_layer
from transformer_embed._src.layers.parameters import TREE, Params, layer_of
from transformer_embed._src.layers.transformer_embedding import TransformerEmbedding
from transformer_embed._src.positions.phase import as_positions
from transformer_embed._src.tokens.output_layer import OutputLayer


@dataclasses.dataclass(frozen=True)
class Embedder:
    """Holds the pure, compiled functions of the input layer that a config describes.

    Use it if you write your model without Haiku, or want to embed ids outside of a model. The
    parameters are a Haiku tree, as the modules make them, so both read the same checkpoints.

    Args:
        config: The description of the layer.

    Raises:
        TypeError: config is not an EmbedderConfig.

    Example:
        >>> import jax
        >>> import transformer_embed as te
        >>> embedder = te.Embedder(te.EmbedderConfig(vocab_size=256, d_model=64, pad_id=0))
        >>> params = embedder.init(jax.random.key(0))
        >>> embedder.apply(params, None, [[5, 6, 0]], is_training=False).shape
        (1, 3, 64)
        >>> x = embedder.apply(params, jax.random.key(1), [[5, 6, 0]], is_training=True)
        >>> te.linear_cross_entropy(x, embedder.output(params), [[6, 7, 0]]).shape
        ()

    Source:
        The design of optax.GradientTransformation, https://github.com/google-deepmind/optax
    """

    config: EmbedderConfig

    def __post_init__(self) -> None:
        arguments.instance("config", self.config, EmbedderConfig, "an EmbedderConfig")

    def init(self, rng: Array) -> Params:
        """Returns initial parameters, a Haiku parameter tree. Equal keys give equal parameters."""
        return _init(self.config, arguments.as_key(rng))

    def apply(
        self,
        params: Params,
        rng: Array | None,
        ids: ArrayLike,
        *,
        is_training: bool,
        positions: ArrayLike | None = None,
        token_types: ArrayLike | None = None,
    ) -> Float[Array, "... t d"]:
        """Embeds ids [..., length] as vectors [..., length, d_model].

        You can pass lists, numpy arrays and jax arrays. `apply` works inside `jax.jit`, `jax.grad`,
        `jax.export` (with symbolic shapes too; learned positions bound the length) and `jax.vmap`.
        For `jax.vmap`, bind keyword arguments with `functools.partial`, because vmap would map
        them. It is traced once for each shape and value of is_training. A new offset in
        `positions`, or a new integer dtype, does not retrace (except for uint32 positions outside
        int32).

        Args:
            params: The parameters, as `init` makes them, or the parameters of a whole model that
                holds one such layer. Parameters with other names must be renamed: see the page
                "Other parameter names".
            rng: A key, for training with dropout. If None, dropout cannot be applied, so pass None
                to evaluate.
            ids: The ids, [..., length], of any integer dtype.
            is_training: A Python bool. True applies dropout.
            positions: The positions of the ids, [length], or more axes that broadcast to the ids.
                They are integers, or float32 for sinusoids. Pass positions of your own for packed
                rows and for steps of decoding. If None, the scheme counts them along each batch
                row, without padding if the config has a `pad_id`. If the config's scheme is None,
                positions are accepted and not read.
            token_types: The token types, integers, [length], or more axes that broadcast to the
                ids. They are required if num_token_types is set, and otherwise must be None.

        Raises:
            TypeError: is_training is traced or not a bool; ids are not integers; or a parameter is
                a masked array.
            ValueError: params do not hold one layer of this config; dropout would be applied and
                rng is None; positions do not end in the length of the ids, or lie outside int32
                (host values); or token types are missing, or given although the config has none.
        """
        arguments.instance("params", params, Mapping, TREE)
        params = arguments.native_leaves("params", params)
        is_training = arguments.flag("is_training", is_training)
        # A key that is not needed is dropped, so that an evaluation has the same compiled program
        # with a key as with None.
        needs_key = is_training and self.config.dropout_rate > 0
        rng = arguments.as_key(rng) if needs_key and rng is not None else None
        # Ids are converted before jit, so that all integer dtypes share one trace.
        ids = arguments.as_int32("ids", ids)
        if positions is not None:
            positions = as_positions("positions", positions)
        token_types = as_token_types(self.config, token_types)
        return _apply(self.config, params, ids, is_training, rng, positions, token_types)

    def output(self, params: Params) -> OutputLayer:
        """Returns the output layer that `config.output` describes, for `linear_logits` and losses.

        Args:
            params: The parameters, as `init` makes them, or the parameters of a whole model that
                holds one such layer.

        Raises:
            ValueError: the config has no output layer; or params do not hold one layer of it.
        """
        leaves = layer_of("params", self.config, params)["token_embedding"]
        return output_layer(self.config, leaves)


# `_init` is compiled, because otherwise each operation of each initializer would be a program.
@functools.partial(jax.jit, static_argnums=0)
def _init(config: EmbedderConfig, rng: Array) -> Params:
    """Makes the parameters of an input layer and an output layer."""
    # These ids are only an example, because no parameter depends on the ids.
    ids = jnp.zeros([1, 1], jnp.int32)
    token_types = None if config.num_token_types is None else ids

    def call_layer():
        layer = TransformerEmbedding(config)
        layer(ids, is_training=False, token_types=token_types)
        if config.output is not None:
            # `output` reads the parameters of the output layer, so Haiku makes these parameters.
            layer.output()

    return hk.transform(call_layer).init(rng)


# jax compares a static config by value, so equal configs share a program.
@functools.partial(jax.jit, static_argnums=(0, 3))
def _apply(config: EmbedderConfig, params: Params, *inputs: Any) -> Array:
    """Computes `embed` with the parameters of the layer, found in a whole model's tree.

    `inputs` are ids, is_training, rng, positions and token types.
    """
    layer_params = layer_of("params", config, params)
    return embed(config, layer_params, *inputs)
