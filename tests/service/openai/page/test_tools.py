"""Calls of tools: the page runs them, shows them, and tells the model what they returned."""

from __future__ import annotations

import json

import pytest

from tests.service.openai.page.rig import Page
from tests.service.openai.page.stand_in import WAIT_S, Hold, called, delta, said

pytestmark = pytest.mark.sweep


def test_a_call_is_run_and_its_result_goes_back(page: Page) -> None:
    page.tab.click(".toggle")
    page.ask("What is the weather in Paris?", called("get_weather", '{"city": "Paris"}'), said("It is dry."))
    page.shows("It is dry.")
    page.ends()
    first, second = page.server.bodies
    assert [tool["function"]["name"] for tool in first["tools"]] == ["get_weather", "get_time"]
    assert first["tool_choice"] == "auto"
    assert second["tools"] == first["tools"]
    question, call, result = second["messages"]
    assert question["content"] == "What is the weather in Paris?"
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert call["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]
    assert result["role"] == "tool"
    assert result["tool_call_id"] == "call_1"
    weather = json.loads(result["content"])
    assert set(weather) == {"temperature", "condition"}
    arguments, shown = page.tab.texts(".call pre")
    assert json.loads(arguments) == {"city": "Paris"}
    assert json.loads(shown) == weather
    assert page.tab.text(".call summary code") == "get_weather"
    assert page.tab.text(".call .status") == "returned"


def test_without_the_switch_no_tools_are_offered(page: Page) -> None:
    page.ask("Hello", said("Hi"))
    page.ends()
    assert "tools" not in page.sent
    assert "tool_choice" not in page.sent


def test_a_call_is_shown_while_it_is_written(page: Page) -> None:
    page.tab.click(".toggle")
    pieces = called("get_weather", '{"city": "Rome"}')
    page.ask("Weather?", [*pieces[:2], Hold(), *pieces[2:]], said("Fine."))
    page.shows('{"city"')
    assert page.tab.text(".call .status") == "being written"
    page.server.release()
    page.shows("Fine.")


def test_a_stop_before_the_call_is_whole_runs_nothing(page: Page) -> None:
    page.tab.click(".toggle")
    pieces = called("get_weather", '{"city": "Rome"}')
    page.ask("Weather?", [*pieces[:2], Hold()])
    page.shows("get_weather")
    page.tab.click("#stop")
    page.ends("stopped")
    assert page.server.left.wait(WAIT_S)
    assert page.tab.text(".call .status") == "not run"
    page.ask("Never mind", said("Well."))
    page.ends()
    roles = [message["role"] for message in page.sent["messages"]]
    assert roles == ["user", "assistant", "tool", "user"], "each call has a result, as chat templates demand"


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("launch", "{}", "There is no tool named launch."),
        ("get_weather", "{", "The arguments are not JSON."),
        ("get_weather", "[1]", "The arguments are not a JSON object."),
        ("get_weather", '{"city": 3}', "city must be the name of a city"),
        ("toString", "{}", "There is no tool named toString."),
        ("get_time", '{"time_zone": "Nowhere/None"}', "Invalid time zone specified: Nowhere/None"),
    ],
)
def test_a_call_that_cannot_be_run_tells_the_model_why(
    page: Page, name: str, arguments: str, result: str
) -> None:
    page.tab.click(".toggle")
    page.ask("Go", called(name, arguments), said("Sorry."))
    page.shows("Sorry.")
    page.ends()
    assert json.loads(page.sent["messages"][-1]["content"]) == {"error": result}


def test_a_model_that_must_call_may_answer_afterwards(page: Page) -> None:
    page.tab.click(".toggle")
    page.tab.choose("#tool_choice", "required")
    page.ask("Weather?", called("get_weather", '{"city": "Oslo"}'), said("Snow."))
    page.shows("Snow.")
    assert [body["tool_choice"] for body in page.server.bodies] == ["required", "auto"]


def test_a_model_that_never_stops_calling_is_asked_no_more(page: Page) -> None:
    page.tab.click(".toggle")
    page.ask("Go", *(called("get_time", "{}") for _ in range(20)))
    page.shows("kept calling tools")
    page.ends()
    assert len(page.server.bodies) == 8


def test_several_calls_of_one_answer_are_all_run(page: Page) -> None:
    page.tab.click(".toggle")
    calls = [
        {"index": at, "id": f"call_{at}", "type": "function",
         "function": {"name": "get_weather", "arguments": json.dumps({"city": city})}}
        for at, city in enumerate(("Paris", "Rome"))
    ]  # fmt: skip
    page.ask("Both?", [delta(tool_calls=calls), delta(finish="tool_calls")], said("Fine."))
    page.shows("Fine.")
    assert [m["tool_call_id"] for m in page.sent["messages"] if m["role"] == "tool"] == ["call_0", "call_1"]


def test_the_tools_of_a_question_to_begin_with_last_for_that_question(page: Page) -> None:
    """A model that is offered tools later on calls them, or writes what looks like it."""
    page.server.answers = [called("get_weather", '{"city": "Paris"}'), said("It is dry.")]
    page.tab.click(".starters li:last-child button")
    page.shows("It is dry.")
    page.ends()
    page.server.answers = [called("get_weather", '{"city": "Paris"}'), said("It is wet.")]
    page.tab.click(".answer:last-child [aria-label='Try again']")
    page.shows("It is wet.")
    page.ends()
    page.ask("Tell me a story", said("Once upon a time"))
    page.shows("Once")
    page.ends()
    assert page.tab.evaluate("document.querySelector('#tools').checked") is False
    assert ["tools" in body for body in page.server.bodies] == [True, True, True, True, False]
