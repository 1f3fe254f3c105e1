"""A progress bar that Ctrl-C stops between two items.

A KeyboardInterrupt while jax compiles may get lost or crash Python at exit, so Ctrl-C (and SIGTERM,
which `run` of main.py makes a KeyboardInterrupt too) waits until an item is done.
"""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")


def progress(
    items: Iterable[Item], name: str, *, quiet: bool, status: Callable[[], str] = str
) -> Iterator[Item]:
    """Yields the items under a bar with status(); Ctrl-C raises KeyboardInterrupt after an item."""
    from tqdm import tqdm  # noqa: PLC0415 (slow to load)

    # tqdm's None: no bar unless stderr is a terminal.
    options: Any = {"desc": name, "ncols": 79, "disable": quiet or None}
    with _deferred_interrupts() as interrupts, tqdm(items, **options) as bar:
        for item in bar:
            yield item
            bar.set_postfix_str(status(), refresh=False)
            if interrupts:
                raise KeyboardInterrupt


@contextlib.contextmanager
def _deferred_interrupts() -> Iterator[list[int]]:
    """The signals that came within the block, of those that would raise KeyboardInterrupt."""
    handler, arrived = signal.default_int_handler, []
    deferred = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is handler]
    for number in deferred:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield arrived
    finally:
        for number in deferred:
            signal.signal(number, handler)
