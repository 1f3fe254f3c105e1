"""What pages compute, on other batches than theirs, beside a plain computation: values and gradients.

That a page's program runs does not say that it is right elsewhere: people copy it to rows of other
lengths, with padding on either side and several documents.
"""

import functools
import itertools
import re
import zipfile

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn import drawn
from pages import FOLDER, blocks_of, functions_of

import transformer_embed as te


def near(got, expected, **tolerance):
    """Equal trees, to rounding; NaN is equal to nothing."""
    tolerance = {"rtol": 1e-5, "atol": 1e-5} | tolerance
    check = functools.partial(np.testing.assert_allclose, equal_nan=False, **tolerance)
    jax.tree.map(check, got, expected)


def segment_ids_of(rng, rows, length):
    """Packed documents, with padding of some length on both sides, and a row of padding alone."""
    segment_ids = np.sort(rng.integers(1, 4, (rows, length)), axis=1)
    for row in segment_ids:
        before, after = rng.integers(0, length // 3, 2)
        row[:before] = row[length - after :] = 0
    segment_ids[-1] = 0
    return segment_ids


def dense_attention(mask, queries, keys, values, bias=0.0):
    """0 where a query sees no key."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) + bias
    shares = jax.nn.softmax(jnp.where(mask, logits, -1e30)) * mask.any(-1, keepdims=True)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, values)


def same_losses(ours, plain, *arguments):
    """Values, and gradients in the first argument."""
    near(*(jax.jit(jax.value_and_grad(each))(*arguments) for each in (ours, plain)), rtol=1e-4)


def with_gradients(attend, heads):
    """The outputs, and gradients of a sum of their squares."""
    outputs, pull = jax.vjp(attend, *heads)
    return outputs, pull(outputs)


# --- contexts over devices


@pytest.mark.documentation
@pytest.mark.parametrize("kind", ["zigzag", "cyclic"])
def test_ring_attention_is_dense_attention(kind):
    page = functions_of(FOLDER / "contexts_over_devices.md", "ring_attention", "TILE")
    rng, length = np.random.default_rng(0), 8 * page.TILE
    tokens = te.TokenPositions.from_segment_ids(segment_ids_of(rng, 3, length))
    heads = rng.normal(size=(3, 3, length, 2, 4)).astype(np.float32)
    stripe = {"stripe": page.TILE} if kind == "cyclic" else {}
    order = te.load_balanced_order(length, 4, kind=kind, **stripe)
    mesh, spec = jax.make_mesh((4,), ("context",)), jax.P(None, "context")
    ring = jax.shard_map(page.ring_attention, mesh=mesh, in_specs=spec, out_specs=spec)
    with jax.set_mesh(mesh):
        place = lambda array: jax.device_put(jnp.asarray(array), jax.NamedSharding(mesh, spec))
        taken = jax.tree.map(place, tokens.take(order))
        attend = jax.jit(functools.partial(with_gradients, functools.partial(ring, taken)))
        got = attend([place(each[:, order]) for each in heads])
    mask = te.AttentionMask(tokens, causal=True).dense()
    expected = with_gradients(functools.partial(dense_attention, mask), list(heads))
    near(got, jax.tree.map(lambda array: array[:, order], expected))


@pytest.mark.slow
def test_busiest_device_is_found_among_all_rows():
    page = functions_of(FOLDER / "contexts_over_devices.md", "busiest", "documents", "DEVICES")
    rows = np.concatenate([page.documents(2048, number) for number in (1, 5)])
    tokens = te.TokenPositions.from_segment_ids(rows)
    dense = np.equal(rows[:, :, None], rows[:, None]) & np.tri(2048, dtype=bool)
    dense &= rows[:, None] > 0
    blocks = dense.reshape(2, 16, 128, 16, 128).any((2, 4))
    work = blocks.sum((0, 2)).reshape(page.DEVICES, -1).sum(1)
    assert page.busiest(tokens, np.arange(2048)) == work.max() / work.mean()


# --- notebook 07


@pytest.mark.documentation
def test_attention_over_tiles_is_dense_attention():
    page = functions_of(FOLDER / "07_long_contexts.ipynb", "tiled_attention")
    rng = np.random.default_rng(1)
    tokens = te.TokenPositions.from_segment_ids(segment_ids_of(rng, 3, 64))
    rule = te.AttentionMask(tokens, causal=True, window=(9, 0))
    heads = rng.normal(size=(3, 3, 64, 2, 4)).astype(np.float32)
    tiled = functools.partial(page.tiled_attention, rule, tile=(16, 32))
    bias = te.alibi_bias(tokens.positions, tokens.positions, num_heads=2, causal=True)
    dense = functools.partial(dense_attention, rule.dense(), bias=bias)

    def expected(queries, *others):
        return dense(queries / 2, *others)

    near(*(jax.jit(functools.partial(with_gradients, f))(heads) for f in (tiled, expected)))


# --- recipes: reinforcement learning and preferences

TRAINING_RECIPES = FOLDER / "training_recipes.md"


def texts_of(rng, rows, length, side):
    """Ids padded on a side, a prompt of two tokens in each; and which of them were sampled."""
    lengths = rng.integers(3, length + 1, rows)
    places = np.arange(length)[None] - (length - lengths[:, None] if side == "left" else 0)
    is_token = (places >= 0) & (places < lengths[:, None])
    ids = np.where(is_token, rng.integers(4, 128, (rows, length)), 0)
    return jnp.asarray(ids), is_token & (places >= 2)


def plain_log_probs(page, params, ids):
    """Of each token after those before it, from whole logits: [batch, length] and all of them."""
    x = page.embedder.apply(params, None, ids, is_training=False)
    logits = te.linear_logits(x, page.embedder.output(params))
    log_probs = jnp.pad(jax.nn.log_softmax(logits)[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return jnp.take_along_axis(log_probs, ids[..., None], axis=-1)[..., 0], log_probs


@pytest.mark.documentation
@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_of_grpo_equals_whole_logits(side):
    page = functions_of(TRAINING_RECIPES, "embedder", "grpo_loss", "policy")
    rng = np.random.default_rng(2)
    ids, is_sampled = texts_of(rng, 5, 9, side)
    params = page.embedder.init(jax.random.key(3))
    old, advantages = rng.normal(-5, 0.1, ids.shape), rng.normal(size=len(ids))
    batch = ids, is_sampled, jnp.float32(advantages), jnp.float32(old)

    def expected(params):
        log_probs, every = plain_log_probs(page, params, ids)
        log_probs = jnp.where(is_sampled, log_probs, old)
        entropy = -jnp.sum(jnp.exp(every) * jnp.maximum(every, -1e30), axis=-1)
        ratio, difference = jnp.exp(log_probs - old), old - log_probs
        gain = jnp.minimum(
            ratio * advantages[:, None], jnp.clip(ratio, 0.8, 1.2) * advantages[:, None]
        )
        kl = jnp.exp(difference) - difference - 1
        return -jnp.mean(gain - 0.04 * kl + 0.01 * entropy, where=is_sampled)

    same_losses(lambda params: page.grpo_loss(params, *batch), expected, params)


@pytest.mark.documentation
@pytest.mark.parametrize("lengths", [[0, 3, 2], [2, 0, 1]], ids=str)
def test_answers_that_share_a_prompt_are_answers_alone(lengths):
    """An answer of length 0 must not shift the advantages of those after it."""
    rng = np.random.default_rng(4)
    answers = [rng.integers(4, 128, length).tolist() for length in lengths]
    ids = jnp.array([[5, 6, *itertools.chain(*answers), 0, 0]])
    given = {"prompt_length": 2, "lengths": lengths, "shared_ids": ids}
    given["advantages"] = jnp.arange(1.0, len(lengths) + 1)
    names = "embedder", "hidden", "shared_policy", "parents", "is_answer", "token_advantages"
    page = functions_of(TRAINING_RECIPES, *names, **given)
    params, expected = page.embedder.init(jax.random.key(0)), []
    for number, answer in enumerate(answers):
        alone = jnp.array([[5, 6, *answer]])
        x = page.hidden(params, alone, te.TokenPositions.from_ids(alone, pad_id=0))
        log_probs = jax.nn.log_softmax(te.linear_logits(x, page.embedder.output(params)))
        expected += [(log_probs[0, 1 + n, token], number + 1) for n, token in enumerate(answer)]
    got = page.shared_policy(params, ids, page.parents, page.is_answer)
    near(np.stack([got, page.token_advantages], -1)[page.is_answer], np.array(expected))


# --- recipes: decoding

DECODING_RECIPES = FOLDER / "decoding_recipes.md"


@pytest.fixture(scope="module")
def decoding():
    """The page's functions, for texts of eight tokens, weights, and prompts of several lengths."""
    names = "hidden_and_cache", "lm", "init", "VOCAB", "END", "generate", "beam_search", "serve"
    names += "decode_greedily", "decode_with_guesses"
    page = functions_of(DECODING_RECIPES, *names, STEPS=8)
    weights = page.init(jax.random.key(8))

    @jax.jit
    def read(ids):
        x, _ = page.hidden_and_cache(weights, ids, te.TokenPositions.from_ids(ids, pad_id=0))
        return te.linear_logits(x[0], page.lm.output(weights["embed"]))

    def logits_of(text):
        """Of the token after each token of a text, which is read at once, without padding."""
        text = [token for token in text if token]
        return np.asarray(read(jnp.array([text + [0] * (16 - len(text))])))[: len(text)]

    def greedy(text, steps):
        for _ in range(steps):
            text = [*text, int(logits_of(text)[-1].argmax())]
        return text[-steps:]

    page.logits_of, page.greedy, rng = logits_of, greedy, np.random.default_rng(6)
    prompts = rng.integers(2, page.VOCAB, (6, 4)) * (np.arange(4) >= rng.integers(0, 4, (6, 1)))
    return page, weights, jnp.asarray(prompts)


@pytest.mark.documentation
def test_guesses_decode_the_greedy_text_to_its_end(decoding):
    page, weights, _ = decoding
    some = [[0, 3], [2, 3, 4], [2, 3, 4, 5], [2, 5]]
    prompts = np.stack(np.meshgrid(*some), -1).reshape(-1, 4)
    greedy = page.decode_greedily(weights, jnp.asarray(prompts), 8)
    for row in range(0, len(prompts), 9):
        assert greedy[row].tolist() == page.greedy(prompts[row].tolist(), 8)
    guessed, _ = page.decode_with_guesses(weights, jnp.asarray(prompts))
    np.testing.assert_array_equal(guessed, greedy)


@pytest.mark.documentation
def test_sampling_in_a_scan_has_the_logits_of_whole_texts(decoding):
    page, weights, prompts = decoding
    sample = jax.jit(page.generate, static_argnames="steps")
    sampled, logits = sample(weights, prompts, jax.random.key(1), steps=6)
    for row, prompt in enumerate(prompts.tolist()):
        new = [token for token in sampled[row].tolist() if token]
        near(logits[row, : len(new)], page.logits_of(prompt + new)[-len(new) - 1 : -1])


@pytest.mark.documentation
def test_a_search_with_enough_beams_finds_the_best_of_all_texts(decoding):
    page, weights, prompts = decoding
    texts, scores = page.beam_search(weights, prompts[0], beams=25, steps=2)
    log_probs = lambda *new: jax.nn.log_softmax(page.logits_of([*prompts[0].tolist(), *new])[-1])
    first, expected = log_probs(), {(page.END, 0): float(log_probs()[page.END])}
    for one in set(range(1, page.VOCAB)) - {page.END}:
        second = log_probs(one)
        expected |= {(one, two): float(first[one] + second[two]) for two in range(1, page.VOCAB)}
    best = sorted(expected.items(), key=lambda item: -item[1])[:25]
    near(scores[: len(best)], np.array([score for _, score in best]))
    assert list(map(tuple, texts[: len(best)].tolist())) == [text for text, _ in best]


@pytest.mark.documentation
def test_continuous_batching_answers_as_each_prompt_alone(decoding):
    page, weights, prompts = decoding
    right = np.array([sorted(row, key=lambda token: token == 0) for row in prompts.tolist()])
    for prompt, answer in zip(right, page.serve(weights, right), strict=True):
        assert answer == page.greedy(prompt.tolist(), 12)[: len(answer)]
        assert answer[-1] == page.END or len(answer) == 12


def test_sampling_keeps_the_most_probable_ids():
    page = functions_of(DECODING_RECIPES, "keep_top_k", "keep_top_p", "keep_min_p")
    logits = np.random.default_rng(12).normal(size=(50, 9)).astype(np.float32) * 2
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    keep = lambda logits: (
        page.keep_top_k(logits, 3),
        page.keep_top_p(logits, 0.8),
        page.keep_min_p(logits, 0.2),
    )
    got = [np.asarray(each) for each in jax.jit(keep)(logits)]
    for row, of_row in enumerate(probs):
        best_first = np.argsort(-of_row)
        enough = 1 + int(np.argmax(np.cumsum(of_row[best_first]) >= 0.8))
        wanted = [set(best_first[:3]), set(best_first[:enough])]
        wanted.append({index for index, p in enumerate(of_row) if p >= 0.2 * of_row.max()})
        kept = [set(np.flatnonzero(np.isfinite(each[row]))) for each in got]
        assert kept == wanted
    near(np.where(np.isfinite(got[1]), got[1], logits), logits)


# --- recipes: images, and layers inside a model

IMAGE_AND_MESH_RECIPES = FOLDER / "image_and_mesh_recipes.md"


def test_a_packed_patch_has_the_point_of_its_own_image():
    page = functions_of(IMAGE_AND_MESH_RECIPES, "pack")
    points, images = page.pack([(1, 3), (2, 2), (3, 1)], 12)
    expected = [(0, 0), (0, 1), (0, 2), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (1, 0), (2, 0)]
    np.testing.assert_array_equal(points[:10], expected)
    assert images.tolist() == [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 0, 0]


def test_axial_rotary_rotates_each_part_of_a_head_by_its_axis():
    page, rng = functions_of(IMAGE_AND_MESH_RECIPES, "axial_rotary"), np.random.default_rng(9)
    x, points = rng.normal(size=(3, 5, 2, 12)).astype(np.float32), rng.integers(-9, 99, (3, 5, 3))
    parts = zip(np.split(x, 3, axis=-1), np.moveaxis(points, -1, 0), strict=True)
    expected = np.concatenate([te.apply_rotary(*part, base=50.0) for part in parts], axis=-1)
    near(page.axial_rotary(x, points, base=50.0), expected)


def test_positions_of_images_go_on_from_text_in_packed_rows():
    page = functions_of(IMAGE_AND_MESH_RECIPES, "vision_positions")
    ids = np.array([[5, 9, 9, 6, 0, 0], [0, 9, 9, 7, 8, 8]])
    segment_ids = np.array([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 2, 2]])
    got = page.vision_positions(ids, segment_ids, {9: [(1, 2, 4, 1), (1, 4, 2, 1)]})
    assert got[0].tolist() == [[0] * 3, [1, 1, 1], [1, 1, 2], [3] * 3, [0] * 3, [0] * 3]
    assert got[1].tolist() == [[0] * 3, [0] * 3, [0, 1, 0], [2] * 3, [0] * 3, [1] * 3]


