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
    parameters are the same Haiku tree that `TransformerEmbedding` makes, so checkpoints of the
    module fit an `Embedder`, and the other way round.

    Args:
        config: The description of the layer.

    Raises:
        TypeError: `config` is not an `EmbedderConfig`.

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
        A record of pure functions is the design of `optax.GradientTransformation`,
        https://github.com/google-deepmind/optax
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
        `jax.vmap` and `jax.export`. For `jax.vmap`, bind keyword arguments with
        `functools.partial`, because vmap would map them. For `jax.export`, shapes may be symbolic;
        if positions are learned, the length is then bounded by the table of positions. `apply` is
        traced once for each combination of shapes and `is_training`. If only the numbers in
        `positions` change, as from one step of decoding to the next, `apply` is not traced again. A
        different integer dtype of `ids` or `positions` causes no new trace either, because both are
        converted to int32 first. (Two kinds of positions keep their dtype: jax arrays of uint32,
        int64 or uint64, and numpy arrays of uint32 with a number of 2**31 or more.)

        Args:
            params: The parameters, as `init` makes them, or the parameters of a whole model that
                contains one layer of this config. If your parameters have other names, rename them
                as the page "Other parameter names" shows.
            rng: A random key, which is needed to train with dropout. Pass None to evaluate.
            ids: The ids, of any integer dtype. Shape [..., length].
            is_training: A Python bool. True applies dropout.
            positions: The positions of the ids: integers, or float32 for sinusoids. Shape [length],
                or any shape [..., length] that broadcasts to the shape of the ids. Pass positions
                if a batch row holds several documents, and for the steps of decoding. If None, the
                tokens of each batch row are counted from `config.scheme.start` on. If the config
                has a `pad_id`, padding is not counted. If `config.scheme` is None, the layer
                ignores this argument.
            token_types: The token types of the ids: integers, such as 0 for segment A of BERT and 1
                for segment B. Shape [length], or any shape [..., length] that broadcasts to the
                shape of the ids. Required if the config sets `num_token_types`. Otherwise, pass
                None.

        Raises:
            TypeError: `is_training` is not a Python bool, `ids` are not integers, or a parameter is
                a masked array.
            ValueError: `params` must contain exactly one layer of this config, but contain none, or
                more than one. `rng` is None, but dropout is to be applied. The last axis of
                `positions` is not the length of the ids, or positions in a list or a numpy array
                are outside int32. The config has `num_token_types` but `token_types` is None, or
                `token_types` are passed but the config has none.
        """
        # `TREE` says in the error what the tree must be like.
        arguments.instance("params", params, Mapping, TREE)
        # The same tree, with numpy arrays in the byte order of this machine.
        params = arguments.native_leaves("params", params)
        is_training = arguments.flag("is_training", is_training)
        # A key that is not needed is dropped, so that an evaluation has the same compiled program
        # with a key as with None.
        needs_key = is_training and self.config.dropout_rate > 0
        if not needs_key:
            rng = None
        if rng is not None:
            rng = arguments.as_key(rng)
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
            ValueError: `config.output` is None. `params` must contain exactly one layer of this
                config, but contain none, or more than one.
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
