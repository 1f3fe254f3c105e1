"""Times programs on this machine's NVIDIA GPU, each beside its usual counterparts.

Usage: python tests/benchmarks/gpu.py [--rounds N] [--json OUT.json] [--only CASE ...]

Losses and whole steps by the clock, the median of some groups of calls, beside PyTorch, Liger and
Apple's CCE where they are installed (`pip install torch liger-kernel cut-cross-entropy`). The others
by the profiler: the time of the kernels, without that of launching them.

Without a GPU, losses and steps run at tiny sizes, to see that they do.
"""

import functools
import importlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The profiler would see a graph of kernels as one.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
# PyTorch needs memory of its own.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import programs
from harness import Report, interleave, ratio, run, timing_report
from programs import OURS, drawn, of

import transformer_embed as te
from transformer_embed._src.tokens import lookup_gradient

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "optax", "torch", "liger-kernel")
PACKAGES += ("cut-cross-entropy",)
HAS_GPU = jax.default_backend() == "gpu"
# Tokens, words, width.
SIZES = [
    (16_384, 32_000, 1024),
    (8192, 128_256, 4096),
    (8192, 151_936, 2048),
    (65_536, 256, 512),
    (65_536, 1000, 768),
]
# Rows, length, layers, width, heads, words.
STEPS = {
    "GPT-2 small's size": (32, 1024, 12, 768, 12, 50_304),
    "4 layers, a large vocabulary": (8, 1024, 4, 2048, 16, 151_936),
}
if not HAS_GPU:
    SIZES, STEPS = [(64, 300, 16), (128, 32, 16)], {"a tiny model": (2, 8, 2, 16, 2, 50)}
TABLES, IDS = ((32_000, 512), (128_256, 4096)), 16_384


def kernels(call: Callable, rounds: int) -> tuple[float, float]:
    """Milliseconds of kernels and copies a call, and their number."""
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(rounds):
                jax.block_until_ready(call())
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        lines = [line for plane in planes if "/device:GPU" in plane.name for line in plane.lines]
        streams = [line for line in lines if line.name.startswith("Stream")]
        times = [event.duration_ns for line in streams for event in line.events]
    return sum(times) / rounds / 1e6, len(times) / rounds


def table_of(title: str, lines: dict[str, tuple[Callable, tuple[Any, ...]]], rounds: int) -> Report:
    """Each line's kernels and temporaries; the first is ours."""
    report = Report(title, ["line", "kernels, ms", "/ ours", "kernels", "temporaries, MB"])
    ours = None
    for name, (function, arguments) in lines.items():
        compiled = jax.jit(function).lower(*arguments).compile()
        time, count = kernels(functools.partial(compiled, *arguments), rounds)
        ours = ours or time
        megabytes = compiled.memory_analysis().temp_size_in_bytes / 1e6
        cells = [f"{time:.4g}", f"{time / ours:.2f}", f"{count:.0f}", f"{megabytes:.0f}"]
        report.rows.append([name, *cells])
    return report


def all_programs(rounds: int) -> Report:
    """Those of programs.py that are not for TPUs alone."""
    report = Report("programs", ["program", "line", "kernels, ms", "/ ours", "kernels", "MB"])
    for name, make in programs.PROGRAMS.items():
        if not name.startswith(("attention", "Adam")):
            lines = {
                line: (function, drawn(arguments)) for line, (function, arguments) in make().items()
            }
            report.rows += [[name, *row] for row in table_of(name, lines, rounds).rows]
    return report


def clocked(call: Callable, rounds: int, wait: Callable = jax.block_until_ready) -> float:
    """Milliseconds a call, the median of five groups of calls."""
    wait(call())
    groups = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(rounds):
            result = call()
        wait(result)
        groups.append(1e3 * (time.perf_counter() - start) / rounds)
    return float(np.median(groups))


def mean_of_blocks(loss: Callable, tokens: int) -> Callable:
    """The usual way to save memory: some tokens at a time, whose logits are computed again."""

    def mean(x, table, labels):
        size = min(1024, tokens)
        blocks = x.reshape(-1, size, x.shape[1]), labels.reshape(-1, size)
        step = jax.checkpoint(lambda block: loss(block[0], table, block[1]))
        return jax.lax.map(step, blocks).mean()

    return mean


