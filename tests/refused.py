"""Errors by what they name: the argument, and what was wanted and passed in numbers.

In an expected message, "..." stands for words, so that a message may say the same in better ones.
"""

import re

import pytest


def pattern(message):
    """The regular expression of an expected message."""
    return "^" + "(?s:.*)".join(map(re.escape, message.split("...")))


def refused(error, message):
    """Expects an error with this message, after which jax may add a note on a line of its own."""
    return pytest.raises(error, match=pattern(message) + r"(?:\n|$)")


def each_raises(rows, names):
    """Expects of each call, which is text with these names, the error that Python would print."""
    found = {call: _error_of(call, names) for call in rows}
    wrong = [each for each in found.items() if not re.match(pattern(rows[each[0]]), each[1])]
    assert not wrong, wrong


def _error_of(call, names):
    try:
        return f"no error, but {eval(call, names)}"
    except (TypeError, ValueError) as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
