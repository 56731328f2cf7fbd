"""The bodies of requests to /v1/messages and /v1/messages/count_tokens, and the blocks of their turns.
Everything that the answers hold may be sent back.

Which block, source or tool it is, `type` says. What is there of another type is an `Other`, which is refused
by name when the request is converted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Discriminator, Field, StringConstraints, Tag

from penstock.openai.schemas.base import Body
from penstock.openai.schemas.chat import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS
from penstock.openai.schemas.responses import Other, Sent

MAX_BLOCKS: Final = MAX_MESSAGES + MAX_CALLS
"""Of all messages together. What is above would take long to convert. The server bounds the turns and the
calls that they become.
"""
_CACHE_CONTROL: Final = frozenset({"cache_control"})
"""Prompts that begin alike share their pages in any case."""


class Block(Sent):
    """A part of what is said in a turn."""

    path: ClassVar[str] = "messages[].content[]."
    ignored: ClassVar[frozenset[str]] = _CACHE_CONTROL


class TextBlock(Block):
    """A text."""

    kept: ClassVar[frozenset[str]] = frozenset({"citations", "parsed_output"})
    """What answers have beside the text, and what Anthropic's client makes of it."""

    type: Literal["text"]
    text: str


class SystemBlock(TextBlock):
    """A text of the system prompt."""

    path: ClassVar[str] = "system[]."


class Base64Source(Sent):
    """The bytes of an image."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


def _type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


Source = Annotated[
    Annotated[Base64Source, Tag("<base64>")] | Annotated[Other, Tag("<other>")],
    Discriminator(lambda value: "<base64>" if _type_of(value) == "base64" else "<other>"),
]


class ImageBlock(Block):
    """An image."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "transformations": "the model's own settings for images are used"
    }

    type: Literal["image"]
    source: Source


class ThinkingBlock(Block):
    """What the model thought. If `thinking` is empty, the signature holds it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """As an answer of this front had it (`penstock.openai.routes.messages.writing`)."""


class RedactedThinkingBlock(Block):
    """What another server's model thought, which only that server can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Block):
    """A call that the model made."""

    kept: ClassVar[frozenset[str]] = frozenset({"caller", "toolset_name"})
    """What says how a call of Anthropic's own tools came about."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _block_tag(*known: str) -> Discriminator:
    """Tell blocks by their types, of which these are known."""

    def tag(value: Any) -> str:
        kind = _type_of(value)
        return f"<{kind}>" if kind in known else "<other>"

    return Discriminator(tag)


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[Other, Tag("<other>")],
    _block_tag("text", "image"),
]


class ToolResultBlock(Block):
    """What a tool answered."""

    kept: ClassVar[frozenset[str]] = frozenset({"toolset_name"})

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[Other, Tag("<other>")],
    _block_tag("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]


class Message(Body):
    """One turn of the conversation. Which blocks may go with which role is checked when it is converted."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class CustomTool(Body):
    """A tool of the caller."""

    path: ClassVar[str] = "tools[]."
    ignored: ClassVar[frozenset[str]] = _CACHE_CONTROL | {
        "defer_loading",
        "eager_input_streaming",
        "input_examples",
    }
    """The model is told of each tool at once, by its description and its schema."""
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        "defer_loading": (False,),
        "eager_input_streaming": (False,),
        "input_examples": ([],),
    }

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """Whether calls follow the schema in any case."""
    allowed_callers: list[Literal["direct"]] | None = None


BUILT_IN: Final = (
    "advisor",
    "bash",
    "browser_toolset",
    "code_execution",
    "computer",
    "computer_toolset",
    "mcp_toolset",
    "memory",
    "text_editor",
    "tool_search_tool_bm25",
    "tool_search_tool_regex",
    "web_fetch",
    "web_search",
)
"""The tools that Anthropic runs, or that only its models know. Most of their types end in a date."""


_DATED: Final = rf"^({'|'.join(BUILT_IN)})(_[0-9]{{8}})?$"


class BuiltInTool(Body):
    """One of these tools. It is passed over, whatever its further fields are."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[str, StringConstraints(pattern=_DATED)]

    @property
    def kind(self) -> str:
        """The type without its date."""
        found = re.match(_DATED, self.type)
        assert found is not None, "the type has been checked"
        return found[1]


def _tool_tag(value: Any) -> str:
    kind = _type_of(value)
    if kind in (None, "custom"):
        return "<custom>"
    return "<built-in>" if isinstance(kind, str) and re.match(_DATED, kind) else "<other>"


Tool = Annotated[
    Annotated[CustomTool, Tag("<custom>")]
    | Annotated[BuiltInTool, Tag("<built-in>")]
    | Annotated[Other, Tag("<other>")],
    Discriminator(_tool_tag),
]


class ToolChoice(Body):
    """Whether the model calls tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool that the model must call; only with the type "tool"."""
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks."""

    path: ClassVar[str] = "thinking."
    ignored: ClassVar[frozenset[str]] = frozenset({"budget_tokens"})
    """How long the model thinks is its own affair; `max_tokens` bounds all that it writes."""

    type: Literal["enabled", "adaptive", "disabled"]
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(Body):
    """A schema that the answer's text follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """What the answer is like."""

    path: ClassVar[str] = "output_config."
    ignored: ClassVar[frozenset[str]] = frozenset({"task_budget"})

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountTokensBody(Body):
    """A conversation. `None` is a field that was left out."""

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[SystemBlock] | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    """An older name of `output_config.format`."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "billing_policy",
            "cache_control",
            "context_management",
            "diagnostics",
            "fallback_credit_token",
            "fallbacks",
            "metadata",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    )
    """Fields that only wish something, or remark on the request."""
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        "context_management": ({}, {"edits": []}),
        "fallbacks": ([],),
        "inference_geo": ("global", "not_available"),
        "mcp_servers": ([],),
        "metadata": ({}, {"user_id": None}),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "thread": ({},),
    }
    unsupported: ClassVar[Mapping[str, str]] = {
        "compaction": "the server does not shorten conversations in words",
        "container": "the server runs no code",
        "inference_geo": "the server is where it is",
        "mcp_servers": "the server calls no tools itself",
        "thread": "conversations are not kept: send their messages",
        "messages.content.transformations": "the model's own settings for images are used",
        "messages.content.content.transformations": "the model's own settings for images are used",
    }


class MessagesBody(CountTokensBody):
    """A conversation, and what is wanted of its continuation."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
