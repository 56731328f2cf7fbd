"""Keeps the compiled programs of an engine on disk as one file, so that a start need not trace its model.

JAX's own cache spares XLA's work alone. JAX asks it by what a program computes, and to know that, it traces
and lowers the model for each program, which is nine tenths of what is left to do. Here programs are asked for
by all that they are made of (`ProgramBuilder._key`): the model's structure, sizes, operations, the code of
this package, the versions of the packages below it, and the machine. Whatever else they come to be made of
must be added there.

A file holds machine code and is read by `pickle`, so the folder must belong to who runs the server, as that
of JAX's cache must.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import os
import pickle
import platform
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import jax
import jax.ffi
from jax.experimental import serialize_executable

log = logging.getLogger(__name__)

MOST_FILES = 16
"""So many sets of programs are kept, for each process of a group, all of which may share a folder; those that
were used longest ago go first."""
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
Stored = tuple[bytes, Any, Any]
_HIT = "/jax/compilation_cache/cache_hits"
_VARIABLES = ("XLA_", "JAX_", "PENSTOCK_")
_RUNTIME = Path(__file__).parents[1]
_CODE = (".py", ".cc", ".h")
_ADDRESSES = (" at 0x", "array(", "<lambda>", "<locals>")
"""What a description has of a value that it does not tell in full."""


class Untold(Exception):
    """A value cannot be told in full by a text."""


def key_of(values: Sequence[Any], arrays: Iterable[Any]) -> str | None:
    """Return the name of programs that are made of these values and of arrays of these shapes, dtypes and
    places, by this code on this machine; None where a value cannot be told in full.
    """
    digest = hashlib.sha256(code_digest())
    try:
        for text in itertools.chain(map(described, values), map(_shape, arrays), _surroundings()):
            digest.update(hashlib.sha256(text.encode()).digest())
    except (Untold, OSError):
        return None
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Kept:
    """The programs of a set that were kept, by their names in it; some may be lacking."""

    programs: Mapping[Any, jax.stages.Compiled]
    stored: Mapping[Any, Stored]
    """The same as they are in the file."""


class Fresh:
    """Notes which programs XLA compiles, and does not get from JAX's cache, while this is entered. XLA cannot
    write a program that it has read: what it writes of one cannot be run.
    """

    def __init__(self) -> None:
        self.names: set[Any] = set()
        self._hits: Counter[int] = Counter()

    def __enter__(self) -> Self:
        jax.monitoring.register_event_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._note)

    def run(self, name: Any, job: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
        """Compile a program on the calling thread."""
        before = self._hits[threading.get_ident()]
        program = job()
        if self._hits[threading.get_ident()] == before:
            self.names.add(name)
        return program

    def _note(self, event: str, **_: str | int) -> None:
        if event == _HIT:
            self._hits[threading.get_ident()] += 1


class Ahead:
    """Reads the programs that an earlier start of the same model has used, on a thread of its own, while this
    start reads the model. That they are the right ones is a guess until `take` is told their key.
    """

    def __init__(self, folder: Path, start: str, devices: Sequence[jax.Device]) -> None:
        """`start` tells apart starts that may need other programs; devices: those of the programs."""
        self._note = folder / f"last-{hashlib.sha256(start.encode()).hexdigest()}"
        self._folder, self._devices = folder, list(devices)
        self._key: str | None = None
        self._kept: Kept | None = None
        self._thread = threading.Thread(target=self._read, name="penstock-programs")
        self._thread.start()

    def _read(self) -> None:
        # Whatever is wrong, `load` meets it again, and tells it.
        with contextlib.suppress(Exception):
            self._key = self._note.read_text()
            self._kept = _read(_file(self._folder, self._key), self._devices)

    def take(self, folder: Path, key: str, devices: Sequence[jax.Device]) -> Kept | None:
        """Wait until the programs are read, and return them, once; None if they are others than those of this
        key, which are then noted for the next start.
        """
        self._thread.join()
        kept, self._kept = self._kept, None
        if (folder, key, list(devices)) == (self._folder, self._key, self._devices):
            return kept
        with contextlib.suppress(OSError):  # the folder may be one that can only be read
            _write(self._note, key.encode())
            _keep_latest(folder, "last-*")
        return None


def load(folder: Path, key: str, devices: Sequence[jax.Device], ahead: Ahead | None = None) -> Kept:
    """Load the programs that were kept under this key, for these devices; none if there is no file, or if it
    cannot be read. They may have been read `ahead`.
    """
    file, began = _file(folder, key), time.monotonic()
    try:
        kept = (None if ahead is None else ahead.take(folder, key, devices)) or _read(file, devices)
    except FileNotFoundError:
        return Kept({}, {})
    except Exception as error:  # noqa: BLE001 # it may be cut, or XLA may refuse it
        log.warning("%s cannot be read, and its programs are compiled: %s", file, error)
        return Kept({}, {})
    with contextlib.suppress(OSError):
        os.utime(file)  # the folder may be one that can only be read
    log.info("loaded %d compiled programs in %.1f s", len(kept.programs), time.monotonic() - began)
    return kept


def _read(file: Path, devices: Sequence[jax.Device]) -> Kept:
    stored = pickle.loads(file.read_bytes())
    return Kept({name: from_stored(each, devices) for name, each in stored.items()}, stored)


def save(folder: Path, key: str, kept: Kept, new: Mapping[Any, jax.stages.Compiled]) -> None:
    """Keep new programs beside those that were kept. Never fails: a later start then compiles them again."""
    if not new:
        return
    try:
        data = pickle.dumps({**kept.stored, **{name: to_stored(program) for name, program in new.items()}})
        _write(_file(folder, key), data)
        _keep_latest(folder, "programs-*")
    except Exception as error:  # noqa: BLE001 # XLA may know programs that it cannot write
        log.info("the compiled programs are not kept as a whole: %s", error)


def _keep_latest(folder: Path, names: str) -> None:
    """Remove files of these names that were used longest ago, see `MOST_FILES`."""
    files = sorted(folder.glob(names), key=lambda each: each.stat().st_mtime, reverse=True)
    for old in files[MOST_FILES * jax.process_count() :]:
        old.unlink(missing_ok=True)


def _write(file: Path, data: bytes) -> None:
    """Replace a file as a whole; where that fails, nothing is left behind."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".programs-", delete=False) as part:
        try:
            part.write(data)
            part.close()
            Path(part.name).replace(file)
        except BaseException:  # whatever it is, it goes on; half of a file must not stay
            Path(part.name).unlink(missing_ok=True)
            raise


