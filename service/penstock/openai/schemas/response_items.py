"""The items that the input of /v1/responses is made of. Everything that its answers hold may be sent back.

Which part, item or tool it is, `type` says. What is there of another type is an `Other`, which is refused by
name when the request is converted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from penstock.openai.schemas.base import Body

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

    type: Literal["input_text"]
    text: str


class InputImage(Sent):
    """A picture that the model is shown, whose bytes are in the URL: data:image/png;base64,..."""

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
    """The function that was called, which the call says as well."""


class ReasoningItem(Sent):
    """What the model thought. The first of `content`, `encrypted_content` and `summary` that is there is
    used.
    """

    type: Literal["reasoning"]
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    """As an answer of this front had it (`penstock.openai.schemas.carried_reasoning`)."""
    id: str | None = None
    status: Status | None = None


_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def _item_tag(value: Any) -> str:
    kind = _type_of(value)
    if kind is None:
        return "<message>"
    return f"<{kind}>" if kind in _ITEM_TYPES else "<other>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[Other, Tag("<other>")],
    Discriminator(_item_tag),
]
