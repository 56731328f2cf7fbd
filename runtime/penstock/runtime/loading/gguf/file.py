"""Reads GGUF files: the header with its metadata, and where each tensor lies.

Whoever made a file may have made it to do harm. So every count, length, type, shape and offset is compared
with what the file has before anything is allocated for it, and whatever is wrong is a ConfigError that names
the file and the key or tensor. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import itertools
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.gguf.block_types import BLOCK_TYPES, NOT_READ, BlockType
from penstock.runtime.model_files import check_downloaded

SUFFIX = ".gguf"
Value: TypeAlias = bool | int | float | str | list[Any]
"""A value of the metadata; an array is a list."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: Mapping[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
"""The number of a type of values to how a file has them."""
_LEAST_KEY = 8 + 1 + 4 + 1
_LEAST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8
"""The bytes that no key with its value, and no description of a tensor, can have less than."""
_MOST_DIMENSIONS = 4
_MOST_NAME = 1 << 16
_ALIGNMENT = 32
_MOST_ALIGNMENT = 1 << 20
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies, and in which blocks."""

    file: Path
    offset: int
    """From the file's begin, in bytes."""
    shape: tuple[int, ...]
    """As PyTorch writes it: rows first. A file has the sizes in reverse."""
    type: BlockType

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which is a whole number of blocks."""
        return self.shape[-1] // self.type.values * self.type.num_bytes

    @property
    def num_rows(self) -> int:
        """How many rows all matrices of the tensor have together."""
        return math.prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return self.num_rows * self.row_bytes

    def blocks(self, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """Return a read-only memory map of rows `begin` to `end` as they are stored, [rows, row_bytes]."""
        rows = max(0, end - begin)
        if rows == 0:
            return np.zeros((0, self.row_bytes), np.uint8)
        size = (rows, self.row_bytes)
        return np.memmap(self.file, np.uint8, "r", self.offset + begin * self.row_bytes, size)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a model's file, or of all its parts."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]


def is_gguf(path: Path) -> bool:
    """Say whether this names a GGUF file, which must be there."""
    return path.suffix.lower() == SUFFIX and path.is_file()


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file and, if it is the first of several parts, those of the others."""
    first = _read_one(path)
    count, number = (_integer(first, f"split.{name}", default) for name, default in (("count", 1), ("no", 0)))
    named = _PART.search(path.name)
    if count <= 1:
        if named and int(named[2]) > 1:
            raise ConfigError(f"{path}: its name is that of a part, but split.count does not say so")
        return first
    if named is None or int(named[2]) != count or int(named[1]) != number + 1:
        raise ConfigError(
            f"{path}: split.no {number} and split.count {count} say that it is a part of a model, and then "
            f"its name must end with -{number + 1:05}-of-{count:05}.gguf; rename it as it was published"
        )
    begin = path.name[: named.start()]
    parts = [path.with_name(f"{begin}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    if number:
        raise ConfigError(f"{path} is part {number + 1} of {count}; give the first, {parts[0]}")
    absent = [part.name for part in itertools.islice((p for p in parts if not p.is_file()), 4)]
    if absent:
        raise ConfigError(f"{path} has {count} parts, of which {', '.join(absent)} are not beside it")
    tensors = dict(first.tensors)
    for number, part in enumerate(parts[1:], 1):
        other = _read_one(part)
        if (_integer(other, "split.no", 0), _integer(other, "split.count", 1)) != (number, count):
            raise ConfigError(
                f"{part}: split.no and split.count do not say that it is part {number + 1} of {count}"
            )
        for name, info in other.tensors.items():
            if name in tensors:
                raise ConfigError(f"tensor {name} is in both {tensors[name].file} and {part}")
            tensors[name] = info
    total = _integer(first, "split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ConfigError(
            f"{path}: split.tensors.count is {total}, and its parts have {len(tensors)} tensors"
        )
    return replace(first, tensors=tensors)


def _integer(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{file.path}: {key} must be an integer, not {_short(value)}")
    return value


def _short(value: object) -> str:
    """Shorten a value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class _Wrong(Exception):
    """What is wrong with a file."""


def _read_one(path: Path) -> GgufFile:
    try:
        with path.open("rb") as stream:
            begin = stream.read(512)
            check_downloaded(path, begin)
            if not begin.startswith(_MAGIC):
                raise _Wrong('it does not begin with "GGUF"')
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(path, data).read()
    except (OSError, _Wrong) as error:
        raise ConfigError(
            f"{path} is not a complete GGUF file of a kind that is read here: {error}; if the download or "
            "the copy was cut short, download it again"
        ) from error


class _Header:
    """Reads one file from its begin on."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size = path, data, len(data)
        self._at = len(_MAGIC)
        self._what = "the header"
        """What is read, for messages."""

    def read(self) -> GgufFile:
        version = self._number(4)
        if version not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                raise _Wrong("it is big-endian; only little-endian files are read")
            raise _Wrong(f"its version is {version}; supported: {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_keys = self._number(10), self._number(10)
        self._check_count(num_keys, _LEAST_KEY, "keys")
        metadata: dict[str, Value] = {}
        for i in range(num_keys):
            self._what = f"key {i}"
            key = self._text(_MOST_NAME)
            self._what = f"key {_short(key)}"
            if not key or key in metadata:
                raise _Wrong(f"{self._what} is {'there twice' if key else 'empty'}")
            metadata[key] = self._value()
        self._check_count(num_tensors, _LEAST_TENSOR, "tensors")
        found = [self._tensor(i) for i in range(num_tensors)]
        begin = -(-self._at // self._alignment(metadata)) * self._alignment(metadata)
        tensors: dict[str, TensorInfo] = {}
        for name, info in found:
            if name in tensors:
                raise _Wrong(f"tensor {_short(name)} is there twice")
            tensors[name] = replace(info, offset=begin + info.offset)
            end = tensors[name].offset + info.num_bytes
            if info.offset % self._alignment(metadata):
                raise _Wrong(f"tensor {_short(name)} begins at {info.offset}, which is not aligned")
            if end > self._size:
                raise _Wrong(f"tensor {_short(name)} would end at byte {end}, and the file has {self._size}")
        in_order = sorted(tensors.items(), key=lambda named: named[1].offset)
        for (one, first), (other, second) in itertools.pairwise(in_order):
            if first.offset + first.num_bytes > second.offset:
                raise _Wrong(f"tensors {_short(one)} and {_short(other)} overlap")
        return GgufFile(self._path, metadata, tensors)

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        value = metadata.get("general.alignment", _ALIGNMENT)
        if type(value) is not int or not 0 < value <= _MOST_ALIGNMENT or value & (value - 1):
            raise _Wrong(f"general.alignment must be a power of two, not {_short(value)}")
        return value

    def _take(self, num_bytes: int) -> int:
        """Go over the next bytes, and return where they begin."""
        begin = self._at
        if num_bytes > self._size - begin:
            raise _Wrong(f"{self._what} ends behind the file's end")
        self._at += num_bytes
        return begin

    def _check_count(self, count: int, least: int, what: str) -> None:
        if count > (self._size - self._at) // least:
            raise _Wrong(f"{self._what} would have {count} {what}, for which the file is too short")

    def _number(self, kind: int) -> Any:
        dtype = _NUMBERS[kind]
        return np.frombuffer(self._data, dtype, 1, self._take(dtype.itemsize))[0].item()

    def _text(self, most: int | None = None) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self._take(8))
        if most is not None and length > most:
            raise _Wrong(f"{self._what} has a name of {length} bytes")
        begin = self._take(length)
        try:
            return self._data[begin : begin + length].decode()
        except UnicodeDecodeError as error:
            raise _Wrong(f"{self._what} is no UTF-8: {error}") from error

    def _texts(self, count: int) -> list[str]:
        """Read so many texts as `_text` would. A vocabulary has a quarter of a million, so nothing is done
        for each that need not be.
        """
        data, at, last = self._data, self._at, self._size - 8
        length_at, texts = struct.Struct("<Q").unpack_from, list[str]()
        try:
            for _ in range(count):
                if at > last:
                    raise _Wrong(f"{self._what} ends behind the file's end")
                begin = at + 8
                at = begin + length_at(data, at)[0]
                if at > self._size:
                    raise _Wrong(f"{self._what} ends behind the file's end")
                texts.append(data[begin:at].decode())
        except UnicodeDecodeError as error:
            raise _Wrong(f"{self._what} is no UTF-8: {error}") from error
        self._at = at
        return texts

    def _value(self) -> Value:
        kind = self._number(4)
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _NUMBERS:
            raise _Wrong(f"{self._what} has a value of type {kind}, which is not known")
        value: bool | int | float = self._number(kind)
        return self._truth(value) if kind == _BOOL else value

    def _truth(self, value: object) -> bool:
        if value not in (0, 1):
            raise _Wrong(f"{self._what} must be true or false, not {value}")
        return bool(value)

    def _array(self) -> list[Any]:
        kind, count = self._number(4), self._number(10)
        if kind == _STRING:
            self._check_count(count, 8, "texts")
            return self._texts(count)
        if kind not in _NUMBERS:
            raise _Wrong(f"{self._what} is an array of type {kind}, which is not known or not supported")
        dtype = _NUMBERS[kind]
        self._check_count(count, dtype.itemsize, "values")
        values: list[Any] = np.frombuffer(
            self._data, dtype, count, self._take(count * dtype.itemsize)
        ).tolist()
        return [self._truth(value) for value in values] if kind == _BOOL else values

    def _tensor(self, number: int) -> tuple[str, TensorInfo]:
        self._what = f"tensor {number}"
        name = self._text(_MOST_NAME)
        self._what = f"tensor {_short(name)}"
        num_dimensions = self._number(4)
        if not name or not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise _Wrong(f"{self._what} has {num_dimensions} dimensions")
        shape = tuple(reversed([self._number(10) for _ in range(num_dimensions)]))
        kind, offset = self._number(4), self._number(10)
        if kind not in BLOCK_TYPES:
            stored = NOT_READ.get(kind, f"number {kind}")
            known = ", ".join(block.name for block in BLOCK_TYPES.values())
            raise _Wrong(
                f"{self._what} is stored in type {stored}, which is not supported; supported: {known}"
            )
        block = BLOCK_TYPES[kind]
        if 0 in shape or shape[-1] % block.values:
            raise _Wrong(f"{self._what} has shape {shape}, which {block.name} cannot have")
        info = TensorInfo(self._path, offset, shape, block)
        if offset > self._size or info.num_bytes > self._size:
            raise _Wrong(f"{self._what} of shape {shape} in {block.name} is larger than the file")
        return name, info
