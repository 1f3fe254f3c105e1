"""Arguments that several commands take: a checkpoint with what describes it, a file to write."""

import argparse
import json
import os
import pathlib
from collections.abc import Sequence

from transformer_embed import pretrained


def writable(name: str, suffixes: Sequence[str]) -> pathlib.Path:
    """The path of a file to write; raises before the work if it cannot be written."""
    if pathlib.Path(name).suffix.lower() not in suffixes:
        raise ValueError(f"--out: wanted a name that ends in {', '.join(suffixes)}, got {name!r}")
    # What a link leads to is replaced, so that the link stays.
    path = pathlib.Path(os.path.realpath(name))
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"cannot write {name}: name a file in a folder that you may write to")
    return path


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for what the files of a checkpoint may not say."""
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


def read_checkpoint(path: str, args: argparse.Namespace) -> pretrained.PretrainedInput:
    """The input layer of a checkpoint, which the flags may describe."""
    settings = {}
    if args.settings is not None:
        settings = json.loads(pathlib.Path(args.settings).read_bytes())
    if args.model_type is not None:
        settings["model_type"] = args.model_type
    return pretrained.load_embedder(
        path, stack=args.stack, settings=settings or None, length=args.length
    )
