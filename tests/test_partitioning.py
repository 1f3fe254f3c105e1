"""Lookups, logits and losses of tables that a mesh splits, also inside an enclosing shard_map over some
of its axes, have the values and gradients of one device."""

import draws
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from compare import near
from jax import P

TABLES = [
    P(None, ("extra", "model")),
    P(),
    P("model", "extra"),
    P("model"),
    P(None, "model"),
    P(("model", "extra")),
    P("model"),
]
OVER_DATA = [P(("data", "model")), P("data", "model"), P("data")]
BATCHES_IN_MAPS = [P("data"), P(("data", "model")), P("data", "model")]
BATCHES = [
    P(("data", "model")),
    P("data"),
    P(None, "model"),
    P(None, None, "model"),
    P(("model", "data")),
    P("data", "model"),
    P(),
    P("data", None, "model"),
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
    return BATCHES_IN_MAPS[: 1 if of["kind"] == "automatic" else 3]


def parts(of):
    """jax adds no rows to an x whose channels other axes split."""
    of_table, of_x, every = tuple(of["table"])[1:], tuple(of["x"])[2:], sorted(layouts.PARTS)
    if of["kind"] == "automatic" or not (of_table and of_x) or of_table == of_x:
        return every
    return [part for part in every if part not in ("lookup", "tied")]


def orders(of):
    """A program of second derivatives is compiled as long as five of first ones."""
    return (1,) if of["part"] == "top_k" else (1, 1, 1, 1, 1, 2)


SPACE = draws.Space(
    {
        "kind": ("mixed", "automatic", "explicit", "explicit"),
        "where": ("inside", "none", "outside", "none") if layouts.HAS_NESTED_MAPS else ("none",),
        "table": tables,
        "x": batches,
        "part": parts,
        "order": orders,
    },
    default=11,
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
@pytest.mark.parametrize("part", ["lookup", "logits"])
def test_second_derivatives_on_one_device_equal_differences(part):
    """Those of losses are drawn in tests/tokens/test_draws_losses.py."""
    x, table, bias, ids = layouts.arrays(0)
    loss = lambda *arrays: layouts.PARTS[part](*arrays, np.float64(bias), ids)
    random, step = np.random.default_rng(0), 1e-5
    directions = [random.normal(size=array.shape) for array in (x, table)]

    def slope(*arrays):
        """The slope of the loss along the directions, and the loss."""
        gradients = jax.grad(loss, (0, 1))(*arrays)
        return sum(map(jnp.vdot, gradients, directions)), loss(*arrays)

    def derivatives(distance):
        """The slope, the loss, and the slope of the slope at some distance."""
        moved = (np.float64(x) + distance * directions[0], table + distance * directions[1])
        values, gradients = jax.value_and_grad(slope, (0, 1), has_aux=True)(*moved)
        return *values, sum(map(jnp.vdot, gradients, directions))

    with jax.enable_x64():
        found = [*map(jax.jit(derivatives), (-step, 0.0, step))]
    (slope_before, loss_before, _), (slope_here, _, curvature), (slope_after, loss_after, _) = (
        jax.device_get(found)
    )
    near(slope_here, (loss_after - loss_before) / (2 * step), rtol=1e-6)
    near(curvature, (slope_after - slope_before) / (2 * step), rtol=1e-6)


@pytest.mark.skipif(layouts.HAS_NESTED_MAPS, reason="jax 0.10 and newer can")
def test_an_older_jax_is_named_inside_a_shard_map():
    with pytest.raises(ValueError, match=r"mesh: wanted jax 0\.10 or newer"):
        layouts.found("lookup", 1, 0, "explicit", P("model"), P("data"), "inside")
