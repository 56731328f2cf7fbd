"""The form of Granite 3 and Phi-4-mini: `<|tool_call|>` and a JSON array of calls, which Phi-4-mini closes by
`<|/tool_call|>`. One call may also come without the array.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.runtime.chat.tool_formats.events import Draft, Events, attempt, text_before
from penstock.runtime.chat.tool_formats.mistral import element, other_elements
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, spaces

START = "<|tool_call|>"
END = "<|/tool_call|>"
MARKERS = (START, END)


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
        return (yield from element(r, call, MARKERS))

    while (yield from text_before(r, out, (START,))):
        if not (yield from attempt(r, out, START, block)):
            continue
        if is_array:
            yield from other_elements(r, out, MARKERS)
        r.mark()
        yield from spaces(r)
        if (yield from literal(r, END, or_end=True)):
            r.keep()
        else:
            r.back()
