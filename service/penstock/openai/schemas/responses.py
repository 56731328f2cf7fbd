"""The body of a request to /v1/responses, and the items that its input is made of. Everything that the
answers hold may be sent back.

Which part, item or tool it is, `type` says. What is there of another type is an `Other`, which is refused by
name when the request is converted.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from penstock.openai.schemas.base import IGNORED, NEUTRAL, Body, OnlyFalse, RequestBody
from penstock.openai.schemas.chat import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS
from penstock.openai.schemas.sampling import LACKING, NEUTRAL_LACKING, GenerationBody

_PREFIX = "penstock-reasoning:"


def carried(text: str) -> str:
    """Make the string that carries the text."""
    return _PREFIX + base64.b64encode(text.encode()).decode()


def text_of(string: str) -> str:
    """Return the text that `carried` made the string of. Raises ValueError for a string that it did not
    make.
    """
    if not string.startswith(_PREFIX):
        raise ValueError("it was not made by this front")
    try:
        return base64.b64decode(string.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError("it has been changed since this front made it") from error


Status = Literal["in_progress", "completed", "incomplete"]


class Sent(Body):
    """Something that callers keep of an answer, and send back. openai's client writes null for every field of
    OpenAI's API that the answer did not have, so null is no field here, whatever its name.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_any_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


def _nothing(schema: dict[str, Any]) -> None:
    """Tell programs that nothing matches, because all that is read as such is refused."""
    schema.clear()
    schema["not"] = {}


class Other(Body):
    """Something of a type that no model here takes, whatever its further fields are."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=_nothing)

    type: str


class InputText(Sent):
    """A text that the model is given."""

    path: ClassVar[str] = "input[].content[]."
    ignored: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})

    type: Literal["input_text"]
    text: str


class InputImage(Sent):
    """An image that the model is shown, whose bytes are in the URL: data:image/png;base64,..."""

    path: ClassVar[str] = "input[].content[]."
    ignored: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})

    type: Literal["input_image"]
    image_url: str
    detail: str | None = None


class OutputText(Sent):
    """A text that a model wrote."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = Field(default=None, max_length=0)
    """The list of citations, which is empty in answers of this front."""
    logprobs: list[Any] | None = None
    """What the answer told of its tokens. The model is not shown it."""
    parsed: Any = None
    """What openai's client adds to a text that it has parsed; the text says the same."""


class Refusal(Sent):
    """Words with which a model refused to answer. The model is shown them as what it wrote."""

    type: Literal["refusal"]
    refusal: str


class ReasoningText(Sent):
    """A text that a model wrote when it thought."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(Sent):
    """A text that stands for what a model thought."""

    type: Literal["summary_text"]
    text: str


def _type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _part_tag(value: Any) -> str:
    kind = _type_of(value)
    return f"<{kind}>" if kind in ("input_text", "input_image", "output_text", "refusal") else "<other>"


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[InputImage, Tag("<input_image>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[Refusal, Tag("<refusal>")]
    | Annotated[Other, Tag("<other>")],
    Discriminator(_part_tag),
]


class MessageItem(Sent):
    """A turn of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    """A label of an assistant's turn. The model is not shown it."""


class Caller(Body):
    """Who made a call. Only the model itself makes calls here."""

    type: Literal["direct"]


class FunctionCallItem(Sent):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: Caller | None = None
    parsed_arguments: Any = None
    """What openai's client adds to a call that it has parsed; the arguments say the same."""


class FunctionCallOutputItem(Sent):
    """What the function answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: Status | None = None
    caller: Caller | None = None
    name: str | None = None
    """The function that was called, which the call says as well, as it does its namespace."""
    namespace: str | None = None


class CustomToolCallItem(Sent):
    """A call of a custom tool, with the text that the model wrote for it."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    id: str | None = None
    status: Status | None = None
    caller: Caller | None = None


class CustomToolCallOutputItem(FunctionCallOutputItem):
    """What the custom tool answered."""

    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]  # the same item of another type


class ReasoningItem(Sent):
    """What the model thought. The first of `content`, `encrypted_content` and `summary` that is there is
    used.
    """

    type: Literal["reasoning"]
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    """As an answer of this front had it (`penstock.openai.schemas.responses`)."""
    id: str | None = None
    status: Status | None = None


class ItemReference(Body):
    """An item of a response that is kept, in place of the item itself."""

    type: Literal["item_reference"]
    id: str


_ITEM_TYPES = (
    "item_reference",
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
)


def _item_tag(value: Any) -> str:
    kind = _type_of(value)
    if kind is None:
        return "<message>"
    return f"<{kind}>" if kind in _ITEM_TYPES else "<other>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[CustomToolCallItem, Tag("<custom_tool_call>")]
    | Annotated[CustomToolCallOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")]
    | Annotated[Other, Tag("<other>")],
    Discriminator(_item_tag),
]


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
    allowed_callers: list[Literal["direct"]] | None = None

    path: ClassVar[str] = "tools[]."
    ignored: ClassVar[frozenset[str]] = frozenset({"defer_loading"})
    """The model is told of each function at once, because it cannot search for functions."""
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {"async": (False,), "defer_loading": (False,)}
    unsupported: ClassVar[Mapping[str, str]] = {
        "output_schema": "the model is not told what functions answer",
        "async": "the model waits for what a function answers",
    }


class CustomFormat(Body):
    """The form of the text that a custom tool is given."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Body):
    """A tool that is given a text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    path: ClassVar[str] = "tools[]."
    ignored: ClassVar[frozenset[str]] = FunctionTool.ignored
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = FunctionTool.neutral
    unsupported: ClassVar[Mapping[str, str]] = {"async": FunctionTool.unsupported["async"]}


