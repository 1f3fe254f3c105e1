"""EmbedderConfig -> Embedder(init, apply, logits): the input layer as compiled functions."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from transformer_embed import _checks
from transformer_embed.functional.lookup import LOOKUP_STYLES, OUT_OF_RANGE, Table
from transformer_embed.layers.modules import TransformerEmbedding, check_embedding_options, checked_scale
from transformer_embed.layers.schemes import Scheme, Sinusoidal

Params = Mapping[str, Mapping[str, Array]]


@dataclasses.dataclass(frozen=True)
class EmbedderConfig:
    """What an embedder is: the arguments of `TransformerEmbedding`, frozen, hashable, checked.

    Equal configs share their compiled functions. `dataclasses.replace` makes a changed copy.

    Args:
        vocab_size: number of token ids, at least 1.
        d_model: width of the result, at least 1.
        positions: `Sinusoidal(...)`, `SinusoidalGrid(...)`, `Learned(max_len=...)`, or None.
        dropout_rate: in [0, 1).
        pad_id: the id of padding, or None.
        scale: True multiplies token rows by the square root of their width, False by 1, and a number above 0 by that number.
        num_token_types: number of token types, or None.
        layer_norm_eps: epsilon of a layer norm over the sum, or None.
        embedding_width: width of the tables where it is not d_model, or None.
        out_of_range: `"nan"`, `"clip"` or `"zero"`; see `lookup`.
        lookup_style: `"gather"` or `"one_hot"`; see `lookup`.
        param_dtype: of the parameters, but for the layer norm's, which are float32.
        dtype: of the result.

    Raises:
        TypeError: a field of another type.
        ValueError: a field out of its range.

    Example:
        >>> import transformer_embed as te
        >>> te.EmbedderConfig(vocab_size=256, d_model=64, pad_id=0).positions.layout
        'interleaved'

    Source:
        See `TransformerEmbedding`.
    """

    vocab_size: int
    d_model: int
    positions: Scheme | None = Sinusoidal()
    dropout_rate: float = 0.1
    pad_id: int | None = None
    scale: bool | float = True
    num_token_types: int | None = None
    layer_norm_eps: float | None = None
    embedding_width: int | None = None
    out_of_range: str = "nan"
    lookup_style: str = "gather"
    param_dtype: DTypeLike = jnp.float32
    dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        _checks.integer("vocab_size", self.vocab_size, at_least=1)
        check_embedding_options(
            self.d_model, self.positions, self.dropout_rate, self.num_token_types, self.layer_norm_eps, self.embedding_width
        )
        if self.pad_id is not None:
            _checks.int32("pad_id", self.pad_id)
        object.__setattr__(self, "scale", checked_scale(self.scale))
        _checks.choice("out_of_range", self.out_of_range, OUT_OF_RANGE)
        _checks.choice("lookup_style", self.lookup_style, LOOKUP_STYLES)
        for name in ("param_dtype", "dtype"):
            object.__setattr__(self, name, _checks.floating_dtype(name, getattr(self, name)))


class ApplyFn(Protocol):
    """The type of `Embedder.apply`."""

    def __call__(  # noqa: D102
        self,
        params: Params,
        rng: Array | None,
        ids: ArrayLike,
        *,
        is_training: bool,
        positions: ArrayLike | None = None,
        token_types: ArrayLike | None = None,
    ) -> Float[Array, "... t d"]: ...


class Embedder(NamedTuple):
    """Three pure functions, as `make_embedder` returns them.

    Args:
        init: `init(rng) -> params`, a Haiku parameter tree.
        apply: `apply(params, rng, ids, *, is_training, positions=None, token_types=None)` -> [..., length, d_model]; compiled once for each
            shape and value of is_training. To evaluate, pass rng=None.
        logits: `logits(params, x)` -> [..., vocab_size]: the output layer tied to the token table.

    Example:
        >>> import transformer_embed as te
        >>> te.Embedder._fields
        ('init', 'apply', 'logits')

    Source:
        The shape of optax.GradientTransformation, https://github.com/google-deepmind/optax
    """

    init: Callable[[Array], Params]
    apply: ApplyFn
    logits: Callable[[Params, ArrayLike], Float[Array, "... v"]]


def make_embedder(config: EmbedderConfig) -> Embedder:
    """The input layer that a config describes, as pure, compiled functions.

    `apply` takes lists, numpy arrays and jax arrays, works inside `jax.jit`, `jax.vmap` (bind keyword arguments with
    `functools.partial`: vmap would map them), `jax.grad` and `jax.export` (of symbolic shapes too, a length being bounded by learned
    positions), and traces once a shape: another offset in `positions` or another integer dtype is no new trace (but for uint32
    positions that int32 cannot hold).

    Args:
        config: what to build.

    Returns:
        Embedder(init, apply, logits).

    Raises:
        TypeError: config is no EmbedderConfig. In apply: is_training is traced or no bool; ids are not integers.
        ValueError: in apply: training with dropout and rng=None; positions that do not end in the ids' length, or that lie outside
            int32 (host values); token types given and not wanted, or the reverse.

    Example:
        >>> import jax
        >>> import transformer_embed as te
        >>> embedder = te.make_embedder(te.EmbedderConfig(vocab_size=256, d_model=64, pad_id=0))
        >>> params = embedder.init(jax.random.key(0))
        >>> embedder.apply(params, None, [[5, 6, 0]], is_training=False).shape
        (1, 3, 64)
        >>> embedder.apply(params, jax.random.key(1), [[5, 6, 0]], is_training=True).shape
        (1, 3, 64)

    Source:
        See `TransformerEmbedding`.
    """
    if not isinstance(config, EmbedderConfig):
        raise TypeError(_checks.wanted("config", "an EmbedderConfig", type(config).__name__))

    def init(rng: Array) -> Params:
        """The parameters, drawn with rng."""
        return _init(config, _checks.as_key("rng", rng))

    def apply(params, rng, ids, *, is_training, positions=None, token_types=None):
        """Embeds ids [..., length] as [..., length, d_model]; see `make_embedder`."""
        _checks.params(params)
        if not _checks.flag("is_training", is_training) or config.dropout_rate == 0:
            rng = None
        elif rng is None:
            raise ValueError(_checks.wanted("rng", "a key such as jax.random.key(0), to train with dropout", "None"))
        else:
            rng = _checks.as_key("rng", rng)
        return _apply(
            config,
            bool(is_training),
            params,
            rng,
            _checks.as_int32("ids", ids),
            None if positions is None else _door_positions(positions),
            None if token_types is None else _checks.as_int32("token_types", token_types),
        )

    def logits(params: Params, x: ArrayLike) -> Float[Array, "... v"]:
        """x [..., width of the table] times the token table's rows; see `tied_logits`."""
        _checks.params(params)
        return _logits(config, params, _checks.as_floats("x", x))

    for function in (init, apply, logits):
        function.__qualname__ = f"Embedder.{function.__name__}"
    return Embedder(init, apply, logits)


