"""Draws: a number is the same choices in each run, and a failing one prints its program."""

import draw_coverage
import draws
import jax.numpy as jnp
import numpy as np
import pytest

OPTIONS = {"length": [3, 5], "is_long": lambda chosen: [chosen["length"] > 3]}
PROGRAM = "import numpy as np\n\nfound = np.arange(3).sum()"


def test_a_number_gives_the_same_choices_each_time(monkeypatch):
    both = [draws.Space(OPTIONS, default=2, quick=1) for _ in range(2)]
    params = both[0].numbers()
    assert [param.values for param in params] == [(0,), (1,)]
    assert [bool(param.marks) for param in params] == [False, True]
    monkeypatch.setattr(draws, "WANTED", "4:12")
    numbers = [param.values[0] for param in both[0].numbers()]
    assert numbers == [*range(4, 12)]
    chosen = [[space.choices(number) for number in numbers] for space in both]
    assert chosen[0] == chosen[1]
    assert {(each.length, each.is_long) for each in chosen[0]} == {(3, False), (5, True)}


def test_a_failing_draw_has_the_program_that_repeats_it():
    with pytest.raises(AssertionError) as caught, draws.repeated_by(7, PROGRAM):
        assert draws.run(7, PROGRAM).found == 4
    assert PROGRAM in caught.value.__notes__[0]
    with pytest.raises(AssertionError, match="more than 10 lines"), draws.repeated_by(7, "\n" * 11):
        pass


def test_values_in_order_come_as_they_are_listed():
    space = draws.Space({"name": draws.InOrder("abcb")}, default=6, quick=4)
    assert [space.choices(number).name for number in range(6)] == [*"abcbab"]


def test_draws_after_the_default_ones_meet_each_pair_of_values():
    options = {"length": range(6), "width": range(5), "heads": range(4)}
    space = draws.Space(options, default=6, quick=6)
    # The pairs of a length and a width alone take 30 draws.
    assert len(space.pairs_met(34)) == 6 * 5 + 6 * 4 + 5 * 4


@pytest.mark.slow
def test_default_run_meets_every_value_of_every_option():
    """`python tests/draw_coverage.py` prints the pairs too."""
    # That one loads models to say what its draws may choose, so it has a test of its own.
    spaces = draw_coverage.spaces(but=["test_forms"])
    assert len(spaces) > 10
    missed = {
        name: draw_coverage.missed_values(space, space.default + 10)
        for name, space in spaces.items()
    }
    assert missed == {name: [] for name in spaces}


@pytest.mark.parametrize("mode", draws.MODES)
def test_each_mode_calls_the_function_on_each_batch(mode):
    def f(x, y):
        return {"sum": jnp.sum(x) + y}

    batches = [(np.full(3, n, np.float32), np.float32(n)) for n in (1, 2)]
    found = draws.call(mode, f, batches)
    np.testing.assert_array_equal([each["sum"] for each in found], [4, 8])
