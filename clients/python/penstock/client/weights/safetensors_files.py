"""Makes tensors of safetensors files, whose bytes are read when they are sent, and never all at once.

The format is 8 bytes of little-endian length, a JSON object {name: {dtype, shape, data_offsets}}, and the
data. The package safetensors reads whole tensors, and bfloat16 only with PyTorch or JAX, so files are read
here. Source: https://github.com/huggingface/safetensors (section on the format).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.client.requests.checks import Violations
from penstock.client.weights.tensors import Tensor
from penstock.v1 import weights_pb2

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_DTYPES: Mapping[str, tuple[weights_pb2.DataType.ValueType, int]] = {
    "BF16": (weights_pb2.DATA_TYPE_BF16, 2),
    "F16": (weights_pb2.DATA_TYPE_F16, 2),
    "F32": (weights_pb2.DATA_TYPE_F32, 4),
    "F8_E4M3": (weights_pb2.DATA_TYPE_F8_E4M3, 1),
    "F8_E5M2": (weights_pb2.DATA_TYPE_F8_E5M2, 1),
    "I8": (weights_pb2.DATA_TYPE_I8, 1),
}
"""From the format's name of a dtype to the contract's, and the bytes of an element."""


def tensors_in(path: str | os.PathLike[str]) -> tuple[Tensor, ...]:
    """The tensors of a safetensors file, or of a directory: those of model.safetensors, else of the files
    that model.safetensors.index.json names, else of all *.safetensors in it. Reads headers only.

    Raises OSError for what cannot be read, ValueError for what is no complete safetensors file, and
    InvalidRequest, with every bad tensor, for dtypes that cannot be sent.
    """
    violations = Violations()
    found: dict[str, Tensor] = {}
    for file in _files(Path(path)):
        header, start = _header(file)
        for name, fields in header.items():
            if name in found:
                raise ValueError(f"the tensor {name} is in {file} and in another file of {path}")
            with violations.of(f"tensors[{name!r}]"):
                found[name] = _tensor(file, start, name, fields)
    violations.tell()
    return tuple(found.values())


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    index = path / _INDEX
    if not index.is_file():
        if found := sorted(path.glob("*.safetensors")):
            return found
        raise FileNotFoundError(f"{path} holds no *.safetensors files")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("it names files outside its directory")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files: {error}") from error
    return [path / name for name in names]


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The entries of a file, and where its data starts. Raises ValueError if the file is not complete."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = 8 + int.from_bytes(stream.read(8), "little")
            if not 8 < start <= min(size, _MAX_HEADER_BYTES):
                raise ValueError(f"its header would end at byte {start}, and it has {size}")
            header = json.loads(stream.read(start - 8))
        header.pop("__metadata__", None)
        ends = [start + int(fields["data_offsets"][1]) for fields in header.values()]
        if max(ends, default=start) != size:
            raise ValueError(f"its header describes {max(ends, default=start)} bytes, and it has {size}")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no complete safetensors file: {error}") from error
    return header, start


def _tensor(file: Path, start: int, name: str, fields: Mapping[str, Any]) -> Tensor:
    try:
        begin, end = (int(offset) for offset in fields["data_offsets"])
        shape, spelled = tuple(int(length) for length in fields["shape"]), str(fields["dtype"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"its entry in {file} is damaged: {error}") from error
    if spelled not in _DTYPES:
        raise ValueError(f"{spelled} cannot be sent; convert it to one of {', '.join(_DTYPES)}")
    dtype, item_bytes = _DTYPES[spelled]
    num_bytes = math.prod(shape) * item_bytes
    if begin < 0 or min(shape, default=0) < 0 or end - begin != num_bytes:
        raise ValueError(f"its shape {shape} does not fit its place in {file}")

    def pieces(size: int) -> Iterator[bytes]:
        # not by a memory map: the process would be killed if somebody made the file shorter meanwhile
        with file.open("rb") as stream:
            for offset in range(0, num_bytes, size):
                wanted = min(size, num_bytes - offset)
                piece = os.pread(stream.fileno(), wanted, start + begin + offset)
                if len(piece) < wanted:
                    raise OSError(f"{file} has become shorter while it was read")
                yield piece

    return Tensor(name, dtype, shape, num_bytes, pieces)