def resize_vocabulary(params: Params, vocab_size: int, rng: Array | None = None) -> Params:
    """The parameters of an embedder with rows added to, or taken off, the end of its token table.

    New rows are drawn from a normal distribution with the mean and the standard deviation that each channel has over the old rows. Make
    the config that goes with them by `dataclasses.replace(config, vocab_size=...)`.

    Args:
        params: a Haiku parameter tree with one token table, as `Embedder.init` makes.
        vocab_size: the new number of rows, at least 1; fewer than now drops the last ones.
        rng: a key; None will do where no row is added.

    Returns:
        The tree, in which only the table is another.

    Raises:
        TypeError: vocab_size is no Python int.
        ValueError: there is no token table, or more than one; rows to add and no key.

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
    _checks.integer("vocab_size", vocab_size, at_least=1)
    path, table = _table_of(params, "token_embedding")
    more = vocab_size - table.shape[0]
    if more <= 0:
        resized = table[:vocab_size]
    elif rng is None:
        raise ValueError(_checks.wanted("rng", f"a key, to draw {more} new rows", "None"))
    else:
        wide = table.astype(jnp.promote_types(jnp.float32, table.dtype))
        rows = wide.mean(0) + wide.std(0) * jax.random.normal(_checks.as_key("rng", rng), (more, table.shape[1]), wide.dtype)
        resized = jnp.concatenate([table, rows.astype(table.dtype)])
    return {**params, path: {**params[path], "embeddings": resized}}


def resize_positions(params: Params, max_len: int, *, start: int = 0) -> Params:
    """The parameters of an embedder with learned positions, interpolated to another number of positions.

    Both ends of the table stretch together, as the rows of an image do: each new row is a weighted mean of the old rows near its place
    (`jax.image.resize`, linear, with antialiasing where rows become fewer). Make the config that goes with them by
    `dataclasses.replace(config, positions=Learned(max_len=...))`.

    Args:
        params: a Haiku parameter tree with one table of learned positions, as `Embedder.init` makes.
        max_len: the new number of positions, above `start`.
        start: the scheme's: where it counts from. The rows before it, those of padding for example, are kept as they are.

    Returns:
        The tree, in which only that table is another.

    Raises:
        TypeError: max_len or start is no Python int.
        ValueError: max_len is not above start; start outside the table; there is no table of learned positions, or more than one.

    Example:
        >>> import jax
        >>> import transformer_embed as te
        >>> embedder = te.make_embedder(te.EmbedderConfig(256, 64, positions=te.Learned(max_len=512)))
        >>> params = te.resize_positions(embedder.init(jax.random.key(0)), 1024)
        >>> params["transformer_embedding/~/learned_positional_encoding"]["embeddings"].shape
        (1024, 64)

    Source:
        Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), section 3.2, https://arxiv.org/abs/2010.11929
    """
    path, table = _table_of(params, "learned_positional_encoding")
    start = _checks.integer("start", start, at_least=0, at_most=table.shape[0] - 1)
    rows = _checks.integer("max_len", max_len, at_least=start + 1) - start
    wide = table[start:].astype(jnp.promote_types(jnp.float32, table.dtype))
    stretched = jax.image.resize(wide, (rows, table.shape[1]), "linear").astype(table.dtype)
    resized = jnp.concatenate([table[:start], stretched])
    return {**params, path: {**params[path], "embeddings": resized}}


def _table_of(params: Params, module: str) -> tuple[str, Float[Array, "v d"]]:
    _checks.params(params)
    paths = [path for path in params if path.rsplit("/", 1)[-1] == module]
    if len(paths) != 1:
        raise ValueError(_checks.wanted("params", f"one module called {module}", f"{len(paths)} among {sorted(params)}"))
    table = params[paths[0]].get("embeddings")
    if table is None or isinstance(table, Table):
        got = "none" if table is None else f"a table held as {type(table).__name__}"
        raise ValueError(_checks.wanted(f"params: {paths[0]}/embeddings", "a whole array", got))
    return paths[0], jnp.asarray(table)


def _module(config: EmbedderConfig) -> TransformerEmbedding:
    return TransformerEmbedding(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


@functools.partial(jax.jit, static_argnums=0)
def _init(config: EmbedderConfig, rng: Array) -> Params:
    ids = jnp.zeros([1, 1], jnp.int32)
    token_types = None if config.num_token_types is None else ids
    return hk.transform(lambda: _module(config)(ids, is_training=False, token_types=token_types)).init(rng)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(config, is_training, params, rng, ids, positions, token_types):
    embed = hk.transform(lambda: _module(config)(ids, is_training=is_training, positions=positions, token_types=token_types))
    return embed.apply(params, rng)


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, x):
    return hk.transform(lambda: _module(config).logits(x)).apply(params, None)


def _door_positions(positions: ArrayLike) -> Array:
    """One dtype for all integers that int32 holds, so that they share a trace."""
    array = _checks.as_positions("positions", positions)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.asarray(array)
    if isinstance(array, np.ndarray) and array.dtype != np.uint32:
        return jnp.asarray(_checks.fits_int32("positions", array))
    if isinstance(array, np.ndarray):
        return jnp.asarray(array, jnp.int32 if array.size == 0 or array.max() < 2**31 else jnp.uint32)
    narrow = array.dtype.itemsize < 4 or array.dtype == jnp.int32
    return _checks.as_int32("positions", array) if narrow else array
