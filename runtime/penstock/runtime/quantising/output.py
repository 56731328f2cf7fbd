"""Writes the folder of a quantised checkpoint, in the form of compressed-tensors that is called
pack-quantized.

The folder is made under another name beside its place, and takes its own name when it is whole. Whatever ends
the work before removes it, but for what ends the process at once: what that left is removed by the next
process that makes the same folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import shutil
import signal
import struct
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.loading.safetensors_files import INDEX_NAME, TensorEntry
from penstock.runtime.models.quantised import Codes
from penstock.runtime.quantising.options import Scheme

_log = logging.getLogger(__name__)
_COPIED_AT_ONCE = 1 << 24
_UNFINISHED = "-unfinished-"
"""Stands behind a folder's name while it is filled."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Endings of files that may hold the weights in floats, and are not copied."""
_MADE = ("config.json", INDEX_NAME)
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor of the new checkpoint before its values are known."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def packed_shapes(num_out: int, num_in: int, scheme: Scheme) -> dict[str, Shape]:
    """Return what the names of a quantised layer's tensors end in, and the tensors."""
    groups, int32 = num_in // scheme.group, np.dtype(np.int32)
    found = {
        "weight_packed": Shape(int32, (num_out, num_in * scheme.bits // 32)),
        "weight_scale": Shape(scheme.scale_dtype, (num_out, groups)),
        "weight_shape": Shape(np.dtype(np.int64), (2,)),
    }
    if scheme.zeros:
        found["weight_zero_point"] = Shape(int32, (num_out * scheme.bits // 32, groups))
    return found


def packed(codes: Codes, scheme: Scheme) -> dict[str, NDArray[Any]]:
    """Return the tensors of a layer with these codes. A word has neighbouring inputs of one output, of zeros
    neighbouring outputs of one group; the first is in the low bits, and half of the range is added to all.
    """
    found: dict[str, NDArray[Any]] = {
        "weight_packed": _words(codes.codes, scheme.bits),
        "weight_scale": codes.scales.astype(scheme.scale_dtype),
        "weight_shape": np.array(codes.codes.shape, np.int64),
    }
    if codes.zeros is not None:
        found["weight_zero_point"] = np.ascontiguousarray(_words(codes.zeros.T, scheme.bits).T)
    return found


def _words(numbers: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Pack signed codes [..., n] as words [..., n * bits / 32]."""
    unsigned = (numbers.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    if bits == 4:
        unsigned = unsigned[..., 0::2] | np.left_shift(unsigned[..., 1::2], 4, dtype=np.uint8)
    return np.ascontiguousarray(unsigned).view("<i4")


def quantization_config(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any]:
    """Return what config.json says of the layers. ignore: the layers that stay as they were."""
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": not scheme.zeros,
        "strategy": "group",
        "group_size": scheme.group,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
        "block_structure": None,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def check_target(target: Path, num_bytes: int) -> None:
    """Raise ConfigError if the folder is there already, or cannot be made, or has no room for so much."""
    parent = target.absolute().parent
    try:
        is_there = target.exists() or target.is_symlink()
    except OSError as error:  # such as a name that is too long
        raise ConfigError(f"{target} cannot be made: {error}") from error
    if is_there:
        raise ConfigError(f"{target} is there already; give a folder that is not, or remove it")
    if not parent.is_dir():
        raise ConfigError(f"{parent} is no folder; make it first")
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ConfigError(
            f"{parent} has room for {free / 1e9:.2f} GB, and the quantised checkpoint takes "
            f"{num_bytes / 1e9:.2f}"
        )


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a folder that becomes `target` in the end, or is removed if anything is raised. ConfigError if the
    system does not let it be made or filled. Removes what a process left of the same folder that was killed.
    """
    parent, prefix = target.absolute().parent, f".{target.name}{_UNFINISHED}"
    try:
        _remove_left(parent, prefix)
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise ConfigError(f"{target} cannot be made: {error}") from error
    try:
        with _locked(made):
            with _removed_by_signals(made):
                yield made
            made.chmod(0o755)  # mkdtemp makes it for this user alone
            if target.exists():
                raise ConfigError(f"{target} was made meanwhile by somebody else")
            made.rename(target)
    except OSError as error:  # such as a disk that is full by now
        raise ConfigError(f"{target} cannot be made: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _remove_left(parent: Path, prefix: str) -> None:
    """Remove folders whose names begin so and that no process fills any more."""
    for left in parent.iterdir():
        if left.name.startswith(prefix) and left.is_dir() and not left.is_symlink():
            with _locked(left) as is_left:
                if is_left:
                    _log.warning("removes %s, which a process left that was killed", left)
                    shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder, which the system takes back when the process ends. Gives False if another
    process has it, or the file system knows no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _removed_by_signals(folder: Path) -> Iterator[None]:
    """Have the signals that would end this process remove the folder before it ends. They raise nothing:
    JAX drops an exception that comes while it calls Python, or the process crashes by it. Only the main
    thread can say what signals do.
    """

    def end(number: int, _: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    ours = [of for of, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


class CheckpointWriter:
    """Writes tensors into safetensors files, each as soon as it is known, in any order."""

    def __init__(self, folder: Path, files: Mapping[str, Mapping[str, Shape]]) -> None:
        """files: the names of all files, and of each the tensors that it will hold."""
        self._places: dict[str, tuple[BinaryIO, int, Shape]] = {}
        self._streams: list[BinaryIO] = []
        try:
            for file, tensors in files.items():
                self._begin(folder / file, tensors)
        except BaseException:  # whatever it is, no file stays open
            self.close()
            raise
        if len(files) > 1:
            places = {name: file for file, tensors in files.items() for name in tensors}
            total = sum(shape.num_bytes for tensors in files.values() for shape in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def _begin(self, path: Path, tensors: Mapping[str, Shape]) -> None:
        """Write a file's header, after which every tensor has its place."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        # Sorted by the size of their numbers, so that each lies at a multiple of it.
        for name, shape in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
            offsets = [end, end + shape.num_bytes]
            header[name] = {
                "dtype": name_of(shape.dtype),
                "shape": list(shape.shape),
                "data_offsets": offsets,
            }
            end = offsets[1]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        stream = path.open("w+b")
        self._streams.append(stream)
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
        for name, shape in tensors.items():
            self._places[name] = (stream, 8 + len(text) + header[name]["data_offsets"][0], shape)

    def put(self, name: str, values: NDArray[Any]) -> None:
        """Write a tensor. ValueError if it is not what was announced."""
        stream, at, shape = self._places.pop(name)
        if (values.dtype, values.shape) != (shape.dtype, shape.shape):
            raise ValueError(f"{name} is {values.dtype} {values.shape}, and not {shape}")
        stream.seek(at)
        stream.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    def copy(self, name: str, entry: TensorEntry) -> None:
        """Write a tensor of another file as it is there."""
        stream, at, _ = self._places.pop(name)
        stream.seek(at)
        with entry.file.open("rb") as source:
            source.seek(entry.offset)
            left = entry.num_bytes
            while left:
                piece = source.read(min(left, _COPIED_AT_ONCE))
                if not piece:
                    raise ConfigError(f"{entry.file} became shorter while it was read")
                stream.write(piece)
                left -= len(piece)

    def finish(self) -> None:
        """Have the system write everything to the disk. ValueError if a tensor is missing."""
        if self._places:
            raise ValueError(f"tensors were not written: {', '.join(sorted(self._places)[:3])}")
        for stream in self._streams:
            stream.flush()
            os.fsync(stream.fileno())

    def close(self) -> None:
        """Close the files. May be called twice."""
        for stream in self._streams:
            stream.close()


def copied_files(source: Path) -> list[Path]:
    """List the files of a checkpoint that say nothing of weights: tokenizer, templates, defaults, licence."""
    return sorted(
        path
        for path in source.iterdir()
        if path.is_file() and path.name not in _MADE and not path.name.endswith(_WEIGHTS)
    )
