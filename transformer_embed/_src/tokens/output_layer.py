"""Multiplies x with every row of a table, such as the embedding table: the output layer."""

import dataclasses
import functools
from typing import Any, NamedTuple

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
    """Holds an output layer, which multiplies hidden vectors with every table row to get logits.

    An `OutputLayer` holds your table, a bias and the settings. Pass it to the losses and to
    `linear_logits`. If the output layer is tied to the embeddings, pass the embedding table. If you
    have an `Embedder`, a `TokenEmbedding` or a `TransformerEmbedding`, call the method `output` of
    this object instead.

    With `u = scale * (x @ table.T + bias)`, the logits are u, or `softcap * tanh(u / softcap)`.

    The layer is a pytree whose leaves are the table and the bias. So you can pass it through
    `jax.jit`, `jax.vmap` and `jax.lax.scan`, and the gradient is an `OutputLayer` again.

    Args:
        table: The vectors of the ids, of a floating dtype. Shape [vocab_size, d], or [d,
            vocab_size] if you set `vocab_axis=1`.
        bias: A number for each id, of a floating dtype. Shape [vocab_size]. It is added before the
            softcap. Write -inf to ban an id: the logit is then -inf, even with a softcap. If None,
            there is no bias.
        softcap: The limit of the logits: the logits of all ids except padding and banned ids are
            between -softcap and softcap. A Python number above 0, such as 30 for Gemma 2. If None,
            there is no limit.
        scale: The factor of the logits, a Python number above 0, such as `d**-0.5` for T5.
        pad_id: The id of padding, which is never predicted. The logit of this id is half of the
            lowest finite number of its dtype, about -1.7e38 in float32. So the probability is 0,
            and the row and the bias of the id get no gradient. The id may be outside the
            vocabulary. If None, there is no padding.
        vocab_size: The number of ids. Set it if the table has more rows than ids, for example
            50,304 rows for 50,257 ids, so that devices get equal parts. The extra rows, at the end,
            are never predicted. If None, every row is an id.
        vocab_axis: Which axis of the table is the axis of ids, 0 or 1. Set it to 1 to use the `w`
            of an `hk.Linear`, [d, vocab_size], as it is. The gradient has the shape of the table,
            and no transposed copy is made.

    Raises:
        TypeError: `table` or `bias` does not have a floating dtype of 16 bits or more. `softcap` or
            `scale` is not a Python number.
        ValueError: `table` does not have rank 2, or `bias` does not have one number for each table
            row. `softcap` or `scale` is not above 0. `vocab_size` is below 1 or above the number of
            table rows. `vocab_axis` is neither 0 nor 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> output = te.OutputLayer(jnp.array([[0.5], [1.0]]), pad_id=0)
        >>> te.linear_cross_entropy(jnp.ones([3, 1]), output, [1, 1, 0]).tolist()  # 0 is padding
        0.0
        >>> jax.grad(lambda output: te.linear_logits([2.0], output)[1])(output).table.tolist()
        [[0.0], [2.0]]

        >>> w, b = jnp.array([[0.5, 1.0]]), jnp.array([0.0, 3.0])  # the parameters of an hk.Linear
        >>> te.linear_logits([2.0], te.OutputLayer(w, b, vocab_axis=1)).tolist()
        [1.0, 5.0]

    Source:
        Tied output layers are from Press and Wolf, "Using the Output Embedding to Improve Language
        Models" (2017), https://arxiv.org/abs/1608.05859. Transformers with a tied output layer are
        from Vaswani et al., "Attention Is All You Need" (2017), section 3.4,
        https://arxiv.org/abs/1706.03762. The softcap is from "Gemma 2" (2024), section 2,
        https://arxiv.org/abs/2408.00118
    """

    table: Any
    bias: Any = None
    _: dataclasses.KW_ONLY
    softcap: float | None = None
    scale: float = 1.0
    pad_id: int | None = None
    vocab_size: int | None = None
    vocab_axis: int = 0

    def __post_init__(self):
        """Converts and checks the fields."""
        arguments.convert_fields(
            self,
            table=_as_whole_table,
            bias=arguments.as_floats,
            softcap=arguments.positive,
            scale=arguments.positive,
            pad_id=arguments.int32,
            vocab_axis=functools.partial(arguments.integer, at_least=0, at_most=1),
        )
        as_vocab_size = functools.partial(arguments.integer, at_least=1, at_most=self.row_count)
        arguments.convert_fields(self, vocab_size=as_vocab_size)
        if self.bias is not None:
            bias_shape = (self.row_count,)
            arguments.check_same("bias", "a number for each row", self.bias.shape, bias_shape)

    @property
    def row_count(self) -> Any:
        """The number of rows of the table, as many as `vocab_size` or more."""
        return self.table.shape[self.vocab_axis]

    @property
    def size(self) -> Any:
        """The number of ids."""
        return self.row_count if self.vocab_size is None else self.vocab_size


register_pytree(OutputLayer, "softcap", "scale", "pad_id", "vocab_size", "vocab_axis")


