"""Losses of output layers, drawn from the product of all of their options, beside a loop over tokens
in float64: values, and gradients in every argument that has one."""

import types

import draws
import jax
import loss_draws
import numpy as np
import pytest

FORMS = (None, "number", "traced", "column", "row", "tokens")
TEMPERED = ("log_probs", "candidates", "kept", *loss_draws.DIVERGENCES)
REDUCED = ("cross_entropy", *loss_draws.DIVERGENCES)
LOSSES = ("cross_entropy", *TEMPERED)
DIVERGENCES = tuple(loss_draws.DIVERGENCES)
# The function with the most options of its own comes most often.
FUNCTIONS = (
    *("cross_entropy", "log_probs", "candidates"),
    *("cross_entropy", "kept", DIVERGENCES[0]),
    *("cross_entropy", DIVERGENCES[1], DIVERGENCES[2]),
    *("cross_entropy", "log_probs", "candidates"),
    *("cross_entropy", "kept", DIVERGENCES[0]),
    *("cross_entropy", DIVERGENCES[1], DIVERGENCES[2]),
    "logits",
)
MODES = ("eager", "jit", "vmap", "scan", "remat", "strict", "x64", "explicit", "shard_map", "gpu")


def only(names, *options):
    """The options of some functions; the others have the first one alone."""
    return lambda chosen: options if chosen["function"] in names else options[:1]


def strict_nans(chosen):
    return chosen["mode"] == "debug_nans"


def biases(chosen):
    """With debug_nans, none that makes NaN: the weight of a banned label has 0 times infinity."""
    every = (None, "plain", "bans", "bans of one")
    if not strict_nans(chosen):
        return every
    return every[:2] if chosen["weights"] else every[:3]


def with_shift(*options):
    return lambda chosen: options if chosen["shift"] else options[:1]


def dtypes(chosen):
    narrow = [("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32")]
    return [("float64",) * 2] if chosen["mode"] == "x64" else [("float32",) * 2] * 5 + narrow


def shapes(chosen):
    split = [(2, 3), (4, 2)]
    return (
        split
        if chosen["mode"] in loss_draws.SPLITS
        else [*split * 3, (7,), (1, 9), (2, 1, 4), (3, 1), (0, 3), (2, 0)]
    )


def shifts(chosen):
    """Those below the length."""
    inside = [n for n in (0, 0, 1, 1, 2) if n == 0 or n < chosen["tokens"][-1]]
    return inside if chosen["function"] in LOSSES else [0]


def orders(chosen):
    """Second derivatives, where float32 holds them, jax has them, and they are not 0.

    They take twice as long. Lists that differ have turns of their own, so each group of functions
    meets them.
    """
    is_wide = chosen["dtypes"][0] in ("float32", "float64") and chosen["size"] < 1e4
    has_second = chosen["mode"] not in ("debug_nans", "shard_map")
    is_zero = chosen["ties"] or chosen["mask"] == "none counted" or 0 in chosen["tokens"]
    # Where the student alone bans an id, a second derivative of the teacher is NaN at a token whose
    # infinite divergence is not counted.
    is_endless = chosen["function"] == "forward" and chosen["bias"] == "bans of one"
    if not is_wide or not has_second or is_zero or is_endless or chosen["function"] == "logits":
        return (1,)
    if chosen["function"] == "cross_entropy":
        return (1, 2)
    return (2, 1) if chosen["function"] in DIVERGENCES else (1, 1, 2)


