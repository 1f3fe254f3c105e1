"""The parser of the command line: runs a command, and reports errors in one line."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import IO, NoReturn

import transformer_embed as te
from transformer_embed._src.arguments import printable
from transformer_embed.cli import embed, inspect, show, train
from transformer_embed.cli.arguments import UserError, reason

PROGRAM = "transformer-embed"
DESCRIPTION = (
    "Train a small Transformer, embed a file with it or with a published model, inspect a "
    "checkpoint, and draw pictures of encodings and masks."
)


def run() -> NoReturn:
    """Runs the command that the user typed, then exits."""
    # Python's own handler waits until compiled code returns. A program that ignores Ctrl-C, as
    # under `nohup`, goes on ignoring it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _prepare_streams()
    sys.exit(main())


def _prepare_streams() -> None:
    """Opens closed streams on the null device, and escapes letters that an encoding lacks."""
    # The next file to be opened would take a closed stream's number, and get XLA's messages.
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(null)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status.

    That is 0, 1 if its output cannot be printed, 2 after bad input.
    """
    try:
        try:
            # `parse_args` would name the --help of the program, not that of the command.
            args, unknown = _parser().parse_known_args(argv)
            if unknown:
                raise UserError(
                    f"unrecognized arguments: {' '.join(unknown)}; `{PROGRAM} {args.name} --help` "
                    f"lists the arguments"
                )
            args.run(args)
        finally:
            # Python would report a failed flush at exit in its own words.
            sys.stdout.flush()
    except UserError as error:
        return _failed(f"error: {error}", 2)
    except MemoryError:
        return _failed(
            "error: out of memory; give a smaller FILE, or split it and its longest lines", 2
        )
    except OSError as error:
        # Commands turn errors of files into a UserError: this one is a bug.
        if error.filename is not None:
            raise
        # Python would try to write the rest at exit.
        _redirect_to_null(sys.stdout)
        if isinstance(error, BrokenPipeError):  # The reader of the output has exited.
            return 1
        return _failed(f"error: cannot write to standard output: {reason(error)}", 1)
    return 0


def _failed(message: str, status: int) -> int:
    try:
        print(f"{PROGRAM}: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
    except OSError:
        _redirect_to_null(sys.stderr)
    return status


def _redirect_to_null(stream: IO[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists the arguments")


def _parser() -> argparse.ArgumentParser:
    # Abbreviations would change their meaning when a flag is added.
    parser = _Parser(prog=PROGRAM, description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {te.__version__}")
    commands = parser.add_subparsers(required=True, dest="name", metavar="COMMAND")
    for command in (train, embed, inspect, show):
        command.add_to(commands)
    return parser
