"""Programs compiled for a TPU that is not there, and lowered for an NVIDIA GPU: passes over memory,
temporaries, collectives.

What compiles for a TPU needs libtpu (the extra `tpu-check`) and is skipped without it.
"""

import dataclasses
import functools
import importlib.util
import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import public
import pytest
from calls import CALLS, with_gradient
from jax import NamedSharding, P
from jax.experimental.pallas.ops.tpu import splash_attention
from meshes import EXPLICIT, mesh_of
from targets import target

import transformer_embed as te

ROOT = Path(__file__).parents[1]
BATCH, LENGTH, WIDTH, VOCAB = 16, 128, 128, 1000
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason="needs libtpu (the extra tpu-check)")
pytestmark = pytest.mark.gate

CONFIG = te.EmbedderConfig(VOCAB, WIDTH, pad_id=0)
EMBEDDER = te.Embedder(CONFIG)
PARAMS = jax.eval_shape(EMBEDDER.init, jax.random.key(0))
LEARNED = te.Embedder(
    te.EmbedderConfig(
        VOCAB, WIDTH, scheme=te.Learned(LENGTH), num_token_types=2, layer_norm_eps=1e-6
    )
)
LARGER = dataclasses.replace(LEARNED.config, vocab_size=VOCAB + 8, scheme=te.Learned(2 * LENGTH))


