"""What config.json and `settings=` say: settings win, defaults are never quiet, wrong entries are
named."""

import dataclasses
import re
import tempfile
import time
from pathlib import Path

import pytest
from cases import few
from checkpoints import (
    CASES,
    LENGTH,
    checkpoint,
    kind_of,
    load,
    load_embedder,
    rotary_of,
    save_embedder,
    table,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import transformer_embed as te
from transformer_embed._src.pretrained import architecture, rope

# One case for each model type.
TYPES = {case["settings"]["model_type"]: name for name, case in reversed(CASES.items())}.values()
# Phi-3 has the original length beside its scaling.
ROTATED = [
    name for name in TYPES if "rope_theta" in kind_of(CASES[name]).names() and "phi3" not in name
]
ROPE = {name for names in rope.LAYERS.values() for name in names} | {
    "rope_parameters",
    rope.ORIGINAL,
}


def found_or_refused(folder, case, in_file, said=None):
    """What a checkpoint with this config.json and these settings gives, and the error."""
    path = checkpoint(Path(folder), case, settings=in_file)
    try:
        found = load_embedder(path, stack=case["stack"], settings=said, length=LENGTH)
        return found._replace(params={}), ""
    except ValueError as error:
        return None, str(error)


SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 3.0, rope.ORIGINAL: 20, "truncate": False},
    {"rope_type": "yarn", "factor": 3.0, rope.ORIGINAL: 32, "mscale": 0.5, "mscale_all_dim": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
]
thetas = st.sampled_from([100.0, 5e5])
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "rope_theta": thetas,
        "rope_scaling": st.sampled_from(SCALINGS),
        "rope_local_base_freq": thetas,
        "partial_rotary_factor": st.sampled_from([0.25, 0.5]),
    },
)


def written(parts, names, is_new):
    """Parts of a rotation as entries of a config.json, in the new form if there is a scaling."""
    parts = {name: value for name, value in parts.items() if name in names}
    if not is_new or "rope_scaling" not in parts:
        return {names[name][0]: value for name, value in parts.items()}
    inside = {key: parts[key] for key in rope.LAYERS[architecture.FULL][:2] if key in parts}
    inside |= parts["rope_scaling"]
    if "rope_local_base_freq" not in names:
        return {"rope_parameters": inside}
    layers = {architecture.FULL: inside}
    if "rope_local_base_freq" in parts:
        theta = parts["rope_local_base_freq"]
        layers[architecture.SLIDING] = {"rope_type": "default", "rope_theta": theta}
    return {"rope_parameters": layers}


@pytest.mark.slow
@settings(max_examples=30)
@given(st.sampled_from(ROTATED), PARTS, PARTS, st.booleans(), st.booleans())
def test_settings_win_for_both_forms_of_a_rotation(name, in_file, said, is_new_file, is_new_said):
    """Entry by entry, whichever form the two have; a scaling of another type has none of the
    file's."""
    case, names = CASES[name], kind_of(CASES[name]).names()
    unread = {alias for entry in ROPE for alias in names.get(entry, ())}
    rest = {key: value for key, value in case["settings"].items() if key not in unread}
    both = in_file | said
    if "rope_scaling" in said:
        both["rope_scaling"] = rope.merged(in_file.get("rope_scaling", {}), said["rope_scaling"])
    both = rest | written(both, names, is_new=False)
    file, spoken = written(in_file, names, is_new_file), written(said, names, is_new_said)
    with tempfile.TemporaryDirectory() as folder:
        expected, reason = found_or_refused(folder, case, both)
        found, message = found_or_refused(folder, case, rest | file, spoken)
    assert found == expected
    assert message.split(": ")[-1] == reason.split(": ")[-1]
    if "rope_theta" in said and found is not None:
        assert found.layers[0].rotary["base"] == said["rope_theta"]


HALF = {"layout": "half"}


def test_what_a_config_leaves_out_is_the_architectures(tmp_path):
    kept = CASES["phi"]["settings"] | {"rope_parameters": None}
    found = load_embedder(checkpoint(tmp_path, CASES["phi"], settings=kept))
    assert rotary_of(found) == HALF | {"base": 1e4, "rotary_dim": 8}
    assert load(tmp_path, "opt, no padding").config.scheme == te.Learned(12, start=2)


