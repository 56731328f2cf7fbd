"""The form of DeepSeek V3, R1 and V3.1: one or more calls between `<｜tool▁calls▁begin｜>` and
`<｜tool▁calls▁end｜>`.

V3.1 writes a call as `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`. In those of the older
models "function" stands before the separator, and the name and a code block of JSON after it:

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>name
    ```json
    {...}
    ```<｜tool▁call▁end｜>
"""

from __future__ import annotations

import re
from collections.abc import Collection

from penstock.runtime.chat.tool_formats.events import Call, Events, call_or_none
from penstock.runtime.chat.tool_formats.json_scan import json_value
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, peek, run_of, spaces, text_until

START = "<｜tool▁calls▁begin｜>"
END = "<｜tool▁calls▁end｜>"
CALL_START = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKERS = (START, END, CALL_START, CALL_END, SEPARATOR)
CODE_START = "```json"
CODE_END = "```"
NAME = re.compile(r"[^\s<`{]*")


def parse(r: Reader, out: Events, known: Collection[str]) -> Wait[None]:
    """Parse an output. The form is explicit, so a name that is not `known` is a call too.

    Each call is reported when it is complete. If another is broken after that, the calls end there, and the
    rest is text.
    """
    while (yield from text_until(r, out.text, (START,))):
        r.mark()
        yield from literal(r, START)
        call = yield from _call(r)
        if call is None:
            r.back()
            out.text(r.take(len(START)))
            continue
        r.keep()
        out.call(call)
        yield from _other_calls(r, out)


def _other_calls(r: Reader, out: Events) -> Wait[None]:
    """Consumes the calls after the first, and the closing marker."""
    while True:
        r.mark()
        yield from spaces(r)
        if (yield from literal(r, END)):
            return r.keep()
        call = yield from _call(r)
        if call is None:
            return r.back()
        r.keep()
        out.call(call)


def _call(r: Reader) -> Wait[Call | None]:
    """Consumes a call. Returns None as soon as it cannot be one. The end of the output may stand for what
    comes after the arguments.
    """
    yield from spaces(r)
    if not (yield from literal(r, CALL_START)):
        return None
    name = yield from run_of(r, NAME)
    if not (yield from literal(r, SEPARATOR)):
        return None
    yield from spaces(r)
    is_code = (yield from peek(r)) != "{"
    if is_code:
        name = yield from run_of(r, NAME)
        yield from spaces(r)
        if not (yield from literal(r, CODE_START)):
            return None
        yield from spaces(r)
    start = r.pos
    if not name or (yield from peek(r)) != "{" or not (yield from json_value(r)):
        return None
    arguments = r.text[start : r.pos]
    yield from spaces(r)
    if is_code and not (yield from literal(r, CODE_END, or_end=True)):
        return None
    yield from spaces(r)
    return call_or_none(name, arguments) if (yield from literal(r, CALL_END, or_end=True)) else None
