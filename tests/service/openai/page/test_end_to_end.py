"""The page with the real front: before the demo model, and before an engine that waits."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.service.cli.test_serve import free_port
from tests.service.openai.page.rig import Page
from tests.service.openai.page.stand_in import StandIn
from tests.service.openai.rig import front_rig
from tests.service.rig import fake, until
from tests.support.demo_server import served_demo
from tools.page.chromium import Chromium

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the page of a server that has the demo model."""
    port = free_port()
    with served_demo("--openai-port", str(port)):
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture
def demo(browser: Chromium, url: str) -> Iterator[Page]:
    with browser.tab() as tab:
        page = Page(tab, StandIn())  # which serves nothing here
        tab.open(url)
        tab.wait("document.querySelector('#model').value === 'demo'")
        tab.click("#open-settings")
        tab.fill("#temperature", "0")
        yield page
        assert [text for text in tab.complaints if not text.startswith("Failed to load resource")] == []


def test_a_sum_is_answered_with_its_figures(demo: Page) -> None:
    demo.ask("what is 3 + 4?")
    demo.ends()
    assert demo.tab.text(".answer > .prose") == "3 + 4 = 7."
    tokens, *others = demo.tab.texts(".figures span")
    assert int(re.match(r"\d+", tokens)[0]) > 3  # type: ignore[index]  # or the test fails
    assert any(text.startswith("first token ") for text in others)
    assert any(text.endswith("in the prompt") or "cached" in text for text in others)


def test_the_model_calls_the_pages_tool_and_answers_from_its_result(demo: Page) -> None:
    demo.tab.click(".toggle")
    demo.ask("What is the weather in Paris?")
    demo.shows(" in Paris.")
    demo.ends()
    arguments, result = demo.tab.texts(".call pre")
    assert json.loads(arguments) == {"city": "Paris"}
    weather = json.loads(result)
    answer = demo.tab.text(".answer:last-child > .prose")
    assert answer == f"It is {weather['temperature']} degrees and {weather['condition']} in Paris."


def test_an_answer_follows_a_schema(demo: Page) -> None:
    demo.tab.choose("#response_format", "json_schema")
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [7]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    demo.tab.fill("#schema", json.dumps(schema))
    demo.ask("Hello")
    demo.ends()
    assert json.loads(demo.tab.text(".answer > .prose")) == {"n": 7}


def test_a_setting_that_the_server_refuses_is_found(demo: Page) -> None:
    demo.tab.choose("#response_format", "json_schema")
    demo.tab.fill("#schema", '{"type": "nonsense"}')
    demo.ask("Hello")
    demo.ends("failed")
    assert "The server refused a setting" in demo.tab.text(".failure")
    demo.tab.click(".failure .plain:last-child")
    demo.tab.wait("document.activeElement.closest('fieldset')?.querySelector('#response_format')")


def test_every_setting_is_one_that_the_server_takes(demo: Page) -> None:
    demo.tab.click(".more summary")
    values = {
        "top_p": 0.9, "max_tokens": 5, "seed": 7, "top_k": 20, "min_p": 0.05,
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
        "stop_strings": "END", "system": "Be brief.",
    }  # fmt: skip
    for name, value in values.items():
        demo.tab.fill(f"#{name}", str(value))
    demo.tab.click(".toggle")
    demo.ask("Tell me a story.")
    demo.ends()
    assert "reached the limit of tokens" in demo.tab.text(".answer")
    demo.ask("Go on.")  # the turn before goes back as the server sent it
    demo.ends()


async def test_stop_frees_the_request_in_the_engine(browser: Chromium) -> None:
    async with front_rig(fake(hold=True)) as rig:
        with browser.tab() as tab:
            page = Page(tab, StandIn())

            async def do(action: Callable[..., Any], *arguments: Any) -> None:
                await asyncio.to_thread(action, *arguments)  # the front runs on this thread

            await do(tab.open, f"{rig.url}/")
            await do(tab.wait, "document.querySelector('#model').value")
            await do(page.ask, "Hello")
            await until(lambda: len(rig.engine.seen) == 1)
            await do(tab.click, "#stop")
            await until(lambda: len(rig.engine.cancelled) == 1)
            await do(page.ends, "stopped")
