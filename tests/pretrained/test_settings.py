"""What config.json and `settings=` say: settings win, defaults are never quiet, names of tensors
are not guessed."""

import contextlib
import dataclasses
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import CASES, GOLDEN, checkpoint, kind_of, load, read_by, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

import transformer_embed as te
from transformer_embed._src.pretrained import description, files, published, rope

load_embedder = te.pretrained.load_embedder
FOREIGN = json.loads((GOLDEN / "foreign_names.json").read_text())["cases"]
# One case for each architecture.
ARCHITECTURES = {
    kind_of(case).model_types[-1]: name for name, case in reversed(CASES.items())
}.values()
ROTATED = [name for name in ARCHITECTURES if "rope_theta" in kind_of(CASES[name]).names()]
ROPE = (
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
)


def loaded(folder, case, in_file, said=None):
    """What is found in a checkpoint with this config.json and these settings, or the error."""
    path = checkpoint(Path(folder), case, settings=in_file)
    try:
        found = load_embedder(path, stack=case["stack"], settings=said)
    except ValueError as error:
        return str(error).split(":")[-1]
    return found.config, found.rotary, found.bias


def is_accepted(entry, value):
    """Whether an entry may have a value."""
    with contextlib.suppress(TypeError, ValueError):
        description.CHECKS[entry]("x", value)
        return True
    return False


def other_value(entry):
    """A value that no golden config.json has."""
    return next(value for value in (True, 0.375, 6) if is_accepted(entry, value))


ENTRIES = [
    (name, entry)
    for name in ARCHITECTURES
    for field, names in kind_of(CASES[name]).names().items()
    if field not in ROPE
    for entry in names
]


@pytest.mark.parametrize(("name", "entry"), ENTRIES)
def test_settings_win_for_every_entry_of_every_architecture(tmp_path, name, entry):
    case = CASES[name]
    names = kind_of(case).names()
    field = next(field for field, aliases in names.items() if entry in aliases)
    value = other_value(field)
    in_file = {key: each for key, each in case["settings"].items() if key not in names[field]}
    said = loaded(tmp_path, case, case["settings"], {entry: value})
    assert said == loaded(tmp_path, case, in_file | {entry: value})


factors = st.floats(1.0, 8.0).map(lambda value: round(value, 3))
thetas = st.floats(100.0, 1e6).map(lambda value: round(value, 1))
SCALINGS = st.one_of(
    st.just({"rope_type": "default"}),
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors}),
    st.fixed_dictionaries({"rope_type": st.just("dynamic"), "factor": factors}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("yarn"),
            "factor": factors,
            "original_max_position_embeddings": st.integers(16, 64),
        },
        optional={
            "beta_fast": st.floats(8, 64),
            "truncate": st.booleans(),
            "mscale": st.floats(0.1, 2),
            "mscale_all_dim": st.just(1.0),
        },
    ),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": factors,
            "low_freq_factor": st.just(1.0),
            "high_freq_factor": st.floats(2, 8),
        },
        optional={"original_max_position_embeddings": st.integers(16, 64)},
    ),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("longrope"),
            "short_factor": st.just([1.0] * 8),
            "long_factor": st.just([2.0] * 8),
        }
    ),
)
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "theta": thetas,
        "scaling": SCALINGS,
        "sliding": thetas,
        "part": st.sampled_from([0.25, 0.5]),
    },
)


