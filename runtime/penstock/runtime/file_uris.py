"""Reads file:// URIs, which say where files lie on the server's machine."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from penstock.runtime.errors import InvalidRequest, UnsupportedFeature, Violation


def path_of(uri: str, field: str) -> Path:
    """Return the absolute path that a URI names. Errors name it as `field`. Raises UnsupportedFeature for
    another scheme than file://, and InvalidRequest for anything else that is wrong.
    """
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise InvalidRequest([Violation(field, f"is not a URI: {error}")]) from error
    if parts.scheme != "file":
        raise UnsupportedFeature([field], "only file:// is read")
    path = os.fsdecode(unquote_to_bytes(parts.path))
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not path.startswith("/"):
        described = "must be file:// and an absolute path, without a host, a query or a fragment"
        raise InvalidRequest([Violation(field, described)])
    if "\0" in path:
        raise InvalidRequest([Violation(field, "holds a NUL character")])
    return Path(path)
