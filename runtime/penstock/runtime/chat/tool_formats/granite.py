"""The form of Granite 3 and Phi-4-mini: `<|tool_call|>` and a JSON array of calls, which Phi-4-mini closes by
`<|/tool_call|>`. One call may also come without the array.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.runtime.chat.tool_formats.events import Events
from penstock.runtime.chat.tool_formats.mistral import element, other_elements
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, spaces, text_until

START = "<|tool_call|>"
END = "<|/tool_call|>"
MARKERS = (START, END)


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
        call = yield from element(r)
        if call is None:
            r.back()
            out.text(r.take(len(START)))
            continue
        r.keep()
        out.call(call)
        if is_array:
            yield from other_elements(r, out)
        r.mark()
        yield from spaces(r)
        if (yield from literal(r, END, or_end=True)):
            r.keep()
        else:
            r.back()