def written(parts, names, form):
    """Parts of a rotation as entries of a config.json, in the old form, the new one, or the old one
    with "type"."""
    parts = {
        name: value
        for name, value in parts.items()
        if name != "part" or "partial_rotary_factor" in names
    }
    layers = "rope_local_base_freq" in names
    parts = {name: value for name, value in parts.items() if name != "sliding" or layers}
    if form == "new" and "scaling" in parts:
        inside = parts["scaling"] | ({"rope_theta": parts["theta"]} if "theta" in parts else {})
        inside |= {"partial_rotary_factor": parts["part"]} if "part" in parts else {}
        if not layers:
            return {"rope_parameters": inside}
        sliding = (
            {rope.SLIDING: {"rope_type": "default", "rope_theta": parts["sliding"]}}
            if "sliding" in parts
            else {}
        )
        return {"rope_parameters": {rope.FULL: inside} | sliding}
    fields = {
        "theta": "rope_theta",
        "sliding": "rope_local_base_freq",
        "part": "partial_rotary_factor",
        "scaling": "rope_scaling",
    }
    entries = {fields[part]: value for part, value in parts.items()}
    if form == "type" and "scaling" in parts:
        scaling = dict(parts["scaling"])
        entries["rope_scaling"] = {"type": scaling.pop("rope_type")} | scaling
    own = {aliases[0]: aliases[-1] for aliases in names.values()}
    return {
        next((alias for alias, field in own.items() if field == name), name): value
        for name, value in entries.items()
    }


@settings(max_examples=80)
@given(
    st.sampled_from(ROTATED),
    PARTS,
    PARTS,
    st.sampled_from(["old", "new", "type"]),
    st.sampled_from(["old", "new", "type"]),
)
def test_settings_win_for_every_form_of_a_rotation(name, in_file, said, file_form, said_form):
    """A scaling replaces the file's whole, a base and a share the file's own, whichever form the
    two have."""
    case = CASES[name]
    names = kind_of(case).names()
    if "longrope" in (parts.get("scaling", {}).get("rope_type") for parts in (in_file, said)):
        in_file, said = (
            {key: value for key, value in parts.items() if key != "part"}
            for parts in (in_file, said)
        )
    rest = {
        key: value
        for key, value in case["settings"].items()
        if all(key not in names.get(each, ()) for each in ROPE)
    }
    rest |= {"original_max_position_embeddings": 48} if "phi3" in name else {}
    # What Phi-3's file says inside its scaling is not read, but what settings say is.
    inside = said.get("scaling", {}).get("original_max_position_embeddings")
    both = (
        rest
        | written(in_file | said, names, "old")
        | ({"original_max_position_embeddings": inside} if inside and "phi3" in name else {})
    )
    with tempfile.TemporaryDirectory() as folder:
        together = loaded(folder, case, both)
        assert (
            loaded(
                folder,
                case,
                rest | written(in_file, names, file_form),
                written(said, names, said_form),
            )
            == together
        )
    if "theta" in said and not isinstance(together, str):
        rotary = together[1].get(rope.FULL, together[1])
        assert rotary["base"] == said["theta"]


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [
        (
            "llama, llama3",
            {"rope_theta": 123.0},
            lambda rotary: rotary["base"] == 123 and "scaling" in rotary,
        ),
        (
            "llama, llama3",
            {"rope_scaling": {"type": "linear", "factor": 2}},
            lambda rotary: rotary["scaling"] == te.LinearScaling(2.0) and rotary["base"] == 500_000,
        ),
        ("llama, llama3", {"rope_scaling": None}, lambda rotary: "scaling" not in rotary),
        (
            "llama, llama3",
            {"rope_parameters": {"rope_theta": 5.0}},
            lambda rotary: rotary["base"] == 5 and "scaling" in rotary,
        ),
        (
            "gemma3",
            {"rope_local_base_freq": 7.0},
            lambda rotary: [each["base"] for each in rotary.values()] == [1e6, 7.0],
        ),
        ("phi", {"partial_rotary_factor": 0.25}, lambda rotary: rotary["rotary_dim"] == 4),
        ("gpt_neox", {"rotary_pct": 0.5}, lambda rotary: rotary["rotary_dim"] == 8),
    ],
)
def test_a_rotation_given_in_settings_was_once_ignored(tmp_path, name, said, expected):
    assert expected(load(tmp_path, name, settings=said).rotary)


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        (
            "bert",
            {"layer_norm_epsilon": 1e-3},
            r"^settings: wanted entries that a model bert reads \(.*layer_norm_eps, .*\), got 'layer_norm_ep",
        ),
        (
            "llama",
            {"partial_rotary_factor": 0.5},
            r"wanted entries that a model llama reads \(.*\), got 'partial_rotary_factor'$",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "facter": 2}},
            r"^settings: wanted entries that a model llama reads \(.*\), got 'rope_scaling: facter'$",
        ),
        (
            "llama",
            {"rope_scaling": {"factor": 2}},
            r"^settings and .*: rope_scaling: rope_type: wanted one of 'default', .*, got None$",
        ),
        (
            "gemma3",
            {"rope_parameters": {"rope_theta": 5.0}},
            r"rope_parameters: wanted an object with the entries full_attention and sliding",
        ),
        (
            "gpt2",
            {"model_type": "zzz"},
            r"^model_type: wanted that of a known model, .*, got 'zzz'; tensors and entries fit a model gpt2: pass",
        ),
        (
            "llama",
            {"rope_theta": True},
            r"^settings: rope_theta: wanted a Python number, got bool True$",
        ),
        (
            "llama",
            {"rope_theta": 0},
            r"^settings: rope_theta: wanted a finite number above 0, got 0",
        ),
        (
            "llama",
            {"rope_theta": -1.0},
            r"^settings: rope_theta: wanted a finite number above 0, got -1",
        ),
        (
            "llama",
            {"rope_theta": float("nan")},
            r"rope_theta: wanted a finite number above 0, got nan",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 0}},
            r"factor: wanted a finite number above 0, got 0",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 0}},
            r"beta_fast: wanted a finite number above 1, got 0",
        ),
        (
            "phi",
            {"partial_rotary_factor": 0},
            r"partial_rotary_factor: wanted a finite number above 0, got 0",
        ),
        (
            "roberta",
            {"pad_token_id": None},
            r"^settings and .*: pad_token_id: wanted a Python int, got NoneType None$",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path, name, said, message):
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path, name, settings=said)
    assert len(str(error.value)) < 600


