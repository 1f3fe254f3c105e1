"""EmbedderConfig -> Embedder: the input layer as compiled functions."""

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
    """The pure, compiled functions of the input layer that a config describes.

    Args:
        config: the description of the layer.

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
        """The parameters, a Haiku parameter tree, drawn with rng."""
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
        """Embeds ids [..., length] as [..., length, d_model].

        It takes lists, numpy arrays and jax arrays, and works inside `jax.jit`, `jax.vmap` (bind
        keyword arguments with `functools.partial`: vmap would map them), `jax.grad` and
        `jax.export` (symbolic shapes too; learned positions bound the length). It is traced once
        for each shape and value of is_training: a new offset in `positions` or a new integer dtype
        does not retrace (except for uint32 positions outside int32).

        Args:
            params: as `init` makes them, or those of a whole model that holds one such layer.
            rng: a key, for training with dropout. None: to evaluate.
            ids: [..., length], any integer dtype.
            is_training: a Python bool.
            positions: [length], or more axes that broadcast to the ids'; integers, or float32 if
                they are sinusoidal; accepted, and not read, if the config's scheme is None. None:
                counted by the scheme along the row, without padding if the config has a `pad_id`;
                packed rows and steps of decoding need positions of their own.
            token_types: integers, [length], or more axes that broadcast to the ids'; required if
                num_token_types is set; otherwise must be None.

        Raises:
            TypeError: is_training is traced or not a bool; ids are not integers.
            ValueError: params do not hold one layer of this config; training with dropout and
                rng=None; positions that do not end in the ids' length, or that lie outside int32
                (host values); token types missing, or given although the config has none.
        """
        arguments.instance("params", params, Mapping, TREE)
        params = arguments.native_leaves("params", params)
        is_training = arguments.flag("is_training", is_training)
        # Evaluation is one program, with a key or without.
        is_random = is_training and self.config.dropout_rate > 0 and rng is not None
        rng = arguments.as_key(rng) if is_random else None
        # Before jit: host values are range-checked, and all integer dtypes share one trace.
        ids = arguments.as_int32("ids", ids)
        if positions is not None:
            positions = as_positions("positions", positions)
        token_types = as_token_types(self.config, token_types)
        return _apply(self.config, params, ids, is_training, rng, positions, token_types)

    def output(self, params: Params) -> OutputLayer:
        """The output layer that `config.output` describes, for `linear_logits` and the losses.

        Args:
            params: as for `apply`.

        Raises:
            ValueError: the config has no output layer; params do not hold one layer of it.
        """
        leaves = layer_of("params", self.config, params)["token_embedding"]
        return output_layer(self.config, leaves)


# Compiled, because it runs each small program of a draw on its own otherwise.
@functools.partial(jax.jit, static_argnums=0)
def _init(config: EmbedderConfig, rng: Array) -> Params:
    # Any ids do, since no parameter's shape depends on them.
    ids = jnp.zeros([1, 1], jnp.int32)
    token_types = None if config.num_token_types is None else ids

    def make():
        layer = TransformerEmbedding(config)
        layer(ids, is_training=False, token_types=token_types)
        if config.output is not None:
            # Its parameters are read, and so made.
            layer.output()

    return hk.transform(make).init(rng)


# jax compares a static config by value: equal ones share a program.
@functools.partial(jax.jit, static_argnums=(0, 3))
def _apply(config: EmbedderConfig, params: Params, *inputs: Any) -> Array:
    return embed(config, layer_of("params", config, params), *inputs)
