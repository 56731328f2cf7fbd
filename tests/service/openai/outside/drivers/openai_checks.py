"""What OpenAI's own Python client does with the OpenAI front. `run_checks.py` runs the checks.

The client validates every answer and every event strictly against its types, and the checks refuse fields
that those types do not have, but for the few that the front adds on purpose.
"""

from __future__ import annotations

import json
import time

import openai
from pydantic import BaseModel

QUESTION = "what is 3 + 4?"
ANSWER = "3 + 4 = 7."
ASK = {"role": "user", "content": "what's the weather in Paris?"}
WEATHER = '{"condition": "sunny", "celsius": 21}'
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ABOUT = {"name": "get_weather", "description": "Get the weather in a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": ABOUT}
ADDED = {
    *("reasoning", "stop_reason", "max_model_len"),  # vLLM's
    "input_modalities",  # OpenRouter's
    "status",  # of a custom tool's call, as in the items of a response that is kept
    *("store", "presence_penalty", "frequency_penalty"),  # of a response, by Open Responses
}
"""Fields of an answer that OpenAI's types do not have."""


# Token ids of the demo model, which closes a JSON object at once with this bias, and may fill one for ever
# without.
BRACES = {90: 100, 92: 100}


class Sum(BaseModel):
    sum: int


class GetWeather(BaseModel):
    """Get the weather in a city."""

    city: str


def connect(endpoint, kind=openai.OpenAI, strict=True, **changes):
    settings = {"base_url": endpoint.url, "api_key": endpoint.key, "max_retries": 0, "timeout": 60}
    return kind(_strict_response_validation=strict, **(settings | changes))


