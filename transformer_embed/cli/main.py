"""The parser of the command line: runs a command, and reports errors in one line."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import transformer_embed as te
from transformer_embed.cli import embed, inspect, show, train
from transformer_embed.cli.arguments import UserError

PROGRAM = "transformer-embed"
DESCRIPTION = (
    "Train a small Transformer, embed a file with it or with a published model, inspect a checkpoint, and draw pictures of encodings "
    "and masks."
)


INTERRUPTED = 130


def run() -> NoReturn:
    """Runs the command that the user typed, then exits."""
    status = main()
    if status == INTERRUPTED:
        # Python may crash at exit if it was interrupted while jax compiled.
        os._exit(status)
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 2 after bad input, 130 after Ctrl-C."""
    try:
        args, unknown = _parser().parse_known_args(argv)
        if unknown:
            raise UserError(
                f"unrecognized arguments: {' '.join(unknown)}; `{PROGRAM} {args.name} --help` lists the arguments"
            )
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has exited. Python would try to flush the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UserError as error:
        return _failed(f"error: {error}", 2)
    except MemoryError:
        return _failed(
            "error: out of memory; give a smaller FILE, or split it and its longest lines", 2
        )
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    return 0


def _failed(message: str, status: int) -> int:
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists the arguments")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {te.__version__}")
    commands = parser.add_subparsers(required=True, dest="name", metavar="COMMAND")
    for command in (train, embed, inspect, show):
        command.add_to(commands)
    return parser
