"""Grammars for llguidance of what a chat's output must be: calls, and the thinking that may come before them.

tool_choice "required", or a tool's name, asks for calls in the model's form and nothing else. A caller's own
grammar is for the answer: a model that thinks does so before it, without restriction.

The grammars are Lark, in llguidance's dialect. They accept what the form's parsers take for calls and for
reasoning. A marker that the tokenizer has as a token is written by its id, because llguidance distinguishes
such tokens from their text. Arguments follow the tool's schema as far as llguidance can express it, and are
laid out as Python's `json.dumps` does it, because templates show them so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.runtime.chat.enforce.lark import Lark, quote, whole_within
from penstock.runtime.chat.enforce.pythonic_calls import pythonic
from penstock.runtime.chat.forms import hermes, llama3_json, mistral
from penstock.runtime.chat.messages import Chat, Tool
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.chat.reasoning import ReasoningForm
from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.requests.grammar import ANSWER

_SAYS_MORE = frozenset({
    "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "patternProperties",
    "additionalProperties", "unevaluatedProperties",
})  # fmt: skip
"""Keywords that decide, beside "properties", which other properties may come."""


def call_grammar(forms: ChatForms, chat: Chat, prompt: str, token_ids: Mapping[str, int]) -> str | None:
    """Lark text that forces the calls which `chat.tool_choice` asks for; None if it asks for none.

    "required" means one or more calls of any tools, or one where they may not be parallel; a name means
    exactly one call of that tool. A reasoning block
    may come first; if `prompt`, the rendered chat, has opened it, it must end first. `token_ids`: see `Lark`.
    InvalidRequest if the form cannot write the tools, or if there is no form.
    """
    if not chat.required_tools:
        return None
    if forms.tools is None:
        raise InvalidRequest(
            [Violation("chat.tool_choice", "no form of tool calls is known for this model, see the option "
                       "--tool-call-parser")]
        )  # fmt: skip
    g = Lark(token_ids)
    several = chat.tool_choice == "required" and chat.parallel_tool_calls
    calls = _CALLS[forms.tools.name](g, chat, several)
    g.rule("start", " ".join([*_reasoning(g, forms.reasoning, prompt), calls]))
    return str(g)


def thinking_first(forms: ChatForms, prompt: str, token_ids: Mapping[str, int]) -> str:
    """Lark text, as `Grammar.before` takes it, for the reasoning block that comes before an answer under a
    grammar; "" if the model writes none, or if `prompt`, the rendered chat, has ended it.

    If `prompt` has opened the block it must end, else it is optional. `token_ids`: see `Lark`.
    """
    g = Lark(token_ids)
    thinking = _reasoning(g, forms.reasoning, prompt)
    if not thinking:
        return ""
    g.rule("start", " ".join([*thinking, f"@{ANSWER}"]))
    return str(g)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Schema of the arguments: an object and, if the tool lists properties and does not say more, only those
    properties.

    The contract allows a model to add others, but a grammar that did so would lead it astray.
    """
    schema = {**tool.parameters, "type": "object"}
    if "properties" in schema and not _SAYS_MORE & schema.keys():
        schema["additionalProperties"] = False
    return schema


def _reasoning(g: Lark, form: ReasoningForm | None, prompt: str) -> list[str]:
    """The parts that come before calls and answers: any text, up to the closing tag."""
    if form is None or form.closed_by(prompt):
        return []
    if g.is_token(form.end):
        g.rule("THOUGHT", whole_within(form.end))
        thought = f"THOUGHT {g.marker(form.end)}"
    else:
        thought = g.rule("thought[lazy]", f"/(?s:.*)/ {quote(form.end)}")
    g.rule("thinking", f'{thought} ("\\n" | "\\n\\n")?')
    return ["thinking"] if form.opened_by(prompt) else [f"({g.marker(form.start)} thinking)?"]


def _objects(g: Lark, chat: Chat, arguments: str) -> str:
    """Adds a rule for a call as a JSON object. Returns its name."""
    bodies = []
    for tool in chat.required_tools:
        head = f'{{"name": {quote(tool.name)}, "{arguments}": '
        bodies.append(f"{quote(head)} {g.json(arguments_schema(tool))} {quote('}')}")
    return g.rule("call", " | ".join(bodies))


def _hermes(g: Lark, chat: Chat, several: bool) -> str:
    call = _objects(g, chat, "arguments")
    block = g.rule("block", f'{g.marker(hermes.START)} "\\n" {call} "\\n" {g.marker(hermes.END)}')
    return f'{block} ("\\n" {block})*' if several else block


def _llama3_json(g: Lark, chat: Chat, several: bool) -> str:
    call = _objects(g, chat, "parameters")
    tag = f"{g.marker(llama3_json.TAG)}? " if g.is_token(llama3_json.TAG) else ""
    return f'{tag}{call} ("; " {call})*' if several else f"{tag}{call}"


def _mistral(g: Lark, chat: Chat, several: bool) -> str:
    """Writes the newer form if the tokenizer has its marker and the form can spell the names, else the older
    one.
    """
    start = g.marker(mistral.START)
    tools = chat.required_tools
    if g.is_token(mistral.ARGUMENTS) and all(mistral.NAME.fullmatch(tool.name) for tool in tools):
        named = [
            f"{start} {quote(tool.name)} {g.marker(mistral.ARGUMENTS)} {g.json(arguments_schema(tool))}"
            for tool in tools
        ]
        call = g.rule("call", " | ".join(named))
        return f"{call}+" if several else call
    call = _objects(g, chat, "arguments")
    others = f' (", " {call})*' if several else ""
    return f'{start} " "? "[" {call}{others} "]"'


_CALLS: Mapping[str, Callable[[Lark, Chat, bool], str]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "pythonic": pythonic,
}
