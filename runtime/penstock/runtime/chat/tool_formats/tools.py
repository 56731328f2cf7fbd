"""The forms in which models write tool calls, and a parser for a text in one of them.

All forms have this in common. Text is handed out as it is, at once unless it may still become a call. Text
that turns out not to be a call is handed out without the markers that are tokens of their own, and else
unchanged. A call is written to a `Draft`, and told in pieces from the moment that it is certain. White space
directly before a call, and between a call and the end, is dropped. An explicit form has a marker that means a
call, so a call of an unknown tool is a call too, and the caller learns what the model tried. In the other
forms such a name makes it text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from penstock.runtime.chat.tool_formats import (
    deepseek,
    gemma4,
    glm,
    granite,
    hermes,
    llama3_json,
    mistral,
    olmo3,
    pythonic,
    xml_functions,
)
from penstock.runtime.chat.tool_formats.events import Event, Events, Tools
from penstock.runtime.chat.tool_formats.reader import Reader, Stream, Wait


@dataclass(frozen=True, slots=True)
class ToolForm:
    """One form: a parser and the strings that mark calls."""

    name: str
    parse: Callable[[Reader, Events, Tools], Wait[None]]
    markers: tuple[str, ...]
    """Strings that must stay visible while special tokens are skipped."""


def _functions(name: str, tags: xml_functions.Tags) -> ToolForm:
    return ToolForm(name, xml_functions.parser(tags), tags.markers)


TOOL_FORMS: Mapping[str, ToolForm] = {
    form.name: form
    for form in (
        ToolForm("hermes", hermes.parse, hermes.MARKERS),
        ToolForm("llama3_json", llama3_json.parse, llama3_json.MARKERS),
        ToolForm("mistral", mistral.parse, mistral.MARKERS),
        ToolForm("pythonic", pythonic.parse, pythonic.MARKERS),
        _functions("qwen3_coder", xml_functions.QWEN3_CODER),
        _functions("seed_oss", xml_functions.SEED_OSS),
        _functions("minimax_m2", xml_functions.MINIMAX_M2),
        ToolForm("glm", glm.parse, glm.MARKERS),
        ToolForm("deepseek", deepseek.parse, deepseek.MARKERS),
        ToolForm("granite", granite.parse, granite.MARKERS),
        ToolForm("olmo3", olmo3.parse, olmo3.MARKERS),
        ToolForm("gemma4", gemma4.parse, gemma4.MARKERS),
    )
}


class CallParser:
    """Finds calls in one output's text."""

    def __init__(
        self, form: ToolForm, tools: Tools, *, markup: Collection[str] = (), is_forced: bool = False
    ) -> None:
        """`markup` and `is_forced` are as for `Events`."""
        self._events = Events(markup, is_forced=is_forced)
        self._stream = Stream(lambda r: form.parse(r, self._events, tools))

    def push(self, text: str) -> list[Event]:
        """Return what this further text made certain, in order."""
        self._stream.push(text)
        return self._events.take()

    def flush(self) -> list[Event]:
        """Return the rest, when there is no more text."""
        self._stream.flush()
        self._events.end()
        return self._events.take()
