"""The process that renders callers' chat templates: see sandbox.py. Run as a file, with one pipe's
descriptor.

It imports nothing of Penstock, so that it starts quickly, whatever the server's import path. A message is
JSON in UTF-8. First it says `{}`: ready. Then, until the pipe closes, to each of `{"variables", "max_chars"}`
it answers `{"text"}` or `{"error"}`.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

MEMORY_BYTES = 512 * 1024 * 1024
"""What rendering may take beyond what the interpreter and its modules have."""

MAX_ERROR_CHARS = 1000


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    _limit()
    pipe.send_bytes(b"{}")
    while True:
        try:
            message = json.loads(pipe.recv_bytes())
        except EOFError:  # the server has gone
            return
        pipe.send_bytes(json.dumps(answer(message["variables"], message["max_chars"])).encode())


def answer(variables: dict[str, Any], max_chars: int) -> dict[str, str]:
    """`{"text"}`, or `{"error"}` with the reason, for one template."""
    try:
        text = render_jinja_template(**variables)[0][0]
    except TemplateError as error:
        return {"error": f"says: {error}"[:MAX_ERROR_CHARS]}
    except Exception as error:  # noqa: BLE001  a template is a program: it may raise anything
        return {"error": f"fails: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}
    if len(text) > max_chars:
        return {"error": f"writes {len(text)} characters; at most {max_chars} are taken"}
    return {"text": text}


def _limit() -> None:
    """Bound memory, write no files, and leave no core: the kernel enforces what jinja's sandbox cannot."""
    sizes = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert sizes is not None
    most = int(sizes[1]) * 1024 + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