SPACE = draws.Space(
    {
        "function": draws.InOrder(FUNCTIONS),
        "mode": (*MODES, *loss_draws.SPLITS, "debug_nans"),
        "dtypes": dtypes,
        "tokens": shapes,
        "vocab": lambda chosen: (8, 40) if chosen["mode"] in loss_draws.SPLITS else (5, 8, 13, 40),
        "candidates": lambda chosen: (
            (1, 3) if chosen["function"] in ("candidates", "kept") else (0,)
        ),
        "shift": shifts,
        "segments": with_shift(None, None, "row", "tokens"),
        "mask": only(LOSSES, None, None, *["tokens"] * 3, "row", "column", "none counted"),
        "weights": only(REDUCED, None, "tokens", "column", "row"),
        "temperature": only(TEMPERED, *FORMS),
        "label_smoothing": only(("cross_entropy",), *FORMS),
        "z_loss": only(("cross_entropy",), *FORMS),
        "with_metrics": only(("cross_entropy",), False, True),
        "with_entropy": only(("log_probs", "candidates"), False, True),
        "reduction": only(REDUCED, "mean", "sum", "none"),
        "beta": only(("js",), None, 0.1),
        "bias": biases,
        "vocab_axis": (0, 1),
        "softcap": (None, None, 2.0),
        "scale": (1.0, 1.0, 0.5, 3.0),
        # Few draws at a time have the sizes and ties that hide other faults.
        "size": (*[1.0] * 5, 30.0, 30.0, 1e4),
        "pad_id": lambda chosen: (None, 0, 2, chosen["vocab"], -100),
        "chunk_size": only(LOSSES, None, 1, 2, 3, 5, 1000),
        "ties": (*[False] * 7, True),
        "order": orders,
        "hostile": lambda chosen: (False, True, True)[: 3 - 2 * strict_nans(chosen)],
    },
    default=20,
    quick=7,
)
NUMBERS = {"temperature": 0.7, "label_smoothing": 0.2, "z_loss": 0.1}


def settings_of(chosen):
    """Those that are arrays, with their forms, and the numbers of the others."""
    forms = {name: getattr(chosen, name) for name in NUMBERS if getattr(chosen, name)}
    numbers = {name: NUMBERS[name] for name, form in forms.items() if form == "number"}
    arrays = {
        name: "number" if form == "traced" else form
        for name, form in forms.items()
        if form != "number"
    }
    return arrays, numbers


def program_of(number, chosen):
    """At most ten lines that call the loss and return its values and gradients."""
    is_divergence = chosen.function in loss_draws.DIVERGENCES
    arrays, static = settings_of(chosen)
    if chosen.function != "logits":
        static |= {"shift": chosen.shift, "chunk_size": chosen.chunk_size}
    if chosen.function in REDUCED:
        static["reduction"] = chosen.reduction
    if is_divergence:
        static |= {"kind": chosen.function, "beta": chosen.beta}
    for name in ("with_metrics", "with_entropy"):
        if getattr(chosen, name):
            static[name] = True
    given = [*arrays, *(["weights"] if chosen.weights else [])]
    others = ["mask"] * bool(chosen.mask) + ["segment_ids"] * bool(chosen.segments)
    options = [f"{name}={value!r}" for name, value in static.items()]
    options += [f"{name}=a['{name}']" for name in given]
    options += [f"{name}=b['{name}']" for name in others]
    kind = "divergence" if is_divergence else chosen.function
    kind = "log_probs" if kind == "candidates" else kind
    called = "loss_draws.kept_log_probs" if kind == "kept" else f"te.linear_{kind}"
    bias = "a.get('bias')"
    fields = f"softcap={chosen.softcap}, scale={chosen.scale}, pad_id={chosen.pad_id}"
    fields += ", vocab_axis=1" if chosen.vocab_axis else ""
    lines = [
        "import loss_draws",
        "import transformer_embed as te",
        f"batches = loss_draws.batches({number}, **{spec_of(chosen, arrays)})",
        "def loss(a, b):",
        f"    output = te.OutputLayer(a['table'], {bias}, {fields})",
        f"    return {called}(a['x'], output, b['labels'], {', '.join(options)})",
        f"found = loss_draws.call({chosen.mode!r}, loss, batches, order={chosen.order})",
    ]
    if is_divergence:
        teacher = (
            f"te.OutputLayer(a['teacher_table'], a.get('teacher_bias'), pad_id={chosen.pad_id})"
        )
        lines[5] = lines[5].replace("b['labels']", "a['teacher_x'], teacher")
        lines.insert(5, f"    teacher = {teacher}")
    if chosen.function == "logits":
        lines[5] = "    return te.linear_logits(a['x'], output)"
    return "\n".join(lines)