def _as_whole_table(name: str, table: ArrayLike) -> TableArray:
    """Converts a table, and raises an error for a `StandIn`, which holds only some of the rows."""
    table_or_stand_in = as_table(name, table)
    if isinstance(table_or_stand_in, StandIn):
        want = "a whole table, trained densely, since the output layer is tied to it"
        raise arguments.type_error(name, want, f"some of the rows of {table_or_stand_in.name}")
    return table_or_stand_in


def linear_logits(
    x: ArrayLike,
    output: OutputLayer | ArrayLike,
    *,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Float[Array, "... v"]:
    """Computes the logits of an output layer.

    Use it if you need the logits of all ids, for example to sample. To train, use
    `linear_cross_entropy`, which holds the logits of only a part of a large batch at a time.

    Args:
        x: The hidden vectors, of a floating dtype. Shape [..., d].
        output: The output layer. Pass an `OutputLayer`, for example from `Embedder.output`, or the
            table [vocab_size, d] of a layer that has only a table.
        out_sharding: How explicit mesh axes split the logits, as in `jnp.einsum`. If None, the
            vocabulary is split over all mesh axes that split the table. For example, for a table
            split as `P("x", "y")`, the vocabulary is split over ("x", "y"). The other dimensions of
            the logits, which are the tokens, are split like x. But a mesh axis that splits the
            table does not split the tokens.

    Returns:
        The logits, in float32, or in float64 if x or the table is float64. Shape [..., number of
        table rows]. The products are also summed in this dtype.

    Raises:
        TypeError: `x` does not have a floating dtype of 16 bits or more, or `out_sharding` is not a
            sharding that `jnp.einsum` takes.
        ValueError: The width of the table differs from the width of x. The columns of the table are
            split over n devices, and n does not divide the number of rows. (To compute logits, each
            of these devices takes 1/n of the rows, with all columns. A config with `row_multiple=n`
            makes the number of rows a multiple of n.)

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
    sharding_types = NamedSharding | PartitionSpec | None
    arguments.instance("out_sharding", out_sharding, sharding_types, want)
    pair = as_output_layer(x, output)
    logits = _logits(pair.x, pair.output)
    return logits if out_sharding is None else jax.sharding.reshard(logits, out_sharding)


class Pair(NamedTuple):
    """Holds hidden vectors, and the output layer for them."""

    x: Array
    output: OutputLayer


def as_output_layer(x: ArrayLike, output: OutputLayer | ArrayLike, prefix: str = "") -> Pair:
    """Checks and converts x and an output layer, or a table in place of the layer.

    In errors, the names of the arguments are `x` and `output`, after the prefix.
    """
    x = arguments.as_floats(f"{prefix}x", x)
    if isinstance(output, OutputLayer):
        # The layer is a pytree, so `jax.tree.map` may have replaced its arrays without a check. A
        # new layer of the same fields checks them.
        output = OutputLayer(**vars(output))
    elif callable(getattr(output, "output", None)):
        got = type(output).__name__
        raise arguments.type_error(f"{prefix}output", "the result of its method `output()`", got)
    else:
        output = OutputLayer(as_table(f"{prefix}output", output))
    width = output.table.shape[1 - output.vocab_axis]
    want = "a last axis of the width d of the table [vocab_size, d]"
    # The width of x is the first size of the table, where a table [vocab_size, d] has the last.
    looks_transposed = x.shape[-1:] == output.table.shape[:1]
    if output.vocab_axis == 1:
        want = "a last axis of the width d of the table [d, vocab_size]"
    elif looks_transposed:
        want += " (te.OutputLayer takes [d, vocab_size] with vocab_axis=1)"
    arguments.check_same(f"{prefix}x", want, x.shape[-1:], (width,))
    return Pair(x=x, output=output)


@compiled()
def _logits(x: Float[Array, "... d"], output: OutputLayer) -> Float[Array, "... v"]:
    """Computes `linear_logits` of checked arguments."""
    # The arrays x, table and bias, split over the mesh, and how they are split.
    layer = split_output(x, output)
    split = layer.split

    def logits_of_device(layer):
        """Computes the logits of this device's tokens for this device's table rows."""
        # If the columns of the table are split, the devices exchange parts of rows for whole rows.
        whole_rows = split.to_whole_rows(layer.table)
        row_layer = dataclasses.replace(layer, table=whole_rows)
        # The logits come as a factor, the scale or the softcap, and an array without the factor.
        result = row_logits(row_layer)
        logits = result.factor * result.unscaled
        # The logit of padding is half of the lowest number, so that it does not overflow to -inf if
        # a user adds a bias to it.
        padding_logit = jnp.finfo(logits.dtype).min / 2
        return jnp.where(result.is_inside, logits, padding_logit)

    logits_spec = PartitionSpec(*split.token_axes, split.vocabulary_mesh_axes)
    compute_on_each_device = on_each_device(
        split.mesh, logits_of_device, in_specs=(split.specs(),), out_specs=logits_spec
    )
    return compute_on_each_device(layer)
