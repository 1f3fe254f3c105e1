"""Sequences and masks as `transformer_embed` has them, by Python loops over tokens and pairs.

A program of draws runs with `te` and with this module in its place.
"""

import functools
import itertools
import sys
import types
from typing import Any, NamedTuple

import draws
import jax
import numpy as np
from jax import export
from meshes import EXPLICIT, mesh_of, put

import transformer_embed as te

FAR = 2**40


class Token(NamedTuple):
    """Segment 0 is padding, and None stands where there are no segment ids."""

    position: int
    segment: int | None
    place: int
    end: int = FAR
    block: int = -1


PADDING = Token(0, 0, 0)


def _counted(position, segment):
    return Token(position, segment, position)


def _rows(array):
    return np.atleast_2d(np.asarray(array)).tolist()


class TokenPositions:
    def __init__(self, positions, *, segment_ids=None):
        positions = np.atleast_2d(positions)
        segments = np.full(positions.shape, None) if segment_ids is None else segment_ids
        sides = np.broadcast_arrays(positions, np.atleast_2d(segments))
        rows = zip(*(side.tolist() for side in sides), strict=True)
        self.rows = [[_counted(*token) for token in zip(*row, strict=True)] for row in rows]

    @classmethod
    def of(cls, rows):
        tokens = object.__new__(cls)
        tokens.rows = rows
        return tokens

    @classmethod
    def empty(cls, batch_size, length):
        return cls.of([[PADDING] * length for _ in range(batch_size)])

    @classmethod
    def from_ids(cls, ids, *, pad_id, end_id=None, start=0, at_padding=0):
        rows = []
        for row in _rows(ids):
            tokens, position, segment = [], start, 1
            for token in row:
                if token == pad_id:
                    tokens.append(_counted(at_padding, 0))
                    continue
                tokens.append(_counted(position, segment))
                position += 1
                if token == end_id:
                    position, segment = start, segment + 1
            rows.append(tokens)
        return cls.of(rows)

    @classmethod
    def from_mask(cls, mask, *, start=0, at_padding=0):
        ids = np.asarray(mask).astype(int)
        return cls.from_ids(ids, pad_id=0, start=start, at_padding=at_padding)

    @classmethod
    def from_segment_ids(cls, segment_ids):
        rows = []
        for row in _rows(segment_ids):
            # A negative number is padding, and counting goes on after a gap.
            tokens = [max(number, 0) for number in row]
            before = [tokens[:n].count(number) for n, number in enumerate(tokens)]
            rows.append([_counted(n * (s != 0), s) for n, s in zip(before, tokens, strict=True)])
        return cls.of(rows)

    @classmethod
    def from_positions(cls, positions):
        rows = []
        for row in _rows(positions):
            begins = [n == 0 or position != row[n - 1] + 1 for n, position in enumerate(row)]
            rows.append(list(map(_counted, row, itertools.accumulate(begins))))
        return cls.of(rows)

    @classmethod
    def from_lengths(cls, lengths, length, *, padding_side="right"):
        rows = []
        for size in np.asarray(lengths).tolist():
            tokens, padding = [_counted(n, 1) for n in range(size)], [PADDING] * (length - size)
            rows.append(tokens + padding if padding_side == "right" else padding + tokens)
        return cls.of(rows)

    @classmethod
    def from_offset(cls, offset, length):
        firsts = np.atleast_1d(offset).tolist()
        return cls.of([[_counted(first + n, 1) for n in range(length)] for first in firsts])

    @classmethod
    def from_parents(cls, parents, *, offset=0):
        parents = _rows(parents)
        count = max(len(parents), np.size(offset))
        parents = parents * (count // len(parents))
        return cls.of([*map(_tree, parents, np.broadcast_to(offset, count).tolist())])

    def __getitem__(self, index):
        rows, tokens = index if isinstance(index, tuple) else (index, slice(None))
        return self.of([row[tokens] for row in self.rows[rows]])

    def take(self, order):
        return self.of([[row[n] for n in order] for row in self.rows])

    def with_block_ids(self, block_ids):
        return self._replaced(block_ids, lambda token, block: token._replace(block=block))

    def _replaced(self, array, change):
        """The tokens, each changed by a number of an array."""
        array = np.atleast_2d(array)
        array = np.broadcast_to(array, (max(len(self.rows), len(array)), len(self.rows[0])))
        rows = self.rows * (len(array) // len(self.rows))
        return self.of([[*map(change, *row)] for row in zip(rows, array.tolist(), strict=True)])

    def clear(self, where):
        where = np.asarray(where)
        where = where[:, None] if where.ndim == 1 else where
        return self._replaced(
            where, lambda token, clear: token._replace(segment=0) if clear else token
        )

    def _field(self, name) -> Any:
        return np.array([[getattr(token, name) for token in row] for row in self.rows])

    @property
    def positions(self):
        return self._field("position")

    @property
    def segment_ids(self):
        return self._field("segment")

    @property
    def padding_mask(self):
        return self.segment_ids != 0

    @property
    def next_token_mask(self):
        rows = np.where(self.segment_ids == None, 1, self.segment_ids)  # noqa: E711
        after = np.concatenate([rows[:, 1:], 0 * rows[:, :1]], axis=1)
        return (rows != 0) & (rows == after)


def _tree(parents, offset):
    """Places in depth-first order; a token ends where its last descendant does."""
    places, tokens = itertools.count(offset), [PADDING] * len(parents)

    def visit(n, depth):
        place, last = next(places), None
        for child in [child for child, parent in enumerate(parents) if parent == n]:
            last = visit(child, depth + 1)
        last = place if last is None else last
        if parents[n] > -2:
            tokens[n] = Token(depth, 1, place, last + 1)
        return last

    for root in [n for n, parent in enumerate(parents) if parent < 0]:
        visit(root, offset)
    return tokens


def shared_prefix_parents(prefix_lengths, answer_lengths, length):
    rows = []
    for prefix, answers in zip(_rows(prefix_lengths)[0], _rows(answer_lengths), strict=True):
        row = [*range(-1, prefix - 1)]
        for answer in answers:
            row += [len(row) + n - 1 if n else prefix - 1 for n in range(answer)]
        rows.append(row + [-2] * (length - len(row)))
    return np.array(rows)


def places(slot, rows, length, slots):
    """The row, the number and the slot of each token that is written."""
    slot = np.asarray(slot)
    for row in range(rows):
        if slot.ndim == 2:
            found = slot[row % len(slot)].tolist()
        else:
            first = np.broadcast_to(slot, rows)[row]
            found = [first + n if first >= 0 else -1 for n in range(length)]
        for n, place in enumerate(found):
            # Of tokens for one slot, the last one is written.
            if 0 <= place < slots and place not in found[n + 1 :]:
                yield row, n, place


def write_cache(cache, new, slot):
    """A cache of tokens and an array [batch, slots, ...]."""
    (held, array), (tokens, added) = cache, new
    rows, array = [[*row] for row in held.rows], np.array(array)
    is_written = np.zeros((len(rows), len(tokens.rows[0])), bool)
    for row, n, place in places(slot, *is_written.shape, len(rows[0])):
        rows[row][place] = tokens.rows[row % len(tokens.rows)][n]
        array[row, place] = np.asarray(added)[row % len(added), n]
        is_written[row, n] = True
    return (TokenPositions.of(rows), array), is_written


write_rows = write_cache


class AttentionMask:
    def __init__(self, queries, keys=None, *, allowed=None, **rule):
        if allowed is None:
            sides = [side.rows for side in (queries, queries if keys is None else keys)]
            count = max(map(len, sides))
            rows = zip(*(side * (count // len(side)) for side in sides), strict=True)
            allowed = [[[sees(q, k, **rule) for k in keys] for q in row] for row, keys in rows]
        self.allowed = np.array(allowed, bool)

    def __and__(self, other):
        return AttentionMask(None, allowed=self.allowed & other.allowed)

    def __or__(self, other):
        return AttentionMask(None, allowed=self.allowed | other.allowed)

    def dense(self):
        return self.allowed[:, None]

    def tile(self, query_start, key_start, shape):
        rows, columns = query_start + shape[0], key_start + shape[1]
        return self.allowed[:, query_start:rows, key_start:columns]

    def tile_kinds(self, shape):
        rows, (queries, keys) = len(self.allowed), shape
        tiles = self.allowed.reshape(rows, -1, queries, self.allowed.shape[2] // keys, keys)
        return tiles.any((2, 4)).astype(int) + tiles.all((2, 4))


def sees(q, k, *, causal, window=None, chunk=None, sinks=-FAR):
    """Whether a query may attend to a key."""
    if k.segment == 0 or q.segment not in (k.segment, None):
        return False
    if q.block == k.block >= 0:
        return True
    left, right = window or (None, None)
    return (
        (not causal or k.place <= q.place < k.end)
        and (left is None or q.place - left <= k.place or k.position < sinks)
        and (right is None or k.place <= q.place + right)
        and (chunk is None or q.position // chunk == k.position // chunk)
    )


# --- programs that run with both

LIBRARY = types.SimpleNamespace(**vars(te), write_rows=jax.vmap(te.write_cache))


def check(mode, f, batches, exact=()):
    """That f(te, *batch) is what f(this module, *batch) is; `exact` are kinds that are not loose."""
    call = ROW_MODES.get(mode, functools.partial(draws.call, mode))
    found = call(lambda *batch: f(LIBRARY, *batch), batches)
    for got, batch in zip(found, batches, strict=True):
        want = f(sys.modules[__name__], *batch)
        assert got.keys() == want.keys()
        for name, value in want.items():
            _check_form(name, np.asarray(got[name]), np.asarray(value), exact)


FORMS = {"dense", "tile", "kinds"}


def _check_form(name, got, want, exact):
    # A row of a batch may have axes of 1 in front, and rows or queries that are alike may be one.
    if name in FORMS:
        got = got.reshape(-1, *[1] * (want.ndim - 3), *got.shape[-2:])
    got = np.broadcast_to(got if name in FORMS else got.reshape(want.shape), want.shape)
    if name != "kinds":
        np.testing.assert_array_equal(got, want, err_msg=name)
        return
    # Of a tile that has no pair or all of them, it may be said that it has some.
    np.testing.assert_array_equal(got[got != want], 1, err_msg=name)
    for kind in exact:
        np.testing.assert_array_equal(got == kind, want == kind, err_msg=f"kind {kind}")


def _rows_alone(f, batches):
    mapped = jax.jit(jax.vmap(f))
    return [mapped(*batch) for batch in batches]


def _split(f, batches, axes):
    """With the rows of each array split over explicit axes, or their tokens."""
    mesh = mesh_of((2,), ("data",), EXPLICIT)
    with jax.set_mesh(mesh):
        put_each = lambda x: put(mesh, x, *axes[: x.ndim])
        return [jax.jit(f)(*map(put_each, batch)) for batch in batches]


def _symbolic(f, batches, names):
    """Exported for any number of rows, or also for any length."""
    scope, shaped = export.SymbolicScope(["t >= 8"] * (len(names) > 1)), []
    for x in batches[0]:
        shape = ", ".join([*names, *map(str, x.shape[len(names) :])][: x.ndim])
        shape = export.symbolic_shape(shape, scope=scope)
        shaped.append(jax.ShapeDtypeStruct(shape, x.dtype))
    exported = export.export(jax.jit(f))(*shaped)
    return [exported.call(*batch) for batch in batches]


ROW_MODES = {
    "rows alone": _rows_alone,
    "split": functools.partial(_split, axes=("data",)),
    "split length": functools.partial(_split, axes=(None, "data")),
    "any rows": functools.partial(_symbolic, names="b"),
    "any lengths": functools.partial(_symbolic, names="bt"),
}
