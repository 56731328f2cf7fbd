"""The forms that the kernels have on generations of GPUs. It imports no Pallas, which takes a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class GpuForm:
    """How the kernels compute on a generation of GPUs."""

    name: str
    """Of the generation."""
    by_warps: bool
    """Each warp multiplies by itself, by an instruction that all GPUs since Ampere have, instead of a whole
    warpgroup by one that only Hopper has. It needs JAX 0.11.
    """
    in_tensor_memory: bool
    """The kernel for chunks multiplies by `tensor_memory` instead, which a B200 has."""
    shared_bytes: int
    """Shared memory that a block can have."""


ON_HOPPER = GpuForm("Hopper", by_warps=False, in_tensor_memory=False, shared_bytes=227 * 1024)
ON_B200 = GpuForm("B200", by_warps=True, in_tensor_memory=True, shared_bytes=227 * 1024)
ON_RTX_50 = GpuForm("RTX 50", by_warps=True, in_tensor_memory=False, shared_bytes=99 * 1024)
FORMS: Mapping[str, GpuForm] = MappingProxyType({"9.0": ON_HOPPER, "10.0": ON_B200, "12.0": ON_RTX_50})
"""By the compute capability of the GPUs."""
