"""A conversation as the chat template and the parsers see it: frozen values that are checked on construction.

Field paths in violations are the contract's (`penstock.v1.ChatPrompt`). `Chat.parse` takes the contract's raw
texts, and lists what is wrong with them together with everything else.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.runtime.chat.json_object import parse_object
from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.images.image import Image

ROLES = ("system", "user", "assistant", "tool")
MAX_TEMPLATE_CHARS = 256 * 1024
CALL_ID_CHARS = 9
RESERVED_OPTIONS = frozenset({
    # Other fields of the contract set these.
    "messages", "tools", "add_generation_prompt",
    # These are parameters of transformers' functions, not variables of a template.
    "chat_template", "continue_final_message", "conversation", "conversations", "max_length", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens", "self",
    "tokenize", "tokenizer_kwargs", "truncation",
})  # fmt: skip
"""Names that `template_options_json` may not set."""
CHOICES = ("auto", "none", "required")
_ALPHANUMERIC = string.ascii_letters + string.digits
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


def mint_call_id() -> str:
    """Mint a new id for a call: nine letters and digits, because Mistral's templates refuse any other
    length.
    """
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(CALL_ID_CHARS))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made."""

    id: str
    name: str
    arguments_json: str
    """What the model wrote: a JSON object, unless the output ended within it or the model made a mistake."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments, parsed. ValueError where they are no JSON object."""
        return parse_object(self.arguments_json)

    def result(self, content: Any) -> ChatTurn:
        """Make the turn that answers this call: a text as it is, anything else as JSON."""
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        return ChatTurn("tool", text, tool_call_id=self.id)


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What was added to a call while it was made."""

    index: int
    """Of the call, among those of its output."""
    id: str
    """The call's id, where the call begins; "" in what follows."""
    name: str
    """The function's name, where the call begins; "" in what follows."""
    arguments_json: str
    """The further characters of the arguments."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a conversation: a turn. "Message" alone is a message of the contract."""

    role: str
    """One of `ROLES`."""
    content: str | tuple[str | Image, ...] = ""
    """A text, or texts and images in their order."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls that an assistant turn made."""
    tool_call_id: str = ""
    """The call that a tool turn answers."""
    reasoning: str = ""
    """What the assistant thought in this turn; the template decides whether the model is shown it."""
    name: str = ""
    """Who speaks; the template decides whether the model is shown it. Of a tool turn that has none, the
    template sees the name of the function."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: dict(_NO_ARGUMENTS))
    """JSON Schema of the arguments, which are an object."""
    strict: bool = False
    """Whether calls always have arguments that the schema accepts, also where the model is free to call."""


@dataclass(frozen=True, slots=True)
class RawTool:
    """A tool as the contract writes it; an empty `parameters_json` means no arguments."""

    name: str
    description: str = ""
    parameters_json: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be rendered. Raises InvalidRequest with every violation."""

    messages: tuple[ChatTurn, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    """One of `CHOICES`, or a tool's name; empty becomes "auto". A tool whose name is one of `CHOICES` cannot
    be chosen."""
    template: str | None = None
    """A Jinja template that replaces the model's own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the template."""
    parallel_tool_calls: bool = True
    """Whether an output may have several calls."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tool_choice", self.tool_choice or "auto")
        bad = [
            *_check_turns(self.messages),
            *_check_tools(self.tools),
            *_check_choice(self.tool_choice, [tool.name for tool in self.tools]),
            *_check_template(self.template),
            *_check_options(self.options),
        ]
        if bad:
            raise InvalidRequest(bad)

    @classmethod
    def parse(
        cls,
        messages: Sequence[ChatTurn],
        tools: Sequence[RawTool] = (),
        tool_choice: str = "",
        chat_template: str = "",
        template_options_json: str = "",
        *,
        parallel_tool_calls: bool = True,
    ) -> Chat:
        """Make a chat from the contract's texts; an empty text is unset. Raises InvalidRequest with every
        violation.
        """
        bad: list[Violation] = []
        parsed = tuple(_parse_tool(i, tool, bad) for i, tool in enumerate(tools))
        options: dict[str, Any] = {}
        if template_options_json:
            try:
                options = parse_object(template_options_json)
            except ValueError as error:
                bad.append(Violation("chat.template_options_json", str(error)))
        try:
            template = chat_template or None
            chat = cls(tuple(messages), parsed, tool_choice, template, options, parallel_tool_calls)
        except InvalidRequest as error:
            raise InvalidRequest([*bad, *error.violations]) from None
        if bad:
            raise InvalidRequest(bad)
        return chat

    @property
    def images(self) -> list[tuple[str, Image]]:
        """The images in their order, each with the contract's path."""
        return [
            (f"chat.messages[{i}].parts[{j}].image", part)
            for i, turn in enumerate(self.messages)
            if not isinstance(turn.content, str)  # a long one has many characters
            for j, part in enumerate(turn.content)
            if isinstance(part, Image)
        ]

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model is shown: none under tool_choice "none"."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def required_tools(self) -> tuple[Tool, ...]:
        """The tools of which one must be called; none if the model may answer in words."""
        if self.tool_choice in ("auto", "none"):
            return ()
        return tuple(tool for tool in self.tools if self.tool_choice in ("required", tool.name))

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that an output may call: those of which one must be called, or else all."""
        return self.required_tools or self.offered_tools

    @property
    def enforced_by(self) -> tuple[str, ...]:
        """The contract's fields by which calls, or their arguments, need a grammar."""
        if self.required_tools:
            return ("chat.tool_choice",)
        strict = [i for i, tool in enumerate(self.tools) if tool.strict and self.tool_choice != "none"]
        return tuple(f"chat.tools[{i}].strict" for i in strict)

    @property
    def ends_at_call(self) -> bool:
        """Whether an output in which the model is free to call ends with its first call."""
        return self.tool_choice == "auto" and bool(self.tools) and not self.parallel_tool_calls


def _parse_tool(index: int, raw: RawTool, bad: list[Violation]) -> Tool:
    if not raw.parameters_json:
        return Tool(raw.name, raw.description, strict=raw.strict)
    try:
        return Tool(raw.name, raw.description, parse_object(raw.parameters_json), raw.strict)
    except ValueError as error:
        bad.append(Violation(f"chat.tools[{index}].parameters_json", str(error)))
        return Tool(raw.name, raw.description)


def _check_turns(turns: Sequence[ChatTurn]) -> list[Violation]:
    if not turns:
        return [Violation("chat.messages", "must not be empty")]
    bad: list[Violation] = []
    made: set[str] = set()
    for i, turn in enumerate(turns):
        at = f"chat.messages[{i}]"
        if turn.role not in ROLES:
            bad.append(Violation(f"{at}.role", f"must be one of {', '.join(ROLES)}, not {turn.role[:40]!r}"))
        if turn.tool_calls and turn.role != "assistant":
            bad.append(Violation(f"{at}.tool_calls", "only an assistant turn has calls"))
        if turn.reasoning and turn.role != "assistant":
            bad.append(Violation(f"{at}.reasoning", "only an assistant turn has reasoning"))
        for j, call in enumerate(turn.tool_calls):
            bad.extend(_check_call(f"{at}.tool_calls[{j}]", call))
        if turn.role == "tool" and not turn.tool_call_id:
            bad.append(Violation(f"{at}.tool_call_id", "a tool turn needs the id of the call it answers"))
        elif turn.role == "tool" and turn.tool_call_id not in made:
            bad.append(
                Violation(
                    f"{at}.tool_call_id", f"no assistant turn before made a call {turn.tool_call_id[:40]!r}"
                )
            )
        elif turn.role != "tool" and turn.tool_call_id:
            bad.append(Violation(f"{at}.tool_call_id", "only a tool turn answers a call"))
        if turn.role == "assistant":
            made.update(call.id for call in turn.tool_calls)
    return bad


def _check_call(at: str, call: ToolCall) -> list[Violation]:
    bad = []
    if not call.id:
        bad.append(Violation(f"{at}.id", "must not be empty"))
    if not call.name:
        bad.append(Violation(f"{at}.name", "must not be empty"))
    return bad


def _check_tools(tools: Sequence[Tool]) -> list[Violation]:
    bad = []
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        at = f"chat.tools[{i}]"
        if not tool.name:
            bad.append(Violation(f"{at}.name", "must not be empty"))
        elif tool.name in seen:
            bad.append(Violation(f"{at}.name", f"{tool.name[:40]!r} is the name of a tool before it"))
        seen.add(tool.name)
        kind = tool.parameters.get("type", "object")
        if kind != "object":
            bad.append(
                Violation(
                    f"{at}.parameters_json", f'must be the schema of an object: "type" is {str(kind)[:40]!r}'
                )
            )
    return bad


def _check_choice(choice: str, names: Sequence[str]) -> list[Violation]:
    if choice in ("auto", "none") or choice in names:
        return []
    if choice == "required":
        return [] if names else [Violation("chat.tool_choice", "required needs at least one tool")]
    return [
        Violation(
            "chat.tool_choice", f"must be one of {', '.join(CHOICES)} or a tool's name, not {choice[:40]!r}"
        )
    ]


def _check_template(template: str | None) -> list[Violation]:
    if template is None or len(template) <= MAX_TEMPLATE_CHARS:
        return []
    return [
        Violation(
            "chat.chat_template", f"must have at most {MAX_TEMPLATE_CHARS} characters, not {len(template)}"
        )
    ]


def _check_options(options: Mapping[str, Any]) -> list[Violation]:
    return [
        Violation("chat.template_options_json", f"must not set {name!r}: it is told by other means")
        for name in sorted(RESERVED_OPTIONS & options.keys())
    ]
