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
import pallas_kernels
import public
import pytest
from calls import CALLS, with_gradient
from collectives import collectives
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import NamedSharding, PartitionSpec
from meshes import EXPLICIT, mesh_of
from targets import TargetError, target

import transformer_embed as te

ROOT = Path(__file__).parents[1]
BATCH, LENGTH, WIDTH, VOCAB = 16, 128, 128, 1000
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (the extra tpu-check)",
)
P = PartitionSpec
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


# A program for each public function that computes; the others make values that these programs take.
FUNCTIONS = {name: (with_gradient(*call), call[1]) for name, call in CALLS.items()} | {
    "Embedder": (
        lambda params, rng, ids: EMBEDDER.apply(params, rng, ids, is_training=True),
        (PARAMS, KEY, IDS),
    ),
    "init": (EMBEDDER.init, (KEY,)),
    "alibi_slopes": (lambda: te.alibi_slopes(4), ()),
    "causal_mask": (lambda: te.causal_mask(LENGTH), ()),
    "sinusoidal_table": (lambda: te.sinusoidal_table(LENGTH, WIDTH), ()),
    "linear_divergence": (
        jax.value_and_grad(te.linear_divergence, (0, 1, 2, 3)),
        (X, TABLE, X, TABLE),
    ),
    "truncated": (
        jax.value_and_grad(
            lambda x, table, ids: te.linear_log_probs(x, table, ids, truncated=True).sum(), (0, 1)
        ),
        (X, TABLE, of(jnp.int32, BATCH, LENGTH, VOCAB // 10)),
    ),
    "write_cache": (
        te.write_cache,
        (
            of(jnp.float32, BATCH, LENGTH, 2, 64),
            of(jnp.float32, BATCH, 1, 2, 64),
            of(jnp.int32, BATCH),
        ),
    ),
    "pretrained.resize": (
        lambda params, rng: te.pretrained.resize(params, LEARNED.config, LARGER, rng=rng),
        (jax.eval_shape(LEARNED.init, jax.random.key(0)), KEY),
    ),
    "rows.apply_gradients": (
        row_step,
        (TABLE, jax.eval_shape(optax.adam(1e-3).init, {"table": TABLE}), IDS),
    ),
}


def test_each_public_function_has_a_program():
    functions = {name for name in public.TOP if inspect.isfunction(getattr(te, name))}
    # What reads or makes values on the host has none.
    without = {"check_batch", "load_balanced_order"}
    assert functions - without <= FUNCTIONS.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_public_function_lowers_for_an_nvidia_gpu(name):
    function, arguments = FUNCTIONS[name]
    with jax.set_mesh(mesh_of((1,), ("x",))):
        assert not atomic_sums(scatters(function, *arguments))


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


def test_the_sum_of_gradients_of_different_rows_is_not_atomic():
    def program(some, other, values):
        one, another = (te.rows.RowGradient(ids, values, VOCAB) for ids in (some, other))
        return (one + another).values

    with jax.set_mesh(mesh_of((1,), ("x",))):
        found = scatters(program, of(jnp.int32, 8), of(jnp.int32, 8), of(jnp.float32, 8, 4))
    assert found
    assert not atomic_sums(found)


@pytest.mark.parametrize(
    ("program", "layout", "kind"),
    [
        *itertools.product(
            [jax.grad(weighted), lazy_step], ["rows over all", "rows", "columns"], [EXPLICIT]
        ),
        (functools.partial(lazy_step, capacity=1.0), "rows over all", EXPLICIT),
        # Under automatic axes the compiler splits this one: sorted, the whole batch would go to
        # each device.
        (jax.grad(weighted), "whole", EXPLICIT),
    ],
)
def test_gradients_of_tables_on_a_mesh_of_gpus_are_not_atomic_sums(program, layout, kind):
    mesh, shape = mesh_of((2, 4), ("data", "model"), kind), (VOCAB, 8)
    spec = {"whole": P(), "columns": P(None, "model"), "rows": P("model")}
    spec = spec.get(layout, P(mesh.axis_names))
    placed = {"table": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))}
    batch = P(mesh.axis_names) if layout == "rows over all" else P("data")
    ids = jax.ShapeDtypeStruct((16, 8), jnp.int32, sharding=NamedSharding(mesh, batch))
    columns = "model" if layout == "columns" else None
    weights = jax.ShapeDtypeStruct(
        (16, 8, 8), jnp.float32, sharding=NamedSharding(mesh, P(*batch, None, columns))
    )
    with jax.set_mesh(mesh):
        found = scatters(program, placed, ids, weights)
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
    evaluate = lambda params, ids: EMBEDDER.apply(params, None, ids, is_training=False)
    params, ids = tpu.like(
        (jax.eval_shape(EMBEDDER.init, jax.random.key(0)), of(jnp.int32, 32, 512))
    )
    facts = tpu.facts(evaluate, params, ids)
    entry = facts.text[facts.text.index("\nENTRY") :]
    passes = re.findall(
        rf"= f32\[(?:32,512|16384),{WIDTH}\](?!\S*S\(1\))\S* (?:fusion|copy|add|multiply|select|transpose)\(",
        entry,
    )
    assert len(passes) == 1
    assert facts.temporaries < 2**20


