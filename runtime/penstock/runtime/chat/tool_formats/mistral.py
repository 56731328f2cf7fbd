"""The form of Mistral: `[TOOL_CALLS]` and a JSON array of calls or, since its tokenizer v11,
`[TOOL_CALLS]name[ARGS]{...}` for each call.

In the newer form `[CALL_ID]` and an id may follow the name. It is dropped, like the older form's "id",
because the server mints its own ids. `[ARGS]` may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from penstock.runtime.chat.tool_formats.events import Draft, Events, attempt, text_before
from penstock.runtime.chat.tool_formats.json_scan import arguments_object, call_object
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, peek, run_of, spaces

START = "[TOOL_CALLS]"
ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
MARKERS = (START, ID, ARGUMENTS)
NAME = re.compile(r"[\w.\-]*")


def parse(r: Reader, out: Events, known: Collection[str]) -> Wait[None]:
    """Parse an output. The form is explicit, so a name that is not `known` is a call too.

    If an array is broken after a call, it ends there, and its rest is text.
    """
    is_array = False

    def block(call: Draft) -> Wait[bool]:
        nonlocal is_array
        yield from literal(r, START)
        yield from spaces(r)
        is_array = yield from literal(r, "[")
        return (yield from (element(r, call, (START,)) if is_array else _named(r, call)))

    while (yield from text_before(r, out, (START,))):
        if (yield from attempt(r, out, START, block)) and is_array:
            yield from other_elements(r, out, (START,))


def element(r: Reader, call: Draft, ends: Sequence[str]) -> Wait[bool]:
    """Consume a call of an array. `ends` are as for `arguments_object`."""
    yield from spaces(r)
    return (yield from call_object(r, call, ends=ends, closing="}]"))


def other_elements(r: Reader, out: Events, ends: Sequence[str]) -> Wait[None]:
    """Consume the array after its first call, as far as it is valid."""

    def block(call: Draft) -> Wait[bool]:
        yield from spaces(r)
        return (yield from literal(r, ",")) and (yield from element(r, call, ends))

    is_call = True
    while is_call:
        r.mark()
        yield from spaces(r)
        if (yield from literal(r, "]")):
            return r.keep()
        r.back()
        is_call = yield from attempt(r, out, "", block)


def _named(r: Reader, call: Draft) -> Wait[bool]:
    name = yield from run_of(r, NAME)
    if not name:
        return False
    has_tag = yield from literal(r, ID)
    if has_tag:
        yield from run_of(r, NAME)
    has_tag = (yield from literal(r, ARGUMENTS)) or has_tag
    if has_tag:
        call.begin(name)
    yield from spaces(r)
    if (yield from peek(r)) != "{":
        return False
    if not has_tag:
        call.begin(name)
    call.settle()
    return (yield from arguments_object(r, call, (START,)))
