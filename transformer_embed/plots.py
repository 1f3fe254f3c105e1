"""Plots of encodings, masks and biases with matplotlib (the extra `plots`).

Each function draws on an Axes and returns it. Values of both signs use a diverging colour map:
white is zero, red is above, blue is below. Values of one sign use cividis, whose lightness rises
evenly. Cells without a value are hatched. Lines differ in style or marker as well as in colour. So
the plots can be read in grey and by colour-blind readers, but in grey a diverging map only shows
magnitudes. Titles are left to the caller.
"""

from transformer_embed._src.plots import (
    plot_bias,
    plot_encoding,
    plot_error,
    plot_mask,
    plot_rotary,
    plot_similarity,
    plot_wavelengths,
)

__all__ = [
    "plot_bias",
    "plot_encoding",
    "plot_error",
    "plot_mask",
    "plot_rotary",
    "plot_similarity",
    "plot_wavelengths",
]
