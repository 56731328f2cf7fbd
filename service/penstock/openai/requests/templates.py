"""Finds out what a request tells the model's chat template about how much the model shall think."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from penstock.openai.requests.refusing import invalid_value, unsupported_value

_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates let the model think or not."""


def template_options(
    effort: str | None,
    variables: Collection[str],
    given: Mapping[str, Any] | None = None,
    param: str = "reasoning_effort",
) -> dict[str, Any] | None:
    """The variables for the template: `given` ones, and those that stand for the effort; None without any.

    A template that reads `reasoning_effort` is given it as it is. One that has only a switch takes "none",
    which switches thinking off. `variables` are the names that the model's template reads, and `param` is the
    field that holds the effort. Raises ApiError for an effort that the template cannot take.
    """
    options = dict(given or {})
    if effort is not None:
        switches = [name for name in _SWITCHES if name in variables]
        if "reasoning_effort" in variables:
            made: dict[str, Any] = {"reasoning_effort": effort}
        elif effort == "none" and switches:
            made = {switches[0]: False}
        else:
            takes = ' It takes "none" only.' if switches else ""
            raise unsupported_value(
                param, f"the chat template of this model does not take {effort!r}.{takes}"
            )
        if both := made.keys() & options.keys():
            raise invalid_value(param, f"chat_template_kwargs sets {both.pop()!r} as well.")
        options |= made
    return options or None
