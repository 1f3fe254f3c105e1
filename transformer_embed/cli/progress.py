"""A progress bar that Ctrl-C stops between two items.

A KeyboardInterrupt while jax compiles may get lost or crash Python at exit, so Ctrl-C waits until
an item is done.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def progress(
    items: Iterable[Item], name: str, *, quiet: bool, status: Callable[[], str] = str
) -> Iterator[Item]:
    """Yields the items under a bar on stderr, which shows what status() returns; Ctrl-C raises
    KeyboardInterrupt after an item."""
    from tqdm import tqdm  # noqa: PLC0415 (slow to load)

    with _ctrl_c() as is_pressed, tqdm(items, desc=name, ncols=79, disable=quiet) as bar:
        for item in bar:
            yield item
            bar.set_postfix_str(status(), refresh=False)
            if is_pressed():
                raise KeyboardInterrupt


@contextlib.contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed within the block; always False if the program ignores it."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: False
        return
    pressed = []
    signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
