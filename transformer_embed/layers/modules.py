"""Haiku modules: they own parameters, take a key, and call the pure functions."""

import functools
import math
import numbers
from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from transformer_embed import _checks
from transformer_embed.functional.bias import relative_position_buckets
from transformer_embed.functional.dropout import dropout
from transformer_embed.functional.lookup import LOOKUP_STYLES, OUT_OF_RANGE, Table, lookup, tied_logits
from transformer_embed.layers.schemes import Learned, Scheme, Sinusoidal


class TokenEmbedding(hk.Module):
    """Embeds token ids: rows of a table times sqrt(d_model), and the output layer tied to it.

    The table is the parameter `embeddings`, [vocab_size, d_model], as in hk.Embed, so that module's checkpoints load.

    Args:
        vocab_size: number of rows, at least 1.
        d_model: width of a row, at least 1.
        scale: True multiplies rows by sqrt(d_model), False by 1, and a number above 0 by that number (Granite's multiplier); in
            float32, so that the factor is never rounded to 16 bits.
        pad_id: the id of padding: zeros, no gradient, whatever the initialiser, weight decay or the output layer do. May lie
            outside the vocabulary. None: no padding.
        out_of_range: `"nan"`, `"clip"` or `"zero"`; see `lookup`.
        lookup_style: `"gather"` or `"one_hot"`; see `lookup`.
        w_init: initialiser of the table. None: normal, such that the module's outputs have unit variance.
        param_dtype: of the table.
        dtype: of the result.
        name: of the module.

    Raises:
        TypeError: an argument of another type.
        ValueError: a size below 1, an unknown out_of_range or lookup_style.

    Example:
        >>> import haiku as hk, jax
        >>> import transformer_embed as te
        >>> embed = hk.without_apply_rng(hk.transform(lambda ids: te.TokenEmbedding(100, 64)(ids)))
        >>> params = embed.init(jax.random.key(0), [[1, 2, 3]])
        >>> embed.apply(params, [[1, 2, 3]]).shape
        (1, 3, 64)

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.4, https://arxiv.org/abs/1706.03762
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
        w_init: hk.initializers.Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike = jnp.float32,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.vocab_size = _checks.integer("vocab_size", vocab_size, at_least=1)
        self.d_model = _checks.integer("d_model", d_model, at_least=1)
        self.pad_id = pad_id if pad_id is None else _checks.int32("pad_id", pad_id)
        self.out_of_range = _checks.choice("out_of_range", out_of_range, OUT_OF_RANGE)
        self.lookup_style = _checks.choice("lookup_style", lookup_style, LOOKUP_STYLES)
        self.param_dtype = _checks.floating_dtype("param_dtype", param_dtype)
        self.dtype = _checks.floating_dtype("dtype", dtype)
        scale = checked_scale(scale)
        self.factor = math.sqrt(d_model) if scale is True else scale or 1.0
        self.w_init = w_init or hk.initializers.RandomNormal(stddev=1 / self.factor)

    def __call__(self, ids: ArrayLike) -> Float[Array, "... d"]:
        """Embeds ids [...], integers, as [..., d_model] of `dtype`."""
        rows = lookup(self._table(), ids, pad_id=self.pad_id, out_of_range=self.out_of_range, lookup_style=self.lookup_style)
        return (_wide(rows) * self.factor).astype(self.dtype)

    def logits(self, x: ArrayLike) -> Float[Array, "... v"]:
        """The output layer tied to the table: x [..., d_model] times its rows, not scaled; float32 [..., vocab_size]. See `tied_logits`."""
        return tied_logits(x, self._table(), pad_id=self.pad_id)

    def _table(self) -> Float[Array, "v d"] | Table:
        return hk.get_parameter("embeddings", [self.vocab_size, self.d_model], self.param_dtype, self.w_init)


def checked_scale(scale: bool | float) -> bool | float:
    """A bool, or a number above 0.

    1.0 becomes False: as an equal of True it would share True's compiled functions. The ints 0 and 1 could mean either: refused.
    """
    is_number = isinstance(scale, numbers.Real | np.floating) and not isinstance(scale, bool | np.bool_)
    if not is_number or (isinstance(scale, numbers.Integral) and scale in (0, 1)):
        return _checks.flag("scale", scale)
    return False if scale == 1 else _checks.real("scale", scale, above=0)


class PositionalEncoding(hk.Module):
    """Adds sinusoidal encodings to embeddings, then drops out. It has no parameter and no longest position.

    Args:
        d_model: channels, at least 1.
        dropout_rate: in [0, 1).
        base: as in `sinusoidal_encoding`, as are the next ones.
        layout: as above.
        shift: as above.
        odd: as above.
        frequency_scale: as above.
        name: of the module.

    Raises:
        TypeError: an argument of another type.
        ValueError: as `sinusoidal_encoding`; a rate outside [0, 1).

    Example:
        >>> import haiku as hk, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> encode = hk.transform(lambda x: te.PositionalEncoding(8)(x, is_training=False))
        >>> encode.apply({}, None, jnp.zeros([2, 5, 8])).shape
        (2, 5, 8)

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), sections 3.5 and 5.4, https://arxiv.org/abs/1706.03762
    """

    def __init__(
        self,
        d_model: int,
        *,
        dropout_rate: float = 0.1,
        base: float = 10_000.0,
        layout: str = "interleaved",
        shift: float | None = None,
        odd: str = "truncate",
        frequency_scale: float = 1.0,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.scheme = Sinusoidal(base, layout, shift, odd, frequency_scale)
        self.scheme.check(d_model)
        self.d_model = d_model
        self.dropout_rate = float(_checks.rate("dropout_rate", dropout_rate))

    def __call__(self, x: ArrayLike, *, is_training: bool, positions: ArrayLike | None = None) -> Float[Array, "... t d"]:
        """Adds the encodings in float32, rounds once to x's dtype, then drops out where training.

        Args:
            x: [..., length, d_model], a floating dtype.
            is_training: a Python bool. True needs a key, unless dropout_rate is 0; False draws none.
            positions: [length], or more axes that broadcast to x's leading ones; None: 0..length-1.

        Returns:
            [..., length, d_model] of x's dtype.
        """
        return _add_encoding(self, x, is_training, positions)

    def encoding(self, positions: ArrayLike) -> Float[Array, "... d"]:
        """The float32 encoding [..., d_model] of positions [...]."""
        return self.scheme.encoding(positions, self.d_model)


class LearnedPositionalEncoding(hk.Module):
    """Adds a learned vector for each position to embeddings, then drops out.

    The vectors are the parameter `embeddings`, [max_len, d_model].

    Args:
        max_len: number of positions, at least 1.
        d_model: channels, at least 1.
        dropout_rate: in [0, 1).
        out_of_range: what a position outside [0, max_len) gives: `"nan"`, `"clip"` or `"zero"`; see `lookup`. (A *length* past
            max_len is known while tracing: that is an error.)
        w_init: initialiser of the table. None: normal with standard deviation 0.02, as BERT's and GPT-2's.
        param_dtype: of the table.
        name: of the module.

    Raises:
        TypeError: an argument of another type.
        ValueError: a size below 1, a rate outside [0, 1), an unknown out_of_range; when called, a length past max_len.

    Example:
        >>> import haiku as hk, jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> encode = hk.transform(lambda x: te.LearnedPositionalEncoding(512, 8)(x, is_training=False))
        >>> params = encode.init(jax.random.key(0), jnp.zeros([2, 5, 8]))
        >>> encode.apply(params, None, jnp.zeros([2, 5, 8])).shape
        (2, 5, 8)

    Source:
        Gehring et al., "Convolutional Sequence to Sequence Learning" (2017), section 3.1, https://arxiv.org/abs/1705.03122
    """

    def __init__(
        self,
        max_len: int,
        d_model: int,
        *,
        dropout_rate: float = 0.1,
        out_of_range: str = "nan",
        w_init: hk.initializers.Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.scheme = Learned(max_len)
        self.d_model = _checks.integer("d_model", d_model, at_least=1)
        self.dropout_rate = float(_checks.rate("dropout_rate", dropout_rate))
        self.out_of_range = _checks.choice("out_of_range", out_of_range, OUT_OF_RANGE)
        self.w_init = w_init or hk.initializers.RandomNormal(stddev=0.02)
        self.param_dtype = _checks.floating_dtype("param_dtype", param_dtype)

    def __call__(self, x: ArrayLike, *, is_training: bool, positions: ArrayLike | None = None) -> Float[Array, "... t d"]:
        """Adds the vectors in float32, rounds once to x's dtype, then drops out where training.

        Args:
            x: [..., length, d_model], a floating dtype.
            is_training: a Python bool. True needs a key, unless dropout_rate is 0; False draws none.
            positions: [length], or more axes that broadcast to x's leading ones, integers; None: 0..length-1.

        Returns:
            [..., length, d_model] of x's dtype.
        """
        return _add_encoding(self, x, is_training, positions)

    def encoding(self, positions: ArrayLike) -> Float[Array, "... d"]:
        """The vectors [..., d_model] of positions [...], in float32 or wider."""
        table = hk.get_parameter("embeddings", [self.scheme.max_len, self.d_model], self.param_dtype, self.w_init)
        return _wide(lookup(table, _checks.as_int32("positions", positions), out_of_range=self.out_of_range))


class RelativePositionBias(hk.Module):
    """T5's learned bias: a number for each head and each bucket of distance, added to attention logits.

    The numbers are the parameter `embeddings`, [num_buckets, num_heads], as in transformers; T5X's is its transpose. T5 has one
    module for all layers of a stack, and adds the bias to logits that are not divided by sqrt(head_dim).

    Args:
        num_heads: at least 1.
        num_buckets: as in `relative_position_buckets`.
        max_distance: as in `relative_position_buckets`.
        bidirectional: True in an encoder, False in a causal decoder; see `relative_position_buckets`.
        w_init: initialiser of the table. None: uniform with variance 1 / fan_avg, as in T5X.
        param_dtype: of the table.
        dtype: of the result.
        name: of the module.

    Raises:
        TypeError: an argument of another type.
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
        w_init: hk.initializers.Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike = jnp.float32,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.num_heads = _checks.integer("num_heads", num_heads, at_least=1)
        self.num_buckets = _checks.integer("num_buckets", num_buckets, at_least=1)
        self.max_distance = _checks.integer("max_distance", max_distance, at_least=1)
        self.bidirectional = _checks.flag("bidirectional", bidirectional)
        self.w_init = w_init or hk.initializers.VarianceScaling(1.0, "fan_avg", "uniform")
        self.param_dtype = _checks.floating_dtype("param_dtype", param_dtype)
        self.dtype = _checks.floating_dtype("dtype", dtype)

    def __call__(self, query_positions: ArrayLike, key_positions: ArrayLike) -> Float[Array, "b h t s"]:
        """The bias [B or 1, num_heads, T, S] of `dtype`, for positions [T] or [B, T] and [S] or [B, S]."""
        buckets = relative_position_buckets(
            query_positions,
            key_positions,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        table = hk.get_parameter("embeddings", [self.num_buckets, self.num_heads], self.param_dtype, self.w_init)
        # A bucket is never out of range, and "clip" does not look.
        return jnp.moveaxis(lookup(table, buckets, out_of_range="clip").astype(self.dtype), -1, 1)


class TransformerEmbedding(hk.Module):
    """The input layer of a Transformer: tokens + positions (+ token types), a norm if asked for, dropout.

    All is summed and normalised in float32, rounded once to `dtype`, then dropped out; last, where the embeddings are
    narrower than d_model, a linear layer widens them.

    Args:
        vocab_size: number of token ids, at least 1.
        d_model: width of the result, at least 1.
        positions: `Sinusoidal(...)`, `SinusoidalGrid(...)`, `Learned(max_len=...)`, or None: no positions are added.
        dropout_rate: in [0, 1).
        pad_id: the id of padding; see `TokenEmbedding`. Positions are added at padding too: the mask hides it.
        scale: True multiplies token rows by the square root of their width, False by 1, and a number above 0 by that number.
        num_token_types: number of token types (BERT's segments A and B: 2); None: the model has none.
        layer_norm_eps: epsilon of a layer norm over the sum (BERT: 1e-12); None: no norm.
        embedding_width: width of the tables, where it is not d_model (ALBERT); None: d_model.
        out_of_range: `"nan"`, `"clip"` or `"zero"`, for ids, token types and learned positions; see `lookup`.
        lookup_style: `"gather"` or `"one_hot"`, for ids and token types; see `lookup`.
        param_dtype: of the tables and of the linear layer.
        dtype: of the result.
        name: of the module.

    Raises:
        TypeError: an argument of another type.
        ValueError: an argument out of its range.

    Example:
        >>> import haiku as hk, jax
        >>> import transformer_embed as te
        >>> embed = hk.transform(lambda ids: te.TransformerEmbedding(100, 64, pad_id=0)(ids, is_training=False))
        >>> params = embed.init(jax.random.key(0), [[1, 2, 0]])
        >>> embed.apply(params, None, [[1, 2, 0]]).shape
        (1, 3, 64)

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), sections 3.4, 3.5 and 5.4, https://arxiv.org/abs/1706.03762. Token
        types and norm: Devlin et al., "BERT" (2019), section 3, https://arxiv.org/abs/1810.04805. The narrower tables: Lan et
        al., "ALBERT" (2020), section 3.1, https://arxiv.org/abs/1909.11942
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        positions: Scheme | None = Sinusoidal(),
        dropout_rate: float = 0.1,
        pad_id: int | None = None,
        scale: bool | float = True,
        num_token_types: int | None = None,
        layer_norm_eps: float | None = None,
        embedding_width: int | None = None,
        out_of_range: str = "nan",
        lookup_style: str = "gather",
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike = jnp.float32,
        name: str | None = None,
    ):
        super().__init__(name=name)
        check_embedding_options(d_model, positions, dropout_rate, num_token_types, layer_norm_eps, embedding_width)
        width = d_model if embedding_width is None else embedding_width
        self.dropout_rate = float(dropout_rate)
        self.dtype = _checks.floating_dtype("dtype", dtype)
        self.param_dtype = _checks.floating_dtype("param_dtype", param_dtype)
        wide = jnp.promote_types(jnp.float32, dtype)
        table = functools.partial(TokenEmbedding, out_of_range=out_of_range, lookup_style=lookup_style, param_dtype=param_dtype, dtype=wide)
        self.tokens = table(vocab_size, width, scale=scale, pad_id=pad_id)
        self.scheme = positions
        if isinstance(positions, Learned):
            learned = LearnedPositionalEncoding(positions.max_len, width, out_of_range=out_of_range, param_dtype=param_dtype)
            self.encoding = learned.encoding
        elif positions is not None:
            self.encoding = functools.partial(positions.encoding, d_model=width)
        self.token_types = None
        if num_token_types is not None:
            w_init = hk.initializers.RandomNormal(stddev=0.02)
            self.token_types = table(num_token_types, width, scale=False, w_init=w_init, name="token_type_embedding")
        self.norm = None if layer_norm_eps is None else hk.LayerNorm(-1, True, True, eps=layer_norm_eps)
        self.widen = None if embedding_width is None else hk.Linear(d_model, name="widen")

    def __call__(
        self, ids: ArrayLike, *, is_training: bool, positions: ArrayLike | None = None, token_types: ArrayLike | None = None
    ) -> Float[Array, "... t d"]:
        """Embeds ids.

        Args:
            ids: [..., length], any integer dtype.
            is_training: a Python bool. True needs a key, unless dropout_rate is 0; False draws none.
            positions: [length], or more axes that broadcast to the ids'; integers, or float32 where they are sinusoidal.
                None: 0..length-1, or what the scheme's start and at_padding say.
            token_types: integers, [length], or more axes that broadcast to the ids'; wanted exactly where num_token_types is set.

        Returns:
            [..., length, d_model] of `dtype`.
        """
        _checks.flag("is_training", is_training)
        ids = _checks.as_int32("ids", ids)
        if ids.ndim == 0:
            raise ValueError(_checks.wanted("ids", "shape [..., length]", "shape []"))
        total = self.tokens(ids)
        if self.scheme is None:
            _checks.unwanted("positions", positions, "the model adds no positions")
        else:
            if positions is None:
                positions = self.scheme.positions(ids)
            total = total + _encoding(self.encoding, positions, ids.shape)
        if self.token_types is None:
            _checks.unwanted("token_types", token_types, "num_token_types is not set")
        elif token_types is None:
            raise ValueError(_checks.wanted("token_types", "an array, since num_token_types is set", "None"))
        else:
            types = _checks.as_int32("token_types", token_types)
            _checks.ends_in_length("token_types", types.shape, ids.shape)
            total = total + self.token_types(types)
        if self.norm is not None:
            total = self.norm(total)
        total = _dropped_out(total.astype(self.dtype), self.dropout_rate, is_training)
        return total if self.widen is None else self.widen(total.astype(self.param_dtype)).astype(self.dtype)

    def logits(self, x: ArrayLike) -> Float[Array, "... v"]:
        """The output layer tied to the token table; x is as wide as the table. See `tied_logits`."""
        return self.tokens.logits(x)


def check_embedding_options(
    d_model: int,
    positions: Scheme | None,
    dropout_rate: float,
    num_token_types: int | None,
    layer_norm_eps: float | None,
    embedding_width: int | None,
) -> None:
    """Raises on what the parts of `TransformerEmbedding` do not check themselves."""
    _checks.integer("d_model", d_model, at_least=1)
    if positions is not None and not isinstance(positions, Scheme):
        raise TypeError(_checks.wanted("positions", "Sinusoidal(...), SinusoidalGrid(...), Learned(max_len=...) or None", repr(positions)))
    if embedding_width is not None:
        _checks.integer("embedding_width", embedding_width, at_least=1)
    if positions is not None:
        positions.check(embedding_width or d_model)
    _checks.rate("dropout_rate", dropout_rate)
    if num_token_types is not None:
        _checks.integer("num_token_types", num_token_types, at_least=1)
    if layer_norm_eps is not None:
        _checks.real("layer_norm_eps", layer_norm_eps, above=0)


def _add_encoding(
    module: PositionalEncoding | LearnedPositionalEncoding, x: ArrayLike, is_training: bool, positions: ArrayLike | None
) -> Float[Array, "... t d"]:
    _checks.flag("is_training", is_training)
    x = _checks.as_floats("x", x)
    if x.ndim < 2 or x.shape[-1] != module.d_model:
        raise ValueError(_checks.wanted("x", f"shape [..., length, d_model = {module.d_model}]", f"shape {list(x.shape)}"))
    if positions is None:
        positions = module.scheme.count(x.shape[-2])
    total = _wide(x) + _encoding(module.encoding, positions, x.shape[:-1])
    return _dropped_out(total.astype(x.dtype), module.dropout_rate, is_training)


def _encoding(encode: Callable[[ArrayLike], Array], positions: ArrayLike, shape: tuple[int, ...]) -> Float[Array, "... d"]:
    positions = _checks.as_array("positions", positions)
    _checks.ends_in_length("positions", positions.shape, shape)
    encoding = encode(positions)
    one_row_for_many = positions.ndim == 1 and any(size != 1 for size in shape[:-1])
    return _computed_once(encoding) if one_row_for_many else encoding


def _computed_once(rows: Float[Array, "t d"]) -> Float[Array, "t d"]:
    """The same rows, gathered where XLA, on a CPU, would fuse their computation into the sum and repeat it for each batch row."""
    if _named_axes(rows):
        return rows
    return jax.lax.platform_dependent(rows, cpu=_gathered, default=lambda rows: rows)


def _gathered(rows: Float[Array, "t d"]) -> Float[Array, "t d"]:
    return jnp.take(rows, jnp.arange(rows.shape[0], dtype=jnp.int32), axis=0, mode="clip")


def _named_axes(x: Array) -> tuple[str, ...]:
    return tuple(axis for axis in jax.typeof(x).sharding.spec if axis is not None)


def _dropped_out(x: Float[Array, "..."], rate: float, is_training: bool) -> Float[Array, "..."]:
    if not is_training or rate == 0:
        return x
    rng = hk.maybe_next_rng_key()
    if rng is None:
        raise ValueError(_checks.wanted("rng", "a key, to train with dropout (pass is_training=False to evaluate)", "None"))
    return dropout(rng, rate, x)


def _wide(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return x.astype(jnp.promote_types(jnp.float32, x.dtype))
