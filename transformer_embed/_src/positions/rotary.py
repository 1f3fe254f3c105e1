"""Rotates queries and keys by their positions, exactly at any position."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from transformer_embed._src import arguments, conversions
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import compiled, computed_once
from transformer_embed._src.positions import phase
from transformer_embed._src.positions.rotary_scaling import Scaling, scaled_frequencies

ROTARY_LAYOUTS = ("half", "interleaved")
PARTIAL = ("first", "proportional")


def apply_rotary(
    x: ArrayLike,
    positions: ArrayLike,
    *,
    base: float = 10_000.0,
    layout: str = "half",
    rotary_dim: int | None = None,
    partial: str = "first",
    scaling: Scaling | None = None,
    pair_axes: Sequence[int] | None = None,
) -> Float[Array, "... t h d"]:
    """Rotates queries or keys by positions (rotary position embeddings, RoPE).

    Call it on the queries and the keys of every attention layer. The dot products of queries and
    keys then depend only on the difference of the positions. The page "Conventions of other
    projects" has the arguments for each published model.

    The channels of a head form pairs. Each pair has a frequency, which is the angle per unit of
    position. With the defaults, pair i consists of the channels a = i and b = i + head_dim // 2.
    For example, with head_dim = 64, pair 0 has the channels 0 and 32. With
    `angle = position * base ** (-2i / head_dim)`, the channels a and b become

        x[..., a] * cos(angle) - x[..., b] * sin(angle)
        x[..., b] * cos(angle) + x[..., a] * sin(angle)

    Rotate each key once. In a KV cache, store the rotated keys and do not rotate them again,
    because the angles would add up.

    Args:
        x: The queries or keys, of a floating dtype. Shape [..., length, heads, head_dim]. If the
            heads come before the length in your arrays, swap these two axes first.
        positions: The position of each token, such as `TokenPositions.positions`. Integers of any
            dtype, or float32. Shape [length], [batch, length], or another shape that broadcasts to
            the axes [..., length] of x. If you set `pair_axes`, add a last axis: [..., length,
            axes].
        base: The base of the frequencies, above 0, often called theta. Pass the `rope_theta` of a
            published model.
        layout: Which channels form a pair. `"half"` pairs i with i + head_dim // 2. `"interleaved"`
            pairs 2i with 2i + 1. A model must run in the layout that it was trained in. The wrong
            layout raises no error, but gives wrong attention scores.
        rotary_dim: The number of channels of each head that are rotated, an even number. Set it for
            models that rotate only a part of the head (GPT-J, GPT-NeoX). If None, all channels are
            rotated.
        partial: Which channels are rotated if `rotary_dim` is set. `"first"` rotates the first
            `rotary_dim` channels, like a head of that size. `"proportional"` (Gemma) makes pairs of
            all channels of the head, but rotates only the first rotary_dim / 2 pairs. For example,
            with 8 channels, `rotary_dim=4` and the layout "half", the pairs are (0, 4), (1, 5), (2,
            6) and (3, 7), and only the first two are rotated. Each pair has the same frequency as
            if the whole head were rotated.
        scaling: How the frequencies are changed for texts that are longer than in training. Pass
            the scaling that your model was published with: a `LinearScaling`, `NTKScaling`,
            `YarnScaling`, `Llama3Scaling` or `LongRopeScaling`. If None, the frequencies stay as
            they are.
        pair_axes: Which position rotates each pair of channels. Set it if each token has several
            positions, such as time, height and width. Pass one integer per pair, an index into the
            last axis of `positions`. For example, `np.repeat([0, 1, 2], [16, 24, 24])` rotates the
            first 16 pairs by the time. The frequencies stay the same. If None, each token has one
            position.

    Returns:
        The rotated array, of the shape and dtype of x. The result is differentiable in x and in
        float positions.

    Raises:
        TypeError: `x` does not have a floating dtype of 16 bits or more. `positions` are neither
            integers nor float32.
        ValueError: The shapes of `x`, `positions` and `pair_axes` do not fit. The number of
            channels that form pairs is odd. An argument is out of its range, or a position in a
            list or a numpy array is outside int32. (But an array of uint32 may hold any number.)
            `base` and `scaling` give a frequency that is too high: 2**32 full turns per position or
            more.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> query, key = jnp.ones([3, 2, 64]), jnp.ones([3, 2, 64])
        >>> near = te.apply_rotary(query, [7, 8, 9]) * te.apply_rotary(key, [5, 6, 7])
        >>> far = te.apply_rotary(query, [2 * 10**9 + 7, 8, 9])
        >>> far *= te.apply_rotary(key, [2 * 10**9 + 5, 6, 7])
        >>> bool(jnp.allclose(near.sum(-1), far.sum(-1)))
        True

    Edge cases:
        - The error of cosines and sines is at most 6.0e-8 at every int32 and uint32 position. At
          float positions below 2**24 in magnitude, the same bound holds if no frequency is above
          1000 radians per position. If a scaling multiplies cosines and sines by an attention
          factor, the bound grows by the same factor, and one more rounding to float32 is added.
        - The rotation is computed in float32, or in float64 if x is float64, and rounded once to
          the dtype of x.
        - The rotated channels are NaN for a float position that is NaN, infinite, or at least 2**31
          in magnitude. They are also NaN for an integer position outside int32 in a 64-bit jax
          array.

    Source:
        The rotation is from Su et al., "RoFormer: Enhanced Transformer with Rotary Position
        Embedding" (2021), section 3.4.2, equation 34, https://arxiv.org/abs/2104.09864. The
        rotation with several axes is from Wang et al., "Qwen2-VL" (2024), section 2.1,
        https://arxiv.org/abs/2409.12191
    """
    x = arguments.as_floats("x", x)
    arguments.check_shape("x", x.shape, x.ndim >= 3, "[..., length, heads, head_dim]")
    head_dim = x.shape[-1]
    layout = arguments.choice("layout", layout, ROTARY_LAYOUTS)
    rotary_dim = _checked_rotary_dim(rotary_dim, head_dim)
    partial = arguments.choice("partial", partial, PARTIAL)
    # The number of channels that form pairs. With partial="proportional", all channels do, and the
    # pairs after the first `rotary_dim / 2` get the frequency 0.
    paired_dim = rotary_dim
    if partial == "proportional":
        paired_dim = check_even("head_dim", head_dim)
    want = "LinearScaling(...), another scaling of this package, or None"
    arguments.instance("scaling", scaling, Scaling | None, want)
    # int32 or float32, or a wider dtype that a device array may have.
    positions = phase.as_positions("positions", positions)
    if pair_axes is None:
        axes = ()
        positions = positions[..., None]
    else:
        axes = arguments.entries("pair_axes", pair_axes, arguments.integer, at_least=0)
        _check_axes(axes, paired_dim // 2, positions.shape)
    # Now the positions are [..., length, axes].
    tokens = "x's tokens (x: [..., length, heads, head_dim])"
    arguments.check_broadcasts(
        "positions", positions.shape[:-1], x.shape[:-2], tokens, with_length=True
    )
    base = arguments.positive("base", base)
    rotating_pairs = rotary_dim // 2
    # The frequency of each pair as an integer, in units of 2**-64 turns per position, and the
    # factor that the scaling multiplies cosines and sines by.
    frequencies = _frequencies(paired_dim, rotating_pairs, base, scaling)
    attention_factor = frequencies.attention_factor
    return _rotate(x, positions, layout, frequencies.fixed_point, attention_factor, axes)


def permute_rotary_weights(
    weights: ArrayLike, num_heads: int, *, source: str, target: str, rotary_dim: int | None = None
) -> Shaped[Array, "... hd"]:
    """Reorders the channels of a projection's weights or biases for another rotary layout.

    Use it to load weights that were trained in one layout into code that rotates in another. If you
    permute the weights and rotate in the target layout, queries and keys have the same dot products
    as before. Permute the projections of queries and of keys. If there is a norm between a
    projection and the rotation, permute the scale of the norm, too. Leave the projection of values
    as it is.

    Args:
        weights: The weights or biases, of any dtype. Shape [..., num_heads * head_dim], with the
            output channels last, as in `hk.Linear`. In PyTorch, the output channels are the first
            axis, so transpose weights from PyTorch.
        num_heads: The number of heads, at least 1. Call this function once for the weights of the
            queries, and once for the weights of the keys. If the model has fewer key heads than
            query heads, pass the number of key heads in the call for the keys.
        source: The layout of your weights, which is the `layout` that the model passes to
            `apply_rotary`. `"half"` pairs channel i with i + rotary_dim // 2, and `"interleaved"`
            pairs 2i with 2i + 1.
        target: The layout to convert them to.
        rotary_dim: The number of channels of each head that form pairs, counted from the first
            channel. Pass the `rotary_dim` of your calls of `apply_rotary`. But if these calls have
            `partial="proportional"`, pass None, because then all channels form pairs. If None, all
            channels form pairs.

    Returns:
        The permuted array, of the shape and dtype of `weights`.

    Raises:
        TypeError: `num_heads` or `rotary_dim` is not a Python int.
        ValueError: The size of the last axis is not a multiple of `num_heads`, or the number of
            channels that form pairs is odd. `source` or `target` is neither `"half"` nor
            `"interleaved"`.

    Example:
        >>> import transformer_embed as te
        >>> layouts = {"source": "half", "target": "interleaved"}
        >>> te.permute_rotary_weights([0, 1, 2, 3, 4, 5], 1, **layouts).tolist()
        [0, 3, 1, 4, 2, 5]

    Source:
        The package transformers reorders the published weights of Llama, which are interleaved, in
        the same way, because it rotates in the layout "half".
    """
    array = conversions.on_device(arguments.as_array("weights", weights))
    num_heads = arguments.size("num_heads", num_heads)
    fits = array.ndim > 0 and array.shape[-1] % num_heads == 0
    arguments.check_shape("weights", array.shape, fits, f"[..., {num_heads} heads * head_dim]")
    head_dim = array.shape[-1] // num_heads
    rotary_dim = _checked_rotary_dim(rotary_dim, head_dim)
    source = arguments.choice("source", source, ROTARY_LAYOUTS)
    target = arguments.choice("target", target, ROTARY_LAYOUTS)
    return _permute(array, num_heads, rotary_dim, source, target)


def _check_axes(axes: tuple[int, ...], pairs: int, shape: tuple[int, ...]) -> None:
    """Raises a ValueError unless each pair has an axis among positions of this shape."""
    arguments.check_same("pair_axes", "a number for each pair", len(axes), pairs)
    last = max(axes, default=0)
    want = f"[..., length, {last + 1} or more], as pair_axes says"
    arguments.check_shape("positions", shape, len(shape) > 1 and shape[-1] > last, want)


@compiled(2, 3, 4, 5)
def _rotate(
    x: Float[Array, "... t h d"],
    positions: Array,
    layout: str,
    fixed_point_frequencies: tuple[int, ...],
    attention_factor: float,
    pair_axes: tuple[int, ...],
) -> Float[Array, "... t h d"]:
    """Rotates the first channels of x, and leaves the other channels as they are.

    The angle of a pair of channels is the frequency of the pair times the position on one axis.

    Args:
        x: The heads.
        positions: The positions, [..., length, axes].
        layout: Which channels form a pair.
        fixed_point_frequencies: The frequency of each pair, an integer in units of 2**-64 turns.
        attention_factor: The number that multiplies cosines and sines.
        pair_axes: The axis of each pair, or () if there is only one axis.
    """
    # Users may disable jax's rank promotion, so positions get the rank of x: an axis for the heads,
    # and leading axes. [..., length, 1, axes].
    leading_axes = range(x.ndim - positions.ndim - 1)
    positions = jnp.expand_dims(positions, (*leading_axes, -2))
    # The position that rotates each pair of channels, [..., length, 1, pairs or 1].
    pair_positions = _positions_of_pairs(positions, pair_axes)
    cosines_and_sines = _cosines_and_sines(
        pair_positions, fixed_point_frequencies, attention_factor
    )
    wide = conversions.compute_dtype(x.dtype)
    cosines = cosines_and_sines[0].astype(wide)
    sines = cosines_and_sines[1].astype(wide)
    # x is widened after it is split, and the results are narrowed before they are joined. A TPU
    # splits and joins 16-bit arrays directly, and the other order would take extra passes over
    # memory.
    paired_dim = 2 * len(fixed_point_frequencies)
    first_channels, second_channels = _split_pairs(x[..., :paired_dim], layout)
    first = first_channels.astype(wide)
    second = second_channels.astype(wide)
    rotated_first = first * cosines - second * sines
    rotated_second = second * cosines + first * sines
    rotated_pairs = [rotated_first.astype(x.dtype), rotated_second.astype(x.dtype)]
    rotated_channels = _join_pairs(rotated_pairs, layout)
    other_channels = x[..., paired_dim:]
    return jnp.concatenate([rotated_channels, other_channels], -1)


def _positions_of_pairs(
    positions: Shaped[Array, "... t 1 a"], pair_axes: tuple[int, ...]
) -> Shaped[Array, "... t 1 #p"]:
    """Chooses, for each of p pairs of channels, the position on the axis of the pair.

    For example, a token at the positions (5, 2) and the pair axes (0, 1, 0) give 5 2 5. If there is
    only one axis, all pairs share its position, and the last size is 1.
    """
    # The axes of the pairs, [p], get the rank of the positions: [1, ..., 1, p].
    leading_axes = tuple(range(positions.ndim - 1))
    axis_of_pair = np.expand_dims(pair_axes, leading_axes)
    positions_by_axis = jnp.split(positions, positions.shape[-1], -1)
    pair_positions = positions_by_axis[0]
    for axis in range(1, len(positions_by_axis)):
        is_on_axis = axis_of_pair == axis
        pair_positions = jnp.where(is_on_axis, positions_by_axis[axis], pair_positions)
    return pair_positions


def _cosines_and_sines(
    pair_positions: Shaped[Array, "... t 1 #p"],
    fixed_point_frequencies: tuple[int, ...],
    attention_factor: float,
) -> Float[Array, "2 ... t 1 p"]:
    """Computes the cosines (index 0) and the sines (1) of the angles of p pairs of channels.

    The angle is the position times the frequency. Cosines and sines are multiplied by the attention
    factor.
    """
    # `sinusoid` takes each frequency as three words of 32 bits, and the number of quarter turns
    # that are added to an angle. A cosine is the sine one quarter turn on.
    frequencies = phase.words_of_fixed_point(fixed_point_frequencies)
    one_quarter = np.array(1, np.uint32)
    no_quarter = np.array(0, np.uint32)
    cosines = phase.sinusoid(pair_positions, frequencies, one_quarter)
    sines = phase.sinusoid(pair_positions, frequencies, no_quarter)
    scaled = np.float32(attention_factor) * jnp.stack([cosines, sines])
    # On a CPU, XLA would fuse the cosines and sines into the rotation, and compute them again for
    # each head.
    return computed_once(scaled)


@compiled(1, 2, 3, 4)
def _permute(
    weights: Shaped[Array, "... hd"],
    num_heads: int,
    rotary_dim: int,
    source_layout: str,
    target_layout: str,
) -> Shaped[Array, "... hd"]:
    """Reorders the first `rotary_dim` channels of each head from one layout to another."""
    # `head_dim` is computed, because `reshape` cannot find the size of -1 if the weights are empty.
    head_dim = weights.shape[-1] // num_heads
    heads = weights.reshape(*weights.shape[:-1], num_heads, head_dim)
    pairs = _split_pairs(heads[..., :rotary_dim], source_layout)
    permuted_channels = _join_pairs(pairs, target_layout)
    other_channels = heads[..., rotary_dim:]
    all_channels = jnp.concatenate([permuted_channels, other_channels], -1)
    return all_channels.reshape(weights.shape)


def _split_pairs(x: Shaped[Array, "... d"], layout: str) -> list[Shaped[Array, "... p"]]:
    """Returns the first channels of all p pairs, and the second channels of all pairs.

    For example, the channels 0 1 2 3 give 0 1 and 2 3 in the layout "half", and 0 2 and 1 3 in the
    layout "interleaved".
    """
    if layout == "half":
        return jnp.split(x, 2, -1)
    # These are `x[..., 0::2]` and `x[..., 1::2]`. Before jax 0.10 a strided index is a gather,
    # which fails under explicit mesh axes.
    take_every_second = functools.partial(jax.lax.slice_in_dim, stride=2, axis=-1)
    # In a head without channels, a start of 1 would be past the end.
    start_of_second = min(1, x.shape[-1])
    return [take_every_second(x, 0, None), take_every_second(x, start_of_second, None)]


def _join_pairs(pairs: list[Shaped[Array, "... p"]], layout: str) -> Shaped[Array, "... d"]:
    """Joins the first and the second channels of all pairs, in the order of the layout."""
    if layout == "half":
        return jnp.concatenate(pairs, -1)
    # [..., p, 2] becomes [..., d].
    side_by_side = jnp.stack(pairs, -1)
    return jax.lax.collapse(side_by_side, side_by_side.ndim - 2)


class _Frequencies(NamedTuple):
    """Holds the frequencies of a rotation."""

    # An integer for each pair, in units of 2**-64 turns, from `phase.as_fixed_point`.
    fixed_point: tuple[int, ...]
    # The number that multiplies cosines and sines.
    attention_factor: float


@functools.lru_cache(maxsize=64)
def _frequencies(
    paired_dim: int, rotating_pairs: int, base: float, scaling: Scaling | None
) -> _Frequencies:
    """Computes the frequency of each pair. Only the first `rotating_pairs` pairs rotate.

    `_rotate` is compiled for these numbers and not for the scaling. So two scalings that give equal
    numbers share a compiled program.
    """
    frequencies, attention_factor = scaled_frequencies(scaling, paired_dim, base)
    # A frequency of 0 rotates nothing.
    frequencies[rotating_pairs:] = 0
    fixed_point = phase.as_fixed_point(frequencies, "base and scaling")
    return _Frequencies(fixed_point=fixed_point, attention_factor=attention_factor)


def _checked_rotary_dim(rotary_dim: int | None, head_dim: int) -> int:
    """Returns how many channels are rotated: `rotary_dim`, or `head_dim` if that is None.

    Raises:
        ValueError: `rotary_dim` is below 2 or above `head_dim`, or the returned number is odd.
    """
    if rotary_dim is None:
        return check_even("head_dim", head_dim)
    dim = arguments.integer("rotary_dim", rotary_dim, at_least=2, at_most=head_dim)
    return check_even("rotary_dim", dim)


def check_even(name: str, channel_count: int) -> int:
    """Returns a number of channels that form pairs, or raises a ValueError if it is odd."""
    if channel_count % 2:
        want = "an even number of channels, to make pairs"
        raise arguments.value_error(name, want, channel_count)
    return channel_count
