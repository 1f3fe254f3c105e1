"""How each scheme counts positions, through the layer that adds them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from compare import equal
from drawn import drawn
from refused import each_raises

import transformer_embed as te

IDS = np.array([[5, 6, 7, 1, 1], [1, 1, 5, 6, 7], [5, 1, 6, 1, 7]])


def embed(scheme, **arguments):
    """The encoding alone: the rows of tokens are zeros."""
    embedder = te.Embedder(te.EmbedderConfig(10, 8, scheme=scheme))
    params = jax.tree.map(jnp.zeros_like, drawn(embedder.init))
    return embedder.apply(params, None, IDS, is_training=False, **arguments)


REFUSED = {
    "embed(te.Learned(max_len=6, start=2))": "ValueError: ids or x: ... got 5",
    "embed(te.Sinusoidal(start=2**31 - 4))": "ValueError: start: ... got 2147483644",
}


def test_start_shortens_the_table_and_stays_in_int32():
    assert embed(te.Learned(max_len=7, start=2)).shape == (3, 5, 8)
    each_raises(REFUSED, globals())


def test_a_grid_is_a_value():
    assert te.SinusoidalGrid([2, 3], axes=[1, 0]) == te.SinusoidalGrid((2, 3), axes=(1, 0))
    stretched = te.SinusoidalGrid((2,), axis_positions=[np.array([0.0, 0.5])])
    assert hash(stretched) == hash(te.SinusoidalGrid((2,), axis_positions=((0.0, 0.5),)))


# --- A scheme of one's own.


@dataclasses.dataclass(frozen=True)
class Ramp(te.PositionScheme):
    """Adds a position to every channel, times a step."""

    step: float
    at_padding: int | None = None
    pad_id: int | None = None

    def encoding(self, positions, d_model):
        return np.float32(self.step) * positions[..., None].repeat(d_model, -1)


def test_a_scheme_of_ones_own_is_counted_encoded_and_saved(tmp_path):
    scheme = Ramp(0.5, at_padding=np.int64(1), pad_id=1)
    assert repr(scheme) == "Ramp(step=0.5, at_padding=1, pad_id=1)"
    counted = np.where(IDS != 1, np.cumsum(IDS != 1, 1) - 1, 1)
    equal(embed(scheme), np.float32(0.5) * counted[..., None].repeat(8, -1).astype(np.float32))
    equal(embed(scheme, positions=[0, 1, 2, 3, 4])[0, 4], np.full(8, 2, np.float32))
    config, path = te.EmbedderConfig(10, 8, scheme=scheme), tmp_path / "x.safetensors"
    te.pretrained.save_embedder(path, config, drawn(te.Embedder(config).init))
    assert te.pretrained.load_embedder(path).config == config