def _file(folder: Path, key: str) -> Path:
    return folder / f"programs-{key}"


def to_stored(program: jax.stages.Compiled) -> Stored:
    """Turn a program into bytes, with trees of numbers in the form of its arguments and of its results:
    `pickle` knows our classes, but not JAX's descriptions of such trees.
    """
    data, arguments, results = serialize_executable.serialize(program)
    numbered = (jax.tree.unflatten(tree, range(tree.num_leaves)) for tree in (arguments, results))
    return (data, *numbered)


def from_stored(stored: Stored, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    data, arguments, results = stored
    program: jax.stages.Compiled = serialize_executable.deserialize_and_load(
        data,
        jax.tree.structure(arguments),
        jax.tree.structure(results),
        execution_devices=devices,
    )
    return program


def _shape(array: Any) -> str:
    return f"{array.shape} {array.dtype} {array.weak_type} {array.sharding}"


def _surroundings() -> Iterator[str]:
    """Yield versions, the machine and settings."""
    yield described(jax.ffi.ffi_call)  # tests put another in its place to call emulated kernels
    yield platform.python_version()
    for package in PACKAGES:
        yield f"{package} {metadata.version(package)}"
    yield platform.machine()
    yield processor()
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES):
            yield f"{name}={value}"
    for name, value in sorted(jax.config.values.items()):
        if value is None or isinstance(value, str | int | float):
            yield f"{name}={value}"


def described(value: Any) -> str:
    """Make a text that differs for every other value. Raises Untold."""
    if isinstance(value, functools.partial):
        return f"partial{described((value.func, value.args, tuple(value.keywords.items())))}"
    if isinstance(value, tuple):
        return f"{type(value).__qualname__}({', '.join(map(described, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, described(getattr(value, field.name))) for field in dataclasses.fields(value))
        return f"{type(value).__qualname__}{tuple(fields)}"
    if callable(value) and hasattr(value, "__qualname__"):
        text = f"{value.__module__}.{value.__qualname__}"
    else:
        text = repr(value)
    if any(part in text for part in _ADDRESSES):
        raise Untold(text)
    return text


def processor() -> str:
    """Say what the processor is and can: XLA's code is for one kind."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if not line:
                break  # the first processor is like the others
            if line.startswith(("model", "flags", "stepping", "Features", "CPU ")):
                found.append(line)
    return "\n".join(found)


@functools.cache
def code_digest() -> bytes:
    """Compute a digest of this package's code, with that of the kernels, and of the form of these files."""
    digest = hashlib.sha256(b"1")
    files = (file for ending in _CODE for file in _RUNTIME.rglob(f"*{ending}"))
    for file in sorted(files):
        digest.update(hashlib.sha256(str(file.relative_to(_RUNTIME)).encode() + file.read_bytes()).digest())
    return digest.digest()
