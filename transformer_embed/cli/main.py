"""The parser of the command line, which runs a command and reports errors in one line."""

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import transformer_embed as te
from transformer_embed._src.arguments import shown
from transformer_embed.cli import inspect, train

PROGRAM = "transformer-embed"
DESCRIPTION = "Train small Transformers that differ in their positions, and inspect a checkpoint."
# The exit status after bad input.
BAD_INPUT = 2


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports an error in one line, and takes flags by their whole names."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Prints the message and where help is, without the usage, and exits."""
        line = f"{self.prog}: error: {shown(message)} (see {self.prog} --help)\n"
        self.exit(BAD_INPUT, line)


def run() -> NoReturn:
    """Runs the command that the user typed, then exits."""
    # Python's own handler waits until compiled code returns. A program that ignores Ctrl-C, as
    # under `nohup`, goes on ignoring it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The reader of the output may exit first, as `head` does. (Windows has no such signal.)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status, which is 0, or 2 after bad input."""
    parser = OneLineParser(PROGRAM, description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"%(prog)s {te.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (train, inspect):
        command.add_to(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ArithmeticError, ImportError, MemoryError, OSError, TypeError, ValueError) as error:
        message = shown(error) or type(error).__name__
        print(f"{PROGRAM}: error: {message}", file=sys.stderr)
        return BAD_INPUT
    return 0
