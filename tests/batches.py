"""Rules, and batches of each kind that a loader makes and of others."""

import jax.numpy as jnp
import numpy as np


def packed(random, batch, length):
    """Rows of documents of any numbers, with padding before, between and after them."""
    rows = np.zeros((batch, length), np.int32)
    for row in rows:
        numbers = random.permutation(40)
        numbers = np.sort(numbers) if random.random() < 0.5 else numbers
        start = random.integers(0, 5)
        for number in numbers[numbers != 0]:
            row[start : start + random.integers(1, length // 2)] = number
            start = np.flatnonzero(row)[-1] + 1 if row.any() else start + 1
            start += random.integers(0, 4) if random.random() < 0.3 else 0
    return rows


RULES = [
    {"causal": False},
    {"causal": True},
    {"causal": True, "window": (3, 0)},
    {"causal": False, "window": (2, 5)},
    {"causal": False, "window": (None, 4)},
    {"causal": True, "chunk": 7},
    {"causal": False, "window": (2, 6), "chunk": 5},
    {"causal": True, "window": (3, None), "chunk": 4},
    {"causal": True, "window": (2, 0), "sinks": 3},
    {"causal": False, "window": (4, 3), "sinks": 1},
]


# --- the arrays of a batch, by the constructor that takes them


def arrays(kind, seed, rows=2, length=12):
    """The arrays of a batch [rows, length] that MAKE[kind] takes."""
    random = np.random.default_rng(seed)
    made = tuple(np.asarray(array, np.int32) for array in ARRAYS[kind](random, rows, length))
    # A host would refuse the others.
    return made if kind not in ON_DEVICE else tuple(map(jnp.asarray, made))


def cache(kind, seed, outside, rows=2, length=12, slots=16):
    """The arrays of a batch, slots of its tokens, of its rows, and keys of a cache and of tokens.

    Slots may be outside the cache, and then two tokens may have one slot.
    """
    random = np.random.default_rng(seed)
    of_rows = random.integers(-1 - 2 * outside, slots - length + 1 + 9 * outside, rows)
    of_tokens = np.stack([random.permutation(slots)[:length] for _ in range(rows)])
    if outside:
        of_tokens = random.integers(-3, slots + 3, (rows, length))
    keys = np.arange(1, 1 + rows * length * 2, dtype=np.float32).reshape(rows, length, 2)
    slots = of_tokens.astype(np.int32), of_rows.astype(np.int32)
    return *arrays(kind, seed, rows, length), *slots, np.zeros((rows, 16, 2), np.float32), keys


def _padded(random, rows, length):
    """Padding on either side, both, in between, nowhere and everywhere."""
    ids = random.integers(2, 9, (rows, length))
    start, end = np.sort(random.integers(0, length + 1, (2, rows, 1)), axis=0)
    index = np.arange(length)
    ids = np.where((start <= index) & (index < end) | (random.random((rows, 1)) < 0.2), ids, 0)
    return (np.where(random.random(ids.shape) < random.choice([0, 0, 0.2]), 0, ids),)


def _ended(random, rows, length):
    (ids,) = _padded(random, rows, length)
    return (np.where((ids != 0) & (random.random(ids.shape) < 0.25), 1, ids),)


def _packed(random, rows, length):
    return (packed(random, rows, length),)


def _gaps(random, rows, length):
    """Numbers of segments that come back after a gap, and negative ones."""
    numbers = random.integers(-1, 4, (rows, length))
    is_padding = random.random((rows, length)) < 0.3
    one_text = random.random((rows, 1)) < 0.5
    return (np.where(is_padding, 0, np.where(one_text, 1, numbers)),)


def _restarts(random, rows, length):
    """Positions of packed texts, some of which do not begin at 0."""
    begins = random.random((rows, length)) < 0.25
    index = np.arange(length)
    first = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    return (index - first + 3 * (random.random((rows, 1)) < 0.3),)


def _lengths(random, rows, length):
    return (random.integers(0, length + 1, rows),)


def _offsets(random, rows, length):
    return (random.integers(-9, 50, rows),)


def _trees(random, rows, length):
    return np.stack([some_parents(random, length) for _ in range(rows)]), _offsets(random, rows, 0)[
        0
    ]


def _answers(random, rows, length):
    return random.integers(0, 4, rows), random.integers(0, 4, (rows, 3))


def _own(random, rows, length):
    positions, segments = random.integers(-9, 9, (2, rows, length))
    return positions, np.abs(segments) // 4


def _ends(random, rows, length):
    """Positions and segments at the ends of int32."""
    ends = np.array([-(2**31), 1 - 2**31, -1, 0, 1, 2, 3, 4, 2**31 - 2, 2**31 - 1])
    positions = random.choice(ends, (rows, length))
    return positions, np.maximum(random.choice(ends[3:], (rows, length)), 0)


def _runs(random, rows, length):
    """Positions that rise by one, but segments that come back and positions that jump."""
    segments = np.sort(random.integers(0, 4, (rows, length)))
    positions = np.cumsum(random.integers(0, 20, (rows, length)) != 0, axis=1)
    return positions, np.where(segments == 3, 1, segments)


def some_parents(random, length):
    """Trees, in depth-first order or in any, and padding."""
    parents, path = np.full(length, -2), []
    for n in range(random.integers(1, length + 1)):
        path = path[: random.integers(0, len(path) + 1)] if random.random() < 0.4 else path
        parents[n] = path[-1] if path else -1
        path = [*path, n]
    number = random.permutation(length) if random.random() < 0.5 else np.arange(length)
    return np.where(parents < 0, parents, number[parents])[np.argsort(number)]


MAKE = {
    "padded": "T.from_ids(x[0], pad_id=0)",
    "started": "T.from_ids(x[0], pad_id=0, start=2, at_padding=1)",
    "ended": "T.from_ids(x[0], pad_id=0, end_id=1)",
    "mask": "T.from_mask(x[0] != 0)",
    "packed": "T.from_segment_ids(x[0])",
    "gaps": "T.from_segment_ids(x[0])",
    "restarts": "T.from_positions(x[0])",
    "right": "T.from_lengths(x[0], 12)",
    "left": "T.from_lengths(x[0], 12, padding_side='left')",
    "offset": "T.from_offset(x[0], 12)",
    "tree": "T.from_parents(x[0], offset=x[1])",
    "answers": "T.from_parents(lib.shared_prefix_parents(*x, 12))",
    "own": "T(x[0], segment_ids=x[1])",
    "runs": "T(x[0], segment_ids=x[1])",
    "ends": "T(x[0], segment_ids=x[1])",
    "bare": "T(x[0])",
}
ARRAYS = {
    "padded": _padded,
    "started": _padded,
    "ended": _ended,
    "mask": _padded,
    "packed": _packed,
    "gaps": _gaps,
    "restarts": _restarts,
    "right": _lengths,
    "left": _lengths,
    "offset": _offsets,
    "tree": _trees,
    "answers": _answers,
    "own": _own,
    "runs": _runs,
    "ends": _ends,
    "bare": lambda *sizes: _own(*sizes)[:1],
}
TREES = {"tree", "answers"}
ON_DEVICE = {"gaps"}
# Rows of one sequence, or in which each sequence is one run of tokens and begins at one position.
IN_RUNS = {"padded", "started", "packed", "right", "left", "offset"}

WINDOWS = [None, (3, 0), (2, 5), (None, 4), (0, None), (2**33, 2), (0, 0)]


def rule_options(is_tree):
    """Returns the options of a space for the rule of a mask.

    Args:
        is_tree: Whether the options before these choose a tree, which has the causal mask alone.
    """

    def sinks(chosen):
        has_left_side = chosen["window"] and chosen["window"][0] is not None
        return (None, None, 2) if has_left_side else (None,)

    return {
        "causal": lambda chosen: (True,) if is_tree(chosen) else (True, False),
        "window": lambda chosen: (None,) if is_tree(chosen) else WINDOWS,
        "chunk": lambda chosen: (None,) if is_tree(chosen) else (None, None, 5),
        "sinks": sinks,
    }


def rule_of(chosen):
    """Returns the chosen rule as arguments of a mask."""
    given = {name: getattr(chosen, name) for name in ("causal", "window", "chunk", "sinks")}
    return ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
