"""Compiles programs for accelerators that are not there, and reads what the compiler made of them.

A target is named as in `tpu:v5e:2x2` (any topology that libtpu knows; it comes with `pip install
"jax[tpu]"`) or `cuda:h200` (with the CUDA plugin of jax's own version). Start Python with
JAX_PLATFORMS=cpu for a TPU, and cpu,cuda for a GPU: no such device is looked for.
"""

import functools
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from collectives import collectives
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

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
GPUS = {"h200": H200}
NAMES = "tpu:v5e:2x2, tpu:v5e:16x16, tpu:v5p:8x8x8, tpu:v5p:16x16x16, cuda:h200"
# For a GPU that is not there, nothing is timed; for a TPU that is not there, nobody is asked about
# it.
GPU_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
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
NOT_KERNELS = (
    "parameter",
    "constant",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "after-all",
    "partition-id",
    "replica-id",
)


class TargetError(Exception):
    """A target that cannot be compiled for: one line that says what to do."""


class Facts(NamedTuple):
    """What a compiled program is. `cycles`: those that XLA estimates, of what it estimates; None
    for a GPU."""

    kernels: int
    temporaries: int
    cycles: int | None
    collectives: list[Any]
    seconds: float
    text: str

    @property
    def sent(self) -> float:
        """Bytes that each device sends."""
        return sum(each.sent for each in self.collectives)


class Target:
    """Devices to compile for."""

    def __init__(self, platform: str, devices: Any):
        self.platform, self.devices = platform, devices

    def mesh(self, kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
        """The first devices in a mesh of named axes: mesh(data=16, model=16)."""
        devices = np.array(self.devices[: math.prod(axes.values())]).reshape(*axes.values())
        return Mesh(devices, tuple(axes), axis_types=(kind,) * len(axes))

    def array(
        self,
        shape: tuple[int, ...],
        dtype: Any = jnp.float32,
        mesh: Mesh | None = None,
        spec: Any = None,
    ) -> Any:
        """An argument of a program: on one device, or split over a mesh as a PartitionSpec says
        (None: whole on each device)."""
        sharding = (
            SingleDeviceSharding(self.devices[0])
            if mesh is None
            else NamedSharding(mesh, spec or PartitionSpec())
        )
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def like(self, tree: Any) -> Any:
        """Arguments, on one device, of the shapes and dtypes of a tree's arrays."""
        return jax.tree.map(lambda leaf: self.array(leaf.shape, leaf.dtype), tree)

    def compile(self, function: Callable, *arguments: Any, donate: tuple[int, ...] = ()) -> Any:
        """The compiled program."""
        jitted = (
            function if hasattr(function, "trace") else jax.jit(function, donate_argnums=donate)
        )
        return jitted.trace(*arguments).lower(lowering_platforms=(self.platform,)).compile()

    def facts(self, function: Callable, *arguments: Any, donate: tuple[int, ...] = ()) -> Facts:
        """Compiles, and says what came of it."""
        start = time.perf_counter()
        compiled = self.compile(function, *arguments, donate=donate)
        seconds, text = time.perf_counter() - start, compiled.as_text()
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        return Facts(
            _kernels(text), temporaries, _cycles(text), collectives(compiled), seconds, text
        )


def _cycles(text: str) -> int | None:
    """Of the entry computation: a loop's body counts as often as it runs, where its condition
    compares with a constant, and else once."""
    if "estimated_cycles" not in text:
        return None
    computations = dict(
        re.findall(r"^(?:ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    )

    @functools.cache
    def of(name: str) -> int:
        total = 0
        for line in computations[name].splitlines():
            total += sum(int(number) for number in re.findall(r'"estimated_cycles":"(\d+)"', line))
            loop = re.search(r"\bcondition=%?([\w.-]+), body=%?([\w.-]+)", line)
            if loop:
                trips = re.findall(r"\bconstant\((\d+)\)", computations[loop[1]])
                total += of(loop[2]) * (int(trips[0]) if len(trips) == 1 else 1)
        return total

    return of(re.findall(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)[0])


def _kernels(text: str) -> int:
    """Operations of the entry computation that do work; what starts and ends later counts once."""
    entry = text[text.index("\nENTRY") :]
    operations = re.findall(
        r"^ .*? = .*?[\]})] ([a-z][\w-]*)\(", entry[: entry.index("\n}")], re.MULTILINE
    )
    return sum(
        operation not in NOT_KERNELS and not operation.endswith("-done") for operation in operations
    )


@functools.cache
def target(name: str) -> Target:
    """The target of a name; a TargetError where there is none, or where what compiles for it is not
    installed."""
    platform, _, rest = name.partition(":")
    if platform not in ENVIRONMENT or not rest or (platform == "cuda" and rest not in GPUS):
        raise TargetError(f"target: wanted a name such as {NAMES}, got {name!r}")
    os.environ.update(ENVIRONMENT[platform])
    make: Mapping[str, Callable] = {"tpu": _tpu, "cuda": _gpu}
    try:
        return Target(platform, make[platform](rest))
    except TargetError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TargetError(
            f"target: wanted a topology that XLA compiles for, such as {NAMES}, got {name!r} ({reason[:160]})"
        ) from error


def _tpu(topology: str) -> Any:
    if importlib.util.find_spec("libtpu") is None:
        raise TargetError(
            f'target: wanted libtpu, to compile for tpu:{topology}: pip install "jax[tpu]=={jax.__version__}"'
        )
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def _gpu(kind: str) -> Any:
    plugin = f"jax-cuda12-plugin[with-cuda]=={jax.__version__}"
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise TargetError(
            f'target: wanted the CUDA plugin, to compile for cuda:{kind}: pip install "{plugin}"'
        )
    if "cuda" not in os.environ.get("JAX_PLATFORMS", "") or GPU_FLAGS not in os.environ.get(
        "XLA_FLAGS", ""
    ):
        raise TargetError(
            f'target: wanted JAX_PLATFORMS=cpu,cuda and XLA_FLAGS="{GPU_FLAGS}" in the environment'
        )
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=GPUS[kind]
    ).devices
