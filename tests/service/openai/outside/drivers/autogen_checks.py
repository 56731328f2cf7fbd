"""What AutoGen's agents do with the OpenAI front, with their defaults, by which every turn has a name.
`run_checks.py` runs the checks.
"""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ToolCallExecutionEvent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = ModelInfo(
    vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True
)


def client_of(endpoint):
    return OpenAIChatCompletionClient(
        model=endpoint.model, base_url=endpoint.url, api_key=endpoint.key, model_info=INFO, max_retries=0
    )


async def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


async def check_text(endpoint):
    agent = AssistantAgent("calculator", client_of(endpoint), system_message=None)
    done = await agent.run(task="what is 3 + 4?")
    assert done.messages[-1].content == "3 + 4 = 7.", done.messages


async def check_a_second_turn_names_the_agent(endpoint):
    agent = AssistantAgent("calculator", client_of(endpoint), system_message=None)
    for _ in range(2):
        done = await agent.run(task="what is 3 + 4?")
        assert done.messages[-1].content, done.messages


async def check_a_stream(endpoint):
    agent = AssistantAgent("calculator", client_of(endpoint), system_message=None, model_client_stream=True)
    done = await agent.run(task="what is 3 + 4?")
    assert done.messages[-1].content == "3 + 4 = 7.", done.messages


async def check_a_tool(endpoint):
    agent = AssistantAgent("reporter", client_of(endpoint), system_message=None, tools=[get_weather])
    done = await agent.run(task="What is the weather in Paris?")
    (executed,) = (event for event in done.messages if isinstance(event, ToolCallExecutionEvent))
    assert executed.content[0].content == "sunny in Paris", done.messages
