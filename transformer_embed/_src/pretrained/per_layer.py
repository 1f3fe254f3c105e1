"""What each layer of Gemma 3n and of small Gemma 4 models reads besides the hidden vectors."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.layers.embedder import Params
from transformer_embed._src.tokens.lookup import lookup


def per_layer_inputs(
    params: Params, ids: ArrayLike, x: ArrayLike, *, layer_norm_eps: float
) -> Float[Array, "... t layers width"]:
    """The inputs of all layers: a second embedding of each token, and a share of the first.

    With a row e of the second table for each token and layer, and the projection p of the token's
    first embedding, both `width` numbers, an input is

        (p / rms(p) * scale + e * sqrt(width)) / sqrt(2)
        p = (x @ w) / sqrt(d_model)
        rms(p) = sqrt(mean(p ** 2) + layer_norm_eps)

    Args:
        params: with the leaves `embeddings` [rows, layers * width], `w` [d_model, layers * width]
            and `scale` [width] of the module `per_layer_inputs`, as `load_embedder` returns them.
        ids: [..., length], integers. Ids past the second table, which stand for images or sounds,
            read its row 0, as in the original.
        x: [..., length, d_model], the embeddings of these ids from `Embedder(config).apply`.
        layer_norm_eps: of the norm of p; it is in `PretrainedInput.per_layer`.

    Returns:
        [..., length, layers, width] of x's dtype, computed in float32 or wider.

    Raises:
        TypeError: ids are not integers, or x does not have a floating dtype.
        ValueError: x is not an embedding of the ids, of the width of `w`.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> leaves = {"embeddings": jnp.ones([9, 6]), "w": jnp.ones([4, 6]), "scale": jnp.ones(2)}
        >>> params, x = {"per_layer_inputs": leaves}, jnp.ones([1, 3, 4])
        >>> inputs = te.pretrained.per_layer_inputs(params, [[1, 2, 3]], x, layer_norm_eps=1e-6)
        >>> inputs.shape
        (1, 3, 3, 2)

    Source:
        Gemma 3n and Gemma 4 (Google DeepMind, 2025), as the transformers library computes them.
    """
    ids, x = arguments.as_integers("ids", ids), arguments.as_floats("x", x)
    leaves = params["per_layer_inputs"]
    table, weights, scale = (leaves[name] for name in ("embeddings", "w", "scale"))
    if x.shape != (*ids.shape, weights.shape[0]):
        want = f"shape {[*ids.shape, weights.shape[0]]}"
        raise arguments.value_error("x", want, f"shape {list(x.shape)}")
    shape = (*ids.shape, -1, scale.shape[-1])
    wide = arguments.compute_dtype(x.dtype)
    rows = lookup(table, jnp.where(ids < len(table), ids, 0)).astype(wide).reshape(shape)
    product = jnp.matmul(x, weights, preferred_element_type=wide) * x.shape[-1] ** -0.5
    product = product.reshape(shape)
    square = jnp.square(product).mean(-1, keepdims=True)
    normed = product * jax.lax.rsqrt(square + layer_norm_eps) * scale
    return ((normed + rows * shape[-1] ** 0.5) * 2**-0.5).astype(x.dtype)
