"""EmbedderConfig -> Embedder(init, apply, logits, cross_entropy): the input layer as compiled
functions."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.functional.lookup import Table
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.modules import Params, TransformerEmbedding
from transformer_embed._src.rows.gathered_rows import RowTable


class ApplyFn(Protocol):
    """The type of `Embedder.apply`."""

    def __call__(
        self,
        params: Params,
        rng: Array | None,
        ids: ArrayLike,
        *,
        is_training: bool,
        positions: ArrayLike | None = None,
        token_types: ArrayLike | None = None,
    ) -> Float[Array, "... t d"]: ...


class CrossEntropyFn(Protocol):
    """The type of `Embedder.cross_entropy`."""

    def __call__(
        self,
        params: Params,
        x: ArrayLike,
        labels: ArrayLike,
        *,
        mask: ArrayLike | None = None,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        chunk_size: int | None = None,
    ) -> Float[Array, ""]: ...


class Embedder(NamedTuple):
    """The four pure functions that `make_embedder` returns.

    Args:
        init: `init(rng) -> params`, a Haiku parameter tree.
        apply: `apply(params, rng, ids, *, is_training, positions=None, token_types=None)` -> [...,
            length, d_model]; compiled once for each shape and value of is_training. To evaluate,
            pass rng=None.
        logits: `logits(params, x)` -> [..., vocab_size]: the output layer tied to the token table.
        cross_entropy: `cross_entropy(params, x, labels, *, mask=None, label_smoothing=0.0,
            reduction="mean", chunk_size=None)` -> the cross-entropy of these logits and the labels,
            computed one chunk of tokens at a time; tokens whose label is `config.pad_id` are not
            counted. See `tied_cross_entropy`.

    Example:
        >>> import transformer_embed as te
        >>> te.Embedder._fields
        ('init', 'apply', 'logits', 'cross_entropy')

    Source:
        The design of optax.GradientTransformation, https://github.com/google-deepmind/optax
    """

    init: Callable[[Array], Params]
    apply: ApplyFn
    logits: Callable[[Params, ArrayLike], Float[Array, "... v"]]
    cross_entropy: CrossEntropyFn


def make_embedder(config: EmbedderConfig) -> Embedder:
    """Makes pure, compiled functions of the input layer that a config describes.

    `apply` takes lists, numpy arrays and jax arrays. It works inside `jax.jit`, `jax.vmap` (bind
    keyword arguments with `functools.partial`: vmap would map them), `jax.grad` and `jax.export`
    (symbolic shapes too; learned positions bound the length). It is traced once for each shape: a
    new offset in `positions` or a new integer dtype does not retrace (except for uint32 positions
    outside int32).

    Args:
        config: the description of the layer.

    Returns:
        Embedder(init, apply, logits, cross_entropy).

    Raises:
        TypeError: config is not an EmbedderConfig. In apply: is_training is traced or not a bool;
            ids are not integers.
        ValueError: in apply: training with dropout and rng=None; positions that do not end in the
            ids' length, or that lie outside int32 (host values); token types missing, or given
            although the config has none.

    Example:
        >>> import jax
        >>> import transformer_embed as te
        >>> embedder = te.make_embedder(te.EmbedderConfig(vocab_size=256, d_model=64, pad_id=0))
        >>> params = embedder.init(jax.random.key(0))
        >>> embedder.apply(params, None, [[5, 6, 0]], is_training=False).shape
        (1, 3, 64)
        >>> x = embedder.apply(params, jax.random.key(1), [[5, 6, 0]], is_training=True)
        >>> embedder.cross_entropy(params, x, labels=[[6, 7, 0]]).shape
        ()

    Source:
        See `TransformerEmbedding`.
    """
    if not isinstance(config, EmbedderConfig):
        raise TypeError(arguments.wanted("config", "an EmbedderConfig", type(config).__name__))

    def init(rng: Array) -> Params:
        """The parameters, drawn with rng."""
        return _init(config, arguments.as_key("rng", rng))

    def apply(params, rng, ids, *, is_training, positions=None, token_types=None):
        """Embeds ids [..., length] as [..., length, d_model]; see `make_embedder`."""
        arguments.params(params)
        if not arguments.flag("is_training", is_training) or config.dropout_rate == 0:
            rng = None
        elif rng is None:
            raise ValueError(
                arguments.wanted(
                    "rng", "a key such as jax.random.key(0), to train with dropout", "None"
                )
            )
        else:
            rng = arguments.as_key("rng", rng)
        return _apply(
            config,
            bool(is_training),
            params,
            rng,
            arguments.as_int32("ids", ids),
            None if positions is None else _canonical_positions(positions),
            None if token_types is None else arguments.as_int32("token_types", token_types),
        )

    def logits(params: Params, x: ArrayLike) -> Float[Array, "... v"]:
        """x [..., width of the table] times the token table's rows; see `tied_logits`."""
        arguments.params(params)
        return _logits(config, params, arguments.as_floats("x", x))

    def cross_entropy(
        params, x, labels, *, mask=None, label_smoothing=0.0, reduction="mean", chunk_size=None
    ):
        """The loss of logits(params, x) for labels [...]; see `tied_cross_entropy`."""
        arguments.params(params)
        options = {
            "mask": mask,
            "label_smoothing": label_smoothing,
            "reduction": reduction,
            "chunk_size": chunk_size,
        }
        return hk.transform(
            lambda: TransformerEmbedding(config).cross_entropy(x, labels, **options)
        ).apply(params, None)

    for function in (init, apply, logits, cross_entropy):
        function.__qualname__ = f"Embedder.{function.__name__}"
    return Embedder(init, apply, logits, cross_entropy)


