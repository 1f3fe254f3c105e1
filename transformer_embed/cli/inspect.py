"""The command `inspect`: prints the input layer found in a checkpoint."""

import argparse
import collections
import dataclasses
import pathlib
from typing import Any

import numpy as np

from transformer_embed import pretrained
from transformer_embed._src.arguments import shown
from transformer_embed._src.layers.parameters import ROOT, by_path
from transformer_embed._src.pretrained.files import read_json
from transformer_embed._src.pretrained.layer_parts import BIAS


def add_to(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "inspect",
        help="print the input layer found in a checkpoint",
        description="Prints the input layer of a published model's checkpoint, or of a file that "
        "`train --out` wrote: the code that makes the layer, each parameter "
        "with the tensor that it comes from, and the arguments of rotary embeddings or of a "
        "position bias if the model has them.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a safetensors file, the index file of a sharded checkpoint, or a folder with one of "
        "them",
    )
    parser.add_argument(
        "--stack",
        choices=("encoder", "decoder"),
        help="stack to read if the checkpoint has both (default: encoder)",
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
    """Prints what the checkpoint holds."""
    found = _read(args)
    print(f"layer\n  te.TransformerEmbedding({_code(found.config)})")
    params = by_path(found.params)
    names = found.names or {}
    # A whole model may stand beside its input layer.
    own = {name for name in names if name.startswith(ROOT) or name == BIAS}
    for name in sorted(own):
        array = params[name]
        print(f"{shown(name)}\n  {array.dtype}{list(array.shape)}, from {shown(names[name])}")
    if len(own) < len(names):
        print(f"beside the layer\n  {len(names) - len(own)} parameters")
    # A mapping has no hash, and an array in it no truth value.
    alike = collections.defaultdict(list)
    for number, layer in enumerate(found.layers):
        alike[repr(layer)].append(number)
    for numbers in alike.values():
        layer = found.layers[numbers[0]]
        print(f"{shown(layer.type)}, in layers {', '.join(map(str, numbers))}")
        if layer.rotary is not None:
            print(f"  apply_rotary(x, positions, {_arguments(layer.rotary)})")
        if layer.query_scale is not None:
            print(f"  query_scale(positions, {_arguments(layer.query_scale)})")
        print(f"  AttentionMask(tokens, {_arguments(layer.mask)})")
    if found.bias:
        call = "alibi_bias(query_positions, key_positions, "
        if "num_buckets" in found.bias:
            call = "RelativePositionBias("
        print(f"bias\n  {call}{_arguments(found.bias)})")


def _read(args: argparse.Namespace) -> pretrained.PretrainedInput:
    """The input layer of a checkpoint, which the flags may describe."""
    settings = {}
    if args.settings is not None:
        settings = read_json(pathlib.Path(args.settings).expanduser())
    if args.model_type is not None:
        settings["model_type"] = args.model_type
    return pretrained.load_embedder(
        args.checkpoint, stack=args.stack, settings=settings or None, length=args.length
    )


def _code(value: Any) -> str:
    """Code that makes a value, after `import transformer_embed as te`."""
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


def _arguments(options: Any) -> str:
    return ", ".join(f"{name}={_code(value)}" for name, value in options.items())