def only_known_fields(value):
    """Return the value itself, after a look at all that is in it."""
    if isinstance(value, BaseModel):
        assert not set(value.model_extra or ()) - ADDED, (type(value), value.model_extra)
        for name in type(value).model_fields:
            only_known_fields(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            only_known_fields(one)
    return value


def chat(endpoint, content=QUESTION, **options):
    question = {"role": "user", "content": content}
    given = {"model": endpoint.model, "messages": [question], "temperature": 0} | options
    return connect(endpoint).chat.completions.create(**given)


def check_models(endpoint):
    client = connect(endpoint)
    (model,) = only_known_fields(client.models.list().data)
    assert client.models.retrieve(model.id).id == model.id == endpoint.model


def check_chat(endpoint):
    answer = only_known_fields(chat(endpoint))
    assert answer.choices[0].message.content == ANSWER, answer
    assert answer.choices[0].finish_reason == "stop", answer
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, answer
    assert answer._request_id, "no x-request-id"


def check_chat_chunks(endpoint):
    chunks = [
        only_known_fields(chunk)
        for chunk in chat(endpoint, stream=True, stream_options={"include_usage": True})
    ]
    *told, last = chunks
    assert last.choices == [], last
    assert last.usage.completion_tokens > 0, last
    assert all(chunk.usage is None for chunk in told), told
    assert {chunk.id for chunk in chunks} == {last.id}, chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == ANSWER, told
    assert told[0].choices[0].delta.role == "assistant", told[0]
    assert [chunk.choices[0].finish_reason for chunk in told][-1] == "stop", told


def check_chat_stream_helper(endpoint):
    with connect(endpoint).chat.completions.stream(
        model=endpoint.model, messages=[{"role": "user", "content": QUESTION}], temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == ANSWER, whole
    assert "content.done" in kinds, kinds


async def check_chat_async(endpoint):
    async with connect(endpoint, openai.AsyncOpenAI) as client:
        given = {"model": endpoint.model, "messages": [{"role": "user", "content": QUESTION}]}
        stream = await client.chat.completions.create(**given, temperature=0, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == ANSWER, text


def check_chat_n_and_seed(endpoint):
    options = {"n": 2, "seed": 5, "temperature": 1, "max_completion_tokens": 12}
    first, again = (only_known_fields(chat(endpoint, "tell me a story", **options)) for _ in range(2))
    assert [choice.index for choice in first.choices] == [0, 1], first
    texts = [[choice.message.content for choice in answer.choices] for answer in (first, again)]
    assert texts[0] == texts[1], texts
    assert {choice.finish_reason for choice in first.choices} == {"length"}, first


def check_chat_stop(endpoint):
    answer = chat(endpoint, stop=["="])
    assert answer.choices[0].message.content.strip() == "3 + 4", answer


def check_chat_logprobs(endpoint):
    answer = only_known_fields(chat(endpoint, logprobs=True, top_logprobs=3))
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(ANSWER), entries
    for entry in entries:
        assert len(entry.top_logprobs) == 3, entry
        assert entry.token == entry.top_logprobs[0].token, entry  # at temperature 0


def check_chat_logprobs_in_a_stream(endpoint):
    entries = [
        entry
        for chunk in chat(endpoint, logprobs=True, top_logprobs=1, stream=True)
        for choice in only_known_fields(chunk).choices
        for entry in (choice.logprobs.content if choice.logprobs else None) or []
    ]
    assert "".join(entry.token for entry in entries).startswith(ANSWER), entries


def check_chat_json_schema(endpoint):
    schema = {"name": "sum", "schema": Sum.model_json_schema() | {"additionalProperties": False}}
    answer = chat(
        endpoint,
        response_format={"type": "json_schema", "json_schema": schema | {"strict": True}},
    )
    Sum.model_validate_json(answer.choices[0].message.content)


def check_chat_json_object(endpoint):
    answer = chat(
        endpoint,
        "Answer with JSON.",
        response_format={"type": "json_object"},
        max_tokens=400,
        logit_bias=BRACES,
    )
    assert isinstance(json.loads(answer.choices[0].message.content), dict), answer


def check_chat_parse(endpoint):
    answer = connect(endpoint).chat.completions.parse(
        model=endpoint.model,
        messages=[{"role": "user", "content": QUESTION}],
        response_format=Sum,
        temperature=0,
    )
    assert isinstance(answer.choices[0].message.parsed, Sum), answer


def check_chat_parse_in_a_stream(endpoint):
    with connect(endpoint).chat.completions.stream(
        model=endpoint.model,
        messages=[{"role": "user", "content": QUESTION}],
        response_format=Sum,
        temperature=0,
    ) as stream:
        whole = stream.get_final_completion()
    assert isinstance(whole.choices[0].message.parsed, Sum), whole


def check_chat_parse_of_a_strict_tool(endpoint):
    answer = connect(endpoint).chat.completions.parse(
        model=endpoint.model,
        messages=[ASK],
        tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Paris"), answer


def check_chat_parse_with_tools_and_a_response_format(endpoint):
    answer = connect(endpoint).chat.completions.parse(
        model=endpoint.model,
        messages=[ASK],
        tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
        response_format=Sum,
        temperature=0,
    )
    message = answer.choices[0].message
    assert message.tool_calls or message.parsed, answer


def check_chat_tool_call_and_its_result(endpoint):
    first = only_known_fields(chat(endpoint, messages=[ASK], tools=[TOOL]))
    assert first.choices[0].finish_reason == "tool_calls", first
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}, first
    result = {"role": "tool", "tool_call_id": call.id, "content": WEATHER}
    second = chat(endpoint, messages=[ASK, message, result], tools=[TOOL])
    assert "sunny" in second.choices[0].message.content, second


def check_chat_tool_call_in_a_stream(endpoint):
    with connect(endpoint).chat.completions.stream(
        model=endpoint.model, messages=[ASK], tools=[TOOL], temperature=0
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"city": "Paris"}], done


def check_chat_forced_tool(endpoint):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = chat(endpoint, messages=[ASK], tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather", answer


def check_chat_structured_outputs_of_vllm(endpoint):
    answer = chat(endpoint, extra_body={"structured_outputs": {"choice": ["seven", "eight"]}})
    assert answer.choices[0].message.content in ("seven", "eight"), answer


def check_completions(endpoint):
    answer = only_known_fields(
        connect(endpoint).completions.create(
            model=endpoint.model, prompt=["Once upon a time", "One day"], max_tokens=6, n=2, logprobs=1
        )
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3], answer
    assert all(choice.logprobs.tokens for choice in answer.choices), answer
    assert answer.usage.completion_tokens == 24, answer.usage


def check_completions_in_a_stream(endpoint):
    # OpenAI's API sends null for `finish_reason` before the last chunk, which the type of its client lacks.
    stream = connect(endpoint, strict=False).completions.create(
        model=endpoint.model, prompt="Once upon a time", max_tokens=6, stream=True
    )
    chunks = [only_known_fields(chunk) for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks), chunks
    assert chunks[-1].choices[0].finish_reason == "length", chunks


def respond(endpoint, **options):
    given = {"model": endpoint.model, "input": QUESTION, "temperature": 0} | options
    return connect(endpoint).responses.create(**given)


def check_responses(endpoint):
    answer = only_known_fields(respond(endpoint))
    assert answer.output_text == ANSWER, answer
    assert answer.status == "completed", answer
    assert answer.store is True, answer
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens, answer


def check_responses_events(endpoint):
    events = [only_known_fields(event) for event in respond(endpoint, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events))), events
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ], kinds
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ], kinds
    assert set(kinds[4:-4]) == {"response.output_text.delta"}, kinds
    assert events[-1].response.output_text == ANSWER, events[-1]


