"""Tables with more or fewer rows. That ids keep their rows, and the weights of learned positions
on a line, are drawn in tests/layers/test_draws_layers.py."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from compare import equal, near
from drawn import drawn, normal
from meshes import mesh_of, put
from refused import each_raises
from sample import KEY, POSITIONS, TOKENS

import transformer_embed as te

CONFIG = te.EmbedderConfig(11, 4, te.Learned(4), output=te.OutputConfig(tied=False, bias=True))
PARAMS = drawn(te.Embedder(CONFIG).init)


def changed(params=PARAMS, config=CONFIG, rng=None, grids=None, keep_positions=False, **fields):
    new = dataclasses.replace(config, **fields)
    options = {"grids": grids, "keep_positions": keep_positions}
    return te.pretrained.resize(params, config, new, rng=rng, **options)


@pytest.mark.slow
def test_new_rows_are_drawn_like_each_channel_and_unlike_the_output_layer_s():
    old = (1 + 2 * normal(0, 200, 16)) * np.arange(1, 17, dtype=np.float32)
    tables = {"embeddings": old, "output_embeddings": old}
    config = te.EmbedderConfig(200, 16, output=te.OutputConfig(tied=False))
    grow = lambda tables: changed({TOKENS: tables}, config, KEY, vocab_size=4200)[TOKENS]
    grown = jax.jit(grow)(tables)
    rows, others = (np.asarray(grown[name], np.float64) for name in tables)
    equal(rows[:200], old)
    # Five times the deviation of the mean of 4000 normal samples, 4000**-0.5, and of their deviation,
    # 8000**-0.5.
    near((rows[200:].mean(0) - old.mean(0)) / old.std(0), 0, atol=0.079)
    near(rows[200:].std(0) / old.std(0), 1, atol=0.0559)
    assert abs(np.corrcoef(rows[200:, 0], others[200:, 0])[0, 1]) < 0.1


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
    table, config = normal(0, 1 + 12, 4), dataclasses.replace(CONFIG, scheme=te.Learned(13))
    params = PARAMS | {POSITIONS: {"embeddings": table}}
    scheme, grids = te.Learned(1 + shape[0] * shape[1]), ((3, 4), shape)
    found = jax.jit(lambda: changed(params, config, grids=grids, scheme=scheme)[POSITIONS])()
    along = weights(3, shape[0]), weights(4, shape[1])
    expected = np.einsum("ia,jb,abc->ijc", *along, table[1:].reshape(3, 4, 4).astype(np.float64))
    found = np.asarray(found["embeddings"])
    equal(found[0], table[0])
    near(found[1:], expected.reshape(-1, 4), atol=2e-6)


@pytest.mark.parametrize(("vocab_size", "multiple"), [(9, 1), (11, 8), (20, 8)])
def test_rows_are_padded_and_spread_and_put_back(vocab_size, multiple):
    """Each id keeps its row, and rows without an id are zeros; only new ones need a key."""
    other = dataclasses.replace(CONFIG, vocab_size=vocab_size, row_multiple=multiple, spread=True)
    key = KEY if vocab_size > 11 else None

    @jax.jit
    def found(params):
        moved = te.pretrained.resize(params, CONFIG, other, rng=key)
        assert moved[POSITIONS]["embeddings"] is params[POSITIONS]["embeddings"]
        back = te.pretrained.resize(moved, other, CONFIG, rng=KEY)
        rows = [
            te.Embedder(each).apply(tables, None, np.arange(4), is_training=False)
            for each, tables in ((CONFIG, params), (other, moved))
        ]
        return moved[TOKENS], back[TOKENS], rows

    moved, back, rows = found(PARAMS)
    equal(*rows)
    for leaf in moved.values():
        assert leaf.shape[0] == other.rows
        assert np.count_nonzero(np.asarray(leaf).reshape(other.rows, -1).any(1)) == vocab_size
    kept = min(vocab_size, 11)
    for name, leaf in PARAMS[TOKENS].items():
        equal(np.asarray(back[name])[:kept], np.asarray(leaf)[:kept])


@pytest.mark.parametrize("max_len", [3, 4, 4000])
@pytest.mark.parametrize("start", [0, 2])
def test_kept_positions_stay_and_new_ones_are_sampled_like_them(max_len, start):
    config = dataclasses.replace(CONFIG, scheme=te.Learned(4, start=start))
    scheme = te.Learned(max_len, start=start)
    old = np.asarray(PARAMS[POSITIONS]["embeddings"])
    move = lambda: changed(config=config, rng=KEY, scheme=scheme, keep_positions=True)
    new = np.asarray(jax.jit(move)()[POSITIONS]["embeddings"])
    equal(new[:4], old[:max_len])
    assert new.shape == (max_len, 4)
    if max_len > 4:
        # Five times the deviation of the mean of 4000 normal samples, and of their deviation.
        sampled = new[4:].astype(np.float64)
        mean, deviation = old[start:].mean(0), old[start:].std(0)
        near((sampled.mean(0) - mean) / deviation, 0, atol=0.08)
        near(sampled.std(0) / deviation, 1, atol=0.06)


TABLE = te.EmbedderConfig(12, 4)
SPLIT = put(mesh_of((4,), ("x",)), {TOKENS: {"embeddings": np.ones((12, 4), np.float32)}}, "x")
on_a_mesh = functools.partial(changed, SPLIT, TABLE, KEY)


def test_a_table_on_a_mesh_keeps_its_sharding():
    moved = on_a_mesh(vocab_size=16)[TOKENS]["embeddings"]
    assert (moved.shape, moved.sharding) == ((16, 4), SPLIT[TOKENS]["embeddings"].sharding)


LONGER = te.Learned(9)


def masked(module, **fields):
    """With a masked array for a table."""
    table = np.ma.masked_array(PARAMS[module]["embeddings"])
    return changed(PARAMS | {module: {**PARAMS[module], "embeddings": table}}, **fields)


REFUSED = {
    "te.pretrained.resize(PARAMS, CONFIG, 14)": "TypeError: new_config: ... got int 14",
    "changed(d_model=8)": "ValueError: new_config: params: ... got {'learned_positional_encoding/embeddings': (4, 4), ...",
    "changed(embedding_width=2)": "ValueError: new_config: params: wanted {'learned_positional_encoding/embeddings': (4, 2), ...",
    "changed(layer_norm_eps=1e-6)": "ValueError: new_config: params: wanted {'layer_norm/offset': (4,), ... got none of them",
    "changed(num_token_types=2)": "ValueError: new_config: params: wanted {'token_type_embedding/embeddings': (2, 4)}, got none of them",
    "changed(output=None)": "ValueError: new_config: params: wanted no others, got {'token_embedding/output_bias': (11,), ...",
    "changed(output=te.OutputConfig(), spread=True)": "ValueError: new_config.spread: wanted False ... got True",
    "changed({TOKENS: PARAMS[TOKENS]}, dataclasses.replace(CONFIG, scheme=None), scheme=LONGER)": "TypeError: config.scheme.max_len: ... got None",
    "changed(scheme=None)": "TypeError: new_config.scheme.max_len: ... got None",
    "changed(vocab_size=14)": "ValueError: rng: ... got None",
    "changed(vocab_size=14, rng=0)": "TypeError: rng: ... got int 0",
    "changed({'linear': {}}, vocab_size=14)": "ValueError: params: ... got none among ['linear']",
    "changed(scheme=te.Learned(9, start=2))": "ValueError: new_config.scheme.start: ... 0, got 2",
    "changed(scheme=LONGER, grids=((2, 3), (3, 3)))": "ValueError: grids: ... got ((2, 3), (3, 3))",
    "changed(scheme=LONGER, grids=((1, 3), (2, 2)))": "ValueError: grids: ... got ((1, 3), (2, 2))",
    "changed(scheme=LONGER, grids=((2, 2), (9,)))": "ValueError: grids: ... got ((2, 2), (9,))",
    "changed(scheme=LONGER, keep_positions=True)": "ValueError: rng: wanted a key, to draw 5 new rows, got None",
    "changed(scheme=LONGER, keep_positions=1)": "TypeError: keep_positions: ... got int 1",
    "changed(scheme=LONGER, keep_positions=True, grids=((2, 2), (3, 3)))": "ValueError: grids: wanted None, since keep_positions adds rows at the end, got tuple",
    "changed(scheme=LONGER, grids=(2, 2))": "TypeError: grids[0]: ... got int 2",
    "masked(TOKENS, vocab_size=9)": f"TypeError: params: {TOKENS}/embeddings: wanted an array without a mask, got a masked array",
    "masked(TOKENS, row_multiple=8)": f"TypeError: params: {TOKENS}/embeddings: wanted an array without a mask",
    "masked(POSITIONS, scheme=LONGER)": f"TypeError: params: {POSITIONS}/embeddings: wanted an array without a mask",
    "masked(POSITIONS, scheme=LONGER, keep_positions=True, rng=KEY)": f"TypeError: params: {POSITIONS}/embeddings: wanted an array without a mask",
    "on_a_mesh(vocab_size=14)": "ValueError: params: transformer_embedding/~/token_embedding/embeddings: ... row_multiple), got 14",
}  # fmt: skip


def test_bad_arguments_are_refused():
    each_raises(REFUSED, globals())
