"""Files of pictures."""

import pathlib
import warnings
from collections.abc import Callable
from typing import Any

from transformer_embed.cli.arguments import UserError, writable, write_whole

PIXELS_WIDE = 960


def drawable(name: str, *inputs: str) -> pathlib.Path:
    """The path of a picture, which can be drawn and written; see `writable`."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415
    except ImportError as error:
        raise UserError(f"{error}; pip install '.[plots]' installs it") from error
    return writable(name, (".png", ".svg", ".pdf"), *inputs)


def draw_file(name: str, draw: Callable[[Any], str], *, width: float = 6.4) -> str:
    """Writes what is drawn on an Axes; `draw` returns its title."""
    path = drawable(name)
    from matplotlib import style  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    # Whatever the user's settings.
    with style.context("default"), warnings.catch_warnings():
        # A letter that the font lacks would be drawn as a box, with a warning.
        warnings.simplefilter("error", UserWarning)
        # As many pixels at any width.
        figure = Figure((width, 0.75 * width), PIXELS_WIDE / width, layout="constrained")
        try:
            title = draw(figure.subplots())
            figure.suptitle(title, wrap=True)
            kind = pathlib.Path(name).suffix[1:]
            write_whole(path, lambda file: figure.savefig(file, format=kind))
        except (ValueError, UserWarning) as error:
            raise UserError(str(error)) from error
    return title
