"""Haiku modules, which own the parameters and call the pure functions."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, DTypeLike
from transformer_embed._src.functional.cross_entropy import tied_cross_entropy
from transformer_embed._src.functional.dropout import dropout
from transformer_embed._src.functional.lookup import (
    LOOKUP_STYLES,
    OUT_OF_RANGE,
    Table,
    lookup,
    tied_logits,
)
from transformer_embed._src.functional.relative_bias import relative_position_buckets
from transformer_embed._src.layers.config import EmbedderConfig, checked_scale
from transformer_embed._src.layers.schemes import Learned, Scheme

Initializer = hk.initializers.Initializer
Params = Mapping[str, Mapping[str, Any]]


class TokenEmbedding(hk.Module):
    """Embeds token ids as rows of a table times sqrt(d_model), with an output layer tied to the
    table.

    The table is the parameter `embeddings`, [vocab_size, d_model], as in hk.Embed, so checkpoints
    of hk.Embed can be loaded.

    Args:
        vocab_size: number of rows, at least 1.
        d_model: width of a row, at least 1.
        scale: True multiplies rows by sqrt(d_model), False by 1, and a number above 0 by that
            number (Granite's multiplier). The product is in float32, so the factor is never rounded
            to 16 bits.
        pad_id: the id of padding. Its row reads as zeros and gets no gradient, whatever the
            initialiser, weight decay or the output layer do. It may be outside the vocabulary.
            None: no padding.
        out_of_range: `"nan"`, `"clip"` or `"zero"`; see `lookup`.
        lookup_style: `"gather"` or `"one_hot"`; see `lookup`.
        w_init: initialiser of the table. None: normal, scaled so that the module's outputs have
            unit variance.
        param_dtype: of the table.
        dtype: of the result. None: the dtype of the table, after a Haiku mixed-precision policy has
            cast it.
        name: of the module.

    Raises:
        TypeError: an argument has the wrong type.
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
        w_init: Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
        name: str | None = None,
    ):
        super().__init__(name=arguments.name("name", name))
        self.vocab_size = arguments.integer("vocab_size", vocab_size, at_least=1)
        self.d_model = arguments.integer("d_model", d_model, at_least=1)
        self.pad_id = pad_id if pad_id is None else arguments.int32("pad_id", pad_id)
        self.out_of_range = arguments.choice("out_of_range", out_of_range, OUT_OF_RANGE)
        self.lookup_style = arguments.choice("lookup_style", lookup_style, LOOKUP_STYLES)
        self.param_dtype = arguments.floating_dtype("param_dtype", param_dtype)
        self.dtype = dtype if dtype is None else arguments.floating_dtype("dtype", dtype)
        scale = checked_scale(scale)
        self.factor = math.sqrt(d_model) if scale is True else scale or 1.0
        self.w_init = _initializer(w_init, hk.initializers.RandomNormal(stddev=1 / self.factor))

    def __call__(self, ids: ArrayLike) -> Float[Array, "... d"]:
        """Embeds ids [...], integers, as [..., d_model] of `dtype`."""
        rows, table_dtype = self._scaled_rows(ids)
        return rows.astype(table_dtype if self.dtype is None else self.dtype)

    def logits(self, x: ArrayLike) -> Float[Array, "... v"]:
        """The output layer tied to the table: x [..., d_model] times its rows, not scaled; float32
        [..., vocab_size]. See `tied_logits`."""
        return tied_logits(x, self._table(), pad_id=self.pad_id)

    def cross_entropy(
        self,
        x: ArrayLike,
        labels: ArrayLike,
        *,
        mask: ArrayLike | None = None,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        chunk_size: int | None = None,
    ) -> Float[Array, ""]:
        """The cross-entropy of `logits(x)` with labels [...], computed one chunk of tokens at a
        time; see `tied_cross_entropy`.

        Tokens whose label is the module's `pad_id` are not counted; use `mask` to leave out others.
        """
        options = {
            "label_smoothing": label_smoothing,
            "reduction": reduction,
            "chunk_size": chunk_size,
        }
        return tied_cross_entropy(
            x, self._table(), labels, mask=mask, pad_id=self.pad_id, **options
        )

    def _scaled_rows(self, ids: ArrayLike) -> tuple[Float[Array, "... d"], jnp.dtype]:
        """The scaled rows in float32 or wider, and the dtype of the table."""
        table = self._table()
        rows = lookup(
            table,
            ids,
            pad_id=self.pad_id,
            out_of_range=self.out_of_range,
            lookup_style=self.lookup_style,
        )
        return _at_least_float32(rows) * self.factor, table.dtype

    def _table(self) -> Float[Array, "v d"] | Table:
        return hk.get_parameter(
            "embeddings", [self.vocab_size, self.d_model], self.param_dtype, self.w_init
        )


