"""The programs of the gallery, and the plain ones beside them, run and learn."""

import dataclasses
import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import FOLDER

pytest.importorskip("sklearn")

GALLERY = FOLDER / "gallery"
PROGRAMS = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem != "layers")
MOST_LINES = 120

pytestmark = pytest.mark.documentation


@pytest.fixture(scope="module", autouse=True)
def gallery():
    """Lets the programs import each other, as they do if you run them."""
    sys.path.insert(0, str(GALLERY))
    yield
    sys.path.remove(str(GALLERY))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_and_is_evaluated(name, monkeypatch):
    program, layers = importlib.import_module(name), importlib.import_module("layers")
    # A few of the held-out numbers show that the evaluation runs.
    numbers = importlib.import_module("number_words")
    monkeypatch.setattr(numbers, "HELD_OUT", numbers.HELD_OUT[:64])
    next_batch = importlib.import_module(name.removesuffix("_plain")).next_batch
    params, losses, _ = layers.run(*program.setup(20), next_batch=next_batch, steps=6)
    assert np.isfinite(losses).all()
    assert np.isfinite(program.held_out(params))
    assert len((GALLERY / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", ["decoder", "decoder_plain"])
def test_a_cache_continues_a_text_as_reading_it_whole_does(name):
    program = importlib.import_module(name)
    _, params, _ = program.setup(20)
    prompts = jnp.array([[0, 0, 100, 101, 102], [97, 98, 99, 100, 101], [0, 0, 0, 0, 120]])
    got = jax.jit(program.generate, static_argnames="steps")(params, prompts, steps=4)
    generate_one = jax.jit(program.generate, static_argnames="steps")
    texts = prompts
    for _ in range(4):
        texts = jnp.concatenate([texts, generate_one(params, texts, steps=1)], axis=1)
    np.testing.assert_array_equal(got, texts[:, -4:])


TABLE = "transformer_embedding/~/token_embedding"


@pytest.mark.parametrize("name", ["bert", "number_words", "grpo"])
def test_both_programs_compute_the_same_loss_from_the_same_parameters(name, monkeypatch):
    """With the vectors of the table as they are, and every id allowed, as in the plain program."""
    ours, plain = importlib.import_module(name), importlib.import_module(f"{name}_plain")
    config = dataclasses.replace(ours.config, scale=1.0, pad_id=None)
    monkeypatch.setattr(ours, "config", config)
    _, params, _ = plain.setup(20)
    batch = ours.next_batch(np.random.default_rng(3))
    rng = jax.random.key(4)

    def loss_of_ours(params):
        params = dict(params)
        params[TABLE] = params.pop("embed")
        return ours.loss_fn(params, rng, batch)

    wanted = jax.jit(jax.value_and_grad(lambda params: plain.loss_fn(params, rng, batch)))(params)
    got = jax.jit(jax.value_and_grad(loss_of_ours))(params)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(near, got, wanted)
    assert max(float(jnp.abs(grad).max()) for grad in jax.tree.leaves(wanted[1])) > 1e-3