@pytest.mark.documentation
def test_an_empty_bag_has_the_mean_0():
    page = functions_of(IMAGE_AND_MESH_RECIPES, "loss_fn", "params")
    items, bags = jnp.array([3, 3, 8]), jnp.array([0, 0, 2])
    targets = jnp.array([1.0, 2.0, 3.0])
    params = {"items": page.params["items"][:10], "head": jnp.arange(16.0)}

    def expected(params):
        means = jnp.stack([params["items"][3], jnp.zeros(16), params["items"][8]])
        return jnp.mean((means @ params["head"] - targets) ** 2)

    same_losses(lambda params: page.loss_fn(params, items, bags, targets), expected, params)


# --- small recipes

LAYER_RECIPES = FOLDER / "layer_recipes.md"


@pytest.fixture(scope="module")
def layers():
    """The page's functions, parameters, and ids of other rows with padding on the right."""
    names = [
        "embedder",
        "params",
        "config",
        "VOCAB",
        "WIDTH",
        "TABLE_PATH",
        "accumulated_gradients",
        "lora_loss",
    ]
    names += [
        "class_logits",
        "tagging_loss",
        "log_normaliser",
        "soft_label_loss",
        "label_parameters",
    ]
    names += ["encoder_decoder_loss", "label_frozen_tables", "sampled_softmax_loss"]
    names += ["allowed_log_probs"]
    page, rng = functions_of(LAYER_RECIPES, *names), np.random.default_rng(13)
    lengths = np.array([[7], [3], [1], [5]])
    ids = np.where(np.arange(7) < lengths, rng.integers(1, page.VOCAB, (4, 7)), 0)
    page.table = jnp.asarray(rng.normal(size=(page.VOCAB, page.WIDTH)), jnp.float32)
    return page, rng, jnp.asarray(ids)