def check_responses_stream_helper(endpoint):
    with connect(endpoint).responses.stream(model=endpoint.model, input=QUESTION, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == ANSWER


def check_responses_incomplete(endpoint):
    answer = only_known_fields(respond(endpoint, input="tell me a story", max_output_tokens=16))
    assert answer.status == "incomplete", answer
    assert answer.incomplete_details.reason == "max_output_tokens", answer


def check_responses_parse(endpoint):
    answer = connect(endpoint).responses.parse(
        model=endpoint.model, input=QUESTION, text_format=Sum, temperature=0
    )
    assert isinstance(answer.output_parsed, Sum), answer


def check_responses_logprobs(endpoint):
    answer = respond(endpoint, top_logprobs=2, include=["message.output_text.logprobs"])
    entries = only_known_fields(answer).output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries).startswith(ANSWER), entries


def check_responses_tool_call_and_its_result(endpoint):
    tool = {"type": "function", "strict": True} | ABOUT
    first = only_known_fields(respond(endpoint, input=[ASK], tools=[tool]))
    (call,) = first.output
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Paris"}), first
    result = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}
    second = respond(endpoint, input=[ASK, *first.output, result], tools=[tool])
    assert "sunny" in second.output_text, second


def check_responses_tool_call_in_a_stream(endpoint):
    tool = {"type": "function", "strict": False} | ABOUT
    stream = respond(endpoint, input=[ASK], tools=[tool], tool_choice="required", stream=True)
    events = [only_known_fields(event) for event in stream]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = (event for event in events if event.type == "response.function_call_arguments.done")
    assert "".join(deltas) == done.arguments, events
    assert json.loads(done.arguments) == {"city": "Paris"}, events


def check_responses_next_turn(endpoint):
    first = respond(endpoint, input=[{"role": "user", "content": QUESTION}])
    second = respond(
        endpoint,
        input=[
            {"role": "user", "content": QUESTION},
            *first.output,
            {"role": "user", "content": "what is 2 + 2?"},
        ],
    )
    assert second.output_text == "2 + 2 = 4.", second


def check_responses_go_on_from_one_that_is_kept(endpoint):
    first = respond(endpoint)
    stream = respond(endpoint, input="what is 2 + 2?", previous_response_id=first.id, stream=True)
    *_, last = stream
    assert last.response.output_text == "2 + 2 = 4.", last
    kept = only_known_fields(connect(endpoint).responses.retrieve(last.response.id))
    assert kept == last.response, kept
    assert kept.previous_response_id == first.id, kept


