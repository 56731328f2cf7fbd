"""What the tests of kernels for GPUs share."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the bytes of each copy that the interpreter makes to shared memory."""
    copies = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    task, found = copies.AsyncCopyGmemToSmemTask, []
    read = task.pre_read

    def counting(copy: Any, thread: Any, memory: Any) -> None:
        dtype = memory.buffer_shape_and_dtype(copy.dst_allocation_key).dtype
        found.append(int(np.prod(copy.src_access.shape)) * np.dtype(dtype).itemsize)
        read(copy, thread, memory)

    monkeypatch.setattr(task, "pre_read", counting)
    return found