def of(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


IDS, KEY, TABLE = of(jnp.int32, BATCH, LENGTH), of(jnp.uint32, 2), of(jnp.float32, VOCAB, WIDTH)
X = of(jnp.float32, BATCH, LENGTH, WIDTH)


def row_step(table, state, ids):
    loss = lambda params, ids: jnp.sum(te.lookup(params["table"], ids) ** 2)
    params = {"table": table}
    _, grads = te.rows.value_and_grad(loss, ids={"table": ids})(params, ids)
    return te.rows.apply_gradients(optax.adam(1e-3), grads, state, params)


ADAM = jax.eval_shape(optax.adam(1e-3).init, {"table": of(jnp.float32, 100_000, WIDTH)})


def evaluate(params, ids, rng=None):
    return EMBEDDER.apply(params, rng, ids, is_training=rng is not None)


def candidates(x, table, ids):
    return te.linear_log_probs(x, table, ids).sum()


def resize(params, rng):
    return te.pretrained.resize(params, LEARNED.config, LARGER, rng=rng)


def sum_of_rows(some, other, values):
    one, another = (te.rows.RowGradient(ids, values, VOCAB) for ids in (some, other))
    return (one + another).values


CACHE = [of(jnp.float32, BATCH, size, 2, 64) for size in (LENGTH, 1)]
# A program for each public function that computes, and its arguments; the others make values that
# these programs take.
TEXTS = {
    "Embedder": "evaluate, (PARAMS, IDS, KEY)",
    "init": "EMBEDDER.init, (KEY,)",
    "alibi_slopes": "lambda: te.alibi_slopes(4), ()",
    "causal_mask": "lambda: te.causal_mask(LENGTH), ()",
    "sinusoidal_table": "lambda: te.sinusoidal_table(LENGTH, WIDTH), ()",
    "linear_divergence": "jax.value_and_grad(te.linear_divergence, (0, 1, 2, 3)), (X, TABLE, X, TABLE)",
    "candidates": "jax.value_and_grad(candidates, (0, 1)), (X, TABLE, of(jnp.int32, BATCH, LENGTH, 100))",
    "write_cache": "te.write_cache, (*CACHE, of(jnp.int32, BATCH))",
    "pretrained.resize": "resize, (jax.eval_shape(LEARNED.init, jax.random.key(0)), KEY)",
    "rows.RowGradient": "sum_of_rows, (of(jnp.int32, 8), of(jnp.int32, 8), of(jnp.float32, 8, 4))",
    "rows.apply_gradients": "row_step, (of(jnp.float32, 100_000, WIDTH), ADAM, IDS)",
}
FUNCTIONS = {name: (with_gradient(*call), call[1]) for name, call in CALLS.items()}
FUNCTIONS |= {name: eval(text) for name, text in TEXTS.items()}


def test_each_public_function_has_a_program():
    functions = {name for name in public.TOP if inspect.isfunction(getattr(te, name))}
    # These compute nothing, or read or make values on the host.
    without = {"check_batch", "find_parameters", "load_balanced_order"}
    assert functions - without <= FUNCTIONS.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_public_function_lowers_for_an_nvidia_gpu(name):
    function, arguments = FUNCTIONS[name]
    with jax.set_mesh(mesh_of((1,), ("x",))):
        sums = atomic_sums(scatters(function, *arguments))
    # A token's candidates are few, and their gradients are added to the logits of a chunk. This sum
    # is atomic, so its last bits may vary where one id stands twice among the candidates.
    assert len(sums) == (name == "candidates")


def scatters(function, *arguments):
    """Of a program for an NVIDIA GPU: whether the indices are said to be unique, and what is done
    with values."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(
        r'"stablehlo\.scatter"\(.*?unique_indices = (\w+)\}> \(\{(.*?)\}\)', text, re.DOTALL
    )


def atomic_sums(scatters):
    """Where indices may repeat, a sum is atomic; to write one value twice is harmless."""
    return [body for unique, body in scatters if unique == "false" and "stablehlo.add" in body]


def weighted(params, ids, weights):
    return jnp.sum(te.lookup(params["table"], ids, pad_id=0) * weights)


def lazy_step(params, ids, weights, capacity=None):
    loss, sgd = functools.partial(weighted, ids=ids, weights=weights), optax.sgd(0.1)
    step = te.rows.value_and_grad(loss, ids={"table": ids}, capacity=capacity)
    grads = step(params)[1]
    return te.rows.apply_gradients(sgd, grads, sgd.init(params), params)[0]


# How a table is split, the rows of its batch, and the columns of weights.
LAYOUTS = {
    P(("data", "model")): (("data", "model"), None),
    P("model"): ("data", None),
    P(None, "model"): ("data", "model"),
    P(): ("data", None),
}
PROGRAMS = [
    *itertools.product([jax.grad(weighted)], LAYOUTS),
    # A step of a whole table updates the whole batch's rows on each device.
    *itertools.product([lazy_step], [*LAYOUTS][:3]),
    (functools.partial(lazy_step, capacity=1.0), P(("data", "model"))),
]


@pytest.mark.parametrize(("program", "spec"), PROGRAMS)
def test_gradients_of_tables_on_a_mesh_of_gpus_are_not_atomic_sums(program, spec):
    mesh = mesh_of((2, 4), ("data", "model"), EXPLICIT)
    rows, columns = LAYOUTS[spec]

    def on(spec, *shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    ids, weights = on(P(rows), 16, 8, dtype=jnp.int32), on(P(rows, None, columns), 16, 8, 8)
    with jax.set_mesh(mesh):
        found = scatters(program, {"table": on(spec, VOCAB, 8)}, ids, weights)
    assert found
    assert not atomic_sums(found)


# --- in another process


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# Some settings of a loss, and some arrays that new tokens leave out.
LOWER = """
import jax, jax.numpy as jnp, transformer_embed as te

settings = {"label_smoothing": 0.1, "z_loss": 1e-4}
loss = lambda x: te.linear_cross_entropy(x, x, jnp.arange(4), **settings)
index = [range(4)]
slots = te.TokenPositions(index, places=index, ends=index, block_ids=index)
tokens = te.TokenPositions([range(2)])
print(jax.jit(loss).lower(jnp.ones((4, 8))).as_text())
print(jax.jit(te.write_cache).lower(slots, tokens, 0).as_text())
"""


def test_a_program_is_the_same_in_each_process():
    """Each has other hashes of strings. Devices of several processes wait for one program."""
    texts = {run("-c", LOWER, PYTHONHASHSEED=seed).stdout for seed in "124"}
    assert len(texts) == 1
    assert "stablehlo.scatter" in texts.pop()


# --- for a TPU


@pytest.fixture(scope="module")
def tpu():
    return target("tpu:v5e:2x2")


@needs_libtpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_public_function_compiles_for_a_tpu(name, tpu):
    function, arguments = FUNCTIONS[name]
    tpu.compile(function, *tpu.like(arguments))


@needs_libtpu
def test_evaluation_on_a_tpu_writes_its_output_once(tpu):
    """One gather into the chip's own memory, which is S(1), and one fusion from there to the
    output; nothing else is as large."""
    facts = tpu.facts(evaluate, *tpu.like((PARAMS, of(jnp.int32, 32, 512))))
    entry = facts.text[facts.text.index("\nENTRY") :]
    passes = re.findall(
        rf"= f32\[(?:32,512|16384),{WIDTH}\](?!\S*S\(1\))\S* (?:fusion|copy|add|multiply|select|transpose)\(",
        entry,
    )
    assert len(passes) == 1
    assert facts.temporaries < 2**20


@needs_libtpu
def test_a_sharded_program_on_a_tpu_sends_nothing_of_the_size_of_a_table(tpu):
    mesh, vocab = tpu.mesh(data=2, model=2), 100_000

    def on(axis, *shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(axis)))

    x, table = on("data", 32, 64, WIDTH), on("model", vocab, WIDTH)
    ids = on("data", 32, 64, dtype=jnp.int32)
    loss = jax.value_and_grad(te.linear_cross_entropy, (0, 1))
    read, trained = tpu.facts(te.lookup, table, ids), tpu.facts(loss, x, table, ids)
    assert all(each.largest <= x.size for each in read.collectives)
    assert all(each.largest <= table.size / 2 for each in trained.collectives)


BLOCKS = splash_attention.BlockSizes(*[512] * 8)


def splash(heads, segment_ids):
    tokens = te.TokenPositions.from_segment_ids(segment_ids)
    rule = te.AttentionMask(tokens, causal=True, window=(1023, 0))
    kernels, ids = te.kernels.splash_kernels(rule, 8, order="packed", block_sizes=BLOCKS)
    attend = jax.vmap(lambda kernel, row, ids: kernel(row, row, row, segment_ids=ids))
    return attend(kernels, heads, ids).astype(jnp.float32).sum()


def tile_kinds(segment_ids):
    tokens = te.TokenPositions.from_segment_ids(segment_ids)
    return te.AttentionMask(tokens, causal=True, window=(1023, 0)).tile_kinds((512, 512))


def padded(table, ids, weights):
    return jnp.vdot(te.lookup(table, ids, pad_id=0), weights)


loss = jax.value_and_grad(functools.partial(te.linear_cross_entropy, chunk_size=512), (0, 1))
LONG, ALL = 32_768, f"(?:{BATCH},{LENGTH}|{BATCH * LENGTH})"
# A program and its arguments, the most bytes of temporaries, and what it must not have.
BOUNDS = {
    # Ids out of range and padding are dropped by the scatter itself, so that a weighted sum's
    # gradient is one scatter of the weights.
    "jax.grad(padded), (TABLE, IDS, X)": (2**20, rf"= f32\[{ALL},{WIDTH}\]\S* (?:fusion|select)\("),
    # Logits so small would be computed at once.
    "loss, (of(jnp.float32, 8, 512, WIDTH), TABLE, of(jnp.int32, 8, 512))": (
        8 * 512 * VOCAB,
        rf"f32\[(?:8,512|4096),{VOCAB}\]",
    ),
    # Nothing of the size of the table.
    "row_step, (of(jnp.float32, 100_000, WIDTH), ADAM, of(jnp.int32, 512))": (
        100_000 * WIDTH * 4 / 10,
        rf"f32\[100000,{WIDTH}\]\S* (?:copy|select)\(",
    ),
    # Nothing for pairs of tokens: segment ids repeated over 128 lanes, and a few arrays of the size
    # of the heads.
    "jax.value_and_grad(splash), (of(jnp.bfloat16, 1, 8, LONG, 128), of(jnp.int32, 1, LONG))": (
        12 * 8 * LONG * 128 * 2,
        rf"pred\[[\d,]*{LONG},{LONG}\]",
    ),
    "tile_kinds, (of(jnp.int32, 1, 2**14),)": (64 * 2**14, r"\[(?:\d+,)?16384,\d{3,}\]"),
}


@needs_libtpu
@pytest.mark.parametrize("text", BOUNDS)
def test_programs_on_a_tpu_hold_no_more_than_they_need(text, tpu):
    (function, arguments), (most, unwanted) = eval(text), BOUNDS[text]
    donate = (0, 1) if function is row_step else ()
    facts = tpu.facts(function, *tpu.like(arguments), donate=donate)
    assert facts.temporaries < most
    assert not re.search(unwanted, facts.text)


@needs_libtpu
def test_kernels_for_tpus_call_every_allowed_function():
    """In a process of its own, which the compiler aborts where it cannot expand the axes of bools."""
    ran = run("tests/pallas_kernels.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]


@needs_libtpu
def test_the_cycles_of_a_loop_count_each_of_its_rounds(tpu):
    def program(rounds):
        return lambda x: jax.lax.fori_loop(0, rounds, lambda i, x: jnp.tanh(x @ x), x)

    few, many = (tpu.facts(program(rounds), tpu.array((256, 256))).cycles for rounds in (10, 100))
    assert many > 5 * few