def plain_loss(x, table, labels, is_counted):
    """The mean cross-entropy from whole logits; id 0 is never predicted."""
    logits = jnp.where(jnp.arange(len(table)) == 0, -jnp.inf, x @ table.T)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(is_counted, log_probs, 0)) / is_counted.sum()


@pytest.mark.documentation
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_accumulated_gradients_equal_the_whole_batch(layers, parts):
    page, _, ids = layers
    start = te.TokenPositions.from_ids(ids, pad_id=0)

    def expected(params):
        table = params[page.TABLE_PATH]["embeddings"]
        x = table[ids] * (ids != 0)[..., None] * page.WIDTH**0.5
        x = x + te.sinusoidal_encoding(start.positions, page.WIDTH)
        return plain_loss(x[:, :-1], table, ids[:, 1:], ids[:, 1:] != 0)

    want = jax.value_and_grad(expected)(page.params)
    near(page.accumulated_gradients(page.params, ids, parts), want)


@pytest.mark.documentation
def test_loss_of_lora_equals_the_sum_of_tables(layers):
    page, rng, ids = layers
    lora = {"down": rng.normal(size=(page.VOCAB, 2)), "up": rng.normal(size=(2, page.WIDTH))}
    lora = jax.tree.map(jnp.float32, lora)

    def expected(lora):
        table = page.table + lora["down"] @ lora["up"]
        return plain_loss(table[ids][:, :-1], table, ids[:, 1:], ids[:, 1:] != 0)

    same_losses(lambda lora: page.lora_loss(lora, page.table, ids), expected, lora)