def whole_logits(x, table):
    # In bfloat16, as XLA writes them; sums are in float32.
    return (x @ table.T).astype(jnp.float32)


def whole(x, table, labels):
    logits = whole_logits(x, table)
    chosen = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


def whole_in_float32(x, table, labels):
    """The loss on whole logits in the precision that our chunks have."""
    logits = jnp.einsum("td,vd->tv", x, table, preferred_element_type=jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


def teacher_of(x, table):
    return jax.lax.stop_gradient((1.5 * x, table))


def whole_divergence(x, table, labels):
    student = jax.nn.log_softmax(whole_logits(x, table))
    teacher = jax.nn.log_softmax(whole_logits(*teacher_of(x, table)))
    return jnp.sum(jnp.exp(teacher) * (teacher - student), -1).mean()


def jax_losses(tokens: int) -> dict[str, Callable]:
    """Of x, the table and labels: ours, the same by whole logits, and by some at a time."""
    blocks = mean_of_blocks(whole, tokens)
    return {
        OURS: te.linear_cross_entropy,
        "whole logits": whole,
        "whole logits in float32": whole_in_float32,
        "lax.map and checkpoint": blocks,
    }


# Ours, and the same by whole logits.
OTHERS = {
    "log-probabilities": (lambda *args: te.linear_log_probs(*args).mean(), whole),
    "divergence": (
        lambda x, table, _: te.linear_divergence(x, table, *teacher_of(x, table)),
        whole_divergence,
    ),
}


def three_products(x, table, _):
    """What a loss and its gradients cannot do without."""
    found = x @ table.T
    return found.sum(dtype=jnp.float32), (found @ table, found.T @ x)


def sized(size: tuple[int, int, int], dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    """x, a table and labels."""
    tokens, words, width = size
    x, table = drawn([of(tokens, width), of(words, width)])
    labels = jnp.asarray(programs.below(words, tokens))
    return [x.astype(dtype), (table * width**-0.5).astype(dtype), labels]


def losses(rounds: int) -> Report:
    """Values and gradients of x and the table."""
    report = Report("losses, bfloat16", ["tokens, words, width", "line", "ms", "MB"])
    for size in SIZES:
        lines = {name: jax.value_and_grad(f, (0, 1)) for name, f in jax_losses(size[0]).items()}
        lines["three products alone"] = three_products
        found = {name: timed(f, sized(size), rounds) for name, f in lines.items()}
        cells = {name: [f"{ms:.4g}", f"{mb:.0f}"] for name, (ms, mb) in found.items()}
        for name, each in (cells | torch_lines(*size, rounds)).items():
            report.rows.append([", ".join(map(str, size)), name, *each])
    return report


def beside_whole(rounds: int) -> Report:
    """Other losses, each beside the same by whole logits."""
    columns = ["tokens, words, width", "loss", "ms", "MB", "whole logits, ms", "MB", "ours / whole"]
    report = Report("other losses, bfloat16", columns)
    for size in SIZES:
        pairs = {
            name: [jax.value_and_grad(f, (0, 1)) for f in pair] for name, pair in OTHERS.items()
        }
        cases = [(name, pair, jnp.bfloat16) for name, pair in pairs.items()]
        both = te.linear_cross_entropy, whole
        cases.append(("cross-entropy, its value alone", both, jnp.bfloat16))
        wide = [jax.value_and_grad(each, (0, 1)) for each in both]
        cases.append(("cross-entropy, float32", wide, jnp.float32))
        for name, pair, dtype in cases:
            ours, other = (timed(f, sized(size, dtype), rounds) for f in pair)
            cells = [f"{ours[0]:.4g}", f"{ours[1]:.0f}", f"{other[0]:.4g}", f"{other[1]:.0f}"]
            ratio_of_both = f"{ours[0] / other[0]:.2f}"
            report.rows.append([", ".join(map(str, size)), name, *cells, ratio_of_both])
    return report


def errors(_: int) -> Report:
    """Of the loss and its gradients, over the norm of those of whole logits in float32."""
    columns = ["tokens, words, width", "line", "loss", "x", "table", "equal bits in two runs"]
    report = Report("errors of losses, bfloat16", columns)
    for size in SIZES:
        *narrow, labels = sized(size)
        with jax.default_matmul_precision("highest"):
            wide = [array.astype(jnp.float32) for array in narrow]
            exact = jax.tree.leaves(jax.jit(jax.value_and_grad(whole, (0, 1)))(*wide, labels))
        for name, loss in list(jax_losses(size[0]).items())[:2]:
            step = jax.jit(jax.value_and_grad(loss, (0, 1)))
            found, again = (jax.tree.leaves(step(*narrow, labels)) for _ in range(2))
            norms = [
                jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
                for got, want in zip(found, exact, strict=True)
            ]
            is_same = all(map(jnp.array_equal, found, again))
            report.rows.append(
                [", ".join(map(str, size)), name, *(f"{each:.2e}" for each in norms), str(is_same)]
            )
    return report


def timed(function: Callable, arguments: Any, rounds: int) -> tuple[float, float]:
    """Milliseconds and megabytes of temporaries; NaN if it runs out of memory."""
    try:
        compiled = jax.jit(function).lower(*arguments).compile()
        milliseconds = clocked(functools.partial(compiled, *arguments), rounds)
    except jax.errors.JaxRuntimeError:
        return np.nan, np.nan
    return milliseconds, compiled.memory_analysis().temp_size_in_bytes / 1e6


def torch_lines(tokens: int, words: int, width: int, rounds: int) -> dict[str, list[str]]:
    """Milliseconds and megabytes beside inputs and gradients, or why there are none."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return {"PyTorch": ["not installed", ""]}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    make = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    x, table = make(tokens, width), make(words, width) * width**-0.5
    x.requires_grad_()
    table.requires_grad_()
    labels = torch.randint(words, (tokens,), device=device)

    def compiled():
        plain = lambda x, table: torch.nn.functional.cross_entropy((x @ table.T).float(), labels)
        return torch.compile(plain)

    def liger():
        module: Any = importlib.import_module(
            "liger_kernel.transformers.fused_linear_cross_entropy"
        )
        loss = module.LigerFusedLinearCrossEntropyLoss()
        return lambda x, table: loss(table, x, labels)

    def cce(impl):
        module: Any = importlib.import_module("cut_cross_entropy")
        return lambda x, table: module.linear_cross_entropy(x, table, labels, impl=impl)

    makers = {
        "torch.compile": compiled,
        "Liger": liger,
        "Apple CCE": functools.partial(cce, "cce"),
        "Apple CCE, exact": functools.partial(cce, "cce_exact"),
    }
    lines = {}
    for name, maker in makers.items():
        try:
            lines[name] = torch_line(torch, maker(), x, table, rounds)
        except Exception as error:
            lines[name] = [f"not run: {type(error).__name__}", ""]
    return lines


def torch_line(torch: Any, loss: Callable, x: Any, table: Any, rounds: int) -> list[str]:
    """Its value and gradients."""

    def call():
        return torch.autograd.grad(loss(x, table), (x, table))

    if not torch.cuda.is_available():
        return [f"{clocked(call, rounds, lambda _: None):.4g}", ""]
    wait = lambda _: torch.cuda.synchronize()
    milliseconds = clocked(call, rounds, wait)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    wait(call())
    used = torch.cuda.max_memory_allocated() - before
    used -= sum(each.nbytes for each in (x, table))
    return [f"{milliseconds:.4g}", f"{used / 1e6:.0f}"]


def model_step(layers: int, heads: int, loss: Callable) -> Callable:
    """The gradients of a causal Transformer in bfloat16, each layer a checkpoint."""

    def attend(x, weights):
        normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
        parts = jnp.split(normed @ weights["in"], [*np.cumsum([x.shape[-1]] * 3)], axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], heads, -1) for part in parts[:3])
        q, k = (te.apply_rotary(each, jnp.arange(x.shape[1])[None]) for each in (q, k))
        implementation = "cudnn" if HAS_GPU else None
        options = {"is_causal": True, "implementation": implementation}
        mixed = jax.nn.dot_product_attention(q, k, v, **options).reshape(x.shape)
        both = jnp.concatenate([mixed, jax.nn.gelu(parts[3])], axis=-1)
        return x + both @ weights["out"], None

    def value(params, ids):
        x = te.lookup(params["table"], ids)
        x, _ = jax.lax.scan(jax.checkpoint(attend), x, params["layers"], length=layers)
        return loss(x[:, :-1].reshape(-1, x.shape[-1]), params["table"], ids[:, 1:].reshape(-1))

    return jax.value_and_grad(value)


def steps(rounds: int) -> Report:
    """Whole steps of training, without the optimizer."""
    columns = ["model", "ours, ms", "MB", "whole logits, ms", "MB", "ours / whole"]
    report = Report("whole steps, bfloat16", columns)
    for name, (rows, length, layers, width, heads, words) in STEPS.items():
        shapes = {
            "table": of(words, width),
            "layers": {
                "in": of(layers, width, 7 * width),
                "out": of(layers, 5 * width, width),
            },
        }
        narrow = lambda leaf: (leaf * 0.02).astype(jnp.bfloat16)
        params = jax.tree.map(narrow, drawn(shapes))
        ids = jnp.asarray(programs.below(words, rows, length))
        both = [*jax_losses(rows * length).values()][:2]
        found = [timed(model_step(layers, heads, each), (params, ids), rounds) for each in both]
        cells = [cell for ms, mb in found for cell in (f"{ms:.4g}", f"{mb:.0f}")]
        report.rows.append([name, *cells, f"{found[0][0] / found[1][0]:.2f}"])
    return report


def lookup_gradients(rounds: int) -> Report:
    """Of repeated ids: summed in one order, and by atomic additions.

    For XLA's own sums in one order, set XLA_FLAGS=--xla_gpu_deterministic_ops=true.
    """
    columns = ["table, ids", "line", "kernels, ms", "/ ours", "kernels", "MB"]
    report = Report(f"gradients of lookup, {IDS} ids, float32", columns)
    rng = np.random.default_rng(0)
    for rows, width in TABLES:
        for kind, ids in {
            "uniform": rng.integers(0, rows, IDS),
            "Zipf": np.minimum(rng.zipf(1.2, IDS) - 1, rows - 1),
            "equal": np.full(IDS, 7),
        }.items():
            arguments = drawn([of(rows, width), ids, of(IDS, width)])
            size = f"[{rows}, {width}], {kind}"

            def summed(table, ids, weights):
                return jnp.vdot(te.lookup(table, ids), weights)

            def scattered(table, ids, weights):
                # Its transpose is a scatter-add.
                rows = lookup_gradient._read_each_repeat(table, ids.astype(jnp.uint32))
                return jnp.vdot(rows, weights)

            lines = {
                name: (jax.grad(function), arguments)
                for name, function in {OURS: summed, "scatter-add": scattered}.items()
            }
            report.rows += [[size, *row] for row in table_of(size, lines, rounds).rows]
    return report


def steps_by_rows(rounds: int) -> Report:
    """Adam steps by rows beside dense ones, with the launches."""
    title = f"Adam, {programs.STEP_IDS} ids, width {programs.WIDTH}, wall time"
    report = Report(title, ["rows", "line", "median, ms", "/ rows"])
    for rows in (10**5, 10**6):
        steps = {"rows": programs.row_step, "dense optax": programs.dense_step}
        calls = {name: programs.stepping(step, rows) for name, step in steps.items()}
        samples = interleave(calls, rounds, f"{rows} rows", 20)
        found = timing_report(title, samples, ["rows"])
        report.rows += [[f"{rows}", *row] for row in found.rows]
        report.notes.append(
            f"{rows} rows, dense / rows: {ratio(samples, 'dense optax', 'rows'):.2f}"
        )
    return report


CASES = {
    "losses": losses,
    "others": beside_whole,
    "errors": errors,
    "steps": steps,
    "programs": all_programs,
    "gradients": lookup_gradients,
    "rows": steps_by_rows,
}

if __name__ == "__main__":
    if not HAS_GPU:
        print("No GPU that jax sees: tiny sizes.")
        CASES = {name: CASES[name] for name in ("losses", "others", "errors", "steps")}
    run(__doc__, CASES, PACKAGES, 10)
