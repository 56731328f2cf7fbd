"""The process that renders callers' chat templates: see template_sandbox.py.

    python -m penstock.runtime.chat.template_worker CONNECTION LIFELINE

The arguments are file descriptors, see `children`. A message is JSON in UTF-8. First the process says `{}`,
which means that it is ready. Then, until the connection closes, it answers each `{"variables", "max_chars",
"cpu_limit_s"}` with `{"text"}` or `{"error"}`.

Each template is rendered in a fork of this process, which then ends. So no template sees what an earlier one
did, even if that broke out of jinja's sandbox, and no template waits for a new start after one was killed.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
from typing import Any

from jinja2 import TemplateError

from penstock.runtime.chat.rendering import render_messages
from penstock.runtime.machine import confined

MEMORY_BYTES = 512 * 1024 * 1024
"""Memory that rendering may take beyond what the interpreter and its modules have."""

MAX_ERROR_CHARS = 1000
_BYTES_PER_CHAR = 12
"""Most bytes that JSON makes of a character: two escapes, of a surrogate pair."""


def main() -> None:
    connection = confined.connect()
    for template in _FIRST:
        answer({"messages": [], "tools": None, "chat_template": template}, 1)
    confined.limit_memory(MEMORY_BYTES)
    confined.confine()
    gc.freeze()  # otherwise the first garbage collection of each fork would copy all these pages
    connection.send_bytes(b"{}")
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:  # the server has gone
            return
        connection.send_bytes(render_apart(json.loads(message)))


_FIRST = (
    "{{ [{}] | tojson }}{{ strftime_now('%d %b %Y') }}",
    "{{ 1 // 0 }}",
    "{% if %}",
    "{{ raise_exception('x') }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
)
"""Templates that are rendered at the start, because rendering, and every way in which it fails, imports
modules late. The first one also reads the time zone."""


def render_apart(message: dict[str, Any]) -> bytes:
    """Return the answer to one message, computed by a fork of this process within limits that the kernel
    enforces.
    """
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(theirs)
            _limit(message["cpu_limit_s"], ours)
            _write(ours, json.dumps(answer(message["variables"], message["max_chars"])).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(ours)
    most = _BYTES_PER_CHAR * (message["max_chars"] + MAX_ERROR_CHARS)
    with open(theirs, "rb") as pipe:
        data = pipe.read(most)
    _, status = os.waitpid(child, 0)
    if status == 0:
        return data
    limit = f"took longer than {message['cpu_limit_s']:g} s or too much memory, and was stopped"
    return json.dumps({"error": limit}).encode()


def answer(variables: dict[str, Any], max_chars: int) -> dict[str, str]:
    """Return `{"text"}`, or `{"error"}` with the reason, for one template."""
    try:
        text = render_messages(**variables)
    except TemplateError as error:
        return {"error": f"says: {error}"[:MAX_ERROR_CHARS]}
    except Exception as error:  # noqa: BLE001  a template is a program: it may raise anything
        return {"error": f"fails: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}
    if len(text) > max_chars:
        return {"error": f"writes {len(text)} characters; at most {max_chars} are taken"}
    return {"text": text}


def _limit(cpu_s: float, pipe: int) -> None:
    """Bound the processor time, close every descriptor but the pipe, and forbid new ones.

    The timer ends the process to the millisecond, even in the middle of a long instruction. A template that
    broke out of jinja's sandbox could stop the timer, but not raise the limit behind it.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    seconds = math.ceil(cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    os.closerange(0, pipe)
    os.closerange(pipe + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _write(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]


if __name__ == "__main__":
    main()
