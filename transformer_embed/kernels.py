"""Translates a mask into the arguments of fused attention kernels.

Each function returns arguments for one kernel. With these arguments, the kernel needs no bool array
[T, S]. The arguments have the same effect as the mask, except for queries that see no key. If a
kernel cannot express a part of the mask, the function raises a ValueError that names this part.
Outputs of queries at padding are finite, and differ from kernel to kernel. A bias, for example
ALiBi's, is not a part of the mask, so pass it to the kernel yourself.

Kernels compare row indices instead of positions. So for a causal mask or a window, you declare the
layout of the tokens by `order=`:

- `"full"` means that each batch row is one sequence without padding;
- `"right"` means that each batch row has one sequence, then padding;
- `"packed"` means that each batch row has any number of sequences, one after the other, with
  padding on the left, between them or on the right.

In the layouts `"full"`, `"right"` and `"packed"`, positions rise by one from token to token of a
sequence. The constructors `from_lengths`, `from_segment_ids` and `from_offset` of `TokenPositions`
make tokens in one of these layouts. The constructors `from_ids` and `from_mask` allow padding
inside a sequence. If a sequence has padding inside, the tokens are in none of these layouts.

Outside of `jax.jit`, the functions check the layout by `te.check_batch`, which also refuses
negative segment ids. Inside `jax.jit`, the layout is not checked, and tokens that are not in the
declared layout give wrong outputs. So call `te.check_batch` in your data pipeline.

Tokens without a batch axis are used for every batch row, because the arguments of a kernel have a
batch axis.

In a Pallas kernel of your own for TPUs, you can call `relative_position_buckets` and
`AttentionMask.tile`. The method `tile` makes the mask of the queries and keys that the kernel has
loaded. You cannot call `alibi_bias`, `apply_rotary` and `sinusoidal_encoding` in such a kernel,
because they hold constant arrays. Instead, pass `alibi_slopes`, the encodings or the rotated heads
to the kernel as inputs.
"""

from transformer_embed._src.kernels.kernel_arguments import (
    dot_product_attention_kwargs,
    flash_attention_kwargs,
    mha_kwargs,
)
from transformer_embed._src.kernels.splash_kernels import splash_kernels

__all__ = [
    "dot_product_attention_kwargs",
    "flash_attention_kwargs",
    "mha_kwargs",
    "splash_kernels",
]
