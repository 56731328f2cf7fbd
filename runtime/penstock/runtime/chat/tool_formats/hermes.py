"""The form of Hermes and Qwen: `<tool_call>` `{"name": ..., "arguments": {...}}` `</tool_call>`, any number
of times.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from penstock.runtime.chat.tool_formats.events import Call, Events
from penstock.runtime.chat.tool_formats.json_scan import call_object
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, spaces, text_until

START = "<tool_call>"
END = "</tool_call>"
MARKERS = (START, END)


def parse(r: Reader, out: Events, known: Collection[str]) -> Wait[None]:
    """Parse an output. The form is explicit, so a name that is not `known` is a call too."""
    yield from calls(r, out, START, _block)


def calls(r: Reader, out: Events, start: str, block: Callable[[Reader], Wait[Call | None]]) -> Wait[None]:
    """Parse an output whose calls stand in blocks of one each. `block` consumes one that begins with
    `start`, and returns None if it is none; then `start` is text.
    """
    while (yield from text_until(r, out.text, (start,))):
        r.mark()
        call = yield from block(r)
        if call is None:
            r.back()
            out.text(r.take(len(start)))
        else:
            r.keep()
            out.call(call)


def _block(r: Reader) -> Wait[Call | None]:
    """Consumes one block. The end of the output, for example at a stop string, may stand for the
    closing tag.
    """
    yield from literal(r, START)
    yield from spaces(r)
    call = yield from call_object(r)
    if call is None:
        return None
    yield from spaces(r)
    return call if (yield from literal(r, END, or_end=True)) else None
