"""What LangChain's class for Anthropic's API does with the OpenAI front. `run_checks.py` runs the checks."""

from __future__ import annotations

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

SUM = "what is 3 + 4?"
ASK = "what's the weather in Paris?"
ANSWER = "3 + 4 = 7."
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
    """A sum."""

    sum: int


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return WEATHER


def model_of(endpoint, **changes):
    url = endpoint.url.removesuffix("/v1")
    settings = {
        "base_url": url,
        "api_key": endpoint.key,
        "max_retries": 0,
        "max_tokens": 60,
        "temperature": 0,
    }
    return ChatAnthropic(model=endpoint.model, **(settings | changes))


def check_invoke(endpoint):
    answer = model_of(endpoint).invoke(SUM)
    assert answer.content == ANSWER, answer
    assert answer.response_metadata["stop_reason"] == "end_turn", answer
    assert answer.usage_metadata["output_tokens"] > 0, answer


async def check_astream(endpoint):
    pieces = [chunk async for chunk in model_of(endpoint).astream(SUM)]
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.text == ANSWER, whole
    assert whole.usage_metadata["output_tokens"] > 0, whole


def check_a_tool_and_its_result(endpoint):
    model = model_of(endpoint).bind_tools([tool(get_weather)])
    asked = [HumanMessage(ASK)]
    answer = model.invoke(asked)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"}), answer
    told = model.invoke([*asked, answer, ToolMessage(WEATHER, tool_call_id=call["id"])])
    assert "21" in told.text, told


def check_structured_output_by_schema(endpoint):
    found = model_of(endpoint).with_structured_output(Sum, method="json_schema").invoke(SUM)
    assert isinstance(found, Sum), found


def check_structured_output_by_tool(endpoint):
    model = model_of(endpoint).with_structured_output(TOOL, method="function_calling")
    assert model.invoke(ASK) == {"city": "Paris"}


def check_num_tokens(endpoint):
    assert model_of(endpoint).get_num_tokens_from_messages([HumanMessage(SUM)]) > 0
