"""Imported first by `transformer_embed`: Ctrl-C ends the command at once while jax is loading.

Python would print a long traceback, or lose the interrupt in the initialization of an extension.
`run` of main.py sets the handler again. In any other program, nothing changes.
"""

import os
import signal
import sys

# While Python imports the package of `python -m`, its first argument is "-m".
IS_COMMAND = (sys.argv[:1] == ["-m"] and "transformer_embed" in sys.orig_argv) or os.path.basename(
    sys.argv[0] if sys.argv else ""
) == "transformer-embed"

if IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
