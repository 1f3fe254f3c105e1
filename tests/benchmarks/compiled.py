"""Compiles the main programs, each beside its usual counterpart, for TPUs and GPUs that are not
there, and says what XLA made of them.

Usage: python tests/benchmarks/compiled.py [--target NAME] [--only PROGRAM ...]

NAME is cuda:h200, or any TPU topology: tpu:v5e:2x2, tpu:v5p:8x8x8, ... A target of at most four
chips prints the main programs, compiled for one of them. One of several chips also prints what a
training step of a big table and the tied loss send, beside the formulae of sharding.py. Nothing is
run, so nothing is timed.
"""

import argparse
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
GPU_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
if any("cuda" in argument for argument in sys.argv):
    os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda")
    os.environ.setdefault("XLA_FLAGS", GPU_FLAGS)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import functools
from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import peers
import rows
from attention_inputs import BASE, SHAPE
from harness import environment, markdown_table
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import NamedSharding, PartitionSpec
from peers import BATCH, D_MODEL, LENGTH, RATE, VOCAB_SIZE
from sharding import IDS, WAYS, WIDTH, all_reduce, arguments_of, step_of
from targets import Facts, Target, TargetError, target
from tqdm import tqdm

import transformer_embed as te

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")
# The largest target whose programs are compiled on one of its chips.
FEW = 4
OURS = "ours"
Program = tuple[Callable, tuple[Any, ...]]


def input_layer(on: Target, mode: str) -> dict[str, Program]:
    """`apply` beside Haiku's module with a constant table; `grad`: the gradient of a weighted sum,
    so that only the way back costs."""
    config = te.EmbedderConfig(VOCAB_SIZE, D_MODEL, dropout_rate=RATE)
    embedder = te.Embedder(config)
    sinusoid = peers.usual_sinusoid(LENGTH, D_MODEL)

    def ours(params, rng, ids):
        return embedder.apply(params, rng, ids, is_training=mode != "eval")

    def haiku(params, rng, ids):
        def forward(ids):
            x = (
                hk.Embed(VOCAB_SIZE, D_MODEL, name="embed")(ids) * np.float32(D_MODEL**0.5)
                + sinusoid
            )
            return x if mode == "eval" else hk.dropout(hk.next_rng_key(), RATE, x)

        return hk.transform(forward).apply(params, rng, ids)

    table = np.broadcast_to(np.float32(0), (VOCAB_SIZE, D_MODEL))
    rng, ids = on.array((2,), jnp.uint32), on.array((BATCH, LENGTH), jnp.int32)
    lines = {
        OURS: (ours, peers.our_params(config, table)),
        "Haiku, constant table": (haiku, {"embed": {"embeddings": table}}),
    }
    weights = on.array((BATCH, LENGTH, D_MODEL))
    if mode != "grad":
        return {
            name: (embed, (on.like(params), rng, ids)) for name, (embed, params) in lines.items()
        }

    def gradient(embed):
        return jax.grad(
            lambda params, rng, ids, weights: jnp.vdot(embed(params, rng, ids), weights)
        )

    return {
        name: (gradient(embed), (on.like(params), rng, ids, weights))
        for name, (embed, params) in lines.items()
    }


def token_positions(on: Target) -> dict[str, Program]:
    """A position of its own for each token."""
    positions = on.array((BATCH, LENGTH), jnp.int32)

    def float32(positions):
        frequencies = jnp.exp(
            jnp.arange(0, D_MODEL, 2, dtype=jnp.float32) * np.float32(-np.log(BASE) / D_MODEL)
        )
        angles = positions[..., None].astype(jnp.float32) * frequencies
        return jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(*positions.shape, D_MODEL)

    return {
        OURS: (lambda positions: te.sinusoidal_encoding(positions, D_MODEL), (positions,)),
        "precomputed table": (
            lambda table, positions: table[positions],
            (on.array((LENGTH, D_MODEL)), positions),
        ),
        "float32 sin and cos": (float32, (positions,)),
    }


