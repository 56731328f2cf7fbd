"""The grammars of calls that a marker announces, so that they cannot be mistaken for an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.runtime.chat.enforce.gemma4_calls import gemma4_body
from penstock.runtime.chat.enforce.lark import Lark
from penstock.runtime.chat.enforce.object_calls import deepseek_body, granite_body, hermes_body
from penstock.runtime.chat.enforce.pythonic_calls import olmo3_body
from penstock.runtime.chat.enforce.xml_calls import function_bodies, glm_body
from penstock.runtime.chat.messages import Chat
from penstock.runtime.chat.tool_formats import deepseek, gemma4, glm, granite, hermes, olmo3, xml_functions


class Marked(NamedTuple):
    """A form whose calls begin with a marker."""

    start: str
    body: Callable[[Lark, Chat, bool], str]
    """Adds rules for what comes after the marker; returns what derives it. The flag says whether several
    calls may come, for forms in which several calls share a marker."""
    between: str | None = '"\\n"'
    """What stands before a second marker; None where all calls share one."""
    also: tuple[str, ...] = ()
    """What else may begin a call, if a model forgets the marker."""


def _functions(tags: xml_functions.Tags, between: str | None = '"\\n"') -> Marked:
    return Marked(tags.start, function_bodies(tags), between, (tags.function,))


MARKED: Mapping[str, Marked] = {
    "hermes": Marked(hermes.START, lambda g, chat, _: hermes_body(g, chat)),
    "qwen3_coder": _functions(xml_functions.QWEN3_CODER),
    "seed_oss": _functions(xml_functions.SEED_OSS),
    "minimax_m2": _functions(xml_functions.MINIMAX_M2, None),
    "glm": Marked(glm.START, glm_body),
    "deepseek": Marked(deepseek.START, deepseek_body, None),
    "granite": Marked(granite.START, granite_body, None),
    "olmo3": Marked(olmo3.START, olmo3_body, None),
    "gemma4": Marked(gemma4.START, gemma4_body, ""),
}


def marked_calls(form: Marked) -> Callable[[Lark, Chat, bool], str]:
    """Write one or more calls, and nothing else."""

    def calls(g: Lark, chat: Chat, several: bool) -> str:
        block = g.rule("block", f"{g.marker(form.start)} {form.body(g, chat, several)}")
        return f"{block} ({form.between} {block})*" if several and form.between is not None else block

    return calls
