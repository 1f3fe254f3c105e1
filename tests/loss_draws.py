"""Losses of output layers: the arrays of a draw, and an oracle that loops over tokens in float64.

The oracle takes complex numbers, so the derivative along a direction is the imaginary part of its
value at `array + 1e-30j * direction`: exact, with nothing to cancel.
"""

import jax
import jax.numpy as jnp
import numpy as np
import platforms
from draws import call as call_in_mode
from jax.experimental import checkify
from jax.extend.core import Literal, jaxpr_as_fun
from meshes import AUTO, EXPLICIT, mesh_of, put

import transformer_embed as te

STEP = 1e-30
DIVERGENCES = ("forward", "reverse", "js")
# Logarithms of probabilities below which they are 0.
LOWEST = {"float32": -90, "float64": -740}
# A setting of a token, and values of it that are out of range: they may stand where nothing counts.
RANGES = {
    "temperature": ((0.4, 2.5), (0.0, -1.0)),
    "label_smoothing": ((0.0, 0.6), (1.0, -0.5)),
    "z_loss": ((0.0, 0.2), (-0.3, np.nan)),
}


# --- arrays


def batches(number, count=3, **chosen):
    """Of each batch, arrays that have a gradient, and others."""
    return [_arrays(np.random.default_rng([number, n]), **chosen) for n in range(count)]


def _arrays(
    rng, *, tokens, vocab, dtypes, teacher=False, size=1.0, bias=None, settings=(), weights=None,
    hostile=False, pad_id=None, shift=0, vocab_axis=0, ties=False, **of_others,
):  # fmt: skip
    if "float16" in dtypes:
        # A gradient is as large as the square of x times a few tokens, and float16 ends at 65,504.
        size = min(size, 30.0)
    draw = lambda *shape: rng.normal(size=shape)
    given = {}
    for prefix, width in {"": 4, "teacher_": 2}.items() if teacher else [("", 4)]:
        given[f"{prefix}x"] = size * draw(*tokens, width)
        given[f"{prefix}table"] = draw(vocab, width)
        if bias is not None:
            given[f"{prefix}bias"] = draw(vocab)
        if bias == "bans" or (bias == "bans of one" and not prefix):
            given[f"{prefix}bias"][[1, 3]] = -np.inf
    if ties:
        # A head that starts at zero: all logits are equal.
        given["table"][:] = 0
        if bias is not None:
            given["bias"] = np.where(np.isneginf(given["bias"]), -np.inf, 0)
    if weights is not None:
        given["weights"] = rng.random(_form(tokens, weights)) + 0.1
        given["weights"][rng.random(given["weights"].shape) < 0.3] = 0
    for name, form in settings:
        (low, high), _ = RANGES[name]
        given[name] = rng.uniform(low, high, _form(tokens, form))
    others = _others(rng, tokens, vocab, pad_id, **of_others)
    if hostile:
        _spoil(rng, given, others, tokens, shift, pad_id)
    if vocab_axis == 1:
        given["table"] = np.ascontiguousarray(given["table"].T)
    of_x, of_table = dtypes
    for name, array in given.items():
        dtype = of_x if name.endswith("x") else of_table
        is_setting = name in RANGES or name == "weights"
        given[name] = array.astype("float32" if is_setting and dtype != "float64" else dtype)
    return given, others


def _others(rng, tokens, vocab, pad_id, *, candidates=0, labels=True, mask=None, segments=None):
    others = {}
    if labels:
        shape = (*tokens, candidates) if candidates else tokens
        others["labels"] = rng.integers(0, vocab, shape).astype(np.int32)
        if pad_id is not None:
            others["labels"][rng.random(shape) < 0.2] = pad_id
        if candidates:
            # Where all that are kept are banned, nothing is left to compare.
            others["labels"][..., 0] = 4
    if segments is not None:
        others["segment_ids"] = np.sort(rng.integers(0, 4, _form(tokens, segments)), -1)
        others["segment_ids"] = others["segment_ids"].astype(np.int32)
    if mask is not None:
        of_mask = _form(tokens, mask) if not candidates else (*_form(tokens, mask), 1)
        others["mask"] = rng.random(of_mask) < (0 if mask == "none counted" else 0.6)
    return others


def _form(tokens, form):
    """The shape of an array that broadcasts to the tokens'."""
    if form == "number":
        return ()
    if form == "row":
        return tokens[-1:]
    return (*tokens[:-1], 1) if form == "column" else tokens


