"""The output layer: the product of x with every row of a table, such as the embedding table."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, TableArray
from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import on_each_device
from transformer_embed._src.pytrees import register_pytree
from transformer_embed._src.tables.stand_in import StandIn
from transformer_embed._src.tokens.lookup import as_table
from transformer_embed._src.tokens.output_split import split_output
from transformer_embed._src.tokens.row_logits import row_logits


@dataclasses.dataclass(frozen=True, eq=False)
class OutputLayer:
    """An output layer, whose logits are the product of hidden states with every row of a table.

    With `u = scale * (x @ table.T + bias)`, the logits are u, or `softcap * tanh(u / softcap)`. A
    tied output layer has the embedding table as its table. `Embedder.output`,
    `TokenEmbedding.output` and `TransformerEmbedding.output` make those of a config.

    It is a pytree whose leaves are the table and the bias, so that it goes through `jax.jit`,
    `jax.vmap` and `jax.lax.scan`, and its gradient is an OutputLayer again.

    Args:
        table: [vocab_size, d], a floating dtype.
        bias: [vocab_size], a floating dtype. An id whose bias is -inf is banned: its logit is -inf,
            with a softcap too. None: no bias.
        softcap: a Python number above 0, which no other logit exceeds in magnitude (Gemma 2: 30).
            None: no bound.
        scale: a Python number above 0 (T5: d**-0.5).
        pad_id: the id of padding, which is never predicted: its logit is half of the lowest finite
            number, so its probability is 0, and its row and bias get no gradient. It may be outside
            the vocabulary. None: no padding.
        vocab_size: the number of ids. The rows past it only fill the table up, and are never
            predicted, as padding is. None: the number of rows.

    Raises:
        TypeError: the table or the bias does not have a floating dtype of 16 bits or more; softcap
            or scale is not a Python number.
        ValueError: the table does not have rank 2; the bias does not have one number for each row;
            softcap or scale is not above 0; a vocab_size below 1 or above the number of rows.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> output = te.OutputLayer(jnp.array([[0.5], [1.0]]), pad_id=0)
        >>> te.linear_cross_entropy(jnp.ones([3, 1]), output, [1, 1, 0]).tolist()  # 0 is padding
        0.0
        >>> jax.grad(lambda output: te.linear_logits([2.0], output)[1])(output).table.tolist()
        [[0.0], [2.0]]

    Source:
        Press and Wolf, "Using the Output Embedding to Improve Language Models" (2017),
        https://arxiv.org/abs/1608.05859; Vaswani et al., "Attention Is All You Need" (2017),
        section 3.4, https://arxiv.org/abs/1706.03762. The softcap: "Gemma 2" (2024), section 2,
        https://arxiv.org/abs/2408.00118
    """

    table: Any
    bias: Any = None
    _: dataclasses.KW_ONLY
    softcap: float | None = None
    scale: float = 1.0
    pad_id: int | None = None
    vocab_size: int | None = None

    def __post_init__(self):
        arguments.convert_fields(
            self,
            table=_as_whole_table,
            bias=arguments.as_floats,
            softcap=arguments.positive,
            scale=arguments.positive,
            pad_id=arguments.int32,
        )
        number = functools.partial(arguments.integer, at_least=1, at_most=self.table.shape[0])
        arguments.convert_fields(self, vocab_size=number)
        if self.bias is not None:
            rows = self.table.shape[:1]
            arguments.check_same("bias", "a number for each row", self.bias.shape, rows)

    @property
    def size(self) -> Any:
        """The number of ids."""
        return self.table.shape[0] if self.vocab_size is None else self.vocab_size


register_pytree(OutputLayer, "softcap", "scale", "pad_id", "vocab_size")


def _as_whole_table(name: str, table: ArrayLike) -> TableArray:
    """An array with every row of a table."""
    array = as_table(name, table)
    if isinstance(array, StandIn):
        want = "a whole table, trained densely, since the output layer is tied to it"
        raise arguments.type_error(name, want, f"some of the rows of {array.name}")
    return array


def linear_logits(
    x: ArrayLike,
    output: OutputLayer | ArrayLike,
    *,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Float[Array, "... v"]:
    """The logits of an output layer.

    Args:
        x: [..., d], a floating dtype.
        output: an `OutputLayer`, or the table of one without other settings, [vocab_size, d].
        out_sharding: how explicit mesh axes split the logits, as in `jnp.einsum`. None: the
            vocabulary is split over the axes of the table's rows, then over those of its columns,
            and each dimension of tokens as in x, over the axes that do not split the table.

    Returns:
        [..., rows of the table], summed and returned in float32 (float64 if x or the table is).

    Raises:
        TypeError: x does not have a floating dtype of 16 bits or more; out_sharding is of another
            type.
        ValueError: the width of the table is not that of x; columns are split over devices that do
            not divide the rows.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> te.linear_logits([1.0, 1.0], jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [3.0, 7.0]

        >>> output = te.OutputLayer(jnp.array([[0.5], [1.0]]), pad_id=0)
        >>> jax.nn.softmax(te.linear_logits([-1.0], output)).tolist()
        [0.0, 1.0]
    """
    want = "a PartitionSpec, a NamedSharding, or None"
    kinds = NamedSharding | PartitionSpec | None
    arguments.instance("out_sharding", out_sharding, kinds, want)
    logits = _logits(*as_output_layer(x, output))
    return logits if out_sharding is None else jax.sharding.reshard(logits, out_sharding)


def as_output_layer(
    x: ArrayLike, output: OutputLayer | ArrayLike, prefix: str = ""
) -> tuple[Array, OutputLayer]:
    """The arguments of `linear_logits`, which fit each other; their names have this prefix."""
    x = arguments.as_floats(f"{prefix}x", x)
    if isinstance(output, OutputLayer):
        # Made again, because a tree's leaves may have been replaced by any others.
        output = OutputLayer(**vars(output))
    else:
        output = OutputLayer(as_table(f"{prefix}output", output))
    want = "a last axis of the width d of the table [vocab_size, d]"
    arguments.check_same(f"{prefix}x", want, x.shape[-1:], output.table.shape[1:])
    return x, output


@compiled()
def _logits(x: Float[Array, "... d"], output: OutputLayer) -> Float[Array, "... v"]:
    """`linear_logits` of arrays."""
    layer = split_output(x, output)
    split = layer.split

    def multiply(layer):
        rows = split.exchange(layer.table, 0)
        computed = row_logits(dataclasses.replace(layer, table=rows))
        logits = computed.factor * computed.unscaled
        # Half of the lowest number: a bias on top of it does not overflow to -inf.
        return jnp.where(computed.is_inside, logits, jnp.finfo(logits.dtype).min / 2)

    of_logits = PartitionSpec(*split.tokens, split.vocabulary)
    return on_each_device(split.mesh, multiply, (split.specs(),), of_logits)(layer)