def spec_of(chosen, arrays):
    names = ("tokens", "vocab", "candidates", "dtypes", "size", "bias", "weights", "mask")
    names += ("segments", "hostile", "pad_id", "shift", "vocab_axis", "ties")
    spec = {name: getattr(chosen, name) for name in names if getattr(chosen, name) is not None}
    # Each operation of these runs by itself; of the first, nothing is kept from batch to batch.
    spec["count"] = {"debug_nans": 1, "eager": 2}.get(chosen.mode, 3)
    is_divergence = chosen.function in loss_draws.DIVERGENCES
    has_labels = not is_divergence and chosen.function != "logits"
    return spec | {"teacher": is_divergence, "labels": has_labels, "settings": [*arrays.items()]}


NAMES = {"candidates": "log_probs"}
ERRORS = {"float64": 1e-10, "float32": 3e-5, "bfloat16": 3e-2, "float16": 3e-2}


def check_values(chosen, values, wanted, size, has_open_accuracy):
    """All arrays that the function returns. `size` is the size of the logits."""
    rtol = ERRORS["float64" if chosen.mode == "x64" else "float32"]
    # The z-loss squares logits, so an error of a logit counts as often as the logit is large.
    atol = rtol * size * (1 + (size if chosen.z_loss else 0))
    for index, (value, want) in enumerate(zip(values, wanted, strict=True)):
        if not (has_open_accuracy and index == 1):
            np.testing.assert_allclose(value, want.real, rtol=rtol, atol=atol)


def reduction_of(chosen, given, others):
    """How the oracle reduces the losses: a mean of labels whose weights are all 0 divides by 1."""
    where = given, others, chosen.tokens, chosen.shift, chosen.pad_id
    weights = np.broadcast_to(given.get("weights", 1), chosen.tokens)
    counted = loss_draws.counted_labels(*where)
    is_sum = chosen.reduction == "mean" and counted.shape == weights.shape
    return "sum" if is_sum and not weights[counted].any() else chosen.reduction


def check_gradients_of_infinite_losses(chosen, gradients):
    """They are finite, and mean nothing. Those of weights are losses, so they are infinite.

    So the derivatives of these by a setting may be NaN.
    """
    may_be_infinite = {"weights"}
    if chosen.order == 2 and chosen.weights:
        may_be_infinite |= loss_draws.RANGES.keys()
    finite = gradients.keys() - may_be_infinite
    assert all(np.isfinite(gradients[name]).all() for name in finite)


