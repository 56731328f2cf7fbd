"""The safetensors files that a URI names, below directories that the operator allows.

Files are opened once, and read by `pread`: if one is replaced meanwhile, the old one is read to its end, and
if one is cut or written to, that is an error. (A memory map of a file that is cut would kill the process.)
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from penstock.runtime.errors import ConfigError, InvalidRequest, Violation
from penstock.runtime.file_uris import path_of
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.loading.safetensors_files import (
    INDEX_NAME,
    SINGLE_NAME,
    TensorEntry,
    check_places,
    header_of,
    joined,
    read_index,
)
from penstock.runtime.sent_tensors import SentTensor

FIELD = "begin.uri"
_PIECE = 1 << 21
"""How many bytes are read at a time."""
_MAX_INDEX_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class _OpenFile:
    path: Path
    descriptor: int
    opened: os.stat_result
    """The file's state when it was opened."""


class UpdateFiles:
    """The tensors of the files that a URI names. To be closed."""

    def __init__(self, uri: str, roots: Sequence[Path], folders: Sequence[str] = ()) -> None:
        """Open the files and read their headers.

        `uri`: file:// with the path of a safetensors file, or of a directory that has one, shards with an
        index, or several without. `roots`: where files may lie; symbolic links are followed before this is
        checked. folders: see `LoadRules`; what a directory has of them is read, too. Raises
        UnsupportedFeature for another scheme, and InvalidRequest for anything else.
        """
        self._roots = [Path(os.path.realpath(root)) for root in roots]
        self._files: dict[Path, _OpenFile] = {}
        try:
            path = path_of(uri, FIELD)
            real = self._below_a_root(path)
            if real.is_dir():
                entries = self._tensors_of_directory(real) | self._tensors_of_folders(real, folders)
            else:
                entries = self._tensors_of_file(real)
        except (OSError, ConfigError) as error:
            self.close()
            raise _refused(str(error)) from error
        except BaseException:  # whatever it is, no file stays open
            self.close()
            raise
        self._entries = sorted(entries.items(), key=lambda entry: (entry[1].file, entry[1].offset))
        self.tensors = [SentTensor(name, name_of(entry.dtype), entry.shape) for name, entry in self._entries]
        """In the order in which `pieces` has them."""

    def pieces(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield the bytes of all tensors, in pieces: index of the tensor, offset in it, data. Raises
        InvalidRequest if a file was changed since it was opened.
        """
        for index, (name, entry) in enumerate(self._entries):
            file = self._files[entry.file]
            for offset in range(0, entry.num_bytes, _PIECE):
                size = min(_PIECE, entry.num_bytes - offset)
                try:
                    data = os.pread(file.descriptor, size, entry.offset + offset)
                except OSError as error:
                    _refuse(f"{file.path} cannot be read: {error}")
                if len(data) < size:
                    _refuse(f"{file.path} was cut while it was read, within the tensor {name}")
                yield index, offset, data
            if index + 1 == len(self._entries) or self._entries[index + 1][1].file != entry.file:
                _check_unchanged(file)

    def close(self) -> None:
        """Close the files. May be called twice."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def _tensors_of_file(self, real: Path) -> dict[str, TensorEntry]:
        return header_of(real, self._opened(real).descriptor)

    def _tensors_of_directory(self, directory: Path) -> dict[str, TensorEntry]:
        names = set(os.listdir(directory))
        if SINGLE_NAME in names:
            return self._tensors_of_file(directory / SINGLE_NAME)
        if INDEX_NAME in names:
            index = directory / INDEX_NAME
            file = self._opened(index)
            places = read_index(index, os.pread(file.descriptor, _MAX_INDEX_BYTES, 0))
            shards = sorted(set(places.values()))
            found = joined(directory, [self._tensors_of_file(directory / shard) for shard in shards])
            check_places(index, places, found)
            return found
        files = sorted(name for name in names if name.endswith(".safetensors"))
        if not files:
            _refuse(f"{directory} holds no safetensors files")
        return joined(directory, [self._tensors_of_file(directory / name) for name in files])

    def _tensors_of_folders(self, directory: Path, folders: Sequence[str]) -> dict[str, TensorEntry]:
        found: dict[str, TensorEntry] = {}
        for folder in folders:
            inner = self._below_a_root(directory / folder)
            if inner.is_dir():
                own = self._tensors_of_directory(inner)
                found |= {f"{folder}.{name}": entry for name, entry in own.items()}
        return found

    def _below_a_root(self, path: Path) -> Path:
        """Return the path without symbolic links, which lies below a root. What lies elsewhere is refused
        alike, whether it exists or not.
        """
        real = Path(os.path.realpath(path))
        if not any(real == root or root in real.parents for root in self._roots):
            _refuse(f"{path} is not below a directory from which this server takes weights")
        return real

    def _opened(self, path: Path) -> _OpenFile:
        """Open a file below a root. On the way no symbolic link is followed any more, so that none can be
        put there after the check.
        """
        real = self._below_a_root(path)
        root = next((root for root in self._roots if root in real.parents), None)
        if root is None:
            _refuse(f"{path} is itself such a directory, and is no file")
        directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in real.relative_to(root).parts[:-1]:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
                os.close(directory)
                directory = inner
            # Without O_NONBLOCK a named pipe would keep this waiting.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(real.name, flags, dir_fd=directory)
        except OSError as error:
            _refuse(f"{path} cannot be opened: {error.strerror}")
        finally:
            os.close(directory)
        file = self._files[path] = _OpenFile(path, descriptor, os.fstat(descriptor))
        if not stat.S_ISREG(file.opened.st_mode):
            _refuse(f"{path} is not a file")
        return file


def _check_unchanged(file: _OpenFile) -> None:
    now, opened = os.fstat(file.descriptor), file.opened
    if (now.st_size, now.st_mtime_ns) != (opened.st_size, opened.st_mtime_ns):
        _refuse(f"{file.path} was changed while it was read")


def _refused(description: str) -> InvalidRequest:
    return InvalidRequest([Violation(FIELD, description)])


def _refuse(description: str) -> NoReturn:
    raise _refused(description)
