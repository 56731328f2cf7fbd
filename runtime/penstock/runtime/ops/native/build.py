"""Compiles `src/**/*.cc` into one shared library with the machine's own C++ compiler, once per version.

A wheel has the library in it: hatch_build.py takes that which this machine has compiled of the same sources,
or compiles it. It serves every jaxlib that has the same headers of XLA's FFI. Otherwise it is built on first
use, or now, by `python -m penstock.runtime.ops.native.build`, with `--folder` for an image that is to have no
compiler.

A file's instruction set is the end of its name (`linear/linear_amx.cc`); the rest of the library runs on
any x86-64, and which of the others is called is decided at run time (`src/common/cpu.cc`).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax.ffi

from penstock.runtime.machine.processors import available_processors

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
SHIPPED = Path(__file__).parent / "shipped"
"""The folder of the library that came with a wheel; a clone has none."""
COMPILERS = ("c++", "g++", "clang++")
_COMMON = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=off",  # a * b + c is always rounded twice, so that bits do not depend on inlining
    "-Wall",
    "-Wno-attributes",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    *_AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mavx512vnni",
    "-mprefer-vector-width=512",
)
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")
FLAGS = {  # longest suffix first
    "_avx512_bf16": _AVX512_BF16,
    "_avx512": _AVX512,
    "_avx2": _AVX2,
    "_amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
"""Compiler flags by the end of a file's name, beside those of all files."""


@dataclass(frozen=True)
class Recipe:
    """What a library is made of. Tests make some in which AMX and AVX-512 are emulated."""

    name: str
    sources: tuple[Path, ...]
    """Files to compile. Headers are found beside each, and in SOURCES."""
    flags: Mapping[str, tuple[str, ...]]
    """Compiler flags by the end of a file's name, as in FLAGS."""

    def flags_of(self, source: Path) -> tuple[str, ...]:
        """Return the flags of `source`, beside those of all files."""
        return next((flags for end, flags in self.flags.items() if source.stem.endswith(end)), ())

    def digest(self) -> str:
        """Compute a digest of everything that the library depends on."""
        digest = hashlib.sha256(f"{_COMMON} {self.flags}".encode())
        folders = {SOURCES, *(source.parent for source in self.sources)}
        files = {file for folder in folders for file in folder.rglob("*.h")}
        for file in sorted(files | set(self.sources)):
            name = file.relative_to(SOURCES) if file.is_relative_to(SOURCES) else file.name
            digest.update(str(name).encode() + b"\0" + file.read_bytes())
        for file in sorted(Path(jax.ffi.include_dir()).rglob("*.h")):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        return digest.hexdigest()[:16]

    def file_name(self) -> str:
        """Return the name of the library's file, which nothing has that is made of other things."""
        return f"{self.name}-{self.digest()}.so"


KERNELS = Recipe("penstock", tuple(sorted(SOURCES.rglob("*.cc"))), FLAGS)
"""The library that serves."""


class BuildFailed(Exception):
    """There is no library for this machine; the message says why."""


def default_folder() -> Path:
    """Return the folder in which built libraries are kept."""
    return Path(os.path.expanduser("~")) / ".cache" / "penstock" / "native"


def build(folder: Path | None = None, recipe: Recipe = KERNELS) -> Path:
    """Return the path of the library of `recipe`. It is compiled now (some 20 s) if it is not in `folder`;
    None: in neither SHIPPED nor the default folder.

    Raises BuildFailed if it cannot be built: another processor family, no compiler, or a compiler that fails.
    """
    folders = [SHIPPED, default_folder()] if folder is None else [folder]
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        raise BuildFailed(
            f"the native kernels are for Linux on x86-64, not {platform.system()} on {platform.machine()}"
        )
    name = recipe.file_name()
    for place in folders:
        if (place / name).is_file():
            return place / name
    folder = folders[-1]
    library = folder / name
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildFailed(
            f"{library} is not there, and no C++ compiler to make it (looked for {', '.join(COMPILERS)}); "
            "install g++, or build it elsewhere with the same versions of Penstock and jaxlib"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if library.is_file():  # another process has compiled it meanwhile
                return library
            log.info("compiling the native kernels with %s; this is done once", compiler)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = _compile(compiler, recipe, Path(scratch))
                os.replace(built, library)  # at once: others look for it without the lock
    except OSError as error:
        raise BuildFailed(f"cannot write to {folder}: {error}") from error
    return library


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles for this folder. Where the file system has no locks, nobody waits,
    and each process compiles its own.
    """
    held = os.open(
        folder, os.O_RDONLY
    )  # whoever may read the folder can lock it, other than a file of another user's
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another process compiles the native kernels in %s: waiting for it", folder)
                fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _compile(compiler: str, recipe: Recipe, scratch: Path) -> Path:
    includes = [f"-I{jax.ffi.include_dir()}", f"-I{SOURCES}"]
    objects: list[tuple[Path, list[str]]] = []
    for source in recipe.sources:
        target = scratch / f"{source.stem}.o"
        flags = [*_COMMON, *recipe.flags_of(source), *includes]
        objects.append((target, [compiler, *flags, "-c", str(source), "-o", str(target)]))
    with ThreadPoolExecutor(available_processors()) as pool:
        list(pool.map(_run, [command for _, command in objects]))
    library = scratch / "library.so"
    _run([compiler, "-shared", "-o", str(library), *[str(target) for target, _ in objects]])
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildFailed(f"{command[0]} failed on {command[-3]}: {' '.join(lines[:2])[:400]}")


def main(arguments: list[str]) -> int:
    """Build the library now. Failing is an error only if a folder is named, since everything runs without
    the library.
    """
    parser = argparse.ArgumentParser(description="Compile the native CPU kernels.")
    parser.add_argument(
        "--folder", type=Path, help="for `penstock serve --native-folder`; default: where they are looked for"
    )
    folder = parser.parse_args(arguments).folder
    try:
        print(f"native kernels: {build(folder)}")  # noqa: T201  # this is its answer
    except BuildFailed as error:
        print(f"native kernels: none ({error}); XLA is used", file=sys.stderr)  # noqa: T201
        return 0 if folder is None else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
