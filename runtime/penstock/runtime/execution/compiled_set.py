"""A set of programs that one machine compiled for another: `penstock compile` writes it, and a start takes it
if both agree in all that programs are made of.

A folder has two files. `facts.json` says what the programs are made of, each fact with a name that people
understand; `programs` has the programs, as `program_store` writes them. A start compares the facts first, and
reads the programs only where none differs. They are machine code and are read by `pickle`, so the folder must
belong to who runs the server.

Unlike the key of `program_store`, facts hold nothing of the machine that compiled: no processor and no
threads beside those of CPU programs, no addresses and no folders. Whatever else programs come to be made of
must be added here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pickle
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import Backend
from penstock.runtime.execution.program_store import (
    COMPILER_VARIABLES,
    PACKAGES,
    Untold,
    code_digest,
    described,
    from_stored,
    settings,
    to_stored,
)
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.ops.cache_spec import CacheSpec

log = logging.getLogger(__name__)

Facts = Mapping[str, str]
"""What programs are made of: the name of each fact to its text."""

_FACTS, _PROGRAMS = "facts.json", "programs"
_DIGEST = "the digest of the programs"
_COMPILERS = {
    "cpu": (),
    "tpu": ("libtpu",),
    "gpu": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt"),
}
"""A platform to the distributions that have its part of XLA."""
_OWN_OPTIONS = ("ahead", "compiled", "program_folder", "show_progress", "threads")
"""Fields of a runner's configuration that no program depends on, and `threads`, which has its own fact."""
_OF_BACKEND = (
    "attention",
    "recurrent",
    "sampler",
    "logprobs",
    "packed_dtype",
    "native_dtype",
    "compiler_options",
)
"""Fields of a backend on which programs depend, beside what its other fields make of the configuration."""
_SHOWN = 48
"""Characters of a fact that a message shows; it only names longer ones."""


def facts_of(
    config: RunnerConfig,
    structure: Any,
    cache: CacheSpec,
    num_pages: tuple[int, ...],
    arguments: Iterable[Any],
    backend: Backend,
) -> Facts:
    """Return all that programs with arguments of these shapes are made of. structure: of the model, and of
    its draft if it has one. ConfigError if a part of it cannot be told by a text.
    """
    options = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in _OWN_OPTIONS
    }
    values = {
        **options,
        "the pages of the cache": num_pages,
        **{f"the platform's {name}": getattr(backend, name) for name in _OF_BACKEND},
        "the kinds of layers' caches": cache,
        "the model's structure": structure,
    }
    try:
        told = {name: described(value) for name, value in values.items()}
    except Untold as error:
        raise ConfigError(f"compiled: what programs are made of cannot be told by a text: {error}") from error
    shapes = "; ".join(f"{array.shape} {array.dtype}" for array in arguments)
    return {
        **_versions(backend.platform_name),
        **backend.device_facts(),
        **{name: os.environ.get(name, "") for name in COMPILER_VARIABLES},
        **{f"the setting {name}": repr(value) for name, value in settings().items()},
        **told,
        "the shapes of weights, cache and state": shapes,
    }


def check(folder: Path) -> None:
    """Raise ConfigError unless `penstock compile` wrote this folder."""
    for name in (_FACTS, _PROGRAMS):
        if not (folder / name).is_file():
            raise ConfigError(f"compiled: {folder} has no {name}, which penstock compile writes")


def begin(folder: Path) -> None:
    """Make the folder if it is not there; until it is whole, no start takes it. ConfigError if it cannot be
    written, which is found before anything is compiled.
    """
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FACTS).unlink(missing_ok=True)
        (folder / _PROGRAMS).write_bytes(b"")


def write(folder: Path, facts: Facts, programs: Mapping[Any, jax.stages.Compiled]) -> int:
    """Fill the folder that `begin` made. Returns how many bytes the programs take. ConfigError if it cannot
    be written.
    """
    data = pickle.dumps({name: to_stored(program) for name, program in programs.items()})
    told = {**facts, _DIGEST: hashlib.sha256(data).hexdigest()}
    with _told(folder):
        (folder / _PROGRAMS).write_bytes(data)
        (folder / _FACTS).write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    return len(data)


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Tell what the system refuses as ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"out: {folder} cannot be written: {error}") from error


def read(folder: Path, facts: Facts, devices: Sequence[jax.Device]) -> Mapping[Any, jax.stages.Compiled]:
    """Read the programs of the folder, for these devices; none, and a warning that says why, if a fact
    differs or if they cannot be read.
    """
    try:
        told = json.loads((folder / _FACTS).read_text("utf-8"))
        digest = told.pop(_DIGEST)
        if differing := differences(facts, told):
            log.warning("%s is not used, and programs are compiled: %s", folder, "; ".join(differing))
            return {}
        data = (folder / _PROGRAMS).read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError("the file is not the one that was written with its facts")
        programs = {name: from_stored(each, devices) for name, each in pickle.loads(data).items()}
    except Exception as error:  # noqa: BLE001 # whatever XLA refuses can be compiled here
        log.warning("the programs of %s cannot be read, and are compiled: %s", folder, error)
        return {}
    log.info("took %d compiled programs of %s", len(programs), folder)
    return programs


def differences(here: Facts, there: Facts) -> list[str]:
    """Return what a message says of each fact that differs, or that only one of the two has."""
    found = []
    for name in dict.fromkeys((*here, *there)):
        own, other = here.get(name, "not known"), there.get(name, "not known")
        if own == other:
            continue
        is_short = max(len(own), len(other)) <= _SHOWN
        found.append(f"{name}: {own!r} here, {other!r} there" if is_short else f"{name} differs")
    return found


def _versions(platform_name: str) -> dict[str, str]:
    names = (*PACKAGES, *_COMPILERS.get(platform_name, ()))
    return {
        "the code of penstock.runtime": code_digest().hex(),
        "the version of Python": platform.python_version(),
        **{f"the version of {name}": _version(name) for name in names},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
