"""Rules, and batches of each kind that a loader makes and of others."""

import numpy as np

import transformer_embed as te


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


def some_tokens(kind, random, length=24, batch=3):
    match kind:
        case "packed":
            return te.TokenPositions.from_segment_ids(packed(random, batch, length))
        case "left" | "right":
            lengths = random.integers(0, length + 1, batch)
            return te.TokenPositions.from_lengths(lengths, length, padding_side=kind)
        case "ids":
            return te.TokenPositions.from_ids(random.integers(0, 4, (batch, length)), pad_id=0)
        case "offset":
            return te.TokenPositions.from_offset(random.integers(-9, 50, batch), length)
        case "by hand":
            positions, segments = random.integers(-9, 9, (2, batch, length))
            return te.TokenPositions(positions, segment_ids=np.abs(segments) // 4)
        case "runs by hand":
            # Positions that rise by one, but segments that come back and positions that jump.
            segments = np.sort(random.integers(0, 4, (batch, length)))
            positions = np.cumsum(random.integers(0, 20, (batch, length)) != 0, axis=1)
            return te.TokenPositions(positions, segment_ids=np.where(segments == 3, 1, segments))


EXACT = ["packed", "left", "right", "ids", "offset"]
KINDS = [*EXACT, "by hand", "runs by hand"]
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
