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

from penstock.runtime.chat.tool_formats.events import Draft, Events, attempt, text_before
from penstock.runtime.chat.tool_formats.json_scan import arguments_object
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, peek, run_of, spaces

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

    If another call is broken before its arguments, the calls end there, and the rest is text.
    """

    def first(call: Draft) -> Wait[bool]:
        yield from literal(r, START)
        return (yield from _call(r, call))

    while (yield from text_before(r, out, (START,))):
        is_call = yield from attempt(r, out, START, first)
        while is_call:
            r.mark()
            yield from spaces(r)
            if (yield from literal(r, END, or_end=True)):
                r.keep()
                break
            r.back()
            is_call = yield from attempt(r, out, "", lambda call: _call(r, call))


def _call(r: Reader, call: Draft) -> Wait[bool]:
    """Consume a call. Returns False as soon as it cannot be one. The end of the output may stand for what
    comes after the arguments.
    """
    yield from spaces(r)
    if not (yield from literal(r, CALL_START)):
        return False
    name = yield from run_of(r, NAME)
    if not (yield from literal(r, SEPARATOR)):
        return False
    yield from spaces(r)
    is_code = (yield from peek(r)) not in ("{", "")
    if is_code:
        name = yield from run_of(r, NAME)
        yield from spaces(r)
        if not (yield from literal(r, CODE_START)):
            return False
        yield from spaces(r)
    if not name or (yield from peek(r)) != "{":
        return False
    call.begin(name)
    call.settle()
    is_whole = yield from arguments_object(r, call, (CALL_END, END, CALL_START, START))
    r.mark()
    yield from spaces(r)
    if is_code:
        yield from literal(r, CODE_END, or_end=True)
        yield from spaces(r)
    if (yield from literal(r, CALL_END, or_end=True)):
        r.keep()
    else:
        r.back()
    return is_whole
