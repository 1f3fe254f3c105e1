import dataclasses
import functools

import jax
import numpy as np
import pytest
from drawn import drawn

import transformer_embed as te

PAD_ID = 1
IDS = np.array([[5, 6, 7, 1, 1], [1, 1, 5, 6, 7], [5, 1, 6, 1, 7]])
SCHEMES = [te.Sinusoidal(), te.Learned(max_len=9)]


def embed(scheme, ids, **arguments):
    embedder = te.Embedder(te.EmbedderConfig(10, 8, scheme=scheme, dropout_rate=0.0))
    # No token row but zeros: what comes out is the encoding.
    params = jax.tree.map_with_path(
        lambda path, leaf: np.asarray(leaf) * ("positional" in path[0].key),
        drawn(embedder.init),
        is_leaf=lambda leaf: isinstance(leaf, jax.Array),
    )
    return embedder.apply(params, None, ids, is_training=False, **arguments)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_positions_count_from_start(scheme):
    np.testing.assert_array_equal(
        embed(dataclasses.replace(scheme, start=2), IDS),
        embed(scheme, IDS, positions=np.arange(2, 7)),
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_only_tokens_are_counted_where_padding_has_a_position_of_its_own(scheme):
    """RoBERTa's rule, in its own words: cumsum of the mask times the mask, plus padding_idx."""
    mask = (IDS != PAD_ID).astype(int)
    positions = np.cumsum(mask, 1) * mask + 1
    np.testing.assert_array_equal(
        embed(dataclasses.replace(scheme, start=2, at_padding=1, pad_id=PAD_ID), IDS),
        embed(scheme, IDS, positions=positions),
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ids_of_any_rank(scheme):
    roberta = dataclasses.replace(scheme, start=2, at_padding=1, pad_id=PAD_ID)
    whole = embed(roberta, IDS)
    np.testing.assert_array_equal(embed(roberta, IDS[0]), whole[0])
    np.testing.assert_array_equal(embed(roberta, IDS[None]), whole[None])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_padding_is_not_counted_where_the_config_knows_its_id(scheme):
    """On either side and between tokens; right padding changes nothing at tokens."""
    config = te.EmbedderConfig(10, 8, scheme=scheme, dropout_rate=0.0)
    params = drawn(te.Embedder(config).init)
    apply = functools.partial(
        te.Embedder(dataclasses.replace(config, pad_id=PAD_ID)).apply, params, None
    )
    got = apply(IDS, is_training=False)
    alone = apply([5, 6, 7], is_training=False)
    expected = np.tile(alone, (3, 1))
    np.testing.assert_allclose(got[IDS != PAD_ID], expected, rtol=1e-6, atol=1e-6)
    counted = te.Embedder(config).apply(params, None, IDS, is_training=False)
    # Two programs: XLA rounds a product and a sum once or twice.
    np.testing.assert_allclose(got[0, :3], counted[0, :3], rtol=1e-6, atol=1e-6)
    by_hand = te.TokenPositions.from_ids(IDS, pad_id=PAD_ID).positions
    np.testing.assert_array_equal(got, apply(IDS, is_training=False, positions=by_hand))


def test_a_grid_has_no_padding():
    grid = te.SinusoidalGrid((1, 5))
    configs = [te.EmbedderConfig(10, 8, scheme=grid, pad_id=pad_id) for pad_id in (None, PAD_ID)]
    ids = jax.numpy.asarray(IDS)
    first, second = (config.scheme._positions(ids, config.pad_id) for config in configs)
    np.testing.assert_array_equal(first, second)


def test_given_positions_are_taken_as_they_are():
    scheme = te.Learned(max_len=9, start=2, at_padding=1, pad_id=PAD_ID)
    positions = np.array([4, 3, 2, 1, 0])
    np.testing.assert_array_equal(
        embed(scheme, IDS, positions=positions),
        embed(te.Learned(max_len=9), IDS, positions=positions),
    )


def test_start_shortens_what_a_table_holds():
    assert embed(te.Learned(max_len=7, start=2), IDS).shape == (3, 5, 8)
    with pytest.raises(
        ValueError, match=r"^ids: wanted a length of at most 4, where Learned ends, got length 5\b"
    ):
        embed(te.Learned(max_len=6, start=2), IDS)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"start": 1.0}, TypeError, "start: wanted a Python int, got float 1.0"),
        ({"at_padding": True}, TypeError, "at_padding: wanted a Python int, got bool True"),
        ({"at_padding": 1, "pad_id": 0.5}, TypeError, "pad_id: wanted a Python int, got float 0.5"),
        ({"start": 2**31}, ValueError, f"start: wanted an int of at most 2147483646, got {2**31}"),
    ],
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bad_starts(scheme, arguments, error, message):
    with pytest.raises(error) as raised:
        dataclasses.replace(scheme, **arguments)
    assert str(raised.value) == message


