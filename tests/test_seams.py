"""Whole programs in which one part's result is another part's argument."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import equal, near
from flax import nnx
from meshes import AUTO, EXPLICIT, mesh_of, put

import transformer_embed as te
from transformer_embed._src.kernels import row_indices, splash_kernels

HEADS, HEAD_DIM, VOCAB = 2, 8, 17
CONFIG = te.EmbedderConfig(VOCAB, HEADS * HEAD_DIM, dropout_rate=0.0)


@pytest.fixture(scope="module")
def params():
    embedder = te.Embedder(CONFIG)
    mix = jax.random.normal(jax.random.key(1), (3, 16, 16)) / 4
    return {"embed": embedder.init(jax.random.key(0)), "mix": mix}


def decoder(params, ids, tokens, attend):
    """Hidden vectors of one layer; `attend` takes heads [batch, length, heads, size]."""
    embedder = te.Embedder(CONFIG)
    x = embedder.apply(params["embed"], None, ids, is_training=False, positions=tokens.positions)
    queries, keys, values = (
        (x @ matrix).reshape(*ids.shape, HEADS, HEAD_DIM) for matrix in params["mix"]
    )
    rotate = functools.partial(te.apply_rotary, positions=tokens.positions)
    attended = attend(rotate(queries), rotate(keys), values)
    return x + attended.reshape(x.shape)


def t5_bias(queries, keys):
    buckets = te.relative_position_buckets(queries, keys, causal=True)
    table = jnp.sin(jnp.arange(32.0 * HEADS)).reshape(32, HEADS)
    return jnp.moveaxis(te.lookup(table, buckets), -1, 1)


BIASES = {
    "no bias": lambda queries, keys: None,
    "alibi": functools.partial(te.alibi_bias, num_heads=HEADS),
    "t5": t5_bias,
}


@functools.partial(jax.jit, static_argnames=("window", "bias"))
def whole(params, ids, window=None, bias="no bias"):
    """The same for rows without padding."""
    tokens = te.TokenPositions(jnp.arange(ids.shape[1]))
    mask = te.AttentionMask(tokens, causal=True, window=window).dense()
    biases = BIASES[bias](tokens.positions, tokens.positions)
    attend = functools.partial(jax.nn.dot_product_attention, bias=biases, mask=mask)
    return decoder(params, ids, tokens, attend)


@pytest.mark.slow
def test_a_loaders_batch_goes_through_a_packed_mask_to_a_kernel(params):
    """Documents, packed by a loader that reshapes and pads, checked on the host, attended by a
    kernel inside jit."""
    documents = [np.arange(1, 6), np.arange(2, 9), np.arange(3, 6)]
    ids = np.zeros((2, 10), int)
    segment_ids = np.zeros((2, 10), int)
    for row, start, number in ((0, 0, 0), (1, 0, 1), (1, 7, 2)):
        place = slice(start, start + len(documents[number]))
        ids[row, place], segment_ids[row, place] = documents[number], number + 1
    batch = {"ids": ids, "tokens": te.TokenPositions.from_segment_ids(segment_ids)}
    # The two rows of the loader become one row of the model, padded to a multiple of 8.
    batch = jax.tree.map(lambda a: jnp.pad(a.reshape(1, -1), ((0, 0), (0, 4))), batch)
    te.check_batch(batch["ids"], batch["tokens"], vocab_size=2**31 - 1, order="packed")

    @jax.jit
    def hidden(params, batch):
        tokens = batch["tokens"]
        mask = te.AttentionMask(tokens, causal=True, window=(4, 0))
        rule = row_indices.RowRule(mask, "splash attention", "packed")
        heads, segment_ids = splash_kernels.heads_and_segment_ids(rule, HEADS)
        allowed = jnp.asarray(heads.masks[0][:24, :24])[None]
        allowed &= segment_ids.q[:, :, None] == segment_ids.kv[:, None, :]
        attend = functools.partial(jax.nn.dot_product_attention, mask=allowed[:, None])
        return decoder(params, batch["ids"], tokens, attend)

    packed = hidden(params, batch)[0]
    for number, start in enumerate((0, 10, 17)):
        alone = whole(params, documents[number][None], window=(4, 0))[0]
        near(packed[start : start + len(alone)], alone, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["alibi", "t5"])
def test_an_empty_cache_is_the_carry_of_a_scan_that_decodes(params, bias):
    """Prompts padded on the left, then one token a step: each as without a cache."""
    prompt, steps = jnp.array([[0, 0, 3, 4], [5, 6, 7, 8]]), 5
    embedder = te.Embedder(CONFIG)

    def attend_to_cache(cache, tokens, slot, new, queries, keys, values):
        new += te.write_cache(cache, [tokens, keys, values], slot)[0]
        mask = te.AttentionMask(tokens, new[0], causal=True).dense()
        biases = BIASES[bias](tokens.positions, new[0].positions)
        return jax.nn.dot_product_attention(queries, new[1], new[2], bias=biases, mask=mask)

    def step(params, cache, ids, tokens, slot):
        new = []
        attend = functools.partial(attend_to_cache, cache, tokens, slot, new)
        x = decoder(params, ids, tokens, attend)
        return new, te.linear_logits(x[:, -1], embedder.output(params["embed"])).argmax(-1)[:, None]

    @jax.jit
    def generate(params, prompt):
        empty = te.TokenPositions.empty(2, 4 + steps)
        cache = [empty, *jnp.zeros((2, 2, 4 + steps, HEADS, HEAD_DIM))]
        tokens = te.TokenPositions.from_ids(prompt, pad_id=0)
        cache, ids = step(params, cache, prompt, tokens, 0)

        def next_token(carry, slot):
            cache, ids = carry
            tokens = te.TokenPositions.from_offset(cache[0].padding_mask.sum(1), 1)
            return step(params, cache, ids, tokens, slot), ids[:, 0]

        return jax.lax.scan(next_token, (cache, ids), 4 + jnp.arange(steps))[1].T

    generated = generate(params, prompt)
    for row, start in enumerate((2, 0)):
        ids = jnp.concatenate([prompt[row, start:], generated[row]])[None]
        x, *_ = whole(params, ids, bias=bias)
        expected = te.linear_logits(x, embedder.output(params["embed"])).argmax(-1)
        assert generated[row].tolist() == expected[-1 - steps : -1].tolist()


def test_the_first_steps_of_a_loop_share_one_compilation():
    """A cache from the constructor and one that `write_cache` made are the same tree."""

    @jax.jit
    def step(slots, slot):
        return te.write_cache(slots, te.TokenPositions.from_offset(slot, 1), slot)[0]

    slots = te.TokenPositions.empty(2, 4)
    for slot in range(3):
        slots = step(slots, slot)
    assert step._cache_size() == 1
    assert slots.padding_mask.tolist() == [[True, True, True, False]] * 2


@pytest.mark.slow
def test_training_goes_on_after_an_exchange_that_overflows():
    """8 devices: the step is skipped and counted, with parameters and state as they were, and the
    tables are written in place."""
    mesh, optimizer = mesh_of((8,), ("x",), EXPLICIT), optax.adam(0.1)
    params = {"table": jnp.ones((32_768, 16)), "w": jnp.ones(16)}
    place = lambda leaf: put(mesh, leaf, *["x"] * (leaf.ndim == 2))
    held = jax.tree.map(place, (params, optimizer.init(params)))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(held, ids):
        params, state, skipped = held
        loss = lambda params: jnp.mean(te.lookup(params["table"], ids) @ params["w"])
        options = {"ids": {"table": ids}, "max_rows": 4, "capacity": 1.0}
        value, grads = te.rows.value_and_grad(loss, **options)(params)
        is_finite = jnp.isfinite(value)
        params, state = jax.lax.cond(
            is_finite,
            lambda: te.rows.apply_gradients(optimizer, grads, state, params),
            lambda: (params, state),
        )
        return (params, state, skipped + ~is_finite), value

    def batch(ids):
        # Neighbours belong to one device: each asks for one of its own.
        ids = np.asarray(ids, np.int32) * 4096 % 32_767
        return put(mesh, ids.reshape(8, -1), "x")

    few, many = batch(np.tile(np.arange(4), 32)), batch(np.arange(128))
    held = (*held, put(mesh, jnp.zeros((), jnp.int32)))
    step = step.lower(held, few).compile()
    assert step.memory_analysis().temp_size_in_bytes < 32_768 * 16 * 4 / 8
    held, first = step(held, few)
    before = jax.device_get(held[:2])
    held, overflow = step(held, many)
    equal(jax.device_get(held[:2]), before)
    held, after = step(held, few)
    assert jnp.isnan(overflow)
    assert after < first
    assert (held[2], held[1][0].count) == (1, 2)


@pytest.mark.parametrize(
    "read",
    [
        lambda tokens: te.AttentionMask(tokens, causal=True).dense(),
        lambda tokens: te.check_batch(np.zeros([1, 3], int), tokens, vocab_size=1),
        lambda tokens: te.write_cache(te.TokenPositions.empty(1, 4), tokens, 0),
    ],
    ids=["mask", "order", "cache"],
)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_what_a_loader_makes_of_positions_is_asked_for_its_dtype(read, dtype):
    tokens = te.TokenPositions.from_segment_ids([1, 1, 2, 0])
    tokens = jax.tree.map(lambda array: np.asarray(array).astype(dtype), tokens)
    with pytest.raises(TypeError, match="positions: wanted an integer dtype"):
        read(tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "split"), [((EXPLICIT, AUTO), "x"), ((AUTO, EXPLICIT), ("y", "x"))], ids=str
)
def test_some_axes_of_a_mesh_are_explicit_and_others_automatic(kinds, split):
    """Types say how the batch is split, and the compiler splits the model, for example."""
    mesh = jax.make_mesh((2, 4), ("y", "x"), axis_types=kinds)
    embedder = te.Embedder(dataclasses.replace(CONFIG, row_multiple=8))
    optimizer = optax.sgd(0.01, momentum=0.9)
    params = embedder.init(jax.random.key(0))
    ids = jnp.arange(32, dtype=jnp.int32).reshape(8, 4) % VOCAB
    (path,) = params

    @jax.jit
    def run(params, ids):
        def loss(params, reduction="mean"):
            x = embedder.apply(params, None, ids, is_training=False)
            output, options = embedder.output(params), {"reduction": reduction}
            return te.linear_cross_entropy(x, output, ids, shift=True, **options)

        square = lambda params: jnp.sum(embedder.apply(params, None, ids, is_training=False) ** 2)
        rows = te.rows.value_and_grad(square, ids={f"{path}/embeddings": ids})(params)[1]
        state = optimizer.init(params)
        updated = te.rows.apply_gradients(optimizer, rows, state, params)[0]
        return jax.value_and_grad(loss)(params), loss(params, "none"), loss(updated)

    expected = run(params, ids)
    with jax.set_mesh(mesh):
        params = put(mesh, params, split)
        found = jax.device_get(run(params, put(mesh, ids, "y")))
    near(found, expected, atol=1e-5)


def test_flax_may_hold_a_sharded_table(tmp_path):
    mesh, config = mesh_of((8,), ("x",)), dataclasses.replace(CONFIG, row_multiple=8)
    ((path, layer),) = te.Embedder(config).init(jax.random.key(0)).items()
    table = put(mesh, layer["embeddings"], "x")
    x = jnp.ones(CONFIG.d_model)
    equal(te.lookup(nnx.Param(table), [3]), te.lookup(table, [3]))
    equal(te.linear_logits(x, nnx.Param(table)), te.linear_logits(x, table))
    params = {path: {"embeddings": nnx.Param(table)}}
    te.pretrained.save_embedder(tmp_path / "a.safetensors", config, params)
    saved = te.pretrained.load_embedder(tmp_path / "a.safetensors").params
    equal(saved[path]["embeddings"], layer["embeddings"])


@pytest.mark.parametrize("spec", [("y", None), (None, "x"), ("y", "x")], ids=str)
@pytest.mark.parametrize("rows", [1, 4], ids=["one row", "all rows"])
def test_a_cache_that_explicit_axes_split_takes_tokens_that_they_do_not_split(spec, rows):
    """As the offset of a step of decoding, which all rows may share."""
    mesh = mesh_of((2, 4), ("y", "x"), EXPLICIT)
    tokens = te.TokenPositions.from_offset(np.arange(rows), 3)
    cache = te.TokenPositions.empty(4, 8), jnp.zeros((4, 8, 4, 2))
    new, slot = (tokens, jnp.ones((rows, 3, 4, 2))), jnp.array([2, 0, 7, 8])
    expected = te.write_cache(cache, new, slot)
    with jax.set_mesh(mesh):
        cache = put(mesh, cache[0], *spec), put(mesh, cache[1], *spec[:1], None, *spec[1:])
        written, is_written = jax.jit(te.write_cache)(cache, new, slot)
    equal((written, is_written), expected)
    for before, after in zip(*map(jax.tree.leaves, (cache, written)), strict=True):
        assert jax.typeof(after) == jax.typeof(before)
