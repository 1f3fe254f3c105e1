"""Embeds ids by a module that is the whole input layer."""

from typing import Any

import haiku as hk
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.embed import embed, output_layer
from transformer_embed._src.layers.module_parameters import (
    ModuleParameters,
    Parameters,
    dropout_key,
    parameters_of,
)
from transformer_embed._src.layers.parameters import Params, layer_of
from transformer_embed._src.tokens.output_layer import OutputLayer


class TransformerEmbedding(hk.Module):
    """Computes the input layer of a Transformer: tokens, positions, token types, norm and dropout.

    Use it as the first layer of your model. It adds tokens, positions and token types and applies
    the layer norm, all in float32, and rounds the result once to `config.dtype`. Then it applies
    dropout. If the config has an `embedding_width`, a linear layer changes the width to `d_model`
    at the end.

    To use a published checkpoint in your own model, load the checkpoint and start from the loaded
    parameters. The module may have any name and be inside other modules:

        found = te.pretrained.load_embedder("checkpoint/")
        # In the function that hk.transform takes:
        embed = te.TransformerEmbedding(found.config, initial_params=found.params)

    You can pass the parameters of the whole model to `Embedder`, `save_embedder`,
    `pretrained.resize` and `find_parameters`. These functions find the parameters of this layer in
    the tree of the model.

    Args:
        config: The description of the layer. See `EmbedderConfig`.
        initial_params: The initial values of the module's parameters, as a Haiku parameter tree.
            The tree contains one layer of this config, at any path. You can pass the result of
            `Embedder.init`, the parameters of a checkpoint, or the parameters of a whole model. If
            you set it, call `init` outside `jax.jit`, because inside `jax.jit` the values would
            become constants of the compiled program. If None, the initial values are random, with
            the standard deviations that the config says.
        name: The name of the module.

    Raises:
        TypeError: `config` is not an `EmbedderConfig`, or `initial_params` is not a Haiku parameter
            tree.
        ValueError: `initial_params` must contain exactly one layer of this config, but contain
            none, or more than one. The modules and parameters of the layer must have the names that
            `Embedder.init` gives them, and the shapes that the config says. The page "Other
            parameter names" shows how to rename parameters.

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
        https://arxiv.org/abs/1706.03762. Token types and the layer norm are from Devlin et al.,
        "BERT" (2019), section 3, https://arxiv.org/abs/1810.04805. Tables that are narrower than
        the model are from Lan et al., "ALBERT" (2020), section 3.1,
        https://arxiv.org/abs/1909.11942
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
        # The initial parameters of each module, by the name of the module.
        initial_by_module = {}
        if initial_params is not None:
            initial_by_module = layer_of("initial_params", config, initial_params)
        self._modules = {}
        # `parameters_of` describes the parameters of each module of the layer.
        for module_name, parameters in parameters_of(config).items():
            initial = initial_by_module.get(module_name)
            self._modules[module_name] = _ParameterModule(parameters, initial, module_name)

    def __call__(
        self,
        ids: ArrayLike,
        *,
        is_training: bool,
        positions: ArrayLike | None = None,
        token_types: ArrayLike | None = None,
    ) -> Float[Array, "... t d"]:
        """Embeds ids [..., length] as vectors [..., length, d_model].

        Args:
            ids: The ids, of any integer dtype. Shape [..., length].
            is_training: A Python bool. If True, dropout is applied. With a `dropout_rate` above 0,
                the program then needs a random key (`apply(params, key, ...)` of `hk.transform`).
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

        Returns:
            The vectors, of dtype `config.dtype`. Shape [..., length, d_model].
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
        """Returns the output layer of the config, for `linear_logits` and the losses.

        Pass these functions an `x` as wide as the token table: `embedding_width` channels if the
        config has one, and otherwise `d_model`.
        """
        return output_layer(self.config, self._modules["token_embedding"])


class _ParameterModule(hk.Module):
    """Reads parameters as `module[name]`, and gives them the path of this module in the tree.

    Args:
        parameters, initial: The arguments of `ModuleParameters`.
        name: The name of the module.
    """

    def __init__(self, parameters: Parameters, initial: Any, name: str):
        super().__init__(name=name)
        self._module_parameters = ModuleParameters(parameters, initial)

    def __getitem__(self, name: str) -> Any:
        # Haiku gives parameters the path of a module only inside `__call__` and the methods without
        # underscores around the name.
        return self(name)

    def __call__(self, name: str) -> Any:
        return self._module_parameters[name]