def _inner_tag(value: Any) -> str:
    kind = _type_of(value)
    return f"<{kind}>" if kind in ("function", "custom") else "<other>"


class NamespaceTool(Body):
    """Functions that have a name and a description together."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    """The model is not shown it."""
    tools: list[
        Annotated[
            Annotated[FunctionTool, Tag("<function>")]
            | Annotated[CustomTool, Tag("<custom>")]
            | Annotated[Other, Tag("<other>")],
            Discriminator(_inner_tag),
        ]
    ] = Field(max_length=MAX_TOOLS)


BuiltIn = Literal[
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]


class BuiltInTool(Body):
    """A tool that OpenAI runs, or that only its models know. It is passed over, whatever its further fields
    are.
    """

    model_config = ConfigDict(extra="ignore")

    type: BuiltIn


_TOOL_TAGS = {
    "function": "<function>",
    "custom": "<custom>",
    "namespace": "<namespace>",
    **dict.fromkeys(get_args(BuiltIn), "<built-in>"),
}


def _tool_tag(value: Any) -> str:
    kind = _type_of(value)
    return _TOOL_TAGS.get(kind, "<other>") if isinstance(kind, str) else "<other>"


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[BuiltInTool, Tag("<built-in>")]
    | Annotated[Other, Tag("<other>")],
    Discriminator(_tool_tag),
]


class NamedTool(Body):
    """The function or the custom tool that the model must call."""

    type: Literal["function", "custom"]
    name: str


class AllowedTools(Body):
    """A choice that leaves some of the tools, and says whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[
        Annotated[
            Annotated[NamedTool, Tag("<named>")]
            | Annotated[BuiltInTool, Tag("<built-in>")]
            | Annotated[Other, Tag("<other>")],
            Discriminator(lambda value: _allowed_tag(value)),
        ]
    ] = Field(min_length=1, max_length=MAX_TOOLS)


def _allowed_tag(value: Any) -> str:
    tag = _tool_tag(value)
    return {"<function>": "<named>", "<custom>": "<named>", "<namespace>": "<other>"}.get(tag, tag)


def _choice_tag(value: Any) -> str:
    if isinstance(value, str):
        return "<word>"
    if _type_of(value) == "allowed_tools":
        return "<allowed_tools>"
    return "<other>" if _inner_tag(value) == "<other>" else "<named>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[AllowedTools, Tag("<allowed_tools>")]
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

    path: ClassVar[str] = "text."
    ignored: ClassVar[frozenset[str]] = frozenset({"verbosity"})
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class Reasoning(Body):
    """How the model thinks."""

    path: ClassVar[str] = "reasoning."
    ignored: ClassVar[frozenset[str]] = frozenset({"generate_summary", "summary"})
    """There is nothing that makes summaries, and the reasoning itself is in the answer."""
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        "context": ("auto",),
        "mode": ("standard",),
    }

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    unsupported: ClassVar[Mapping[str, str]] = {
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
    previous_response_id: str | None = None
    """A response that is kept, whose conversation goes on."""
    store: bool | None = None
    """Whether the response is kept, which is the default where the front keeps responses."""
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
        "store",
        "user",
    }
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        **{name: values for name, values in NEUTRAL_LACKING.items() if name not in ("metadata", "store")},
        "add_special_tokens": (False,),
        "background_options": ({},),
        "context_management": ([],),
        "access_programs": ({},),
        "image": ({},),
        "n": (1,),
        "response_format": ({"type": "text"},),
        "logprobs": (False,),
        "enable_response_messages": (False,),
    }
    unsupported: ClassVar[Mapping[str, str]] = LACKING | {
        **{f"tools.{name}": why for name, why in FunctionTool.unsupported.items()},
        "input.async": "the model waits for what a function answers",
        **{f"reasoning.{name}": why for name, why in Reasoning.unsupported.items()},
        "conversation": "conversations are not kept: send their items as input",
        "prompt": "prompts are not kept: send instructions and input",
        "background_options": "a response is made while its caller waits",
        "context_management": "the server does not shorten conversations in words",
        "access_programs": "there are none",
        "image": "put images into input, as parts of the type input_image",
        "n": "a response has one output",
        "max_tokens": "use max_output_tokens",
        "max_completion_tokens": "use max_output_tokens",
        "messages": "use input",
        "response_format": "use text.format",
        "reasoning_effort": "use reasoning.effort",
        "logprobs": 'use top_logprobs, and include "message.output_text.logprobs"',
        "verbosity": "use text.verbosity",
        "chat_template": "the model's own template is used",
        "enable_response_messages": "items are the only form of the answer",
        "previous_input_messages": "send items as input",
    }


class InputTokensBody(RequestBody):
    """A conversation as of /v1/responses, whose tokens are counted. Whatever else a request has changes
    nothing in its prompt.
    """

    model: str | None = None
    """Without it the served one."""
    input: Input | None = None
    previous_response_id: str | None = None
    instructions: str | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: further variables for the model's chat template."""

    ignored: ClassVar[frozenset[str]] = IGNORED | {"parallel_tool_calls", "text", "truncation"}
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        **NEUTRAL,
        "parallel_tool_calls": (True,),
        "text": ({},),
        "truncation": ("disabled",),
    }
    unsupported: ClassVar[Mapping[str, str]] = {
        "conversation": ResponsesBody.unsupported["conversation"],
        "personality": "the models that are served have none",
    }