def test_a_scaling_without_a_type_is_not_taken_for_none(tmp_path):
    path = checkpoint(
        tmp_path,
        CASES["llama"],
        settings=CASES["llama"]["settings"] | {"rope_parameters": {"factor": 4.0}},
    )
    with pytest.raises(
        ValueError,
        match=r"rope_scaling: rope_type: wanted one of 'default', 'linear', .*, got None$",
    ):
        load_embedder(path)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("bert", "layer_norm_eps"),
        ("bart", "scale_embedding"),
        ("t5", "relative_attention_max_distance"),
    ],
)
def test_a_config_without_model_type_has_no_defaults(tmp_path, name, entry):
    case = CASES[name]
    ours = {
        key: value for key, value in case["settings"].items() if key not in ("model_type", entry)
    }
    path = checkpoint(tmp_path, case, settings=ours)
    model = case["settings"]["model_type"]
    with pytest.raises(
        ValueError,
        match=rf"wanted {entry} of {model}, from settings or .*, got model_type None there$",
    ):
        load_embedder(path, settings={"model_type": model})
    with pytest.raises(
        ValueError,
        match=r"^model_type: wanted that of a known model, from settings or .*, got None; ",
    ):
        load_embedder(path)


def test_a_file_of_another_type_lends_no_defaults(tmp_path):
    path = checkpoint(tmp_path, CASES["bert"], settings={"model_type": "bert"})
    with pytest.raises(ValueError, match=r"wanted layer_norm_eps, pad_token_id of roberta"):
        load_embedder(path, settings={"model_type": "roberta"})


# Input layers that compute the same, under names that only they share: it does not matter which of
# them it is.
SAME = {
    "gpt2": {"gpt-sw3", "gpt_bigcode", "gpt_neo", "imagegpt"},
    "clip": {
        "aimv2",
        "clipseg",
        "groupvit",
        "metaclip_2",
        "owlv2",
        "owlvit",
        "sam3",
        "sam3_video",
        "siglip",
        "siglip2",
        "xclip",
    },
    "roberta": {"altclip", "xmod"},
    "gpt_neox": {"gpt_neox_japanese"},
    "albert": {"rembert"},
}


