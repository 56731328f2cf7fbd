"""What the OpenAI Agents SDK does with the OpenAI front. `run_checks.py` runs the checks."""

from __future__ import annotations

from typing import Literal

import agents
from openai import AsyncOpenAI
from pydantic import BaseModel

ASK = "what's the weather in Paris?"

agents.set_tracing_disabled(True)


class Sum(BaseModel):
    sum: Literal[6, 7, 8]  # the demo model may never end an integer


def weather(city: str) -> str:
    """Get the weather in a city."""
    return '{"condition": "sunny", "celsius": 21}'


get_weather = agents.function_tool(weather, name_override="get_weather")
get_weather_loosely = agents.function_tool(weather, name_override="get_weather", strict_mode=False)


def chat_model(endpoint):
    client = AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0)
    return agents.OpenAIChatCompletionsModel(model=endpoint.model, openai_client=client)


def responses_model(endpoint):
    client = AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0)
    return agents.OpenAIResponsesModel(model=endpoint.model, openai_client=client)


def agent(model, instructions=None, **changes):
    """Make an agent without instructions unless given: the demo model knows no words for them."""
    settings = agents.ModelSettings(temperature=0, max_tokens=200)
    return agents.Agent(
        name="demo", instructions=instructions, model=model, **({"model_settings": settings} | changes)
    )


async def adds(model):
    done = await agents.Runner.run(agent(model), "what is 3 + 4?")
    assert done.final_output == "3 + 4 = 7.", done
    assert done.context_wrapper.usage.output_tokens > 0, done.context_wrapper.usage


async def streams(model):
    run = agents.Runner.run_streamed(agent(model), "what is 3 + 4?")
    deltas = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == "3 + 4 = 7.", deltas
    assert run.final_output == "3 + 4 = 7.", run


async def calls(model, tool=get_weather):
    done = await agents.Runner.run(agent(model, tools=[tool]), ASK, max_turns=3)
    kinds = [item.type for item in done.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds
    assert "Paris" in done.final_output, done


async def calls_in_a_stream(model):
    run = agents.Runner.run_streamed(agent(model, tools=[get_weather]), ASK, max_turns=3)
    kinds = [event.item.type async for event in run.stream_events() if event.type == "run_item_stream_event"]
    assert "tool_call_item" in kinds, kinds
    assert "Paris" in run.final_output, run


async def answers_in_a_schema(model):
    done = await agents.Runner.run(agent(model, output_type=Sum), "what is 3 + 4?")
    assert isinstance(done.final_output, Sum), done


async def calls_and_answers_in_a_schema(model):
    done = await agents.Runner.run(agent(model, tools=[get_weather], output_type=Sum), ASK, max_turns=3)
    kinds = [item.type for item in done.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds
    assert isinstance(done.final_output, Sum), done


async def check_chat_answer(endpoint):
    await adds(chat_model(endpoint))


async def check_chat_stream(endpoint):
    await streams(chat_model(endpoint))


async def check_chat_tool(endpoint):
    await calls(chat_model(endpoint))


async def check_chat_tool_that_is_not_strict(endpoint):
    await calls(chat_model(endpoint), get_weather_loosely)


async def check_chat_tool_in_a_stream(endpoint):
    await calls_in_a_stream(chat_model(endpoint))


async def check_chat_output_type(endpoint):
    await answers_in_a_schema(chat_model(endpoint))


async def check_chat_tool_and_output_type(endpoint):
    await calls_and_answers_in_a_schema(chat_model(endpoint))


async def check_chat_instructions(endpoint):
    done = await agents.Runner.run(agent(chat_model(endpoint), instructions="You are kind."), "hello")
    assert done.final_output, done


async def check_responses_answer(endpoint):
    await adds(responses_model(endpoint))


async def check_responses_stream(endpoint):
    await streams(responses_model(endpoint))


async def check_responses_tool(endpoint):
    await calls(responses_model(endpoint))


async def check_responses_tool_in_a_stream(endpoint):
    await calls_in_a_stream(responses_model(endpoint))


async def check_responses_output_type(endpoint):
    await answers_in_a_schema(responses_model(endpoint))


async def check_responses_tool_and_output_type(endpoint):
    await calls_and_answers_in_a_schema(responses_model(endpoint))


async def check_responses_instructions(endpoint):
    done = await agents.Runner.run(agent(responses_model(endpoint), instructions="You are kind."), "hello")
    assert done.final_output, done


async def check_responses_previous_response_id(endpoint):
    demo = agent(responses_model(endpoint))
    first = await agents.Runner.run(demo, "what is 3 + 4?")
    second = await agents.Runner.run(demo, "what is 2 + 2?", previous_response_id=first.last_response_id)
    assert second.final_output == "2 + 2 = 4.", second


async def check_responses_tool_that_sends_only_what_is_new(endpoint):
    demo = agent(responses_model(endpoint), tools=[get_weather])
    done = await agents.Runner.run(demo, ASK, max_turns=3, auto_previous_response_id=True)
    assert "Paris" in done.final_output, done


async def check_handoff(endpoint):
    model = chat_model(endpoint)
    weather = agent(model, tools=[get_weather])
    settings = agents.ModelSettings(temperature=0, max_tokens=200, tool_choice="required")
    triage = agent(model, handoffs=[weather], model_settings=settings)
    done = await agents.Runner.run(triage, ASK, max_turns=4)
    assert "handoff_call_item" in [item.type for item in done.new_items], done
