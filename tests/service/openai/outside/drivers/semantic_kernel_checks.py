"""What Semantic Kernel's agents do with the OpenAI front, with their defaults, by which every turn has a
name. `run_checks.py` runs the checks.
"""

from __future__ import annotations

import openai
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.functions import KernelArguments, kernel_function


class Weather:
    """A plugin."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    @kernel_function(name="get_weather", description="Get the weather of a city.")  # type: ignore[untyped-decorator]  # its package is not here
    def get_weather(self, city: str) -> str:
        """Get the weather of a city."""
        self.cities.append(city)
        return f"sunny in {city}"


def service_of(endpoint):
    client = openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0)
    return OpenAIChatCompletion(ai_model_id=endpoint.model, async_client=client)


async def check_text(endpoint):
    agent = ChatCompletionAgent(service=service_of(endpoint), name="Calculator")
    answer = await agent.get_response(messages="what is 3 + 4?")
    assert str(answer.message) == "3 + 4 = 7.", answer


async def check_a_second_turn_names_the_agent(endpoint):
    agent = ChatCompletionAgent(service=service_of(endpoint), name="Calculator")
    answer = await agent.get_response(messages="what is 3 + 4?")
    answer = await agent.get_response(messages="what is 3 + 4?", thread=answer.thread)
    assert str(answer.message), answer


async def check_a_stream(endpoint):
    agent = ChatCompletionAgent(service=service_of(endpoint), name="Calculator")
    pieces = [str(piece.message) async for piece in agent.invoke_stream(messages="what is 3 + 4?")]
    assert "".join(pieces) == "3 + 4 = 7.", pieces


async def check_a_tool(endpoint):
    """Check a function that has the name of its plugin, too, which the demo model does not know. So a call is
    required.
    """
    plugin = Weather()
    settings = OpenAIChatPromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Required(), max_tokens=60
    )
    agent = ChatCompletionAgent(
        service=service_of(endpoint),
        name="Reporter",
        plugins=[plugin],
        arguments=KernelArguments(settings=settings),
    )
    await agent.get_response(messages="What is the weather in Paris?")
    assert plugin.cities[:1] == ["Paris"], plugin.cities
