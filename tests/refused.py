"""Errors by the whole of their message."""

import re

import pytest


def refused(error, message):
    """Expects an error with this message, after which jax may add a note on a line of its own."""
    return pytest.raises(error, match="^" + re.escape(message) + r"(?:\n|$)")


def each_refused(kind, rows):
    """Expects an error of each call whose message starts so."""
    for call, message in rows:
        with pytest.raises(kind) as caught:
            call()
        assert str(caught.value).startswith(message), message
