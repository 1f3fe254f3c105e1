"""Files of pictures."""

import pathlib
from collections.abc import Callable
from typing import Any

from transformer_embed._src.pretrained.files import open_whole
from transformer_embed.cli.arguments import writable

PIXELS_WIDE = 960


def drawable(name: str, *inputs: str, flag: str = "--out") -> pathlib.Path:
    """The path of a picture, which can be drawn and written; see `writable`."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 (slow to load)
    except ImportError as error:
        raise ImportError(f"{error}; pip install '.[plots]' installs it") from error
    return writable(name, (".png", ".svg", ".pdf"), *inputs, flag=flag)


def draw_file(path: pathlib.Path, draw: Callable[[Any], str], *, width: float = 6.4) -> str:
    """Writes what is drawn on an Axes; `draw` returns its title."""
    from matplotlib import style  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    # Whatever the user's settings.
    with style.context("default"):
        # As many pixels at any width.
        figure = Figure((width, 0.75 * width), PIXELS_WIDE / width, layout="constrained")
        title = draw(figure.subplots())
        figure.suptitle(title, wrap=True)
        with open_whole(path) as file:
            figure.savefig(file, format=path.suffix[1:].lower())
    return title
