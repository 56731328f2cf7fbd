"""What Anthropic's own Python client does with the OpenAI front. `run_checks.py` runs the checks.

The client validates every answer and every event strictly against its types, and the checks refuse fields
that those types do not have.
"""

from __future__ import annotations

from typing import get_args, get_type_hints

import anthropic
from anthropic.types import tool_union_param
from pydantic import BaseModel

QUESTION = "what is 3 + 4?"
ANSWER = "3 + 4 = 7."
ASK = {"role": "user", "content": "what's the weather in Paris?"}
WEATHER = '{"condition": "sunny", "celsius": 21}'
TOOL = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Sum(BaseModel):
    sum: int


def connect(endpoint, kind=anthropic.Anthropic, strict=True, **changes):
    url = endpoint.url.removesuffix("/v1")
    settings = {"base_url": url, "api_key": endpoint.key, "max_retries": 0, "timeout": 60}
    return kind(_strict_response_validation=strict, **(settings | changes))


def asked(endpoint, **fields):
    question = {"role": "user", "content": QUESTION}
    return {"model": endpoint.model, "max_tokens": 60, "messages": [question]} | fields


def only_known_fields(value):
    """Return the value itself, after a look at all that is in it."""
    if isinstance(value, BaseModel):
        assert not value.model_extra, (type(value), value.model_extra)
        for name in type(value).model_fields:
            only_known_fields(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            only_known_fields(one)
    return value


def create(endpoint, **fields):
    return only_known_fields(connect(endpoint).messages.create(**asked(endpoint, **fields)))


def raised(kind, call):
    """Return the error of this kind that `call` raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def check_models(endpoint):
    client = connect(endpoint)
    (model,) = only_known_fields(list(client.models.list()))
    assert client.models.retrieve(model.id).id == model.id == endpoint.model


def check_message(endpoint):
    message = create(endpoint)
    (block,) = message.content
    assert (block.type, block.text, message.stop_reason) == ("text", ANSWER, "end_turn"), message
    assert message.usage.output_tokens > 0, message
    assert message._request_id, "no request-id"


def check_events(endpoint):
    events = [
        only_known_fields(event)
        for event in connect(endpoint).messages.create(**asked(endpoint), stream=True)
    ]
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == ANSWER, events
    assert [events[0].type, events[-2].type, events[-1].type] == [
        *("message_start", "message_delta", "message_stop")
    ], events


def check_stream_helper(endpoint):
    with connect(endpoint).messages.stream(**asked(endpoint)) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert only_known_fields(stream.get_final_message()).stop_reason == "end_turn"


async def check_async_stream(endpoint):
    async with (
        connect(endpoint, anthropic.AsyncAnthropic) as client,
        client.messages.stream(**asked(endpoint)) as stream,
    ):
        assert await stream.get_final_text() == ANSWER


def check_system_in_blocks(endpoint):
    block = {"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}
    assert create(endpoint, system=[block]).content[0].text


def check_a_conversation_goes_on(endpoint):
    first = create(endpoint)
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": QUESTION},
    ]
    assert create(endpoint, messages=messages).content[0].text


def check_count_tokens(endpoint):
    fields = {"tools": [TOOL], "system": "You are brief."}
    body = asked(endpoint, **fields)
    body.pop("max_tokens")
    counted = only_known_fields(connect(endpoint).messages.count_tokens(**body)).input_tokens
    usage = create(endpoint, **fields).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage)


def check_stop_sequence(endpoint):
    message = create(endpoint, stop_sequences=[" ="])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " ="), message
    assert message.content[0].text == "3 + 4", message


def check_max_tokens(endpoint):
    message = create(endpoint, max_tokens=2)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2), message


def check_sampling(endpoint):
    """Check sampling, for which the client's types have no fields any more; programs send them."""
    extra = {"temperature": 0, "top_p": 0.9, "top_k": 5}
    assert create(endpoint, extra_body=extra).content[0].text == ANSWER


def check_a_tool_is_called_and_its_result_told(endpoint):
    message = create(endpoint, messages=[ASK], tools=[TOOL])
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert (message.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": WEATHER}
    messages = [
        ASK,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    last = create(endpoint, messages=messages, tools=[TOOL])
    assert "21" in last.content[0].text, last


def check_a_tool_is_called_in_a_stream(endpoint):
    with connect(endpoint).messages.stream(**asked(endpoint, messages=[ASK], tools=[TOOL])) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert message.content[-1].input == {"city": "Paris"}, message
    assert "Paris" in "".join(pieces)


def check_a_tool_must_be_called(endpoint):
    for choice in (
        {"type": "any"},
        {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    ):
        message = create(endpoint, messages=[ASK], tools=[TOOL], tool_choice=choice)
        assert [block.type for block in message.content] == ["tool_use"], message


def check_no_tool_may_be_called(endpoint):
    message = create(endpoint, tools=[TOOL], tool_choice={"type": "none"})
    assert message.stop_reason == "end_turn", message


def check_tool_runner(endpoint):
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        assert city == "Paris"
        return WEATHER

    client = connect(endpoint)
    tool = anthropic.beta_tool(get_weather)
    runner = client.beta.messages.tool_runner(**asked(endpoint, messages=[ASK], tools=[tool]))
    assert "21" in runner.until_done().content[0].text


def check_parse(endpoint):
    message = connect(endpoint, strict=False).messages.parse(**asked(endpoint), output_format=Sum)
    assert isinstance(message.parsed_output, Sum), message


def check_every_published_tool_is_taken(endpoint):
    kinds = [get_args(get_type_hints(kind)["type"]) for kind in get_args(tool_union_param.ToolUnionParam)]
    words = [word for several in kinds for word in several if isinstance(word, str)]
    assert len(words) > 15, words
    for word in words:
        assert create(endpoint, tools=[{"type": word, "name": "x"}], max_tokens=1).content


def check_thinking_is_taken(endpoint):
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"}):
        assert create(endpoint, thinking=thinking).content[-1].text


def check_beta(endpoint):
    client = connect(endpoint)
    fields = {"betas": ["context-management-2025-06-27"], "context_management": {"edits": []}}
    assert client.beta.messages.create(**asked(endpoint), **fields).content[0].text == ANSWER


def check_a_wrong_key(endpoint):
    client = connect(endpoint, api_key="psk_none")
    error = raised(anthropic.AuthenticationError, lambda: client.messages.create(**asked(endpoint)))
    assert error.body["error"]["type"] == "authentication_error", error.body
    assert error.request_id == error.body["request_id"], error.body


def check_a_bearers_key(endpoint):
    client = connect(endpoint, api_key=None, auth_token=endpoint.key)
    assert client.messages.create(**asked(endpoint)).content


def check_another_model(endpoint):
    client = connect(endpoint)
    fields = asked(endpoint, model="other")
    for call in (client.messages.create, lambda **fields: client.messages.create(**fields, stream=True)):
        raised(anthropic.NotFoundError, lambda call=call: call(**fields))


def check_a_wrong_field(endpoint):
    error = raised(anthropic.BadRequestError, lambda: create(endpoint, extra_body={"top_p": 2}))
    assert "top_p" in error.body["error"]["message"], error.body
