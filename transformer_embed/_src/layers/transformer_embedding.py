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

    Use it as the first layer of your model. The sum and the norm are computed in float32 and
    rounded once to `config.dtype`, then dropout is applied. If the tables are narrower than
    d_model, a linear layer widens the result at the end.

    To use a loaded checkpoint in your own model, start from its parameters, whatever the path of
    the module:

        found = te.pretrained.load_embedder("checkpoint/")
        # In the function that hk.transform takes:
        embed = te.TransformerEmbedding(found.config, initial_params=found.params)

    You can pass the parameters of the whole model to `Embedder`, `save_embedder`,
    `pretrained.resize` and `find_parameters`, which find the layer in them.

    Args:
        config: The description of the layer. See `EmbedderConfig`.
        initial_params: The initial values of the module's parameters. This is a Haiku parameter
            tree with one layer of this config, at any path: the result of `Embedder.init`, the
            parameters of a checkpoint, or the parameters of a whole model. Call `init` outside
            `jax.jit`, because inside it, the values would become constants of the program. If None,
            the initial values are random, as the config says.
        name: The name of the module.

    Raises:
        TypeError: config is not an EmbedderConfig; or initial_params is not a parameter tree.
        ValueError: initial_params do not hold exactly one layer of this config, with its names of
            modules and parameters, and its shapes. The page "Other parameter names" shows how to
            rename parameters.

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
        initial_by_module = {}
        if initial_params is not None:
            initial_by_module = layer_of("initial_params", config, initial_params)
        self._modules = {}
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
            ids: The ids, [..., length], of any integer dtype.
            is_training: A Python bool. True applies dropout, which needs a key unless dropout_rate
                is 0.
            positions: The positions of the ids, [length], or more axes that broadcast to the ids.
                They are integers, or float32 for sinusoids. Pass positions of your own for packed
                rows and for steps of decoding. If None, the scheme counts them along each batch
                row, without padding if the config has a `pad_id`. If the config's scheme is None,
                positions are accepted and not read.
            token_types: The token types, integers, [length], or more axes that broadcast to the
                ids. They are required if num_token_types is set, and otherwise must be None.

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
        """Returns the output layer of the config, for `linear_logits` and the losses.

        Their argument x is as wide as the token table.
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
        self._leaves = ModuleParameters(parameters, initial)

    def __getitem__(self, name: str) -> Any:
        # Haiku gives parameters the path of a module only inside `__call__` and the methods without
        # underscores around the name.
        return self(name)

    def __call__(self, name: str) -> Any:
        return self._leaves[name]