def _spoil(rng, given, others, tokens, shift, pad_id):
    """Anything where no label is counted: NaN, ids outside, settings out of range."""
    labels = others.get("labels")
    is_counted = counted_labels(given, others, tokens, shift, pad_id)
    of_tokens = is_counted if is_counted.shape == tokens else is_counted.any(-1)
    of_tokens &= np.broadcast_to(given.get("weights", 1), tokens) != 0
    for name in {"x", "teacher_x"} & given.keys():
        given[name][~np.roll(of_tokens, -shift, -1)] = np.nan
    if labels is not None and labels.ndim == len(tokens):
        labels[~of_tokens & (labels != pad_id)] = 10**6
    for name in RANGES.keys() & given.keys():
        if given[name].shape == tokens:
            _, outside = RANGES[name]
            given[name][~of_tokens] = rng.choice(outside, np.shape(given[name][~of_tokens]))


def counted_labels(given, others, tokens, shift, pad_id):
    """Which labels count: [tokens], or [tokens, candidates]."""
    labels = others.get("labels")
    shape = tokens if labels is None else labels.shape
    segments = np.broadcast_to(others.get("segment_ids", 1), tokens)
    earlier = lambda array: np.roll(array, shift, len(tokens) - 1)
    inside = (earlier(segments) == segments) & (segments != 0) & (np.arange(tokens[-1]) >= shift)
    counted = np.broadcast_to(others.get("mask", True), shape).copy()
    if shift:
        counted &= inside.reshape(*tokens, *[1] * (len(shape) - len(tokens)))
    if pad_id is not None and labels is not None:
        counted &= labels != pad_id
        if shape == tokens and shift and 0 <= pad_id < len(given["table"]):
            # Padding on the left predicts nothing.
            counted &= earlier(labels) != pad_id
    return counted


# --- the oracle


def _log_softmax(z, allowed):
    """Complex; where an id is not allowed, anything."""
    top = z.real[allowed].max()
    log_z = np.log(np.exp(z[allowed] - top).sum()) + top
    return np.where(allowed, z - log_z, 0), log_z


def _logits(given, prefix, at, temperature, pad_id, softcap, scale):
    x, table = given[f"{prefix}x"][at], given[f"{prefix}table"]
    bias = given.get(f"{prefix}bias", np.zeros(len(table)))
    is_banned = np.isneginf(bias.real)
    z = scale * (table @ x + np.where(is_banned, 0, bias))
    z = z if softcap is None else softcap * np.tanh(z / softcap)
    return z / temperature, ~is_banned & (np.arange(len(table)) != pad_id), is_banned


