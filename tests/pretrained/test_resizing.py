"""Tables with more or fewer rows: the vocabulary, and learned positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal, near
from drawn import drawn
from meshes import mesh_of, put
from references import check
from refused import refused
from sample import KEY, POSITIONS, TOKENS

import transformer_embed as te

CONFIG = te.EmbedderConfig(
    11, 4, scheme=te.Learned(4), output=te.OutputConfig(tied=False, bias=True)
)
PARAMS = drawn(te.Embedder(CONFIG).init)


def resized_to(params, vocab_size, old=CONFIG, **options):
    new = dataclasses.replace(old, vocab_size=vocab_size)
    return te.pretrained.resize(params, old, new, **options)


@pytest.mark.slow
@pytest.mark.parametrize("size", [9, 14])
def test_a_resized_vocabulary_fits_its_config_and_changes_nothing_else(size):
    """The output layer has as many rows."""
    resized = resized_to(PARAMS, size, rng=KEY)
    embedder = te.Embedder(dataclasses.replace(CONFIG, vocab_size=size))
    last, past = np.asarray(embedder.apply(resized, None, [size - 1, size], is_training=False))
    assert np.isfinite(last).all()
    assert np.isnan(past).all()
    assert te.linear_logits(np.ones([1, 4], np.float32), embedder.output(resized)).shape == (
        1,
        size,
    )
    for name, leaf in PARAMS[TOKENS].items():
        kept = min(size, 11)
        equal(resized[TOKENS][name][:kept], leaf[:kept])
    assert resized.keys() == PARAMS.keys()
    assert resized[POSITIONS]["embeddings"] is PARAMS[POSITIONS]["embeddings"]


@pytest.mark.slow
def test_new_rows_are_drawn_like_each_channel_and_unlike_the_output_layer_s():
    channels = np.arange(1, 17, dtype=np.float32)
    old = np.random.default_rng(0).normal(1, 2, (200, 16)).astype(np.float32) * channels
    tables = {"embeddings": old, "output_embeddings": old}
    config = te.EmbedderConfig(200, 16, output=te.OutputConfig(tied=False))
    grown = resized_to({TOKENS: tables}, 4200, config, rng=KEY)[TOKENS]
    rows, others = (np.asarray(grown[name], np.float64) for name in tables)
    equal(rows[:200], old)
    # Five times the deviation of the mean of 4000 normal samples, 4000**-0.5, and of their deviation,
    # 8000**-0.5.
    near((rows[200:].mean(0) - old.mean(0)) / old.std(0), 0, atol=0.079)
    near(rows[200:].std(0) / old.std(0), 1, atol=0.0559)
    assert abs(np.corrcoef(rows[200:, 0], others[200:, 0])[0, 1]) < 0.1


@pytest.mark.parametrize("size", [5, 15])
def test_a_resized_table_keeps_its_dtype_and_needs_a_key_for_new_rows_alone(size):
    params = {TOKENS: {"embeddings": jnp.ones([11, 4], jnp.bfloat16)}}
    rng = KEY if size > 11 else None
    table = resized_to(params, size, te.EmbedderConfig(11, 4), rng=rng)[TOKENS]["embeddings"]
    assert isinstance(table, jax.Array)
    assert table.dtype == jnp.bfloat16


def at(max_len, **options):
    return te.EmbedderConfig(11, 4, scheme=te.Learned(max_len, **options))


def with_tokens(positions):
    tables = {TOKENS: np.zeros((11, 4), np.float32), POSITIONS: positions}
    return {path: {"embeddings": table} for path, table in tables.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_len", "start"), [(8, 0), (4, 0), (3, 0), (9, 2), (4, 2), (5, 3), (7, 4)]
)
def test_rows_from_the_start_on_are_interpolated(max_len, start):
    table = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    params, new = with_tokens(table), at(max_len, start=start)
    check(te.pretrained.resize, params, at(5, start=start), new)


def weights(old, new):
    """Of old points for new ones: Keys's cubic of a = -0.5, as wide as the wider of their steps."""
    step = old / new
    places = (np.arange(new)[:, None] + 0.5) * step - 0.5
    far = np.abs(places - np.arange(old)) / max(step, 1)
    near_by, beyond = 1.5 * far**3 - 2.5 * far**2 + 1, -0.5 * far**3 + 2.5 * far**2 - 4 * far + 2
    cubic = np.where(far < 1, near_by, np.where(far < 2, beyond, 0))
    return cubic / cubic.sum(1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(7, 5), (2, 3), (3, 4)])
