"""The tensors of an update, of arrays and of safetensors files, and what is computed of all of their bytes.

Arrays are NumPy's, with the dtypes of ml_dtypes, JAX's, and all that NumPy can read. NumPy itself is only
needed by those who have arrays, so it is not imported here: an array brings its methods.

The bytes of safetensors files are read when they are sent, and never all at once. The format is 8 bytes of
little-endian length, a JSON object {name: {dtype, shape, data_offsets}}, and the data. The package
safetensors reads whole tensors, and bfloat16 only with PyTorch or JAX, so files are read here. Source:
https://github.com/huggingface/safetensors (section on the format).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c

from penstock.client.generation.checks import Violations
from penstock.v1 import weights_pb2

Tensors = Mapping[str, Any] | str | os.PathLike[str]
"""Arrays by the names that they have in a checkpoint, or the path of a safetensors file or of a directory of
them.
"""
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, whose bytes are read anew whenever they are wanted."""

    name: str
    dtype: weights_pb2.DataType.ValueType
    shape: tuple[int, ...]
    num_bytes: int
    """Its size on the wire: int4 takes half a byte for each element."""
    pieces: Callable[[int], Iterator[bytes]]
    """Yields its bytes, little-endian and row-major, in pieces of at most this many bytes."""


def crc32c_of(tensor: Tensor) -> int:
    """Compute the CRC32C (Castagnoli) of the tensor's bytes."""
    crc = 0
    for piece in tensor.pieces(_PIECE_BYTES):
        crc = google_crc32c.extend(crc, piece)
    return crc


def manifest_of(tensors: Sequence[Tensor], *, checksums: bool) -> weights_pb2.TensorManifest:
    """Describe the tensors. For checksums all of their bytes are read."""
    return weights_pb2.TensorManifest(
        tensors=[
            weights_pb2.TensorSpec(
                name=t.name, dtype=t.dtype, shape=t.shape, crc32c=crc32c_of(t) if checksums else 0
            )
            for t in tensors
        ]
    )


def digest_of(tensors: Sequence[Tensor]) -> bytes:
    """Compute the digest of an update with these tensors, as UpdateWeightsResponse.digest defines it."""
    whole = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda t: t.name):
        own = hashlib.sha256()
        for piece in tensor.pieces(_PIECE_BYTES):
            own.update(piece)
        dtype = weights_pb2.DataType.Name(tensor.dtype).removeprefix("DATA_TYPE_")
        shape = ",".join(map(str, tensor.shape))
        whole.update(f"{tensor.name} {dtype} {shape} {own.hexdigest()}\n".encode())
    return whole.digest()


_ARRAY_DTYPES: Mapping[str, weights_pb2.DataType.ValueType] = {
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
            found.append(_array_tensor(name, value))
    violations.tell()
    return tuple(found)


def _array_tensor(name: str, value: Any) -> Tensor:
    # JAX's arrays tell dtype and shape as NumPy's do. They are copied to the host only when they are sent.
    described = value if hasattr(getattr(value, "dtype", None), "byteorder") else _as_numpy(name, value)
    dtype = _ARRAY_DTYPES.get(described.dtype.name)
    if dtype is None:
        raise ValueError(
            f"{described.dtype.name} cannot be sent; convert it to one of {', '.join(_ARRAY_DTYPES)}"
        )
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
    """Return the value as a NumPy array, without a copy where NumPy needs none. Raises TypeError if it is no
    array, and ValueError if NumPy cannot read it.
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
    """Return the array's bytes in row-major order as an array of uint8; a copy only if they are not so in
    memory.
    """
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.ravel().view("uint8")


def _packed(nibbles: Any) -> Any:
    """Pack two int4 in each byte, the first one in the low half. NumPy holds each in a byte of its own."""
    packed, high = nibbles[0::2] & 0xF, nibbles[1::2] & 0xF
    packed[: high.size] |= high << 4
    return packed


_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MODULES = "modules.json"
"""The file in which Sentence Transformers lists the parts of a model, each with the folder that it is in."""
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
    """List the tensors of a safetensors file, or of a directory: those of model.safetensors, else of the
    files that model.safetensors.index.json names, else of all *.safetensors in it. Where modules.json lists
    layers behind the pooling (Dense), those in their folders follow, with names that begin with the folder,
    as in 2_Dense.linear.weight. Reads headers only.

    Raises OSError for what cannot be read, ValueError for what is no complete safetensors file, and
    InvalidRequest, with every bad tensor, for dtypes that cannot be sent.
    """
    violations, folder = Violations(), Path(path)
    found: dict[str, Tensor] = {}
    files = [("", file) for file in _files(folder)]
    for behind in _folders_behind_pooling(folder):
        files += [(f"{behind}.", file) for file in _files(folder / behind)]
    for prefix, file in files:
        header, start = _header(file)
        for own_name, fields in header.items():
            name = prefix + own_name
            if name in found:
                raise ValueError(f"the tensor {name} is in {file} and in another file of {path}")
            with violations.of(f"tensors[{name!r}]"):
                found[name] = _tensor(file, start, name, fields)
    violations.tell()
    return tuple(found.values())


def _folders_behind_pooling(path: Path) -> list[str]:
    """List the folders that modules.json names for layers behind the pooling; none for other checkpoints."""
    modules = path / _MODULES
    if not modules.is_file():
        return []
    try:
        parts = json.loads(modules.read_text(encoding="utf-8"))
        folders = [str(part["path"]) for part in parts if str(part["type"]).rpartition(".")[2] == "Dense"]
        if any(folder in ("", "..") or Path(folder).name != folder for folder in folders):
            raise ValueError("it names folders outside its directory")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{modules} is no list of modules: {error}") from error
    return folders


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
    """Read the entries of a file, and where its data starts. Raises ValueError if the file is not
    complete.
    """
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