@pytest.mark.documentation
def test_classes_and_tags_leave_out_padding(layers):
    page, rng, ids = layers
    head = jnp.asarray(rng.normal(size=(page.WIDTH, 3)), jnp.float32)
    params, tags = {"embed": page.params, "head": head}, rng.integers(0, 3, ids.shape)

    def vectors(params):
        table = params["embed"][page.TABLE_PATH]["embeddings"] * page.WIDTH**0.5
        encoding = te.sinusoidal_encoding(np.arange(ids.shape[1]), page.WIDTH)
        rows = zip(ids, np.count_nonzero(np.asarray(ids), axis=1), strict=True)
        return [table[row[:length]] + encoding[:length] for row, length in rows]

    def expected_classes(params):
        return sum(jnp.sin(x.mean(0) @ params["head"]).sum() for x in vectors(params))

    def expected_tags(params):
        logits = jnp.concatenate([x @ params["head"] for x in vectors(params)])
        labels = tags[np.asarray(ids) != 0]
        return -jax.nn.log_softmax(logits)[np.arange(len(labels)), labels].mean()

    classes = lambda params: jnp.sin(page.class_logits(params, ids)).sum()
    same_losses(classes, expected_classes, params)
    same_losses(lambda params: page.tagging_loss(params, ids, tags), expected_tags, params)


@pytest.mark.documentation
def test_normalisers_and_soft_labels_equal_whole_logits(layers):
    page, rng, ids = layers
    x = jnp.asarray(rng.normal(size=(*ids.shape, page.WIDTH)), jnp.float32)
    label_ids = jnp.asarray(rng.integers(0, page.VOCAB, (*ids.shape, 3)))
    label_probs = jnp.asarray(rng.dirichlet(np.ones(3), ids.shape), jnp.float32)
    log_probs = lambda x: jax.nn.log_softmax(x @ page.table.T)

    def soft(x):
        output = te.OutputLayer(page.table)
        return page.soft_label_loss(x, output, label_ids, label_probs)

    def expected_soft(x):
        label_log_probs = jnp.take_along_axis(log_probs(x), label_ids, -1)
        return -(label_probs * label_log_probs).sum(-1).mean()

    same_losses(soft, expected_soft, x)
    same_losses(
        lambda x: jnp.sin(page.log_normaliser(x, page.table, ids)).sum(),
        lambda x: jnp.sin(jax.nn.logsumexp(x @ page.table.T, axis=-1)).sum(),
        x,
    )


