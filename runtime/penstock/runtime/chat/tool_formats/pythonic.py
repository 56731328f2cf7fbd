"""Python calls in a list: `[f(a=1), g(b="x")]`, with keyword arguments that are literals.

Llama 4 may put the list between `<|python_start|>` and `<|python_end|>`; LFM2 puts it between
`<|tool_call_start|>` and `<|tool_call_end|>`. Without such tags a list is a call only if it comes first on a
line, and only if all its names are those of known tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from penstock.runtime.chat.tool_formats.events import Call, Events, call_or_none
from penstock.runtime.chat.tool_formats.python_scan import python_value
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, more, run_of, spaces, text_until

ENDS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
MARKERS = (*ENDS, *ENDS.values())
KEYWORD = re.compile(r"[\w\-]*")
NAME = re.compile(r"[\w.\-]*")


def parse(r: Reader, out: Events, known: Collection[str]) -> Wait[None]:
    """Parse an output. Between tags any name is a call, elsewhere only a known one. Calls are reported when
    their list is closed. Models also write several lists between tags, and forget the closing tag.
    """
    while marker := (yield from text_until(r, out.text, tuple(ENDS), "[", out.fresh)):
        r.mark()
        is_tagged = marker in ENDS
        if is_tagged:
            yield from literal(r, marker)
            yield from spaces(r)
        calls = yield from _list(r, None if is_tagged else known)
        if calls is None:
            r.back()
            out.text(r.take(len(marker)))
        while calls is not None:
            r.keep()
            for call in calls:
                out.call(call)
            calls = (yield from _after_list(r, ENDS[marker])) if is_tagged else None


def _after_list(r: Reader, end: str) -> Wait[list[Call] | None]:
    """Consumes the closing tag, or else another list, if one of them comes."""
    r.mark()
    yield from spaces(r)
    if (yield from literal(r, end, or_end=True)):
        r.keep()
        return None
    calls = yield from _list(r, None)
    if calls is None:
        r.back()
    return calls


def _list(r: Reader, known: Collection[str] | None) -> Wait[list[Call] | None]:
    """Consumes a list of one or more calls. Returns None as soon as it cannot be one."""
    calls: list[Call] = []
    comma = yield from literal(r, "[")
    while comma:
        yield from spaces(r)
        call = yield from python_call(r, known)
        if call is None:
            return None
        calls.append(call)
        yield from spaces(r)
        if (yield from literal(r, "]")):
            return calls
        comma = yield from literal(r, ",")
    return None


def python_call(r: Reader, known: Collection[str] | None) -> Wait[Call | None]:
    """Consumes `f(a=1)`. Returns None as soon as it cannot be one, or not one of a `known` tool."""
    name = yield from (run_of(r, NAME) if known is None else _known_name(r, known))
    if not name or not (yield from literal(r, "(")):
        return None
    members: dict[str, str] = {}
    comma = True
    while True:
        yield from spaces(r)
        if (yield from literal(r, ")")):
            arguments = ", ".join(f"{json.dumps(key)}: {value}" for key, value in members.items())
            return call_or_none(name, f"{{{arguments}}}")
        key = (yield from run_of(r, KEYWORD)) if comma else ""
        if not key or key in members:
            return None
        yield from spaces(r)
        if not (yield from literal(r, "=")):
            return None
        yield from spaces(r)
        value = yield from python_value(r)
        if value is None:
            return None
        members[key] = value
        yield from spaces(r)
        comma = yield from literal(r, ",")


def _known_name(r: Reader, known: Collection[str]) -> Wait[str]:
    """Consumes a known name. Returns "" as soon as it cannot be one."""
    start = r.pos
    while (yield from more(r)) and NAME.fullmatch(r.text[r.pos]):
        r.pos += 1
        if not any(name.startswith(r.text[start : r.pos]) for name in known):
            return ""
    name = r.text[start : r.pos]
    return name if name in known else ""
