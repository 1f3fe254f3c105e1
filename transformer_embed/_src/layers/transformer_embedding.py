"""The whole input layer as a module: tokens, positions, token types, norm and dropout."""

from typing import Any

import haiku as hk
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.embed import embed, output_layer
from transformer_embed._src.layers.module_parameters import (
    Leaves,
    Parameters,
    dropout_key,
    parameters_of,
)
from transformer_embed._src.layers.parameters import Params, layer_of
from transformer_embed._src.tokens.output_layer import OutputLayer


class TransformerEmbedding(hk.Module):
    """The input layer of a Transformer: tokens, positions, token types, layer norm and dropout.

    The sum and the norm are computed in float32 and rounded once to `config.dtype`, then dropout is
    applied. If the tables are narrower than d_model, a linear layer widens the result at the end.

    To use a loaded checkpoint in your own model, start from its parameters, whatever the path of
    the module:

        found = te.pretrained.load_embedder("checkpoint/")
        # In the function that hk.transform takes:
        embed = te.TransformerEmbedding(found.config, initial_params=found.params)

    `Embedder`, `save_embedder` and `pretrained.resize` take the parameters of the whole model and
    find the layer in them.

    Args:
        config: the description of the layer; see `EmbedderConfig`.
        initial_params: initial values of the module's parameters: a Haiku parameter tree with one
            layer of this config, at any path, such as the result of `Embedder.init`, a checkpoint's
            parameters or those of a whole model. Call `init` outside `jax.jit`; inside it,
            they would become constants of the program. None: drawn at random.
        name: of the module.

    Raises:
        TypeError: config is not an EmbedderConfig; initial_params is not a parameter tree.
        ValueError: initial_params do not hold exactly one layer, with the names of modules and
            parameters, and the shapes, of this config.

    Example:
        >>> import haiku as hk, jax
        >>> import transformer_embed as te
        >>> config = te.EmbedderConfig(vocab_size=100, d_model=64, pad_id=0)
        >>> layer = lambda ids: te.TransformerEmbedding(config)(ids, is_training=False)
        >>> embed = hk.transform(layer)
        >>> params = embed.init(jax.random.key(0), [[1, 2, 0]])
        >>> embed.apply(params, None, [[1, 2, 0]]).shape
        (1, 3, 64)

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), sections 3.4, 3.5 and 5.4,
        https://arxiv.org/abs/1706.03762. Token types and norm: Devlin et al., "BERT" (2019),
        section 3, https://arxiv.org/abs/1810.04805. The narrower tables: Lan et al., "ALBERT"
        (2020), section 3.1, https://arxiv.org/abs/1909.11942
    """

    def __init__(
        self,
        config: EmbedderConfig,
        *,
        initial_params: Params | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        want = "an EmbedderConfig, such as te.EmbedderConfig(vocab_size=256, d_model=64)"
        self.config = arguments.instance("config", config, EmbedderConfig, want)
        initial = {}
        if initial_params is not None:
            initial = layer_of("initial_params", config, initial_params)
        self._modules = {
            module: _Module(parameters, initial.get(module), module)
            for module, parameters in parameters_of(config).items()
        }

    def __call__(
        self,
        ids: ArrayLike,
        *,
        is_training: bool,
        positions: ArrayLike | None = None,
        token_types: ArrayLike | None = None,
    ) -> Float[Array, "... t d"]:
        """Embeds ids.

        Args:
            ids: [..., length], any integer dtype.
            is_training: a Python bool. True needs a key unless dropout_rate is 0; False uses none.
            positions: [length], or more axes that broadcast to the ids'; integers, or float32 if
                they are sinusoidal; accepted, and not read, if the config's scheme is None. None:
                counted by the scheme along the row, without padding if the config has a `pad_id`;
                packed rows and steps of decoding need positions of their own.
            token_types: integers, [length], or more axes that broadcast to the ids'; required if
                num_token_types is set; otherwise must be None.

        Returns:
            [..., length, d_model] of `config.dtype`.
        """
        return embed(
            self.config,
            self._modules,
            ids,
            is_training,
            dropout_key(is_training, self.config.dropout_rate),
            positions,
            token_types,
        )

    def output(self) -> OutputLayer:
        """The output layer of the config, for `linear_logits` and the losses.

        The x that they take is as wide as the token table.
        """
        return output_layer(self.config, self._modules["token_embedding"])


class _Module(hk.Module):
    """A module for the names of parameters alone."""

    def __init__(self, parameters: Parameters, initial: Any, name: str):
        super().__init__(name=name)
        self._leaves = Leaves(parameters, initial)

    def __getitem__(self, name: str) -> Any:
        return self(name)

    def __call__(self, name: str) -> Any:
        return self._leaves[name]