def input_layer_by_positions(on: Target) -> dict[str, Program]:
    """Evaluation with a position of its own for each token."""
    config = te.EmbedderConfig(VOCAB_SIZE, D_MODEL)
    embedder, ids = te.Embedder(config), on.array((BATCH, LENGTH), jnp.int32)
    params = on.like(
        peers.our_params(config, np.broadcast_to(np.float32(0), (VOCAB_SIZE, D_MODEL)))
    )

    def ours(params, ids, positions):
        return embedder.apply(params, None, ids, is_training=False, positions=positions)

    def tables(table, encoding, ids, positions):
        return table[ids] * np.float32(D_MODEL**0.5) + encoding[positions]

    return {
        OURS: (ours, (params, ids, ids)),
        "two precomputed tables": (
            tables,
            (on.array((VOCAB_SIZE, D_MODEL)), on.array((LENGTH, D_MODEL)), ids, ids),
        ),
    }


def decoding(on: Target) -> dict[str, Program]:
    """One token at a traced position."""
    config = te.EmbedderConfig(VOCAB_SIZE, D_MODEL)
    embedder, one = te.Embedder(config), on.array((1, 1), jnp.int32)
    params = on.like(
        peers.our_params(config, np.broadcast_to(np.float32(0), (VOCAB_SIZE, D_MODEL)))
    )

    def ours(params, ids, positions):
        return embedder.apply(params, None, ids, is_training=False, positions=positions)

    def haiku(params, encoding, ids, positions):
        forward = hk.transform(
            lambda: (
                hk.Embed(VOCAB_SIZE, D_MODEL, name="embed")(ids) * np.float32(D_MODEL**0.5)
                + encoding[positions]
            )
        )
        return forward.apply(params, None)

    theirs = {"embed": {"embeddings": on.array((VOCAB_SIZE, D_MODEL))}}
    return {
        OURS: (ours, (params, one, one)),
        "Haiku and a precomputed table": (haiku, (theirs, on.array((2048, D_MODEL)), one, one)),
    }


