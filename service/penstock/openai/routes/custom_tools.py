"""Tools of the type "custom", which are given a text rather than arguments. For the model such a tool is a
strict function with one argument, because that is what chat templates and the forms of calls know.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from penstock.client import Tool, ToolCall
from penstock.openai.failures import unsupported_value

_INPUT: Final = "input"


def custom_tool(name: str, description: str | None, pattern: str | None) -> Tool:
    """Make the function that stands for a tool whose text matches `pattern` as a whole; None means any
    text.
    """
    text: dict[str, Any] = {"type": "string"}
    if pattern is not None:
        text["pattern"] = f"^(?:{pattern})$"
    schema = {
        "type": "object",
        "properties": {_INPUT: text},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    return Tool(name=name, description=description or "", parameters=schema, strict=True)


def pattern_of(syntax: str, definition: str, param: str) -> str:
    """Make the regular expression of a grammar, whose syntax the field `param` says. Raises ApiError for a
    syntax that cannot be enforced within a call.
    """
    if syntax != "regex":
        raise unsupported_value(param, "within a call only a regex can be enforced; use a regex or a text.")
    return definition


class InputPieces:
    """Makes the text that a call gives to its tool of pieces of the call's arguments, which may end anywhere.
    What does not follow the function is told as the model wrote it.
    """

    def __init__(self) -> None:
        self._json = ""
        """What has come and is not told yet."""
        self._has_begun = self._has_ended = False

    def add(self, arguments_json: str) -> str:
        """Return the text that is certain with this piece; it may be empty."""
        self._json += arguments_json
        if self._has_ended:
            return ""
        if not self._has_begun:
            head = _HEAD.match(self._json)
            if head is None:
                return ""
            self._json, self._has_begun = self._json[head.end() :], True
        told = _CERTAIN.match(self._json)
        assert told is not None, "it matches the empty text"
        self._json = self._json[told.end() :]
        self._has_ended = _IMPOSSIBLE.match(self._json) is not None
        text: str = json.loads(f'"{told[0]}"', strict=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def rest(self) -> str:
        """Return what is still to be told when the call has ended."""
        left, self._json = self._json, ""
        if not self._has_begun:
            return left
        was_cut_off = not self._has_ended and len(left) < _LONGEST_ESCAPE
        return "" if was_cut_off or _END.fullmatch(left) is not None else left


_HEAD: Final = re.compile(rf'\s*\{{\s*"{_INPUT}"\s*:\s*"')
_CERTAIN: Final = re.compile(
    r"""(?: [^"\\]++ | \\["\\/bfnrt]
          | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
          | \\u[dD][89abAB][0-9a-fA-F]{2} (?: \\u[0-9a-fA-F]{4} | (?=[^\\]|\\[^u]) ) )*""",
    re.VERBOSE,
)
"""The text of a JSON string up to where an escape, or a pair of surrogates, is not whole yet."""
_IMPOSSIBLE: Final = re.compile(r"""["]|\\[^"\\/bfnrtu]|\\u[0-9a-fA-F]{0,3}[^0-9a-fA-F]""")
"""What cannot go on with the text: its end, or an escape that JSON does not have."""
_LONGEST_ESCAPE: Final = len(r"\ud834\udd1e")
_END: Final = re.compile(r'"?\s*\}?\s*')
"""What may follow the text."""


def input_of(call: ToolCall) -> str:
    """Return the text that a call gives to its tool, see `InputPieces`."""
    pieces = InputPieces()
    return pieces.add(call.arguments_json) + pieces.rest()


def custom_call(call_id: str, name: str, text: str) -> ToolCall:
    """Make the call of the function that stands for a tool which was given this text."""
    return ToolCall(call_id, name, json.dumps({_INPUT: text}, ensure_ascii=False))
