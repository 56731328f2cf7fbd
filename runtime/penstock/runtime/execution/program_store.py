"""Keeps the compiled programs of engines on disk, so that a start neither traces nor compiles its model.

A file `program-DIGEST` has one program. Its digest is that of what it computes (`digest_of`): the module that
JAX lowers it to, and all else that makes XLA's machine code what it is. JAX's own cache, which does the same,
is off while XLA compiles: XLA cannot write a program that it has read, so what came from there could never be
kept here.

To know what a program computes, a start must trace and lower the model, which is nine tenths of what is left
to do. So a file `programs-KEY` names all programs of an engine, by their digests. Its key is that of all that
they are made of (`ProgramBuilder._key`): the model's structure, sizes, operations, the code of this package,
the versions of the packages below it, and the machine. Whatever else they come to be made of must be added
there. A start that finds its set reads it and traces nothing. Another one, as after a change of the code,
traces, has XLA compile what no file computes, and writes the set for the next start.

The files hold machine code and are read by `pickle`, so the folder must belong to who runs the server, as
that of JAX's cache must.
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
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.ffi
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.mlir import ir, passmanager

from penstock.runtime.execution.compilation import compile_lowered
from penstock.runtime.execution.cpu_threads import parts_of_loops

log = logging.getLogger(__name__)

MOST_FILES = 16
"""So many sets are kept, for each process of a group, all of which may share a folder; those that were used
longest ago go first."""
MOST_OTHER_BYTES = 1 << 30
"""The programs that no set names may take so much; those that were used longest ago go first. A set is
written after its programs, so those of a start that is compiling are among them."""
HALF_WRITTEN_S = 86_400
"""A file that is half written for so long is of a process that was killed."""
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
Stored = tuple[bytes, Any, Any]
_VARIABLES = ("XLA_", "JAX_", "PENSTOCK_")
COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables of the environment from which XLA takes options."""
_OTHER_SETTINGS = (
    "jax_platforms",
    "jax_num_cpu_devices",
    "jax_enable_compilation_cache",
    "jax_compilation_cache_",
    "jax_persistent_cache_",
)
"""How the names of settings begin that say where JAX looks for devices and what it keeps; programs are the
same with any."""
_OF_PROCESS = frozenset({"host_callbacks", "keepalive"})
"""What has the functions of this process that a program calls."""
_NO_PART = _OF_PROCESS | {"backend", "all_args_info", "pgle_profiler", "shape_poly_state"}
"""What JAX lowers a program to beside its module, and what makes it no other program: devices and versions
have a part of their own in its digest, calls of Python are refused, and the others are for messages, profiles
and shapes that are not known."""
_RUNTIME = Path(__file__).parents[1]
_CODE = (".py", ".cc", ".h")
_ADDRESSES = (" at 0x", "array(", "<lambda>", "<locals>")
"""What a description has of a value that it does not tell in full."""
_HALF_WRITTEN = ".programs-"
"""How the name of a file begins until it is whole."""
_SEAL_BYTES = hashlib.sha256().digest_size


class Untold(Exception):
    """A value cannot be told in full by a text."""


def key_of(values: Sequence[Any], arrays: Iterable[Any]) -> str | None:
    """Return the key of programs that are made of these values and of arrays of these shapes, dtypes and
    places, by this code on this machine; None where a value cannot be told in full.
    """
    digest = hashlib.sha256(code_digest())
    try:
        for text in itertools.chain(map(described, values), map(_shape, arrays), _surroundings()):
            digest.update(hashlib.sha256(text.encode()).digest())
    except (Untold, OSError):
        return None
    return digest.hexdigest()


