"""The project's Markdown pages, taken apart: fenced blocks, links, headings and inline code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+ (.+)$", re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    """The number of its first line of source, from 1."""
    language: str
    source: str

    @property
    def name(self) -> str:
        """The page and the line, for the name of a test and for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def pages() -> tuple[Path, ...]:
    """All pages that people read: in the root, docs/, bench/, and the READMEs of clients, tests and tools."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")]
    for folder in ("clients", "tests", "tools", "examples"):
        found += [p for p in (ROOT / folder).glob("**/*.md") if "node_modules" not in p.parts]
    return tuple(sorted(found))


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def blocks() -> tuple[Block, ...]:
    """Return the blocks of all pages, in order."""
    return tuple(block for page in pages() for block in _blocks_of(page))


def _blocks_of(page: Path) -> Iterator[Block]:
    text = text_of(page)
    for found in _FENCE.finditer(text):
        indent, language, source = found.groups()
        line = text.count("\n", 0, found.start()) + 2
        yield Block(page, line, language, re.sub(f"^{indent}", "", source, flags=re.M))


def prose_of(page: Path) -> str:
    """Return the page without its fenced blocks."""
    return _FENCE.sub("", text_of(page))


def links_of(page: Path) -> list[str]:
    """Targets of the page's links that stay within the repository."""
    return [target for target in _LINK.findall(prose_of(page)) if not re.match(r"[a-z][a-z+.-]*:", target)]


def inline_code_of(page: Path) -> list[str]:
    return _CODE.findall(prose_of(page))


def anchors_of(page: Path) -> set[str]:
    """Return the names that `#...` may have on the page, made of its headings in the way of GitHub and
    MkDocs.
    """
    return {_slug(heading) for heading in _HEADING.findall(prose_of(page))}


def _slug(heading: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
