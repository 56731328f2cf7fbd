"""The form of Hermes and Qwen: `<tool_call>` `{"name": ..., "arguments": {...}}` `</tool_call>`, any number
of times.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from penstock.runtime.chat.tool_formats.events import Draft, Events, attempt, text_before
from penstock.runtime.chat.tool_formats.json_scan import call_object
from penstock.runtime.chat.tool_formats.reader import (
    Reader,
    Wait,
    drop,
    literal,
    run_of,
    spaces,
    text_until,
)

START = "<tool_call>"
END = "</tool_call>"
MARKERS = (START, END)
_CLOSING = re.compile(r"[\s}\]]*")


def parse(r: Reader, out: Events, known: Collection[str]) -> Wait[None]:
    """Parse an output. The form is explicit, so a name that is not `known` is a call too."""
    while (yield from text_before(r, out, (START,))):
        yield from attempt(r, out, START, lambda call: _block(r, call))


def _block(r: Reader, call: Draft) -> Wait[bool]:
    """Consume one block. The end of the output, for example at a stop string, may stand for the closing tag.

    If the call has been told, what is wrong in the rest of the block is dropped, and where the closing tag is
    missing, the block ends with the object.
    """
    yield from literal(r, START)
    yield from spaces(r)
    is_whole = yield from call_object(r, call, ends=(END, START))
    if not call.is_told:
        yield from spaces(r)
        return is_whole and (yield from literal(r, END, or_end=True))
    if not is_whole:
        yield from text_until(r, drop, (END, START))
    r.mark()
    yield from run_of(r, _CLOSING)
    if (yield from literal(r, END, or_end=True)):
        r.keep()
    else:
        r.back()
    return True
