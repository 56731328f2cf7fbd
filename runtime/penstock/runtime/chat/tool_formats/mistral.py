"""The form of Mistral: `[TOOL_CALLS]` and a JSON array of calls or, since its tokenizer v11,
`[TOOL_CALLS]name[ARGS]{...}` for each call.

In the newer form `[CALL_ID]` and an id may follow the name. It is dropped, like the older form's "id",
because the server mints its own ids. `[ARGS]` may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from penstock.runtime.chat.tool_formats.events import Call, Events, call_or_none
from penstock.runtime.chat.tool_formats.json_scan import call_object, json_value
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, peek, run_of, spaces, text_until

START = "[TOOL_CALLS]"
ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
MARKERS = (START, ID, ARGUMENTS)
NAME = re.compile(r"[\w.\-]*")


def parse(r: Reader, out: Events, known: Collection[str]) -> Wait[None]:
    """Parse an output. The form is explicit, so a name that is not `known` is a call too.

    Each call of an array is reported when it is complete. If the array is broken after that, it ends there,
    and its rest is text.
    """
    while (yield from text_until(r, out.text, (START,))):
        r.mark()
        yield from literal(r, START)
        yield from spaces(r)
        is_array = yield from literal(r, "[")
        call = yield from (element(r) if is_array else _named(r))
        if call is None:
            r.back()
            out.text(r.take(len(START)))
            continue
        r.keep()
        out.call(call)
        if is_array:
            yield from other_elements(r, out)


def element(r: Reader) -> Wait[Call | None]:
    """Consumes a call of an array."""
    yield from spaces(r)
    return (yield from call_object(r))


def other_elements(r: Reader, out: Events) -> Wait[None]:
    """Consumes the array after its first call, as far as it is valid."""
    while True:
        r.mark()
        yield from spaces(r)
        if (yield from literal(r, "]")):
            return r.keep()
        call = (yield from element(r)) if (yield from literal(r, ",")) else None
        if call is None:
            return r.back()
        r.keep()
        out.call(call)


def _named(r: Reader) -> Wait[Call | None]:
    name = yield from run_of(r, NAME)
    if (yield from literal(r, ID)):
        yield from run_of(r, NAME)
    yield from literal(r, ARGUMENTS)
    yield from spaces(r)
    start = r.pos
    if not name or (yield from peek(r)) != "{" or not (yield from json_value(r)):
        return None
    return call_or_none(name, r.text[start : r.pos])