def test_names_of_tensors_that_other_models_share_are_asked_for():
    """300 model types of the transformers library whose names match one of ours."""
    for case in FOREIGN:
        path = Path("none/model.safetensors")
        tensors = files.Tensors(path, dict.fromkeys(case["names"], path), {}, lambda path: ({}, {}))
        for stack in description.STACKS:
            known = published._type_by_names(tensors, stack)
            assert known is None or set(case["model_types"]) <= SAME[known], case
    types = {each for case in FOREIGN for each in case["model_types"]}
    assert {"whisper", "blenderbot-small", "led", "umt5"} <= types


def test_a_bias_for_each_layer_is_not_t5(tmp_path):
    bias = "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"
    path = checkpoint(tmp_path, CASES["t5"], change={bias: np.zeros((32, 2), np.float32)})
    with pytest.raises(
        ValueError,
        match=r"wanted an input layer like that of t5, or its table .*, got every layer has a bias of its own, as in UMT5$",
    ):
        load_embedder(path)


def test_an_untied_stack_has_its_own_table(tmp_path):
    for name in ("bart, untied encoder", "m2m100, untied decoder"):
        found = load(tmp_path, name)
        assert (
            found.names[description.TOKENS] == f"model.{CASES[name]['stack']}.embed_tokens.weight"
        )
        assert not np.array_equal(
            found.params["transformer_embedding/~/token_embedding"]["embeddings"],
            tensors_of(CASES[name])["model.shared.weight"],
        )


def test_opt_without_padding_counts_every_token(tmp_path):
    assert load(tmp_path, "opt, no padding").config.scheme == te.Learned(12, start=2)


def test_a_checkpoint_is_the_same_from_settings_alone(tmp_path):
    case = CASES["qwen3, yarn"]
    beside = load(tmp_path, "qwen3, yarn")
    (tmp_path / "config.json").unlink()
    alone = load_embedder(tmp_path, settings=read_by(case))
    assert (
        dataclasses.replace(alone.config, dropout_rate=beside.config.dropout_rate) == beside.config
    )
    assert alone.rotary == beside.rotary


# --- Composite models.

# What an encoder of images, or the whole model, may say beside its text model.
BESIDE = st.fixed_dictionaries(
    {},
    optional={
        "layer_norm_eps": st.sampled_from([1e-5, 0.5, None]),
        "rope_theta": st.sampled_from([1200.0, 7]),
        "rope_scaling": st.just({"type": "linear", "factor": 4.0}),
        "partial_rotary_factor": st.just(0.25),
        "position_embedding_type": st.sampled_from(["sine", "absolute"]),
        "vocab_size": st.integers(1, 99),
        "hidden_size": st.integers(1, 99),
        "d_model": st.integers(1, 99),
        "max_position_embeddings": st.integers(1, 99),
        "pad_token_id": st.integers(0, 5),
        "tie_word_embeddings": st.booleans(),
        "hidden_dropout_prob": st.floats(0, 0.5),
        "scale_embedding": st.booleans(),
    },
)


@settings(max_examples=60)
@given(
    st.sampled_from(list(ARCHITECTURES)),
    BESIDE,
    st.sampled_from(["text_config", "text"]),
    st.sampled_from(["an outer model", None, "bert"]),
    st.sets(st.sampled_from(["layer_norm_eps", "rope_theta", "rope_parameters", "pad_token_id"])),
)
def test_of_a_composite_config_only_the_text_models_entries_are_read(
    name, beside, part, outer, left_out
):
    """Entries that the text model leaves out are its defaults; the output layer is the whole's."""
    case = CASES[name]
    text = {key: value for key, value in case["settings"].items() if key not in left_out}
    text = text.get("text_config", text)
    with tempfile.TemporaryDirectory() as folder:
        alone = loaded(folder, case, text)
        whole = beside | {part: text} | ({"model_type": outer} if outer else {})
        found = loaded(folder, case, whole)
    if isinstance(alone, str) or isinstance(found, str):
        assert found == alone
        return
    config, *others = found
    assert [dataclasses.replace(config, output=alone[0].output), *others] == [*alone]