def resize_vocabulary(params: Params, vocab_size: int, rng: Array | None = None) -> Params:
    """Adds rows to the end of an embedder's token table, or removes rows from its end.

    New rows are drawn from a normal distribution with each channel's mean and standard deviation
    over the old rows. The matching config is `dataclasses.replace(config, vocab_size=...)`.

    Args:
        params: a Haiku parameter tree with one token table, as `Embedder.init` makes. A sharded
            table keeps its sharding; its rows pass through this host, which must have access to all
            shards.
        vocab_size: the new number of rows, at least 1; a smaller number drops the last rows.
        rng: a key; may be None if no row is added.

    Returns:
        The tree, in which only that table is replaced.

    Raises:
        TypeError: vocab_size is not a Python int.
        ValueError: params does not have exactly one token table; rows are added and rng is None.

    Example:
        >>> import jax
        >>> import transformer_embed as te
        >>> embedder = te.make_embedder(te.EmbedderConfig(vocab_size=256, d_model=64))
        >>> params = te.resize_vocabulary(embedder.init(jax.random.key(0)), 300, jax.random.key(1))
        >>> params["transformer_embedding/~/token_embedding"]["embeddings"].shape
        (300, 64)

    Source:
        Hewitt, "Initializing New Word Embeddings for Pretrained Language Models" (2021),
        https://nlp.stanford.edu/~johnhew/vocab-expansion.html, with a diagonal covariance.
    """
    arguments.integer("vocab_size", vocab_size, at_least=1)
    path, table = _table_of(params, "token_embedding")
    is_row_table = isinstance(table, RowTable)
    if isinstance(table, Table) and not is_row_table:
        raise _not_whole_error(path, table)
    rows = table.in_vocabulary_order() if is_row_table else table
    more = vocab_size - rows.shape[0]
    if more > 0:
        if rng is None:
            raise ValueError(arguments.wanted("rng", f"a key, to draw {more} new rows", "None"))
        wide = rows.astype(jnp.promote_types(jnp.float32, rows.dtype))
        drawn = wide.mean(0) + wide.std(0) * jax.random.normal(
            arguments.as_key("rng", rng), (more, rows.shape[1]), wide.dtype
        )
        rows = (np if is_row_table else jnp).concatenate([rows, drawn.astype(rows.dtype)])
    resized: Any = rows[:vocab_size]
    if is_row_table:
        resized = table.with_rows(resized)
    return {**params, path: {**params[path], "embeddings": resized}}


