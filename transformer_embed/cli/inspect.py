"""The command `inspect`, which prints what a checkpoint, a config.json or a model type says."""

import argparse
import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from transformer_embed import pretrained
from transformer_embed._src.arguments import shown, value_error
from transformer_embed.cli.model_types import print_model_type

# How the paths of parameters begin that `load_embedder` returns for the layer: the embeddings and
# the output layer, T5's position bias, and the extra inputs of Gemma's layers.
LAYER = ("transformer_embedding/~/", "relative_position_bias/", "per_layer_inputs/")


def add_to(commands: Any) -> None:
    """Adds the command to the commands of a parser."""
    parser = commands.add_parser(
        "inspect",
        help="print the input layer found in a checkpoint",
        description="Prints the input layer of a published model's checkpoint, of a config.json, "
        "or of a file that `train --out` wrote: the code that makes the layer, each parameter "
        "with the tensor that it comes from, and the arguments of rotary embeddings or of a "
        "position bias if the model has them. Without a checkpoint, prints what is known of a "
        "model type.",
    )
    parser.add_argument(
        "checkpoint",
        nargs="?",
        metavar="CHECKPOINT",
        help="a safetensors file, the index file of a sharded checkpoint, a folder with one of "
        "them, or a config.json",
    )
    parser.add_argument(
        "--stack",
        choices=("encoder", "decoder"),
        help="stack to read if the checkpoint has both (default: encoder)",
    )
    parser.add_argument(
        "--part",
        metavar="NAME",
        help="part of a larger model to read, by the path of its object in config.json, such as "
        "thinker_config.text_config",
    )
    parser.add_argument(
        "--model-type",
        metavar="NAME",
        help="model type, such as bert or llama, if no config.json has it",
    )
    parser.add_argument(
        "--settings",
        metavar="FILE.json",
        help="entries of a config.json, which override those beside the checkpoint",
    )
    parser.add_argument(
        "--length",
        type=int,
        metavar="TOKENS",
        help="tokens of the longest text, for models whose rotation depends on it (Phi-3 128k)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints what the checkpoint holds, or what is known of a model type."""
    if args.checkpoint is None:
        if args.model_type is None:
            raise value_error("inspect", "a CHECKPOINT, or --model-type", "neither")
        print_model_type(pretrained.find_model_type(args.model_type))
        return
    # What `load_embedder` or `load_config` returns for these arguments.
    found = _read(args)
    print(f"layer\n  te.TransformerEmbedding({_code_for(found.config)})")
    # If there is no output layer, `no_output` is a sentence that says why.
    if found.no_output is not None:
        print(f"no output layer\n  {shown(found.no_output)}")
    _print_parameters(found)
    _print_layers(found)
    if found.bias:
        options = _code_of_arguments(found.bias)
        call = f"alibi_bias(query_positions, key_positions, {options})"
        if "num_buckets" in found.bias:
            call = f"RelativePositionBias({options})"
        print(f"bias\n  {call}")


def _read(args: argparse.Namespace) -> pretrained.PretrainedInput:
    """Returns the input layer of the checkpoint or the config.json that the arguments name.

    The options of the command, such as --stack, are passed on to `load_embedder` or `load_config`.
    """
    settings = {}
    if args.settings is not None:
        settings = _read_settings(pathlib.Path(args.settings).expanduser())
    if args.model_type is not None:
        settings["model_type"] = args.model_type
    options = {
        "settings": settings or None,
        "stack": args.stack,
        "length": args.length,
        "part": args.part,
    }
    path = pathlib.Path(args.checkpoint).expanduser()
    # A config.json has no tensors. An index file is JSON, too, but it lists files of tensors.
    is_index = path.name.endswith(".index.json")
    if path.suffix == ".json" and not is_index:
        return pretrained.load_config(path, **options)
    return pretrained.load_embedder(args.checkpoint, **options)


def _read_settings(path: pathlib.Path) -> dict[str, Any]:
    """Returns the entries in a file of settings."""
    try:
        settings = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, as JSON: {error}") from error
    if not isinstance(settings, dict):
        raise value_error(path, "a JSON object", type(settings).__name__)
    return settings


def _print_parameters(found: pretrained.PretrainedInput) -> None:
    """Prints each parameter of the layer, and the number of parameters outside of the layer."""
    # The name of each parameter's tensor, by the parameter's path.
    tensor_names = found.names or {}
    layer_paths = [path for path in tensor_names if path.startswith(LAYER)]
    for path in sorted(layer_paths):
        module, _, leaf = path.rpartition("/")
        array = found.params[module][leaf]
        tensor_name = shown(tensor_names[path])
        print(f"{shown(path)}\n  {array.dtype}{list(array.shape)}, from {tensor_name}")
    outside_layer = len(tensor_names) - len(layer_paths)
    if outside_layer:
        print(f"beside the layer\n  {outside_layer} parameters")


def _print_layers(found: pretrained.PretrainedInput) -> None:
    """Prints the rotation and the mask of the layers, once for all layers that are equal."""
    # The keys are the texts of the layers. A layer itself cannot be a key, because it holds
    # dictionaries, which are not hashable.
    indices_by_text = collections.defaultdict(list)
    for index, layer in enumerate(found.layers):
        indices_by_text[repr(layer)].append(index)
    for indices in indices_by_text.values():
        # All layers with these indices are equal.
        first_index, *_ = indices
        layer = found.layers[first_index]
        listed_indices = ", ".join(map(str, indices))
        print(f"{shown(layer.type)}, in layers {listed_indices}")
        if layer.rotary is not None:
            print(f"  apply_rotary(x, positions, {_code_of_arguments(layer.rotary)})")
        if layer.query_scale is not None:
            print(f"  query_scale(positions, {_code_of_arguments(layer.query_scale)})")
        print(f"  AttentionMask(tokens, {_code_of_arguments(layer.mask)})")


def _code_for(value: Any) -> str:
    """Returns code that makes a value, after `import transformer_embed as te`.

    Fields of a config that have their defaults are left out.
    """
    # The repr of a dtype, "dtype('float32')", would need numpy. The name, "float32", needs nothing.
    if isinstance(value, np.dtype):
        return repr(value.name)
    if not dataclasses.is_dataclass(value):
        return repr(value)
    options = {}
    for field in dataclasses.fields(value):
        field_value = getattr(value, field.name)
        if field_value != field.default:
            options[field.name] = field_value
    return f"te.{type(value).__name__}({_code_of_arguments(options)})"


def _code_of_arguments(options: Mapping[str, Any]) -> str:
    """Returns the code of keyword arguments, such as "base=10000.0, layout='half'"."""
    return ", ".join(f"{name}={_code_for(value)}" for name, value in options.items())
