"""What a compiled program sends: its collectives, read from the text of XLA."""

import math
import re
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
BITS = {"pred": 8, "bf16": 16}
DEFINITION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$")
CALL = re.compile(rf"^(.*?) ({'|'.join(KINDS)})(?:-start)?\((.*?)\)(.*)$")
ARRAY = re.compile(r"([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\]")


class Collective(NamedTuple):
    kind: str
    operands: list[tuple[str, tuple[int, ...]]]
    group_size: float

    @property
    def largest(self):
        """Number of elements of the largest operand."""
        return max((math.prod(shape) for _, shape in self.operands), default=0)

    @property
    def sent(self):
        """Bytes that each device sends, around a ring."""
        size = sum(math.prod(shape) * _bits(dtype) // 8 for dtype, shape in self.operands)
        share = (self.group_size - 1) / self.group_size
        shares = {"all-reduce": 2 * share, "all-gather": self.group_size - 1}
        return size * (shares | {"collective-permute": 1}).get(self.kind, share)


def collectives(compiled):
    """Those of a compiled function between two devices or more, in the order of its text."""
    found = map(DEFINITION.match, compiled.as_text().splitlines())
    lines = dict(match.groups() for match in found if match)
    found = []
    for call in filter(None, map(CALL.match, lines.values())):
        group_size = _group_size(call[4])
        if group_size > 1:
            names = re.findall(r"%([\w.-]+)", call[3])
            operands = [array for name in names for array in _arrays(lines[name])]
            found.append(Collective(call[2], operands, group_size))
    return found


def _group_size(attributes):
    """Of devices: groups are written out, counted, or named as axes of a mesh."""
    written = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", attributes)
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes)
    if named:
        sizes = dict(axis.split("=") for axis in named[1].split(","))
        return math.prod(int(sizes[axis.strip()]) for axis in named[2].split(","))
    if counted:
        return int(counted[1])
    return len(written[1].split(",")) if written else math.inf


def _arrays(text):
    """The arrays that a line gives: one, or those of a tuple."""
    given = text[: text.index(") ")] if text.startswith("(") else text.split("(")[0]
    return [
        (dtype, tuple(int(size) for size in shape.split(",") if size))
        for dtype, shape in ARRAY.findall(given)
    ]


def _bits(dtype):
    return BITS.get(dtype) or int(re.search(r"\d+", dtype)[0])
