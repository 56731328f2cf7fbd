"""The bodies of requests to /v1/completions and /v1/embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from penstock.openai.schemas.base import RequestBody
from penstock.openai.schemas.sampling import LACKING, NEUTRAL_LACKING, SamplingBody

MAX_PROMPTS = 256
"""The most prompts of one request. Each is a call of its own to the server."""

_SHAPE = "must be a text, a list of texts, a list of token ids, or a list of lists of token ids"


def _is_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def prompts_in(name: str, most: int) -> Callable[[Any], Any]:
    """Make what looks at the prompts in a field of this name, all items at once, for one error at most. It
    raises PydanticCustomError for what is no `Prompt`, and for more than `most` prompts.
    """

    def shaped(value: Any) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise PydanticCustomError("prompt_type", f"{name} {_SHAPE}")
        if not value:
            raise PydanticCustomError("prompt_empty", f"{name} must not be an empty list")
        if _is_ids(value):
            return value
        if not all(isinstance(item, str) for item in value) and not all(
            isinstance(item, list) and item and _is_ids(item) for item in value
        ):
            raise PydanticCustomError("prompt_type", f"{name} {_SHAPE}")
        if len(value) > most:
            raise PydanticCustomError("prompt_many", f"{name} must have at most {most} prompts")
        return value

    return shaped


def prompts_of(value: Any) -> list[str | list[int]]:
    """List the single prompts of a `Prompt`."""
    is_one = isinstance(value, str) or isinstance(value[0], int)
    return [value] if is_one else value


Prompt = str | list[str] | list[int] | list[list[int]]


class CompletionBody(SamplingBody):
    """One prompt or several, and what is wanted of their continuations."""

    prompt: Annotated[Any, BeforeValidator(prompts_in("prompt", MAX_PROMPTS), json_schema_input_type=Prompt)]
    """A `Prompt`, whose shape has been checked."""
    max_tokens: int | None = None
    """Without it 16 tokens, as in OpenAI's API. 0 goes with `echo` only: then the answer is the prompt."""
    logprobs: int | None = Field(default=None, ge=0)
    best_of: int | None = None
    """Only 1, which asks for nothing, or the number that `n` has: the best of n choices are all of them."""
    echo: bool | None = None
    """Whether each choice begins with the prompt, and its log-probabilities with those of the prompt."""

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        **NEUTRAL_LACKING,
        "add_special_tokens": (True,),
        "suffix": ("",),
        "prompt_embeds": ([],),
    }
    unsupported: ClassVar[Mapping[str, str]] = {
        **{name: why for name, why in LACKING.items() if name != "best_of"},
        "suffix": "the models that are served only continue a text",
        "prompt_embeds": "a prompt is text or token ids",
    }


MAX_INPUTS: Final = 2048
"""The most inputs of one request, as in OpenAI's API."""


class ClassifyBody(RequestBody):
    """Texts, or token ids, each of which is classified, as in vLLM."""

    model: str | None = None
    """Without it the served one."""
    input: Annotated[Any, BeforeValidator(prompts_in("input", MAX_INPUTS), json_schema_input_type=Prompt)]
    """A `Prompt`, whose shape has been checked."""
    priority: int | None = None
    """As of requests that generate."""


class EmbeddingBody(RequestBody):
    """Texts, or token ids, each of which becomes a vector."""

    model: str
    input: Annotated[Any, BeforeValidator(prompts_in("input", MAX_INPUTS), json_schema_input_type=Prompt)]
    """A `Prompt`, whose shape has been checked."""
    dimensions: int | None = Field(default=None, ge=1)
    """How many numbers of each vector are kept, from its start; without it all."""
    encoding_format: Literal["float", "base64"] | None = None
    """How a vector is written: as a list of numbers, which is the default, or as the base64 of its floats of
    32 bits.
    """
    priority: int | None = None
    """As of requests that generate."""
