"""Modules, and the packages below them, import each other in no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tools.map import PARTS

REPOSITORY = Path(__file__).parents[2]


def module_name(path: Path) -> str:
    """Return the dotted name under which the file is imported."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    if "penstock" in parts:
        parts = parts[parts.index("penstock") :]
    return ".".join(parts).removesuffix(".__init__")


MODULES = {
    module_name(path): path for part in (*PARTS, "tests") for path in (REPOSITORY / part).rglob("*.py")
}


def imported(tree: ast.AST, known: Iterable[str]) -> Iterator[str]:
    """Yield the modules among `known` that the source imports, wherever the import stands."""
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


@pytest.mark.parametrize("of_tests", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_parts_of_a_package_do_not_import_each_other_in_a_circle(of_tests: bool) -> None:
    """Imports for types alone count: they tie modules together just as well. No package imports tests."""
    # Tree after tree: all of them together cost the garbage collector more time than the parser.
    imports = {
        name: list(imported(ast.parse(path.read_text()), MODULES))
        for name, path in MODULES.items()
        if name.startswith("tests.") is of_tests
    }
    assert circles(imports) == {}
