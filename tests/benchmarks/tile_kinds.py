"""Kinds of tiles of a million packed tokens: seconds and megabytes, beside the dense mask of 16,384.

Usage: python tests/benchmarks/tile_kinds.py. If PyTorch is installed, it also prints what
FlexAttention's create_block_mask takes at 16,384 tokens.
"""

import importlib.util
import time

import jax
import numpy as np

import transformer_embed as te

WINDOW = (4095, 0)


def packed(length):
    cuts = np.sort(np.random.default_rng(0).choice(length, length // 2600, replace=False))
    return np.searchsorted(cuts, np.arange(length), side="right")[None] + 1


def fastest(call, times=9):
    call()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def row(name, form, length):
    tokens = te.TokenPositions.from_segment_ids(packed(length))
    mask = te.AttentionMask(tokens, causal=True, window=WINDOW)
    program = jax.jit(form).lower(mask).compile()
    memory = program.memory_analysis()
    size = memory.temp_size_in_bytes + memory.output_size_in_bytes
    seconds = fastest(lambda: jax.block_until_ready(program(mask)))
    print(f"{name:34} {length:9,} tokens {1e3 * seconds:9.1f} ms {size / 1e6:9.1f} MB")


def flex(length):
    import torch  # noqa: PLC0415 (optional)
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415

    segments = torch.as_tensor(packed(length)[0])

    def rule(batch, head, query, key):
        del batch, head
        near = (query >= key) & (query - key <= WINDOW[0])
        return near & (segments[query] == segments[key])

    make = lambda: create_block_mask(rule, 1, 1, length, length, device="cpu", BLOCK_SIZE=512)
    print(f"{'create_block_mask (PyTorch)':34} {length:9,} tokens {1e3 * fastest(make, 1):9.1f} ms")


if __name__ == "__main__":
    row("kinds of tiles of 512", lambda mask: mask.tile_kinds((512, 512)), 2**20)
    row("dense mask", lambda mask: mask.dense(), 2**14)
    if importlib.util.find_spec("torch"):
        flex(2**14)
