"""What LangChain does with the OpenAI front as its model. `run_checks.py` runs the checks."""

from __future__ import annotations

from typing import Literal

import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field


def weather(city: str) -> str:
    """Get the weather in a city."""
    return '{"condition": "sunny", "celsius": 21}'


get_weather = StructuredTool.from_function(weather, name="get_weather")


class Sum(BaseModel):
    """A sum of two numbers."""

    sum: Literal[6, 7, 8] = Field(description="The sum.")  # the demo model may never end an integer


# Token ids of the demo model, which closes a JSON object at once with this bias, and may fill one for ever
# without.
BRACES = {90: 100, 92: 100}
ASK = HumanMessage("what's the weather in Paris?")


def chat(endpoint, **changes):
    settings = {"temperature": 0, "max_retries": 0} | changes
    return ChatOpenAI(base_url=endpoint.url, model=endpoint.model, api_key=endpoint.key, **settings)


def calls_the_tool_and_answers(model):
    """Run a loop of one round: the model's call, the tool's result, the model's answer."""
    able = model.bind_tools([get_weather])
    first = able.invoke([ASK])
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"}), first
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    second = able.invoke([ASK, first, result])
    assert "sunny" in second.text, second


def check_invoke(endpoint):
    answer = chat(endpoint, max_tokens=20).invoke("what is 3 + 4?")
    assert answer.content == "3 + 4 = 7.", answer
    assert answer.response_metadata["finish_reason"] == "stop", answer
    assert answer.usage_metadata["output_tokens"] > 0, answer


def check_history_and_system_prompt(endpoint):
    answer = chat(endpoint).invoke(
        [("system", "You are kind."), ("human", "hello"), AIMessage("Hello!"), ("human", "what is 2 + 2?")]
    )
    assert answer.content == "2 + 2 = 4.", answer


def check_stream(endpoint):
    chunks = list(chat(endpoint, stream_usage=True).stream("what is 3 + 4?"))
    whole = sum(chunks[1:], chunks[0])
    assert whole.content == "3 + 4 = 7.", whole
    assert whole.usage_metadata["output_tokens"] > 0, whole


async def check_async_stream(endpoint):
    text = "".join([chunk.content async for chunk in chat(endpoint).astream("what is 3 + 4?")])
    assert text == "3 + 4 = 7.", text


async def check_async_batch(endpoint):
    answers = await chat(endpoint).abatch(["what is 3 + 4?", "what is 2 + 2?", "what is 1 + 1?"])
    assert [answer.content for answer in answers] == ["3 + 4 = 7.", "2 + 2 = 4.", "1 + 1 = 2."], answers


def check_tool_call_and_its_result(endpoint):
    calls_the_tool_and_answers(chat(endpoint))


def check_tool_call_in_a_stream(endpoint):
    able = chat(endpoint).bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
    chunks = list(able.stream([ASK]))
    (call,) = sum(chunks[1:], chunks[0]).tool_calls
    assert call["args"] == {"city": "Paris"}, call


def check_strict_tool_call(endpoint):
    able = chat(endpoint).bind_tools([get_weather], strict=True)
    (call,) = able.invoke([ASK]).tool_calls
    assert call["args"] == {"city": "Paris"}, call


def check_structured_output_by_json_schema(endpoint):
    answer = chat(endpoint).with_structured_output(Sum, method="json_schema").invoke("what is 3 + 4?")
    assert isinstance(answer, Sum), answer


def check_structured_output_by_function_calling(endpoint):
    answer = chat(endpoint).with_structured_output(Sum, method="function_calling").invoke("what is 3 + 4?")
    assert isinstance(answer, Sum), answer


def check_structured_output_by_json_mode(endpoint):
    able = chat(endpoint, max_tokens=200, logit_bias=BRACES).with_structured_output(method="json_mode")
    assert isinstance(able.invoke("Answer with JSON: what is 3 + 4?"), dict)


def check_logprobs(endpoint):
    answer = chat(endpoint, logprobs=True, top_logprobs=2).invoke("what is 3 + 4?")
    entries = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).startswith("3 + 4 = 7."), entries


def check_stop_sequences(endpoint):
    answer = chat(endpoint).invoke("what is 3 + 4?", stop=["="])
    assert answer.content.strip() == "3 + 4", answer


def check_extra_body(endpoint):
    forced = chat(endpoint, extra_body={"structured_outputs": {"choice": ["seven"]}})
    assert forced.invoke("what is 3 + 4?").content == "seven"


def check_completions(endpoint):
    llm = OpenAI(
        base_url=endpoint.url, model=endpoint.model, api_key=endpoint.key, temperature=0, max_tokens=8
    )
    assert llm.invoke("Once upon a time")
    assert llm.batch(["Once upon a time", "One day"])[1]


def check_responses(endpoint):
    answer = chat(endpoint, use_responses_api=True).invoke("what is 3 + 4?")
    assert answer.text == "3 + 4 = 7.", answer


def check_responses_stream(endpoint):
    chunks = list(chat(endpoint, use_responses_api=True).stream("what is 3 + 4?"))
    whole = sum(chunks[1:], chunks[0])
    assert whole.text == "3 + 4 = 7.", whole
    assert whole.usage_metadata["output_tokens"] > 0, whole


def check_responses_tool_call_and_its_result(endpoint):
    calls_the_tool_and_answers(chat(endpoint, use_responses_api=True))


def check_responses_structured_output(endpoint):
    able = chat(endpoint, use_responses_api=True).with_structured_output(Sum)
    assert isinstance(able.invoke("what is 3 + 4?"), Sum)


def check_error_names_the_field(endpoint):
    param = None
    try:
        chat(endpoint, logit_bias={99999999: 1}).invoke("hello")
    except openai.BadRequestError as error:
        param = error.param
    assert "logit_bias" in (param or ""), param


def check_long_prompt_is_a_context_overflow(endpoint):
    found = None
    try:
        chat(endpoint).invoke("once upon a time " * 5000)
    except ContextOverflowError as error:
        found = error
    assert found is not None