@needs_libtpu
@pytest.mark.parametrize("pad_id", [None, 0])
def test_the_gradient_on_a_tpu_masks_no_rows(tpu, pad_id):
    """Ids out of range and padding are dropped by the scatter itself, so that a weighted sum's
    gradient is one scatter of the weights."""
    gradient = jax.grad(
        lambda table, ids, weights: jnp.vdot(te.lookup(table, ids, pad_id=pad_id), weights)
    )
    facts = tpu.facts(gradient, *tpu.like((TABLE, IDS, X)))
    assert not re.search(
        rf"= f32\[(?:{BATCH},{LENGTH}|{BATCH * LENGTH}),{WIDTH}\]\S* (?:fusion|select)\(",
        facts.text,
    )
    assert facts.temporaries < 2**20


@needs_libtpu
def test_the_tied_loss_on_a_tpu_holds_no_logits_of_all_tokens(tpu):
    # Logits so small would be computed at once.
    loss = functools.partial(te.linear_cross_entropy, chunk_size=512)
    facts = tpu.facts(
        jax.value_and_grad(loss, (0, 1)),
        *tpu.like((of(jnp.float32, 8, 512, WIDTH), TABLE, of(jnp.int32, 8, 512))),
    )
    assert not re.search(rf"f32\[(?:8,512|4096),{VOCAB}\]", facts.text)
    assert facts.temporaries < 4 * 8 * 512 * VOCAB / 4


@needs_libtpu
def test_a_step_by_rows_on_a_tpu_makes_nothing_of_the_size_of_the_table(tpu):
    table = of(jnp.float32, 100_000, WIDTH)
    state = jax.eval_shape(optax.adam(1e-3).init, {"table": table})
    facts = tpu.facts(row_step, *tpu.like((table, state, of(jnp.int32, 512))), donate=(0, 1))
    assert facts.temporaries < 100_000 * WIDTH * 4 / 10


