"""The body of a request to /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from penstock.openai.schemas.base import IGNORED, Body, OnlyFalse
from penstock.openai.schemas.chat import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS
from penstock.openai.schemas.response_items import Item, Other
from penstock.openai.schemas.sampling import LACKING, GenerationBody

MAX_ITEMS = MAX_MESSAGES + MAX_CALLS
"""What is above would take long to convert. The server bounds the turns and the calls that they become."""

MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Item], Field(max_length=MAX_ITEMS), Tag("<items>")],
    Discriminator(lambda value: "<items>" if isinstance(value, list) else "<text>"),
]


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether calls follow the schema in any case. Left out, they need not, as opposed to OpenAI's API."""
    defer_loading: OnlyFalse | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    unsupported: ClassVar[Mapping[str, str]] = {
        "output_schema": "the model is not told what functions answer",
        "async": "the model waits for what a function answers",
    }


def _tool_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<function>" if kind == "function" else "<other>"


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[Other, Tag("<other>")], Discriminator(_tool_tag)
]


class NamedFunction(Body):
    """The function that the model must call."""

    type: Literal["function"]
    name: str


def _choice_tag(value: Any) -> str:
    return "<word>" if isinstance(value, str) else _tool_tag(value)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedFunction, Tag("<function>")]
    | Annotated[Other, Tag("<other>")],
    Discriminator(_choice_tag),
]


class TextFormat(Body):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    """What the format is for, in words. The model is not shown them: only the grammar is made of the
    schema.
    """
    strict: bool | None = None
    """The text follows the schema in either case."""


class TextConfig(Body):
    """What the answer's text is like."""

    format: TextFormat | None = None
    verbosity: str | None = None
    """Only "medium", which OpenAI's API has as its default: no template is told of it."""


class Reasoning(Body):
    """How the model thinks."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    """Only "auto": there is nothing that makes summaries, and the reasoning itself is in the answer."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "generate_summary": "it is an older name of summary",
        "context": "the model's chat template decides which turns' reasoning the model is shown",
        "mode": "the model has one way to think",
    }


class ResponseStreamOptions(Body):
    """What a stream has besides the answer."""

    include_obfuscation: OnlyFalse | None = None
    """The front sends no obfuscation, so it can only be switched off."""


class ResponsesBody(GenerationBody):
    """A conversation as items, and what is wanted of its continuation. `None` is a field that was left
    out.
    """

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = Field(default=None, ge=1)
    """The most calls of tools that are built into the API. There are none here, so any number holds."""
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None

    metadata: dict[MetadataKey, MetadataValue] | None = Field(default=None, max_length=16)
    """It is in the answer again, as the three fields that follow, and has no further effect."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: further variables for the model's chat template."""

    ignored: ClassVar[frozenset[str]] = IGNORED - {
        "metadata",
        "prompt_cache_key",
        "safety_identifier",
        "user",
    }
    unsupported: ClassVar[Mapping[str, str]] = LACKING | {
        **{f"tools.{name}": why for name, why in FunctionTool.unsupported.items()},
        "input.namespace": "tools have no namespaces",
        "input.async": "the model waits for what a function answers",
        **{f"reasoning.{name}": why for name, why in Reasoning.unsupported.items()},
        "previous_response_id": "responses are not kept: send the items of the conversation as input",
        "conversation": "conversations are not kept: send their items as input",
        "prompt": "prompts are not kept: send instructions and input",
        "background_options": "a response is made while its caller waits",
        "context_management": "the server does not shorten conversations in words",
        "prompt_cache_options": "prompts are cached without breakpoints",
        "access_programs": "there are none",
        "image": "put pictures into input, as parts of the type input_image",
        "n": "a response has one output",
        "max_tokens": "use max_output_tokens",
        "max_completion_tokens": "use max_output_tokens",
        "messages": "use input",
        "response_format": "use text.format",
        "reasoning_effort": "use reasoning.effort",
        "logprobs": 'use top_logprobs, and include "message.output_text.logprobs"',
        "verbosity": "say in the instructions how long the answer shall be",
        "chat_template": "the model's own template is used",
        "enable_response_messages": "items are the only form of the answer",
        "previous_input_messages": "send items as input",
    }
