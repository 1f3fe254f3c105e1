"""Plots of encodings, masks and biases with matplotlib (the extra `plots`).

Each function draws on an Axes and returns it. Signed values use a diverging colour map: white is
zero, red is above, blue is below; in grey, it only shows magnitudes. Cells without a value are
hatched. Lines differ in style or marker as well as in colour, so that the plots can be read in grey
and by colour-blind readers. Titles are left to the caller.
"""

from transformer_embed._src.plots import (
    plot_bias,
    plot_encoding,
    plot_mask,
    plot_rotary,
)

__all__ = [
    "plot_bias",
    "plot_encoding",
    "plot_mask",
    "plot_rotary",
]
