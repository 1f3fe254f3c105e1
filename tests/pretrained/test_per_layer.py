"""The inputs of each layer of Gemma 3n and small Gemma 4 models, beside a slow float64 version."""

import jax
import numpy as np
import pytest
from checkpoints import assert_identical, checkpoint, load_embedder, save_embedder
from compare import near
from drawn import normal

import transformer_embed as te

ROWS, LAYERS, WIDTH, D_MODEL = 7, 3, 2, 4
SHAPES = {
    "embed_tokens": (9, D_MODEL),
    "embed_tokens_per_layer": (ROWS, LAYERS * WIDTH),
    "per_layer_model_projection": (LAYERS * WIDTH, D_MODEL),
    "per_layer_projection_norm": (WIDTH,),
}
IDS = np.array([[0, 6, 7, 3], [8, 1, 1, 2]])
BASES = {
    kind: {"rope_theta": 1e4, "rope_type": "default"}
    for kind in ("full_attention", "sliding_attention")
}
ENTRIES = {
    "model_type": "gemma4_text",
    "num_hidden_layers": LAYERS,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "rope_parameters": BASES,
    "rms_norm_eps": 0.25,
    "head_dim": 8,
}


def loaded(folder, entries=ENTRIES, **others):
    arrays = {name: normal(n, *shape) for n, (name, shape) in enumerate((SHAPES | others).items())}
    tensors = {f"model.{name}.weight": np.asarray(array) for name, array in arrays.items()}
    return load_embedder(
        checkpoint(folder, {"tensors": {}}, settings=entries, change=tensors)
    ), arrays


def test_inputs_of_layers_are_those_of_the_formula(tmp_path):
    found, arrays = loaded(tmp_path)
    assert found.per_layer == {"layer_norm_eps": 0.25}
    x = te.Embedder(found.config).apply(found.params, None, IDS, is_training=False)
    ours = te.pretrained.per_layer_inputs(found.params, IDS, x, **found.per_layer)
    table, rows, weights, scale = (np.asarray(array, np.float64) for array in arrays.values())
    for (row, place), token in np.ndenumerate(IDS):
        embedding = table[token] * np.sqrt(D_MODEL)
        for layer in range(LAYERS):
            own = slice(layer * WIDTH, layer * WIDTH + WIDTH)
            projected = weights[own] @ embedding / np.sqrt(D_MODEL)
            normed = projected / np.sqrt(np.mean(projected**2) + 0.25) * scale
            # An id past the second table reads its row 0.
            second = rows[token if token < ROWS else 0][own] * np.sqrt(WIDTH)
            near(ours[row, place, layer], (normed + second) / np.sqrt(2), atol=2e-6)


def test_inputs_of_layers_are_saved_and_loaded_again(tmp_path):
    found, _ = loaded(tmp_path)
    for names in (found.names, None):
        saved = found._replace(names=names)
        save_embedder(tmp_path / "saved", *saved)
        again = load_embedder(tmp_path / "saved")
        assert_identical(found._replace(names=again.names), again)


def test_inputs_of_layers_have_the_dtype_of_x_and_jit_changes_nothing(tmp_path):
    found, _ = loaded(tmp_path)
    x = normal(0, *IDS.shape, D_MODEL)
    run = lambda x: te.pretrained.per_layer_inputs(found.params, IDS, x, **found.per_layer)
    assert run(x.astype("bfloat16")).dtype == "bfloat16"
    near(jax.jit(run)(x), run(x), atol=1e-6)


def test_what_is_not_an_embedding_of_the_ids_is_refused(tmp_path):
    found, _ = loaded(tmp_path)
    for shape in [(2, 4, 5), (4, 4), (2, 3, 4)]:
        with pytest.raises(ValueError, match=r"^x: wanted shape \[2, 4, 4\], got shape "):
            te.pretrained.per_layer_inputs(
                found.params, IDS, np.ones(shape, "f4"), layer_norm_eps=1
            )


def test_a_model_without_inputs_of_layers_has_none(tmp_path):
    table = {"model.embed_tokens.weight": np.ones((9, 4), "f4")}
    path = checkpoint(tmp_path, {"tensors": {}}, settings=ENTRIES, change=table)
    assert load_embedder(path).per_layer is None
