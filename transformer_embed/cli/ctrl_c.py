"""Imported first by `transformer_embed`: Ctrl-C ends the command at once, even while jax compiles.

Python would print a long traceback, or lose the interrupt in compiled code. In any other program,
and where Ctrl-C is ignored (under `nohup`), nothing changes.
"""

import os
import signal
import sys

program = os.path.basename((sys.argv or [""])[0])
# While Python imports the package of `python -m`, its first argument is "-m".
is_module = program == "-m" and "transformer_embed" in sys.orig_argv

if (is_module or program == "transformer-embed") and signal.getsignal(
    signal.SIGINT
) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