@pytest.mark.documentation
def test_two_stacks_share_one_table(layers):
    page, rng, ids = layers
    target = jnp.asarray(rng.integers(1, page.VOCAB, (4, 5)))
    model = hk.without_apply_rng(hk.transform(page.encoder_decoder_loss))
    params = {page.TABLE_PATH: {"embeddings": page.table}}
    assert jax.tree.structure(model.init(jax.random.key(0), ids, target)) == (
        jax.tree.structure(params)
    )

    def expected(params):
        table = params[page.TABLE_PATH]["embeddings"]
        embedded = lambda ids: (
            table[ids] * (ids != 0)[..., None] * page.WIDTH**0.5
            + te.sinusoidal_encoding(np.arange(ids.shape[1]), page.WIDTH)
        )
        keys, queries = embedded(ids), embedded(target)
        scores = jnp.einsum("btd,bsd->bts", queries, keys) / page.WIDTH**0.5
        scores = jnp.where((ids != 0)[:, None], scores, -jnp.inf)
        x = queries + jax.nn.softmax(scores) @ keys
        return plain_loss(x[:, :-1], table, target[:, 1:], target[:, 1:] != 0)

    same_losses(lambda params: model.apply(params, ids, target), expected, params)


@pytest.mark.documentation
def test_sampled_softmax_leaves_out_the_label_among_the_samples(layers):
    page, rng, _ = layers
    x = jnp.asarray(rng.normal(size=(6, page.WIDTH)), jnp.float32)
    labels, sampled = jnp.array([3, 4, 3, 9, 1, 0]), jnp.array([5, 3, 3, 7, 9])
    log_q = jnp.asarray(rng.normal(size=page.VOCAB), jnp.float32)

    def expected(x):
        losses = []
        for row, label in zip(x, labels.tolist(), strict=True):
            logits = page.table @ row - log_q
            others = [logits[n] for n in sampled.tolist() if n != label]
            every = jnp.stack([logits[label], *others])
            losses.append(jax.nn.logsumexp(every) - logits[label])
        return sum(losses) / len(losses)

    loss = lambda x: page.sampled_softmax_loss(x, page.table, labels, sampled, log_q)
    same_losses(loss, expected, x)


@pytest.mark.documentation
def test_banned_ids_have_no_probability(layers):
    page, rng, _ = layers
    x = jnp.asarray(rng.normal(size=(6, page.WIDTH)), jnp.float32) / 4
    labels = jnp.array([3, 4, 3, 9, 1, 0])
    banned = (labels[:, None] + jnp.array([1, 5, 7])) % page.VOCAB

    def expected(x):
        logits = (x @ page.table.T).at[jnp.arange(6)[:, None], banned].set(-jnp.inf)
        return jnp.sin(jax.nn.log_softmax(logits)[jnp.arange(6), labels]).sum()

    output = te.OutputLayer(page.table)
    same_losses(
        lambda x: jnp.sin(page.allowed_log_probs(x, output, labels, banned)).sum(), expected, x
    )


def test_labels_of_parameters_name_tables_matrices_and_vectors(layers):
    page, *_ = layers
    options = {"output": te.OutputConfig(tied=False, bias=True), "layer_norm_eps": 1e-6}
    config = te.EmbedderConfig(8, 4, te.Learned(9), **options)
    params = drawn(te.Embedder(config).init) | {"linear": {"w": np.ones((2, 2))}}
    labels = jax.tree.leaves(page.label_parameters(params))
    assert {label: labels.count(label) for label in labels} == {
        "table": 3,
        "matrix": 1,
        "vector": 3,
    }
    assert set(jax.tree.leaves(page.label_frozen_tables(page.params))) == {"frozen"}


# --- when something is wrong


@pytest.mark.documentation
def test_calls_that_find_a_fault_print_the_output_of_the_page(capfd):
    """Each line `print(...)  # text` prints the text before a semicolon or a colon and a space."""
    namespace = {}
    for block in blocks_of(FOLDER / "when_something_is_wrong.md"):
        exec(compile(block, block.splitlines()[0], "exec"), namespace)
        said = re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)
        printed = capfd.readouterr().out
        for text in said:
            wanted = re.split(r"; |: (?=[a-z]+ \d)| \.\.\.", text)[0]
            assert wanted in printed, (wanted, printed)


# --- losses


@pytest.mark.documentation
def test_a_stored_top_k_may_have_fewer_allowed_ids_than_k():
    page = functions_of(FOLDER / "losses.md", "top_k_loss", "output", "teacher")
    rng = np.random.default_rng(10)
    ids = rng.integers(1, 50, (3, 7)) * (np.arange(7) >= [[2], [0], [6]])
    x, teacher_x = (np.float32(rng.normal(size=(3, 7, width))) for width in (16, 32))
    bias = jnp.full(50, -jnp.inf).at[jnp.array([4, 9, 30])].set(0.0)
    teacher = te.OutputLayer(page.teacher.table, bias, pad_id=0)
    stored = te.linear_top_k(teacher_x, teacher, 5)

    def expected(x):
        logits = (x @ page.output.table.T).at[..., 0].set(-jnp.inf)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), stored[1], -1)
        terms = jnp.exp(stored[0]) * jnp.where(jnp.isfinite(stored[0]), log_probs, 0)
        return -jnp.sum(terms, where=(ids != 0)[..., None]) / (ids != 0).sum()

    same_losses(lambda x: page.top_k_loss(x, *stored, jnp.asarray(ids != 0)), expected, x)


