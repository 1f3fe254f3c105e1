"""Draws from the product of a family's options, which lists of cases leave out.

A `Space` has the choices of each option. A draw is a number: it fixes a choice of each, and the
values of the arrays. `pytest` runs a few of each family, the same in each run, which meet each
value of each option; `--draws 200` runs the first 200, which meet nearly all pairs of values, and
`--draws 500:1000` those. `python tests/draw_coverage.py` prints what they meet.

A family's test makes a program of at most ten lines from the choices and runs that, so a failing
draw prints what repeats it (`PYTHONPATH=tests`).
"""

import collections
import contextlib
import itertools
import linecache
import random
import types

import jax
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

WANTED = None
MOST_LINES = 10
# The random draws of which `Space` takes one.
MOST_TRIED = 20
# The modes of `call` that need no second device and no dtype of their own.
ONE_DEVICE = ("eager", "jit", "vmap", "scan", "remat")


class InOrder(list):
    """Values of an option that the default draws take one after the other, as they are listed."""


class Space:
    """Draws choices of the options of a family of functions.

    In the default draws, the values of an option take turns: no value comes again before all others
    have come. An option may be a function of the options before it. Then each list that it returns
    has turns of its own, so a value that is rarely allowed comes as soon as it is. Of the values
    that are left in a turn, a draw takes the one that meets most values of other options for the
    first time.

    The draws after the default ones are for pairs of values: each is the one of several random
    draws that meets most pairs for the first time.

    Args:
        options: The values of each option, or a function from the options before it to the values.
        default: The number of draws of a run without `--draws`.
        quick: The number of draws that `-m "not slow"` runs too.
    """

    def __init__(self, options, *, default, quick):
        self.options = options
        self.default = default
        self.quick = quick
        self._draws = []
        self._left = {}  # the values that are left in the turn of a list
        self._turns = collections.Counter()
        self._met = set()  # pairs of options with their values

    def on_gpu(self, modes=ONE_DEVICE, **options):
        """Returns the space of the same options in the modes that need one device, in turns."""
        options = self.options | {"mode": InOrder(modes)} | options
        return Space(options, default=self.default, quick=0)

    def numbers(self):
        """Returns the draws to run, as parameters of a test: the default ones, or `--draws`."""
        first, _, end = (WANTED or str(self.default)).rpartition(":")
        marks = {True: (), False: pytest.mark.slow}
        numbers = range(int(first or 0), int(end))
        return [pytest.param(number, marks=marks[number < self.quick]) for number in numbers]

    def choices(self, number):
        """Returns the choice of each option in this draw."""
        while len(self._draws) <= number:
            self._draws.append(self._next())
        return types.SimpleNamespace(**self._draws[number])

    def values_met(self, count):
        """Returns the values of options, with their names, in the first draws."""
        return {value for number in range(count) for value in _named(vars(self.choices(number)))}

    def pairs_met(self, count):
        """Returns the pairs of values of two options in the first draws."""
        return {pair for number in range(count) for pair in _pairs(vars(self.choices(number)))}

    def _next(self):
        if len(self._draws) < self.default:
            chosen = self._in_turns()
        else:
            seeds = [f"{len(self._draws)} {number}" for number in range(MOST_TRIED)]
            chosen = max(map(self._at_random, seeds), key=self._new_pairs)
        self._met |= _pairs(chosen)
        return chosen

    def _in_turns(self):
        chosen = {}
        for name, options in self.options.items():
            if isinstance(options, InOrder):
                chosen[name] = options[len(self._draws) % len(options)]
            else:
                left = self._left_in_turn(name, _values(options, chosen))
                chosen[name] = left.pop(self._best(chosen, name, left))
        return chosen

    def _left_in_turn(self, name, values):
        """Returns the values of this list that are left in its turn; if none is, of a new turn."""
        key = name, repr(values)
        if not self._left.get(key):
            turn = self._turns[key]
            random.Random(f"{key} {turn}").shuffle(values)
            self._left[key] = values
            self._turns[key] += 1
        return self._left[key]

    def _at_random(self, seed):
        """Returns the choices of a draw in which each meets as many new pairs as it can."""
        generator, chosen = random.Random(seed), {}
        for name, options in self.options.items():
            values = _values(options, chosen)
            generator.shuffle(values)
            chosen[name] = values[self._best(chosen, name, values)]
        return chosen

    def _best(self, chosen, name, values):
        """Returns the index of the first value that meets most chosen ones for the first time."""
        others = _named(chosen)
        new = [
            sum((other, (name, repr(value))) not in self._met for other in others)
            for value in values
        ]
        return new.index(max(new))

    def _new_pairs(self, chosen):
        """Returns the number of pairs that no draw has met."""
        return len(_pairs(chosen) - self._met)


