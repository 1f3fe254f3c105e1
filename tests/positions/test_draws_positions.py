"""Draws of encodings, rotations and relative biases, called in each mode, in arbitrary precision."""

import draws
import pytest

POSITIONS = ["near", "far", "ends", "unsigned", "fractional", "no phase"]
DTYPES = ["float32", "bfloat16", "float16"]
BASES = [1e4, 1e6, 500.0, 2.0, 0.5, 1e-3, 3.7e12]
PROGRAM = """\
import draws, drawn, functools, numpy as np, references, transformer_embed as te
options = dict({options})
def call(function, {names}):
    return function({arguments}, **options)
batches = [({arrays}) for n in {seeds}]
found = draws.call({mode!r}, functools.partial(call, {function}), batches)
for batch, got in zip(batches, found):
    call(functools.partial(references.assert_right, {function}, np.asarray(got)), *batch)
"""


def run(number, mode, function, *, names, arrays, arguments=None, **options):
    """Draws of values share a program."""
    program = PROGRAM.format(
        function=function if "." in function else f"te.{function}",
        names=names,
        arguments=arguments or names,
        arrays=arrays,
        mode=mode,
        options=", ".join(f"{name}={value}" for name, value in options.items()),
        seeds=[2 * number, 2 * number + 1],
    )
    with draws.repeated_by(number, program):
        draws.run(number, program)


# --- sinusoids

SINUSOIDS = draws.Space(
    {
        "grid": [None, None, None, "(2, 3)"],
        "positions": lambda chosen: ["near"] if chosen["grid"] else POSITIONS,
        "shape": ["4", "2, 3", "1, 1, 2", "0"],
        "d_model": lambda chosen: [6] if chosen["grid"] else [1, 2, 3, 6, 9],
        "base": BASES,
        "layout": ["interleaved", "sin_cos", "cos_sin"],
        "odd": ["truncate", "round_up", "zero"],
        "shift": lambda chosen: (
            [None, 0, 0.5, -3.7][: 2 + 2 * (chosen["d_model"] > 3)]
            if chosen["d_model"] > 1
            else [None]
        ),
        "frequency_scale": [1.0, 0.25, 1000.0, 7e-9],
        "dtype": DTYPES,
        "axes": ["None", "(1, 0)"],
        "mode": list(draws.MODES),
    },
    default=10,
    quick=5,
)


SINUSOIDS_ON_GPU = SINUSOIDS.on_gpu()


@pytest.mark.parametrize("number", SINUSOIDS.numbers())
def test_sinusoids(number):
    run_sinusoids(number, SINUSOIDS.choices(number))


@pytest.mark.gpu
@pytest.mark.parametrize("number", SINUSOIDS_ON_GPU.numbers())
def test_sinusoids_on_gpu(number):
    run_sinusoids(number, SINUSOIDS_ON_GPU.choices(number))


def run_sinusoids(number, chosen):
    named = ("base", "layout", "odd", "shift", "frequency_scale", "dtype")
    options = {name: repr(getattr(chosen, name)) for name in named}
    function, arguments = "sinusoidal_encoding", f"positions, {chosen.d_model}"
    if chosen.grid:
        function, arguments = "references.grid_encoding", f"positions % 8 - 1, {chosen.d_model}"
        options |= {"shape": chosen.grid, "axes": chosen.axes}
        del options["dtype"]
    run(
        number,
        chosen.mode,
        function,
        names="positions",
        arguments=arguments,
        arrays=f"drawn.positions({chosen.positions!r}, n, {chosen.shape}),",
        **options,
    )


# --- rotations

SCALINGS = [
    "te.LinearScaling(4.0)",
    "te.LinearScaling(0.3)",
    "te.NTKScaling(8.0)",
    "te.YarnScaling(4.0, 64)",
    "te.YarnScaling(40.0, 4096, 24.0, 1.5, truncate=False, mscale=0.7, mscale_all_dim=0.3)",
    "te.Llama3Scaling(8.0)",
    "te.Llama3Scaling(16.0, 1.0, 1.0)",
    "te.LongRopeScaling([1, 1.5, 2], [1.1, 9, 30], 32.0, 4096, 10_000)",
    "te.LongRopeScaling([1, 1.5, 2], [1.1, 9, 30], 32.0, 4096, 4096, attention_factor=0.5)",
]
PROPORTIONAL = [f"rotary_dim={n}, partial='proportional'" for n in (2, 4)]
ROTATIONS = draws.Space(
    {
        "positions": POSITIONS,
        "pair_axes": ["None", "None", "(0, 1, 1)", "(2, 0, 1)"],
        "shape": lambda chosen: ["3"] if chosen["pair_axes"] == "None" else ["3, 3"],
        "rows": ["", "2, ", "1, "],
        "rotary": [*["rotary_dim=None"] * 2, "rotary_dim=6", *PROPORTIONAL],
        "layout": ["half", "interleaved"],
        "scaling": ["None", *SCALINGS],
        "base": [1e4, 1e6, 500.0, 2.0, 3.7e12],
        "dtype": DTYPES,
        "mode": list(draws.MODES),
    },
    default=10,
    quick=3,
)


