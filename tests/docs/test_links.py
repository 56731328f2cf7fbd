"""Links, paths and names in the pages lead somewhere."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from penstock.runtime.measuring.engine_instruments import ENGINE_INSTRUMENTS
from penstock.service.telemetry.metrics.service_instruments import SERVICE_INSTRUMENTS
from tests.docs.pages import ROOT, anchors_of, blocks, inline_code_of, links_of, pages, text_of

SOURCES = ("protos", "runtime", "service", "clients/python", "")
NOT_OURS = {
    "numpy.py": "an example of a stray file",
    "penstock/__init__.py": "a file that must not exist",
    "site/": "what `make docs` builds",
}
"""Text that looks like a path of the repository and is none."""
TRACING = "service/penstock/service/telemetry/tracing"
TRACE_ATTRIBUTES = {
    name
    for source in (ROOT / TRACING).glob("*.py")
    for name in re.findall(r'"(penstock\.[a-z_.]+)"', source.read_text())
}
METRICS = {instrument.name for instrument in (*ENGINE_INSTRUMENTS, *SERVICE_INSTRUMENTS)}


@cache
def tracked() -> tuple[str, ...]:
    """All files of the working tree that git would keep."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return tuple(name for name in done.stdout.splitlines() if (ROOT / name).exists())


@cache
def folders() -> frozenset[str]:
    return frozenset(str(parent) for name in tracked() for parent in Path(name).parents)


def _ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages(), ids=_ids)
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for target in links_of(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor and (file.suffix, file.name) not in ((".md", "client.md"),):
            assert anchor in anchors_of(file), f"{target}; there are {sorted(anchors_of(file))}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached = {ROOT / "README.md"}
    new = set(reached)
    while new:
        linked = {
            (page.parent / target.partition("#")[0]).resolve()
            for page in new
            for target in links_of(page)
            if target.partition("#")[0].endswith(".md")
        }
        new = linked - reached
        reached |= new
    for_readers = [page for page in pages() if "certs" not in page.parts]  # beside the tests that use them
    assert [_ids(page) for page in for_readers if page not in reached] == []


_PATH = re.compile(r"[\w.*{},/-]+\.(?:py|proto|md|cc|h|toml|txt|yml|sh|svg)|[\w.*-]+(?:/[\w.*-]+)*/")


def expanded(path: str) -> list[str]:
    """Expand `a.{h,cc}` to both names."""
    parts = re.split(r"\{([^}]*)\}", path)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(choice) for choice in product(*choices)]


def exists(path: str) -> bool:
    """Say whether a file or folder has this path or ends in it."""
    pattern = path.rstrip("/").replace("...", "*")
    names = folders() if path.endswith("/") else tracked()
    return any(fnmatch(name, pattern) or fnmatch(name, f"*/{pattern}") for name in names)


def paths_in(page: Path) -> set[str]:
    found = {word for code in inline_code_of(page) for word in code.split() if _PATH.fullmatch(word)}
    return {path for path in found - NOT_OURS.keys() if not path.startswith(("/", "~", "./path"))}


@pytest.mark.parametrize("page", pages(), ids=_ids)
def test_paths_in_the_text_exist(page: Path) -> None:
    missing = [path for path in sorted(paths_in(page)) if not all(map(exists, expanded(path)))]
    assert missing == []


def test_a_path_that_does_not_exist_is_noticed() -> None:
    assert not exists("penstock/runtime/nothing.py")
    assert exists("pages.py")
    assert all(map(exists, expanded("docs/{pages,shell}.py")))


_MODULE = re.compile(r"(?<![\w/])(?:penstock\.(?!v1\b)\w+|bench|tests|tools)(?:\.\w+)+")


def is_module_or_name(dotted: str) -> bool:
    """Say whether it is a module, or a name that occurs in the module before it."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length])
        files = [ROOT / root / f"{path}{end}" for root in SOURCES for end in (".py", "/__init__.py")]
        found = [file for file in files if file.is_file()]
        if not found and length == len(parts) and any((ROOT / root / path).is_dir() for root in SOURCES):
            return True
        if found:
            return (
                length == len(parts) or re.search(rf"\b{parts[length]}\b", found[0].read_text()) is not None
            )
    return False


@pytest.mark.parametrize("page", pages(), ids=_ids)
def test_modules_in_the_text_and_in_commands_exist(page: Path) -> None:
    code = inline_code_of(page) + [
        b.source for b in blocks() if b.page == page and b.language in ("sh", "python")
    ]
    code += re.findall(r"^::: (\S+)$", text_of(page), re.M)
    found = {name for text in code for name in _MODULE.findall(text)}
    named = {name for name in found if not name.endswith(".py")}
    named -= METRICS | TRACE_ATTRIBUTES
    assert [name for name in sorted(named) if not is_module_or_name(name)] == []
