"""Any arguments at all: a public function gives what a slow oracle gives, or raises a TypeError or
ValueError of ours, which names one."""

import inspect
import itertools
import random

import cases
import public
import pytest
from calls import GOOD
from cases import few
from fuzzing import VALUES, bounded, call, named_on_failure
from references import CHECKS, assert_right

import transformer_embed as te

every_function = pytest.mark.parametrize(
    "function", GOOD, ids=lambda function: function.__qualname__
)


def changes_of(function):
    """Any value in any one place."""
    return list(itertools.product(inspect.signature(function).parameters, VALUES))


def expect_right(function, *changes):
    """The result with these changes of the arguments, or None after an error of ours."""
    arguments = GOOD[function] | {name: bounded(name, value) for name, value in changes}
    with named_on_failure(arguments):
        returned, result = call(function, arguments)
        if returned:
            assert_right(function, result, **arguments)
    return returned


@every_function
def test_an_argument_gives_a_right_result_or_our_error(function):
    assert expect_right(function)
    for change in few(changes_of(function), 3):
        expect_right(function, change)


@pytest.mark.slow
@every_function
def test_any_argument_gives_a_right_result_or_our_error(function):
    for change in few(changes_of(function), 40):
        expect_right(function, change)


@pytest.mark.slow
@every_function
def test_any_two_arguments_give_a_right_result_or_our_error(function):
    rng = random.Random(cases.CHOICE)
    for _ in range(30):
        expect_right(function, *rng.sample(changes_of(function), 2))


def test_every_public_function_is_fuzzed():
    functions = {name for name in public.TOP if inspect.isfunction(getattr(te, name))}
    assert functions <= {function.__name__ for function in CHECKS}
    assert set(GOOD) == set(CHECKS)