def resize_positions(params: Params, max_len: int, *, start: int = 0) -> Params:
    """Interpolates an embedder's learned positions to another number of positions.

    The table is resized like the rows of an image: each new row is a weighted mean of nearby old
    rows (`jax.image.resize`, linear, with antialiasing if there are fewer rows). The matching
    config is `dataclasses.replace(config, scheme=Learned(max_len=...))`.

    Args:
        params: a Haiku parameter tree with one table of learned positions, as `Embedder.init`
            makes.
        max_len: the new number of positions, above `start`.
        start: the `start` of the scheme. The rows before it (for padding, for example) do not
            change.

    Returns:
        The tree, in which only that table is replaced.

    Raises:
        TypeError: max_len or start is not a Python int.
        ValueError: max_len is not above start; start is outside the table; params does not have
            exactly one table of learned positions.

    Example:
        >>> import jax
        >>> import transformer_embed as te
        >>> embedder = te.make_embedder(te.EmbedderConfig(256, 64, scheme=te.Learned(max_len=512)))
        >>> params = te.resize_positions(embedder.init(jax.random.key(0)), 1024)
        >>> params["transformer_embedding/~/learned_positional_encoding"]["embeddings"].shape
        (1024, 64)

    Source:
        Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), section 3.2,
        https://arxiv.org/abs/2010.11929
    """
    path, table = _table_of(params, "learned_positional_encoding")
    if isinstance(table, Table):
        raise _not_whole_error(path, table)
    start = arguments.integer("start", start, at_least=0, at_most=table.shape[0] - 1)
    rows = arguments.integer("max_len", max_len, at_least=start + 1) - start
    wide = table[start:].astype(jnp.promote_types(jnp.float32, table.dtype))
    stretched = jax.image.resize(wide, (rows, table.shape[1]), "linear").astype(table.dtype)
    resized = jnp.concatenate([table[:start], stretched])
    return {**params, path: {**params[path], "embeddings": resized}}


def _table_of(params: Params, module: str) -> tuple[str, Float[Array, "v d"] | Table]:
    arguments.params(params)
    paths = [path for path in params if path.rsplit("/", 1)[-1] == module]
    if len(paths) != 1:
        raise ValueError(
            arguments.wanted(
                "params", f"one module called {module}", f"{len(paths)} among {sorted(params)}"
            )
        )
    table = params[paths[0]].get("embeddings")
    if table is None:
        raise _not_whole_error(paths[0], table)
    return paths[0], table if isinstance(table, Table) else jnp.asarray(table)


def _not_whole_error(path: str, table: Any) -> ValueError:
    got = "none" if table is None else f"a table held as {type(table).__name__}"
    return ValueError(arguments.wanted(f"params: {path}/embeddings", "a whole array", got))


@functools.partial(jax.jit, static_argnums=0)
def _init(config: EmbedderConfig, rng: Array) -> Params:
    ids = jnp.zeros([1, 1], jnp.int32)
    token_types = None if config.num_token_types is None else ids
    return hk.transform(
        lambda: TransformerEmbedding(config)(ids, is_training=False, token_types=token_types)
    ).init(rng)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(config, is_training, params, rng, ids, positions, token_types):
    embed = hk.transform(
        lambda: TransformerEmbedding(config)(
            ids, is_training=is_training, positions=positions, token_types=token_types
        )
    )
    return embed.apply(params, rng)


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, x):
    return hk.transform(lambda: TransformerEmbedding(config).logits(x)).apply(params, None)


def _canonical_positions(positions: ArrayLike) -> Array:
    """Positions with one dtype for all integers that fit into int32, so that they share a trace."""
    array = arguments.as_positions("positions", positions)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.asarray(array)
    if isinstance(array, np.ndarray) and array.dtype != np.uint32:
        return jnp.asarray(arguments.fits_int32("positions", array))
    if isinstance(array, np.ndarray):
        return jnp.asarray(
            array, jnp.int32 if array.size == 0 or array.max() < 2**31 else jnp.uint32
        )
    narrow = array.dtype.itemsize < 4 or array.dtype == jnp.int32
    return arguments.as_int32("positions", array) if narrow else array
