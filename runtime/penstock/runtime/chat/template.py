"""Renders a conversation to the prompt that asks for the assistant's next turn, by a chat template in Hugging
Face's form.

The model's own template is the operator's choice and runs in this process. A template that a caller sends
runs in a process of its own (`template_sandbox`), with bounds on time, memory and output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jinja2 import TemplateError

from penstock.runtime.chat.json_object import parse_object, with_whole_pairs
from penstock.runtime.chat.messages import Chat, ChatTurn, Tool, ToolCall
from penstock.runtime.chat.rendering import render_messages
from penstock.runtime.chat.template_reading import Demands, demands_of
from penstock.runtime.chat.template_sandbox import TemplateFailed, TemplateSandbox
from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.images.image import Image

BROKEN_ARGUMENTS = "invalid_json"
"""The name under which the model is shown arguments that are no JSON object."""


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """A model's chat templates."""

    own: str | Mapping[str, str] | None
    """The template, or several by their names; None or empty: there is none."""
    special_tokens: Mapping[str, str]
    """The special tokens that a template may write, by their names, such as "eos_token"."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All templates."""
        return tuple(self.own.values()) if isinstance(self.own, Mapping) else (self.own,) if self.own else ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the templates, if the model names them."""
        return tuple(self.own) if isinstance(self.own, Mapping) else ()

    @property
    def default(self) -> str:
        """The template, or the one named "default" if they have names; empty if there is none."""
        return (self.own.get("default") if isinstance(self.own, Mapping) else self.own) or ""

    def chosen(self, asked: str | None = None, *, with_tools: bool = False) -> str:
        """Choose the template that renders a chat. `asked`: a template, or the name of one. Where there are
        several, one may be for tools. Raises InvalidRequest if there is none.
        """
        named = self.own if isinstance(self.own, Mapping) else {}
        if asked is not None:
            return named.get(asked, asked)
        found = named.get("tool_use") if with_tools else None
        found = self.default if found is None else found
        if found:
            return found
        problem = "the model has no chat template"
        if named:
            problem = f"the model has no default chat template; name one: {', '.join(sorted(named))}"
        raise InvalidRequest([Violation("chat", problem)])


def tool_dict(tool: Tool) -> dict[str, Any]:
    """Write a tool in OpenAI's form, which templates expect."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        },
    }


def turn_dicts(turns: tuple[ChatTurn, ...], demands: Demands) -> list[dict[str, Any]]:
    """Write messages as Hugging Face's templates expect them. Arguments are objects, unless the template
    demands texts, and keys without content are left out, because templates ask whether `tool_calls` is there.
    A tool's turn has the name of the function, unless it has another, and stands where its call does.
    Reasoning is `reasoning_content`, the name that most templates read; `rendering` adds the one of gpt-oss,
    `thinking`.
    """
    names = {call.id: call.name for turn in turns for call in turn.tool_calls}
    dicts = []
    for turn in _in_order_of_calls(turns):
        message: dict[str, Any] = {"role": turn.role, "content": _content(turn)}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": with_whole_pairs(call.arguments_json)
                        if demands.text_arguments
                        else _arguments(call),
                    },
                }
                for call in turn.tool_calls
            ]
            if demands.one_text and turn.reasoning and isinstance(turn.content, str) and turn.content:
                message |= {"content": "", "reasoning_content": f"{turn.reasoning}\n\n{turn.content}"}
            if demands.no_content and not turn.content:
                message["content"] = None
        if demands.thinking_parts and turn.reasoning:
            words = _parts(turn)
            message["content"] = [{"type": "thinking", "thinking": turn.reasoning}, *words]
        if turn.role == "tool":
            message |= {"tool_call_id": turn.tool_call_id, "name": names[turn.tool_call_id]}
        if turn.name:
            message["name"] = turn.name
        dicts.append(message)
    return dicts