class PositionalEncoding(hk.Module):
    """Adds the encodings of positions to embeddings, then applies dropout.

    Sinusoidal encodings have no parameters. Learned ones are the parameter `embeddings`, [max_len,
    d_model].

    Args:
        scheme: `Sinusoidal(...)`, `SinusoidalGrid(...)` or `Learned(max_len=...)`.
        d_model: channels, at least 1.
        dropout_rate: in [0, 1).
        out_of_range: `"nan"`, `"clip"` or `"zero"`, for positions outside the table of learned
            ones; see `lookup`. (A *length* beyond the table is an error, because it is known while
            tracing.)
        w_init: initialiser of learned positions. None: normal with standard deviation 0.02, as in
            BERT and GPT-2.
        param_dtype: of learned positions.
        name: of the module. None: `learned_positional_encoding` or `positional_encoding`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; w_init is given for a scheme without parameters;
            when called, the length is beyond the table or grid of the scheme.

    Example:
        >>> import haiku as hk, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> encode = hk.transform(lambda x: te.PositionalEncoding(te.Sinusoidal(), 8)(x, is_training=False))
        >>> encode.apply({}, None, jnp.zeros([2, 5, 8])).shape
        (2, 5, 8)

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), sections 3.5 and 5.4,
        https://arxiv.org/abs/1706.03762. Learned positions: Gehring et al., "Convolutional Sequence
        to Sequence Learning" (2017), section 3.1, https://arxiv.org/abs/1705.03122
    """

    def __init__(
        self,
        scheme: Scheme,
        d_model: int,
        *,
        dropout_rate: float = 0.1,
        out_of_range: str = "nan",
        w_init: Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        name: str | None = None,
    ):
        learned = isinstance(scheme, Learned)
        super().__init__(
            name=arguments.name("name", name)
            or ("learned_positional_encoding" if learned else "positional_encoding")
        )
        if not isinstance(scheme, Scheme):
            raise TypeError(
                arguments.wanted(
                    "scheme",
                    "Sinusoidal(...), SinusoidalGrid(...) or Learned(max_len=...)",
                    repr(scheme),
                )
            )
        if not learned:
            arguments.unwanted("w_init", w_init, "the scheme has no parameters")
        self.d_model = arguments.integer("d_model", d_model, at_least=1)
        scheme.check(self.d_model)
        self.scheme = scheme
        self.dropout_rate = float(arguments.rate("dropout_rate", dropout_rate))
        self.out_of_range = arguments.choice("out_of_range", out_of_range, OUT_OF_RANGE)
        self.w_init = _initializer(w_init, hk.initializers.RandomNormal(stddev=0.02))
        self.param_dtype = arguments.floating_dtype("param_dtype", param_dtype)

    def __call__(
        self, x: ArrayLike, *, is_training: bool, positions: ArrayLike | None = None
    ) -> Float[Array, "... t d"]:
        """Adds the encodings in float32, rounds once to x's dtype, then applies dropout if
        is_training is True.

        Args:
            x: [..., length, d_model], a floating dtype.
            is_training: a Python bool. True needs a key unless dropout_rate is 0; False uses none.
            positions: [length], or more axes that broadcast to x's leading ones; integers, or
                float32 if they are sinusoidal. None: counted from the scheme's `start`. (Required
                for a scheme with `at_padding`, because x does not show what is padding.)

        Returns:
            [..., length, d_model] of x's dtype.
        """
        arguments.flag("is_training", is_training)
        x = arguments.as_floats("x", x)
        if x.ndim < 2 or x.shape[-1] != self.d_model:
            raise ValueError(
                arguments.wanted(
                    "x", f"shape [..., length, d_model = {self.d_model}]", f"shape {list(x.shape)}"
                )
            )
        if positions is None:
            if getattr(self.scheme, "at_padding", None) is not None:
                raise ValueError(
                    arguments.wanted(
                        "positions",
                        "an array, since the scheme's at_padding depends on the ids",
                        "None",
                    )
                )
            positions = self.scheme.count(x.shape[-2], "x")
        total = _at_least_float32(x) + self._broadcast_encoding(
            positions, x.shape[:-1], "x's tokens"
        )
        return _apply_dropout(total.astype(x.dtype), self.dropout_rate, is_training)

    def encoding(self, positions: ArrayLike) -> Float[Array, "... d"]:
        """The encodings [..., d_model] of positions [...], in float32 or wider."""
        if not isinstance(self.scheme, Learned):
            return self.scheme.encoding(positions, self.d_model)
        table = hk.get_parameter(
            "embeddings", [self.scheme.max_len, self.d_model], self.param_dtype, self.w_init
        )
        return _at_least_float32(
            lookup(
                table, arguments.as_int32("positions", positions), out_of_range=self.out_of_range
            )
        )

    def _broadcast_encoding(
        self, positions: ArrayLike, shape: tuple[int, ...], tokens: str
    ) -> Float[Array, "... d"]:
        """The encodings of positions that broadcast to the shape of the tokens, with as many axes
        as these have."""
        positions = arguments.as_array("positions", positions)
        arguments.ends_in_length("positions", positions.shape, shape, tokens)
        encoding = self.encoding(positions)
        if positions.ndim == 1 and any(size != 1 for size in shape[:-1]):
            encoding = _fusion_barrier(encoding)
        return _expanded_to_rank(encoding, len(shape) + 1)


