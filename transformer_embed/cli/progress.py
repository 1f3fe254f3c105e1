"""A progress bar."""

from collections.abc import Iterable
from typing import Any


def progress(items: Iterable[Any], name: str, *, quiet: bool, tokens: int | None = None) -> Any:
    """Iterates over the items under a bar of tqdm, which shows if stderr is a terminal.

    tokens: how many each item has, to show their rate.
    """
    from tqdm import tqdm  # noqa: PLC0415 (slow to load)

    # None hides the bar elsewhere.
    options = {}
    if tokens is not None:
        bar = "{l_bar}{bar}| {elapsed}<{remaining}, {rate_fmt}{postfix}"
        options = {"unit": " tokens", "unit_scale": tokens, "bar_format": bar}
    return tqdm(items, name, ncols=79, disable=quiet or None, **options)
