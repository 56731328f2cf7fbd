"""Mistral: `[TOOL_CALLS]` and a JSON array of calls, or, since its tokenizer v11,
`[TOOL_CALLS]name[ARGS]{...}` for each.

The newer form may have `[CALL_ID]` and an id after the name, which is dropped as the older one's "id" is: the
server mints its own; and `[ARGS]` may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from penstock.runtime.chat.forms.events import Call, Events
from penstock.runtime.chat.forms.json_scan import call_object, json_value
from penstock.runtime.chat.forms.reader import Reader, Wait, literal, peek, run_of, spaces, text_until

START = "[TOOL_CALLS]"
ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
MARKERS = (START, ID, ARGUMENTS)
NAME = re.compile(r"[\w.\-]*")


def parse(r: Reader, out: Events, known: Collection[str]) -> Wait[None]:
    """The form is explicit: a name that is not `known` is a call as well.

    Each call of an array is told once it is complete; an array that goes wrong later ends there, and its rest
    is text.
    """
    while (yield from text_until(r, out.text, (START,))):
        r.mark()
        yield from literal(r, START)
        yield from spaces(r)
        is_array = yield from literal(r, "[")
        call = yield from (_element(r) if is_array else _named(r))
        if call is None:
            r.back()
            out.text(r.take(len(START)))
            continue
        r.keep()
        out.call(call)
        if is_array:
            yield from _other_elements(r, out)


def _element(r: Reader) -> Wait[Call | None]:
    yield from spaces(r)
    return (yield from call_object(r))


def _other_elements(r: Reader, out: Events) -> Wait[None]:
    """Consume the array after its first call, as far as it goes well."""
    while True:
        r.mark()
        yield from spaces(r)
        if (yield from literal(r, "]")):
            return r.keep()
        call = (yield from _element(r)) if (yield from literal(r, ",")) else None
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
    return Call(name, r.text[start : r.pos])
