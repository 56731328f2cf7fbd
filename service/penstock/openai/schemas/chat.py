"""The body of a request to /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from penstock.openai.schemas.base import IGNORED, Body
from penstock.openai.schemas.sampling import LACKING, NEUTRAL_LACKING, SamplingBody

MAX_MESSAGES = 10_000
MAX_TOOLS = 1000
MAX_CALLS = 10_000
"""The server's limits, docs/reference/limits.md. What is above would take long to convert, only to be
refused.
"""

_TEXT_ONLY = "the models that are served read text and images"
_OF_PARTS = {
    "input_audio": _TEXT_ONLY,
    "file": _TEXT_ONLY,
    "refusal": "write it as text",
}
_OF_MESSAGES = {
    "audio": _TEXT_ONLY,
    "function_call": "it is deprecated: use tool_calls",
}


class ImageUrl(Body):
    """An image, whose bytes are in the URL: data:image/png;base64,..."""

    url: str
    detail: str | None = None


class ContentPart(Body):
    """A part of a message's content."""

    path: ClassVar[str] = "messages[].content[]."
    ignored: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})
    unsupported: ClassVar[Mapping[str, str]] = _OF_PARTS

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None


class FunctionCall(Body):
    """The call of a function, as the model wrote it."""

    kept: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})
    """What openai's client adds to the calls that it has parsed; the arguments say the same."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call in a turn of the assistant."""

    kept: ClassVar[frozenset[str]] = frozenset({"index", "provider_specific_fields"})
    """What openai's client and LiteLLM keep of the chunks that a call came in."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class CustomCall(Body):
    """The call of a custom tool, with the text that the model wrote for it."""

    name: str
    input: str


class CustomToolCall(Body):
    """A call of a custom tool in a turn of the assistant."""

    kept: ClassVar[frozenset[str]] = ToolCall.kept

    id: str
    type: Literal["custom"]
    custom: CustomCall


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _tag(value: Any) -> str:
    return "<custom>" if _kind(value) == "custom" else "<function>"


AnyToolCall = Annotated[
    Annotated[ToolCall, Tag("<function>")] | Annotated[CustomToolCall, Tag("<custom>")], Discriminator(_tag)
]


class Message(Body):
    """One turn of the conversation. Which fields may go with which role is checked when it is converted."""

    kept: ClassVar[frozenset[str]] = frozenset({"annotations", "parsed", "provider_specific_fields"})
    """What clients keep of an answer and send back as a turn: its citations, and what openai's client and
    LiteLLM made of it.
    """
    unsupported: ClassVar[Mapping[str, str]] = _OF_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[AnyToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    """Of a "tool" turn the function that was called, which the call says as well; of others who speaks, which
    no template is told.
    """
    reasoning: str | None = None
    """What this turn of the assistant thought."""
    reasoning_content: str | None = None
    """An older name of `reasoning`."""
    refusal: Literal[""] | None = None
    """An answer's refusal, which is never there."""


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that is a function."""

    type: Literal["function"]
    function: FunctionDefinition


class TextGrammar(Body):
    """What a text must match."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(Body):
    """The form of the text that a custom tool is given."""

    type: Literal["text", "grammar"]
    grammar: TextGrammar | None = None


class CustomDefinition(Body):
    """A tool that is given a text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class CustomTool(Body):
    """A tool that is given a text."""

    type: Literal["custom"]
    custom: CustomDefinition


AnyTool = Annotated[
    Annotated[Tool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")], Discriminator(_tag)
]


class FunctionName(Body):
    """The name of a function, or of a custom tool."""

    name: str


class NamedToolChoice(Body):
    """The function that the model must call."""

    type: Literal["function"]
    function: FunctionName

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(Body):
    """The custom tool that the model must call."""

    type: Literal["custom"]
    custom: FunctionName

    @property
    def name(self) -> str:
        return self.custom.name


NamedTool = Annotated[
    Annotated[NamedToolChoice, Tag("<function>")] | Annotated[NamedCustomTool, Tag("<custom>")],
    Discriminator(_tag),
]


class AllowedToolList(Body):
    """The tools that the model may call, and whether it must call one of them."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedTools(Body):
    """A choice that leaves some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


def _choice_tag(value: Any) -> str:
    if isinstance(value, str):
        return "<word>"
    return "<allowed_tools>" if _kind(value) == "allowed_tools" else _tag(value)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedToolChoice, Tag("<function>")]
    | Annotated[NamedCustomTool, Tag("<custom>")]
    | Annotated[AllowedTools, Tag("<allowed_tools>")],
    Discriminator(_choice_tag),
]


class ChatBody(SamplingBody):
    """A conversation, and what is wanted of its continuation."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    tools: list[AnyTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    modalities: list[Literal["text"]] | None = None

    include_reasoning: bool | None = None
    """vLLM's: whether the answer has the reasoning (default true)."""
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    ignored: ClassVar[frozenset[str]] = IGNORED | {"prediction", "verbosity"}
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        **NEUTRAL_LACKING,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "verbosity": ("medium",),
        "echo": (False,),
        "add_special_tokens": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "documents": ([],),
        "mm_processor_kwargs": ({},),
    }
    unsupported: ClassVar[Mapping[str, str]] = {
        **LACKING,
        "functions": "it is deprecated: use tools",
        "function_call": "it is deprecated: use tool_choice",
        "audio": "the models that are served write text",
        "web_search_options": "the server does not search the web",
        "echo": "the answer does not repeat the prompt",
        "add_generation_prompt": "the model always answers with a turn of its own",
        "continue_final_message": "the model always answers with a turn of its own",
        "documents": "put them into chat_template_kwargs",
        "mm_processor_kwargs": "the model's own settings for images are used",
        **{f"messages.{name}": why for name, why in _OF_MESSAGES.items()},
        **{f"messages.content.{name}": why for name, why in _OF_PARTS.items()},
    }
