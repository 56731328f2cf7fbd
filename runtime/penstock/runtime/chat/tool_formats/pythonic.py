"""Python calls in a list: `[f(a=1), g(b="x")]`, with keyword arguments that are literals.

Llama 4 may put the list between `<|python_start|>` and `<|python_end|>`; LFM2 puts it between
`<|tool_call_start|>` and `<|tool_call_end|>`. Without such tags a list is a call only if it comes first on a
line, and only if all its names are those of known tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from penstock.runtime.chat.tool_formats.events import Draft, Events, attempt, text_before
from penstock.runtime.chat.tool_formats.python_scan import python_value
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, more, run_of, spaces

ENDS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
MARKERS = (*ENDS, *ENDS.values())
KEYWORD = re.compile(r"[\w\-]*")
NAME = re.compile(r"[\w.\-]*")


def parse(r: Reader, out: Events, known: Collection[str]) -> Wait[None]:
    """Parse an output. Between tags any name is a call, elsewhere only a known one. Calls are told when their
    list is closed. Models also write several lists between tags, and forget the closing tag.
    """
    while marker := (yield from text_before(r, out, tuple(ENDS), "[")):
        is_tagged = marker in ENDS

        def block(
            call: Draft, marker: str = marker, names: Collection[str] | None = None if is_tagged else known
        ) -> Wait[bool]:
            if names is None:
                yield from literal(r, marker)
                yield from spaces(r)
            return (yield from _list(r, call, names))

        is_call = yield from attempt(r, out, marker, block, is_explicit=is_tagged)
        while is_call and is_tagged:
            r.mark()
            yield from spaces(r)
            if (yield from literal(r, ENDS[marker], or_end=True)):
                r.keep()
                break
            r.back()
            is_call = yield from attempt(r, out, "", lambda call: _next_list(r, call))


def _next_list(r: Reader, call: Draft) -> Wait[bool]:
    yield from spaces(r)
    return (yield from _list(r, call, None))


def _list(r: Reader, call: Draft, known: Collection[str] | None) -> Wait[bool]:
    """Consume a list of one or more calls. Returns False as soon as it cannot be one."""
    comma = yield from literal(r, "[")
    while comma:
        yield from spaces(r)
        if not (yield from python_call(r, call, known)):
            return False
        yield from spaces(r)
        if (yield from literal(r, "]")):
            return True
        comma = yield from literal(r, ",")
    return False


def python_call(r: Reader, call: Draft, known: Collection[str] | None) -> Wait[bool]:
    """Consume `f(a=1)`, and write each argument to the call when it is whole. Returns False as soon as it
    cannot be one, or not one of a `known` tool.
    """
    name = yield from (run_of(r, NAME) if known is None else _known_name(r, known))
    if not name or not (yield from literal(r, "(")):
        return False
    call.begin(name)
    keys: set[str] = set()
    comma = True
    while True:
        yield from spaces(r)
        if (yield from literal(r, ")")):
            call.add("}" if keys else "{}")
            call.end()
            return True
        key = (yield from run_of(r, KEYWORD)) if comma else ""
        if not key or key in keys:
            return False
        yield from spaces(r)
        if not (yield from literal(r, "=")):
            return False
        yield from spaces(r)
        value = yield from python_value(r)
        if value is None or r.has_met_end:  # then it may be the beginning of a number
            return False
        call.add(f"{', ' if keys else '{'}{json.dumps(key)}: {value}")
        keys.add(key)
        yield from spaces(r)
        comma = yield from literal(r, ",")


def _known_name(r: Reader, known: Collection[str]) -> Wait[str]:
    """Consume a known name. Returns "" as soon as it cannot be one."""
    start = r.pos
    while (yield from more(r)) and NAME.fullmatch(r.text[r.pos]):
        r.pos += 1
        if not any(name.startswith(r.text[start : r.pos]) for name in known):
            return ""
    name = r.text[start : r.pos]
    return name if name in known else ""
