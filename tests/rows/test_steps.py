"""Steps by rows on a mesh are lazy steps on one device, for any optimizer, layout and form."""

import draws
import pytest
from jax import P
from layouts import HAS_NESTED_MAPS

# `test_optimizers.py` tries every optimizer of optax; these differ in the state that they keep.
OPTIMIZERS = [
    "optax.adam(optax.linear_schedule(0.1, 0.05, 3))",
    "optax.sgd(0.1)",
    "optax.sgd(0.1, momentum=0.9, nesterov=True)",
    "optax.adamw(0.1, weight_decay=0.1)",
    "steps.row_wise_adagrad(0.1)",
    "optax.lion(0.01)",
    "optax.masked(optax.chain(optax.centralize(), optax.trace(0.9), optax.clip(0.3), optax.sgd(0.1)), True)",
    "optax.adagrad(0.1)",
]
OVER_ALL = ("data", "model", "extra")
# The axes of the rows, for an exchange, and those of ids, which hold them.
EXCHANGES = [
    (P("model"), P(("data", "model"))),
    (P(("data", "model")), P(("data", "model"))),
    (P("model"), P("data", "model")),
    (P(("extra", "data")), P(OVER_ALL)),
    (P(OVER_ALL), P(OVER_ALL)),
]
OTHERS = [
    (P(), P("data")),
    (P("model"), P("data")),
    (P(None, "model"), P("data")),
    (P("data", "model"), P("data")),
    (P(("data", "model")), P(None, "model")),
    (P(None, "model"), P(("data", "model"))),
    (P(OVER_ALL), P()),
]


def layouts(of):
    if of["capacity"] is not None:
        return EXCHANGES
    if of["where"] == "inside":
        # XLA aborts on some others that automatic axes split there: see test_partitioning.
        return OTHERS[: 2 if of["kind"] == "explicit" else 1]
    return OTHERS + EXCHANGES


def dtypes(of):
    """XLA aborts on a sum of bfloat16 over devices inside two shard_maps. Parts of a gradient that are
    added were rounded before, so that Adam may turn a sum near 0 into a whole step."""
    is_sum = of["form"] in ("together", "scanned") and not of["optimizer"].startswith("optax.sgd")
    is_wide = of["where"] == "inside" or of["form"] == "added" or is_sum
    return ("float32", "bfloat16")[: 1 if is_wide else 2]


SPACE = draws.Space(
    {
        "kind": ("explicit", "explicit", "mixed", "explicit", "automatic"),
        "where": ("none", "none", "inside", "none", "none")[: 5 if HAS_NESTED_MAPS else 1],
        "capacity": lambda of: (
            (None, 1.0, 2.5) if (of["kind"], of["where"]) == ("explicit", "none") else (None,)
        ),
        "layout": layouts,
        "optimizer": OPTIMIZERS,
        "form": ("one", "bounded", "together", "scanned", "added"),
        "out_of_range": ("zero", "clip"),
        "pad_id": (3, None, -1),
        "spread": (False, True),
        "dtype": dtypes,
    },
    default=12,
    quick=1,
)


def program_of(number):
    """Returns the program of a draw. On fewer than eight devices, the axes of the mesh have one."""
    of = SPACE.choices(number)
    options = f"pad_id={of.pad_id}, out_of_range={of.out_of_range!r}, spread={of.spread}"
    on = f"kind={of.kind!r}, table={of.layout[0]}, ids={of.layout[1]}, where={of.where!r}"
    tolerance = 2.0**-13 if of.dtype == "float32" else 0.03
    return f"""import optax, steps
from jax import P, P as PartitionSpec
from compare import near
config = steps.config({of.dtype!r}, {options}, row_multiple=16)
optimizer = {of.optimizer}
found = steps.trained({number}, config, optimizer, {of.form!r}, {on}, capacity={of.capacity})
wanted = steps.expected({number}, config, optimizer, {of.form!r})
near(found[0], wanted[0], rtol={tolerance}, atol={tolerance})
near(found[1], wanted[1], rtol={tolerance}, atol={16 * tolerance})
"""


@pytest.mark.parametrize("number", SPACE.numbers())
def test_row_wise_step_equals_lazy_dense_step(number):
    run(number)


@pytest.mark.gpu
@pytest.mark.parametrize("number", SPACE.numbers())
def test_row_wise_step_on_gpu_equals_lazy_dense_step(number):
    run(number)


def run(number):
    program = program_of(number)
    with draws.repeated_by(number, program):
        draws.run(number, program)
