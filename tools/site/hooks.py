"""What MkDocs does besides: pages of the project outside docs/, generated parts, and links out of docs/.

- The pages of the root and of bench/ are pages of the site too, in project/.
- `<!-- generated: ... -->` in a page is replaced by what tools/site makes from a parser.
- A link to one of those pages leads to it. A link to another file of the repository becomes plain text: the
  site holds no sources.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
for source in ("", "protos", "service", "runtime", "clients/python"):
    sys.path.insert(0, str(ROOT / source))

from penstock.cli.__main__ import Parser  # noqa: E402 -- needs the path above
from penstock.server_cli.commands import openai  # noqa: E402
from penstock.server_cli.serving import serve_flags  # noqa: E402
from tools.site import flags  # noqa: E402

PROJECT = (
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("bench/README.md", "bench/RESULTS.md"),
)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
_MARK = re.compile(r"<!-- generated: ([\w ]+) -->")


def parser_of(command: str, add_parser: Callable[[Any], None]) -> Any:
    """Return the parser of a command."""
    parser = Parser(prog="penstock")
    subparsers: Any = parser.add_subparsers()
    add_parser(subparsers)
    return subparsers.choices[command]


MADE = {
    "serve flags": lambda: flags.page(parser_of("serve", serve_flags.add_parser)),
    "openai flags": lambda: flags.page(parser_of("openai", openai.add_parser)),
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and the pictures, from outside docs/."""
    for name in PROJECT:
        files.append(File.generated(config, f"project/{name}", content=(ROOT / name).read_text("utf-8")))
    for picture in ROOT.glob("bench/*.svg"):
        where = f"project/{picture.relative_to(ROOT).as_posix()}"
        files.append(File.generated(config, where, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put in the generated parts, and lead links to where their targets are on the site."""
    here = PurePosixPath(page.file.src_uri)
    markdown = _MARK.sub(lambda mark: MADE[mark[1]](), markdown)
    kept: list[str] = []

    def keep(found: re.Match[str]) -> str:
        kept.append(found[0])
        return f"\0{len(kept) - 1}\0"

    prose = _FENCE.sub(keep, markdown)
    prose = _LINK.sub(lambda link: _led(link, here, files), prose)
    return re.sub(r"\0(\d+)\0", lambda found: kept[int(found[1])], prose)


def _led(link: re.Match[str], here: PurePosixPath, files: Files) -> str:
    picture, label, path, anchor = link[1], link[2], link[3], link[4] or ""
    if not path or re.match(r"[a-z][a-z+.-]*:", path):
        return link[0]
    target = _on_site(_in_repository(here).parent / path)
    if files.get_file_from_path(target) is None:
        if (ROOT / _joined(_in_repository(here).parent / path)).exists():
            return label
        return link[0]  # MkDocs will complain
    return f"{picture}[{label}]({os.path.relpath(target, here.parent)}{anchor})"


def _in_repository(page: PurePosixPath) -> PurePosixPath:
    """Tell where a page of the site lies in the repository."""
    return page.relative_to("project") if page.parts[0] == "project" else "docs" / page


def _on_site(path: PurePosixPath) -> str:
    """Tell where a file of the repository lies on the site, if it does."""
    joined = _joined(path)
    return joined.removeprefix("docs/") if joined.startswith("docs/") else f"project/{joined}"


def _joined(path: PurePosixPath) -> str:
    return os.path.normpath(str(path))
