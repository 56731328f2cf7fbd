"""The chips that a plan knows: what their makers say of memory and speed, and how XLA is told to compile for
one that is not there.

A device is what JAX calls one: a GPU, a TPU chip, or one of the two halves of a TPU7x chip. Rates are those
of dense products without sparsity, accumulated in float32. Google's GiB are 2^30 bytes; NVIDIA's GB
are taken as 10^9 bytes, and its cards have a little more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.runtime.errors import ConfigError

MOST_COMPILED = 8
"""Most devices for which programs are compiled here."""
_GIB = 2**30
_GB = 10**9


@dataclass(frozen=True, slots=True)
class TpuTarget:
    """A generation of TPUs, as libtpu names its slices: by the fewest devices that are wanted of one."""

    slices: Mapping[int, str]

    def topology(self, devices: int) -> str:
        """Name the smallest slice that has so many devices."""
        return next(name for size, name in sorted(self.slices.items()) if size >= devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTarget:
    """A GPU, as XLA's `GpuTargetConfigProto` tells it. Sizes of memories in bytes."""

    capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    l2_bytes: int
    clock_ghz: float
    shared_per_core: int = 233_472
    shared_per_block: int = 232_448
    """The most that a block can ask for."""
    threads_per_core: int = 2048
    fpus_per_core: int = 128

    def text(self, name: str, memory_bytes: int, bandwidth: float) -> str:
        """Write the proto as text."""
        major, minor = self.capability
        # As XLA finds it of a device that is there. Without it ptxas refuses the kernels for an RTX 5090.
        features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_per_core}
  threads_per_core_limit: {self.threads_per_core}
  core_count: {self.cores}
  fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(bandwidth)}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {memory_bytes}
  shared_memory_per_block_optin: {self.shared_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


_ADA = {"shared_per_core": 102_400, "shared_per_block": 101_376, "threads_per_core": 1536}
"""What the GPUs of Ada, and the small ones of Blackwell, have less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of device."""

    name: str
    memory_bytes: int
    bytes_per_s: float
    """Of its memory."""
    flops_per_s: float
    """Of products in bfloat16: a multiplication and an addition are two. Weights in 8 bits or less are
    multiplied in bfloat16, too."""
    source: str
    target: TpuTarget | GpuTarget

    @property
    def is_tpu(self) -> bool:
        return isinstance(self.target, TpuTarget)

    @property
    def usable_bytes(self) -> int:
        """What JAX may use: of a v5e's 16 GiB 15.75, and of a GPU the share that `penstock serve` sets."""
        return int(self.memory_bytes * (15.75 / 16 if self.is_tpu else 0.95))

    @property
    def target_config(self) -> str:
        """What XLA wants to know of a GPU."""
        assert isinstance(self.target, GpuTarget), "TPUs are named by their slices"
        return self.target.text(self.name, self.memory_bytes, self.bytes_per_s)


_TPU_DOCS = "https://docs.cloud.google.com/tpu/docs"
_NVIDIA = "https://www.nvidia.com/en-us"
_LISTED = (
    Chip(
        name="tpu-v5e",
        memory_bytes=16 * _GIB,
        bytes_per_s=819e9,
        flops_per_s=197e12,
        source=f"{_TPU_DOCS}/v5e",
        target=TpuTarget(MappingProxyType({4: "v5e:2x2", 8: "v5e:2x4"})),
    ),
    Chip(
        name="tpu-v5p",
        memory_bytes=95 * _GIB,
        bytes_per_s=2765e9,
        flops_per_s=459e12,
        source=f"{_TPU_DOCS}/v5p",
        target=TpuTarget(MappingProxyType({4: "v5p:2x2x1", 8: "v5p:2x2x2"})),
    ),
    Chip(
        name="tpu-v6e",
        memory_bytes=32 * _GIB,
        bytes_per_s=1638e9,
        flops_per_s=918e12,
        source=f"{_TPU_DOCS}/v6e",
        target=TpuTarget(MappingProxyType({4: "v6e:2x2", 8: "v6e:2x4"})),
    ),
    Chip(  # half a chip
        name="tpu-v7x",
        memory_bytes=96 * _GIB,
        bytes_per_s=3690e9,
        flops_per_s=1153.5e12,
        source=f"{_TPU_DOCS}/tpu7x",
        target=TpuTarget(MappingProxyType({8: "tpu7x:2x2x1"})),
    ),
    Chip(
        name="a100",
        memory_bytes=80 * _GB,
        bytes_per_s=2039e9,
        flops_per_s=312e12,
        source=f"{_NVIDIA}/data-center/a100",
        target=GpuTarget(
            capability=(8, 0),
            cores=108,
            l2_bytes=41_943_040,
            clock_ghz=1.41,
            shared_per_core=167_936,
            shared_per_block=166_912,
            fpus_per_core=64,
        ),
    ),
    Chip(
        name="h100",
        memory_bytes=80 * _GB,
        bytes_per_s=3350e9,
        flops_per_s=989e12,
        source=f"{_NVIDIA}/data-center/h100",
        target=GpuTarget(capability=(9, 0), cores=132, l2_bytes=52_428_800, clock_ghz=1.98),
    ),
    Chip(
        name="h200",
        memory_bytes=141 * _GB,
        bytes_per_s=4800e9,
        flops_per_s=989e12,
        source=f"{_NVIDIA}/data-center/h200",
        target=GpuTarget(capability=(9, 0), cores=132, l2_bytes=62_914_560, clock_ghz=1.98),
    ),
    Chip(
        name="b200",
        memory_bytes=180 * _GB,
        bytes_per_s=8000e9,
        flops_per_s=2250e12,
        source=f"{_NVIDIA}/data-center/dgx-b200",
        target=GpuTarget(capability=(10, 0), cores=148, l2_bytes=132_120_576, clock_ghz=1.965),
    ),
    Chip(
        name="l4",
        memory_bytes=24 * _GB,
        bytes_per_s=300e9,
        flops_per_s=121e12,
        source=f"{_NVIDIA}/data-center/l4",
        target=GpuTarget(capability=(8, 9), cores=58, l2_bytes=50_331_648, clock_ghz=2.04, **_ADA),
    ),
    Chip(
        name="rtx4090",
        memory_bytes=24 * _GB,
        bytes_per_s=1008e9,
        flops_per_s=165.2e12,
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        target=GpuTarget(capability=(8, 9), cores=128, l2_bytes=75_497_472, clock_ghz=2.52, **_ADA),
    ),
    Chip(
        name="rtx5090",
        memory_bytes=32 * _GB,
        bytes_per_s=1792e9,
        flops_per_s=209.5e12,
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/"
        "nvidia-rtx-blackwell-gpu-architecture.pdf",
        target=GpuTarget(capability=(12, 0), cores=170, l2_bytes=100_663_296, clock_ghz=2.41, **_ADA),
    ),
)
CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _LISTED})
"""By their names."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Some devices of one kind, over which a model is cut."""

    chip: Chip
    devices: int = 1

    @property
    def name(self) -> str:
        return f"{self.chip.name}-{self.devices}" if self.devices > 1 else self.chip.name


def read_machine(name: str) -> Machine:
    """Return the machine of a name such as "tpu-v5e-4" or "h100". ConfigError, with all names, if there is no
    such chip.
    """
    matched = re.fullmatch(r"(?P<chip>.+?)(?:-(?P<devices>[1-9][0-9]{0,3}))?", name)
    if matched is None or matched["chip"] not in CHIPS:
        raise ConfigError(
            f"for: {name} is no chip of the table; write a number of devices behind one of these, as in "
            f"tpu-v5e-4: {', '.join(CHIPS)}"
        )
    return Machine(CHIPS[matched["chip"]], int(matched["devices"] or 1))


def all_machines() -> tuple[Machine, ...]:
    """Yield each chip as 1, 2, 4 and 8 devices."""
    sizes = (1, 2, 4, MOST_COMPILED)
    return tuple(Machine(chip, size) for chip in CHIPS.values() for size in sizes)
