"""The base of all bodies of requests, and the fields that are taken and ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

IGNORED: Final = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
"""Fields of a request's body that change nothing in what a model answers here, and that clients send anyway.
"""


def _no_number(value: Any) -> Any:
    """The value itself. In Python 0 equals False and 1 equals True; in a body they are different things."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "Input should be a valid boolean")
    return value


OnlyFalse = Annotated[Literal[False], BeforeValidator(_no_number)]
OnlyTrue = Annotated[Literal[True], BeforeValidator(_no_number)]

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

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that are taken and ignored, whatever they hold."""
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
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MOST_KEYS:
            raise ValueError(f"an object may have at most {MOST_KEYS} keys here")
        known = cls.model_fields
        return {
            name: value
            for name, value in data.items()
            if name not in cls.ignored
            and (value is not None or not (name in known or name in cls.unsupported))
        }


class RequestBody(Body):
    """The body of a request to an endpoint of OpenAI's API."""

    ignored: ClassVar[frozenset[str]] = IGNORED

    store: OnlyFalse | None = None
    """Nothing is stored, so true is refused."""