@needs_libtpu
def test_a_sharded_program_on_a_tpu_sends_nothing_of_the_size_of_a_table(tpu):
    mesh, vocab = tpu.mesh(EXPLICIT, data=2, model=2), 100_000
    over = NamedSharding(mesh, P("model"))
    params = {"embeddings": jax.ShapeDtypeStruct((vocab, WIDTH), jnp.float32, sharding=over)}
    ids = jax.ShapeDtypeStruct((32, 64), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    read = tpu.compile(lambda params, ids: te.lookup(params["embeddings"], ids), params, ids)
    for each in collectives(read):
        assert each.largest <= 32 * 64 * WIDTH
    x = jax.ShapeDtypeStruct((32, 64, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    loss = lambda x, params, labels: te.linear_cross_entropy(x, params["embeddings"], labels)
    shard = vocab * WIDTH / 2
    for each in collectives(tpu.compile(jax.value_and_grad(loss, (0, 1)), x, params, ids)):
        assert each.largest <= shard


BLOCKS = splash_attention.BlockSizes(*[512] * 8)


def splash(rule, heads):
    kernels, segment_ids = te.kernels.splash_kernels(
        rule, heads.shape[1], order="packed", block_sizes=BLOCKS
    )
    attend = jax.vmap(lambda kernel, row, ids: kernel(row, row, row, segment_ids=ids))
    return attend(kernels, heads, segment_ids)


@needs_libtpu
def test_splash_attention_on_a_tpu_makes_nothing_for_pairs_of_tokens(tpu):
    """32768 packed tokens, causal with a window, value and gradient."""
    length = 32_768

    def loss(heads, segment_ids):
        tokens = te.TokenPositions.from_segment_ids(segment_ids)
        rule = te.AttentionMask(tokens, causal=True, window=(1023, 0))
        return splash(rule, heads).astype(jnp.float32).sum()

    heads, ids = of(jnp.bfloat16, 1, 8, length, 128), of(jnp.int32, 1, length)
    facts = tpu.facts(jax.value_and_grad(loss), *tpu.like((heads, ids)))
    # Segment ids repeated over 128 lanes, and a few arrays of the size of the heads.
    assert facts.temporaries < 12 * heads.size * 2
    assert not re.search(rf"pred\[[\d,]*{length},{length}\]", facts.text)


@needs_libtpu
def test_the_block_mask_on_a_tpu_needs_no_array_of_tokens_and_blocks(tpu):
    length = 2**17

    def kinds(segment_ids):
        tokens = te.TokenPositions.from_segment_ids(segment_ids)
        return te.AttentionMask(tokens, causal=True, window=(1023, 0)).block_mask((512, 512))

    facts = tpu.facts(kinds, tpu.like(of(jnp.int32, 1, length)))
    assert facts.temporaries < 64 * length


@needs_libtpu
def test_what_kernels_for_tpus_may_call():
    """In a process of its own, which the compiler aborts where it cannot expand the axes of bools."""
    ran = run("tests/pallas_kernels.py")
    assert ran.stdout.splitlines() == list(pallas_kernels.KERNELS), ran.stderr[-2000:]


@needs_libtpu
def test_the_cycles_of_a_loop_count_each_of_its_rounds(tpu):
    def program(rounds):
        return lambda x: jax.lax.fori_loop(0, rounds, lambda i, x: jnp.tanh(x @ x), x)

    few, many = (tpu.facts(program(rounds), tpu.array((256, 256))).cycles for rounds in (10, 100))
    assert many > 5 * few


# --- bad input


@pytest.mark.parametrize("name", ["gpu", "tpu:", ""])
def test_an_unknown_target_is_an_error_that_lists_the_known_ones(name):
    with pytest.raises(
        TargetError, match=r"^target: wanted a name such as tpu:v5e:2x2, .*, cuda:h200, got "
    ):
        target(name)


@pytest.mark.parametrize(
    ("name", "package"), [("tpu:v5e:2x2", "libtpu"), ("cuda:h200", "jax_cuda12_plugin")]
)
def test_a_missing_compiler_is_an_error_that_says_what_to_install(name, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    target.cache_clear()
    with pytest.raises(TargetError, match=r'pip install "jax') as caught:
        target(name)
    assert "\n" not in str(caught.value)
    target.cache_clear()


@needs_libtpu
@pytest.mark.parametrize("topology", ["v9:2x2", "v5e:3x77"])
def test_a_topology_that_xla_refuses_is_one_line(topology):
    with pytest.raises(
        TargetError,
        match=r"^target: wanted a topology that XLA compiles for, such as .*, got 'tpu:",
    ) as caught:
        target(f"tpu:{topology}")
    assert "\n" not in str(caught.value)


def test_the_command_ends_in_one_line_where_the_target_is_unknown():
    ran = run("tests/benchmarks/compiled.py", "--target", "gpu")
    assert ran.returncode == 1
    assert re.fullmatch(r"target: wanted a name such as .*, got 'gpu'\n", ran.stderr)
