"""Times this checkout beside another one: both packages in one process, interleaved, every ratio
paired within a round.

Usage: python tests/benchmarks/versions.py OTHER [--rounds N] [--only CASE ...]

OTHER is the folder of the other checkout, such as one that `git worktree add ../other main~5` makes.
A ratio is the time of this checkout divided by that of the other; above 1, this one is slower. A
case that one of them cannot run is named and left out.
"""

import argparse
import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import interleave, markdown_table

HERE = Path(__file__).resolve().parents[2]
PACKAGE = "transformer_embed"
IDS = np.random.default_rng(0).integers(1, 32_000, (32, 512)).astype(np.int32)
POSITIONS = jnp.asarray(np.random.default_rng(1).integers(0, 512, IDS.shape), jnp.int32)
HEADS = jax.random.normal(jax.random.key(2), (8, 2048, 16, 64))
HIDDEN = jax.random.normal(jax.random.key(3), (4096, 256)) / 16
SEGMENTS = np.sort(np.random.default_rng(4).integers(1, 9, (4, 2048)), axis=1).astype(np.int32)


def load(folder: Path) -> ModuleType:
    """The package of a checkout, beside one that is already loaded."""
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]
    # jax.export would refuse the second class of a name.
    registration = mock.patch("jax.export.register_pytree_node_serialization")
    with mock.patch.object(sys, "path", [str(folder), *sys.path]), registration:
        package = importlib.import_module(PACKAGE)
        # What it imports when it is first used, too.
        for part in ("kernels", "rows", "sharding"):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{PACKAGE}.{part}")
    if not Path(package.__file__).is_relative_to(folder.resolve()):
        raise FileNotFoundError(f"no package {PACKAGE} in {folder}")
    return package


def compiled(function: Callable, *arguments: Any) -> Callable[[], Any]:
    return functools.partial(jax.jit(function), *arguments)


def layer(te: Any, mode: str, dtype: Any = jnp.float32, positions: Any = None) -> Callable:
    embedder = te.Embedder(te.EmbedderConfig(32_000, 512, param_dtype=dtype))
    params, rng, ids = embedder.init(jax.random.key(0)), jax.random.key(1), jnp.asarray(IDS)
    is_training = mode != "evaluation"
    apply = functools.partial(embedder.apply, is_training=is_training, positions=positions)
    if mode != "gradient":
        return functools.partial(apply, params, rng if is_training else None, ids)
    loss = lambda params: apply(params, rng, ids).astype(jnp.float32).sum()
    return compiled(jax.grad(loss), params)


def one_token(te: Any) -> Callable:
    embedder = te.Embedder(te.EmbedderConfig(32_000, 512))
    params, ids, offset = embedder.init(jax.random.key(0)), jnp.array([[5]]), jnp.array([[77]])
    return lambda: embedder.apply(params, None, ids, is_training=False, positions=offset)


def cache_step(te: Any) -> Callable:
    """The mask and the slots of one step of decoding, outside of jit."""
    slots = te.TokenPositions.from_lengths([5, 7], 1024)
    slots = slots.write(te.TokenPositions.from_offset([5, 7], 1), 9)
    step = te.TokenPositions.from_offset([6, 8], 1)
    return lambda: te.AttentionMask(step, slots.write(step, 10), causal=True).dense()


def mask(te: Any, method: str, *arguments: Any, **rule: Any) -> Callable:
    def make(segment_ids):
        tokens = te.TokenPositions.from_segment_ids(segment_ids)
        return getattr(te.AttentionMask(tokens, **rule), method)(*arguments)

    return compiled(make, jnp.asarray(SEGMENTS))


def loss(te: Any, has_gradient: bool, **options: Any) -> Callable:
    table = jax.random.normal(jax.random.key(5), (32_000, 256)) / 16
    labels = jnp.asarray(IDS.ravel()[: len(HIDDEN)])
    cross_entropy = lambda x, table: te.linear_cross_entropy(x, table, labels, **options)
    function = jax.value_and_grad(cross_entropy, (0, 1)) if has_gradient else cross_entropy
    return compiled(function, HIDDEN, table)


def step_by_rows(te: Any, vocab_size: int, width: int, optimizer: Any) -> Callable:
    batches = np.random.default_rng(6).integers(0, vocab_size, (32, 16_384)).astype(np.int32)
    weights = jax.random.normal(jax.random.key(7), (16_384, width))
    of_batch = lambda params, ids: jnp.vdot(te.lookup(params["table"], ids), weights)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        _, grads = te.rows.value_and_grad(of_batch, ids={"table": ids})(params, ids)
        params, state = te.rows.update(optimizer, grads, state, params)
        return params, state

    params = {"table": jnp.ones((vocab_size, width))}
    held = [params, jax.jit(optimizer.init)(params)]
    numbers = iter(range(10**9))

    def call():
        held[:] = step(*held, batches[next(numbers) % len(batches)])
        return held[0]

    return call


