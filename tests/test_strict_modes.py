"""Every public function of arrays under all of JAX's strict modes at once: run eagerly, and traced
with its gradient. (The modules are in test_modules.py.)"""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import platforms
import pytest
import steps
from calls import CALLS, GOOD, IDS, POSITIONS, X, of_arrays, with_gradient
from cases import few
from drawn import normal
from meshes import AUTO, EXPLICIT, mesh_of, put

import transformer_embed as te

MODES = {
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "debug_nans": lambda: jax.debug_nans(True),
    "legacy_prng_key": lambda: jax.legacy_prng_key("error"),
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
}


@contextlib.contextmanager
def strict(*without):
    """Each mode only raises errors of its own, which name what it forbids: none hides another's.

    jax guards transfers only in an operation's first call, so other tests' calls must not count.
    """
    with contextlib.ExitStack() as modes:
        modes.enter_context(platforms.apart("strict"))
        for mode in MODES.keys() - {*without}:
            modes.enter_context(MODES[mode]())
        yield


def assert_finite(tree):
    assert all(np.isfinite(jax.device_get(leaf)).all() for leaf in jax.tree.leaves(tree))


# --- functions of arrays


def tile_kinds_of(positions, segment_ids):
    tokens = te.TokenPositions(positions, segment_ids=segment_ids)
    return te.AttentionMask(tokens, causal=True, window=(2, 0), chunk=3).tile_kinds((2, 2))


FUNCTIONS = CALLS | {
    "tile_kinds": of_arrays(
        tile_kinds_of, positions=np.arange(4), segment_ids=np.array([1, 1, 2, 0])
    ),
    "sinusoidal_encoding of floats": of_arrays(
        te.sinusoidal_encoding, positions=POSITIONS + np.float32(0.5), d_model=5, odd="zero"
    ),
    "write_cache": of_arrays(te.write_cache, cache=X[0], new=X[0, :, :1], slot=IDS[0]),
}


DTYPES = [None, np.float32, np.float64]
# A key counts as used for the whole session: the modules drop elements in the other dtypes.
CASES = [
    case for case in itertools.product(FUNCTIONS, DTYPES) if case[0] != "dropout" or not case[1]
]


def on_device(array, dtype):
    return jax.device_put(array.astype(dtype) if dtype and array.dtype == np.float32 else array)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), few(CASES, 8))
def test_functions_eagerly_and_traced_with_their_gradient(name, dtype):
    """With a dtype, in the mode that has 64 bits."""
    function, arrays = FUNCTIONS[name]
    with jax.enable_x64(dtype is not None), strict():
        arrays = [on_device(array, dtype) for array in arrays]
        assert_finite(function(*arrays))
        jax.make_jaxpr(with_gradient(function, arrays))(*arrays)


@pytest.mark.slow
def test_a_key_that_is_used_twice_is_an_error_under_debug_key_reuse():
    x, key = jnp.asarray(X), jax.random.key(0)
    with jax.debug_key_reuse(True):
        te.dropout(key, 0.5, x)
        with pytest.raises(jax.errors.KeyReuseError):
            te.dropout(key, 0.5, x)


# --- functions of parameters; draws are strict where a mesh splits a table

IDS_OF_TABLE = np.arange(16, dtype=np.int32).reshape(8, 2)
SPLITS = [(), ("model",), (None, "model"), (("data", "model"),)]


def update(params, ids):
    adam, of_table = optax.adam(0.1), {"table": ids}
    loss = lambda params: jnp.sum(te.lookup(params["table"], ids, pad_id=0))
    _, grads = te.rows.value_and_grad(loss, ids=of_table, max_rows=8)(params)
    more = te.rows.value_and_grad(loss, ids=of_table)(params)[1]
    with jax.numpy_dtype_promotion("standard"):
        # optax multiplies a count by a float.
        return te.rows.apply_gradients(adam, steps.add(grads, more), adam.init(params), params)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "split"), few(itertools.product((AUTO, EXPLICIT), SPLITS), 2))
def test_steps_by_rows(kind, split):
    mesh = mesh_of((2, 4), ("data", "model"), kind)
    with jax.set_mesh(mesh), strict("transfer_guard", "debug_key_reuse"):
        table, ids = put(mesh, normal(0, 40, 8), *split), put(mesh, IDS_OF_TABLE, "data")
        jax.jit(update).trace({"table": table}, ids)
        if split[:1] == ("model",):
            te.rows.exchange_load(table, IDS_OF_TABLE)


@pytest.mark.slow
def test_saving_and_resizing(tmp_path):
    arguments = GOOD[te.pretrained.resize]
    with strict("transfer_guard", "debug_key_reuse"):
        assert_finite(te.pretrained.resize(**arguments))
        config, params = arguments["config"], arguments["params"]
        te.pretrained.save_embedder(tmp_path / "model.safetensors", config, params)
