"""The input layer in float64: numpy's rows, plus encodings, token types, a norm and a linear layer;
and the ways to call it."""

import dataclasses
import tempfile

import drawn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from compare import equal, near
from references import assert_right, exact_encoding, exact_positions

import transformer_embed as te

SINUSOIDS = ["base", "layout", "shift", "odd", "frequency_scale"]


def by_name(params):
    """Parameters by the end of their path, in float64."""
    return {
        f"{path.rsplit('/', 1)[-1]}/{name}": np.asarray(leaf).astype(np.float64)
        for path, group in params.items()
        for name, leaf in group.items()
    }


def rows(config, table, ids, pad_id=None):
    return oracle.loop_lookup(table, ids, pad_id, config.out_of_range)


def counted(config, ids):
    """The positions of ids when none are given."""
    scheme, pad_id = config.scheme, config.pad_id
    pad_id = pad_id if scheme.pad_id is None else scheme.pad_id
    if pad_id is None or isinstance(scheme, te.SinusoidalGrid):
        return scheme.start + np.arange(ids.shape[-1])
    at_padding = scheme.start if scheme.at_padding is None else scheme.at_padding
    is_token = np.vectorize(int, otypes=[object])(ids) != pad_id
    return np.where(is_token, scheme.start + np.cumsum(is_token, -1) - 1, at_padding)


def encoding(config, short, positions):
    scheme, width = config.scheme, int(config.table_width)
    if isinstance(scheme, te.Learned):
        return rows(config, short["learned_positional_encoding/embeddings"], positions)
    if isinstance(scheme, te.SinusoidalGrid):
        return np.asarray(scheme.encoding(positions, width), np.float64)
    options = {name: getattr(scheme, name) for name in SINUSOIDS}
    return exact_encoding(exact_positions(positions), width, **options)


def embedded(config, short, ids, positions, token_types):
    """[..., length, width of the tables] in float64, before dropout."""
    width, ids = config.table_width, np.asarray(ids)
    factor = width**0.5 if config.scale == "sqrt_d_model" else config.scale
    total = rows(config, short["token_embedding/embeddings"], ids, config.pad_id) * factor
    if config.scheme is not None:
        positions = counted(config, ids) if positions is None else np.asarray(positions)
        total = total + encoding(config, short, positions)
    if config.num_token_types is not None:
        types = np.asarray(token_types)
        total = total + rows(config, short["token_type_embedding/embeddings"], types)
    if config.layer_norm_eps is not None:
        centred, variance = total - total.mean(-1, keepdims=True), total.var(-1, keepdims=True)
        # A square that leaves float32 is infinite.
        variance = np.where(variance > np.finfo(np.float32).max, np.inf, variance)
        total = centred / np.sqrt(variance + config.layer_norm_eps)
        total = total * short["layer_norm/scale"] + short["layer_norm/offset"]
    return total


def close(got, expected, dtype, size=1):
    """To a few roundings of the dtype, whose overflow is infinite, of sums of values of a size."""
    dtype = jnp.dtype(jax.dtypes.canonicalize_dtype(dtype))
    assert np.asarray(got).dtype == dtype
    assert np.shape(got) == np.shape(expected)
    eps = max(float(jnp.finfo(dtype).eps), 2**-22)
    with np.errstate(over="ignore"):
        rounded = np.asarray(expected).astype(dtype).astype(np.float64)
    got = np.asarray(got).astype(np.float64)
    near(got, rounded, rtol=8 * eps, atol=32 * eps * size)


def check_apply(config, short, result, *, rng, ids, is_training, positions, token_types):
    assert result.shape == (*np.shape(ids), config.d_model)
    dtype = config.param_dtype if config.dtype is None else config.dtype
    total, size = embedded(config, short, ids, positions, token_types), 1
    if config.embedding_width is not None:
        # Dropout and a rounding to 16 bits come before this product.
        if is_training or {jnp.dtype(dtype), jnp.dtype(config.param_dtype)} != {
            np.dtype("float32")
        }:
            return
        size = max(1, np.nanmax(np.abs(total), initial=0))
        total = total @ short["widen/w"] + short["widen/b"]
    elif is_training and config.dropout_rate > 0:
        got = np.asarray(result)
        kept = np.isnan(got) | (got != 0)
        result = np.where(kept, got, np.zeros_like(got))
        total = np.where(kept, total / (1 - config.dropout_rate), 0)
    close(result, total, dtype, size)


