"""Draws of batches, caches, rules, joins and modes: the forms of a mask against loops over pairs."""

import batches
import draws
import pytest

SEEDS = 3
MODES = ["eager", "jit", "vmap", "scan", "strict", "x64", "explicit", "shard_map", "exported"]
ORDERS = [None, None, "[11, 0, 5, 4, 3, 9, 8, 2, 1, 6, 7, 10]", "[8, 9, 10, 11, 0, 1, 2, 3]"]


def of_rows(chosen):
    """Each array of the batch is [rows, length], or the lengths of a row are one number."""
    by_row = {"right", "left", "answers"}
    alone = [] if chosen["kind"] == "answers" else ["rows alone"]
    # Arrays that are made in the function have a length that is known.
    any_lengths = [] if chosen["kind"] in by_row | {"offset"} else ["any lengths"]
    split = ["split length"] if chosen["kind"] != "answers" else []
    return [*MODES, "split", "any rows", *split, *alone, *any_lengths]


# A mask of the same tokens, or of integers of their own.
OTHERS = {
    "": "",
    "and window": " & M(T(tokens.positions, segment_ids=tokens.segment_ids), causal=True, window=(1, 0))",
    "and blocks": " & M(T(tokens.positions, segment_ids=1 + tokens.positions % 5), causal=False)",
    "or global": " | (M(T(0 * tokens.positions + 9), T(tokens.positions % 9), causal=True, window=(7, 0)) & M(tokens, causal=False))",
    "or chunk": " | M(tokens, causal=True)",
}


def others(chosen):
    """A joined mask is two rules to compile, so a mask alone has three of the turns.

    What hides the other trees of a row is their causal mask.
    """
    is_tree = chosen["kind"] in batches.TREES
    return ["", "", *(name for name in OTHERS if not (is_tree and name == "or global"))]


def keys(chosen):
    """The tokens themselves, or those of the other row."""
    is_alone = chosen["mode"] in {"rows alone", "any rows", "any lengths"}
    return [""] if is_alone or chosen["order"] else ["", "tokens[::-1], "]


def blocks(chosen):
    is_fixed = chosen["kind"] in batches.TREES or chosen["mode"] == "any lengths"
    return [""] if is_fixed else ["", "", "", ".with_block_ids(%s)"]


def with_kinds(chosen):
    """Of each mask alone, whose kinds are exact. Those of a joined mask are most of its program."""
    if chosen["mode"] == "any lengths":
        return [False]
    return [True, False, False] if chosen["other"] or chosen["blocks"] else [True]


SELF = draws.Space(
    {
        "block_ids": ["[0] * 4 + [-1] * 8", "[-1, 2, 2, 0, 0, 0, 2, -1, -1, -5, 7, 7]"],
        "kind": list(batches.MAKE),
        "order": ORDERS,
        "mode": of_rows,
        "keys": keys,
        **batches.rule_options(lambda chosen: chosen["kind"] in batches.TREES),
        "other": others,
        "blocks": blocks,
        "tile": lambda chosen: (
            ["(4, 4)", "(2, 1)"]
            + (["(4, 2)"] if chosen["order"] == ORDERS[-1] else ["(3, 6)", "(1, 12)"])
        ),
        "start": ["0, 0", "2, 3"],
        "with_kinds": with_kinds,
    },
    default=16,
    quick=4,
)
PROGRAM = """\
import batches, loops
def f(lib, *x):
    T, M = lib.TokenPositions, lib.AttentionMask
    tokens = {tokens}
    mask = M(tokens, {keys}{rule}){other}
    found = {{"dense": mask.dense(), "tile": mask.tile({start}, (4, 3)), {fields}}}
    return found{kinds}
loops.check({mode!r}, f, [batches.arrays({kind!r}, seed) for seed in {seeds}], exact={exact})
"""


def program_of(number, chosen):
    tokens = batches.MAKE[chosen.kind]
    tokens += chosen.blocks and chosen.blocks % chosen.block_ids
    tokens += (chosen.order and f".take({chosen.order})") or ""
    kinds = f' | {{"kinds": mask.tile_kinds({chosen.tile})}}' if chosen.with_kinds else ""
    # A tile without a mask is found in any batch; one without a pair, where sequences are runs.
    exact = () if chosen.other or chosen.blocks else (2,)
    is_mixed = chosen.order == ORDERS[2] or bool(chosen.keys)
    is_mixed |= chosen.chunk is not None and (bool(chosen.order) or chosen.sinks is not None)
    if exact and chosen.kind in batches.IN_RUNS and not is_mixed:
        exact = (0, 2)
    fields = '"positions": tokens.positions, "padding": tokens.padding_mask'
    if not chosen.order and chosen.kind not in batches.TREES:
        fields += ', "next": tokens.next_token_mask'
    return PROGRAM.format(
        tokens=tokens,
        rule=batches.rule_of(chosen),
        keys=chosen.keys,
        fields=fields,
        other=OTHERS[chosen.other],
        start=chosen.start,
        kinds=kinds,
        mode=chosen.mode,
        kind=chosen.kind,
        seeds=[number * SEEDS + n for n in range(SEEDS)],
        exact=exact,
    )


