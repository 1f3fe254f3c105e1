"""The whole input layer as a module: tokens, positions, token types, norm and dropout."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.parameters import (
    Params,
    as_params,
    module_name,
    parameters_from,
    table_path,
)
from transformer_embed._src.layers.positional_encoding import (
    PositionalEncoding,
    apply_dropout,
    wide_sum,
)
from transformer_embed._src.layers.token_embedding import TokenEmbedding
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
        self._initial_params = None
        if initial_params is not None:
            self._initial_params = modules_of("initial_params", config, initial_params)
        embedding = functools.partial(
            TokenEmbedding,
            d_model=config.table_width,
            out_of_range=config.out_of_range,
            lookup_style=config.lookup_style,
            param_dtype=config.param_dtype,
        )
        self.tokens = embedding(
            config.vocab_size,
            scale=config.scale,
            pad_id=config.pad_id,
            output=config.output,
            init_stddev=config.init_stddev,
            row_multiple=config.row_multiple,
            spread=config.spread,
            # Only this config knows of the norm.
            w_init=hk.initializers.RandomNormal(config.stddevs.tokens),
        )
        added = hk.initializers.RandomNormal(config.stddevs.added)
        self.encoding = self.token_types = self.norm = self.widen = None
        if config.scheme is not None:
            # Only its encodings are used: dropout comes after the norm.
            self.encoding = PositionalEncoding(
                config.scheme,
                config.table_width,
                out_of_range=config.out_of_range,
                w_init=added if config.scheme.is_learned else None,
                param_dtype=config.param_dtype,
            )
        if config.num_token_types is not None:
            self.token_types = embedding(
                config.num_token_types,
                scale=1.0,
                w_init=added,
                name="token_type_embedding",
            )
        if config.layer_norm_eps is not None:
            self.norm = hk.LayerNorm(-1, True, True, eps=config.layer_norm_eps)
        if config.embedding_width is not None:
            self.widen = hk.Linear(config.d_model, name="widen")

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
        ids = arguments.as_int32("ids", ids)
        if ids.ndim == 0:
            raise arguments.value_error("ids", "shape [..., length]", "shape []")
        token_types = as_token_types(self.config, token_types)
        if token_types is not None:
            arguments.check_ends_in_length("token_types", token_types.shape, ids.shape)
        with parameters_from(self._initial_params):
            total, table_dtype = self.tokens._scaled_rows(ids)
            if self.encoding is not None:
                if positions is None:
                    positions = self.encoding.scheme.positions(ids, self.config.pad_id)
                encoding = self.encoding._of_tokens(positions, ids.shape, "the ids")
                total = wide_sum(total, encoding)
            if self.token_types is not None:
                rows, _ = self.token_types._scaled_rows(token_types)
                total = wide_sum(total, rows)
            if self.norm is not None:
                total = self.norm(total)
            dtype = table_dtype if self.config.dtype is None else self.config.dtype
            x = apply_dropout(total.astype(dtype), self.config.dropout_rate, is_training)
            # hk.Linear makes its parameters in the dtype of its input.
            return x if self.widen is None else self.widen(x.astype(table_dtype)).astype(dtype)

    def output(self) -> OutputLayer:
        """The output layer of the config, for `linear_logits` and the losses.

        The x that they take is as wide as the token table.
        """
        with parameters_from(self._initial_params):
            return self.tokens.output()


def as_token_types(config: EmbedderConfig, token_types: ArrayLike | None) -> Array | None:
    """The token types as int32; a ValueError unless the config has them or there are none."""
    if (token_types is None) != (config.num_token_types is None):
        want = "an array if num_token_types is set, otherwise None"
        raise arguments.value_error("token_types", want, arguments.describe(token_types))
    return None if token_types is None else arguments.as_int32("token_types", token_types)


# Compiled, so that its shapes below need no trace of their own.
@functools.partial(jax.jit, static_argnums=0)
def init_params(config: EmbedderConfig, rng: Array) -> Params:
    """The parameters of a config's layer, drawn with rng."""
    # Any ids do, since no parameter's shape depends on them.
    ids = jnp.zeros([1, 1], jnp.int32)
    token_types = None if config.num_token_types is None else ids

    def embed():
        layer = TransformerEmbedding(config)
        layer(ids, is_training=False, token_types=token_types)
        if config.output is not None:
            # Its parameters are read, and so made.
            layer.output()

    return hk.transform(embed).init(rng)


# Kept, because each eager `logits` and `cross_entropy` asks for them, and `init` is traced.
@functools.lru_cache(maxsize=64)
def _shapes_of(config: EmbedderConfig) -> set[str]:
    """The parameters of a config's layer, in words."""
    return _shapes(jax.eval_shape(functools.partial(init_params, config), jax.random.key(0)))


def modules_of(name: str, config: EmbedderConfig, params: Params) -> Params:
    """The parameters of each module of a config's layer by its name; see `layer_paths`."""
    params = as_params(name, params)
    return {module: params[path] for module, path in layer_paths(name, config, params).items()}


def layer_paths(name: str, config: EmbedderConfig, params: Params) -> dict[str, str]:
    """The path of each module of a config's layer by its name, in a tree that may hold others too.

    An error unless the tree has one such layer, with parameters of these names and shapes.
    """
    root = table_path(name, params, "token_embedding").removesuffix("token_embedding")
    # A model may have other modules of these names, but not beside the token table.
    paths = {module_name(path): path for path in params if path == root + module_name(path)}
    ours = _shapes_of(config)
    theirs = _shapes({path: params[path] for path in paths.values()})
    arguments.check_named(name, ours, theirs)
    return paths


def _shapes(params: Params) -> set[str]:
    """Each parameter in words: its module, its name and its shape."""
    return {
        f"{module_name(path)}/{name} {list(leaf.shape)}"
        for path, leaves in params.items()
        for name, leaf in leaves.items()
    }
