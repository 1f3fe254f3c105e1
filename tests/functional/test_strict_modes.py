"""Every public function under all of JAX's strict modes at once: run eagerly, and traced with its
gradient."""

import contextlib
import functools
import inspect
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import public
import pytest
from test_inputs import CALLS, IDS, POSITIONS, TABLE, X

import transformer_embed as te

MODES = {
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "legacy_prng_key": lambda: jax.legacy_prng_key("error"),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
}


@contextlib.contextmanager
def all_modes():
    """Each mode only raises errors of its own, which name what it forbids: none hides another's."""
    with contextlib.ExitStack() as modes:
        for mode in MODES.values():
            modes.enter_context(mode())
        yield


KEY = jax.random.key(7)
BATCHES = np.stack([POSITIONS, POSITIONS + 1])
SCALINGS = {
    "linear": te.LinearScaling(2.0),
    "ntk": te.NTKScaling(2.0),
    "dynamic": te.DynamicNTKScaling(2.0, original_length=4, length=8),
    "yarn": te.YarnScaling(2.0, original_length=4),
    "llama3": te.Llama3Scaling(8.0),
    "longrope": te.LongRopeScaling([1.0, 1.0], [2.0, 4.0], 4.0, original_length=4, length=8),
}
FUNCTIONS = CALLS | {
    "alibi_bias_16_bits": (
        functools.partial(te.alibi_bias, num_heads=3, symmetric=True, dtype=jnp.bfloat16),
        (BATCHES, POSITIONS),
    ),
    "alibi_slopes": (functools.partial(te.alibi_slopes, 3), ()),
    "apply_rotary_16_bits": (
        functools.partial(te.apply_rotary, layout="interleaved", rotary_dim=2),
        (X.astype(jnp.bfloat16), POSITIONS),
    ),
    "causal_mask": (functools.partial(te.causal_mask, 3), ()),
    "check_ids": (functools.partial(te.check_ids, vocab_size=4), (IDS,)),
    "check_order": (
        lambda positions: te.check_order(te.TokenPositions(positions), "full"),
        (np.arange(3),),
    ),
    "dropout": (lambda x: te.dropout(jax.random.clone(KEY), 0.5, x), (X,)),
    "dropout_16_bits": (
        lambda x: te.dropout(jax.random.clone(KEY), 0.5, x),
        (X.astype(jnp.bfloat16),),
    ),
    "lookup_16_bits": (functools.partial(te.lookup, pad_id=0), (TABLE.astype(jnp.bfloat16), IDS)),
    "mask_to_bias_16_bits": (
        functools.partial(te.mask_to_bias, dtype=jnp.float16, value=-1e4),
        (IDS == 0,),
    ),
    "relative_position_buckets_one_way": (
        functools.partial(te.relative_position_buckets, bidirectional=False),
        (BATCHES, POSITIONS),
    ),
    "sinusoidal_encoding_of_floats": (
        lambda positions: te.sinusoidal_encoding(positions, 5, odd="zero"),
        (POSITIONS + np.float32(0.5),),
    ),
    "sinusoidal_grid_of_all": (
        functools.partial(te.sinusoidal_grid, (2, 3), 7, odd="round_up", dtype=jnp.bfloat16),
        (),
    ),
    "sinusoidal_table": (functools.partial(te.sinusoidal_table, 3, 5, dtype=jnp.bfloat16), ()),
    "linear_cross_entropy_16_bits": (
        functools.partial(te.linear_cross_entropy, pad_id=0, label_smoothing=0.1, chunk_size=2),
        (X[..., :3].astype(jnp.bfloat16), TABLE.astype(jnp.bfloat16), np.ones((1, 3, 2), np.int32)),
    ),
    "linear_logits_16_bits": (
        functools.partial(te.linear_logits, pad_id=1),
        (X[..., :3].astype(jnp.bfloat16), TABLE),
    ),
    "token_positions": (
        lambda ids: te.AttentionMask(
            te.TokenPositions.from_ids(ids, pad_id=0), causal=True
        ).dense(),
        (IDS,),
    ),
    **{
        f"apply_rotary_{name}": (
            functools.partial(te.apply_rotary, base=100.0, scaling=scaling),
            (X, POSITIONS),
        )
        for name, scaling in SCALINGS.items()
    },
}
SCHEMES = [te.Sinusoidal(at_padding=0), te.SinusoidalGrid((2, 3)), te.Learned(9)]