def digest_of(
    lowered: jax.stages.Lowered,
    options: Mapping[str, str | bool] | None,
    devices: Sequence[jax.Device],
    compiler: str,
) -> str:
    """Compute the digest of what a program computes, which XLA compiles with these options for these devices.
    `compiler`: see `compiler_facts`. Raises Untold if that cannot be told in full.
    """
    parts = getattr(lowered._lowering, "compile_args", {})
    if not parts.keys() >= _OF_PROCESS:
        raise Untold("this version of JAX does not say what it has lowered")
    if any(parts[name] for name in _OF_PROCESS):
        raise Untold("the program calls functions of this process")
    module = lowered.compiler_ir("stablehlo")
    assert isinstance(module, ir.Module), "JAX has lowered it to this form"
    digest = hashlib.sha256(_code_of(module))
    texts = (
        *(f"{name} {_told(value)}" for name, value in sorted(parts.items()) if name not in _NO_PART),
        *map(_told, jax.tree.leaves(lowered.args_info)),
        *(f"{name} {value}" for name, value in sorted((options or {}).items())),
        *(f"{device.id} {device.process_index} {device.device_kind}" for device in devices),
        # Each process of a group writes the part of a program that its own devices run.
        f"process {jax.process_index()}",
        compiler,
    )
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def _code_of(module: ir.Module) -> bytes:
    """Write a module without the lines of code that it was made by."""
    data = BytesIO()
    with module.context:
        copy = module.operation.clone().operation
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(copy)
        copy.write_bytecode(data)
    return data.getvalue()


def _told(value: Any) -> str:
    text = str(sorted(value) if isinstance(value, set | frozenset) else value)
    if any(part in text for part in _ADDRESSES):
        raise Untold(text)
    return text


class Named(NamedTuple):
    """What a set has of a program."""

    digest: str
    arguments: Any
    """A tree of numbers, in the form of the program's arguments."""
    results: Any


@dataclass(frozen=True, slots=True)
class Kept:
    """The programs of a set that were kept, by their names in it; some may be lacking."""

    programs: Mapping[Any, jax.stages.Compiled]
    named: Mapping[Any, Named]
    """What the set has of each."""


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
            self._key = _read(self._note).decode()
            self._kept = _read_set(self._folder, self._key, self._devices)

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
    """Load the programs of the set with this key, for these devices: those of it whose files are there and
    can be read, so none if there is no set. They may have been read `ahead`.
    """
    began = time.monotonic()
    try:
        kept = None if ahead is None else ahead.take(folder, key, devices)
        kept = kept or _read_set(folder, key, devices)
    except FileNotFoundError:
        return Kept({}, {})
    except Exception as error:  # noqa: BLE001 # it may be cut, or of another form
        log.warning("%s cannot be read, and its programs are traced: %s", _set_file(folder, key), error)
        return Kept({}, {})
    log.info("loaded %d compiled programs in %.1f s", len(kept.programs), time.monotonic() - began)
    return kept


def _read_set(folder: Path, key: str, devices: Sequence[jax.Device]) -> Kept:
    _, data = pickle.loads(_read(_set_file(folder, key)))
    named: Mapping[Any, Named] = pickle.loads(data)
    found = {
        name: _read_program(
            _program_file(folder, digest), jax.tree.structure(arguments), jax.tree.structure(results), devices
        )
        for name, (digest, arguments, results) in named.items()
    }
    programs = {name: program for name, program in found.items() if program is not None}
    return Kept(programs, {name: named[name] for name in programs})


def _read_program(
    file: Path, arguments: Any, results: Any, devices: Sequence[jax.Device]
) -> jax.stages.Compiled | None:
    """Read a program with arguments and results in these trees; None if there is no file, or one that cannot
    be read, which is told.
    """
    try:
        return _loaded(zlib.decompress(_read(file)), arguments, results, devices)
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 # it may be cut, or XLA may refuse it
        log.warning("%s cannot be read, and its program is compiled: %s", file, error)
        return None


