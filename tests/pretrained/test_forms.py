"""One model in many forms: of files, of names, of config.json and `settings=`, saved again or not."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import draw_coverage
import draws
import jax
import numpy as np
import pytest
from cases import few
from checkpoints import (
    CASES,
    HEADS,
    ROOT,
    assert_identical,
    kind_of,
    load_embedder,
    tensors_of,
    text_of,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P  # noqa: F401 (for programs)
from safetensors.numpy import save_file

import transformer_embed as te
from transformer_embed._src.pretrained.attention import NAMES_OF_ATTENTION

MODELS = CASES | {f"{name}, its head": case for name, case in HEADS.items()}
ADAPTED = r"wanted a whole model, got .*, of an adapter: merge it"
ADAPTER = "{}.lora_A.default.weight"


def ways(chosen):
    """How config.json and settings say what the model is."""
    output = plain(chosen["name"]).config.output
    # Whether a whole model scales its logits as its text model does alone is not known.
    is_scaled = output is not None and (output.scale, output.softcap) != (1, None)
    # The library does not read the length inside of Phi-3's scaling; in settings, it is meant.
    is_read = chosen["name"] != "phi3, length inside"
    return ["file", "both", *["settings"] * is_read, *["text_config", "a part"] * (not is_scaled)]


SPACE = draws.Space(
    {
        "name": MODELS,
        "prefix": ["", "model.", "language_model.", "base_model.model.", "module.text."],
        "form": ["file", "shards", "one of two names"],
        "dtype": ["float32", "bfloat16", "float16"],
        "said": ways,
        "adapter": [None, None, None, "a layer", "the table", "the head", "beside"],
        # The table's axes, over a mesh of 2 by 2.
        "split": ["None", "None", "P(None, 'x')", "P('y', 'x')"],
        "is_saved_again": [False, True],
    },
    default=84,
    quick=15,
)
PART = "thinker."
PROGRAM = """\
from test_forms import *

path, options = stored({name!r}, {prefix!r}, {form!r}, {dtype!r}, {said!r}, {adapter!r})
shardings = over_mesh({split})
multiple = 8 if shardings else 1
found = load_embedder(path, **options, shardings=shardings, row_multiple=multiple)
if {is_saved_again}:
    te.pretrained.save_embedder(path / "again", *found)
    found = load_embedder(path / "again", shardings=shardings)"""


def over_mesh(spec):
    """The sharding of a table of tokens; None: it is not split."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    return spec and {"token_embedding/embeddings": NamedSharding(mesh, spec)}


def stored(name, prefix="", form="file", dtype="float32", said="file", adapter=None):
    """A folder with a model in these forms, and the options that load it."""
    folder, case = Path(tempfile.mkdtemp()), MODELS[name]
    prefix = PART * (said == "a part") + prefix
    tensors = {prefix + key: value.astype(dtype) for key, value in tensors_of(case).items()}
    metadata = {"format": "pt"}
    modules = kind_of(case).tokens.format(stack=case["stack"] or "encoder").split()
    ends = [f".{module}.weight" for module in modules]
    table = next(key for end in ends for key in tensors if f".{key}".endswith(end))
    end = {"a layer": f"{prefix}layers.0.q_proj", "the head": f"{prefix}lm_head"}.get(adapter)
    if adapter == "the table":
        end = table.removesuffix(".weight")
        tensors[f"{end}.base_layer.weight"] = tensors.pop(table)
    elif form == "one of two names":
        # As safetensors.torch.save_model leaves it.
        is_tied = getattr(plain(name).config.output, "tied", False)
        kept = "lm_head.weight" if is_tied else "other.weight"
        tensors[prefix + kept], metadata[table] = tensors.pop(table), prefix + kept
    if said == "a part":
        # As in Qwen 2.5-Omni.
        tensors |= {f"talker.{key}": np.zeros_like(value) for key, value in tensors.items()}
    if end:
        tensors[ADAPTER.format(end)] = np.ones((2, 2), dtype)
    if adapter == "beside":
        (folder / "adapter_model.safetensors").touch()
    if form == "shards":
        files = {key: f"model-{n:05}.safetensors" for n, key in enumerate(tensors)}
        for key, file in files.items():
            save_file({key: tensors[key]}, folder / file, {})
        index = json.dumps({"weight_map": files})
        (folder / "model.safetensors.index.json").write_text(index)
    else:
        save_file(tensors, folder / "model.safetensors", metadata)
    return folder, {"stack": case["stack"], "length": 8} | entries(folder, case, said)