def _in_order_of_calls(turns: Sequence[ChatTurn]) -> Iterator[ChatTurn]:
    """Yield the turns, of which those that answer the calls of one turn come in the order of the calls:
    callers may send them as the tools end, and most templates show no ids. Turns with images stay as they
    are, because images are counted in the order of the chat.
    """
    place: dict[str, int] = {}
    for is_tool, run in groupby(turns, lambda turn: turn.role == "tool"):
        found = list(run)
        if is_tool and not any(isinstance(part, Image) for turn in found for part in _parts_of(turn)):
            found.sort(
                key=lambda turn: place.get(turn.tool_call_id, -1)
            )  # answers to earlier calls come first
        place = {call.id: i for i, call in enumerate(found[-1].tool_calls)}
        yield from found


def _arguments(call: ToolCall) -> dict[str, Any]:
    """Return the arguments as an object. Those that are none, such as those of a call that was cut off, are a
    text in an object, because templates expect one. Nothing is an empty object.
    """
    if not call.arguments_json.strip():
        return {}
    try:
        return parse_object(with_whole_pairs(call.arguments_json))
    except ValueError:
        return {BROKEN_ARGUMENTS: call.arguments_json}


def _content(turn: ChatTurn) -> str | list[dict[str, str]]:
    """Make one text of texts alone, because the templates of models that read no images know no parts."""
    if isinstance(turn.content, str):
        return turn.content
    texts = [part for part in turn.content if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(turn.content) else _parts(turn)


def _parts(turn: ChatTurn) -> list[dict[str, str]]:
    """Write texts and images in the form that Hugging Face's templates know. For an image they write a
    placeholder.
    """
    parts = []
    for part in _parts_of(turn):
        if isinstance(part, Image):
            parts.append({"type": "image"})
        elif part:
            parts.append({"type": "text", "text": part})
    return parts


def _parts_of(turn: ChatTurn) -> tuple[str | Image, ...]:
    return (turn.content,) if isinstance(turn.content, str) else turn.content


def render(templates: ChatTemplates, chat: Chat, sandbox: TemplateSandbox) -> str:
    """Render the prompt. Raises InvalidRequest if there is no template, or if it refuses the chat or fails:
    on `chat.messages` for the model's own template, on `chat.chat_template` for the caller's.
    """
    tools = [tool_dict(tool) for tool in chat.offered_tools] or None
    template = templates.chosen(chat.template, with_tools=tools is not None)
    trusted = template in templates.texts
    matters = tools or any(turn.tool_calls or turn.reasoning for turn in chat.messages)
    demands = demands_of(template) if trusted and matters else Demands()
    functions = [tool["function"] for tool in tools or ()]
    turns = turn_dicts(chat.messages, demands)
    if demands.system_tools and functions:
        if turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": ""})
        turns[0]["tools"] = json.dumps(functions, ensure_ascii=False)
    variables = {
        **templates.special_tokens,
        **({"xml_tools": functions} if demands.xml_tools and functions else {}),
        **chat.options,
        "messages": turns,
        "tools": tools,
        "chat_template": template,
        "add_generation_prompt": True,
    }
    field = "chat.messages" if trusted else "chat.chat_template"
    try:
        text = render_here(variables) if trusted else sandbox.render(variables)
        text.encode()
    except TemplateFailed as error:
        raise InvalidRequest([Violation(field, f"the chat template {error}")]) from error
    except UnicodeEncodeError as error:
        raise InvalidRequest([Violation(field, f"the rendered chat is no Unicode text: {error}")]) from error
    return text


def render_turns(
    templates: ChatTemplates, turns: Sequence[Mapping[str, str]], options: Mapping[str, Any]
) -> str:
    """Render the prompt that the model's own template makes of turns of any roles. InvalidRequest if it
    refuses.
    """
    variables = {
        **templates.special_tokens,
        **options,
        "messages": [dict(turn) for turn in turns],
        "tools": None,
        "chat_template": templates.chosen(),
        "add_generation_prompt": True,
    }
    try:
        return render_here(variables)
    except TemplateFailed as error:
        raise InvalidRequest([Violation("chat", f"the chat template {error}")]) from error


def render_here(variables: dict[str, Any]) -> str:
    """Render by a template of the model's own, in this process. TemplateFailed if it refuses or fails."""
    try:
        text = render_messages(**variables)
    except TemplateError as error:
        raise TemplateFailed(f"says: {error}") from error
    except Exception as error:  # a template is a program: it may raise anything
        raise TemplateFailed(f"fails: {type(error).__name__}: {error}") from error
    return text