def save(folder: Path, key: str, named: Mapping[Any, Named]) -> None:
    """Keep a set of programs whose files are there. Never fails: a later start then traces them again."""
    digests = sorted({each.digest for each in named.values()})
    try:
        # Others read the digests of a set whose names and trees are of classes that they do not have.
        _write(_set_file(folder, key), pickle.dumps((digests, pickle.dumps(dict(named)))))
    except Exception as error:  # noqa: BLE001 # a name or a tree may be of a class that `pickle` cannot find
        log.info("the set of compiled programs is not kept: %s", error)


class ProgramFiles:
    """The programs of a folder, each by the digest of what it computes, for these devices."""

    def __init__(self, folder: Path, devices: Sequence[jax.Device]) -> None:
        self._folder, self._devices = folder, list(devices)
        self._compiler = compiler_facts()
        self._digests: dict[jax.stages.Compiled, str] = {}
        self.found: list[str] = []
        """The digests of the programs that `program` has read from their files."""

    def program(
        self, lowered: jax.stages.Lowered, options: Mapping[str, str | bool] | None
    ) -> jax.stages.Compiled:
        """Return the program from its file; where there is none, have XLA compile it, and write the file. Any
        thread may call.
        """
        try:
            digest = digest_of(lowered, options, self._devices, self._compiler)
        except Untold as error:
            log.info("a program is not kept, because it cannot be told what it computes: %s", error)
            return compile_lowered(lowered, options)
        file = _program_file(self._folder, digest)
        program = _read_program(file, lowered.in_tree, lowered.out_tree, self._devices)
        if program is not None:
            self.found.append(digest)
            self._digests[program] = digest
            return program
        with JAX_CACHE.off():
            program = compile_lowered(lowered, options)
        try:
            data, _, _ = serialize_executable.serialize(program)
            _write(file, zlib.compress(data, 1))
            self._digests[program] = digest
        except Exception as error:  # noqa: BLE001 # XLA may know programs that it cannot write
            log.info("a compiled program is not kept: %s", error)
        return program

    def named(self, programs: Mapping[Any, jax.stages.Compiled]) -> dict[Any, Named]:
        """Return what a set has of these programs, for those that `program` has given and that have files."""
        return {
            name: Named(self._digests[program], _numbered(program.in_tree), _numbered(program.out_tree))
            for name, program in programs.items()
            if program in self._digests
        }


def prune(folder: Path) -> None:
    """Remove the sets that were used longest ago, and of the programs that no other set names those that were
    used longest ago; see `MOST_FILES` and `MOST_OTHER_BYTES`. What was left half written goes, too. Never
    fails.
    """
    with contextlib.suppress(OSError):  # the folder may be one that can only be read
        for file, status in _by_use(folder, f"{_HALF_WRITTEN}*"):
            if status.st_mtime < time.time() - HALF_WRITTEN_S:
                file.unlink(missing_ok=True)
        _keep_latest(folder, "programs-*")
        named = set[str]()
        for file in folder.glob("programs-*"):
            with contextlib.suppress(Exception):  # another form names none of these files
                named.update(pickle.loads(_opened(file))[0])
        most_bytes = MOST_OTHER_BYTES
        for file, status in _by_use(folder, "program-*"):
            if file.name.removeprefix("program-") not in named:
                most_bytes -= status.st_size
                if most_bytes < 0:
                    file.unlink(missing_ok=True)


