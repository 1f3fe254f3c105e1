"""A progress bar."""

from collections.abc import Iterable
from typing import Any


def progress(items: Iterable[Any], name: str, *, quiet: bool) -> Any:
    """Iterates over the items under a bar of tqdm, which shows if stderr is a terminal."""
    from tqdm import tqdm  # noqa: PLC0415 (slow to load)

    # None hides the bar elsewhere.
    return tqdm(items, name, ncols=79, disable=quiet or None)
