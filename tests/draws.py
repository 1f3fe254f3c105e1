"""Draws from the product of a family's options, which lists of cases leave out.

A space has the choices of each option. A draw is a number: it fixes a choice of each, and the values
of the arrays. `pytest` runs a few of each family, the same in each run; `--draws 2000` runs the
first 2,000 and `--draws 500:1000` those. A family's test makes a program of at most ten lines from
the choices and runs that, so a failing draw prints what repeats it (`PYTHONPATH=tests`).
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


def numbers(few):
    """The draws to run: the first few, or those of `--draws`."""
    if WANTED is None:
        return range(few)
    first, _, end = WANTED.rpartition(":")
    return range(int(first or 0), int(end))


def numbered(few, quick):
    """`numbers` as parameters of a test, of which those after the quick ones are slow."""
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(number, marks=marks[number < quick]) for number in numbers(few)]


class InOrder(list):
    """Values of an option that the draws take one after the other, as they are listed."""


def choices(number, space):
    """Returns the choice of each option in this draw.

    The values of an option take turns: no value comes again before all others have come. An option
    may be a function of the options before it. Then each list that it returns has turns of its own,
    so a value that is rarely allowed comes as soon as it is. Of the values that are left in a turn,
    a draw takes the one that meets most values of other options for the first time.
    """
    sequence = _SEQUENCES.setdefault(id(space), _Sequence(space))
    return types.SimpleNamespace(**sequence[number])


class _Sequence:
    """The draws of a space, which are made from the first one on."""

    def __init__(self, space):
        self.space = space
        self.draws = []
        self.left = {}  # the values that are left in the turn of a list
        self.turns = collections.Counter()
        self.met = set()  # pairs of options with their values

    def __getitem__(self, number):
        while len(self.draws) <= number:
            self.draws.append(self._next())
        return self.draws[number]

    def _next(self):
        chosen, taken = {}, []
        for name, options in self.space.items():
            if isinstance(options, InOrder):
                value = options[len(self.draws) % len(options)]
            else:
                values = [*(options(chosen) if callable(options) else options)]
                value = self._take(name, values, taken)
            chosen[name] = value
            taken.append((name, repr(value)))
        self.met |= set(itertools.combinations(taken, 2))
        return chosen

    def _take(self, name, values, taken):
        """Takes a value out of the turn of this list."""
        key = name, repr(values)
        if not self.left.get(key):
            turn = self.turns[key]
            random.Random(f"{key} {turn}").shuffle(values)
            self.left[key] = values
            self.turns[key] += 1
        left = self.left[key]
        new = [sum((each, (name, repr(value))) not in self.met for each in taken) for value in left]
        return left.pop(new.index(max(new)))


_SEQUENCES = {}


def met(space, count):
    """Returns the values of options, and the pairs of them, in the first draws."""
    draws = [vars(choices(number, space)) for number in range(count)]
    named = [[(name, repr(value)) for name, value in draw.items()] for draw in draws]
    values = {each for draw in named for each in draw}
    pairs = {pair for draw in named for pair in itertools.combinations(draw, 2)}
    return values, pairs


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
    return [jax.tree.map(lambda leaf, n=n: leaf[n], tree) for n in range(count)]