def rotary(on: Target, dtype: str) -> dict[str, Program]:
    """A position of its own for each token."""
    frequencies = np.float32(BASE ** (-np.arange(0, SHAPE[3], 2) / SHAPE[3]))

    def usual(x, positions):
        angles = (positions[..., None].astype(jnp.float32) * frequencies)[:, :, None]
        cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
        first, second = jnp.split(x, 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    arguments = on.array(SHAPE, jnp.dtype(dtype)), on.array(SHAPE[:2], jnp.int32)
    return {OURS: (te.apply_rotary, arguments), "cos and sin in float32": (usual, arguments)}


def mask(on: Target) -> dict[str, Program]:
    """Causal and padding, [32, 1, 2048, 2048]."""
    padding = on.array((BATCH, 2048), jnp.bool_)
    positions = jnp.arange(2048)

    def ours(padding):
        return te.AttentionMask(
            te.TokenPositions(positions),
            te.TokenPositions(positions, padding.astype(int)),
            causal=True,
        ).dense()

    def usual(padding):
        return jnp.tril(jnp.ones((2048, 2048), jnp.float32)) * padding[:, None, None, :].astype(
            jnp.float32
        )

    return {OURS: (ours, (padding,)), "float32 product": (usual, (padding,))}


def attention(on: Target, length: int) -> dict[str, Program]:
    """Packed documents, causal with a window of 1024 tokens: the dense mask, and the same rule for
    splash attention."""
    heads = on.array((1, 8, length, 128), jnp.bfloat16)
    arguments = heads, heads, heads, on.array((1, length), jnp.int32)
    sizes = splash_attention.BlockSizes(*[512] * 8)

    def rule_of(segment_ids):
        tokens = te.TokenPositions.from_segment_ids(segment_ids)
        return te.AttentionMask(tokens, causal=True, window=(1023, 0))

    def skipping(queries, keys, values, segment_ids):
        kernels, ids = te.kernels.splash_kernels(
            rule_of(segment_ids), heads.shape[1], order="packed", block_sizes=sizes
        )
        attend = jax.vmap(lambda kernel, *row: kernel(*row[:3], segment_ids=row[3]))
        return attend(kernels, queries, keys, values, ids)

    def splash(queries, keys, values, segment_ids):
        rule = rule_of(segment_ids)
        mask, ids = te.kernels.splash_attention(rule, heads.shape[1], order="packed")
        kernel = splash_attention.make_splash_mha(
            mask, head_shards=1, q_seq_shards=1, block_sizes=sizes
        )
        attend = jax.vmap(lambda *row: kernel(*row[:3], segment_ids=row[3]))
        return attend(queries, keys, values, ids)

    def dense(queries, keys, values, segment_ids):
        return jax.nn.dot_product_attention(
            *(array.swapaxes(1, 2) for array in (queries, keys, values)),
            mask=rule_of(segment_ids).dense(),
        )

    return {
        OURS: (skipping, arguments),
        "splash attention, every tile of the window": (splash, arguments),
        "dot_product_attention, dense mask": (dense, arguments),
    }


def tile_kinds(on: Target) -> dict[str, Program]:
    """Of a million packed tokens, causal with a window of 1024, in tiles of 512."""

    def ours(segment_ids):
        tokens = te.TokenPositions.from_segment_ids(segment_ids)
        return te.AttentionMask(tokens, causal=True, window=(1023, 0)).tile_kinds((512, 512))

    return {OURS: (ours, (on.array((1, 2**20), jnp.int32),))}


def tied_loss(on: Target) -> dict[str, Program]:
    """Value and gradients, 4096 tokens, 32000 words, width 256."""
    arguments = on.array((4096, 256)), on.array((VOCAB_SIZE, 256)), on.array((4096,), jnp.int32)

    def usual(x, table, labels):
        return optax.softmax_cross_entropy_with_integer_labels(x @ table.T, labels).mean()

    return {
        OURS: (jax.value_and_grad(te.linear_cross_entropy, (0, 1)), arguments),
        "optax on x @ table.T": (jax.value_and_grad(usual, (0, 1)), arguments),
    }


def step_by_rows(on: Target) -> dict[str, Program]:
    """An Adam step, table [1e6, 128], 16384 ids, in place."""
    params = {"embeddings": on.array((10**6, rows.WIDTH))}
    state = on.like(jax.eval_shape(rows.OPTIMIZER.init, params))
    arguments = (
        params,
        state,
        on.array((rows.BATCH,), jnp.int32),
        on.array((rows.BATCH, rows.WIDTH)),
    )
    return {OURS: (rows.row_step, arguments), "optax, dense": (rows.dense_step, arguments)}


PROGRAMS: Mapping[str, Callable[[Target], dict[str, Program]]] = {
    "eval": functools.partial(input_layer, mode="eval"),
    "train": functools.partial(input_layer, mode="train"),
    "backward pass": functools.partial(input_layer, mode="grad"),
    "positions per token": token_positions,
    "eval, positions per token": input_layer_by_positions,
    "decoding one token": decoding,
    "rotary, float32": functools.partial(rotary, dtype="float32"),
    "rotary, bfloat16": functools.partial(rotary, dtype="bfloat16"),
    "mask": mask,
    "attention, 16384 tokens": functools.partial(attention, length=16384),
    "attention, 131072 tokens": functools.partial(attention, length=131072),
    "tile kinds, 2**20 tokens": tile_kinds,
    "tied cross-entropy": tied_loss,
    "Adam step by rows": step_by_rows,
}


def programs_table(on: Target, names: list[str]) -> str:
    """Each program, ours first, then its usual counterparts."""
    columns = [
        "program",
        "line",
        "kernels",
        "temporaries, MB",
        "estimated cycles",
        "/ ours",
        "compiled in, s",
    ]
    lines = []
    for name in tqdm(names, desc="compile", leave=False):
        programs = PROGRAMS[name](on)
        ours = on.facts(*_call(programs.pop(OURS)))
        lines.append([name, OURS, *_cells(ours, ours)])
        for line, program in programs.items():
            try:
                cells = _cells(on.facts(*_call(program)), ours)
            except jax.errors.JaxRuntimeError as error:
                needed = re.search(r"HLO temporaries \((\S+)\) exceeds", str(error))
                if not needed:
                    raise
                cells = ["-", f"{needed[1]}B, more than the chip has", "-", "-", "-"]
            lines.append(["", line, *cells])
    return markdown_table(columns, lines)


def _call(program: Program) -> tuple[Any, ...]:
    function, arguments = program
    return function, *arguments


def _cells(facts: Facts, ours: Facts) -> list[str]:
    cycles = (
        ["-", "-"]
        if facts.cycles is None or not ours.cycles
        else [f"{facts.cycles:,}", f"{facts.cycles / ours.cycles:.2f}"]
    )
    return [str(facts.kernels), f"{facts.temporaries / 1e6:.1f}", *cycles, f"{facts.seconds:.1f}"]


def sharded_loss(on: Target, data: int, shards: int, vocab_size: int, tokens: int) -> Facts:
    """Value and gradients of the tied loss, `tokens` to each part of the batch, in one chunk: what
    a loop sends is counted once."""
    mesh = on.mesh(data=data, model=shards)
    table = te.sharding.shard_params(
        {"embeddings": jax.ShapeDtypeStruct((vocab_size, WIDTH), jnp.float32)},
        mesh,
        {"*": PartitionSpec("model")},
        tables="embeddings",
    )["embeddings"]
    x = jax.ShapeDtypeStruct(
        (data * tokens, WIDTH), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
    )
    labels = jax.ShapeDtypeStruct(
        (data * tokens,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("data"))
    )
    return on.facts(
        jax.value_and_grad(
            functools.partial(te.linear_cross_entropy, chunk_size=data * tokens), (0, 1)
        ),
        x,
        table,
        labels,
    )


def loss_on_paper(data: int, shards: int, vocab_size: int, tokens: int) -> float:
    """Three numbers and the gradient of x for each token, summed over the shards; the gradient of a
    shard, over the data axis."""
    padded = -(-vocab_size // shards)
    return (
        all_reduce(4 * tokens * (3 + WIDTH), shards)
        + all_reduce(4 * padded * WIDTH, data)
        + 2 * all_reduce(4, data)
    )


def mesh_table(on: Target) -> str:
    """What each chip sends and holds beside its arguments, as compiled and on paper."""
    chips = len(on.devices)
    shards = 2 ** (chips.bit_length() // 2)
    # On v5e, 16 GB a chip hold the rows, both moments and what the steps need beside them.
    data, vocab_size = chips // shards, 10**8 * min(chips, 256) // 256
    lines = []
    for way in ("sharded", "by rows", "by exchange"):
        arguments = arguments_of(
            way, on.mesh(data=data, model=shards), rows.OPTIMIZER, vocab_size, WIDTH, IDS
        )
        facts = on.facts(step_of(way, rows.OPTIMIZER), *arguments)
        lines.append(
            [
                f"Adam step {way}, table [{vocab_size:.2g}, {WIDTH}]",
                *_sent(facts, WAYS[way](vocab_size, data, shards)),
            ]
        )
    facts = sharded_loss(on, data, shards, 262_144, 1024)
    lines.append(
        [
            f"tied cross-entropy, table [262144, {WIDTH}]",
            *_sent(facts, loss_on_paper(data, shards, 262_144, 1024)),
        ]
    )
    columns = [
        f"program, {data} x {shards}",
        "sent by a chip, MB",
        "on paper, MB",
        "temporaries, MB",
        "compiled in, s",
        "collectives",
    ]
    return markdown_table(columns, lines)


def _sent(facts: Facts, paper: float) -> list[str]:
    sends = [
        f"{each.kind} of {', '.join(f'{dtype}{list(shape)}' for dtype, shape in each.operands)}"
        for each in facts.collectives
    ]
    return [
        f"{facts.sent / 1e6:,.1f}",
        f"{paper / 1e6:,.1f}",
        f"{facts.temporaries / 1e6:,.1f}",
        f"{facts.seconds:.1f}",
        "; ".join(sends),
    ]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--target",
        default="tpu:v5e:2x2",
        help="cuda:h200, or a TPU topology (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PROGRAMS,
        default=list(PROGRAMS),
        metavar="PROGRAM",
        help=f"some of: {', '.join(PROGRAMS)}",
    )
    return parser


def main():
    """Prints a Markdown table."""
    arguments = parser().parse_args()
    try:
        on = target(arguments.target)
    except TargetError as error:
        sys.exit(str(error))
    versions = ", ".join(
        f"{name} {version}" for name, version in environment(PACKAGES)["versions"].items()
    )
    print(f"Compiled, not run, for {arguments.target} ({len(on.devices)} chips); {versions}\n")
    if len(on.devices) <= FEW:
        print(programs_table(on, arguments.only))
    if len(on.devices) > 1 and arguments.only == list(PROGRAMS):
        print(f"\n{mesh_table(on)}")


if __name__ == "__main__":
    main()
