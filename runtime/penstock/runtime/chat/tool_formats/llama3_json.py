"""The form of Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`. Several
calls are separated by `;`.

Without the tag an object is a call only if it comes first on a line, or after another call and `;`, has no
other keys, and has the name of a known tool.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.runtime.chat.tool_formats.events import Call, Events
from penstock.runtime.chat.tool_formats.json_scan import call_object
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, spaces, text_until

TAG = "<|python_tag|>"
MARKERS = (TAG,)


def parse(r: Reader, out: Events, known: Collection[str]) -> Wait[None]:
    """Parse an output. After the tag any name is a call; without it only a known one is."""
    while marker := (yield from text_until(r, out.text, MARKERS, "{", out.fresh)):
        names = None if marker == TAG else known
        r.mark()
        call = yield from _call(r, names)
        if call is None:
            r.back()
            out.text(r.take(len(marker)))
        while call is not None:
            r.keep()
            out.call(call)
            r.mark()
            yield from spaces(r)
            call = (yield from _call(r, names)) if (yield from literal(r, ";")) else None
            if call is None:
                r.back()


def _call(r: Reader, names: Collection[str] | None) -> Wait[Call | None]:
    yield from spaces(r)
    yield from literal(r, TAG)
    yield from spaces(r)
    return (yield from call_object(r, names))