def module(build):
    """Initialised and applied, compiled: jax itself transfers the constants of eager code."""

    def run(*arrays):
        transformed = hk.transform(lambda: build()(*arrays))
        return transformed.apply(transformed.init(jax.random.key(3)), None)

    return jax.jit(run)


EVALUATED = {
    "PositionalEncoding": lambda: te.PositionalEncoding(SCHEMES[2], X.shape[-1]),
    "TransformerEmbedding": lambda: te.TransformerEmbedding(te.EmbedderConfig(11, 8)),
}
FUNCTIONS |= {
    "TokenEmbedding": (module(lambda: te.TokenEmbedding(11, 6, pad_id=0)), (IDS,)),
    "RelativePositionBias": (module(lambda: te.RelativePositionBias(2)), (POSITIONS, POSITIONS)),
    **{
        name: (module(lambda build=build: functools.partial(build(), is_training=False)), (array,))
        for (name, build), array in zip(EVALUATED.items(), (X, IDS), strict=True)
    },
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def test_every_public_name_is_here():
    """But for the functions of tables and parameters, which are in test_strict_tables.py, and those
    that draw."""
    made = {type(value).__name__ for value in [*SCALINGS.values(), *SCHEMES]}
    made |= {"EmbedderConfig", "OutputLayer", "Embedder", "Table", "TokenPositions"}
    names = set(public.TOP) - made
    tables = {"table", "params"}
    of_tables = {n for n in names if tables & inspect.signature(getattr(te, n)).parameters.keys()}
    keys = "\n".join(FUNCTIONS)
    missing = {name for name in names - of_tables if not re.search(rf"^{name}", keys, re.M)}
    assert missing == set()


def on_device(arrays):
    return [jax.device_put(array) for array in arrays]


@every_function
def test_eagerly_under_all_modes_at_once(name):
    function, arrays = FUNCTIONS[name]
    arrays = [jax.device_put(array) for array in arrays]
    # jax guards transfers only in an operation's first call: forget those of other tests.
    jax.clear_caches()
    with all_modes():
        leaves = jax.tree.leaves(function(*arrays))
    assert all(np.isfinite(jax.device_get(leaf)).all() for leaf in leaves)


@every_function
def test_traced_with_its_gradient_under_all_modes_at_once(name):
    function, arrays = FUNCTIONS[name]
    if name in ("check_ids", "check_order"):
        pytest.skip("is for the host")

    def loss(*arrays):
        leaves = jax.tree.leaves(function(*arrays))
        return sum(
            leaf.astype(jnp.float32).sum()
            for leaf in leaves
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        )

    floats = [n for n, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating)]
    arrays = [jax.device_put(array) for array in arrays]
    with all_modes():
        jax.make_jaxpr(jax.value_and_grad(loss, argnums=floats) if floats else function)(*arrays)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: type(scheme).__name__)
def test_an_embedder_trains_under_all_modes_at_once(scheme):
    config = te.EmbedderConfig(11, 8, pad_id=0, scheme=scheme, dropout_rate=0.5)
    embedder, ids = te.Embedder(config), jax.device_put(IDS)

    def loss(params, key, ids):
        return embedder.apply(params, key, ids, is_training=True).astype(jnp.float32).sum()

    keys = jax.random.key(0), jax.random.key(1)
    with all_modes():
        params = jax.jit(embedder.init)(keys[0])
        leaves = jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(params, keys[1], ids))
    assert all(np.isfinite(jax.device_get(leaf)).all() for leaf in leaves)


@pytest.mark.parametrize("dropout", [te.dropout, hk.dropout], ids=["ours", "haiku's"])
def test_a_key_that_is_used_twice_is_an_error_under_debug_key_reuse(dropout):
    x = jnp.asarray(X)
    with jax.debug_key_reuse(True):
        key = jax.random.key(0)
        dropout(key, 0.5, x)
        with pytest.raises(jax.errors.KeyReuseError):
            dropout(key, 0.5, x)
