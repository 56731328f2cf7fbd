"""The form of OLMo 3: Python calls between `<function_calls>` and `</function_calls>`, each on a line."""

from __future__ import annotations

from collections.abc import Collection

from penstock.runtime.chat.tool_formats.events import Call, Events
from penstock.runtime.chat.tool_formats.pythonic import python_call
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, more, spaces, text_until

START = "<function_calls>"
END = "</function_calls>"
MARKERS = (START, END)


def parse(r: Reader, out: Events, known: Collection[str]) -> Wait[None]:
    """Parse an output. The form is explicit, so a name that is not `known` is a call too. Calls are reported
    when the closing tag has come, for which the end of the output may stand.
    """
    while (yield from text_until(r, out.text, (START,))):
        r.mark()
        calls = yield from _block(r)
        if not calls:
            r.back()
            out.text(r.take(len(START)))
        else:
            r.keep()
            for call in calls:
                out.call(call)


def _block(r: Reader) -> Wait[list[Call] | None]:
    calls: list[Call] = []
    yield from literal(r, START)
    while True:
        yield from spaces(r)
        if (yield from literal(r, END)) or (calls and not (yield from more(r))):
            return calls
        at = r.pos
        call = yield from python_call(r, None)
        if call is None:
            r.pos = at
            return calls if calls and (yield from literal(r, END, or_end=True)) else None
        calls.append(call)