def test_settings_of_ones_own_file_may_be_empty(tmp_path):
    found = load(tmp_path, "bert")
    save_embedder(tmp_path / "x", *found)
    assert load_embedder(tmp_path / "x", settings={}).config == found.config
    want = r"^settings: wanted None, since names or metadata say what it would, got dict {'model"
    with pytest.raises(ValueError, match=want):
        load_embedder(tmp_path / "x", settings={"model_type": "mamba9"})


@pytest.mark.parametrize("name", few(TYPES, 5))
def test_a_resized_vocabulary_says_how_to_load_it(tmp_path, name):
    case = CASES[name]
    text = case["settings"].get("text_config", case["settings"])
    size = text["vocab_size"]
    told = checkpoint(tmp_path, case, settings=text | {"vocab_size": size + 4})
    message = (
        rf"vocab_size: wanted {size}, as the tensors say \(if they are right: "
        rf"settings={{'vocab_size': {size}}}\), got {size + 4}$"
    )
    with pytest.raises(ValueError, match=message):
        load_embedder(told, stack=case["stack"])
    found = load_embedder(told, stack=case["stack"], settings={"vocab_size": size})
    assert found.config.vocab_size == size


# --- Composite models.

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
def test_of_a_composite_config_only_the_text_models_entries_are_read(tmp_path, name):
    """Entries that the text model leaves out are its defaults; the output layer is the whole's."""
    case = CASES[name]
    text = case["settings"].get("text_config", case["settings"])
    text = {key: value for key, value in text.items() if key not in LEFT_OUT}
    alone, reason = found_or_refused(tmp_path, case, text)
    whole = BESIDE | {"model_type": "an outer model", "text_config": text}
    found, message = found_or_refused(tmp_path, case, whole)
    assert (found is None, message) == (alone is None, reason)
    if found is not None:
        config = dataclasses.replace(found.config, output=alone.config.output)
        assert (config, found.layers, found.bias) == (alone.config, alone.layers, alone.bias)


# --- Rotations.


@pytest.mark.parametrize(
    ("name", "entry", "kind", "pair_axes"),
    [
        ("qwen2_vl", "rope_scaling", {"type": "mrope"}, (0, 0, 0, 0, 1, 1, 2, 2)),
        ("qwen3_vl_text", "rope_parameters", {"rope_theta": 70.0}, (0, 1, 2, 0, 1, 2, 0, 0)),
    ],
)
def test_sections_rotate_by_time_height_and_width(tmp_path, name, entry, kind, pair_axes):
    """As in the published files, where time also has the pairs that are left when the turns of
    height and width have ended."""
    sections = {"rope_type": "default", "mrope_section": [4, 2, 2]} | kind
    entries = {"model_type": name, "head_dim": 16, "rope_theta": 70.0, entry: sections}
    found = load_embedder(table(tmp_path, entries | {"partial_rotary_factor": 1.0}))
    assert rotary_of(found) == HALF | {"base": 70.0, "pair_axes": pair_axes}


@pytest.mark.parametrize(
    ("sizes", "rotated"),
    [
        ({}, 128),
        ({"global_head_dim": 32}, 8),
        # As the library saves it.
        ({"per_layer_config": {"05": {"head_dim": 32, "num_key_value_heads": 1}}}, 8),
    ],
)
def test_full_layers_may_have_wider_heads_of_which_a_share_rotates(tmp_path, sizes, rotated):
    """As in Gemma 4, whose pairs span the whole head."""
    share = {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.25}
    layers = {
        architecture.FULL: share,
        architecture.SLIDING: {"rope_type": "default", "rope_theta": 10.0},
    }
    entries = {"model_type": "gemma4_text", "head_dim": 16, "rope_parameters": layers}
    entries["layer_types"] = [architecture.SLIDING, architecture.FULL] * 3
    full = HALF | {"base": 100.0, "partial": "proportional", "rotary_dim": rotated}
    found = load_embedder(table(tmp_path, entries | sizes))
    assert rotary_of(found) == {
        architecture.FULL: full,
        architecture.SLIDING: HALF | {"base": 10.0},
    }


# --- Errors.

OF_TYPE = r"rope_type: wanted one of 'default', .*, got"
READ = r"^settings: wanted entries that a model \w+ reads \(.*\), got "
YARN = {"rope_type": "yarn", "factor": 0}


def sectioned(sections):
    return {
        "model_type": "qwen2_vl",
        "rope_scaling": {"rope_type": "default", "mrope_section": sections},
    }


