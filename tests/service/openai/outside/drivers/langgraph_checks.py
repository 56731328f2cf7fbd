"""What LangGraph's named agents and supervisors do with the OpenAI front. `run_checks.py` runs the checks."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph_supervisor import create_supervisor


def model_of(endpoint):
    return ChatOpenAI(
        model=endpoint.model, base_url=endpoint.url, api_key=endpoint.key, max_retries=0, max_tokens=60
    )


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


QUESTION = {"messages": [HumanMessage("what is 3 + 4?")]}


def check_a_named_agent(endpoint):
    agent = create_agent(model_of(endpoint), tools=[], name="calculator")
    answer = agent.invoke(QUESTION)["messages"][-1]
    assert (answer.content, answer.name) == ("3 + 4 = 7.", "calculator"), answer


def check_a_second_turn_of_a_named_agent(endpoint):
    agent = create_agent(model_of(endpoint), tools=[], name="calculator")
    state = agent.invoke(QUESTION)
    more = agent.invoke({"messages": [*state["messages"], HumanMessage("what is 3 + 4?")]})
    assert len(more["messages"]) == 4, more


def check_a_named_agent_with_a_tool(endpoint):
    agent = create_agent(model_of(endpoint), tools=[get_weather], name="reporter")
    messages = agent.invoke({"messages": [HumanMessage("What is the weather in Paris?")]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"], messages
    assert messages[2].content == "sunny in Paris", messages


def check_a_supervisor(endpoint):
    agent = create_agent(model_of(endpoint), tools=[], name="calculator")
    graph = create_supervisor([agent], model=model_of(endpoint)).compile()
    state = graph.invoke(QUESTION)
    more = graph.invoke({"messages": [*state["messages"], HumanMessage("what is 3 + 4?")]})
    assert more["messages"][-1].type == "ai", more