def check_responses_items_and_deletion(endpoint):
    client = connect(endpoint)
    first = respond(endpoint)
    second = respond(endpoint, input="what is 2 + 2?", previous_response_id=first.id)
    items = list(client.responses.input_items.list(second.id, limit=2, order="asc"))
    assert [only_known_fields(item).content[0].text for item in items] == [QUESTION, ANSWER, "what is 2 + 2?"]
    client.responses.delete(second.id)
    raised(openai.NotFoundError, lambda: client.responses.retrieve(second.id))
    error = raised(openai.BadRequestError, lambda: respond(endpoint, previous_response_id=second.id))
    assert (error.code, error.param) == ("previous_response_not_found", "previous_response_id"), error


def check_responses_input_tokens(endpoint):
    counted = only_known_fields(
        connect(endpoint).responses.input_tokens.count(model=endpoint.model, input=QUESTION)
    )
    assert counted.input_tokens == respond(endpoint).usage.input_tokens, counted


def check_responses_custom_tool(endpoint):
    grammar = {"type": "grammar", "syntax": "regex", "definition": "Paris|Rome"}
    tools = [{"type": "custom", "name": "look", "format": grammar}]
    choice = {"type": "custom", "name": "look"}
    stream = respond(endpoint, input=[ASK], tools=tools, tool_choice=choice, stream=True)
    events = [only_known_fields(event) for event in stream]
    (call,) = events[-1].response.output
    assert (call.type, call.name) == ("custom_tool_call", "look"), call
    assert call.input in ("Paris", "Rome"), call
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call.input, events
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": WEATHER}
    assert respond(endpoint, input=[ASK, call, result]).status == "completed"


def check_chat_custom_tool(endpoint):
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "Paris|Rome"}}
    tools = [{"type": "custom", "custom": {"name": "look", "format": form}}]
    asked = {"model": endpoint.model, "tools": tools, "temperature": 0}
    completions = connect(endpoint).chat.completions
    message = only_known_fields(completions.create(messages=[ASK], tool_choice="required", **asked))
    message = message.choices[0].message
    (call,) = message.tool_calls
    assert (call.type, call.custom.name) == ("custom", "look"), call
    assert call.custom.input in ("Paris", "Rome"), call
    result = {"role": "tool", "tool_call_id": call.id, "content": WEATHER}
    completions.create(messages=[ASK, message, result], tool_choice="none", **asked)


