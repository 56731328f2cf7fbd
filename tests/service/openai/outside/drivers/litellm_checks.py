"""What LiteLLM does with the OpenAI front as its upstream. `run_checks.py` runs the checks."""

from __future__ import annotations

import json
import os

from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be fetched from the network otherwise

import litellm  # reads the environment when it is imported

SUM = [{"role": "user", "content": "what is 3 + 4?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ASK = [{"role": "user", "content": "what's the weather in Paris?"}]


class Sum(BaseModel):
    sum: int


def upstream(endpoint):
    """Return the arguments by which LiteLLM takes the front for one of its OpenAI-compatible upstreams."""
    return {
        "model": f"openai/{endpoint.model}",
        "api_base": endpoint.url,
        "api_key": endpoint.key,
        "max_retries": 0,
    }


def check_completion(endpoint):
    answer = litellm.completion(messages=SUM, temperature=0, max_tokens=20, **upstream(endpoint))
    assert answer.choices[0].message.content == "3 + 4 = 7.", answer
    assert answer.choices[0].finish_reason == "stop", answer
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0, usage


async def check_acompletion_n_choices(endpoint):
    answer = await litellm.acompletion(messages=SUM, n=2, seed=3, max_tokens=20, **upstream(endpoint))
    assert [choice.index for choice in answer.choices] == [0, 1], answer


def check_stream_and_stream_chunk_builder(endpoint):
    chunks = list(
        litellm.completion(
            messages=SUM,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **upstream(endpoint),
        )
    )
    whole = litellm.stream_chunk_builder(chunks, messages=SUM)
    assert whole.choices[0].message.content == "3 + 4 = 7.", whole
    assert whole.choices[0].finish_reason == "stop", whole
    assert chunks[-1].usage.completion_tokens > 0, chunks[-1]


async def check_async_stream(endpoint):
    stream = await litellm.acompletion(messages=SUM, temperature=0, stream=True, **upstream(endpoint))
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "3 + 4 = 7.", text


def check_tool_call_and_its_result(endpoint):
    first = litellm.completion(messages=ASK, tools=[TOOL], temperature=0, **upstream(endpoint))
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls", first
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"condition": "sunny", "celsius": 21}'}
    second = litellm.completion(
        messages=[*ASK, message, result], tools=[TOOL], temperature=0, **upstream(endpoint)
    )
    assert "sunny" in second.choices[0].message.content, second


def check_tool_call_in_a_stream(endpoint):
    chunks = list(
        litellm.completion(
            messages=ASK,
            tools=[TOOL],
            tool_choice="required",
            temperature=0,
            stream=True,
            **upstream(endpoint),
        )
    )
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}, call


def check_response_format(endpoint):
    answer = litellm.completion(
        messages=SUM, response_format=Sum, temperature=0, max_tokens=40, **upstream(endpoint)
    )
    Sum.model_validate_json(answer.choices[0].message.content)


def check_logprobs(endpoint):
    answer = litellm.completion(
        messages=SUM, logprobs=True, top_logprobs=2, temperature=0, **upstream(endpoint)
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries).startswith("3 + 4 = 7."), entries
    assert all(len(entry.top_logprobs) == 2 for entry in entries), entries


def check_extra_body(endpoint):
    answer = litellm.completion(
        messages=SUM,
        extra_body={"structured_outputs": {"choice": ["seven"]}, "top_k": 5},
        **upstream(endpoint),
    )
    assert answer.choices[0].message.content == "seven", answer


def check_text_completion(endpoint):
    where = upstream(endpoint) | {"model": f"text-completion-openai/{endpoint.model}"}
    answer = litellm.text_completion(prompt="Once upon a time", temperature=0, max_tokens=8, **where)
    assert answer.choices[0].text, answer
    assert answer.choices[0].finish_reason == "length", answer


def check_responses(endpoint):
    answer = litellm.responses(input="what is 3 + 4?", temperature=0, **upstream(endpoint))
    (item,) = answer.output
    assert item.content[0].text == "3 + 4 = 7.", answer
    assert answer.usage.output_tokens > 0, answer