def _values(options, chosen):
    """Returns a list of the values of an option beside what is chosen."""
    return [*(options(chosen) if callable(options) else options)]


def _named(chosen):
    """Returns each value with the name of its option."""
    return [(name, repr(value)) for name, value in chosen.items()]


def _pairs(chosen):
    """Returns all pairs of values of a draw."""
    return set(itertools.combinations(_named(chosen), 2))


@contextlib.contextmanager
def repeated_by(number, program):
    """Adds the program to whatever goes wrong."""
    assert len(program.splitlines()) <= MOST_LINES, f"{program}\n: more than {MOST_LINES} lines"
    try:
        yield
    except BaseException as error:
        error.add_note(f"Draw {number}. This program repeats it:\n\n{program}")
        raise


def run(number, program):
    """The names that a program defines."""
    file, names = f"<draw {number}>", {}
    linecache.cache[file] = len(program), None, program.splitlines(keepends=True), file
    exec(compile(program, file, "exec"), names)
    return types.SimpleNamespace(**names)


# --- how a function of arrays is called


def _eager(f, batches):
    return [f(*batch) for batch in batches]


def _jit(f, batches):
    return _eager(jax.jit(f), batches)


def _remat(f, batches):
    return _jit(jax.checkpoint(f), batches)


def _vmap(f, batches):
    return _unstacked(jax.jit(jax.vmap(f))(*_stacked(batches)), len(batches))


def _scan(f, batches):
    _, found = jax.lax.scan(lambda _, batch: (None, f(*batch)), None, _stacked(batches))
    return _unstacked(found, len(batches))


def _strict(f, batches):
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        return _jit(f, batches)


def _x64(f, batches):
    with jax.enable_x64(True):
        return _jit(f, batches)


def _explicit(f, batches):
    """Inside a mesh of explicit axes, with arrays that are whole on each device."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        return _jit(f, jax.device_put(batches, NamedSharding(mesh, PartitionSpec())))


def _shard_map(f, batches):
    """On each device of an enclosing shard_map, a batch of its own."""
    mesh = jax.make_mesh((len(batches),), ("data",), axis_types=(AxisType.Auto,))
    first = PartitionSpec("data")
    on_device = lambda *batch: jax.tree.map(
        lambda x: x[None], f(*jax.tree.map(lambda x: x[0], batch))
    )
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=first, out_specs=first)
    return _unstacked(jax.jit(mapped)(*_stacked(batches)), len(batches))


def _exported(f, batches):
    return _eager(export.export(jax.jit(f))(*batches[0]).call, batches)


MODES = {
    "eager": _eager,
    "jit": _jit,
    "vmap": _vmap,
    "scan": _scan,
    "remat": _remat,
    "strict": _strict,
    "x64": _x64,
    "explicit": _explicit,
    "shard_map": _shard_map,
    "exported": _exported,
}


def call(mode, f, batches):
    """The results of f for each of the batches, which are tuples of arrays of the same shapes."""
    return MODES[mode](f, batches)


def _stacked(batches):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def _unstacked(tree, count):
    """The results of each batch, as NumPy arrays, because jax compiles a program for each slice."""
    arrays = jax.device_get(tree)
    return [jax.tree.map(lambda leaf, n=n: leaf[n], arrays) for n in range(count)]
