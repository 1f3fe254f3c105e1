"""The rule of a mask in the arguments of fused attention kernels, without a mask [T, S].

Each kernel takes flags, lengths or segment ids of its own, and compares row indices instead of
positions. A function returns the arguments of one kernel that mean exactly the rule at every query
that sees a key, or raises a ValueError that names the part which the kernel cannot express. Outputs
of queries at padding are finite, and differ from kernel to kernel. A bias such as ALiBi's is not a
part of the rule.

Where a kernel compares row indices, declare the layout of the tokens by `order=`:

- `"full"`: one sequence in each row, without padding;
- `"right"`: one sequence in each row, then padding;
- `"packed"`: any number of sequences, each in one run of tokens, with padding anywhere between them
  (and so also padding on the left);

and positions rise by one from token to token of a sequence. What `TokenPositions.from_lengths`,
`from_segment_ids` and `from_offset` return lies in one of these orders; `from_ids` allows padding
inside a sequence. Outside of jit the layout is checked. Under jit the values are not known, and
another layout gives wrong outputs: check the batches with `te.check_batch` in your data pipeline.

In a Pallas kernel of your own for TPUs, `AttentionMask.block` makes the mask of the block from the
positions and segment ids that the kernel has loaded, and `relative_position_buckets` its buckets.
`alibi_bias`, `apply_rotary` and `sinusoidal_encoding` do not compile there, because they hold
constant arrays: give the kernel `alibi_slopes`, or the encodings and rotated heads, as inputs.
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