class _JaxCache:
    """JAX's own cache of compiled programs, which JAX has once for a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._was_on = False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Have JAX compile what any thread asks for, and neither read nor write its cache, until the last
        block that asks for that has ended.
        """
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._was_on = bool(jax.config.values["jax_enable_compilation_cache"])
                self._turn(on=False)
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0:
                    self._turn(on=self._was_on)

    def _turn(self, *, on: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", on)
        compilation_cache.reset_cache()  # JAX asks for the setting once, unless it is told to ask again


JAX_CACHE = _JaxCache()


def _keep_latest(folder: Path, names: str) -> None:
    """Remove files of these names that were used longest ago, see `MOST_FILES`."""
    for old, _ in _by_use(folder, names)[MOST_FILES * jax.process_count() :]:
        old.unlink(missing_ok=True)


def _by_use(folder: Path, names: str) -> list[tuple[Path, os.stat_result]]:
    """Return the files of these names, beginning with the one that was used last."""
    found = []
    for file in folder.glob(names):
        with contextlib.suppress(FileNotFoundError):  # another process may have removed it
            found.append((file, file.stat()))
    return sorted(found, key=lambda each: each[1].st_mtime, reverse=True)


def _write(file: Path, data: bytes) -> None:
    """Replace a file as a whole; where that fails, nothing is left behind."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=_HALF_WRITTEN, delete=False) as part:
        try:
            part.write(_seal(file, data))
            part.write(data)
            part.close()
            Path(part.name).replace(file)
        except BaseException:  # whatever it is, it goes on; half of a file must not stay
            Path(part.name).unlink(missing_ok=True)
            raise


def _read(file: Path) -> bytes:
    """Read what was written to this file, and note that it was used. ValueError if it has anything else."""
    data = _opened(file)
    with contextlib.suppress(OSError):
        os.utime(file)  # the folder may be one that can only be read
    return data


def _opened(file: Path) -> bytes:
    content = file.read_bytes()
    data = content[_SEAL_BYTES:]
    if content[:_SEAL_BYTES] != _seal(file, data):
        raise ValueError("it is cut, or not what was written under this name")
    return data


def _seal(file: Path, data: bytes) -> bytes:
    """Return what stands before the data of a file, and tells that they are whole and have their name."""
    return hashlib.sha256(file.name.encode() + hashlib.sha256(data).digest()).digest()


def _program_file(folder: Path, digest: str) -> Path:
    return folder / f"program-{digest}"


def _set_file(folder: Path, key: str) -> Path:
    return folder / f"programs-{key}"


def _numbered(tree: Any) -> Any:
    """Turn JAX's description of a tree into a tree of numbers of this form, which `pickle` can write."""
    return jax.tree.unflatten(tree, range(tree.num_leaves))


def to_stored(program: jax.stages.Compiled) -> Stored:
    """Turn a program into bytes, with trees of numbers in the form of its arguments and of its results."""
    data, arguments, results = serialize_executable.serialize(program)
    return data, _numbered(arguments), _numbered(results)


def from_stored(stored: Stored, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    data, *trees = stored
    arguments, results = map(jax.tree.structure, trees)
    return _loaded(data, arguments, results, devices)


def _loaded(data: bytes, arguments: Any, results: Any, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    program: jax.stages.Compiled = serialize_executable.deserialize_and_load(
        data, arguments, results, execution_devices=devices
    )
    return program


def _shape(array: Any) -> str:
    return f"{array.shape} {array.dtype} {array.weak_type} {array.sharding}"


def _surroundings() -> Iterator[str]:
    """Yield what the programs of an engine are made of that is not the engine's."""
    yield described(jax.ffi.ffi_call)  # tests put another in its place to call emulated kernels
    yield compiler_facts()
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES):
            yield f"{name}={value}"


def compiler_facts() -> str:
    """Tell on what XLA's code for a module depends beside its options and devices: versions, the machine and
    settings.
    """
    return "\n".join(
        (
            platform.python_version(),
            *(f"{package} {metadata.version(package)}" for package in PACKAGES),
            platform.machine(),
            processor(),
            parts_of_loops(),
            *(f"{name}={os.environ.get(name, '')}" for name in COMPILER_VARIABLES),
            *(f"{name}={value!r}" for name, value in settings().items()),
        )
    )


def settings() -> dict[str, Any]:
    """Return JAX's settings, but for those that programs do not depend on."""
    return {
        name: value
        for name, value in sorted(jax.config.values.items())
        if (value is None or isinstance(value, str | int | float)) and not name.startswith(_OTHER_SETTINGS)
    }


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
