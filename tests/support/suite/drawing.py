"""Which tests of the sweep a commit runs: a seventh of them, which its number draws, and those that its own
changes touch.

Of any seven commits in a row each test of the sweep runs in one. What several files ask of a model family is
drawn together, because the tests of one family share its compiled programs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from zlib import crc32

import pytest

SWEEP_PARTS = 7
"""With five, the sweep took a third of CI's processor time."""
FRONT_PARTS = 23
"""Of the tests that run through a front process, a run has one in twenty-three: each also runs without one,
and starting its front process costs more than all else. This is a prime, as the others are, so that each part
has its turn also where every push has, say, six commits, of which CI sees the last.
"""
OPTIMIZED_PARTS = 13
"""In one file of tests in thirteen, programs are compiled as users compile, which takes up to five times as
long. This has no factor in common with SWEEP_PARTS, so each file of the sweep has its turn within 91 commits.
"""

MIRRORED = {
    "runtime/penstock/runtime": "tests/runtime",
    "runtime/penstock/runtime/models/families/encoders.py": "tests/runtime/models/test_encoders.py",
    "service/penstock/service": "tests/service",
    "service/penstock/openai": "tests/service/openai",
    "service/penstock/server_cli": "tests/service/cli",
    "clients/python/penstock/client": "tests/clients/client",
    "clients/python/penstock/cli": "tests/clients/cli",
    "clients/go": "tests/clients/go",
    "clients/java": "tests/clients/java",
    "protos": "tests/conformance",
    "deploy": "tests/deploy",
    "examples": "tests/examples",
    "tools": "tests/tools",
    "tests": "tests",
    "tests/golden/encoders": "tests/runtime/models/test_encoders.py",
    "tests/golden/int4": "tests/runtime/models/test_int4_golden.py",
    "tests/golden/lora": "tests/runtime/adapters",
    "pyproject.toml": "tests/packages",
    "constraints.txt": "tests/packages",
    "hatch_build.py": "tests/packages",
    "Dockerfile": "tests/deploy",
}
"""The folder of tests for each folder of sources. Folders below these mirror each other. Encoders are tested
in one file, the others of `families` by the goldens that they name.
"""
BUILT: Mapping[str, tuple[str, ...]] = {
    "grpcurl": ("tools/go",),
    "Go": ("clients/go", "protos"),  # whose code of the contract must be generated again
    "Java": ("clients/java",),
    "emulated AMX": ("runtime/penstock/runtime/ops/native/src", "tests/support/native/emulated"),
}
"""What tests of the sweep share that is built for a minute, and the folders whose changes run all of these
tests. Each of these is in another part, so that a run builds one of them.
"""
WHOLE_PARTS = ("tests", "tests/runtime", "tests/service", "tests/clients")
"""A source directly in one of these touches every test there is, so the drawn seventh has to do."""
COSTLY = frozenset(
    {
        "tests/runtime/mesh/test_mesh_engine.py",
        "tests/runtime/mesh/test_mesh_goldens.py",
        "tests/service/relay/test_all_tests.py",
        "tests/service/servicers/test_goldens.py",
        "tests/service/weights/test_fresh.py",
    }
)
"""Files whose sweep takes from a quarter of an hour up. A run has of them what its number and the changed
families draw, and not all where a change touches the file: otherwise one change of a file could take a run
beyond its time.
"""
FAMILIES = "runtime/penstock/runtime/models/families"
GOLDENS = "tests/golden"
GOLDEN_NAMES = frozenset(
    path.parent.name for path in (Path(__file__).parents[2] / "golden").glob("*/config.json")
)
PAGES = "tests/docs"
RELAY = "tests/service/relay"


@dataclass(frozen=True, slots=True)
class Touched:
    """What a change touches."""

    places: frozenset[str] = frozenset()
    """Folders and files of tests."""
    families: frozenset[str] = frozenset()
    """Golden checkpoints of the model families that it changes."""
    pages: frozenset[str] = frozenset()
    """Pages of the documentation."""
    built: frozenset[str] = frozenset()
    """Words of BUILT."""

    def __contains__(self, key: SweepKey) -> bool:
        path = PurePosixPath(key.file)
        return (
            (key.file not in COSTLY and any(str(place) in self.places for place in (path, *path.parents)))
            or key.family in self.families
            or key.shared in self.built
            or (key.file.startswith(PAGES) and any(f"[{page}" in key.test for page in self.pages))
        )


