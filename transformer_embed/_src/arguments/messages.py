"""Writes the messages of errors."""

import reprlib
from typing import Any

import jax
import numpy as np

from transformer_embed._src.conversions import is_traced

# The largest number of characters of each of the three parts of a message.
LONGEST_PART = 800


def shown(value: Any) -> str:
    """Returns text that is safe to print, without the middle if the text is long.

    The text may come from somebody else, such as the name of a file. A control code in it could
    clear the screen, or forge a line of output.
    """
    text = str(value)
    if len(text) > LONGEST_PART:
        half = LONGEST_PART // 2
        text = f"{text[:half]}...{text[-half:]}"
    return text if text.isprintable() else repr(text)[1:-1]


def wanted(name: Any, want: str, got: Any) -> str:
    """Writes the message of every error of this package: "name: wanted want, got got"."""
    return f"{shown(name)}: wanted {shown(want)}, got {shown(got)}"


def value_error(name: Any, want: str, got: Any) -> ValueError:
    """Makes an error for a value that is out of range, or does not fit other arguments."""
    return ValueError(wanted(name, want, got))


def type_error(name: str, want: str, got: Any) -> TypeError:
    """Makes an error for a value of another type or dtype than the wanted one."""
    return TypeError(wanted(name, want, got))


def describe(value: Any) -> str:
    """Describes a value that was passed, in a few words."""
    if value is None:
        return "None"
    if is_traced(value):
        return f"a traced {value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array {value.dtype}{list(value.shape)}"
    return f"{type(value).__name__} {reprlib.repr(value)}"
