"""The base of all bodies of requests, and the fields that are taken and ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

IGNORED: Final = frozenset(
    {
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields of a request's body that only wish something, or remark on it, and that clients send to every model.
"""

NEUTRAL: Final[Mapping[str, Sequence[Any]]] = {
    "client_metadata": ({},),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
"""What these fields hold where they wish for nothing."""


def _no_number(value: Any) -> Any:
    """Return the value itself. In Python 0 equals False and 1 equals True; in a body they are different
    things.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "Input should be a valid boolean")
    return value


OnlyFalse = Annotated[Literal[False], BeforeValidator(_no_number)]
OnlyTrue = Annotated[Literal[True], BeforeValidator(_no_number)]


def _is_same(value: Any, other: Any) -> bool:
    """Say whether both are the same in JSON, where 1 is 1.0 and not true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


MOST_KEYS: Final = 200
"""Of an object whose fields are known."""


def _end_lists_at_their_first_error(schema: Any) -> None:
    """Change a schema of pydantic so that a list is not looked at further once an item of it is wrong: a list
    of a million wrong items would hold up other requests for seconds.
    """
    if isinstance(schema, list | tuple):
        for part in schema:
            _end_lists_at_their_first_error(part)
    elif isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for name, part in schema.items():
            if name != "metadata":
                _end_lists_at_their_first_error(part)


class Body(BaseModel):
    """An object in the body of a request. Null means that a field was left out, as in OpenAI's API. A field
    that the model does not declare is refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    path: ClassVar[str] = ""
    """Where these objects stand in a body, as `ignored` fields are told: "reasoning."."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that are taken whatever they hold and have no effect, of which callers are told."""
    kept: ClassVar[frozenset[str]] = frozenset()
    """Fields that clients keep of an answer and send back, and that say nothing new."""
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """From a field to the values by which it asks for nothing. They count as null."""
    unsupported: ClassVar[Mapping[str, str]] = {}
    """Fields that OpenAI or vLLM has and that are refused as such, with the reason that the caller is told.
    """

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        _end_lists_at_their_first_error(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MOST_KEYS:
            raise ValueError(f"an object may have at most {MOST_KEYS} keys here")
        asked = {name: value for name, value in data.items() if not cls._asks_for_nothing(name, value)}
        if ignored := asked.keys() & cls.ignored:
            if info.context is not None:
                info.context.update(cls.path + name for name in ignored)
            asked = {name: value for name, value in asked.items() if name not in ignored}
        return asked

    @classmethod
    def _asks_for_nothing(cls, name: str, value: Any) -> bool:
        if name in cls.kept:
            return True
        if value is None:
            return any(
                name in known for known in (cls.model_fields, cls.ignored, cls.unsupported, cls.neutral)
            )
        return any(_is_same(value, neutral) for neutral in cls.neutral.get(name, ()))


class RequestBody(Body):
    """The body of a request to an endpoint of OpenAI's API."""

    ignored: ClassVar[frozenset[str]] = IGNORED
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = NEUTRAL