def check(number, chosen, batch, values, gradients):
    """Values, and the derivative along a direction of each array."""
    given, others = jax.tree.map(np.asarray, batch)
    first = {
        name: np.asarray(loss_draws.direction_of(name, array)) for name, array in given.items()
    }
    if chosen.vocab_axis:
        given, gradients, first = (
            {**arrays, "table": arrays["table"].T} for arrays in (given, gradients, first)
        )
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    options = {name: getattr(chosen, name) for name in ("shift", "pad_id", "softcap", "scale")}
    options |= {"tokens": chosen.tokens, "beta": chosen.beta}
    options["reduction"] = reduction_of(chosen, given, others)
    options |= settings_of(chosen)[1]
    options["dtype"] = values[0].dtype

    def of(arrays, sizes=None, **more):
        function = NAMES.get(chosen.function, chosen.function)
        wanted = loss_draws.oracle(function, arrays, others, sizes=sizes, **options, **more)
        return wanted[: len(values)]

    wanted = of(wide, sizes := [])
    # A rounded tanh near 1 has a derivative of its own, which x multiplies.
    size = 1 + np.nan_to_num(sizes).max(initial=0) + (chosen.size if chosen.softcap else 0)
    # A softcap makes large logits equal in float32, where float64 tells them apart. The accuracy,
    # which comes after the loss, is open if such a difference decides it.
    has_open_accuracy = False
    if chosen.with_metrics and chosen.softcap and chosen.size > 1:
        lowest, highest = (of(wide, label_advantage=sign * 1e-5)[1] for sign in (-1, 1))
        has_open_accuracy = not np.array_equal(lowest, highest)
    check_values(chosen, values, wanted, size, has_open_accuracy)
    if chosen.function in REDUCED and not np.isfinite(wanted[0].real).all():
        check_gradients_of_infinite_losses(chosen, gradients)
        return
    unweighted = {name: array for name, array in wide.items() if name != "weights"}
    (losses, *_) = loss_draws.oracle(
        NAMES.get(chosen.function, chosen.function),
        unweighted,
        others,
        **options | {"reduction": "none"},
    )

    def derivative(arrays, directions):
        """Along directions of some arrays."""
        moved = arrays | {
            name: arrays[name] + loss_draws.STEP * 1j * direction
            for name, direction in directions.items()
        }
        differentiable = of(moved)[:1] if chosen.function == "cross_entropy" else of(moved)
        return sum(loss_draws.weighed(value) for value in differentiable).imag / loss_draws.STEP

    rng = np.random.default_rng(number)
    for name, gradient in gradients.items():
        direction = rng.normal(size=gradient.shape)
        if name == "weights" and not np.isfinite(losses.real).all():
            # That of an infinite loss is infinite.
            direction *= wide[name] != 0
        direction = np.where(np.isneginf(wide[name]), 0, direction)
        if chosen.order == 1:
            want = derivative(wide, {name: direction})
        else:
            step = 1e-5 * direction
            sides = [derivative(wide | {name: wide[name] + s * step}, first) for s in (1, -1)]
            want = (sides[0] - sides[1]) / 2e-5
        products = np.where(direction == 0, 0, gradient.astype(np.float64)) * direction
        terms = 1 + np.abs(products).sum()
        error = max(ERRORS[each] for each in chosen.dtypes) * size * terms
        if chosen.order == 2:
            # The finite difference, and a product of two sizes.
            error = max(error, 1e-6 * terms) * size
        message = f"gradient of {name}"
        np.testing.assert_allclose(products.sum(), want, rtol=0, atol=error, err_msg=message)


ON_GPU = SPACE.on_gpu()
# What a draw has beside the options of `SECOND`.
ORDINARY = {
    "mode": "x64", "dtypes": ("float64",) * 2, "tokens": (3, 4), "vocab": 8, "candidates": 0,
    "shift": 1, "segments": None, "mask": "tokens", "weights": None, "temperature": None,
    "label_smoothing": None, "z_loss": None, "with_metrics": False, "with_entropy": False,
    "reduction": "mean", "beta": None, "bias": "plain", "vocab_axis": 1, "softcap": 2.0,
    "scale": 3.0, "size": 1.0, "pad_id": 2, "chunk_size": 5, "ties": False, "order": 2,
    "hostile": False,
}  # fmt: skip
OF_CROSS_ENTROPY = {"weights": "tokens", "label_smoothing": "tokens", "z_loss": "column"}
SECOND = [
    {"function": "cross_entropy", **OF_CROSS_ENTROPY},
    {"function": "log_probs", "temperature": "row", "with_entropy": True},
]


@pytest.mark.parametrize("number", SPACE.numbers())
def test_loss_equals_loop_over_tokens(number):
    run(number, SPACE.choices(number))


@pytest.mark.slow
@pytest.mark.parametrize("options", SECOND)
def test_second_derivatives_of_all_options_at_once_equal_loop_over_tokens(options):
    run(0, types.SimpleNamespace(**ORDINARY | options))


@pytest.mark.gpu
@pytest.mark.parametrize("number", ON_GPU.numbers())
def test_loss_on_gpu_equals_loop_over_tokens(number):
    run(number, ON_GPU.choices(number))


def run(number, chosen):
    program = program_of(number, chosen)
    with draws.repeated_by(number, program):
        ran = draws.run(number, program)
        for batch, (values, gradients) in zip(ran.batches, ran.found, strict=True):
            check(number, chosen, batch, *jax.device_get((values, gradients)))
