"""The dtypes of tensors by the names that safetensors files and the contract give them. No jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from penstock.runtime.sent_tensors import SentTensor

DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""What numpy, with ml_dtypes, has arrays of. No model takes I4, of which two values share a byte."""
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype; numpy's own for one that no safetensors file holds."""
    return _NAMES.get(dtype, str(dtype))


def is_float(dtype: str) -> bool:
    """Say whether a dtype of this name is one of floats that can be converted to any other."""
    return dtype in _FLOATS


def num_bytes(tensor: SentTensor) -> int | None:
    """Compute the bytes that all values of a tensor take; None for a dtype that is not known."""
    num_values = math.prod(tensor.shape)
    if tensor.dtype == "I4":
        return -(-num_values // 2)
    return num_values * DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else None
