"""Programs of this package, each beside its usual counterparts: what benchmarks time and compile.

A program has a function and its arguments for each line. Integers are numbers, floats may be shapes
alone, for which `drawn` draws numbers.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import peers
from jax.experimental.pallas.ops.tpu import splash_attention
from peers import BATCH, CONSTANT, D_MODEL, FACTOR, LENGTH, OURS, VOCAB_SIZE

import transformer_embed as te

Program = dict[str, tuple[Callable, tuple[Any, ...]]]
# Of rotations: [batch, length, heads, channels].
HEADS = (8, 2048, 16, 64)
BASE = 10_000.0
MAX_LEN = 2048
# A training step of a big table: its ids, its width, and the rows of the table.
STEP_IDS, WIDTH, ROWS = 16_384, 128, 10**6
# More batches than a cache holds rows of.
BATCHES = 32
OPTIMIZER = optax.adam(1e-3)


def of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def below(limit, *shape):
    return np.random.default_rng(0).integers(0, limit, shape).astype(np.int32)


def drawn(tree):
    """Normal numbers for shapes, the same for the same shape."""

    def draw(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return jnp.asarray(leaf)
        numbers = np.random.default_rng(1).standard_normal(leaf.shape, np.float32)
        return jnp.asarray(numbers, leaf.dtype)

    return jax.tree.map(draw, tree)


IDS, TABLE = below(VOCAB_SIZE, BATCH, LENGTH), of(VOCAB_SIZE, D_MODEL)
POSITIONS = below(LENGTH, BATCH, LENGTH)
EMBEDDER, PARAMS = te.Embedder(peers.CONFIG), peers.our_params(TABLE)


def input_layer(is_training, *weights):
    """Embeddings; with weights, the gradient of their weighted sum, so that only the way back
    costs."""

    def line(name):
        layer = peers.LINES[name](peers.Work(TABLE, IDS))

        def program(params, rng, ids, *weights):
            x = layer.embed(params, rng, ids, is_training)
            return jnp.vdot(x, *weights) if weights else x

        arguments = layer.params, np.zeros(2, np.uint32), IDS, *weights
        return jax.grad(program) if weights else program, arguments

    return {name: line(name) for name in (OURS, CONSTANT)}


def evaluate(params, ids, positions):
    return EMBEDDER.apply(params, None, ids, is_training=False, positions=positions)


def token_positions():
    """A position of its own for each token."""
    return {
        OURS: (lambda positions: te.sinusoidal_encoding(positions, D_MODEL), (POSITIONS,)),
        "precomputed table": (
            lambda table, positions: table[positions],
            (peers.sinusoid(), POSITIONS),
        ),
    }


def input_layer_by_positions():
    """Evaluation with a position of its own for each token."""

    tables = lambda table, encoding, ids, positions: table[ids] * FACTOR + encoding[positions]
    return {
        OURS: (evaluate, (PARAMS, IDS, POSITIONS)),
        "two precomputed tables": (tables, (TABLE, peers.sinusoid(), IDS, POSITIONS)),
    }


def decoding():
    """One token at a traced position."""

    def haiku(params, encoding, ids, positions):
        embed = lambda: hk.Embed(VOCAB_SIZE, D_MODEL, name="embed")(ids)
        rows = hk.transform(embed).apply(params, None)
        return rows * FACTOR + encoding[positions]

    one, theirs = np.array([[77]], np.int32), {"embed": {"embeddings": TABLE}}
    return {
        OURS: (evaluate, (PARAMS, one, one)),
        "Haiku and a precomputed table": (haiku, (theirs, peers.sinusoid(MAX_LEN), one, one)),
    }


def lookup_styles(vocab_size):
    """Reads 16,384 rows of width 512: a gather, and a product with a one-hot matrix."""

    def line(style):
        lookup = functools.partial(te.lookup, lookup_style=style)
        return lookup, (of(vocab_size, 512), below(vocab_size, 16_384))

    return {OURS: line("gather"), 'lookup_style="one_hot"': line("one_hot")}


def rotary(heads=HEADS, dtype=jnp.float32):
    """A position of its own for each token."""
    frequencies = BASE ** (-np.arange(0, heads[3], 2) / heads[3])
    angles = np.arange(heads[1])[:, None] * frequencies

    def rotate(x, cos, sin):
        cos, sin = cos[:, :, None], sin[:, :, None]
        first, second = jnp.split(x, 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def in_place(x, positions):
        angles = positions[..., None].astype(jnp.float32) * np.float32(frequencies)
        return rotate(x, jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype))

    arguments = of(*heads, dtype=dtype), below(heads[1], *heads[:2])
    tables = np.asarray(np.cos(angles), dtype), np.asarray(np.sin(angles), dtype)
    return {
        OURS: (te.apply_rotary, arguments),
        "precomputed tables of cos and sin": (
            lambda x, positions, cos, sin: rotate(x, cos[positions], sin[positions]),
            (*arguments, *tables),
        ),
        "cos and sin in float32": (in_place, arguments),
    }


def mask():
    """Causal and padding, [32, 1, 2048, 2048]."""
    padding, positions = below(2, BATCH, MAX_LEN) == 1, np.arange(MAX_LEN)

    def ours(padding):
        keys = te.TokenPositions(positions, segment_ids=padding.astype(int))
        return te.AttentionMask(te.TokenPositions(positions), keys, causal=True).dense()

    def usual(padding):
        causal = jnp.tril(jnp.ones((MAX_LEN, MAX_LEN), jnp.float32))
        return causal * padding[:, None, None, :].astype(jnp.float32)

    return {OURS: (ours, (padding,)), "float32 product": (usual, (padding,))}


def rule_of(segment_ids, **options):
    """Packed documents, causal with a window of 1024 tokens."""
    tokens = te.TokenPositions.from_segment_ids(segment_ids)
    return te.AttentionMask(tokens, **{"causal": True, "window": (1023, 0)} | options)


def attention(length):
    """The dense mask, and the same rule for splash attention."""
    heads = of(1, 8, length, 128, dtype=jnp.bfloat16)
    arguments = heads, heads, heads, np.ones((1, length), np.int32)
    sizes = splash_attention.BlockSizes(*[512] * 8)

    def skipping(queries, keys, values, segment_ids):
        kernels, ids = te.kernels.splash_kernels(
            rule_of(segment_ids), heads.shape[1], order="packed", block_sizes=sizes
        )
        attend = jax.vmap(lambda kernel, *row: kernel(*row[:3], segment_ids=row[3]))
        return attend(kernels, queries, keys, values, ids)

    def dense(queries, keys, values, segment_ids):
        heads = (array.swapaxes(1, 2) for array in (queries, keys, values))
        return jax.nn.dot_product_attention(*heads, mask=rule_of(segment_ids).dense())

    return {
        OURS: (skipping, arguments),
        "dot_product_attention, dense mask": (dense, arguments),
    }


def tied_loss():
    """Value and gradients, 4096 tokens, 32000 words, width 256."""
    arguments = of(4096, 256), of(VOCAB_SIZE, 256), IDS.ravel()[:4096]

    def usual(x, table, labels):
        return optax.softmax_cross_entropy_with_integer_labels(x @ table.T, labels).mean()

    return {
        OURS: (jax.value_and_grad(te.linear_cross_entropy, (0, 1)), arguments),
        "optax on x @ table.T": (jax.value_and_grad(usual, (0, 1)), arguments),
    }


def step_loss(params, ids, weights):
    """The sum of the rows looked up times fixed weights: what is timed is the table, not a
    model."""
    return jnp.vdot(te.lookup(params["embeddings"], ids), weights)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def row_step(params, state, ids, weights):
    _, grads = te.rows.value_and_grad(step_loss, ids={"embeddings": ids})(params, ids, weights)
    return te.rows.apply_gradients(OPTIMIZER, grads, state, params)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def dense_step(params, state, ids, weights):
    updates, state = OPTIMIZER.update(jax.grad(step_loss)(params, ids, weights), state, params)
    return optax.apply_updates(params, updates), state


def step_arguments(rows, width=WIDTH):
    params = {"embeddings": of(rows, width)}
    state = jax.eval_shape(OPTIMIZER.init, params)
    return params, state, of(STEP_IDS, dtype=jnp.int32), of(STEP_IDS, width)


def stepping(step, rows, width=WIDTH):
    """One step after another, in place, each with other ids."""
    params, _, _, weights = drawn(step_arguments(rows, width))
    held = [params, jax.jit(OPTIMIZER.init)(params)]
    batches = itertools.cycle(jnp.asarray(below(rows, BATCHES, STEP_IDS)))

    def call():
        held[:] = step(*held, next(batches), weights)
        return held[0]

    return call


def step_by_rows():
    """An Adam step, table [1e6, 128], 16384 ids, in place."""
    arguments = step_arguments(ROWS)
    return {OURS: (row_step, arguments), "optax, dense": (dense_step, arguments)}


PROGRAMS = {
    "eval": functools.partial(input_layer, False),
    "train": functools.partial(input_layer, True),
    "backward pass": functools.partial(input_layer, True, of(BATCH, LENGTH, D_MODEL)),
    "positions per token": token_positions,
    "eval, positions per token": input_layer_by_positions,
    "decoding one token": decoding,
    "lookup, 256 words": functools.partial(lookup_styles, 256),
    "lookup, 4096 words": functools.partial(lookup_styles, 4096),
    "rotary, float32": rotary,
    "rotary, bfloat16": functools.partial(rotary, (8, 2048, 32, 128), jnp.bfloat16),
    "mask": mask,
    "attention, 16384 tokens": functools.partial(attention, 16384),
    "attention, 131072 tokens": functools.partial(attention, 131_072),
    "tied cross-entropy": tied_loss,
    "Adam step by rows": step_by_rows,
}
# Of this package alone.
PACKED = np.sort(below(9, 4, 2048), axis=1)
OTHERS = {
    "ALiBi": (
        functools.partial(te.alibi_bias, num_heads=8, causal=True),
        (np.arange(1024), np.arange(1024)),
    ),
    "buckets": (
        functools.partial(te.relative_position_buckets, causal=False),
        (POSITIONS[:4], POSITIONS[:4]),
    ),
    "mask, packed": (lambda ids: rule_of(ids, chunk=512).dense(), (PACKED,)),
    "tile": (lambda ids: rule_of(ids).tile(512, 512, (512, 512)), (PACKED,)),
    "tile kinds": (lambda ids: rule_of(ids).tile_kinds((512, 512)), (PACKED,)),
    "dropout": (lambda x: te.dropout(jax.random.key(0), 0.1, x), (of(*HEADS),)),
    "loss": (
        lambda x, table, ids: te.linear_cross_entropy(x, te.OutputLayer(table, pad_id=0), ids),
        tied_loss()[OURS][1],
    ),
}
