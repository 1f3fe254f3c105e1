"""Haiku modules, which own the parameters and call the pure functions."""

import collections
import contextlib
import functools
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, DTypeLike
from transformer_embed._src.layers.config import EmbedderConfig, OutputLayer
from transformer_embed._src.positions.relative_bias import relative_position_buckets
from transformer_embed._src.positions.schemes import (
    SCHEMES,
    Learned,
    Scheme,
    Sinusoidal,
    SinusoidalGrid,
)
from transformer_embed._src.tokens.cross_entropy import linear_cross_entropy
from transformer_embed._src.tokens.dropout import dropout
from transformer_embed._src.tokens.log_probs import linear_log_probs
from transformer_embed._src.tokens.lookup import OUT_OF_RANGE, Table, lookup
from transformer_embed._src.tokens.output_layer import linear_logits

Initializer = hk.initializers.Initializer
Params = Mapping[str, Mapping[str, Any]]


class TokenEmbedding(hk.Module):
    """Embeds token ids as rows of a table times sqrt(d_model), with an output layer.

    The table is the parameter `embeddings`, [vocab_size, d_model], as in hk.Embed, so checkpoints
    of hk.Embed can be loaded. `logits` and `cross_entropy` read it too, or the parameters that
    `output` adds.

    Args:
        vocab_size: number of rows, at least 1.
        d_model: width of a row, at least 1.
        scale: True multiplies rows by sqrt(d_model), False by 1, and a number above 0 by that
            number (Granite's multiplier). The product is in float32, so the factor is never rounded
            to 16 bits.
        pad_id: the id of padding. Its row reads as zeros and gets no gradient, whatever the
            initialiser or weight decay do, and it is never predicted. It may be outside the
            vocabulary. None: no padding.
        out_of_range: `"nan"`, `"clip"` or `"zero"`; see `lookup`.
        lookup_style: `"gather"` or `"one_hot"`; see `lookup`.
        output: the output layer; see `OutputLayer`. None: `logits` and `cross_entropy` raise an
            error. A str: they raise it with this reason.
        w_init: initialiser of the table. None: normal, scaled so that the module's outputs have
            unit variance.
        param_dtype: of the parameters.
        dtype: of the result. None: the dtype of the table, after a Haiku mixed-precision policy has
            cast it.
        name: of the module.

    Raises:
        ValueError: a size below 1, an unknown out_of_range or lookup_style.

    Example:
        >>> import haiku as hk, jax
        >>> import transformer_embed as te
        >>> embed = hk.without_apply_rng(hk.transform(lambda ids: te.TokenEmbedding(100, 64)(ids)))
        >>> params = embed.init(jax.random.key(0), [[1, 2, 3]])
        >>> embed.apply(params, [[1, 2, 3]]).shape
        (1, 3, 64)

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.4,
        https://arxiv.org/abs/1706.03762
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        scale: bool | float = True,
        pad_id: int | None = None,
        out_of_range: str = "nan",
        lookup_style: str = "gather",
        output: OutputLayer | str | None = OutputLayer(),
        w_init: Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.config = EmbedderConfig(
            vocab_size,
            d_model,
            scheme=None,
            scale=scale,
            pad_id=pad_id,
            out_of_range=out_of_range,
            lookup_style=lookup_style,
            param_dtype=param_dtype,
            dtype=dtype,
            output=output,
        )
        scale = self.config.scale
        # A scale of False is a factor of 1.
        self.factor = math.sqrt(self.config.d_model) if scale is True else scale or 1.0
        self.w_init = _as_initializer(w_init, hk.initializers.RandomNormal(stddev=1 / self.factor))

    def __call__(self, ids: ArrayLike) -> Float[Array, "... d"]:
        """Embeds ids [...], integers, as [..., d_model] of `dtype`."""
        rows, table_dtype = self._scaled_rows(ids)
        return rows.astype(table_dtype if self.config.dtype is None else self.config.dtype)

    def logits(self, x: ArrayLike) -> Float[Array, "... v"]:
        """The logits of `output`, float32 [..., vocab_size]; see `linear_logits`.

        x is [..., d_model].
        """
        return linear_logits(x, **self._output("logits", {}))

    def cross_entropy(self, x: ArrayLike, labels: ArrayLike, **options: Any) -> Float[Array, "..."]:
        """The cross-entropy of `logits(x)`, computed one chunk of tokens at a time.

        The labels are [...].

        Labels that are the module's `pad_id` are not counted; leave out others by
        `mask=labels != -100`. The options are those of
        `linear_cross_entropy`: mask, weights, shift, segment_ids, label_smoothing, z_loss,
        reduction and chunk_size.
        """
        output = self._output("cross_entropy", options)
        return linear_cross_entropy(x, labels=labels, **output, **options)

    def log_probs(
        self, x: ArrayLike, labels: ArrayLike, **options: Any
    ) -> Float[Array, "..."] | tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The log-probability of each label under `logits(x)`, one chunk of tokens at a time.

        The labels are [...]. The options are those of `linear_log_probs`: temperature, mask, shift,
        segment_ids, with_entropy and chunk_size.
        """
        output = self._output("log_probs", options)
        return linear_log_probs(x, labels=labels, **output, **options)

    def _output(self, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `linear_logits` besides x, for a method."""
        width = self.config.d_model
        of_output = hk.initializers.RandomNormal(stddev=1 / math.sqrt(width))
        parameters = {
            "embeddings": self._table,
            "output_embeddings": lambda: self._parameter("output_embeddings", of_output, width),
            "output_bias": lambda: self._parameter("output_bias", jnp.zeros),
        }
        return output_arguments(self.config, method, options, lambda name: parameters[name]())

    def _scaled_rows(self, ids: ArrayLike) -> tuple[Float[Array, "... d"], jnp.dtype]:
        """The scaled rows in float32 or wider, and the dtype of the table."""
        table = self._table()
        rows = lookup(
            table,
            ids,
            pad_id=self.config.pad_id,
            out_of_range=self.config.out_of_range,
            lookup_style=self.config.lookup_style,
        )
        return arguments.widened(rows) * self.factor, table.dtype

    def _table(self) -> Any:
        return self._parameter("embeddings", self.w_init, self.config.d_model)

    def _parameter(self, name: str, w_init: Initializer, *width: int) -> Any:
        """The parameter of this name, [vocab_size, *width]."""
        return _parameter((self.config.vocab_size, *width), self.config.param_dtype, w_init, name)


class PositionalEncoding(hk.Module):
    """Adds the encodings of positions to embeddings, then applies dropout.

    Sinusoidal encodings have no parameters. Learned ones are the parameter `embeddings`, [max_len,
    d_model].

    Args:
        scheme: `Sinusoidal(...)`, `SinusoidalGrid(...)` or `Learned(max_len=...)`.
        d_model: channels, at least 1.
        dropout_rate: in [0, 1).
        out_of_range: `"nan"`, `"clip"` or `"zero"`, for positions outside the table of learned
            ones; see `lookup`. (A length beyond the table is an error, because it is known while
            tracing.)
        w_init: initialiser of learned positions. None: normal with standard deviation 0.02, as in
            BERT and GPT-2.
        param_dtype: of learned positions.
        name: of the module. None: `learned_positional_encoding` or `positional_encoding`.

    Raises:
        ValueError: an argument is out of range; w_init is given for a scheme without parameters;
            when called, the length is beyond the table or grid of the scheme.

    Example:
        >>> import haiku as hk, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> scheme = te.Sinusoidal()
        >>> encode = hk.transform(lambda x: te.PositionalEncoding(scheme, 8)(x, is_training=False))
        >>> encode.apply({}, None, jnp.zeros([2, 5, 8])).shape
        (2, 5, 8)

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), sections 3.5 and 5.4,
        https://arxiv.org/abs/1706.03762. Learned positions: Gehring et al., "Convolutional Sequence
        to Sequence Learning" (2017), section 3.1, https://arxiv.org/abs/1705.03122
    """

    def __init__(
        self,
        scheme: Sinusoidal | SinusoidalGrid | Learned,
        d_model: int,
        *,
        dropout_rate: float = 0.1,
        out_of_range: str = "nan",
        w_init: Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        name: str | None = None,
    ):
        arguments.instance("scheme", scheme, Scheme, SCHEMES)
        super().__init__(name=name or scheme._module_name)
        if scheme._table_length() is None:
            arguments.check_left_out("w_init", w_init, "the scheme has no parameters")
        self.scheme = scheme
        self.d_model = arguments.size("d_model", d_model)
        scheme._check(self.d_model)
        self.dropout_rate = arguments.rate("dropout_rate", dropout_rate)
        self.out_of_range = arguments.choice("out_of_range", out_of_range, OUT_OF_RANGE)
        self.w_init = _as_initializer(w_init, hk.initializers.RandomNormal(stddev=0.02))
        self.param_dtype = arguments.floating_dtype("param_dtype", param_dtype)

    def __call__(
        self, x: ArrayLike, *, is_training: bool, positions: ArrayLike | None = None
    ) -> Float[Array, "... t d"]:
        """Adds the encodings in float32, rounds once to x's dtype, then applies dropout.

        Dropout needs is_training=True.

        Args:
            x: [..., length, d_model], a floating dtype.
            is_training: a Python bool. True needs a key unless dropout_rate is 0; False uses none.
            positions: [length], or more axes that broadcast to x's leading ones; integers, or
                float32 if they are sinusoidal. None: counted from the scheme's `start`. (Required
                for a scheme with `pad_id` or `at_padding`: x does not show what is padding.)

        Returns:
            [..., length, d_model] of x's dtype.
        """
        arguments.flag("is_training", is_training)
        x = arguments.as_floats("x", x)
        if x.ndim < 2 or x.shape[-1] != self.d_model:
            raise arguments.value_error(
                "x", f"shape [..., length, d_model = {self.d_model}]", f"shape {list(x.shape)}"
            )
        if positions is None:
            if (self.scheme.pad_id, self.scheme.at_padding) != (None, None):
                want = "an array, since x does not show what is padding"
                raise arguments.value_error("positions", want, "None")
            positions = self.scheme._counted("x", x.shape[-2])
        encoding = self._broadcast_encoding(positions, x.shape[:-1], "x's tokens")
        total = (arguments.widened(x) + encoding).astype(x.dtype)
        return _apply_dropout(total, self.dropout_rate, is_training)

    def encoding(self, positions: ArrayLike) -> Float[Array, "... d"]:
        """The encodings [..., d_model] of positions [...], in float32 or wider."""
        rows = self.scheme._table_length()
        if rows is None:
            return self.scheme._encoding(positions, self.d_model)
        table = _parameter((rows, self.d_model), self.param_dtype, self.w_init)
        positions = arguments.as_int32("positions", positions)
        return arguments.widened(lookup(table, positions, out_of_range=self.out_of_range))

    def _broadcast_encoding(
        self, positions: ArrayLike, shape: tuple[int, ...], tokens: str
    ) -> Float[Array, "... d"]:
        """The encodings of positions, broadcast to the shape of the tokens."""
        positions = arguments.as_array("positions", positions)
        arguments.check_ends_in_length("positions", positions.shape, shape, tokens)
        encoding = self.encoding(positions)
        if positions.ndim == 1 and any(size != 1 for size in shape[:-1]):
            encoding = _fusion_barrier(encoding)
        return _expanded_to_rank(encoding, len(shape) + 1)


class RelativePositionBias(hk.Module):
    """T5's learned bias of attention logits: a number for each head and bucket of distances.

    The numbers are the parameter `embeddings`, [num_buckets, num_heads], as in transformers; T5X
    has the transpose. T5 shares one module between all layers of a stack, and adds the bias to
    logits that are not divided by sqrt(head_dim).

    Args:
        num_heads: at least 1.
        num_buckets: as in `relative_position_buckets`.
        max_distance: as in `relative_position_buckets`.
        bidirectional: True in an encoder, False in a causal decoder; see
            `relative_position_buckets`.
        w_init: initialiser of the table. None: uniform with variance 1 / fan_avg, as in T5X.
        param_dtype: of the table.
        dtype: of the result. None: the dtype of the table, after a Haiku mixed-precision policy has
            cast it.
        name: of the module.

    Raises:
        ValueError: a number below 1; when called, as `relative_position_buckets`.

    Example:
        >>> import haiku as hk, jax
        >>> import transformer_embed as te
        >>> bias = hk.without_apply_rng(hk.transform(lambda q, k: te.RelativePositionBias(8)(q, k)))
        >>> params = bias.init(jax.random.key(0), range(5), range(5))
        >>> bias.apply(params, [4], range(5)).shape
        (1, 8, 1, 5)

    Source:
        Raffel et al., "T5" (2020), section 2.1, https://arxiv.org/abs/1910.10683
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        w_init: Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.num_heads = arguments.size("num_heads", num_heads)
        self.num_buckets = arguments.size("num_buckets", num_buckets)
        self.max_distance = arguments.size("max_distance", max_distance)
        self.bidirectional = arguments.flag("bidirectional", bidirectional)
        default = hk.initializers.VarianceScaling(1.0, "fan_avg", "uniform")
        self.w_init = _as_initializer(w_init, default)
        self.param_dtype = arguments.floating_dtype("param_dtype", param_dtype)
        self.dtype = dtype if dtype is None else arguments.floating_dtype("dtype", dtype)

    def __call__(
        self, query_positions: ArrayLike, key_positions: ArrayLike
    ) -> Float[Array, "b h t s"]:
        """The bias [B or 1, num_heads, T, S] of `dtype`.

        Positions are [T] or [B, T], and [S] or [B, S].
        """
        buckets = relative_position_buckets(
            query_positions,
            key_positions,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        table = _parameter((self.num_buckets, self.num_heads), self.param_dtype, self.w_init)
        # A bucket is never out of range, and "clip" skips the check.
        bias = jnp.moveaxis(lookup(table, buckets, out_of_range="clip"), -1, 1)
        return bias if self.dtype is None else bias.astype(self.dtype)


class TransformerEmbedding(hk.Module):
    """The input layer of a Transformer: tokens, positions, token types, layer norm and dropout.

    The sum and the norm are computed in float32 and rounded once to `config.dtype`, then dropout is
    applied. If the tables are narrower than d_model, a linear layer widens the result at the end.

    To use a loaded checkpoint in your own model, start from its parameters, whatever the path of
    the module:

        found = te.pretrained.load_embedder("checkpoint/")
        # In the function that hk.transform takes:
        embed = te.TransformerEmbedding(found.config, initial_params=found.params)

    `Embedder`, `save_embedder`, `resize_vocabulary` and `resize_positions` take the parameters of
    the whole model and find the layer in them.

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
            params = arguments.as_params("initial_params", initial_params)
            paths = layer_paths("initial_params", config, params)
            self._initial_params = {module: params[path] for module, path in paths.items()}
        embedding = functools.partial(
            TokenEmbedding,
            d_model=config.table_width,
            out_of_range=config.out_of_range,
            lookup_style=config.lookup_style,
            param_dtype=config.param_dtype,
        )
        self.tokens = embedding(
            config.vocab_size, scale=config.scale, pad_id=config.pad_id, output=config.output
        )
        self.encoding = self.token_types = self.norm = self.widen = None
        if config.scheme is not None:
            self.encoding = PositionalEncoding(
                config.scheme,
                config.table_width,
                out_of_range=config.out_of_range,
                param_dtype=config.param_dtype,
            )
        if config.num_token_types is not None:
            self.token_types = embedding(
                config.num_token_types,
                scale=False,
                w_init=hk.initializers.RandomNormal(stddev=0.02),
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
                counted by the scheme, without padding if the config has a `pad_id`.
            token_types: integers, [length], or more axes that broadcast to the ids'; required if
                num_token_types is set; otherwise must be None.

        Returns:
            [..., length, d_model] of `config.dtype`.
        """
        arguments.flag("is_training", is_training)
        ids = arguments.as_int32("ids", ids)
        if ids.ndim == 0:
            raise arguments.value_error("ids", "shape [..., length]", "shape []")
        with _parameters_from(self._initial_params):
            total, table_dtype = self.tokens._scaled_rows(ids)
            if self.encoding is not None:
                if positions is None:
                    positions = self.encoding.scheme._positions(ids, self.config.pad_id)
                total += self.encoding._broadcast_encoding(positions, ids.shape, "the ids")
            if self.token_types is None:
                arguments.check_left_out("token_types", token_types, "num_token_types is not set")
            else:
                total += _rows_of_types(self.token_types, token_types, ids.shape)
            if self.norm is not None:
                total = self.norm(total)
            dtype = table_dtype if self.config.dtype is None else self.config.dtype
            x = _apply_dropout(total.astype(dtype), self.config.dropout_rate, is_training)
            return x if self.widen is None else self.widen(x.astype(table_dtype)).astype(dtype)

    def logits(self, x: ArrayLike) -> Float[Array, "... v"]:
        """The logits of `config.output`; x is as wide as the token table. See `linear_logits`."""
        with _parameters_from(self._initial_params):
            return self.tokens.logits(x)

    def cross_entropy(self, x: ArrayLike, labels: ArrayLike, **options: Any) -> Float[Array, "..."]:
        """The cross-entropy of `logits(x)` with labels [...].

        See `TokenEmbedding.cross_entropy`.
        """
        with _parameters_from(self._initial_params):
            return self.tokens.cross_entropy(x, labels, **options)

    def log_probs(
        self, x: ArrayLike, labels: ArrayLike, **options: Any
    ) -> Float[Array, "..."] | tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The log-probability of each label [...] under `logits(x)`.

        See `TokenEmbedding.log_probs`.
        """
        with _parameters_from(self._initial_params):
            return self.tokens.log_probs(x, labels, **options)


def output_arguments(
    config: EmbedderConfig, method: str, options: Mapping[str, Any], parameter: Callable[[str], Any]
) -> dict[str, Any]:
    """The arguments of `linear_logits` besides x, for a method with these options.

    `parameter` returns the parameter of a name.
    """
    output = config.output
    if not isinstance(output, OutputLayer):
        want = f"config.output, an OutputLayer (or call te.linear_{method} with other weights)"
        got = "None" if output is None else f"none, since {output}"
        raise arguments.value_error(method, want, got)
    # An untied model, too, has a table of tokens.
    table = parameter("embeddings")
    found = {
        "table": table if output.tied else parameter("output_embeddings"),
        "bias": parameter("output_bias") if output.bias else None,
        "softcap": output.softcap,
        "scale": output.scale,
        "pad_id": config.pad_id,
    }
    for name in found.keys() & options:
        want = "no value here, since the config says it"
        if name == "pad_id":
            want += " (to leave out labels of -100: mask=labels != -100)"
        raise arguments.type_error(name, want, repr(options[name]))
    return found


# Compiled, so that its shapes below need no trace of their own.
@functools.partial(jax.jit, static_argnums=0)
def init_params(config: EmbedderConfig, rng: Array) -> Params:
    """The parameters of a config's layer, drawn with rng."""
    ids = jnp.zeros([1, 1], jnp.int32)
    token_types = None if config.num_token_types is None else ids

    def embed():
        layer = TransformerEmbedding(config)
        layer(ids, is_training=False, token_types=token_types)
        if isinstance(config.output, OutputLayer):
            layer.logits(jnp.zeros(config.table_width))

    return hk.transform(embed).init(rng)


@functools.lru_cache(maxsize=64)
def parameter_shapes(config: EmbedderConfig) -> Mapping[str, Mapping[str, jax.ShapeDtypeStruct]]:
    """The shape and dtype of each parameter of a config's layer."""
    return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def layer_paths(name: str, config: EmbedderConfig, params: Params) -> dict[str, str]:
    """The path of each module of a config's layer by its name, in a tree that may hold others too.

    An error unless the tree has one such layer, with parameters of these names and shapes.
    """
    root = table_path(name, params, "token_embedding").removesuffix("token_embedding")
    paths = {module_name(path): path for path in params if path == root + module_name(path)}
    ours = _shapes(parameter_shapes(config))
    theirs = _shapes({path: params[path] for path in paths.values()})
    if ours != theirs:
        missing, unknown = (", ".join(sorted(shapes)) for shapes in (ours - theirs, theirs - ours))
        raise arguments.value_error(name, missing or "no others", unknown or "none of them")
    return paths


def table_path(name: str, params: Params, module: str) -> str:
    """The path of the one module of this name that has a table, at any depth of a tree."""
    paths = [
        path
        for path, leaves in sorted(params.items())
        if module_name(path) == module and "embeddings" in leaves
    ]
    if len(paths) != 1:
        got = " and ".join(paths) or f"none among {reprlib.repr(sorted(params))}"
        raise arguments.value_error(name, f"one {module} with embeddings", got)
    return paths[0]


def _shapes(params: Params) -> collections.Counter[str]:
    """Each parameter in words: its module, its name and its shape."""
    return collections.Counter(
        f"{module_name(path)}/{name} {list(leaf.shape)}"
        for path, leaves in params.items()
        for name, leaf in leaves.items()
    )


def module_name(path: str) -> str:
    return path.rsplit("/", 1)[-1]


@contextlib.contextmanager
def _parameters_from(initial: Mapping[str, Mapping] | None) -> Iterator[None]:
    """Creates parameters with the initial values, and reads them as native arrays.

    (Not a method: a mixed-precision policy casts what methods of modules return.)
    """

    def create(create_default, shape, dtype, init, context):
        if initial is None:
            return create_default(shape, dtype, init)
        path, name = context.full_name.rsplit("/", 1)
        value = initial[module_name(path)][name]
        if isinstance(value, Table) and value.dtype == dtype:
            return value
        return jnp.asarray(value, dtype)

    def read(read_default, value, context):
        return read_default(arguments.native(context.full_name, value))

    with hk.custom_creator(create), hk.custom_getter(read):  # pyright: ignore[reportArgumentType]
        yield


def _parameter(
    shape: Sequence[int], dtype: Any, w_init: Initializer, name: str = "embeddings"
) -> Any:
    """A parameter of the module that calls."""
    return arguments.native(name, hk.get_parameter(name, shape, dtype, w_init))


def _rows_of_types(
    embed: TokenEmbedding, token_types: ArrayLike | None, shape: tuple[int, ...]
) -> Float[Array, "... d"]:
    if token_types is None:
        raise arguments.value_error("token_types", "an array, since num_token_types is set", "None")
    token_types = arguments.as_int32("token_types", token_types)
    arguments.check_ends_in_length("token_types", token_types.shape, shape)
    rows, _ = embed._scaled_rows(token_types)
    return _expanded_to_rank(rows, len(shape) + 1)


def _as_initializer(w_init: Initializer | None, default: Initializer) -> Initializer:
    if w_init is None:
        return default
    want = "a function of a shape and a dtype, such as hk.initializers.RandomNormal()"
    return arguments.instance("w_init", w_init, Callable, want)


def _expanded_to_rank(x: Float[Array, "..."], rank: int) -> Float[Array, "..."]:
    """The same values with leading axes of size 1, for sums under strict rank promotion."""
    return x if x.ndim == rank else jax.lax.expand_dims(x, range(rank - x.ndim))


def _fusion_barrier(rows: Float[Array, "t d"]) -> Float[Array, "t d"]:
    """The same rows, computed once.

    On a CPU, XLA would fuse their computation into the sum and repeat it for each batch row; it
    cannot fuse through a gather.
    """
    # Under explicit mesh axes that split the rows, the gather would need a sharding.
    if any(jax.typeof(rows).sharding.spec):
        return rows
    every_row = jnp.arange(rows.shape[0], dtype=jnp.int32)
    gather = functools.partial(jnp.take, indices=every_row, axis=0, mode="clip")
    return jax.lax.platform_dependent(rows, cpu=gather, default=lambda rows: rows)


def _apply_dropout(x: Float[Array, "..."], rate: float, is_training: bool) -> Float[Array, "..."]:
    if not is_training or rate == 0:
        return x
    rng = hk.maybe_next_rng_key()
    if rng is None:
        want = "a key, to train with dropout (pass is_training=False to evaluate)"
        raise arguments.value_error("rng", want, "None")
    return dropout(rng, rate, x)