# In config.json, beside what the model says.
IN_FILE = [
    ("bert", {"vocab_size": 13}, r"for a model bert: vocab_size: wanted 12, as the tensors say \(.*\), got 13$"),
    ("opt", {"max_position_embeddings": 9}, r"embed_positions\.weight: wanted shape \[11, 8\]"),
    ("t5", {"num_heads": 3}, r"relative_attention_bias\.weight: wanted shape \[32, 3\]"),
    ("bert", {"layer_norm_eps": -1}, "for a model bert: .*wanted a number above 0 that float32 holds"),
    ("llama", {"rope_parameters": {"rope_type": "quantum"}}, f"{OF_TYPE} 'quantum'"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "for a model llama: .* missing 1 required positional argument: 'factor'$"),
    ("llama", {"rope_parameters": [1]}, r"for a model llama: rope_parameters: wanted an object, got list \[1\]"),
    ("phi", {"num_attention_heads": 0, "rope_parameters": None}, "num_attention_heads: wanted an int of at least 1, got 0"),
    ("llama", {"rope_scaling": {"type": "mrope", "mrope_section": [4, 4]}}, "is not read .*, got mrope_section: "),
    ("llama", {"rope_scaling": {"short_mscale": 1.0, "long_mscale": 1.5}}, r"rope_scaling: wanted equal short_mscale, long_mscale, got \(1.0, 1.5\)"),
    ("llama", sectioned([8192] * 10**5), "mrope_section: its sum: wanted an int of at most 8192, got 819200000"),
]  # fmt: skip
# In settings.
IN_SETTINGS = [
    ("bert", {"layer_norm_epsilons": 1e-3}, f"{READ}'layer_norm_ep"),
    ("llama", {"rotary_fancy": None}, f"{READ}'rotary_fancy'$"),
    ("llama", {"rope_scaling": {"type": "linear", "facter": 2}}, f"{READ}'rope_scaling: facter'$"),
    ("gemma3", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters: wanted an object with the entries full_attention and sliding"),
    ("llama", {"rope_theta": True}, "^settings: rope_theta: wanted a Python number, got bool True$"),
    ("llama", {"rope_theta": 0}, "^settings: rope_theta: wanted a number above 0 that float32 holds"),
    ("llama", {"rope_scaling": YARN}, "factor: wanted a number above 0 that float32 holds"),
    ("phi", {"partial_rotary_factor": 2.0}, "^settings and .*: partial_rotary_factor: wanted an int of at most 16, got 32"),
    ("roberta", {"pad_token_id": None}, "^settings and .*: pad_token_id: wanted a Python int, got None$"),
]  # fmt: skip
TABLE = [(False, *row) for row in IN_FILE] + [(True, *row) for row in IN_SETTINGS]


@pytest.mark.parametrize(("is_said", "name", "entries", "message"), TABLE)
def test_entries_that_mean_nothing_are_refused_at_once(tmp_path, is_said, name, entries, message):
    case, start = CASES[name], time.process_time()
    in_file = case["settings"] if is_said else case["settings"] | entries
    found, text = found_or_refused(tmp_path, case, in_file, entries if is_said else None)
    assert found is None
    assert re.search(message, text)
    assert len(text) < 600
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("name", "left_out", "said", "message"),
    [
        ("bert", ["layer_norm_eps"], "bert", "wanted layer_norm_eps of bert, from settings or .*, got model_type None there$"),
        ("t5", ["relative_attention_max_distance"], "t5", "wanted relative_attention_max_distance of t5, .* None there$"),
        ("bert", ["layer_norm_eps", "pad_token_id"], "roberta", "wanted layer_norm_eps, pad_token_id of roberta"),
        ("bloom", ["n_head", "layer_norm_epsilon"], "bloom", "wanted layer_norm_eps, num_attention_heads of bloom"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("type_in_file", [None, "electra", "dpr"])
def test_without_the_type_in_the_file_there_are_no_defaults(
    tmp_path, name, left_out, said, message, type_in_file
):
    case = CASES[name]
    entries = {key: each for key, each in case["settings"].items() if key not in left_out}
    entries |= {"model_type": type_in_file}
    _, text = found_or_refused(tmp_path, case, entries, {"model_type": said})
    assert re.search(message.replace("None", repr(type_in_file)), text)
