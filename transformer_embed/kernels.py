"""Translates the rule of a mask into the arguments of fused attention kernels.

With these arguments, a kernel needs no bool [T, S]. Each function is for one kernel. It returns
arguments that mean exactly the rule at every query that sees a key, or raises a ValueError that
names the part of the rule that the kernel cannot express. Outputs of queries at padding are finite,
and differ from kernel to kernel. A bias such as ALiBi's is not a part of the rule.

Kernels compare row indices instead of positions. So for a causal mask or a window, you declare the
layout of the tokens by `order=`:

- `"full"` means one sequence in each batch row, without padding;
- `"right"` means one sequence in each batch row, then padding;
- `"packed"` means any number of sequences, each in one run of tokens, with padding anywhere between
  them (and so also padding on the left).

In each order, positions rise by one from token to token of a sequence. The tokens that
`TokenPositions.from_lengths`, `from_segment_ids` and `from_offset` make lie in one of these orders.
`from_ids` and `from_mask` allow padding inside a sequence. Outside of jit, the functions check the
layout by `te.check_batch`, which also refuses negative segment ids. Inside jit, the values are not
known, and tokens in another layout give wrong outputs. So check the batches with `te.check_batch`
in your data pipeline.

Tokens without a batch axis are used for every batch row: a kernel's arguments have a batch axis.

In a Pallas kernel of your own for TPUs, `AttentionMask.tile` makes the mask of the tile from the
positions and segment ids that the kernel has loaded, and `relative_position_buckets` makes the
buckets. `alibi_bias`, `apply_rotary` and `sinusoidal_encoding` do not compile there, because they
hold constant arrays: give the kernel `alibi_slopes`, or the encodings and rotated heads, as inputs.
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