@np.errstate(invalid="ignore")
def oracle(
    function, given, others, *, tokens, shift=0, pad_id=None, softcap=None, scale=1.0, beta=None,
    reduction="none", temperature=1.0, label_smoothing=0.0, z_loss=0.0, sizes=None, dtype="float32",
    label_advantage=0.0,
):  # fmt: skip
    """The values of a function, as a tuple of complex arrays; adds the largest logits to `sizes`.

    `label_advantage` is added to the logit of each label before the accuracy is computed.
    """
    sizes = [] if sizes is None else sizes
    values, is_counted = {}, counted_labels(given, others, tokens, shift, pad_id)
    labels = others.get("labels", np.zeros(tokens))
    of = lambda name, default: np.broadcast_to(given.get(name, default), tokens)
    for at in np.ndindex(tokens):
        y, counted = labels[at], is_counted[at]
        if not counted.any():
            continue
        source, t = (*at[:-1], at[-1] - shift), of("temperature", temperature)[at]
        z, allowed, is_banned = _logits(given, "", source, t, pad_id, softcap, scale)
        log_p, log_z = _log_softmax(z, allowed)
        sizes.append(np.abs(z[allowed]).max())
        p = np.where(allowed, np.exp(log_p), 0)
        entropy = -(p * log_p).sum()
        if function in DIVERGENCES:
            other, teacher_allows, _ = _logits(given, "teacher_", source, t, pad_id, None, 1.0)
            sizes.append(np.abs(other[teacher_allows]).max())
            log_q, _ = _log_softmax(other, teacher_allows)
            values[at] = _divergence(
                function, beta, (log_p, allowed), (log_q, teacher_allows), LOWEST[str(dtype)]
            )
        elif function == "cross_entropy":
            s = of("label_smoothing", label_smoothing)[at]
            of_z = of("z_loss", z_loss)[at] * log_z**2
            ranked = np.where(allowed, z.real, -np.inf)
            ranked[np.arange(len(z)) == y] += label_advantage
            is_right = ranked.argmax() == y
            loss = np.nan
            if 0 <= y < len(z):
                loss = -(1 - s) * log_p[y] - s * log_p.sum() / allowed.sum() + of_z
                loss = np.inf if is_banned[y] else loss
            values[at] = np.array([loss, is_right, of_z, log_z])
        elif function == "logits":
            values[at] = np.where(is_banned, -np.inf, z)
        else:
            safe = np.where(counted, y, 0)
            possible = counted & ~is_banned[safe]
            among = log_p[safe]
            if function == "kept":
                among, _ = _log_softmax(np.where(possible, z[safe], 0), possible)
            values[at] = np.append(np.where(possible, among, -np.inf), entropy)
    if function == "logits":
        return (
            _of_padding(
                np.array([*values.values()]).reshape(*tokens, len(given["table"])), pad_id, dtype
            ),
        )
    if function in ("cross_entropy", *DIVERGENCES):
        weights = np.where(is_counted, of("weights", 1.0), 0).astype(complex)
        return _reduced(values, weights, 4 if function == "cross_entropy" else 1, reduction)
    log_probs = np.full(labels.shape, 0 if labels.shape == tokens else -np.inf, complex)
    entropies = np.zeros(tokens, complex)
    for at, value in values.items():
        entropies[at], log_probs[at] = value[-1], value[:-1].reshape(log_probs[at].shape)
    return log_probs, entropies


def _divergence(kind, beta, student, teacher, lowest):
    (log_p, in_p), (log_q, in_q) = student, teacher

    def kl(log_a, in_a, log_b, in_b):
        if (in_a & ~in_b & (log_a.real > lowest)).any():
            return np.inf + 0j
        return np.where(in_a & in_b, np.exp(log_a) * (log_a - log_b), 0).sum()

    if kind == "forward":
        return kl(log_q, in_q, log_p, in_p)
    if kind == "reverse":
        return kl(log_p, in_p, log_q, in_q)
    beta = 0.5 if beta is None else beta
    either = in_p | in_q
    log_p, log_q = (np.where(in_a, a, -1e300) for in_a, a in ((in_p, log_p), (in_q, log_q)))
    top = np.where(either, np.maximum(log_p.real, log_q.real), 0)
    log_m = top + np.log(
        np.where(either, beta * np.exp(log_q - top) + (1 - beta) * np.exp(log_p - top), 1)
    )
    return beta * kl(log_q, in_q, log_m, either) + (1 - beta) * kl(log_p, in_p, log_m, either)


def _of_padding(logits, pad_id, dtype):
    if pad_id is not None and 0 <= pad_id < logits.shape[-1]:
        logits[..., pad_id] = np.finfo(dtype).min / 2
    return logits


def _reduced(values, weights, width, reduction):
    """Losses and metrics, if there are any, of tokens or together."""
    of_tokens = np.zeros((width, *weights.shape), complex)
    for at, value in values.items():
        # A weight of 0 leaves nothing of an infinite loss.
        of_tokens[:, *at] = _times(np.atleast_1d(value), weights[at])
    counts = [weights] * (width > 1)
    if reduction == "none":
        return *of_tokens, *counts
    total = weights.sum()
    divisor = total if reduction == "mean" and total != 0 else 1
    return *(each.sum() / divisor for each in of_tokens), *(each.sum() for each in counts)


def _times(value, weight):
    product = np.where(np.isfinite(value), value, 0) * weight
    return np.where(np.isfinite(value) | (weight == 0), product, np.inf)


# --- how they are called


def kept_log_probs(*arguments, **options):
    """Log-probabilities among the candidates alone, as the page on losses computes them."""
    found = te.linear_log_probs(*arguments, **options)
    is_possible = jnp.isfinite(found).any(-1, keepdims=True)
    safe = jnp.where(is_possible, found, 0)
    among = safe - jax.nn.logsumexp(safe, -1, keepdims=True)
    return jnp.where(is_possible, among, found)


