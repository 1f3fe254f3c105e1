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
    line: str

    @property
    def summary(self):
        arrays = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in self.operands)
        return f"{self.kind} of {arrays}"

    @property
    def largest(self):
        """Number of elements of the largest operand."""
        return max((math.prod(shape) for _, shape in self.operands), default=0)

    @property
    def bytes(self):
        """Of all operands."""
        return sum(math.prod(shape) * _bits(dtype) // 8 for dtype, shape in self.operands)

    @property
    def sent(self):
        """Bytes that each device sends, around a ring."""
        share = (self.group_size - 1) / self.group_size
        return self.bytes * {
            "all-reduce": 2 * share,
            "all-gather": self.group_size - 1,
            "collective-permute": 1,
        }.get(self.kind, share)


def collectives(compiled):
    """Those of a compiled function between two devices or more, in the order of its text."""
    lines = [
        match.groups() for match in map(DEFINITION.match, compiled.as_text().splitlines()) if match
    ]
    types = {
        name: _arrays(
            rest.split("(")[0] if not rest.startswith("(") else rest[: rest.index(") ") + 1]
        )
        for name, rest in lines
    }
    found = []
    for name, rest in lines:
        call = CALL.match(rest)
        group_size = _group_size(call[4]) if call else 1
        if group_size > 1:
            operands = [
                array for operand in re.findall(r"%([\w.-]+)", call[3]) for array in types[operand]
            ]
            found.append(Collective(call[2], operands, group_size, f"{name} = {rest}"))
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
    return [
        (dtype, tuple(int(size) for size in shape.split(",") if size))
        for dtype, shape in ARRAY.findall(text)
    ]


def _bits(dtype):
    return BITS.get(dtype) or int(re.search(r"\d+", dtype)[0])
