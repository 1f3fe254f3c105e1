"""Ctrl-C while jax compiles: a KeyboardInterrupt inside its compiler gets lost, or crashes Python when it ends."""

import signal
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def interruptible(items: Iterable[Item]) -> Iterator[Item]:
    """Yields the items; Ctrl-C raises KeyboardInterrupt between two of them rather than while one is worked on."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield from items
        return
    pressed = []
    signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        for item in items:
            yield item
            if pressed:
                raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
