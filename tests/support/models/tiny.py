"""Tiny Qwen3 checkpoints of the same shape and different weights. Native kernels compute all of it, so tokens
and log-probabilities can be compared bit for bit, whatever else runs.

Weights are larger than those of `bench.checkpoint`: its tiny model repeats the last token, whatever its seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bench.checkpoint import SHAPES, safetensors_header, tensor_shapes, write_checkpoint

SHAPE = SHAPES["tiny"]
VOCAB = SHAPE.vocab_size
Tensors = Mapping[str, NDArray[Any]]
_DEVIATION = 0.3


def tiny_tensors(seed: int) -> Tensors:
    """All tensors of a checkpoint as bfloat16 arrays, in the order of the file."""
    draw = np.random.default_rng(seed)
    found = {}
    for name, shape in tensor_shapes(SHAPE).items():
        mean = 1.0 if "norm" in name else 0.0
        values = mean + _DEVIATION * draw.standard_normal(shape, np.float32)
        found[name] = values.astype(ml_dtypes.bfloat16)
    return found


def write_tiny(directory: Path, tensors: Tensors) -> Path:
    """Write a checkpoint that `Engine.from_pretrained` loads, and return its directory."""
    write_checkpoint(directory, SHAPE)
    write_bfloat16(directory / "model.safetensors", tensors)
    return directory


def write_bfloat16(file: Path, tensors: Tensors) -> None:
    """Write a safetensors file of bfloat16 tensors."""
    header = safetensors_header({name: tensor.shape for name, tensor in tensors.items()})
    file.write_bytes(header + b"".join(tensor.tobytes() for tensor in tensors.values()))