@pytest.mark.parametrize(("name", "field"), [(n, f) for n in ARCHITECTURES for f in ("text", 3)])
def test_a_text_config_that_is_not_an_object_is_no_text_model(tmp_path, name, field):
    case = CASES[name]
    assert loaded(tmp_path, case, case["settings"] | {"text": field}) == loaded(
        tmp_path, case, case["settings"]
    )


# --- Who is to blame.

NUMBERS = [
    (name, field)
    for name in ARCHITECTURES
    for field in kind_of(CASES[name]).names()
    if any(is_accepted(field, number) for number in (0.5, 5)) and not is_accepted(field, "")
]


@pytest.mark.parametrize(("name", "field"), NUMBERS)
@pytest.mark.parametrize("value", [0, -1, 1e30])
def test_a_wrong_number_in_settings_is_blamed_on_settings(tmp_path, name, field, value):
    """By the entry's own name, unless it disagrees with a tensor's size."""
    case = CASES[name]
    path = checkpoint(tmp_path, case)
    try:
        load_embedder(path, stack=case["stack"], settings={field: value})
    except ValueError as error:
        message = str(error)
        assert message.startswith("settings") or ": wanted shape [" in message
        if isinstance(value, float) or "eps" in field or "theta" in field or "drop" in field:
            assert message.startswith((f"settings: {field}: wanted ", "settings and "))


def test_settings_of_ones_own_file_may_be_empty(tmp_path):
    config = te.EmbedderConfig(5, 4)
    params = te.Embedder(config).init(jax.random.key(0))
    te.pretrained.save_embedder(tmp_path / "x", config, params)
    assert load_embedder(tmp_path / "x", settings={}).config == config
    want = r"^settings: wanted None, since names or metadata say what they would, got dict {'model"
    with pytest.raises(ValueError, match=want):
        load_embedder(tmp_path / "x", settings={"model_type": "mamba9"})


def test_a_model_type_beside_that_of_the_file_is_named(tmp_path):
    case = CASES["roberta"]
    rest = {key: each for key, each in case["settings"].items() if key != "layer_norm_eps"}
    path = checkpoint(tmp_path, case, settings=rest)
    with pytest.raises(ValueError, match=r"got model_type 'roberta' there$"):
        load_embedder(path, settings={"model_type": "bert"})


def test_a_decoder_alone_says_to_pass_the_stack(tmp_path):
    case = CASES["bart, its decoder"]
    names = [name for name in case["tensors"] if "encoder" in name or "shared" in name]
    table = {"model.decoder.embed_tokens.weight": tensors_of(case)["model.shared.weight"]}
    path = checkpoint(tmp_path, case, drop=names, change=table)
    message = r"wanted the encoder of bart; pass stack='decoder' for its decoder, got \d+ tensors"
    with pytest.raises(ValueError, match=message):
        load_embedder(path)
    assert load_embedder(path, stack="decoder").config.d_model == 8


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_resized_vocabulary_says_how_to_load_it(tmp_path, name):
    case = CASES[name]
    entries = case["settings"]
    text = entries.get("text_config", entries)
    size = text["vocab_size"]
    path = checkpoint(tmp_path, case, settings=text | {"vocab_size": size + 4})
    message = (
        rf"vocab_size: wanted {size}, as the tensors say \(if they are right: "
        rf"settings={{'vocab_size': {size}}}\), got {size + 4}$"
    )
    with pytest.raises(ValueError, match=message):
        load_embedder(path, stack=case["stack"])
    found = load_embedder(path, stack=case["stack"], settings={"vocab_size": size})
    assert found.config.vocab_size == size


def test_opt_counts_its_published_position_ids_from_2(tmp_path):
    """The original adds 2 to `position_ids`; ours are rows of the table."""
    found = load(tmp_path, "opt")
    ids = [[5, 6, 7]]
    apply = te.Embedder(found.config).apply
    counted = apply(found.params, None, ids, is_training=False)
    given = apply(found.params, None, ids, is_training=False, positions=np.arange(3) + 2)
    np.testing.assert_array_equal(counted, given)