def test_a_grid_is_resized_like_an_image(shape):
    """As by torch 2.13: interpolate(mode="bicubic", antialias=True), which gave `weights`."""
    table = np.random.default_rng(0).normal(size=(1 + 12, 4)).astype(np.float32)
    params = with_tokens(table)
    new, grids = at(1 + shape[0] * shape[1]), ((3, 4), shape)
    found = te.pretrained.resize(params, at(13), new, grids=grids)[POSITIONS]["embeddings"]
    along = weights(3, shape[0]), weights(4, shape[1])
    expected = np.einsum("ia,jb,abc->ijc", *along, table[1:].reshape(3, 4, 4).astype(np.float64))
    equal(found[0], table[0])
    near(found[1:], expected.reshape(-1, 4), atol=2e-6)


NONE = "params: ... got none among ['linear']"
KEYS = "rng: ... got int 0"


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("vocab_size", [11, 9, 20])
def test_rows_are_padded_and_spread_and_put_back(multiple, vocab_size):
    """Each id keeps its row, and rows without an id are zeros."""
    other = dataclasses.replace(CONFIG, vocab_size=vocab_size, row_multiple=multiple, spread=True)
    moved = te.pretrained.resize(PARAMS, CONFIG, other, rng=KEY)
    rows = te.Embedder(other).apply(moved, None, np.arange(20)[:4], is_training=False)
    equal(rows, te.Embedder(CONFIG).apply(PARAMS, None, np.arange(4), is_training=False))
    for leaf in moved[TOKENS].values():
        assert leaf.shape[0] == other.rows
        assert np.count_nonzero(np.asarray(leaf).reshape(other.rows, -1).any(1)) == vocab_size
    kept = min(vocab_size, 11)
    back = te.pretrained.resize(moved, other, CONFIG, rng=KEY)[TOKENS]
    for name, leaf in PARAMS[TOKENS].items():
        equal(back[name][:kept], leaf[:kept])


def test_a_table_on_a_mesh_keeps_its_sharding_and_needs_rows_that_divide():
    mesh = mesh_of((4,), ("x",))
    config = te.EmbedderConfig(12, 4)
    params = put(mesh, {TOKENS: {"embeddings": np.ones((12, 4), np.float32)}}, "x")
    moved = resized_to(params, 16, config, rng=KEY)[TOKENS]["embeddings"]
    assert (moved.shape, moved.sharding) == ((16, 4), params[TOKENS]["embeddings"].sharding)
    with refused(ValueError, f"params: {TOKENS}/embeddings: ... row_multiple), got 14"):
        resized_to(params, 14, config, rng=KEY)


def to(max_len, *, grids=None, **options):
    return changed(scheme=te.Learned(max_len, **options), grids=grids)


def changed(*, grids=None, **fields):
    return te.pretrained.resize(PARAMS, CONFIG, dataclasses.replace(CONFIG, **fields), grids=grids)


UNPLACED = {TOKENS: {"embeddings": np.zeros((11, 4), np.float32)}}


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: te.pretrained.resize(PARAMS, CONFIG, 14), TypeError, "new_config: ... got int 14"),
        (lambda: changed(d_model=8), ValueError, "new_config: ... got {'learned_positional_encoding/embeddings': (4, 4), ..."),
        (lambda: changed(embedding_width=2), ValueError, "new_config: wanted {'learned_positional_encoding/embeddings': (4, 2), ..."),
        (lambda: changed(layer_norm_eps=1e-6), ValueError, "new_config: wanted {'layer_norm/offset': (4,), ... got none of them"),
        (lambda: changed(num_token_types=2), ValueError, "new_config: wanted {'token_type_embedding/embeddings': (2, 4)}, got none of them"),
        (lambda: changed(output=None), ValueError, "new_config: wanted no others, got {'token_embedding/output_bias': (11,), ..."),
        (lambda: changed(output=te.OutputConfig(), spread=True), ValueError, "new_config.spread: wanted False ... got True"),
        (lambda: te.pretrained.resize(UNPLACED, te.EmbedderConfig(11, 4), at(9)), TypeError, "config.scheme.max_len: ... got None"),
        (lambda: resized_to(PARAMS, 14), ValueError, "rng: ... got None"),
        (lambda: resized_to(PARAMS, 14, rng=0), TypeError, KEYS),
        (lambda: resized_to({"linear": {}}, 14), ValueError, NONE),
        (lambda: to(9, start=2), ValueError, "new_config.scheme.start: ... 0, got 2"),
        (lambda: to(9, grids=((2, 3), (3, 3))), ValueError, "grids: ... got ((2, 3), (3, 3))"),
        (lambda: to(9, grids=((1, 3), (2, 2))), ValueError, "grids: ... got ((1, 3), (2, 2))"),
        (lambda: to(9, grids=((2, 2), (9,))), ValueError, "grids: ... got ((2, 2), (9,))"),
        (lambda: to(9, grids=(2, 2)), TypeError, "grids[0]: ... got int 2"),
        (lambda: changed(scheme=None), TypeError, "new_config.scheme.max_len: ... got None"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call, error, text):
    with refused(error, text):
        call()
