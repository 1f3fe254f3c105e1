"""Lookups, logits and losses of tables that a mesh splits, also inside an enclosing shard_map over some
of its axes, have the values and gradients of one device."""

import draws
import jax
import jax.test_util
import layouts
import numpy as np
import pytest
from cases import few
from jax import P

TABLES = [
    P(),
    P("model"),
    P("model"),
    P(None, "model"),
    P("model", "extra"),
    P(("model", "extra")),
    P(None, ("extra", "model")),
]
OVER_DATA = [P("data"), P(("data", "model")), P("data", "model")]
BATCHES = [
    P("data"),
    P(("data", "model")),
    P("data", "model"),
    P(("model", "data")),
    P(None, "model"),
    P(None, None, "model"),
    P("data", None, "model"),
    P(),
]


def tables(of):
    """XLA aborts on arrays that automatic axes split both ways inside a shard_map over others, in
    jax.numpy alone too."""
    if of["where"] == "none":
        return TABLES + OVER_DATA
    return TABLES if of["kind"] == "explicit" else [P(), P("model"), P(None, "model")]


def batches(of):
    if of["where"] == "none":
        return BATCHES
    return BATCHES[: 1 if of["kind"] == "automatic" else 3]


def parts(of):
    """jax adds no rows to an x whose channels other axes split."""
    of_table, of_x = tuple(of["table"])[1:], tuple(of["x"])[2:]
    if of["kind"] == "automatic" or not (of_table and of_x) or of_table == of_x:
        return list(layouts.PARTS)
    return [part for part in layouts.PARTS if part not in ("lookup", "tied")]


SPACE = draws.Space(
    {
        "kind": ("explicit", "explicit", "automatic", "mixed"),
        "where": ("none", "none", "inside", "outside")[: 4 if layouts.HAS_NESTED_MAPS else 1],
        "table": tables,
        "x": batches,
        "part": parts,
        "order": lambda of: (1,) if of["part"] == "top_k" else (1, 1, 2),
    },
    default=14,
    quick=0,
)


def program_of(number):
    of = SPACE.choices(number)
    return f"""from compare import near
from jax import P, P as PartitionSpec
import layouts
wanted = layouts.expected({of.part!r}, {of.order}, {number})
found = layouts.found({of.part!r}, {of.order}, {number}, {of.kind!r}, {of.table}, {of.x}, {of.where!r})
near(found, wanted, rtol=1e-4, atol={of.order}e-4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", SPACE.numbers())
def test_split_table_gives_results_of_one_device(number):
    program = program_of(number)
    with draws.repeated_by(number, program):
        draws.run(number, program)


@pytest.mark.slow
@pytest.mark.parametrize("part", few([*layouts.PARTS][:-1], 3))
def test_second_derivatives_on_one_device_equal_differences(part):
    with jax.enable_x64():
        x, table, bias, ids = layouts.arrays(0)
        loss = lambda *arrays: layouts.PARTS[part](*arrays, np.float64(bias), ids)
        arrays = np.float64(x), np.float64(table)
        jax.test_util.check_grads(jax.jit(loss), arrays, order=2, modes=["rev"])


@pytest.mark.skipif(layouts.HAS_NESTED_MAPS, reason="jax 0.10 and newer can")
def test_an_older_jax_is_named_inside_a_shard_map():
    with pytest.raises(ValueError, match=r"mesh: wanted jax 0\.10 or newer"):
        layouts.found("lookup", 1, 0, "explicit", P("model"), P("data"), "inside")
