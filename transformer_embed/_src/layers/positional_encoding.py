"""Position encodings added to embeddings, then dropout."""

import haiku as hk
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, DTypeLike
from transformer_embed._src.layers.embed import add_encoding, apply_dropout, encode
from transformer_embed._src.layers.module_parameters import (
    Initializer,
    Leaves,
    as_initializer,
    dropout_key,
    table_parameter,
)
from transformer_embed._src.positions.schemes import PositionScheme
from transformer_embed._src.tokens.lookup import OUT_OF_RANGE


class PositionalEncoding(hk.Module):
    """Adds the encodings of positions to embeddings, then applies dropout.

    Sinusoidal encodings have no parameters. Learned ones are the parameter `embeddings`, [max_len,
    d_model].

    Args:
        scheme: `Sinusoidal(...)`, `SinusoidalGrid(...)`, `Learned(max_len=...)`, or another
            `PositionScheme`.
        d_model: channels, at least 1.
        dropout_rate: in [0, 1).
        out_of_range: `"nan"`, `"clip"` or `"zero"`, for positions outside the table of learned
            ones; see `lookup`. (A length beyond the table is an error, because it is known while
            tracing.)
        w_init: initialiser of learned positions. None: normal with standard deviation 0.02, as in
            BERT and GPT-2. (`TransformerEmbedding` draws them as its config says.)
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
        scheme: PositionScheme,
        d_model: int,
        *,
        dropout_rate: float = 0.0,
        out_of_range: str = "nan",
        w_init: Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        name: str | None = None,
    ):
        # First, since the name of the module depends on it.
        want = "a PositionScheme, such as te.Sinusoidal()"
        arguments.instance("scheme", scheme, PositionScheme, want)
        usual = "learned_positional_encoding" if scheme.is_learned else "positional_encoding"
        super().__init__(name=name or usual)
        if not scheme.is_learned:
            arguments.check_left_out("w_init", w_init, "the scheme has no parameters")
        self.scheme = scheme
        self.d_model = arguments.size("d_model", d_model)
        scheme.check(self.d_model)
        self.dropout_rate = arguments.rate("dropout_rate", dropout_rate)
        self.out_of_range = arguments.choice("out_of_range", out_of_range, OUT_OF_RANGE)
        param_dtype = arguments.floating_dtype("param_dtype", param_dtype)
        self._leaves = None
        if scheme.is_learned:
            positions = table_parameter(scheme.max_len, self.d_model, param_dtype, 0.02)
            init = as_initializer(w_init, positions.init)
            self._leaves = Leaves({"embeddings": positions._replace(init=init)})

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
        x = arguments.as_floats("x", x)
        is_right = x.ndim > 1 and x.shape[-1] == self.d_model
        want = f"[..., length, d_model = {self.d_model}]"
        arguments.check_shape("x", x.shape, is_right, want)
        if positions is None:
            if (self.scheme.pad_id, self.scheme.at_padding) != (None, None):
                want = "an array, since x does not show what is padding"
                raise arguments.value_error("positions", want, "None")
            positions = self.scheme.positions(x[..., 0])
        total = add_encoding(x, self.encoding(positions), "x's tokens").astype(x.dtype)
        rng = dropout_key(is_training, self.dropout_rate)
        return apply_dropout(total, self.dropout_rate, is_training, rng)

    def encoding(self, positions: ArrayLike) -> Float[Array, "... d"]:
        """The encodings [..., d_model] of positions [...], in float32 or wider."""
        return encode(self.scheme, self._leaves, positions, self.d_model, self.out_of_range)