CASES: dict[str, tuple[int, Callable[[Any], Callable]]] = {
    "evaluation": (1, lambda te: layer(te, "evaluation")),
    "training": (1, lambda te: layer(te, "training")),
    "gradient": (1, lambda te: layer(te, "gradient")),
    "positions of each token": (1, lambda te: layer(te, "evaluation", positions=POSITIONS)),
    "evaluation, bfloat16": (1, lambda te: layer(te, "evaluation", jnp.bfloat16)),
    "training, bfloat16": (1, lambda te: layer(te, "training", jnp.bfloat16)),
    "one token, outside of jit": (200, one_token),
    "a cache's step, outside of jit": (50, cache_step),
    "encoding": (1, lambda te: compiled(lambda p: te.sinusoidal_encoding(p, 512), POSITIONS)),
    "rotary": (1, lambda te: compiled(te.apply_rotary, HEADS, jnp.arange(2048))),
    "rotary, bfloat16": (
        1,
        lambda te: compiled(te.apply_rotary, HEADS.astype(jnp.bfloat16), jnp.arange(2048)),
    ),
    "ALiBi": (
        1,
        lambda te: compiled(
            functools.partial(te.alibi_bias, num_heads=8), jnp.arange(1024), jnp.arange(1024)
        ),
    ),
    "buckets": (
        1,
        lambda te: compiled(te.relative_position_buckets, POSITIONS[:4], POSITIONS[:4]),
    ),
    "mask, packed": (1, lambda te: mask(te, "dense", causal=True)),
    "mask, window and chunk": (
        1,
        lambda te: mask(te, "dense", causal=True, window=(99, 0), chunk=512),
    ),
    "tile": (10, lambda te: mask(te, "tile", 512, 512, (512, 512), causal=True)),
    "kinds of tiles": (10, lambda te: mask(te, "tile_kinds", (128, 128), causal=True)),
    "dropout": (1, lambda te: compiled(lambda x: te.dropout(jax.random.key(0), 0.1, x), HEADS)),
    "loss": (1, lambda te: loss(te, False)),
    "loss and gradients": (1, lambda te: loss(te, True)),
    "loss and gradients, padding": (1, lambda te: loss(te, True, pad_id=0)),
    "loss and gradients, smoothing": (1, lambda te: loss(te, True, label_smoothing=0.1)),
    "Adam by rows, 1e6 x 128": (1, lambda te: step_by_rows(te, 10**6, 128, optax.adam(1e-3))),
    "Adam by rows, 1e5 x 32": (4, lambda te: step_by_rows(te, 10**5, 32, optax.adam(1e-3))),
    "Adagrad by rows, 1e6 x 128": (
        1,
        lambda te: step_by_rows(te, 10**6, 128, optax.adagrad(1e-3)),
    ),
}


def rows(
    versions: Mapping[str, Any], names: list[str], rounds: int
) -> Iterator[tuple[list[str], str | None]]:
    """For each case its row of the table, and why it is left out if it is."""
    for name in names:
        repeats, make = CASES[name]
        try:
            calls = {version: make(te) for version, te in versions.items()}
            jax.block_until_ready([call() for call in calls.values()])
        except Exception as error:
            yield [], f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
            continue
        samples = interleave(calls, rounds, name, repeats)
        ratios = samples["this"] / samples["other"]
        low, median, high = np.percentile(ratios, (25, 50, 75))
        times = [f"{np.median(samples[version]):.3g}" for version in versions]
        yield [name, *times, f"{median:.3f}", f"{low:.2f} to {high:.2f}"], None


def main():
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=41, help="rounds a case (default: 41)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="CASE",
        help=", ".join(CASES),
    )
    arguments = parser.parse_args()
    versions = {"other": load(arguments.other), "this": load(HERE)}
    found, left_out = zip(*rows(versions, arguments.only, arguments.rounds), strict=True)
    columns = ["case", "other, ms", "this, ms", "this / other", "middle half"]
    print(markdown_table(columns, [row for row in found if row]))
    for reason in filter(None, left_out):
        print(f"- not timed: {reason}")


if __name__ == "__main__":
    main()
