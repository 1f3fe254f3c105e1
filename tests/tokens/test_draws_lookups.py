"""Lookups, drawn from the product of their options, beside a loop over ids: rows, and the gradient
of the table."""

import draws
import jax
import loss_draws
import numpy as np
import pytest
from oracle import loop_lookup, loop_lookup_gradient
from references import integers

MODES = ("eager", "jit", "vmap", "scan", "remat", "strict", "explicit", "shard_map", "x64")
NARROW = ("int32", "int32", "int8", "uint8", "int16", "uint16", "uint32")


def is_split(chosen):
    return chosen["mode"] in loss_draws.SPLITS


def shapes(chosen):
    if is_split(chosen):
        return [(2, 3), (4, 2)]
    return [(2, 3), (7,), (), (0,)]


def dtypes_of_ids(chosen):
    # jit would take the lower half of a wider one.
    return (*NARROW, "int64", "uint64") if chosen["mode"] in ("eager", "x64") else NARROW


SPACE = draws.Space(
    {
        "mode": (*MODES, *loss_draws.SPLITS, "debug_nans"),
        "tokens": shapes,
        "vocab": lambda chosen: (8,) if is_split(chosen) else (1, 5, 8, 300),
        "width": lambda chosen: (4,) if is_split(chosen) else (1, 3),
        "dtype": lambda chosen: (
            ("float64",)
            if chosen["mode"] == "x64"
            else ("float32", "float32", "bfloat16", "float16")
        ),
        "of_ids": dtypes_of_ids,
        "ids": ("inside", "repeated", "outside", "anything"),
        "pad_id": (None, 0, 2, "vocab", -1, 2**31 - 2),
        "out_of_range": ("nan", "clip", "zero"),
        "lookup_style": ("gather", "gather", "one_hot"),
    },
    default=17,
    quick=6,
)


def ids_of(chosen):
    """Ids at both ends of the vocabulary, beyond both, and far beyond."""
    limits = np.iinfo(chosen.of_ids)
    far = [-1, -chosen.vocab, chosen.vocab, int(limits.max), int(limits.min), 2**32 + 2]
    inside = [0, chosen.vocab - 1, chosen.vocab // 2]
    kinds = {"repeated": inside[2:], "outside": far, "anything": [*inside, *far]}
    ids = inside if chosen.mode == "debug_nans" else kinds.get(chosen.ids, inside)
    return [each for each in ids if limits.min <= each <= limits.max] or [0]


def pad_id_of(chosen):
    return chosen.vocab if chosen.pad_id == "vocab" else chosen.pad_id


def program_of(number, chosen):
    options = f"pad_id={pad_id_of(chosen)}, out_of_range={chosen.out_of_range!r}"
    options += f", lookup_style={chosen.lookup_style!r}"
    table = f"rng.normal(size={chosen.vocab, chosen.width}).astype('{chosen.dtype}')"
    ids = f"rng.choice(np.array({ids_of(chosen)}, '{chosen.of_ids}'), {chosen.tokens})"
    lines = [
        "import ml_dtypes, loss_draws, numpy as np",
        "import transformer_embed as te",
        f"rng = np.random.default_rng({number})",
        f"draw = lambda: ({{'table': {table}}}, {{'ids': np.asarray({ids})}})",
        f"lookup = lambda a, b: te.lookup(a['table'], b['ids'], {options})",
        "batches = [draw(), draw()]",
        f"found = loss_draws.call({chosen.mode!r}, lookup, batches)",
    ]
    return "\n".join(lines)


ON_GPU = SPACE.on_gpu()


@pytest.mark.parametrize("number", SPACE.numbers())
def test_lookup_equals_loop_over_ids(number):
    run(number, SPACE.choices(number))


@pytest.mark.gpu
@pytest.mark.parametrize("number", ON_GPU.numbers())
def test_lookup_on_gpu_equals_loop_over_ids(number):
    run(number, ON_GPU.choices(number))


def run(number, chosen):
    program = program_of(number, chosen)
    with draws.repeated_by(number, program):
        ran = draws.run(number, program)
        for batch, (values, gradients) in zip(ran.batches, ran.found, strict=True):
            check(chosen, batch, *jax.device_get((values, gradients)))


def check(chosen, batch, values, gradients):
    """Rows to the bit; a gradient is summed in float32 or wider, and rounded once."""
    (rows,), table, ids = values, batch[0]["table"], batch[1]["ids"]
    options = pad_id_of(chosen), chosen.out_of_range
    assert rows.dtype == table.dtype
    wide = [each.astype(np.float64) for each in (rows, gradients["table"])]
    want = loop_lookup(table, integers(ids), *options).astype(np.float64)
    np.testing.assert_array_equal(wide[0], want)
    # `loss_draws.weighed` gives these weights to the numbers of the rows.
    weights = np.cos(np.arange(rows.size, dtype=np.float32) + 1).astype(rows.dtype)
    want = loop_lookup_gradient(table.shape, integers(ids), weights, *options)
    half_ulp = float(np.finfo("float32").eps if table.dtype.itemsize > 2 else 2.0**-8)
    np.testing.assert_allclose(wide[1], want, rtol=half_ulp, atol=1e-6)
