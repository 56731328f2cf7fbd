"""Makes tensors of arrays: NumPy's, with the dtypes of ml_dtypes, JAX's, and all that NumPy can read.

NumPy itself is only needed by those who have arrays, so it is not imported here: an array brings its methods.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.client.requests.checks import Violations
from penstock.client.weights.tensors import Tensor
from penstock.v1 import weights_pb2

_DTYPES: Mapping[str, weights_pb2.DataType.ValueType] = {
    "bfloat16": weights_pb2.DATA_TYPE_BF16,
    "float16": weights_pb2.DATA_TYPE_F16,
    "float32": weights_pb2.DATA_TYPE_F32,
    "float8_e4m3fn": weights_pb2.DATA_TYPE_F8_E4M3,
    "float8_e5m2": weights_pb2.DATA_TYPE_F8_E5M2,
    "int8": weights_pb2.DATA_TYPE_I8,
    "int4": weights_pb2.DATA_TYPE_I4,
}
"""From the name of NumPy's dtype."""
_TORCH_HINT = "; of a bfloat16 tensor give tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)"


def tensors_of(arrays: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Make tensors of arrays, in the order of the mapping. Nothing is copied.

    Raises TypeError for a name that is no text or a value that is no array, and InvalidRequest, with every
    bad tensor, for arrays that cannot be sent.
    """
    violations = Violations()
    found: list[Tensor] = []
    for name, value in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"names of tensors are text, not {name!r}")
        with violations.of(f"tensors[{name!r}]"):
            found.append(_tensor(name, value))
    violations.tell()
    return tuple(found)


def _tensor(name: str, value: Any) -> Tensor:
    # JAX's arrays tell dtype and shape as NumPy's do. They are copied to the host only when they are sent.
    described = value if hasattr(getattr(value, "dtype", None), "byteorder") else _as_numpy(name, value)
    dtype = _DTYPES.get(described.dtype.name)
    if dtype is None:
        raise ValueError(f"{described.dtype.name} cannot be sent; convert it to one of {', '.join(_DTYPES)}")
    shape = tuple(described.shape)
    count = math.prod(shape)
    is_packed = dtype == weights_pb2.DATA_TYPE_I4
    num_bytes = (count + 1) // 2 if is_packed else count * described.dtype.itemsize

    def pieces(size: int) -> Iterator[bytes]:
        flat = _bytes_of(_as_numpy(name, described))
        data = _packed(flat) if is_packed else flat
        for begin in range(0, num_bytes, size):
            yield data[begin : begin + size].tobytes()

    return Tensor(name, dtype, shape, num_bytes, pieces)


def _as_numpy(name: str, value: Any) -> Any:
    """The value as a NumPy array, without a copy where NumPy needs none. Raises TypeError if it is no array,
    and ValueError if NumPy cannot read it.
    """
    try:
        if hasattr(value, "__array__"):
            return value.__array__()
        if hasattr(value, "__dlpack__"):
            return importlib.import_module("numpy").from_dlpack(value)
    except (TypeError, RuntimeError, BufferError) as error:
        hint = _TORCH_HINT if type(value).__module__.startswith("torch") else ""
        raise ValueError(f"NumPy cannot read it: {error}{hint}") from error
    raise TypeError(f"{name}: {type(value).__name__} is no array")


def _bytes_of(array: Any) -> Any:
    """The array's bytes in row-major order as an array of uint8; a copy only if they are not so in memory."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.ravel().view("uint8")


def _packed(nibbles: Any) -> Any:
    """Two int4 in each byte, the first one in the low half. NumPy holds each in a byte of its own."""
    packed, high = nibbles[0::2] & 0xF, nibbles[1::2] & 0xF
    packed[: high.size] |= high << 4
    return packed
