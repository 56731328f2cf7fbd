"""Where modules live: few in a folder, no circles of imports, and a map that names every module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PARTS = (
    "runtime/penstock/runtime",
    "service/penstock/service",
    "service/penstock/server_cli",
    "service/penstock/openai",
    "clients/python/penstock/cli",
    "clients/python/penstock/client",
    "bench",
)
MOST_MODULES = 12
MOST_TEST_FILES = 16
"""A package may need more files of tests than it has modules."""
MOST_LINES = 350
"""Of a source file; tests may be longer."""
MAPPED = {REPOSITORY / part for part in PARTS}


def module_name(path: Path) -> str:
    """The dotted name under which the file is imported."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    if "penstock" in parts:
        parts = parts[parts.index("penstock") :]
    return ".".join(parts).removesuffix(".__init__")


MODULES = {
    module_name(path): path for part in (*PARTS, "tests") for path in (REPOSITORY / part).rglob("*.py")
}


def imported(tree: ast.AST, known: Iterable[str]) -> Iterator[str]:
    """The modules among `known` that the source imports, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known:
                    yield full
                elif node.module in known:
                    yield node.module


def circles(imports: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Package -> a circle of its parts. A part is a module, or a package with all that is in it.

    A package's own `__init__` is no part of it: it may name what is inside.
    """
    needs: dict[str, dict[str, set[str]]] = {}
    for importer, targets in imports.items():
        for target in targets:
            one, other = importer.split("."), target.split(".")
            depth = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
            if depth:
                parts = needs.setdefault(".".join(one[:depth]), {})
                parts.setdefault(one[depth], set()).add(other[depth])
    found = {}
    for package, parts in needs.items():
        try:
            TopologicalSorter(parts).prepare()
        except CycleError as error:
            found[package] = error.args[1]
    return found


@pytest.mark.parametrize(
    ("imports", "found"),
    [
        ({"p.a": ["p.b"], "p.b": ["p.c"], "p.c": []}, {}),
        ({"p.a": ["p.b"], "p.b": ["p.a"]}, {"p"}),
        ({"p.a.x": ["p.b"], "p.b": ["p.a.y"], "p.a.y": []}, {"p"}),
        ({"p.a.x": ["p.a.y"], "p.a.y": ["p.a.x"]}, {"p.a"}),
        ({"p": ["p.a"], "p.a": ["p"]}, set()),
    ],
    ids=["none", "of modules", "of a module and a package", "within a package", "of an __init__"],
)
def test_circles_are_found(imports: Mapping[str, list[str]], found: Iterable[str]) -> None:
    assert set(circles(imports)) == set(found)


def test_parts_of_a_package_do_not_import_each_other_in_a_circle() -> None:
    """Imports for types alone count: they tie modules together just as well."""
    # Tree after tree: all of them together cost the garbage collector more time than the parser.
    imports = {name: list(imported(ast.parse(path.read_text()), MODULES)) for name, path in MODULES.items()}
    assert circles(imports) == {}


def files_by_folder() -> dict[Path, list[str]]:
    """The names of the modules in each folder, without `__init__.py`."""
    found: dict[Path, list[str]] = {}
    for path in MODULES.values():
        if path.name != "__init__.py":
            found.setdefault(path.parent, []).append(path.name)
    return found


def test_no_folder_holds_more_than_a_dozen_modules() -> None:
    many = {
        str(folder.relative_to(REPOSITORY)): len(names)
        for folder, names in files_by_folder().items()
        if len(names)
        > (MOST_TEST_FILES if REPOSITORY / "tests" in (folder, *folder.parents) else MOST_MODULES)
    }
    assert many == {}


def test_no_source_file_is_too_long() -> None:
    kernels = (REPOSITORY / "runtime").rglob("src/**/*.[ch]*")
    sources = [path for name, path in MODULES.items() if not name.startswith("tests")]
    lengths = {path: len(path.read_text().splitlines()) for path in (*sources, *kernels)}
    assert any(path.suffix == ".cc" for path in lengths)
    assert {str(path): lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


def folders_on_the_map() -> dict[Path, list[str]]:
    """The files that each table of ARCHITECTURE.md names."""
    found: dict[Path, list[str]] = {}
    part = folder = REPOSITORY
    for line in (REPOSITORY / "ARCHITECTURE.md").read_text().splitlines():
        if heading := re.fullmatch(r"### .*: `(\S+)/`", line):
            part = folder = REPOSITORY / heading[1]
        elif heading := re.match(r"#### `(\S+)/`: ", line):
            folder = part / heading[1]
        elif line.startswith("#"):
            folder = REPOSITORY
        elif (row := re.match(r"\| `(\w+\.py)` \| ", line)) and folder != REPOSITORY:
            found.setdefault(folder, []).append(row[1])
    return found


def test_the_map_names_every_module_once() -> None:
    mapped = {
        folder: sorted(names)
        for folder, names in files_by_folder().items()
        if not MAPPED.isdisjoint((folder, *folder.parents))
    }
    assert {folder: sorted(names) for folder, names in folders_on_the_map().items()} == mapped
