"""Compiles programs for accelerators that are not there, and reads what the compiler made of them.

A target is named as in `tpu:v5e:2x2` (any topology that libtpu knows; it comes with `pip install
"jax[tpu]"`) or `cuda:h200` (with the CUDA plugin of jax's own version, `jax-cuda12-plugin`). Start
Python with JAX_PLATFORMS=cpu for a TPU, and cpu,cuda for a GPU: no such device is looked for.
"""

import functools
import math
import os
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from collectives import collectives
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

# What XLA must know of an H200 to compile for it: a GpuTargetConfigProto in text.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
  cuda_compute_capability { major: 9 }
  runtime_version: "12.8.0" driver_version: "13.0.0" compile_time_toolkit_version: "12.8.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 8 }
"""
# Nobody is asked about a TPU that is not there.
ENVIRONMENT = {
    "tpu": {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_WORKER_HOSTNAMES": "localhost",
    },
    "cuda": {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
}


class Facts(NamedTuple):
    """What a compiled program is. `cycles`: those that XLA estimates, of what it estimates; None
    for a GPU."""

    temporaries: int
    cycles: int | None
    collectives: list[Any]
    text: str

    @property
    def sent(self):
        """Bytes that each device sends."""
        return sum(each.sent for each in self.collectives)


class Target:
    """Devices to compile for."""

    def __init__(self, platform, devices):
        self.platform, self.devices = platform, devices

    def mesh(self, **axes):
        """The first devices in an explicit mesh of named axes: mesh(data=16, model=16)."""
        devices = np.array(self.devices[: math.prod(axes.values())]).reshape(*axes.values())
        return Mesh(devices, tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))

    def array(self, shape, dtype=jnp.float32):
        """An argument of a program, on one device."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(self.devices[0]))

    def like(self, tree):
        """Arguments, on one device, of the shapes and dtypes of a tree's arrays."""
        return jax.tree.map(lambda leaf: self.array(leaf.shape, leaf.dtype), tree)

    def compile(self, function, *arguments, donate=()):
        """The compiled program."""
        is_jitted = hasattr(function, "trace")
        jitted = function if is_jitted else jax.jit(function, donate_argnums=donate)
        return jitted.trace(*arguments).lower(lowering_platforms=(self.platform,)).compile()

    def facts(self, function, *arguments, donate=()):
        """Compiles, and says what came of it."""
        compiled = self.compile(function, *arguments, donate=donate)
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        text = compiled.as_text()
        return Facts(temporaries, _cycles(text), collectives(compiled), text)


def _cycles(text):
    """Of the entry computation: a loop's body counts as often as it runs, where its condition
    compares with a constant, and else once."""
    if "estimated_cycles" not in text:
        return None
    computations = dict(
        re.findall(r"^(?:ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    )

    @functools.cache
    def of(name):
        total = 0
        for line in computations[name].splitlines():
            total += sum(int(number) for number in re.findall(r'"estimated_cycles":"(\d+)"', line))
            loop = re.search(r"\bcondition=%?([\w.-]+), body=%?([\w.-]+)", line)
            if loop:
                trips = re.findall(r"\bconstant\((\d+)\)", computations[loop[1]])
                total += of(loop[2]) * (int(trips[0]) if len(trips) == 1 else 1)
        return total

    return of(re.findall(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)[0])


@functools.cache
def target(name):
    """The target of a name; jax says what is missing, or which topologies there are."""
    platform, _, rest = name.partition(":")
    if name != "cuda:h200" and platform != "tpu":
        raise ValueError(f"target: wanted a name such as tpu:v5e:2x2 or cuda:h200, got {name!r}")
    os.environ.update(ENVIRONMENT[platform])
    options = {"topology": "1x1x1", "target_config": H200} if platform == "cuda" else {}
    topology = "" if platform == "cuda" else rest
    found = topologies.get_topology_desc(platform=platform, topology_name=topology, **options)
    return Target(platform, found.devices)
