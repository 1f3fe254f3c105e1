"""Cases of what goes into attention: rotary embeddings beside precomputed tables, and the size of
masks."""

import jax
import jax.numpy as jnp
import numpy as np
from harness import Report, interleave, ratio, timing_report

import transformer_embed as te

SHAPE = (8, 2048, 16, 64)
BASE = 10_000.0
ROTARY_FIGURE = "rotary: ours / precomputed tables"
# cos and sin of angles up to 2048, taken from a table made in float64: two roundings of numbers up
# to some 5.
TOLERANCE = 1e-5


def _rotate_half(x, cos, sin):
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def rotary(options) -> Report:
    """Positions of each token's own."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal(SHAPE, np.float32))
    positions = jnp.asarray(rng.integers(0, SHAPE[1], SHAPE[:2]), jnp.int32)
    frequencies = BASE ** (-np.arange(0, SHAPE[3], 2) / SHAPE[3])
    angles = np.arange(SHAPE[1])[:, None] * frequencies
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    ready = jax.jit(
        lambda x, positions, cos, sin: _rotate_half(
            x, cos[positions][:, :, None], sin[positions][:, :, None]
        )
    )

    @jax.jit
    def in_place(x, positions):
        angles = (positions[..., None] * jnp.asarray(frequencies, jnp.float32))[:, :, None]
        return _rotate_half(x, jnp.cos(angles), jnp.sin(angles))

    ours = jax.jit(te.apply_rotary)
    calls = {
        "ours": lambda: ours(x, positions),
        "precomputed tables of cos and sin": lambda: ready(x, positions, cos, sin),
        "float32 cos and sin in place": lambda: in_place(x, positions),
    }
    results = [np.asarray(call()) for call in calls.values()]
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=TOLERANCE)
    samples = interleave(calls, options.rounds, "rotary")
    report = timing_report(
        f"Rotary on {list(SHAPE)}, positions of each token's own",
        samples,
        ["precomputed tables of cos and sin"],
        {},
    )
    report.figures[ROTARY_FIGURE] = ratio(samples, "ours", "precomputed tables of cos and sin")
    return report


def mask_bytes(options) -> Report:
    """What a mask takes where it is stored: ours, in its smallest shape, and as float32 [batch, 1,
    length, length]."""
    del options
    batch, length = 32, 2048
    rows = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    cases = {
        "causal": lambda ids: te.AttentionMask(
            te.TokenPositions(jnp.arange(length)), causal=True
        ).dense(),
        "padding": lambda ids: te.AttentionMask(
            te.TokenPositions(jnp.arange(length)),
            te.TokenPositions(jnp.arange(length), te.padding_mask(ids, pad_id=0).astype(int)),
            causal=False,
        ).dense(),
        "packed": lambda ids: te.AttentionMask(
            te.TokenPositions.from_segment_ids(ids), causal=True
        ).dense(),
        "decoding": lambda ids: te.AttentionMask(
            te.TokenPositions.from_offset(ids[:, 0], 1),
            te.TokenPositions.from_ids(ids, pad_id=0),
            causal=True,
        ).dense(),
    }
    report = Report(
        f"Masks, {batch} x {length}",
        ["mask", "shape", "ours, MB", "float32 [batch, 1, queries, length], MB"],
    )
    for name, mask in cases.items():
        shape = jax.eval_shape(mask, rows).shape
        queries = 1 if name == "decoding" else length
        report.rows.append(
            [
                name,
                str(list(shape)),
                f"{np.prod(shape) / 1e6:.3g}",
                f"{4 * batch * queries * length / 1e6:.3g}",
            ]
        )
    return report
