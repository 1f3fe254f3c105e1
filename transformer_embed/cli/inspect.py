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
from transformer_embed.cli.model_types import print_row

# Where `load_embedder` puts the parameters of the layer, and of a position bias.
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
        print_row(pretrained.find_model_type(args.model_type))
        return
    found = _read(args)
    print(f"layer\n  te.TransformerEmbedding({_code(found.config)})")
    if found.no_output is not None:
        print(f"no output layer\n  {shown(found.no_output)}")
    _print_parameters(found)
    _print_layers(found)
    if found.bias:
        call = "alibi_bias(query_positions, key_positions, "
        if "num_buckets" in found.bias:
            call = "RelativePositionBias("
        print(f"bias\n  {call}{_arguments(found.bias)})")


def _read(args: argparse.Namespace) -> pretrained.PretrainedInput:
    """Returns the input layer of a checkpoint or of a config.json, which the flags may describe."""
    settings = {}
    if args.settings is not None:
        settings = _read_settings(pathlib.Path(args.settings).expanduser())
    if args.model_type is not None:
        settings["model_type"] = args.model_type
    options = {"stack": args.stack, "length": args.length, "part": args.part}
    path = pathlib.Path(args.checkpoint).expanduser()
    is_index = path.name.endswith(".index.json")
    if path.suffix == ".json" and not is_index:
        return pretrained.load_config(path, settings=settings or None, **options)
    return pretrained.load_embedder(args.checkpoint, settings=settings or None, **options)


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
    """Prints each parameter of the layer, and how many a whole model has beside it."""
    names = found.names or {}
    own = {name for name in names if name.startswith(LAYER)}
    for name in sorted(own):
        module, _, leaf = name.rpartition("/")
        array = found.params[module][leaf]
        print(f"{shown(name)}\n  {array.dtype}{list(array.shape)}, from {shown(names[name])}")
    if len(own) < len(names):
        print(f"beside the layer\n  {len(names) - len(own)} parameters")


def _print_layers(found: pretrained.PretrainedInput) -> None:
    """Prints the rotation and the mask of the layers, of equal ones once."""
    # A mapping has no hash, and an array in it no truth value, so equal layers have equal texts.
    numbers_of_text = collections.defaultdict(list)
    for number, layer in enumerate(found.layers):
        numbers_of_text[repr(layer)].append(number)
    for numbers in numbers_of_text.values():
        layer = found.layers[numbers[0]]
        print(f"{shown(layer.type)}, in layers {', '.join(map(str, numbers))}")
        if layer.rotary is not None:
            print(f"  apply_rotary(x, positions, {_arguments(layer.rotary)})")
        if layer.query_scale is not None:
            print(f"  query_scale(positions, {_arguments(layer.query_scale)})")
        print(f"  AttentionMask(tokens, {_arguments(layer.mask)})")


def _code(value: Any) -> str:
    """Returns code that makes a value, after `import transformer_embed as te`."""
    # The repr of a dtype is code of numpy.
    if isinstance(value, np.dtype):
        return repr(value.name)
    if not dataclasses.is_dataclass(value):
        return repr(value)
    options = {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    }
    return f"te.{type(value).__name__}({_arguments(options)})"


def _arguments(options: Mapping[str, Any]) -> str:
    """Returns code of keyword arguments."""
    return ", ".join(f"{name}={_code(value)}" for name, value in options.items())
