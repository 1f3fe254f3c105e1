"""Compiles what kernels for TPUs may call, and prints each name: Mosaic may abort the process.

Usage: python tests/pallas_kernels.py
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from targets import target

import transformer_embed as te

SIZE = 128
RULES = {
    "causal": {"causal": True},
    "both sides": {"causal": False},
    "window": {"causal": True, "window": (9, 0)},
    "chunk": {"causal": True, "chunk": 16},
}


def block(rule, name):
    """The rule of tokens with segments or blocks, of this argument's name."""

    def kernel(positions, ids, out):
        tokens = te.TokenPositions(positions[...], **{name: ids[...]} if name else {})
        mask = te.AttentionMask(tokens, **rule)
        out[...] = mask.tile(0, 0, (SIZE, SIZE)).astype(jnp.int32)

    return kernel


def buckets(queries, keys, out):
    out[...] = te.relative_position_buckets(queries[...], keys[...], causal=False)


KERNELS = {
    f"{name}, {argument}": block(rule, argument)
    for name, rule in RULES.items()
    for argument in ("", "segment_ids")
} | {"blocks": block(RULES["causal"], "block_ids"), "buckets": buckets}


def main():
    tpu = target("tpu:v5e:2x2")
    rows = tpu.array((1, SIZE), jnp.int32)
    # An integer division is lowered for a kind of device.
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    for name, kernel in KERNELS.items():
        call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((1, SIZE, SIZE), jnp.int32))
        with jax.sharding.use_abstract_mesh(mesh):
            tpu.compile(call, rows, rows)
        print(name, flush=True)


if __name__ == "__main__":
    main()
