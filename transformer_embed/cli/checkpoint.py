"""Reads a checkpoint that the command line names, with flags that describe it."""

import argparse
import json
from typing import Any

from transformer_embed import pretrained
from transformer_embed.cli.arguments import COUNT, PATH, UserError, contents, unreadable


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
        **PATH,
        help="entries of a config.json, which override those beside the checkpoint",
    )
    parser.add_argument(
        "--length",
        type=COUNT,
        metavar="TOKENS",
        help="tokens of the longest text, for models whose rotation depends on it (Phi-3 128k)",
    )


def read_checkpoint(path: str, args: argparse.Namespace) -> pretrained.PretrainedInput:
    """The input layer of a checkpoint, which the flags may describe."""
    settings = _settings(args.settings, args.model_type)
    try:
        return pretrained.load_embedder(
            path, stack=args.stack, settings=settings, length=args.length
        )
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        message = str(error)
        # The message names the argument of `load_embedder`.
        if "settings" in message:
            message += " (on the command line: --model-type NAME, --settings FILE.json)"
        raise UserError(message) from error


def _settings(path: str | None, model_type: str | None) -> dict[str, Any] | None:
    """The entries of --settings, and --model-type."""
    named = {} if model_type is None else {"model_type": model_type}
    if path is None:
        return named or None
    try:
        settings = json.loads(contents(path))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"--settings: {path} is not JSON ({error}); name a file such as config.json"
        ) from error
    if not isinstance(settings, dict):
        raise UserError(
            f"--settings: wanted a JSON object such as config.json holds, got a "
            f"{type(settings).__name__} in {path}"
        )
    return settings | named
