"""Every transformation and optimizer that optax exports, made with simple arguments, and the page
that lists which of them can be used for row-wise training.

Usage: python tests/rows/optimizers.py writes notebooks/rows_optimizers.md;
    `test_optimizers.py` checks it.
"""

import functools
import inspect
import re
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import transformer_embed as te

PAGE = Path(__file__).parents[2] / "notebooks" / "rows_optimizers.md"
VOCAB_SIZE, WIDTH = 23, 4


def tables_only(params):
    return jax.tree.map_with_path(lambda path, _: "table" in str(path), params)


def labels(params):
    return jax.tree.map(lambda is_table: "rows" if is_table else "rest", tables_only(params))


# What stands for an argument without a default, by its name.
INNER = "inner opt tx optimizer base_optimizer fast_optimizer adv_optimizer"
NUMBERS = "learning_rate decay clipping eta gamma step_size max_delta max_norm threshold"
NUMBERS += " slow_step_size l2_norm_clip noise_multiplier"
COUNTS = "max_consecutive_errors every_k_schedule sync_period max_backtracking_steps"
COUNTS += " max_linesearch_steps seed key"
# The second: the first one's name in optax 0.2.4.
CONDITIONS = "should_transform_fn should_update_fn"
ARGUMENTS = {
    **dict.fromkeys(INNER.split(), optax.adam(0.1)),
    **dict.fromkeys(NUMBERS.split(), 0.1),
    **dict.fromkeys(COUNTS.split(), 3),
    **dict.fromkeys(CONDITIONS.split(), lambda step: step % 2 == 0),
    **dict.fromkeys(("mask", "freeze_mask"), tables_only),
    "step_size_fn": lambda count: -0.1 / (count + 1),
    "inner_factory": optax.adam,
    "transforms": {"rows": optax.adam(0.1), "rest": optax.sgd(0.1)},
    "param_labels": labels,
    "measure_name": "norm",
    "measure": lambda tree: quietly(optax.global_norm, tree),
    "measures": {"norm": lambda tree: quietly(optax.global_norm, tree)},
}
FUNCTIONS = {
    "stateless": lambda updates, params: jax.tree.map(lambda g: -0.1 * g, updates),
    "stateless_with_tree_map": lambda g, p: -0.1 * g,
}
POSITIONAL = {
    "chain": (optax.scale_by_adam(), optax.scale(-0.1)),
    "named_chain": (("adam", optax.scale_by_adam()), ("scale", optax.scale(-0.1))),
}
# Arguments by which small tables are treated as large ones are.
OPTIONS = {name: {"min_dim_size_to_factor": 2} for name in ("adafactor", "scale_by_factored_rms")}
OPTIONS["adadelta"] = {"learning_rate": 0.1}  # optax 0.2.4 fails without one
# Those that give a function to make the optimizer with.
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
FACTORIES = {"inject_hyperparams", "inject_stateful_hyperparams"}
# These take functions or describe themselves; they transform nothing.
NOT_OPTIMIZERS = {"GradientTransformation", "GradientTransformationExtraArgs", "WrappedSchedule"}


def exported():
    """A name and a function that makes the optimizer, for all of optax and optax.contrib."""
    for module in (optax, optax.contrib):
        for name in sorted(dir(module)):
            maker = getattr(module, name)
            if name.startswith("_") or name in NOT_OPTIMIZERS or not callable(maker):
                continue
            make = maker_of(name, maker)
            if make is not None:
                yield f"{'contrib.' if module is optax.contrib else ''}{name}", make


def maker_of(name, maker):
    """A function without arguments; None if an optimizer is not what is made."""
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):
        signature = inspect.Signature()
    is_said = "GradientTransformation" in str(signature.return_annotation) or name == "MultiSteps"
    each = signature.parameters.values()
    required = [p.name for p in each if p.default is p.empty and p.kind not in VARIADIC]
    arguments = {"f": FUNCTIONS[name]} if name in FUNCTIONS else ARGUMENTS
    is_known = arguments.keys() >= {*required}
    assert is_known or not is_said, f"{name}: say how to make it, from {required}"
    if not is_known or (inspect.isclass(maker) and not is_said):
        return None
    options = {each: arguments[each] for each in required} | OPTIONS.get(name, {})
    make = functools.partial(maker, *POSITIONAL.get(name, ()), **options)
    if name in FACTORIES:
        make = functools.partial(quietly(make), 0.1)
    return make if is_said or _is_optimizer(make) else None


def _is_optimizer(make):
    try:
        found = quietly(make)
    except Exception:
        return False
    return hasattr(found, "init") and hasattr(found, "update")


def quietly(call, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args)


def make_params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape))
    return {"embed": {"table": normal(VOCAB_SIZE, WIDTH)}, "w": normal(WIDTH, 3), "b": normal(3)}