def check_responses_stream(endpoint):
    stream = litellm.responses(input="what is 3 + 4?", temperature=0, stream=True, **upstream(endpoint))
    kinds = [str(getattr(event.type, "value", event.type)) for event in stream]
    assert kinds[0] == "response.created", kinds
    assert kinds[-1] == "response.completed", kinds
    assert "response.output_text.delta" in kinds, kinds


def raised(kind, **changes):
    """Return the error of this kind that a call raises."""
    try:
        litellm.completion(**({"messages": SUM} | changes))
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def check_unknown_model_is_not_found(endpoint):
    raised(litellm.NotFoundError, **(upstream(endpoint) | {"model": "openai/no-such-model"}))


def check_wrong_key_is_an_authentication_error(endpoint):
    raised(litellm.AuthenticationError, **(upstream(endpoint) | {"api_key": "psk_none_wrong"}))


def check_bad_value_is_a_bad_request(endpoint):
    error = raised(litellm.BadRequestError, top_p=2, **upstream(endpoint))
    assert "top_p" in str(error), error


def check_long_prompt_is_a_context_window_error(endpoint):
    long = [{"role": "user", "content": "once upon a time " * 5000}]
    raised(litellm.ContextWindowExceededError, **(upstream(endpoint) | {"messages": long}))


def check_router(endpoint):
    router = litellm.Router(model_list=[{"model_name": "any", "litellm_params": upstream(endpoint)}])
    answer = router.completion(model="any", messages=SUM, temperature=0)
    assert answer.choices[0].message.content == "3 + 4 = 7.", answer


def check_rerank_of_hosted_vllm(endpoint):
    documents = ["The fox sleeps.", "Once upon a time", {"text": "3 + 4 = 7."}]
    answer = litellm.rerank(
        query="Once upon a time",
        documents=documents,
        top_n=2,
        return_documents=True,
        **upstream(endpoint) | {"model": f"hosted_vllm/{endpoint.model}"},
    )
    first, second = answer.results
    assert first["index"] == 1, answer
    assert abs(first["relevance_score"] - 1) < 1e-3, answer
    assert first["document"]["text"] == "Once upon a time", answer
    assert second["relevance_score"] < first["relevance_score"], answer


async def check_arerank_without_documents(endpoint):
    answer = await litellm.arerank(
        query="a",
        documents=["b", "a"],
        return_documents=False,
        **upstream(endpoint) | {"model": f"hosted_vllm/{endpoint.model}"},
    )
    assert [result["index"] for result in answer.results] == [1, 0], answer
    assert "document" not in answer.results[0], answer


def of_anthropic(endpoint):
    """Return the arguments by which LiteLLM takes the front for an upstream that speaks Anthropic's API."""
    return {
        "model": f"anthropic/{endpoint.model}",
        "api_base": endpoint.url.removesuffix("/v1"),
        "api_key": endpoint.key,
        "max_retries": 0,
        "max_tokens": 60,
    }


def check_messages_of_anthropics_api(endpoint):
    answer = litellm.completion(messages=SUM, temperature=0, **of_anthropic(endpoint))
    assert answer.choices[0].message.content == "3 + 4 = 7.", answer
    assert answer.choices[0].finish_reason == "stop", answer


def check_a_stream_of_anthropics_api(endpoint):
    stream = litellm.completion(messages=SUM, temperature=0, stream=True, **of_anthropic(endpoint))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == "3 + 4 = 7.", text


def check_a_tool_of_anthropics_api(endpoint):
    answer = litellm.completion(messages=ASK, tools=[TOOL], **of_anthropic(endpoint))
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}, call
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"condition": "sunny", "celsius": 21}'}
    told = litellm.completion(
        messages=[*ASK, answer.choices[0].message, result], tools=[TOOL], **of_anthropic(endpoint)
    )
    assert "21" in told.choices[0].message.content, told


def check_a_wrong_key_of_anthropics_api(endpoint):
    try:
        litellm.completion(messages=SUM, **(of_anthropic(endpoint) | {"api_key": "psk_none"}))
    except litellm.AuthenticationError:
        return
    raise AssertionError("the key was taken")
