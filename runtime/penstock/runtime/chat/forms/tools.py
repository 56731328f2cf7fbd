"""The forms in which models write tool calls, and a parser of a stream in one of them.

All forms: text comes out as it is, and at once unless it may yet become a call; what turns out not to be a
call comes out as text, as it is. White space directly before a call, and between a call and the end, is
dropped. An explicit form has a marker that means a call, so that a name which is no known tool's is a call
nevertheless: the caller learns what the model tried. In the others such a name makes it text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from penstock.runtime.chat.forms import hermes, llama3_json, mistral, pythonic
from penstock.runtime.chat.forms.events import Event, Events
from penstock.runtime.chat.forms.reader import Reader, Stream, Wait


@dataclass(frozen=True, slots=True)
class ToolForm:
    """One form: a parser and the strings that mark calls."""

    name: str
    parse: Callable[[Reader, Events, Collection[str]], Wait[None]]
    markers: tuple[str, ...]
    """They must stay visible where special tokens are skipped."""


TOOL_FORMS: Mapping[str, ToolForm] = {
    form.name: form
    for form in (
        ToolForm("hermes", hermes.parse, hermes.MARKERS),
        ToolForm("llama3_json", llama3_json.parse, llama3_json.MARKERS),
        ToolForm("mistral", mistral.parse, mistral.MARKERS),
        ToolForm("pythonic", pythonic.parse, pythonic.MARKERS),
    )
}


class CallParser:
    """Calls in one output's text."""

    def __init__(self, form: ToolForm, tools: Collection[str]) -> None:
        """`tools`: names of the known ones."""
        known = frozenset(tools)
        self._events = Events()
        self._stream = Stream(lambda r: form.parse(r, self._events, known))

    def push(self, text: str) -> list[Event]:
        """What more text made certain, in order."""
        self._stream.push(text)
        return self._events.take()

    def flush(self) -> list[Event]:
        """The rest: there is no more text."""
        self._stream.flush()
        self._events.end()
        return self._events.take()
