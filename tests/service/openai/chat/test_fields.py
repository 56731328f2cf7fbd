"""Every field that OpenAI's client can send is honoured, ignored on purpose, or refused with a reason; and
what vLLM's users send is known by name. OpenAI's own types say which fields there are.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_message_function_tool_call_param import (
    ChatCompletionMessageFunctionToolCallParam,
)
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from openai.types.shared_params import FunctionDefinition, ResponseFormatJSONSchema

from penstock.openai.schemas import chat, completions, sampling
from penstock.openai.schemas.base import Body

VLLM = {
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words"),
    *("include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "structured_outputs"),
    *(
        "prompt_logprobs",
        "cache_salt",
        "priority",
        "truncate_prompt_tokens",
        "request_id",
        "return_token_ids",
    ),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"),
    *("regex", "ebnf"),
}


def known(body: type[Body]) -> set[str]:
    names = {field.alias or name for name, field in body.model_fields.items()}
    return names | body.ignored | body.kept | set(body.unsupported)


@pytest.mark.parametrize(
    ("body", "theirs"),
    [
        (chat.ChatBody, chat_params.CompletionCreateParamsStreaming),
        (completions.CompletionBody, completion_params.CompletionCreateParamsStreaming),
        (chat.Message, ChatCompletionAssistantMessageParam),
        (chat.Message, ChatCompletionDeveloperMessageParam),
        (chat.Message, ChatCompletionSystemMessageParam),
        (chat.Message, ChatCompletionToolMessageParam),
        (chat.Message, ChatCompletionUserMessageParam),
        (chat.ToolCall, ChatCompletionMessageFunctionToolCallParam),
        (chat.Tool, ChatCompletionFunctionToolParam),
        (chat.FunctionDefinition, FunctionDefinition),
        (sampling.StreamOptions, ChatCompletionStreamOptionsParam),
        (sampling.ResponseFormat, ResponseFormatJSONSchema),
    ],
)
def test_each_field_of_openai_is_known(body: type[Body], theirs: Any) -> None:
    assert set(get_type_hints(theirs)) <= known(body)


@pytest.mark.parametrize("body", [chat.ChatBody, completions.CompletionBody])
def test_vllms_fields_are_honoured(body: type[Body]) -> None:
    assert set(body.model_fields) >= VLLM


@pytest.mark.parametrize("body", [chat.ChatBody, completions.CompletionBody])
def test_no_field_is_both_honoured_and_refused(body: type[Body]) -> None:
    assert not set(body.model_fields) & set(body.unsupported)
    assert not set(body.model_fields) & body.ignored