def entries(folder, case, said):
    """Writes config.json, and returns the settings or the part that say the rest."""
    in_file, options, text = case["settings"], {}, text_of(case)
    read = {"model_type"}.union(*kind_of(case).names_of_entries().values())
    read |= NAMES_OF_ATTENTION if kind_of(case).attention else set()
    given = {key: value for key, value in text.items() if key in read}
    if said == "settings":
        in_file, options = {"model_type": text["model_type"]}, {"settings": given}
    elif said == "both":
        # Settings go first.
        flags = {key: value for key, value in given.items() if isinstance(value, bool)}
        in_file = text | {key: not value for key, value in flags.items()}
        options = {"settings": flags}
    elif said == "text_config":
        in_file = {"model_type": "fuyu", "text_config": text}
    elif said == "a part":
        in_file, options = {"thinker": {"text": text}}, {"part": "thinker.text"}
    (folder / "config.json").write_text(json.dumps(in_file))
    return options


@functools.cache
def plain(name):
    """The model as the library saves it."""
    path, options = stored(name)
    return load_embedder(path, **options)


def expected_of(chosen):
    """What a draw gives: the plain model's, in its dtype and under its names."""
    found = plain(chosen.name)
    multiple = 1 if chosen.split == "None" else 8
    config = dataclasses.replace(found.config, param_dtype=chosen.dtype, row_multiple=multiple)
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(chosen.dtype), dict(found.params))
    more = [(0, config.rows - config.vocab_size), (0, 0)]
    module = f"{ROOT}token_embedding"
    params[module] = {
        name: np.pad(leaf, more[: leaf.ndim]) for name, leaf in params[module].items()
    }
    prefix = PART * (chosen.said == "a part") + chosen.prefix
    names = {key: prefix + name for key, name in found.names.items()}
    return found._replace(config=config, params=params, names=names)


@pytest.mark.parametrize("number", SPACE.numbers())
def test_a_model_is_the_same_in_any_form(number):
    """An adapter of the input or output layer is refused, one beside it is said, others are left
    out."""
    chosen = SPACE.choices(number)
    program = PROGRAM.format(**vars(chosen))
    with draws.repeated_by(number, program):
        if chosen.adapter in ("the table", "the head"):
            with pytest.raises(ValueError, match=ADAPTED):
                draws.run(number, program)
            return
        if chosen.adapter == "beside":
            with pytest.warns(UserWarning, match=r"adapter_model\.safetensors was not read: an ad"):
                drawn = draws.run(number, program)
        else:
            drawn = draws.run(number, program)
        found = drawn.found
        assert_identical(found, expected_of(chosen))
        if chosen.split != "None":
            table = found.params[f"{ROOT}token_embedding"]["embeddings"]
            assert [table.sharding] == [*drawn.shardings.values()]


@pytest.mark.slow
def test_default_run_meets_every_model_and_form():
    assert draw_coverage.missed_values(SPACE, known=200) == []


@pytest.mark.parametrize("name", few([name for name in CASES if name != "llama, older"], 30))
def test_config_json_alone_says_the_same(name):
    """Apart from the bias of an output layer, and where one model of a type has other tables."""
    path, options = stored(name)
    found, expected = te.pretrained.load_config(path, **options), plain(name)
    if isinstance(found.config.output, te.OutputConfig) and expected.config.output.bias:
        output = dataclasses.replace(found.config.output, bias=True)
        found = found._replace(config=dataclasses.replace(found.config, output=output))
    assert found == expected._replace(params={}, names=None)
