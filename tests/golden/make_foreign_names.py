"""Writes foreign_names.json: tensor names of models of the transformers library that te.pretrained
does not know but could confuse.

Run: python tests/golden/make_foreign_names.py
Needs: torch (a CPU build), transformers, and this package's dependencies. Models are built without
    weights; it takes some minutes.
"""

import contextlib
import json
import pathlib
import sys

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from transformer_embed._src.pretrained import (
    architecture,
    architectures,
    files,
    published,
    recognition,
)

MAPPINGS = (
    "MODEL",
    "MODEL_FOR_PRETRAINING",
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
)
LAYERS = (
    "num_hidden_layers",
    "encoder_layers",
    "decoder_layers",
    "num_layers",
    "n_layer",
    "n_layers",
)
KNOWN = {name for each in architectures.ARCHITECTURES for name in each.model_types}
ENDS = {
    name.format(stack=stack)
    for each in architectures.ARCHITECTURES
    for stack in architecture.STACKS
    for parameter, names in (each.tensors(stack) | {"refused": each.refused}).items()
    for name in names
    if "output" not in parameter
}


def small(config):
    """Two layers, which have all names."""
    for part in (
        config,
        *(getattr(config, name, None) for name in ("text_config", "encoder", "decoder")),
    ):
        for name in LAYERS if part is not None else ():
            if isinstance(getattr(part, name, None), int) and getattr(part, name) > 2:
                with contextlib.suppress(Exception):
                    setattr(part, name, 2)
    return config


def models():
    """Each model type that is not known, with the names of a model's tensors."""
    for model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        for mapping in MAPPINGS if model_type not in KNOWN else ():
            # Some models need packages that are not installed, or have no default configuration.
            with contextlib.suppress(Exception), torch.device("meta"):
                kind = configuration_auto.CONFIG_MAPPING[model_type]
                found = getattr(modeling_auto, f"{mapping}_MAPPING")[kind]
                for model in found if isinstance(found, tuple) else (found,):
                    yield model_type, list(model(small(kind())).state_dict())


def main():
    """A line for each set of names."""
    types = {}
    for model_type, tensors in models():
        names = sorted(
            name for name in tensors if any(name == end or name.endswith(f".{end}") for end in ENDS)
        )
        found = files.Tensors(HERE, dict.fromkeys(names, HERE), {}, lambda _: ({}, {}))
        if any(
            recognition.matches(architectures.ARCHITECTURES, published.Published(found, stack))
            for stack in architecture.STACKS
        ):
            types.setdefault(tuple(names), set()).add(model_type)
    lines = ",\n".join(
        json.dumps({"model_types": sorted(each), "names": names})
        for names, each in sorted(types.items())
    )
    (HERE / "foreign_names.json").write_text(
        f'{{"made": {json.dumps({"transformers": transformers.__version__})}, "cases": [\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    main()