# --- for draws


def params_of(config, seed):
    shapes = jax.eval_shape(te.Embedder(config).init, jax.random.key(0))
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: random.normal(0.5, 1, leaf.shape).astype(leaf.dtype), shapes)


def batch(config, seed, ids, positions, shape):
    """Ids with padding, or some outside, and positions and token types."""
    random = np.random.default_rng(seed)
    vocab_size, given = config.vocab_size, {}
    given["ids"] = random.integers(0, vocab_size, shape)
    if ids == "padded" and config.pad_id is not None:
        is_padding = np.arange(shape[-1]) < random.integers(0, shape[-1] + 1, (*shape[:-1], 1))
        is_padding = is_padding if seed % 2 else is_padding[..., ::-1]
        given["ids"] = np.where(is_padding, config.pad_id, given["ids"])
    if ids == "outside":
        given["ids"] = random.choice([-1, 0, vocab_size - 1, vocab_size, -(2**31)], shape)
    given = {name: array.astype(np.int32) for name, array in given.items()}
    if positions != "counted":
        given["positions"] = drawn.positions(positions, seed, *shape)
        if not isinstance(config.scheme, te.Sinusoidal) and positions == "near":
            given["positions"] %= 8
    if config.num_token_types is not None:
        given["token_types"] = random.integers(-1, config.num_token_types + 1, shape, np.int32)
    return params_of(config, seed), given, np.asarray(jax.random.PRNGKey(seed))


def embedder(config, is_training, params, given, rng):
    rng = rng if is_training else None
    return te.Embedder(config).apply(params, rng, **given, is_training=is_training)


def haiku(config, is_training, params, given, rng):
    layer = lambda given: te.TransformerEmbedding(config)(**given, is_training=is_training)
    return hk.transform(layer).apply(params, rng if is_training else None, given)


def parts(config, is_training, params, given, rng):
    """The tokens and the positions of a config that has nothing else, by functions."""
    tables = {path.rsplit("/", 1)[-1]: group for path, group in params.items()}
    table = jnp.asarray(tables["token_embedding"]["embeddings"])
    options = {"pad_id": config.pad_id, "out_of_range": config.out_of_range}
    x = te.lookup(table, given["ids"], **options).astype(jnp.float32) * config.factor
    positions = given.get("positions")
    if positions is None and config.scheme is not None:
        positions = config.scheme.positions(jnp.asarray(given["ids"]), config.pad_id)
    if isinstance(config.scheme, te.Learned):
        learned = jnp.asarray(tables["learned_positional_encoding"]["embeddings"])
        x += te.lookup(learned, positions, out_of_range=config.out_of_range).astype(jnp.float32)
    elif config.scheme is not None:
        x += jnp.broadcast_to(config.scheme.encoding(positions, config.d_model), x.shape)
    x = x.astype(table.dtype if config.dtype is None else config.dtype)
    return te.dropout(rng, config.dropout_rate, x) if is_training else x


def saved(config, batches):
    """What a file gives back."""
    found = []
    for params, *others in batches:
        with tempfile.TemporaryDirectory() as folder:
            te.pretrained.save_embedder(f"{folder}/x.safetensors", config, params)
            loaded = te.pretrained.load_embedder(f"{folder}/x.safetensors")
        assert loaded.config == config
        equal(loaded.params, params)
        found.append((jax.tree.map(np.asarray, loaded.params), *others))
    return config, found


def resized(config, batches, max_len=None, keep_positions=False, **fields):
    """With another vocabulary, or another number of learned positions."""
    found, rng = [], jax.random.key(1)
    if max_len is not None:
        fields["scheme"] = dataclasses.replace(config.scheme, max_len=max_len)
    new = dataclasses.replace(config, **fields)
    options = {"rng": rng, "keep_positions": keep_positions}
    compiled = jax.jit(lambda params: te.pretrained.resize(params, config, new, **options))
    for params, *others in batches:
        wider = jax.device_get(compiled(params))
        assert_right(te.pretrained.resize, wider, params, config, new, **options)
        found.append((wider, *others))
    return new, found


def check(config, is_training, found, batches):
    for got, (params, given, rng) in zip(found, batches, strict=True):
        arguments = {"positions": None, "token_types": None} | given
        short = by_name(params)
        check_apply(config, short, got, rng=rng, is_training=is_training, **arguments)
