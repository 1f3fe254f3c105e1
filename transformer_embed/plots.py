"""Plots of encodings, masks and biases with matplotlib (the extra `plots`).

Each function draws on the Axes of a matplotlib figure, and returns the Axes. For values with a
sign, zero is white, positive values are red, and negative values are blue. If you print such a plot
in grey, you can only see magnitudes. Cells without a value are hatched. Lines differ in style or
marker as well as in colour, so that the plots can be read in grey and by colour-blind readers. The
plots have no titles, so that you can set your own.
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