ROTATIONS_ON_GPU = ROTATIONS.on_gpu()


@pytest.mark.parametrize("number", ROTATIONS.numbers())
def test_rotations(number):
    run_rotations(number, ROTATIONS.choices(number))


@pytest.mark.gpu
@pytest.mark.parametrize("number", ROTATIONS_ON_GPU.numbers())
def test_rotations_on_gpu(number):
    run_rotations(number, ROTATIONS_ON_GPU.choices(number))


def run_rotations(number, chosen):
    rotary_dim, _, partial = chosen.rotary.partition(", ")
    channels = 8 if rotary_dim == "rotary_dim=6" else 6
    x = f"drawn.normal(n, 2, 3, 2, {channels}).astype({chosen.dtype!r})"
    run(
        number,
        chosen.mode,
        "apply_rotary",
        names="x, positions",
        arrays=f"{x}, drawn.positions({chosen.positions!r}, n, {chosen.rows}{chosen.shape})",
        base=chosen.base,
        layout=repr(chosen.layout),
        scaling=chosen.scaling,
        rotary_dim=rotary_dim.partition("=")[2],
        partial=partial.partition("=")[2] or "'first'",
        pair_axes=chosen.pair_axes,
    )


# --- relative biases

BIASES = draws.Space({
    "queries": ["near", "far", "ends"],
    "keys": ["near", "far", "ends"],
    "shapes": [("3", "4"), ("2, 3", "2, 4"), ("1, 1", "2, 3"), ("2, 3", "0")],
    "function": ["alibi_bias", "relative_position_buckets"],
    "heads": [1, 2, 3, 12],
    "max_bias": [8.0, 2.5, 30.0],
    "dtype": DTYPES,
    "buckets": ["32, max_distance=128", "8, max_distance=20", "48, max_distance=81", "4, max_distance=2**30"],
    "causal": [True, False],
    "mode": list(draws.MODES),
}, default=10, quick=5)  # fmt: skip


@pytest.mark.parametrize("number", BIASES.numbers())
def test_relative_biases(number):
    chosen = BIASES.choices(number)
    queries, keys = chosen.shapes
    arrays = f"drawn.positions({chosen.queries!r}, n, {queries}), "
    arrays += f"drawn.positions({chosen.keys!r}, n + 1, {keys})"
    options = {"num_buckets": chosen.buckets, "causal": chosen.causal}
    arguments = "queries, keys"
    if chosen.function == "alibi_bias":
        options = {name: repr(getattr(chosen, name)) for name in ("causal", "max_bias", "dtype")}
        arguments += f", {chosen.heads}"
    run(
        number,
        chosen.mode,
        chosen.function,
        names="queries, keys",
        arguments=arguments,
        arrays=arrays,
        **options,
    )


# --- scales of queries

SCALES = draws.Space(
    {
        "length": [1, 7, 8192, 16_384, 2**31 - 1],
        "beta": [0.0, 0.1, 0.5, 4],
        "offset": [0, 1],
        "dtype": ["int8", "int32", "uint16", "uint32"],
        "mode": [mode for mode in draws.MODES if mode not in ("shard_map", "exported")],
    },
    default=10,
    quick=8,
)


@pytest.mark.parametrize("number", SCALES.numbers())
def test_scales_of_queries(number):
    """At both sides of each step, and at the ends of the dtype."""
    chosen = SCALES.choices(number)
    run(
        number,
        chosen.mode,
        "query_scale",
        names="positions",
        arrays=f"drawn.steps({chosen.length}, n, {chosen.dtype!r}),",
        beta=chosen.beta,
        length=chosen.length,
        offset=chosen.offset,
    )
