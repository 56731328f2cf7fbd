"""The form of OLMo 3: Python calls between `<function_calls>` and `</function_calls>`, each on a line."""

from __future__ import annotations

from collections.abc import Collection

from penstock.runtime.chat.tool_formats.events import Draft, Events, attempt, text_before
from penstock.runtime.chat.tool_formats.pythonic import python_call
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, more, spaces

START = "<function_calls>"
END = "</function_calls>"
MARKERS = (START, END)


def parse(r: Reader, out: Events, known: Collection[str]) -> Wait[None]:
    """Parse an output. The form is explicit, so a name that is not `known` is a call too. Calls are told
    when the closing tag has come, for which the end of the output may stand.
    """
    while (yield from text_before(r, out, (START,))):
        yield from attempt(r, out, START, lambda call: _block(r, call))


def _block(r: Reader, call: Draft) -> Wait[bool]:
    yield from literal(r, START)
    while True:
        yield from spaces(r)
        if (yield from literal(r, END)) or (call.has_begun and not (yield from more(r))):
            return call.has_begun
        at = r.pos
        if not (yield from python_call(r, call, None)):
            r.return_to(at)
            return call.has_begun and (yield from literal(r, END, or_end=True))
