"""The form of Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`. Several
calls are separated by `;`.

Without the tag an object is a call only if it comes first on a line, or after another call and `;`, has no
other keys, and has the name of a known tool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from penstock.runtime.chat.tool_formats.events import Draft, Events, attempt, text_before
from penstock.runtime.chat.tool_formats.json_scan import call_object
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, spaces

TAG = "<|python_tag|>"
MARKERS = (TAG,)


def parse(r: Reader, out: Events, known: Collection[str]) -> Wait[None]:
    """Parse an output. After the tag any name is a call; without it only a known one is."""
    while marker := (yield from text_before(r, out, MARKERS, "{")):
        names = None if marker == TAG else known

        def block(call: Draft, names: Collection[str] | None = names) -> Wait[bool]:
            return _call(r, call, names)

        def next_block(call: Draft, block: Callable[[Draft], Wait[bool]] = block) -> Wait[bool]:
            yield from spaces(r)
            return (yield from literal(r, ";")) and (yield from block(call))

        is_call = yield from attempt(r, out, marker, block, is_explicit=marker == TAG)
        while is_call:
            is_call = yield from attempt(r, out, "", next_block, is_explicit=False)


def _call(r: Reader, call: Draft, names: Collection[str] | None) -> Wait[bool]:
    yield from spaces(r)
    yield from literal(r, TAG)
    yield from spaces(r)
    return (yield from call_object(r, call, names, ends=MARKERS))
