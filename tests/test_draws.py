"""Draws: a number is the same choices in each run, and a failing one prints its program."""

import draws
import jax.numpy as jnp
import numpy as np
import pytest

SPACE = {"length": [3, 5], "is_long": lambda chosen: [chosen["length"] > 3]}
PROGRAM = "import numpy as np\n\nfound = np.arange(3).sum()"


def test_a_number_gives_the_same_choices_each_time(monkeypatch):
    assert list(draws.numbers(2)) == [0, 1]
    monkeypatch.setattr(draws, "WANTED", "4:12")
    chosen = [[draws.choices(number, SPACE) for number in draws.numbers(2)] for _ in range(2)]
    assert chosen[0] == chosen[1]
    assert {(each.length, each.is_long) for each in chosen[0]} == {(3, False), (5, True)}


def test_a_failing_draw_has_the_program_that_repeats_it():
    with pytest.raises(AssertionError) as caught, draws.repeated_by(7, PROGRAM):
        assert draws.run(7, PROGRAM).found == 4
    assert PROGRAM in caught.value.__notes__[0]
    with pytest.raises(AssertionError, match="more than 10 lines"), draws.repeated_by(7, "\n" * 11):
        pass


@pytest.mark.parametrize("mode", draws.MODES)
def test_each_mode_calls_the_function_on_each_batch(mode):
    def f(x, y):
        return {"sum": jnp.sum(x) + y}

    batches = [(np.full(3, n, np.float32), np.float32(n)) for n in (1, 2)]
    found = draws.call(mode, f, batches)
    np.testing.assert_array_equal([each["sum"] for each in found], [4, 8])
