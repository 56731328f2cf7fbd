"""What requests that generate have in common: OpenAI's fields, and the further fields that vLLM's users know.

Ranges are checked by the server, which names every bad field. What is checked here is the shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from penstock.openai.schemas.base import NEUTRAL, Body, OnlyFalse, OnlyTrue, RequestBody


class StreamOptions(Body):
    """What a stream has besides the answer."""

    include_usage: bool | None = None
    """Send a last chunk with the usage, and without choices."""
    continuous_usage_stats: bool | None = None
    """vLLM's: send the usage so far in every chunk; only with `include_usage`."""
    include_obfuscation: OnlyFalse | None = None
    """The front sends no obfuscation, so it can only be switched off."""


class JsonSchemaFormat(Body):
    """A JSON Schema and its name."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    """What the format is for, in words. The model is not shown them: only the grammar is made of the schema.
    """
    strict: bool | None = None
    """The output follows the schema in either case."""


class ResponseFormat(Body):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's way to ask for a form. Exactly one of the fields."""

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        "json_object": (False,),
        "disable_fallback": (False,),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
    }

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: OnlyTrue | None = None


LACKING = {
    "use_beam_search": "there is no beam search",
    "length_penalty": "there is no beam search",
    "best_of": "ask for n choices",
    "logits_processors": "the server runs no code of callers",
    "spaces_between_special_tokens": "the tokenizer decides about spaces",
    "return_tokens_as_token_ids": "use return_token_ids",
    "kv_transfer_params": "the server does not hand KV pages over",
    "vllm_xargs": "the server has no such extensions",
    "max_repetition_pattern_size": "the server does not look for repetitions",
    "min_repetition_pattern_size": "the server does not look for repetitions",
    "repetition_min_count": "the server does not look for repetitions",
    "add_special_tokens": "the tokenizer adds its own to a text, and the template to a chat",
    "guided_whitespace_pattern": "a schema says in x-guidance whether white space is flexible",
    "moderation": "nothing is moderated",
}
"""Fields that OpenAI's API or vLLM has and that are refused, with the reason or what to use instead."""

NEUTRAL_LACKING: Final[Mapping[str, Sequence[Any]]] = {
    **NEUTRAL,
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "best_of": (1,),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "max_repetition_pattern_size": (0,),
    "min_repetition_pattern_size": (0,),
    "repetition_min_count": (0,),
    "guided_decoding_backend": ("auto",),
}
"""The values of these fields, and of those that every request may have, that ask for nothing."""


def _backend_is_a_wish(value: Any, info: ValidationInfo) -> None:
    """Take the name of a backend for a wish that has no effect; the options after it may change answers."""
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "Input should be a valid string")
    for option in value.partition(":")[2].split(","):
        if option not in ("", "no-fallback"):
            raise PydanticCustomError(
                "literal_error",
                "a backend with the option {option} is not there",
                {"option": repr(option[:40])},
            )
    if info.context is not None:
        info.context.add("guided_decoding_backend")


class GenerationBody(RequestBody):
    """The fields of all requests that generate, also those of /v1/responses. `None` is a field that was left
    out.
    """

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = NEUTRAL_LACKING

    model: str
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    """From the text of a token id to what is added to its logit."""
    stream: bool | None = None

    top_k: int | None = Field(default=None, ge=-1)
    """As in vLLM, -1 and 0 both switch it off."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    """Its fields by the names that they have in older releases of vLLM; `regex` and `ebnf` are SGLang's."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    guided_decoding_backend: Annotated[
        None, BeforeValidator(_backend_is_a_wish, json_schema_input_type=str | None)
    ] = None
    cache_salt: str | None = None
    priority: int | None = None
    """As in vLLM, a lower number is served first. In the contract it is the other way round."""
    request_id: str | None = None
    """What follows the prefix, such as "chatcmpl-", in the answer's id."""
    time_limit: float | None = None
    """Penstock's: seconds after which the answer ends with what it has, and the finish_reason "length"."""


class SamplingBody(GenerationBody):
    """The fields that chats and completions share."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    """Keep only so many of the prompt's last tokens; -1 keeps what the context has room for."""
    return_token_ids: bool | None = None
