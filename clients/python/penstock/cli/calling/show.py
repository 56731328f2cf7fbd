"""How answers look: text as it comes, reasoning dimmed, tool calls on lines of their own, one output after
another.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Sequence

from penstock.cli.calling.common import complain, write
from penstock.client import Delta, Finished, Generation, StreamEvent, ToolCall

_DIM, _UNDIM = "\x1b[2m", "\x1b[22m"
_BREAK = re.compile(r"\s*[\r\n]\s*")


class AnswerView:
    """Writes the outputs of one request to stdout while they come.

    Outputs are shown whole and in order of their index, each under its number if there are several. The first
    one is shown while it comes; the others wait for those before them. Reasoning is shown dimmed, and on a
    terminal only, so that a pipe gets nothing but the answer.
    """

    def __init__(self, numbered: bool = False) -> None:
        self._numbered = numbered
        self._current = 0
        self._waiting: dict[int, list[Delta | Finished]] = {}
        self._kind = ""
        """The kind of what the current output showed last; empty if it showed nothing yet."""
        self._line_open = False
        self._shows_reasoning = sys.stdout.isatty()

    def feed(self, event: StreamEvent) -> None:
        """Show one event of a stream, or keep it until its output's turn."""
        events = deque([event])
        while events:
            event = events.popleft()
            if not isinstance(event, Delta | Finished):
                continue
            if event.index != self._current:
                self._waiting.setdefault(event.index, []).append(event)
            elif isinstance(event, Delta):
                self._show(event.reasoning, event.delta, event.tool_calls)
            else:
                self._end()
                events.extend(self._waiting.pop(self._current, []))

    def feed_all(self, answer: Generation) -> None:
        """Show a whole reply."""
        for output in answer.outputs:
            self._show(output.reasoning, output.text, output.tool_calls)
            self._end()

    def interrupt(self, note: str = "") -> None:
        """End the line that an output left open, so that what comes next starts on its own line."""
        if self._line_open or note:
            write(f"{note}\n")
            self._line_open = False

    def _show(self, reasoning: str, text: str, calls: Sequence[ToolCall]) -> None:
        if reasoning and self._shows_reasoning:
            self._put("reasoning", reasoning)
        if text:
            self._put("text", text)
        for call in calls:
            self._put("call", describe(call))

    def _put(self, kind: str, text: str) -> None:
        if not self._kind:
            self._head()
        if self._line_open and (kind != self._kind or kind == "call"):
            write("\n")
        self._kind, self._line_open = kind, not text.endswith("\n")
        if kind != "reasoning":
            write(text)
            return
        sys.stdout.write(_DIM)
        try:
            write(text)
        finally:
            sys.stdout.write(_UNDIM)

    def _head(self) -> None:
        if self._numbered or self._current > 0:
            write(f"--- output {self._current} ---\n")

    def _end(self) -> None:
        if not self._kind:
            self._head()
        write("\n")
        self._current += 1
        self._kind, self._line_open = "", False


def describe(call: ToolCall) -> str:
    """Describe the call in one line. JSON allows line breaks between its parts, where they mean nothing."""
    return f"tool call: {call.name} {_BREAK.sub(' ', call.arguments_json).strip()}".rstrip()


def tell_unseen(command: str, answer: Generation) -> None:
    """Say on stderr which part of the prompt the model did not see, and which part of the answer a pipe did
    not get.
    """
    prompt = answer.prompt
    if prompt.truncated_tokens:
        complain(
            command,
            f"{prompt.truncated_tokens} tokens of the prompt were dropped to fit the context, "
            f"{prompt.token_count} were kept; use --truncation reject to refuse such prompts",
        )
    for output in answer.outputs:
        if output.reasoning and not (output.text or output.tool_calls or sys.stdout.isatty()):
            reason = output.finish.reason.value
            complain(
                command,
                f"output {output.index} ended while the model was still thinking ({reason}), which only a "
                "terminal shows; allow more with --max-tokens",
            )