def test_a_models_own_name_wins_and_null_does_not_hide_the_other(tmp_path):
    case = CASES["bart"]
    both = case["settings"] | {"hidden_size": 9}
    assert load_embedder(checkpoint(tmp_path, case, settings=both)).config.d_model == 8
    path = checkpoint(tmp_path, case, settings=both | {"d_model": None})
    with pytest.raises(ValueError, match=r"hidden_size: wanted 8, as the tensors say"):
        load_embedder(path)


@pytest.mark.parametrize(
    ("name", "entry", "kind", "pair_axes"),
    [
        ("qwen2_vl", "rope_scaling", {"type": "mrope"}, (0, 0, 0, 1, 1, 1, 2, 2)),
        ("qwen2_5_vl_text", "rope_parameters", {"rope_theta": 70.0}, (0, 0, 0, 1, 1, 1, 2, 2)),
        ("qwen3_vl_text", "rope_parameters", {"rope_theta": 70.0}, (0, 1, 2, 0, 1, 2, 0, 1)),
        ("qwen3_5_text", "rope_scaling", {"rope_type": "default"}, (0, 1, 2, 0, 1, 2, 0, 1)),
    ],
)
def test_sections_rotate_by_time_height_and_width(tmp_path, name, entry, kind, pair_axes):
    """As in the published files; positions that are equal on all axes rotate as without them."""
    sections = {"rope_type": "default"} | kind | {"mrope_section": [3, 3, 2]}
    share = {"partial_rotary_factor": 1.0}
    entries = {"model_type": name, "rope_theta": 70.0, "vocab_size": 12, entry: sections} | share
    found = load_embedder(checkpoint(tmp_path, CASES["llama"], settings=entries))
    assert found.rotary == {"base": 70.0, "layout": "half", "pair_axes": pair_axes}
    heads = np.random.default_rng(0).random((5, 2, 16), np.float32)
    points = np.repeat(np.arange(5)[:, None], 3, -1)
    plain = te.apply_rotary(heads, np.arange(5), base=70.0)
    np.testing.assert_array_equal(te.apply_rotary(heads, points, **found.rotary), plain)
    te.pretrained.save_embedder(tmp_path / "saved", *found)
    assert load_embedder(tmp_path / "saved").rotary == found.rotary
    entries["model_type"] = "qwen3_next"
    path = checkpoint(tmp_path, CASES["llama"], settings=entries)
    with pytest.raises(
        ValueError,
        match="mrope_section: wanted none, since a model qwen3_next is not known to have them, got",
    ):
        load_embedder(path)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl_text"])
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ([8192] * 10**6, "mrope_section: its sum: wanted an int of at most 8192, got 8192000000"),
        ([3, -1, 2], r"mrope_section\[1\]: wanted an int of at least 0, got -1"),
        ([3, "3", 2], r"mrope_section\[1\]: wanted a Python int, got str '3'"),
        (8, "mrope_section: wanted a sequence, got int 8"),
    ],
)
def test_wrong_sections_are_refused_before_memory_is_taken(tmp_path, name, sections, message):
    scaling = {"rope_type": "default", "mrope_section": sections}
    entries = {"model_type": name, "vocab_size": 12, "rope_scaling": scaling}
    with pytest.raises(ValueError, match=message):
        load_embedder(checkpoint(tmp_path, CASES["llama"], settings=entries))


@pytest.mark.parametrize(("sizes", "rotated"), [({}, 4), ({"global_head_dim": 32}, 8)])
def test_full_layers_may_have_wider_heads_of_which_a_share_rotates(tmp_path, sizes, rotated):
    """As in Gemma 4, whose pairs span the whole head."""
    share = {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.25}
    layers = {rope.FULL: share, rope.SLIDING: {"rope_type": "default", "rope_theta": 10.0}}
    entries = {"model_type": "gemma4_text", "head_dim": 16, "rope_parameters": layers} | sizes
    found = load_embedder(checkpoint(tmp_path, CASES["llama"], settings=entries))
    full = {"base": 100.0, "layout": "half", "partial": "proportional", "rotary_dim": rotated}
    assert found.rotary == {rope.FULL: full, rope.SLIDING: {"base": 10.0, "layout": "half"}}