def lazy_step(optimizer, params, state, grads, **extra):
    """The oracle: the dense step, then every row without a gradient put back, in the table and in
    what has its rows in the state."""
    updates, after = optimizer.update(grads, state, params, **extra)
    is_moved = (grads["embed"]["table"] != 0).any(1)

    def put_back(old, new):
        if new.ndim == 0 or len(new) != VOCAB_SIZE:
            return new
        return jnp.where(is_moved.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(put_back, (params, state), (optax.apply_updates(params, updates), after))


def extra_arguments(optimizer):
    """The value of the loss, for an optimizer that asks for it."""
    takes_more = isinstance(optimizer, optax.GradientTransformationExtraArgs)
    return {"value": jnp.asarray(1.0)} if takes_more else {}


def refusal(optimizer):
    """Why an optimizer cannot train by rows; None where it can."""
    params, extra = make_params(), extra_arguments(optimizer)
    rows = te.rows.RowGradient(np.arange(7), np.ones((7, WIDTH)), VOCAB_SIZE)
    grads = params | {"embed": {"table": rows}}
    step = functools.partial(te.rows.apply_gradients, optimizer, **extra)
    try:
        state = quietly(optimizer.init, params)
        quietly(jax.eval_shape, lambda params, state: step(grads, state, params), params, state)
    except ValueError as error:
        return str(error)
    return None


def reason(message):
    """What the page says of a refusal: None without one, "" for what cannot be traced."""
    if message is None:
        return None
    if "cannot be traced" in message:
        return ""
    return re.search(r"got (.*)\. Train the table", message)[1]


def read_page():
    """The reason for each optimizer, from the page."""
    can, rest = PAGE.read_text(encoding="utf-8").split("## You cannot use these")
    table, unknown = rest.split("### Not checked")
    name = re.compile(r"`([\w.]+)`[,.]")
    reasons = dict.fromkeys(name.findall(can.split("## You can use these")[1]))
    reasons |= dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", table, re.MULTILINE))
    return reasons | dict.fromkeys(name.findall(unknown), "")


def page(reasons):
    """notebooks/rows_optimizers.md, from the reason for each optimizer."""
    names = {kind: [f"`{n}`" for n, r in reasons.items() if r == kind] for kind in (None, "")}
    # The page lists the functions that can be used in three groups, because one list would be long.
    of_contrib = [name for name in names[None] if name.startswith("`contrib.")]
    scalings = [name for name in names[None] if name.startswith("`scale")]
    others = [name for name in names[None] if name not in (*of_contrib, *scalings)]
    unknown = ", ".join(names[""])
    rows = "\n".join(f"| `{name}` | {reason} |" for name, reason in reasons.items() if reason)
    return f"""# Optimizers for row-wise training

This page is for you if you train a table [row-wise](glossary.md#tables-and-output-layers) (`te.rows`, see notebook [05 Big tables](05_big_tables.ipynb)) and want to know which optimizer you can use. The page lists every optimizer and every transformation of optax {optax.__version__}.

A row-wise step runs the optimizer on the table rows of the batch only. The result is right only if the optimizer updates each table row from that row alone. So `te.rows.apply_gradients` tries to prove this for your optimizer while jax traces the step, also for combinations (`optax.chain`, `optax.multi_transform`, masks, schedules, injected hyperparameters). If the proof fails, `te.rows.apply_gradients` raises a ValueError that names the transformation.

Even if `te.rows.apply_gradients` accepts your optimizer, a row-wise step does not equal a dense step. Row-wise training is [lazy](glossary.md#tables-and-output-layers): if a table row has no gradient, the row and its optimizer state stay as they are. If an output layer uses the table, every row has a gradient, so train the table densely.

**Your own transformations.** `te.rows.apply_gradients` checks that an optimizer computes each table row from that row alone. It does not check what an optimizer does with numbers that all rows share, such as a step count. So two kinds of transformations raise no error, although they are wrong for tables. Do not use them:

- Some transformations sum gradients, and apply the sum only in some steps, for example in every fourth step. A row-wise step updates only the rows of its batch. So if a row is in the batches of steps 1 to 3, but not in the batch of step 4, the sum of this row is not applied. An example is `apply_every` of optax. `te.rows.apply_gradients` knows it, and raises an error. (A learning rate that is 0 in some steps is allowed.)
- Some transformations compute with the number of rows of the table: they divide by this number, or choose a method by it. A row-wise step, which updates only the table rows of the batch, passes blocks of at most 1024 rows to a transformation, and not the whole table. So the transformation sees a wrong number of rows.

## You can use these

`te.rows.apply_gradients` takes each optimizer that you build from these functions of optax:

- Functions of optax itself whose names begin with `scale`: {", ".join(scalings)}.
- Functions of `optax.contrib`: {", ".join(of_contrib)}.
- Functions of optax itself whose names do not begin with `scale`: {", ".join(others)}.

## You cannot use these

If you want one of these functions of optax, you have two ways: train the table densely, or use `optax.multi_transform` to apply the function to all parameters except the table.

If you want to clip by the global norm, there is a third way: clip the gradients before the step, by `grads, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())`. Then pass these gradients to `te.rows.apply_gradients`. The norm is the same as with dense gradients.

The second column is from the error message. It says which transformation is refused, and which operation of this transformation may mix table rows.

| optimizer | why |
| --- | --- |
{rows}

### Not checked

The two lists above come from a test that calls each function of optax with simple arguments, such as a learning rate of 0.1. Some functions cannot be tested in this way, because they need more, for example the loss function, the gradients of each example, or parameters in a special form. So this page does not say whether you can use {unknown}.
"""


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    reasons = {name: reason(refusal(quietly(make))) for name, make in exported()}
    PAGE.write_text(page(reasons), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
