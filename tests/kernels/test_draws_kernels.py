"""Draws of batches, changed as loaders change them, and rules: what kernels are told of each pair."""

import batches
import draws
import pytest
import said

# What loaders do to every array of a batch [rows, length].
CHANGES = [
    "",
    "[:, 3:]",
    "[:, :5]",
    ".take([11, 0, 5, 4, 3, 9, 8, 2, 1, 6, 7, 10])",
    ".take([*range(12)][::-1])",
    ".take([*range(4, 12), 0, 1, 2, 3])",
]
SPACE = {
    "kind": [kind for kind in batches.MAKE if kind not in batches.TREES],
    "change": CHANGES,
    "rule": batches.rules,
    "kernel": list(said.SAID),
    "order": said.ORDERS,
    "mode": ["eager", "jit"],
}
PROGRAM = """\
import batches, said
def f(lib, *x):
    T, M = lib.TokenPositions, lib.AttentionMask
    return M({tokens}, {rule})
said.check({kernel!r}, {order!r}, {mode!r}, f, [batches.arrays({kind!r}, n) for n in {seeds}])
"""


@pytest.mark.parametrize("number", draws.numbers(40))
def test_kernels_are_told_the_rule_or_refuse_it(number):
    chosen = draws.choices(number, SPACE)
    seeds = range(6 * number, 6 * number + 6)
    tokens = batches.MAKE[chosen.kind] + chosen.change
    program = PROGRAM.format(**vars(chosen), tokens=tokens, seeds=seeds)
    with draws.repeated_by(number, program):
        draws.run(number, program)
