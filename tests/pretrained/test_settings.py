"""What config.json and `settings=` say: settings win, defaults are never quiet, and of a composite
model only the text model's entries are read."""

import dataclasses

import pytest
from cases import few
from checkpoints import (
    CASES,
    LENGTH,
    checkpoint,
    kind_of,
    load,
    load_embedder,
    save_embedder,
    text_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_embed._src.pretrained import model_type, rope

# One case for each model type.
TYPES = {case["settings"]["model_type"]: name for name, case in reversed(CASES.items())}.values()
# Phi-3 has the original length beside its scaling.
ROTATED = [
    name
    for name in TYPES
    if "rope_theta" in kind_of(CASES[name]).names_of_entries() and "phi3" not in name
]
ROPE = {"rope_parameters", rope.TRAINED_LENGTH}.union(
    rope.USUAL_ROTATION, rope.SLIDING_ROTATION
) - {""}
FULL, SLIDING = model_type.FULL, model_type.SLIDING


def found_or_refused(case, in_file, said=None):
    """What a checkpoint with this config.json and these settings gives, and the error."""
    path = checkpoint(case, settings=in_file)
    try:
        found = load_embedder(path, stack=case["stack"], settings=said, length=LENGTH)
        return found._replace(params={}), ""
    except ValueError as error:
        return None, str(error)


SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 3.0, rope.TRAINED_LENGTH: 20, "truncate": False},
    {
        "rope_type": "yarn",
        "factor": 3.0,
        rope.TRAINED_LENGTH: 32,
        "mscale": 0.5,
        "mscale_all_dim": 1.0,
    },
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
]
PARTS = {
    "rope_theta": [100.0, 5e5],
    "rope_scaling": SCALINGS,
    "rope_local_base_freq": [100.0, 5e5],
    "partial_rotary_factor": [0.25, 0.5],
}
PARTS = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(values) for name, values in PARTS.items()}
)


def written(parts, names, is_new):
    """Parts of a rotation as entries of a config.json, in the new form if there is a scaling."""
    parts = {name: value for name, value in parts.items() if name in names}
    if not is_new or "rope_scaling" not in parts:
        return {names[name][0]: value for name, value in parts.items()}
    inside = {key: parts[key] for key in rope.USUAL_ROTATION[:2] if key in parts}
    inside |= parts["rope_scaling"]
    if "rope_local_base_freq" not in names:
        return {"rope_parameters": inside}
    layers = {FULL: inside}
    if "rope_local_base_freq" in parts:
        theta = parts["rope_local_base_freq"]
        layers[SLIDING] = {"rope_type": "default", "rope_theta": theta}
    return {"rope_parameters": layers}


@pytest.mark.slow
@settings(max_examples=30)
@given(st.sampled_from(ROTATED), PARTS, PARTS, st.booleans(), st.booleans())
def test_settings_win_for_both_forms_of_a_rotation(name, in_file, said, is_new_file, is_new_said):
    """Entry by entry, whichever form the two have; a scaling of another type has none of the
    file's."""
    case, names = CASES[name], kind_of(CASES[name]).names_of_entries()
    unread = {alias for entry in ROPE for alias in names.get(entry, ())}
    rest = {key: value for key, value in case["settings"].items() if key not in unread}
    both = in_file | said
    if "rope_scaling" in said:
        both["rope_scaling"] = rope.merge_scalings(
            in_file.get("rope_scaling", {}), said["rope_scaling"]
        )
    expected, reason = found_or_refused(case, rest | written(both, names, is_new=False))
    file, spoken = written(in_file, names, is_new_file), written(said, names, is_new_said)
    found, message = found_or_refused(case, rest | file, spoken)
    assert found == expected
    assert message.split(": ")[-1] == reason.split(": ")[-1]
    if "rope_theta" in said and found is not None:
        assert found.layers[0].rotary["base"] == said["rope_theta"]


def test_settings_of_ones_own_file_may_be_empty():
    found = load("bert")
    save_embedder("x", *found)
    assert load_embedder("x", settings={}).config == found.config


# What an encoder of images, or the whole model, may say beside its text model.
BESIDE = {
    "layer_norm_eps": 0.5,
    "rope_theta": 7,
    "rope_scaling": {"type": "linear", "factor": 4.0},
    "partial_rotary_factor": 0.25,
    "position_embedding_type": "sine",
    **dict.fromkeys(["vocab_size", "hidden_size", "d_model", "max_position_embeddings"], 3),
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "hidden_dropout_prob": 0.25,
    "scale_embedding": True,
}
LEFT_OUT = {"layer_norm_eps", "rope_theta", "rope_parameters", "pad_token_id"}


@pytest.mark.parametrize("name", few(TYPES, 6))
def test_of_a_composite_config_only_the_text_models_entries_are_read(name):
    """Entries that the text model leaves out are its defaults; the output layer is the whole's."""
    case = CASES[name]
    text = {key: value for key, value in text_of(case).items() if key not in LEFT_OUT}
    alone, reason = found_or_refused(case, text)
    whole = BESIDE | {"model_type": "fuyu", "text_config": text}
    found, message = found_or_refused(case, whole)
    assert (found is None, message) == (alone is None, reason)
    if found is not None:
        config = dataclasses.replace(found.config, output=alone.config.output)
        assert (config, found.layers, found.bias) == (alone.config, alone.layers, alone.bias)