@pytest.mark.parametrize("name", ["start", "at_padding"])
@pytest.mark.parametrize("position", [-1, 9])
def test_a_table_has_no_such_position(name, position):
    with pytest.raises(
        ValueError, match=rf"^{name}: wanted an int in \[0, max_len = 9\), got {position}$"
    ):
        te.Learned(max_len=9, **{"pad_id": 0 if name == "at_padding" else None, name: position})


@pytest.mark.parametrize("odd", ["truncate", "round_up", "zero"])
def test_a_frequency_that_is_too_high_is_refused_before_the_width_is_known(odd):
    with pytest.raises(
        ValueError,
        match=r"^base and frequency_scale: wanted frequencies below 2\*\*32 turns per position, got 1.00e\+30 radians$",
    ):
        te.Sinusoidal(odd=odd, frequency_scale=1e30)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_config_hands_its_padding_id_to_the_scheme(scheme):
    whole = dataclasses.replace(scheme, start=2, at_padding=1)
    with pytest.raises(
        ValueError,
        match=r"^pad_id: wanted the id of padding, since the scheme's at_padding is set, got None$",
    ):
        te.EmbedderConfig(10, 8, scheme=whole)
    by_config = te.EmbedderConfig(10, 8, scheme=whole, pad_id=PAD_ID)
    said_again = dataclasses.replace(
        by_config, scheme=dataclasses.replace(whole, pad_id=PAD_ID), dropout_rate=0.0
    )
    params = drawn(te.Embedder(by_config).init)
    apply = functools.partial(te.Embedder(by_config).apply, params, None, IDS, is_training=False)
    np.testing.assert_array_equal(
        apply(), te.Embedder(said_again).apply(params, None, IDS, is_training=False)
    )
    # A changed padding id changes both, and a scheme's own id wins.
    other = te.Embedder(dataclasses.replace(by_config, pad_id=5))
    assert not np.array_equal(other.apply(params, None, IDS, is_training=False), apply())
    own = dataclasses.replace(said_again.scheme, pad_id=5)
    ids = jax.numpy.asarray(IDS)
    np.testing.assert_array_equal(own._positions(ids, PAD_ID), whole._positions(ids, 5))


def test_a_start_far_out_is_exact():
    far = te.sinusoidal_encoding(np.arange(10**9, 10**9 + 5), 8)
    np.testing.assert_array_equal(
        embed(te.Sinusoidal(start=10**9), IDS), np.broadcast_to(far, (3, 5, 8))
    )


def test_positions_stay_inside_int32():
    assert te.Sinusoidal(start=2**31 - 5)._counted("ids", 5)[-1] == 2**31 - 1
    with pytest.raises(
        ValueError,
        match=r"^start: wanted an int of at most 2147483643, for 5 positions inside int32, got 2147483644$",
    ):
        te.Sinusoidal(start=2**31 - 4)._counted("ids", 5)


def test_narrow_integers_of_numpy_do_not_wrap():
    scheme = te.Learned(max_len=np.int16(200), start=np.int8(100))
    assert scheme == te.Learned(max_len=200, start=100)
    assert scheme._counted("ids", 100)[-1] == 199
    assert te.Sinusoidal(start=np.int8(100))._counted("ids", 100)[-1] == 199
    assert len(te.SinusoidalGrid((np.int8(100), np.int8(2)))._counted("ids", 200)) == 200