@pytest.mark.parametrize("number", SELF.numbers())
def test_self_attention(number):
    program = program_of(number, SELF.choices(number))
    with draws.repeated_by(number, program):
        draws.run(number, program)


# --- caches

SLOTS = 16
STEPS = {
    "tokens": "T.from_offset(tokens.padding_mask.sum(1), 3)",
    "one": "T.from_offset(tokens.padding_mask.sum(1), 1)",
    "row": "T.from_offset([7], 2)",
    # Two slots [2] of two tokens may also be those of two rows, and are refused.
    "no batch": "T.from_offset(7, 3)",
    "drafts": "T.from_parents([-1, 0, 0, 1, -1], offset=tokens.padding_mask.sum(1))",
    "later": "T.from_offset(tokens.padding_mask.sum(1) + 9, 2)",
}
RING = "jnp.atleast_2d(jnp.where({0}.padding_mask, {0}.positions % 16, -1))"
FIRST = {"0": "0", "row": "x[-3]", "ring": RING.format("tokens"), "any": "x[-4]"}
SECOND = {"row": "x[-3] + 2", "after": "tokens.padding_mask.sum(1)", "ring": RING.format("step")}
CLEARED = {
    "nothing": "0 * x[-3] > 0",
    "rows": "x[-3] > 2",
    "slots": "x[-2][:, :, 0] % 3 == 0",
    "later": "jnp.arange(16)[None] >= x[-3][:, None]",
}
CACHES = draws.Space(
    {
        "kind": ["padded", "ended", "packed", "right", "left"],
        "first": list(FIRST),
        "second": list(SECOND),
        "cleared": list(CLEARED),
        "step": list(STEPS),
        "mode": [*MODES, "split"],
        "write": lambda chosen: (
            ["write_cache"]
            + ["write_rows"]
            * (
                chosen["first"] != "0"
                and chosen["step"] not in ("row", "no batch")
                and chosen["mode"] != "split"
            )
        ),
        **batches.rule_options(lambda chosen: chosen["step"] == "drafts"),
        "outside": lambda chosen: [0] + [1] * (chosen["mode"] != "eager"),
    },
    default=10,
    quick=3,
)
CACHE_PROGRAM = """\
import batches, loops, jax.numpy as jnp
def f(lib, *x):
    T, M, write = lib.TokenPositions, lib.AttentionMask, lib.{write}
    tokens = {tokens}
    (slots, keys), _ = write(({empty}, x[-2]), (tokens, x[-1]), {first})
    step = {step}
    (slots, keys), written = write((slots.clear({cleared}), keys), (step, 100 + x[-1][:, :{count}]), {second})
    forms = [getattr(M(step, slots, {rule}), name) for name in ("dense", "tile_kinds")]
    return {{"dense": forms[0](), "kinds": forms[1](({count}, 4)), "keys": keys, "written": written, "positions": slots.positions}}
loops.check({mode!r}, f, [batches.cache({kind!r}, n, {outside}) for n in {seeds}], exact=[2])
"""


def cache_program(number, chosen):
    empty = "T.empty(2, 16)"
    if chosen.step == "drafts":
        empty = "T.from_parents(jnp.full((2, 16), -2))"
    counts = {"tokens": 3, "one": 1, "row": 2, "no batch": 3, "drafts": 5, "later": 2}
    return CACHE_PROGRAM.format(
        write=chosen.write,
        tokens=batches.MAKE[chosen.kind],
        empty=empty,
        first=FIRST[chosen.first],
        step=STEPS[chosen.step],
        cleared=CLEARED[chosen.cleared],
        count=counts[chosen.step],
        second=SECOND[chosen.second],
        rule=batches.rule_of(chosen),
        mode=chosen.mode,
        kind=chosen.kind,
        outside=chosen.outside,
        seeds=[number * SEEDS + n for n in range(SEEDS)],
    )


@pytest.mark.parametrize("number", CACHES.numbers())
def test_caches(number):
    program = cache_program(number, CACHES.choices(number))
    with draws.repeated_by(number, program):
        draws.run(number, program)