def weighed(value, xp=np):
    """A sum with a weight of its own for each number, without those that are not finite."""
    size = int(np.prod(value.shape))
    weights = np.cos(np.arange(size, dtype=np.float32) + 1).reshape(value.shape)
    # The logit of padding is the lowest one, in float64 too.
    with np.errstate(over="ignore"):
        finite = xp.abs(xp.real(value)).astype("float32") < 1e30
    return (xp.where(finite, value, 0) * weights.astype(value.dtype)).sum()


@jax.jit
def _weighed_sum(values):
    return sum(weighed(value, jnp) for value in values)


def direction_of(name, array):
    """A direction in which an array may change.

    A bias that bans an id stays, and so does a weight of 0, which may hide an infinite loss.
    """
    # NumPy compiles nothing for the arrays that are known.
    xp = jnp if isinstance(array, jax.core.Tracer) else np
    seed = [len(name), ord(name[0]), array.size]
    direction = np.random.default_rng(seed).normal(size=array.shape).astype(array.dtype)
    is_fixed = xp.isneginf(array)
    if name == "weights":
        is_fixed |= array == 0
    return xp.where(is_fixed, 0, direction)


def call(mode, loss, batches, order=1):
    """Of each batch, the values of `loss(given, others)` and the gradients in what is given.

    If the order is 2, the gradients of the derivative along `direction_of`.
    """

    def with_gradients(given, others):
        def total(given):
            values = jax.tree.leaves(loss(given, others))
            return _weighed_sum(values), values

        (_, values), gradients = jax.value_and_grad(total, has_aux=True)(given)
        return values, gradients

    def with_second_gradients(given, others):
        def slope(given):
            values, gradients = with_gradients(given, others)
            products = [
                gradient * direction_of(name, given[name]) for name, gradient in gradients.items()
            ]
            return sum(map(jnp.sum, products)), values

        second, values = jax.grad(slope, has_aux=True)(given)
        return values, second

    return _call(mode, with_second_gradients if order == 2 else with_gradients, batches)


def _call(mode, with_gradients, batches):
    if mode == "gpu":
        with platforms.as_on("cuda"):
            return call_in_mode("jit", with_gradients, batches)
    if mode in SPLITS:
        return _split(SPLITS[mode], with_gradients, batches)
    if mode == "debug_nans":
        return _without_nans(with_gradients, batches)
    return call_in_mode(mode, with_gradients, batches)


def _without_nans(f, batches):
    """Refuses what `jax_debug_nans` refuses without jit: a NaN from any operation, or a constant.

    jax would compile each operation by itself. Here one program checks all of them.
    """
    with jax.disable_jit():
        program, shapes = jax.make_jaxpr(f, return_shape=True)(*batches[0])
    operands = [operand for equation in program.eqns for operand in equation.invars]
    constants = [operand.val for operand in operands if isinstance(operand, Literal)]
    for constant in map(np.asarray, (*program.consts, *constants)):
        assert not jnp.issubdtype(constant.dtype, jnp.floating) or not np.isnan(constant).any()
    checked = jax.jit(checkify.checkify(jaxpr_as_fun(program), errors=checkify.nan_checks))
    found = []
    for batch in batches:
        error, leaves = checked(*jax.tree.leaves(batch))
        error.throw()
        found.append(jax.tree.unflatten(jax.tree.structure(shapes), leaves))
    return found


# How explicit axes split x and the table; labels are split as x, or whole.
SPLITS = {
    "rows": ("data", "model"),
    "columns": ("data", None, "model"),
    "fully sharded": ("data", "data"),
    "rows over both axes": (None, ("model", "data")),
    "rows, automatic axes": ("data", "model"),
}
SPLITS = {name: (name, *axes) for name, axes in SPLITS.items()}


def _split(split, f, batches):
    """Plain arrays, whose type says how they are split, without promotion of dtypes and ranks."""
    name, of_x, *of_table = split
    kind = AUTO if "automatic" in name else EXPLICIT
    mesh = mesh_of((2, 2), ("data", "model"), kind)

    def placed(name, array):
        if name in ("x", "teacher_x", "ids"):
            return put(mesh, array, of_x)
        return put(mesh, array, *of_table if name.endswith("table") else ())

    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jax.set_mesh(mesh), strict[0], strict[1]:
        step = jax.jit(f)
        return [
            step(*({name: placed(name, each) for name, each in arrays.items()} for arrays in batch))
            for batch in batches
        ]
