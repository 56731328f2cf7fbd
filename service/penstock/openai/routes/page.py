"""The web page at `/`, and the files that it is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

INDEX: Final = "index.html"
POLICY: Final = "; ".join(
    (
        "default-src 'none'",  # what is not named below is not loaded, from nowhere
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # the images that somebody sends are shown to them
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No text can be made into HTML or code, whatever a script of the page would try.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""The Content-Security-Policy: a model's output stays text, even if the page's own code had a defect."""
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    # A browser may keep the files, and asks each time whether they are still the same.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, as it is sent."""

    content: bytes
    media_type: str
    etag: str


async def show_page(request: Request) -> Response:
    """Serve `GET /`."""
    return _reply(request, INDEX)


async def show_page_file(request: Request) -> Response:
    """Serve `GET /page/{name}`: a style sheet, a script or a drawing of the page."""
    return _reply(request, request.path_params["name"])


def _reply(request: Request, name: str) -> Response:
    file = page_files().get(name)
    if file is None:
        raise HTTPException(404, "The page has no such file.")
    headers = {**HEADERS, "etag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


@cache
def page_files() -> Mapping[str, PageFile]:
    """Read all files of the page by name, such as "js/main.js". They are small, and read once; so no name
    that a caller sends ever becomes a path.
    """
    return {
        name: PageFile(content, _media_type(name), f'"{hashlib.sha256(content).hexdigest()[:16]}"')
        for name, content in _read(files("penstock.openai") / "page", "")
    }


def _read(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name}"
        found += _read(entry, f"{name}/") if entry.is_dir() else [(name, entry.read_bytes())]
    return found


def _media_type(name: str) -> str:
    """Tell the type, but not from the machine's own table of types, in which a script may be anything."""
    known = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    return known[name[name.rindex(".") :]]
