"""Adds position encodings to embeddings, then applies dropout."""

import haiku as hk
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, DTypeLike
from transformer_embed._src.layers.embed import add_encoding, apply_dropout, encode_positions
from transformer_embed._src.layers.module_parameters import (
    Initializer,
    ModuleParameters,
    as_initializer,
    dropout_key,
    table_parameter,
)
from transformer_embed._src.positions.schemes import PositionScheme
from transformer_embed._src.tokens.lookup import OUT_OF_RANGE


class PositionalEncoding(hk.Module):
    """Adds the encodings of positions to embeddings, then applies dropout.

    Use the module in a model that computes the token vectors without this package. If you need the
    encodings alone, not added to embeddings, call the method `encoding` of the module. With learned
    positions, the module has the parameter `embeddings`, [max_len, d_model]. With sinusoids, it has
    no parameters.

    Args:
        scheme: How positions are encoded. Pass `Sinusoidal(...)`, `SinusoidalGrid(...)`,
            `Learned(max_len=...)`, or a `PositionScheme` of your own.
        d_model: The number of channels, at least 1.
        dropout_rate: The rate of dropout, in [0, 1).
        out_of_range: What you get for a learned position outside the table: `"nan"`, `"clip"` or
            `"zero"`. See `lookup`. (If you pass no positions, a length beyond the table is an
            error, because the length is known while tracing.)
        w_init: The initializer of learned positions. If None, the initial values are normal numbers
            with standard deviation 0.02, as in BERT and GPT-2. (In `TransformerEmbedding`, the
            config says the standard deviation.)
        param_dtype: The dtype of learned positions.
        name: The name of the module. If None, it is `learned_positional_encoding` or
            `positional_encoding`.

    Raises:
        ValueError: An argument is out of range, or `w_init` is passed for a scheme without
            parameters. The module is called without positions, and `x` is longer than the table of
            learned positions, or has more tokens than a `SinusoidalGrid` has points.

    Example:
        >>> import haiku as hk, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> scheme = te.Sinusoidal()
        >>> encode = hk.transform(lambda x: te.PositionalEncoding(scheme, 8)(x, is_training=False))
        >>> encode.apply({}, None, jnp.zeros([2, 5, 8])).shape
        (2, 5, 8)

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), sections 3.5 and 5.4,
        https://arxiv.org/abs/1706.03762. Learned positions are from Gehring et al., "Convolutional
        Sequence to Sequence Learning" (2017), section 3.1, https://arxiv.org/abs/1705.03122
    """

    def __init__(
        self,
        scheme: PositionScheme,
        d_model: int,
        *,
        dropout_rate: float = 0.0,
        out_of_range: str = "nan",
        w_init: Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        name: str | None = None,
    ):
        # The name of the module depends on the scheme, so the scheme is checked first.
        want = "a PositionScheme, such as te.Sinusoidal()"
        arguments.instance("scheme", scheme, PositionScheme, want)
        default_name = "learned_positional_encoding" if scheme.is_learned else "positional_encoding"
        super().__init__(name=name or default_name)
        if not scheme.is_learned:
            arguments.check_left_out("w_init", w_init, "the scheme has no parameters")
        self.scheme = scheme
        self.d_model = arguments.size("d_model", d_model)
        scheme.check(self.d_model)
        self.dropout_rate = arguments.rate("dropout_rate", dropout_rate)
        self.out_of_range = arguments.choice("out_of_range", out_of_range, OUT_OF_RANGE)
        param_dtype = arguments.floating_dtype("param_dtype", param_dtype)
        # What reads the parameter `embeddings`, if there is one.
        self._learned_parameters = None
        if scheme.is_learned:
            table = table_parameter(scheme.max_len, self.d_model, param_dtype, stddev=0.02)
            init = as_initializer(w_init, table.init)
            table = table._replace(init=init)
            self._learned_parameters = ModuleParameters({"embeddings": table})

    def __call__(
        self, x: ArrayLike, *, is_training: bool, positions: ArrayLike | None = None
    ) -> Float[Array, "... t d"]:
        """Adds the encodings in float32, rounds once to the dtype of x, then applies dropout.

        Args:
            x: The token vectors, of a floating dtype. Shape [..., length, d_model].
            is_training: A Python bool. If True, dropout is applied. With a `dropout_rate` above 0,
                the program then needs a random key (`apply(params, key, ...)` of `hk.transform`).
            positions: The positions: integers, or float32 for sinusoids. Shape [length], [batch,
                length], or another shape that broadcasts to the axes [..., length] of `x`. If None,
                positions count from `scheme.start` on. If the scheme has a `pad_id` or
                `at_padding`, you must pass positions, because `x` does not show which tokens are
                padding.

        Returns:
            The sums, of the dtype of `x`. Shape [..., length, d_model].
        """
        x = arguments.as_floats("x", x)
        has_expected_shape = x.ndim > 1 and x.shape[-1] == self.d_model
        want = f"[..., length, d_model = {self.d_model}]"
        arguments.check_shape("x", x.shape, has_expected_shape, want)
        if positions is None:
            depends_on_padding = (
                self.scheme.pad_id is not None or self.scheme.at_padding is not None
            )
            if depends_on_padding:
                want = "an array, since x does not show what is padding"
                raise arguments.value_error("positions", want, "None")
            # Without padding, the scheme reads only the shape of the ids, [..., length]. The first
            # channel of x has this shape.
            positions = self.scheme.positions(x[..., 0])
        encoding = self.encoding(positions)
        wide_total = add_encoding(x, encoding, "x's tokens")
        total = wide_total.astype(x.dtype)
        rng = dropout_key(is_training, self.dropout_rate)
        return apply_dropout(total, self.dropout_rate, is_training, rng)

    def encoding(self, positions: ArrayLike) -> Float[Array, "... d"]:
        """Returns the encodings [..., d_model] of positions [...], in float32 or wider.

        Use it for queries that consist only of positions. For example, a model may predict the
        unknown token at position 7 from known tokens: the query at position 7 has no token vector
        to which the module could add an encoding. Learned encodings are read from the same table as
        in a call of the module.

        Args:
            positions: The positions: integers, or float32 for sinusoids. Any shape [...].

        Example:
            >>> import haiku as hk, jax
            >>> import transformer_embed as te
            >>> def queries_and_keys(x, wanted):
            ...     encode = te.PositionalEncoding(te.Learned(16), d_model=8)
            ...     return encode.encoding(wanted), encode(x, is_training=False)
            >>> model = hk.without_apply_rng(hk.transform(queries_and_keys))
            >>> x = jax.numpy.ones([2, 5, 8])
            >>> params = model.init(jax.random.key(0), x, [5, 6])
            >>> queries, keys = model.apply(params, x, [5, 6])
            >>> queries.shape, keys.shape
            ((2, 8), (2, 5, 8))
        """
        return encode_positions(
            self.scheme, self._learned_parameters, positions, self.d_model, self.out_of_range
        )