@dataclass(frozen=True, slots=True)
class SweepKey:
    """What a test of the sweep is drawn by."""

    test: str
    """Its node id."""
    family: str = ""
    """The golden checkpoint among its parameters."""
    is_alone: bool = True
    """False if the whole file is marked: then its tests share what they set up, and are drawn together."""
    shared: str = ""
    """What its mark says that it shares with other tests, which are drawn together: `pytest.mark.sweep("Go")`
    is of BUILT, and other words name an engine.
    """

    @property
    def file(self) -> str:
        return self.test.split("::")[0]

    def part(self, families: Collection[str], parts: int = SWEEP_PARTS) -> int:
        """Which of so many parts the test is in. Families take turns, as each costs about the same."""
        if self.shared in BUILT:
            return list(BUILT).index(self.shared) % parts
        if self.family:
            return sorted(families).index(self.family) % parts
        drawn_by = self.shared or (self.test if self.is_alone else self.file)
        return crc32(drawn_by.encode()) % parts


def sweep_key(item: pytest.Item) -> SweepKey:
    """Return what the test is drawn by."""
    callspec = getattr(item, "callspec", None)
    values = [value for value in callspec.params.values() if isinstance(value, str)] if callspec else []
    family = next((value for value in values if value in GOLDEN_NAMES), "")
    marked_file = any(
        mark.name == "sweep" for mark in getattr(item.getparent(pytest.Module), "own_markers", ())
    )
    shared = next((word for mark in item.iter_markers("sweep") for word in mark.args), "")
    return SweepKey(item.nodeid, family, is_alone=not marked_file, shared=shared)


def needs_draw(is_sweep: bool, through_fronts: bool, changes: Touched) -> bool:
    """Say whether a test runs only if it is drawn or touched. Those through front processes run without them,
    too, so each of them is drawn, unless the relay has changed.
    """
    return is_sweep or (through_fronts and RELAY not in changes.places)


def is_optimized(file: str, number: int) -> bool:
    """Say whether the number draws this file of tests to be compiled as users compile."""
    return crc32(file.encode()) % OPTIMIZED_PARTS == number % OPTIMIZED_PARTS


def touched(changed: Iterable[str], root: Path) -> Touched:
    """Say what changed files touch. `changed`: paths below the repository's root, some of which may be
    gone.
    """
    places, families, pages, built = set(), set(), set(), set()
    for name in changed:
        path = PurePosixPath(name)
        if path.suffix == ".md":
            pages.add(name)
        built |= {word for word, folders in BUILT.items() if any(map(path.is_relative_to, folders))}
        if name.startswith(f"{GOLDENS}/"):
            families.add(path.parts[2])
        if name.startswith(f"{FAMILIES}/") and (root / name).is_file():
            families |= _goldens_of((root / name).read_text(), root)
        place = _mirror(path, root)
        if place not in (None, *WHOLE_PARTS):
            places.add(place)
    return Touched(frozenset(places), frozenset(families), frozenset(pages), frozenset(built))


def _mirror(path: PurePosixPath, root: Path) -> str | None:
    """Return the deepest place of tests that mirrors a file's; None if no tests mirror it."""
    for source in (path, *path.parents):
        if str(source) in MIRRORED:
            tests = PurePosixPath(MIRRORED[str(source)]) / path.relative_to(source)
            return next(str(place) for place in (tests, *tests.parents) if (root / place).exists())
    return None


def _goldens_of(source: str, root: Path) -> set[str]:
    """Return the golden checkpoints whose architecture a source names."""
    configs = (root / GOLDENS).glob("*/config.json")
    return {
        config.parent.name
        for config in configs
        if any(f'"{name}"' in source for name in json.loads(config.read_text())["architectures"])
    }


def few(
    cases: Iterable[Any], always: Collection[Any], ci: Collection[Any] = (), *, shared: str = ""
) -> list[Any]:
    """Make the cases as parameters of a test. `make test` runs `always`, CI also those of `ci`, and the sweep
    has the others. A case of several parameters is a tuple.

    shared: what a fixture makes of each case for several tests, such as "engine of snapshots". The tests of
    such a case are drawn together, because each run that has one of them pays for what they share.
    """
    cases = list(cases)
    if unknown := [case for case in (*always, *ci) if case not in cases]:
        raise ValueError(f"no case of the test: {unknown}")
    return [
        case
        if case in always
        else pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=pytest.mark.ci if case in ci else _sweep(shared and f"{shared}: {case}"),
        )
        for case in cases
    ]


def _sweep(shared: str) -> pytest.MarkDecorator:
    return pytest.mark.sweep(shared) if shared else pytest.mark.sweep