class RelativePositionBias(hk.Module):
    """T5's learned bias: a number for each head and each bucket of distances, added to attention
    logits.

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
        TypeError: an argument has the wrong type.
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
        super().__init__(name=arguments.name("name", name))
        self.num_heads = arguments.integer("num_heads", num_heads, at_least=1)
        self.num_buckets = arguments.integer("num_buckets", num_buckets, at_least=1)
        self.max_distance = arguments.integer("max_distance", max_distance, at_least=1)
        self.bidirectional = arguments.flag("bidirectional", bidirectional)
        self.w_init = _initializer(
            w_init, hk.initializers.VarianceScaling(1.0, "fan_avg", "uniform")
        )
        self.param_dtype = arguments.floating_dtype("param_dtype", param_dtype)
        self.dtype = dtype if dtype is None else arguments.floating_dtype("dtype", dtype)

    def __call__(
        self, query_positions: ArrayLike, key_positions: ArrayLike
    ) -> Float[Array, "b h t s"]:
        """The bias [B or 1, num_heads, T, S] of `dtype`, for positions [T] or [B, T] and [S] or [B,
        S]."""
        buckets = relative_position_buckets(
            query_positions,
            key_positions,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        table = hk.get_parameter(
            "embeddings", [self.num_buckets, self.num_heads], self.param_dtype, self.w_init
        )
        # A bucket is never out of range, and "clip" skips the check.
        bias = jnp.moveaxis(lookup(table, buckets, out_of_range="clip"), -1, 1)
        return bias if self.dtype is None else bias.astype(self.dtype)


class TransformerEmbedding(hk.Module):
    """The input layer of a Transformer: tokens + positions (+ token types), an optional layer norm,
    dropout.

    The sum and the norm are computed in float32 and rounded once to `config.dtype`, then dropout is
    applied. If the tables are narrower than d_model, a linear layer widens the result at the end.

    To use a loaded checkpoint in your own model, start from its parameters, whatever the path of
    the module:

        found = te.pretrained.load_embedder("checkpoint/") embed =
        te.TransformerEmbedding(found.config, initial_params=found.params)  # in the function that
        hk.transform takes

    With left-padded ids, tokens do not start at position 0 by default, because padding is counted
    too. Use `scheme=te.Sinusoidal(at_padding=0, pad_id=0)` in the config, or call the module
    with `positions=`; see `EmbedderConfig`.

    Args:
        config: the description of the layer; see `EmbedderConfig`.
        initial_params: initial values of the module's parameters: the result of `Embedder.init` for
            this config, or a checkpoint's parameters. Call `init` outside `jax.jit`; inside it,
            they would become constants of the program. None: drawn at random.
        name: of the module.

    Raises:
        TypeError: config is not an EmbedderConfig; initial_params is not a parameter tree.
        ValueError: initial_params do not have the modules of this config; in `init`, they do not
            have its shapes.

    Example:
        >>> import haiku as hk, jax
        >>> import transformer_embed as te
        >>> config = te.EmbedderConfig(vocab_size=100, d_model=64, pad_id=0)
        >>> embed = hk.transform(lambda ids: te.TransformerEmbedding(config)(ids, is_training=False))
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
        super().__init__(name=arguments.name("name", name))
        if not isinstance(config, EmbedderConfig):
            hint = "an EmbedderConfig, such as te.EmbedderConfig(vocab_size=256, d_model=64)"
            raise TypeError(arguments.wanted("config", hint, f"{type(config).__name__} {config!r}"))
        self.config = config
        initial = _initial_value_getter(config, initial_params)
        width, param_dtype = config.table_width, config.param_dtype
        table = functools.partial(
            TokenEmbedding,
            d_model=width,
            out_of_range=config.out_of_range,
            lookup_style=config.lookup_style,
            param_dtype=param_dtype,
        )
        self.tokens = table(
            config.vocab_size,
            scale=config.scale,
            pad_id=config.pad_id,
            w_init=initial("token_embedding", "embeddings"),
        )
        self.encoding = None
        if config.scheme is not None:
            w_init = initial("learned_positional_encoding", "embeddings")
            options = {
                "out_of_range": config.out_of_range,
                "w_init": w_init,
                "param_dtype": param_dtype,
            }
            self.encoding = PositionalEncoding(config.scheme, width, **options)
        self.token_types = None
        if config.num_token_types is not None:
            name = "token_type_embedding"
            w_init = initial(name, "embeddings") or hk.initializers.RandomNormal(stddev=0.02)
            self.token_types = table(config.num_token_types, scale=False, w_init=w_init, name=name)
        self.norm = None
        if config.layer_norm_eps is not None:
            starts = {
                "scale_init": initial("layer_norm", "scale"),
                "offset_init": initial("layer_norm", "offset"),
            }
            self.norm = hk.LayerNorm(-1, True, True, eps=config.layer_norm_eps, **starts)
        self.widen = None
        if config.embedding_width is not None:
            self.widen = hk.Linear(
                config.d_model,
                w_init=initial("widen", "w"),
                b_init=initial("widen", "b"),
                name="widen",
            )

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
                they are sinusoidal. None: 0..length-1, with padding counted like tokens, unless the
                scheme sets `start` or `at_padding`.
            token_types: integers, [length], or more axes that broadcast to the ids'; required if
                num_token_types is set; otherwise must be None.

        Returns:
            [..., length, d_model] of `config.dtype`.
        """
        arguments.flag("is_training", is_training)
        ids = arguments.as_int32("ids", ids)
        if ids.ndim == 0:
            raise ValueError(arguments.wanted("ids", "shape [..., length]", "shape []"))
        total, table_dtype = self.tokens._scaled_rows(ids)
        if self.encoding is None:
            arguments.unwanted("positions", positions, "the model adds no positions")
        else:
            if positions is None:
                positions = self.encoding.scheme.positions(ids)
            total = total + self.encoding._broadcast_encoding(positions, ids.shape, "the ids")
        if self.token_types is None:
            arguments.unwanted("token_types", token_types, "num_token_types is not set")
        else:
            total = total + _rows_of_types(self.token_types, token_types, ids.shape)
        if self.norm is not None:
            total = self.norm(total)
        dtype = table_dtype if self.config.dtype is None else self.config.dtype
        total = _apply_dropout(total.astype(dtype), self.config.dropout_rate, is_training)
        return total if self.widen is None else self.widen(total.astype(table_dtype)).astype(dtype)

    def logits(self, x: ArrayLike) -> Float[Array, "... v"]:
        """The output layer tied to the token table; x is as wide as the table. See
        `tied_logits`."""
        self._check_tied("logits")
        return self.tokens.logits(x)

    def cross_entropy(
        self,
        x: ArrayLike,
        labels: ArrayLike,
        *,
        mask: ArrayLike | None = None,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        chunk_size: int | None = None,
    ) -> Float[Array, ""]:
        """The cross-entropy of `logits(x)` with labels [...]; see
        `TokenEmbedding.cross_entropy`."""
        self._check_tied("cross_entropy")
        options = {
            "label_smoothing": label_smoothing,
            "reduction": reduction,
            "chunk_size": chunk_size,
        }
        return self.tokens.cross_entropy(x, labels, mask=mask, **options)

    def _check_tied(self, name: str) -> None:
        """Raises for a model whose output layer has weights of its own."""
        if not self.config.tied:
            want = "config.tied, since it multiplies by the token table"
            got = (
                "a model whose output layer has weights of its own; read them, [vocab_size, d_model], and"
                f" pass them to tied_{name} as the table (and add the bias if there is one)"
            )
            raise ValueError(arguments.wanted(name, want, got))


def _rows_of_types(
    embed: TokenEmbedding, token_types: ArrayLike | None, shape: tuple[int, ...]
) -> Float[Array, "... d"]:
    if token_types is None:
        raise ValueError(
            arguments.wanted("token_types", "an array, since num_token_types is set", "None")
        )
    token_types = arguments.as_int32("token_types", token_types)
    arguments.ends_in_length("token_types", token_types.shape, shape)
    rows, _ = embed._scaled_rows(token_types)
    return _expanded_to_rank(rows, len(shape) + 1)


def _initial_value_getter(
    config: EmbedderConfig, params: Params | None
) -> Callable[[str, str], Initializer | None]:
    """A function that returns the initialiser of a parameter, given its module and name, or None if
    it has no value in params."""
    if params is None:
        return lambda module, name: None
    arguments.params(params, "initial_params")
    required = ["token_embedding"]
    required += ["learned_positional_encoding"] if isinstance(config.scheme, Learned) else []
    required += [] if config.num_token_types is None else ["token_type_embedding"]
    required += [] if config.layer_norm_eps is None else ["layer_norm"]
    required += [] if config.embedding_width is None else ["widen"]
    found = {path.rsplit("/", 1)[-1]: path for path in params}
    if sorted(path.rsplit("/", 1)[-1] for path in params) != sorted(required):
        raise ValueError(
            arguments.wanted(
                "initial_params", f"the modules {', '.join(required)}", ", ".join(sorted(params))
            )
        )

    def initial(module: str, name: str) -> Initializer | None:
        if module not in found:
            return None
        path = f"{found[module]}/{name}"
        if name not in params[found[module]]:
            raise ValueError(
                arguments.wanted(
                    "initial_params", path, f"only {', '.join(sorted(params[found[module]]))} there"
                )
            )
        return functools.partial(
            _given_value, f"initial_params: {path}", params[found[module]][name]
        )

    return initial


def _given_value(name: str, value: Any, shape: Sequence[int], dtype: Any) -> Any:
    """An initialiser that returns a given value, once its first two arguments are bound."""
    if tuple(value.shape) != tuple(shape):
        raise ValueError(
            arguments.wanted(name, f"shape {list(shape)}", f"shape {list(value.shape)}")
        )
    return value if isinstance(value, Table) and value.dtype == dtype else jnp.asarray(value, dtype)


def _initializer(given: Initializer | None, default: Initializer) -> Initializer:
    if given is not None and not callable(given):
        want = "a function of a shape and a dtype, such as hk.initializers.RandomNormal()"
        raise TypeError(arguments.wanted("w_init", want, f"{type(given).__name__} {given!r}"))
    return default if given is None else given


def _expanded_to_rank(x: Float[Array, "..."], rank: int) -> Float[Array, "..."]:
    """The same values with leading axes of size 1, so that sums work under jax's strict rank
    promotion."""
    return x if x.ndim == rank else jax.lax.expand_dims(x, range(rank - x.ndim))


def _fusion_barrier(rows: Float[Array, "t d"]) -> Float[Array, "t d"]:
    """The same rows; on a CPU, a gather keeps XLA from fusing their computation into the sum and
    repeating it for each batch row."""
    if _named_axes(rows):
        return rows
    return jax.lax.platform_dependent(rows, cpu=_identity_gather, default=lambda rows: rows)


def _identity_gather(rows: Float[Array, "t d"]) -> Float[Array, "t d"]:
    return jnp.take(rows, jnp.arange(rows.shape[0], dtype=jnp.int32), axis=0, mode="clip")


def _named_axes(x: Array) -> tuple[str, ...]:
    return tuple(axis for axis in jax.typeof(x).sharding.spec if axis is not None)


def _apply_dropout(x: Float[Array, "..."], rate: float, is_training: bool) -> Float[Array, "..."]:
    if not is_training or rate == 0:
        return x
    rng = hk.maybe_next_rng_key()
    if rng is None:
        raise ValueError(
            arguments.wanted(
                "rng", "a key, to train with dropout (pass is_training=False to evaluate)", "None"
            )
        )
    return dropout(rng, rate, x)


def _at_least_float32(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """In float32 or wider. (`jnp.promote_types` refuses 16 bits under jax's strict dtype
    promotion.)"""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