# --- objectives

OBJECTIVES = FOLDER / "objectives.md"


@pytest.mark.documentation
def test_a_loss_of_gathered_tokens_is_that_of_the_chosen_tokens():
    loss_of_chosen = functions_of(OBJECTIVES, "loss_of_chosen").loss_of_chosen
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 7, 4)).astype(np.float32)
    table = rng.normal(size=(11, 4)).astype(np.float32)
    ids = jnp.asarray(rng.integers(0, 11, (3, 7)))
    is_chosen = jnp.asarray(rng.random((3, 7)) < 0.3)
    count = int(is_chosen.sum())
    for most in (count, count + 2, 21):
        same_losses(
            lambda arrays, most=most: loss_of_chosen(*arrays, ids, is_chosen, most),
            lambda arrays: te.linear_cross_entropy(*arrays, ids, mask=is_chosen),
            (x, table),
        )


@pytest.mark.documentation
def test_vectors_of_two_towers_do_not_see_padding_and_an_empty_text_is_0():
    page = functions_of(OBJECTIVES, "vectors", "hk")
    vectors = page.hk.without_apply_rng(page.hk.transform(page.vectors))
    ids = jnp.array([[0, 0, 5, 6], [5, 6, 0, 0], [0, 0, 0, 0]])
    params = vectors.init(jax.random.key(0), ids)
    got, pull = jax.vjp(jax.jit(lambda params: vectors.apply(params, ids)), params)
    alone = vectors.apply(params, ids[:1, 2:])[0]
    near(got, np.stack([alone, alone, np.zeros_like(alone)]))
    near(jnp.linalg.norm(got, axis=1), np.float32([1, 1, 0]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(pull(got)))


@pytest.mark.documentation
def test_image_vectors_take_the_places_of_their_row_and_see_their_own_image():
    page = functions_of(OBJECTIVES, "merge", "IMAGE", "WIDTH")
    ids = jnp.array([[0, 5, 3, 3, 3, 6], [3, 7, 3, 3, 8, 0]])
    patches = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, page.WIDTH)), jnp.float32)
    params = page.merge.init(jax.random.key(0), ids, patches)
    x, mask = page.merge.apply(params, ids, patches)
    images, is_token = np.array([[0, 0, 1, 1, 1, 0], [1, 0, 2, 2, 0, 0]]), np.asarray(ids != 0)
    same = (images[:, :, None] == images[:, None]) & (images[:, None] > 0)
    expected = (np.tri(6, dtype=bool) | same) & is_token[:, None]
    np.testing.assert_array_equal(mask[:, 0][is_token], expected[is_token])
    for row in range(2):
        keep = np.flatnonzero(is_token[row])
        alone, _ = page.merge.apply(params, ids[row : row + 1, keep], patches[row : row + 1])
        near(x[row, keep], alone[0])


# --- mask patterns


# Patterns as the page calls them, and the pairs that each allows inside a document: of positions q
# and k, flags f and g, and groups a and b, of a query and of a key.
PATTERNS = {
    "longformer(tokens, flags, reach)": "(abs(q - k) <= reach) | f | g",
    "dilated(tokens, step, reach)": "(k <= q) & (q - k <= step * reach) & ((q - k) % step == 0)",
    "strided(tokens, step)": "(k <= q) & ((q - k < step) | ((q - k) % step == 0))",
    "neighbouring_chunks(tokens, size)": "(k <= q) & (q // size - k // size <= 1)",
    "block_causal(tokens, size)": "k // size <= q // size",
    "prefix(tokens, flags)": "(k <= q) | (f & g)",
    "images(tokens, np.where(groups > 0, groups, -1))": "(k <= q) | ((a == b) & (b > 0))",
    "strictly_before(tokens)": "k < q",
    "other_groups(tokens, groups)": "a != b",
    "noisy_and_clean(tokens, size, flags)": "np.where(f, np.where(g, q // size == k // size, k // size < q // size), ~g & (k // size <= q // size))",
}


@functools.cache
def pattern_of(name):
    """The page's function, which is read out of the page once."""
    return vars(functions_of(FOLDER / "mask_patterns.md", name))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("call", "pairs"), PATTERNS.items())
def test_patterns_of_masks_hold_in_other_batches(call, pairs, seed):
    name, rng = call.partition("(")[0], np.random.default_rng(seed)
    tokens = te.TokenPositions.from_segment_ids(segment_ids_of(rng, 3, 24))
    segments, flags = np.asarray(tokens.segment_ids), rng.random((3, 24)) < 0.2
    groups, sizes = rng.integers(0, 3, (3, 24)), rng.integers(1, 6, 3).tolist()
    names = {"np": np, "tokens": tokens, "flags": flags, "groups": groups}
    names |= dict(zip(("step", "size", "reach"), sizes, strict=True))
    for array, (of_query, of_key) in ((tokens.positions, "qk"), (flags, "fg"), (groups, "ab")):
        names |= {of_query: np.asarray(array)[:, :, None], of_key: np.asarray(array)[:, None]}
    mask = eval(call, names | pattern_of(name))
    allowed = (segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0)
    allowed &= eval(pairs, names)
    np.testing.assert_array_equal(np.asarray(mask.dense())[:, 0], allowed)


