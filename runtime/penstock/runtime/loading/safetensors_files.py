"""Reads safetensors files through memory maps, bfloat16 included.

safetensors' own `safe_open(framework="np")` has no bfloat16 (TypeError up to 0.8), so the format is read
here: 8 bytes of little-endian length, a JSON object {name: {dtype, shape, data_offsets}}, and the data
without holes. Source: https://github.com/huggingface/safetensors (section on the format).
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.dtypes import DTYPES
from penstock.runtime.model_files import check_downloaded

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a header raises that is no header."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: file, byte offset from the file's start, dtype and shape."""

    file: Path
    offset: int
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def map(self) -> npt.NDArray[np.generic]:
        """Return a read-only memory map of the tensor, which is unmapped when the array and all its views are
        gone.
        """
        if self.num_bytes == 0:
            return np.zeros(self.shape, self.dtype)
        raw = np.memmap(self.file, np.uint8, "r", self.offset, (self.num_bytes,))
        return raw.view(self.dtype).reshape(self.shape)

    def __getitem__(self, part: slice | tuple[slice, ...]) -> npt.NDArray[Any]:
        """Return a memory map of the bytes from the first to the last of these consecutive entries only. With
        a map of the whole tensor, everything that was read of it would count as this process's memory.
        """
        index = part if isinstance(part, tuple) else (part,)
        offset, shape, mapped = self.offset, list(self.shape), 0
        for axis, along in enumerate(index):
            begin, end, step = along.indices(self.shape[axis])
            if step != 1:
                raise ValueError("entries are read one after the other")
            offset += begin * math.prod(self.shape[axis + 1 :]) * self.dtype.itemsize
            shape[axis], mapped = max(0, end - begin), axis + 1
            if shape[axis] != 1:
                break
        found = TensorEntry(self.file, offset, self.dtype, tuple(shape)).map()
        return found[(*(slice(None),) * mapped, *index[mapped:])]


def find_tensors(directory: Path) -> dict[str, TensorEntry]:
    """Find every tensor of a checkpoint directory: those of model.safetensors, or of the shards that its
    index lists.

    Only headers are read. Raises ConfigError, which says what to do, for absent, truncated and corrupt files.
    """
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    if single.is_file():
        return read_header(single)
    if index.is_file():
        return _sharded(directory, index)
    refuse_gguf_in(directory)
    other = sorted(p.name for pattern in ("*.bin", "*.pth", "*.pt") for p in directory.glob(pattern))
    hint = (
        f"found {', '.join(other)}, which is another format: convert it with transformers' "
        "save_pretrained(..., safe_serialization=True)"
        if other
        else "download the *.safetensors files of the model into it, or give another directory"
    )
    raise ConfigError(f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}; {hint}")


def refuse_gguf_in(directory: Path) -> None:
    """Raise ConfigError if a directory, in which something is missing, has a model in another form."""
    gguf = sorted(directory.glob("*.gguf"))
    if gguf:
        raise ConfigError(f"{directory} holds a GGUF file; give the file itself: {gguf[0]}")


def _sharded(directory: Path, index: Path) -> dict[str, TensorEntry]:
    try:
        text = index.read_bytes()
    except OSError as error:
        raise ConfigError(f"{index} cannot be read ({error}); download it again") from error
    places = read_index(index, text)
    shards = sorted(set(places.values()))
    absent = [shard for shard in shards if not (directory / shard).is_file()]
    if absent:
        raise ConfigError(
            f"{index} names {len(absent)} of {len(shards)} shards that are not there: {', '.join(absent)}; "
            "the download is incomplete: download the missing files again"
        )
    found = joined(directory, [read_header(directory / shard) for shard in shards])
    check_places(index, places, found)
    return found


def read_index(index: Path, text: bytes) -> dict[str, str]:
    """Read the weight map of an index: tensor to the name of its shard. Raises ConfigError if this is no
    index, or names files outside its directory.
    """
    check_downloaded(index, text)
    try:
        places = {str(name): str(shard) for name, shard in json.loads(text)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is not a safetensors index ({error!r}); download it again") from error
    outside = sorted({shard for shard in places.values() if shard == ".." or Path(shard).name != shard})
    if outside:
        raise ConfigError(f"{index} names files outside its own directory: {', '.join(outside)}")
    return places


def joined(directory: Path, headers: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Join the tensors of all files of a directory. Raises ConfigError if two have one of the same name."""
    found: dict[str, TensorEntry] = {}
    for header in headers:
        for name, entry in header.items():
            if name in found:
                raise ConfigError(
                    f"tensor {name} is in both {found[name].file.name} and {entry.file.name} of {directory}"
                )
            found[name] = entry
    return found


def check_places(index: Path, places: Mapping[str, str], found: Mapping[str, TensorEntry]) -> None:
    """Raise ConfigError unless each tensor is where the index says."""
    misplaced = sorted(n for n, s in places.items() if n not in found or found[n].file.name != s)
    if misplaced:
        raise ConfigError(
            f"{index} does not describe its shards; not where it says: {', '.join(misplaced)}; "
            "index and shards are of different downloads: download all of them again"
        )


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read the tensors of one file. Raises ConfigError if the file is truncated or is not a safetensors
    file.
    """
    try:
        with file.open("rb") as stream:
            return header_of(file, stream.fileno())
    except OSError as error:
        raise _damaged(file, error) from error


def read_metadata(file: Path) -> dict[str, str]:
    """Read what a file says beside its tensors. Raises ConfigError as `read_header` does."""
    try:
        with file.open("rb") as stream:
            told = _header(file, stream.fileno())[0].get("__metadata__", {})
        return {str(name): str(value) for name, value in told.items()}
    except _DAMAGE as error:
        raise _damaged(file, error) from error


def header_of(file: Path, descriptor: int) -> dict[str, TensorEntry]:
    """Do the same as `read_header`, of a file that is open."""
    try:
        return _parse_header(file, *_header(file, descriptor))
    except _DAMAGE as error:
        raise _damaged(file, error) from error


def _header(file: Path, descriptor: int) -> tuple[Mapping[str, Mapping[str, object]], int, int]:
    """Read the header, where the data begin, and the file's size."""
    check_downloaded(file, os.pread(descriptor, 512, 0))
    size = os.fstat(descriptor).st_size
    prefix = os.pread(descriptor, 8, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"its header would be {length} bytes long and the file has {size}")
    return json.loads(os.pread(descriptor, length, 8)), 8 + length, size


def _damaged(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{file} is not a complete safetensors file ({error}); the download or the copy was cut short or "
        "damaged: download it again"
    )


def _parse_header(
    file: Path, header: Mapping[str, Mapping[str, object]], start: int, size: int
) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    spans: list[tuple[int, int]] = []
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        name.encode()  # a name that is no Unicode raises ValueError; nobody could write it down
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name} has dtype {dtype}, unknown to this build")
        if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"tensor {name} has shape {shape}")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(isinstance(n, int) for n in offsets):
            raise ValueError(f"tensor {name} has offsets {offsets}")
        begin, end = offsets
        entry = TensorEntry(file, start + begin, DTYPES[str(dtype)], tuple(shape))
        if begin < 0 or end - begin != entry.num_bytes:
            raise ValueError(f"tensor {name} of shape {shape} and dtype {dtype} has offsets {offsets}")
        entries[name] = entry
        spans.append((begin, end))
    end = 0
    for begin, stop in sorted(spans):
        if begin != end:
            raise ValueError(f"its tensors overlap or leave a hole at byte {end} of the data")
        end = stop
    if start + end != size:
        raise ValueError(f"its header describes {start + end} bytes and the file has {size}")
    return entries
