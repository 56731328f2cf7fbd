"""Prints the map of the code: each folder, its modules, and the first sentence of each module's docstring.

    python -m tools.map                                # all of it
    python -m tools.map runtime/penstock/runtime/loop  # a folder and those below

A module without a docstring stands there with its name alone.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    "runtime/penstock/runtime",
    "service/penstock/service",
    "service/penstock/openai",
    "service/penstock/server_cli",
    "service/penstock/shared",
    "clients/python/penstock/client",
    "clients/python/penstock/cli",
    "bench",
    "tools",
)


def first_sentence(source: str) -> str:
    """Return what the docstring of a module says first; empty for one without a docstring."""
    paragraph = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]
    return re.split(r"(?<=\.)\s+(?=[A-Z])", " ".join(paragraph.split()))[0]


def lines(root: Path, folder: Path) -> Iterator[str]:
    """Yield the map of a folder of the repository `root`: its modules, then the folders below it."""
    files = sorted(folder.glob("*.py"))
    if files:
        init = folder / "__init__.py"
        said = first_sentence(init.read_text()) if init.exists() else ""
        yield ""
        yield f"{folder.relative_to(root)}/" + (f"  {said}" if said else "")
        modules = [file for file in files if file != init]
        width = max((len(file.name) for file in modules), default=0)
        yield from (f"  {file.name:{width}}  {first_sentence(file.read_text())}".rstrip() for file in modules)
    for below in sorted(path for path in folder.iterdir() if path.is_dir()):
        yield from lines(root, below)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.map", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", default=PARTS, help="default: all parts")
    for name in parser.parse_args(arguments).folders:
        folder = (ROOT / name).resolve()
        if not folder.is_dir() or not folder.is_relative_to(ROOT):
            parser.error(f"{name} is no folder of this repository; name one such as {PARTS[0]}")
        print(*lines(ROOT, folder), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
