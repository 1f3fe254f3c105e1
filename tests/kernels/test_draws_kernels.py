"""Draws of batches, changed as loaders change them, and rules: what kernels are told of each pair."""

import batches
import draws
import kernel_masks
import pytest

# What loaders do to every array of a batch [rows, length].
CHANGES = [
    "",
    "[:, 3:]",
    "[:, :5]",
    ".take([11, 0, 5, 4, 3, 9, 8, 2, 1, 6, 7, 10])",
    ".take([*range(12)][::-1])",
    ".take([*range(4, 12), 0, 1, 2, 3])",
]


def sides(of):
    """Queries and keys. Ids that `from_positions` counts in a row say nothing of another row."""
    others = ["tokens[:, 4:8], tokens", "tokens[:, 7:8], tokens", "T(tokens.positions), tokens"]
    swapped = ["tokens, tokens[::-1]"] * (of["kind"] != "restarts")
    return ["tokens", "tokens", *swapped, *others]


SPACE = draws.Space(
    {
        "kind": [kind for kind in batches.MAKE if kind not in batches.TREES],
        "change": CHANGES,
        **batches.rule_options(lambda chosen: False),
        "kernel": list(kernel_masks.KERNELS),
        "order": [None, "full", "right", "packed"],
        "sides": sides,
        "mode": ["eager", "jit"],
    },
    default=30,
    quick=14,
)
PROGRAM = """\
import batches, kernel_masks
def f(lib, *x):
    T, M = lib.TokenPositions, lib.AttentionMask
    tokens = {tokens}
    return M({sides}, {rule})
kernel_masks.check({kernel!r}, dict({options}), {mode!r}, f, [batches.arrays({kind!r}, n) for n in {seeds}])
"""


@pytest.mark.parametrize("number", SPACE.numbers())
def test_kernels_are_told_the_rule_or_refuse_it(number):
    chosen = SPACE.choices(number)
    seeds = range(6 * number, 6 * number + 6)
    tokens = batches.MAKE[chosen.kind] + chosen.change
    options = f"order={chosen.order!r}"
    if chosen.sides == "tokens[:, 4:8], tokens" and chosen.kernel == "splash_kernels":
        options += ", q_offset=4"
    given = {"tokens": tokens, "rule": batches.rule_of(chosen), "options": options, "seeds": seeds}
    program = PROGRAM.format(**vars(chosen), **given)
    with draws.repeated_by(number, program):
        draws.run(number, program)