def test_text_sees_its_latest_image_and_a_token_of_a_tree_few_ancestors():
    page = functions_of(FOLDER / "mask_patterns.md", "latest_image", "tree_in_a_window")
    images, of_patches = (
        np.array([[0, 1, 1, 2, 2], [0, 0, 1, 0, 3]]),
        np.array([[1, 1, 2], [1, 3, 0]]),
    )
    texts = te.TokenPositions.from_segment_ids([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]])
    got = page.latest_image(texts, images, te.TokenPositions.from_segment_ids(of_patches)).dense()
    expected = (images[:, :, None] == of_patches[:, None]) & (images[:, :, None] > 0)
    np.testing.assert_array_equal(np.asarray(got)[:, 0], expected)
    tree = te.TokenPositions.from_parents([[-1, 0, 1, 1, 3, -1, -2]])
    mask = np.asarray(page.tree_in_a_window(tree, 2).dense())
    seen = [np.flatnonzero(row).tolist() for row in mask[0, 0]]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [1, 3, 4], [5], []]


# --- training loops


def dense_step(loss, params, optimizer, state):
    updates, state = optimizer.update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, updates), state


@pytest.mark.documentation
def test_steps_by_rows_are_dense_steps():
    """With Adagrad, which leaves a row without a gradient as it is. Some ids repeat."""
    batches = np.random.default_rng(14).integers(0, 30, (2, 8, 3))
    names = "loss_fn", "params", "optimizer", "state", "step", "many_steps", "scaled_step", "jmp"
    names += "by_loop", "by_scan", "own_step", "checked_step", "mesh", "specs"
    page = functions_of(FOLDER / "training_loops.md", *names, batches=batches)
    start, shard = (page.params, page.state), functools.partial(jax.shard_map, mesh=page.mesh)

    @jax.jit
    def dense(params, state, ids):
        mean = lambda params: page.loss_fn(params, ids)
        return dense_step(mean, params, page.optimizer, state)

    first = dense(*start, batches[0])
    near(page.step(*start, batches[0])[:2], first)
    near(page.many_steps(*start, batches), dense(*first, batches[1]))
    scale = page.jmp.StaticLossScale(jnp.float32(8.0))
    near(jax.jit(page.scaled_step)(*start, batches[0], scale), first)
    for parallel, checks in ((page.own_step, False), (page.checked_step, True)):
        step = jax.jit(shard(parallel, check_vma=checks, **page.specs))
        near(step(*start, batches[0])[:2], first)
    summed = dense(*start, batches.reshape(16, 3))
    near(page.by_loop(*start), summed)
    near(page.by_scan(*start, batches), summed)


# --- packed rows, and documents alone


def in_rows_of_their_own(segment_ids, *arrays):
    """Documents of two tokens or more, each in a row, padded on the right."""
    length = segment_ids.shape[1]
    documents = [
        (row, ids == n) for row, ids in enumerate(segment_ids) for n in np.unique(ids) if n
    ]
    documents = [(row, here) for row, here in documents if here.sum() > 1]

    def moved(values):
        rows = [values[row, here] for row, here in documents]
        return np.stack([np.pad(row, (0, length - len(row))) for row in rows])

    return [moved(np.asarray(each)) for each in (np.sign(segment_ids), *arrays)]


PROGRAM = FOLDER / "text_to_batches.py"
OF_PROGRAM = {"WIDTH": 16, "VOCAB_SIZE": 32, "LENGTH": 12}
KEY = jax.random.key(0)


def of_first_page(segment_ids, ids, _):
    page = functions_of(FOLDER / "start.md", "model")
    params = page.model.init(KEY, ids, segment_ids, is_training=False)
    apply = functools.partial(page.model.apply, is_training=False)
    return params, lambda params, segment_ids, ids, _: apply(params, None, ids, segment_ids)


def of_notebook(*_):
    page = functions_of(FOLDER / "02_masks.ipynb", "loss_of", "params")
    tokens_of = te.TokenPositions.from_segment_ids
    return page.params, lambda params, segment_ids, ids, _: page.loss_of(
        params, ids, tokens_of(segment_ids)
    )


def of_chats(segment_ids, ids, is_answer):
    page = functions_of(FOLDER / "objectives.md", "chats")
    params = page.chats.init(KEY, ids, segment_ids, is_answer)
    return params, lambda params, *arrays: page.chats.apply(params, arrays[1], arrays[0], arrays[2])


def of_program(segment_ids, ids, _):
    page = functions_of(PROGRAM, "MODEL", "sum_of_losses", **OF_PROGRAM)
    tokens = te.TokenPositions.from_segment_ids(segment_ids)
    params = jax.jit(page.MODEL.init, static_argnums=3)(KEY, ids, tokens, False)

    def loss(params, segment_ids, ids, _):
        positions = te.TokenPositions.from_segment_ids(segment_ids).positions
        batch = {"ids": ids, "ids_positions": positions, "ids_segment_ids": segment_ids}
        total, count = page.sum_of_losses(params, batch, None, is_training=False)
        return total / count

    return params, loss


