"""This tool prints how many functions and files each walk through the code passes, as a Markdown table.

    python -m tools.walks                # the three walks beside this module
    python -m tools.walks my_walk.txt    # a walk of your own

A walk is a text file with one hop a line, in the order in which the code passes them:

    # A comment names a section.
    PATH::Class.function
    PATH::function F

PATH is relative to the repository's root, and F marks a function that (almost) only forwards. A hop whose
file or function no longer exists fails the run, so that the walks are mended with the code.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[2]
WALKS = tuple(Path(__file__).with_name(name) for name in ("stream.txt", "update.txt", "load.txt"))
HEAD = ("walk", "hops", "files", "forwards", "lines of the functions", "lines of the files")

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class BrokenWalk(Exception):
    """This error says which hops of a walk the code does not have, one a line."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A hop is one function that a walk passes, with the line of the walk's file that names it."""

    line: int
    path: str
    function: str
    forwards: bool

    def __str__(self) -> str:
        return f"{self.path}::{self.function}"


@dataclass(frozen=True, slots=True)
class Count:
    """A count is what one row of the table says of a walk."""

    hops: int
    files: int
    forwards: int
    function_lines: int
    file_lines: int


def hops_of(walk: str, text: str) -> Iterator[Hop]:
    """Read the hops of the walk named `walk`; refuse a line that is neither a hop nor a comment."""
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        path, colons, function = words[0].partition("::")
        if not (path and colons and function) or words[1:] not in ([], ["F"]):
            raise BrokenWalk(
                f"{walk}, line {number}: {line.strip()!r} is not PATH::Class.function, with F or without"
            )
        yield Hop(number, path, function, forwards=len(words) > 1)


def definition_of(module: ast.Module, dotted: str) -> Definition | None:
    """Find the function or class that `dotted` names in a module: the last, where several share it."""
    found: ast.Module | Definition = module
    for name in dotted.split("."):
        named = [
            node
            for node in found.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name
        ]
        if not named:
            return None
        found = named[-1]
    return None if isinstance(found, ast.Module) else found


def count(root: Path, walk: str, text: str) -> Count:
    """Count a walk through the repository `root`; refuse it with all hops that are not there."""
    hops = list(hops_of(walk, text))
    sources = {
        path: (root / path).read_text() for path in {hop.path for hop in hops} if (root / path).is_file()
    }
    modules = {path: ast.parse(source) for path, source in sources.items()}
    broken: list[str] = []
    function_lines = 0
    for hop in hops:
        if hop.path not in modules:
            broken.append(f"{walk}, line {hop.line}: {hop}: there is no such file")
        elif (node := definition_of(modules[hop.path], hop.function)) is None:
            broken.append(f"{walk}, line {hop.line}: {hop}: the file has no such function or class")
        else:
            function_lines += (node.end_lineno or node.lineno) - node.lineno + 1
    if broken:
        raise BrokenWalk("\n".join(broken))
    return Count(
        hops=len(hops),
        files=len(sources),
        forwards=sum(hop.forwards for hop in hops),
        function_lines=function_lines,
        file_lines=sum(len(source.splitlines()) for source in sources.values()),
    )


def row(cells: Sequence[str]) -> str:
    """Write one row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def table(counts: dict[str, Count]) -> Iterator[str]:
    """Write the table: a row for each walk."""
    yield row(HEAD)
    yield row(["---"] + ["---:"] * (len(HEAD) - 1))
    for walk, counted in counts.items():
        yield row([walk, *(f"{figure:,}" for figure in astuple(counted))])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; answer 1, and say why, where a walk names what the code does not have."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.walks", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument(
        "walks",
        nargs="*",
        metavar="FILE",
        type=Path,
        default=WALKS,
        help="default: the three beside this module",
    )
    counts: dict[str, Count] = {}
    refused: list[str] = []
    for file in parser.parse_args(arguments).walks:
        if not file.is_file():
            parser.error(f"{file} is no file")
        try:
            counts[file.stem] = count(ROOT, file.name, file.read_text())
        except BrokenWalk as error:
            refused.append(str(error))
    if refused:
        print(*refused, "Mend the walks with the code.", sep="\n", file=sys.stderr)
        return 1
    print(*table(counts), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
