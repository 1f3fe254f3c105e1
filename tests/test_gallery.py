"""The programs of the gallery, and the plain ones beside them, run and learn."""

import dataclasses
import functools
import importlib
import importlib.util
import re
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import FOLDER

import transformer_embed as te

GALLERY = FOLDER / "gallery"
# What other programs import.
SHARED = ("layers", "own_text")
PROGRAMS = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem not in SHARED)
MOST_LINES = 120

pytestmark = [
    pytest.mark.documentation,
    # Each worker of a run reads this file, and to import scikit-learn takes a second.
    pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn"),
]


@pytest.fixture(scope="module", autouse=True)
def gallery():
    """Lets the programs import each other, as they do if you run them."""
    sys.path.insert(0, str(GALLERY))
    yield
    sys.path.remove(str(GALLERY))


@pytest.fixture
def one_layer(monkeypatch):
    """Makes one layer in place of two, which runs the same lines and compiles in less time."""
    monkeypatch.setattr(importlib.import_module("layers").stack, "__defaults__", (1,))


@pytest.mark.usefixtures("one_layer")
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


@pytest.mark.usefixtures("one_layer")
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


@pytest.fixture(scope="module")
def own_bert():
    """The program, the vocabulary of its text, and parameters."""
    program, own_text = importlib.import_module("own_bert"), importlib.import_module("own_text")
    vocabulary, _, _ = own_text.read_data()
    _, params, _ = program.setup(20)
    return program, own_text, vocabulary, params


def test_bert_gives_a_packed_document_the_vectors_that_it_has_alone(own_bert):
    program, own_text, vocabulary, params = own_bert
    texts = ["Return a copy of the list.", "Raise an error, if x is negative."]
    packed_ids, segment_ids = own_text.pack(own_text.encode(vocabulary, texts))
    assert len(packed_ids) == 1
    logits_of = jax.jit(program.model.apply[1])
    packed = logits_of(params, packed_ids, segment_ids)
    for n, text in enumerate(texts, 1):
        ids, ones = own_text.pack(own_text.encode(vocabulary, [text]))
        alone = logits_of(params, ids, ones)
        got, want = packed[segment_ids == n], alone[ones == 1]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_bert_computes_the_loss_of_the_chosen_tokens_and_its_gradients(own_bert):
    program, own_text, _, params = own_bert
    batch = program.next_batch(np.random.default_rng(0))
    rng = jax.random.key(1)
    shown, segment_ids, labels, is_chosen = own_text.hide(rng, *batch)

    def loss_on_whole_logits(params):
        log_probs = jax.nn.log_softmax(program.model.apply[1](params, shown, segment_ids))
        return -jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0].mean(where=is_chosen)

    wanted = jax.jit(jax.value_and_grad(loss_on_whole_logits))(params)
    got = jax.jit(jax.value_and_grad(program.loss_fn))(params, rng, batch)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(near, got, wanted)
    assert max(float(jnp.abs(grad).max()) for grad in jax.tree.leaves(wanted[1])) > 1e-3
    assert 0.1 < is_chosen.sum() / (batch[0] != 0).sum() < 0.2


def test_bert_is_saved_and_fills_in_words(own_bert, tmp_path, monkeypatch, capsys):
    program, _, vocabulary, params = own_bert
    te.pretrained.save_embedder(tmp_path / "own_bert.safetensors", program.config, params)
    loaded = te.pretrained.load_embedder(tmp_path / "own_bert.safetensors").params
    # Longer than a batch row.
    text = "Return the [MASK] of the list. " * 30 + "[MASK]"
    words = program.fill_in(loaded, vocabulary, text)
    assert words == program.fill_in(params, vocabulary, text)
    assert [len(each) for each in words] == [4] * 31
    # The lines of the page, which use the saved model later.
    (tmp_path / "own_bert.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    page = (FOLDER / "gallery.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    exec(compile(lines, "gallery.md", "exec"), {})
    text = re.search(r'"(Return .*)"\)', lines)[1]
    assert capsys.readouterr().out == f"{program.fill_in(params, vocabulary, text)}\n"


def test_a_text_is_split_into_words_and_runs_of_one_symbol(own_bert):
    _, own_text, _, _ = own_bert
    text = "Title\n=====\nf(x) -> [MASK]..."
    assert own_text.split_words(text) == [*["Title", "====="], *"f(x)", *"->", "[MASK]", "..."]


def test_a_folder_without_texts_is_refused(own_bert, tmp_path):
    _, own_text, _, _ = own_bert
    (tmp_path / "folder.md").mkdir()
    (tmp_path / "page.html").write_text("text")
    with pytest.raises(SystemExit, match=r"found no files that end with \.txt, \.md or \.rst"):
        own_text.read_data(tmp_path)
    (tmp_path / "short.TXT").write_text("a short text")
    with pytest.raises(SystemExit, match="more than 128 words"):
        own_text.read_data(tmp_path)


def test_bert_decays_matrices_of_layers_only(own_bert):
    program, _, _, params = own_bert
    decays = program.decays(params)
    for module, name, is_decayed in hk.data_structures.traverse(decays):
        assert is_decayed == (name == "w"), (module, name)
    assert not program.decays({"embed": {"output_embeddings": np.ones([3, 2])}})["embed"][
        "output_embeddings"
    ]