@pytest.mark.documentation
@pytest.mark.parametrize("page", [of_first_page, of_notebook, of_chats, of_program])
def test_loss_of_packed_rows_equals_documents_alone(page):
    rng = np.random.default_rng(12)
    segment_ids = segment_ids_of(rng, 3, 12)
    ids = np.where(segment_ids, rng.integers(4, 8, segment_ids.shape), 0)
    batch = segment_ids, ids, rng.random(ids.shape) < 0.5
    params, loss = page(*batch)
    step = jax.jit(jax.value_and_grad(loss))
    near(step(params, *batch), step(params, *in_rows_of_their_own(*batch)), rtol=1e-3, atol=1e-4)


@pytest.mark.documentation
def test_loss_of_answers_reads_earlier_tokens_and_is_0_without_answers():
    segment_ids = np.array([[0, 1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
    ids, is_answer = np.where(segment_ids, 9, 0), segment_ids == 2
    params, loss = of_chats(segment_ids, ids, is_answer)
    of_batch = lambda ids, is_answer: jax.jit(loss)(params, segment_ids, ids, is_answer)
    other = np.where(segment_ids == 2, 5 + np.arange(9), ids)
    assert of_batch(ids, is_answer) != of_batch(other, is_answer)
    assert of_batch(ids, np.zeros_like(is_answer)) == 0


@pytest.mark.documentation
def test_texts_of_the_program_equal_prompts_alone():
    pytest.importorskip("grain")
    page = functions_of(PROGRAM, "MODEL", "generate", **OF_PROGRAM)
    of_text = functools.partial(te.TokenPositions.from_offset, 0)
    prompts, lengths = np.array([[5, 6, 7, 0, 0], [8, 0, 0, 0, 0]]), np.array([3, 1])
    params = jax.jit(page.MODEL.init, static_argnums=3)(KEY, prompts, of_text(5), False)

    @jax.jit
    def likeliest(ids):
        x, output = page.MODEL.apply(params, None, ids, of_text(ids.shape[1]), False)
        return te.linear_logits(x[0, -1], output).argmax()

    texts = page.generate(params, KEY, prompts, lengths, steps=2, top_p=1e-6)
    for row, length in enumerate(lengths):
        text = prompts[row, :length].tolist()
        while len(text) < length + 2 and text[-1] != 1:
            text.append(int(likeliest(jnp.array([text]))))
        assert texts[row, : len(text)].tolist() == text


# --- notebooks


def test_scores_of_rotations_are_cosines_of_distances():
    page = functions_of(FOLDER / "03_positions.ipynb", "rotary_scores")
    keys, frequencies = np.array([-9, 3, 4000]), 1e4 ** (-np.arange(32) / 32)
    cosines = np.cos((70 - keys)[:, None] * frequencies)
    near(page.rotary_scores(70, keys), np.float32(2 * cosines.sum(1) / 8))


@pytest.mark.documentation
def test_bits_of_bytes_do_not_depend_on_later_bytes():
    page = functions_of(FOLDER / "04_train_a_transformer.ipynb", "bits", "models", CONTEXT=8)
    windows = np.random.default_rng(16).integers(0, 256, (2, 13), np.uint8)
    for scheme, model in page.models.items():
        params = drawn(model.init, windows)
        near(page.bits(scheme, params, windows)[:, :6], page.bits(scheme, params, windows[:, :7]))


@pytest.mark.documentation
def test_a_decoder_samples_after_right_padding_as_without_it(tmp_path):
    names = "generate", "load", "function_of", "PAD"
    page = functions_of(FOLDER / "08_a_whole_decoder.ipynb", *names)
    zipfile.ZipFile(FOLDER / "data" / "decoders.zip").extractall(tmp_path)
    model = page.load(tmp_path / "opt")
    prompts = np.array([[5, 7, 9, page.PAD, page.PAD], [6, 8, 3, 20, 11]])
    draw = jax.jit(functools.partial(page.generate, model, steps=4, temperature=1.0))
    new, logits = draw(model.params, prompts, jax.random.key(0))
    for row, prompt in enumerate(prompts):
        text = np.append(prompt[prompt != page.PAD], new[row])[None]
        tokens = te.TokenPositions.from_offset(0, text.shape[1])
        alone, _ = jax.jit(page.function_of(model))(model.params, text, tokens)
        near(logits[row], alone[0, -5:-1], rtol=1e-3)


@pytest.mark.documentation
def test_every_parameter_of_a_decoder_has_a_gradient(tmp_path):
    """Gemma 4 reads a second embedding in each layer, which must not be frozen in silence."""
    page = functions_of(FOLDER / "08_a_whole_decoder.ipynb", "PAD", "function_of", "load")
    zipfile.ZipFile(FOLDER / "data" / "decoders.zip").extractall(tmp_path)
    model = page.load(tmp_path / "gemma_4")
    ids = np.array([[5, 7, 9, 11, 6]])
    tokens = te.TokenPositions.from_ids(ids, pad_id=page.PAD)
    loss = lambda params: jnp.square(page.function_of(model)(params, ids, tokens)[0]).mean()
    params = jax.tree.map(jnp.asarray, model.params)
    gradients = jax.jit(jax.grad(loss))(params)
    assert all(jnp.any(gradient) for gradient in jax.tree.leaves(gradients["per_layer_inputs"]))
    frozen = [name for name, leaves in gradients.items() if not any(map(jnp.any, leaves.values()))]
    # The last layers read the keys and values of earlier ones.
    assert all(name.endswith("value_norm") for name in frozen), frozen