def check_chat_allowed_tools(endpoint):
    other = {"type": "function", "function": ABOUT | {"name": "get_time"}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    answer = connect(endpoint).chat.completions.create(
        model=endpoint.model,
        messages=[ASK],
        tools=[TOOL, other],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        max_tokens=60,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_time", answer


def check_stream_that_is_closed_early(endpoint):
    stream = chat(endpoint, "tell me a story", stream=True)
    next(iter(stream))
    stream.close()
    assert chat(endpoint).choices[0].message.content == ANSWER


def raised(kind, call, **options):
    """Return the error of this kind that the call raises."""
    try:
        call(**options)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def check_error_of_a_bad_value(endpoint):
    error = raised(openai.BadRequestError, chat, endpoint=endpoint, top_p=2)
    assert (error.type, error.param) == ("invalid_request_error", "top_p"), error


def check_error_of_an_unknown_field(endpoint):
    error = raised(openai.BadRequestError, chat, endpoint=endpoint, extra_body={"no_such_field": 1})
    assert (error.param, error.code) == ("no_such_field", "unknown_parameter"), error


def check_error_of_an_unsupported_field(endpoint):
    error = raised(openai.BadRequestError, respond, endpoint=endpoint, previous_response_id="resp_1")
    assert error.param == "previous_response_id", error


def check_error_of_an_unknown_model(endpoint):
    error = raised(openai.NotFoundError, chat, endpoint=endpoint, model="no-such-model")
    assert error.code == "model_not_found", error


def check_error_of_a_wrong_key(endpoint):
    client = connect(endpoint, api_key="psk_none_wrong")
    raised(openai.AuthenticationError, client.models.list)


def check_error_of_a_long_prompt(endpoint):
    error = raised(openai.BadRequestError, chat, endpoint=endpoint, content="once upon a time " * 5000)
    assert error.code == "context_length_exceeded", error


def check_embeddings(endpoint):
    given = {"model": endpoint.model, "dimensions": 8}
    create = connect(endpoint).embeddings.create
    made = create(**given, input=["hello", "hello", "bye"], encoding_format="float")
    only_known_fields(made)
    one, same, other = (entry.embedding for entry in made.data)
    assert one == same != other, made
    assert len(one) == 8, made
    assert abs(sum(number * number for number in one) - 1) < 1e-5, made
    # By itself OpenAI's client asks for base64, and takes it apart after it has compared types.
    again = connect(endpoint, strict=False).embeddings.create(**given, input="hello")
    assert max(abs(a - b) for a, b in zip(one, again.data[0].embedding, strict=True)) < 1e-6, again


def check_error_of_an_unknown_path(endpoint):
    raised(openai.NotFoundError, connect(endpoint).responses.retrieve, response_id="resp_1")


LINE = {"method": "POST", "url": "/v1/chat/completions"}


def batch_of(endpoint, **bodies):
    """Make a batch with a line for each of these ids."""
    client = connect(endpoint)
    lines = [json.dumps({"custom_id": name, **LINE, "body": body}) for name, body in bodies.items()]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=LINE["url"], completion_window="24h", metadata={"name": "check"}
    )


def ended(endpoint, batch):
    """Return the batch once it has ended."""
    until = time.monotonic() + 60
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < until, batch
        time.sleep(0.1)
        batch = connect(endpoint).batches.retrieve(batch.id)
        only_known_fields(batch)
    return batch


def outcomes(endpoint, file_id):
    lines = connect(endpoint).files.content(file_id).text.splitlines()
    return {one["custom_id"]: one["response"] for one in map(json.loads, lines)}


def check_files(endpoint):
    files = connect(endpoint).files
    content = b"a\r\nb\n" * 100_000
    made = files.create(
        file=("a.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    only_known_fields(made)
    assert (made.bytes, made.filename, made.expires_at) == (500_000, "a.jsonl", made.created_at + 3600), made
    assert made in list(files.list(limit=1)), "not listed"
    assert files.retrieve(made.id) == made
    assert files.content(made.id).content == content
    only_known_fields(files.delete(made.id))
    raised(openai.NotFoundError, files.retrieve, file_id=made.id)


def check_file_of_another_purpose(endpoint):
    error = raised(openai.BadRequestError, connect(endpoint).files.create, file=b"a", purpose="fine-tune")
    assert error.param == "purpose", error


def check_batch(endpoint):
    asked = {"model": endpoint.model, "messages": [{"role": "user", "content": QUESTION}]}
    made = batch_of(endpoint, good=asked, bad=asked | {"temperature": -1})
    only_known_fields(made)
    done = ended(endpoint, made)
    told = done.request_counts
    assert (done.status, told.total, told.completed, told.failed) == ("completed", 2, 1, 1), done
    answer = outcomes(endpoint, done.output_file_id)["good"]
    assert answer["body"]["choices"][0]["message"]["content"] == ANSWER, answer
    assert outcomes(endpoint, done.error_file_id)["bad"]["status_code"] == 400, done
    assert done in list(connect(endpoint).batches.list(limit=1)), "not listed"


def check_batch_with_a_wrong_line(endpoint):
    done = ended(endpoint, batch_of(endpoint, one={"model": "no-such-model"}))
    (error,) = done.errors.data
    assert (done.status, error.line, error.code) == ("failed", 1, "model_mismatch"), done


def check_batch_that_is_cancelled(endpoint):
    asked = {"model": endpoint.model, "messages": [{"role": "user", "content": QUESTION}]}
    made = batch_of(endpoint, **{f"line{number}": asked for number in range(2000)})
    only_known_fields(connect(endpoint).batches.cancel(made.id))
    done = ended(endpoint, made)
    assert done.status == "cancelled", done
