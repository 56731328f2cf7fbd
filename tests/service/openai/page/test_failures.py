"""What a user reads when something went wrong, and the way on from there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.service.openai.page.rig import LAST, Page
from tests.service.openai.page.stand_in import Break, Refusal, delta, said
from tools.page.chromium import Chromium

pytestmark = pytest.mark.sweep


def error(message: str, **more: Any) -> dict[str, Any]:
    return {"message": message, "type": "invalid_request_error", "param": None, "code": None} | more


@pytest.mark.parametrize(
    ("refusal", "title", "way"),
    [
        (
            Refusal(400, error("must be at most 2", param="temperature")),
            "refused a setting",
            "Open the settings",
        ),
        (Refusal(400, error("no such role", param="messages[0].role")), "refused the request", None),
        (
            Refusal(400, error("too long", code="context_length_exceeded")),
            "conversation is too long",
            "Edit this message",
        ),
        (Refusal(401, error("a key is needed")), "wants a valid API key", "Open the settings"),
        (Refusal(403, error("not for you")), "may not do that", "Open the settings"),
        (
            Refusal(404, error("no such model", param="model", code="model_not_found")),
            "this model",
            "settings",
        ),
        (Refusal(413, error("too large")), "too large", "Edit this message"),
        (Refusal(429, error("busy"), {"retry-after": "7"}), "busy with others", "in 7 seconds"),
        (Refusal(503, error("draining")), "not ready", "in a moment"),
        (Refusal(504, error("deadline")), "took too long", "fewer tokens"),
        (Refusal(500, error("internal error")), "The server failed", "request's id"),
    ],
)
def test_each_refusal_says_what_to_do_next(page: Page, refusal: Refusal, title: str, way: str | None) -> None:
    page.ask("Hello", refusal)
    page.ends("failed")
    shown = page.tab.text(".failure")
    assert title in shown
    assert refusal.error["message"] in shown
    assert f"HTTP {refusal.status}" in shown
    assert "request request-7" in shown
    assert way is None or way in shown
    assert page.tab.evaluate("document.querySelector('.failure').getAttribute('role')") == "alert"


def test_trying_again_after_a_refusal_asks_the_same(page: Page) -> None:
    page.ask("Hello", Refusal(503, error("starting")))
    page.ends("failed")
    page.server.answers = [said("Hi")]
    page.tab.click(".failure .again")
    page.ends()
    assert page.tab.texts(".failure") == []
    assert page.server.bodies[0] == page.server.bodies[1]


def test_a_message_that_is_too_long_is_edited_instead_of_sent_again(page: Page) -> None:
    page.ask("Hello", said("Hi"))
    page.ends()
    page.ask("Far too long", Refusal(400, error("too long", code="context_length_exceeded")))
    page.ends("failed")
    assert page.tab.texts(".failure button") == ["Edit this message", "New chat"]
    page.tab.click(".failure button")
    assert page.tab.evaluate("document.querySelector('#question').value") == "Far too long"
    page.tab.fill("#question", "")
    page.ask("Short", said("Yes"))
    page.ends()
    assert [message["content"] for message in page.sent["messages"]] == ["Hello", "Hi", "Short"]


def test_a_refused_setting_can_be_reached_from_its_message(page: Page) -> None:
    page.ask("Hello", Refusal(400, error("must be above 0", param="repetition_penalty")))
    page.ends("failed")
    page.tab.click(".failure .plain:last-child")
    page.tab.wait("document.activeElement.id === 'repetition_penalty'")
    assert page.tab.evaluate("document.activeElement.checkVisibility()") is True


def test_an_error_midway_keeps_what_had_come(page: Page) -> None:
    page.ask("Hello", [delta("Once upon"), {"error": error("the engine has stopped", code="aborted")}])
    page.ends("failed")
    assert page.tab.text(".answer > .prose") == "Once upon"
    assert "The answer broke off" in page.tab.text(".failure")
    assert "the engine has stopped" in page.tab.text(".failure")
    page.ask("Go on", said("a time"))
    page.ends()
    assert [message["content"] for message in page.sent["messages"]] == ["Hello", "Once upon", "Go on"]


def test_a_stream_that_ends_early_is_no_whole_answer(page: Page) -> None:
    page.ask("Hello", [delta("Once upon"), Break()])
    page.ends("failed")
    assert page.tab.text(".answer > .prose") == "Once upon"
    assert "The connection broke" in page.tab.text(".failure")


def test_a_server_that_is_gone_is_told_and_found_again(page: Page) -> None:
    offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.tab.call("Network.emulateNetworkConditions", offline)
    page.ask("Hello")
    page.ends("failed")
    assert "could not be reached" in page.tab.text(".failure")
    page.tab.call("Network.emulateNetworkConditions", offline | {"offline": False})
    page.server.answers = [said("Hi")]
    page.tab.click(".failure .again")
    page.ends()


def test_a_failed_question_leaves_no_empty_answer_in_the_conversation(page: Page) -> None:
    page.ask("Hello", Refusal(500, error("internal error")))
    page.ends("failed")
    page.ask("Again", said("Hi"))
    page.ends()
    assert [message["role"] for message in page.sent["messages"]] == ["user", "user"]


def test_a_page_of_a_proxy_is_no_answer(page: Page) -> None:
    script = (
        "window.fetch = async () => new Response('<h1>Hi</h1>', {headers: {'content-type': 'text/html'}})"
    )
    page.tab.evaluate(script)
    page.ask("Hello")
    page.ends("failed")
    assert "Something else answered" in page.tab.text(".failure")
    assert page.tab.evaluate(f"{LAST}.querySelectorAll('.failure h1').length") == 0


def test_a_server_that_wants_a_key_gets_it_for_models_and_answers(browser: Chromium, page: Page) -> None:
    page.server.models = Refusal(401, error("a key is needed"))
    page.tab.open(page.server.url)
    page.tab.wait("!document.querySelector('#notice').hidden")
    assert "wants a valid API key" in page.tab.text("#notice")
    page.tab.click("#notice .plain:last-child")
    page.tab.wait("document.activeElement.id === 'key'")
    page.server.models = ("toy",)
    page.tab.type("secret-1")
    page.tab.press("Tab")
    page.tab.wait("document.querySelector('#notice').hidden")
    assert page.server.headers[-1]["authorization"] == "Bearer secret-1"
    page.ask("Hello", said("Hi"))
    page.ends()
    assert page.server.headers[-1]["authorization"] == "Bearer secret-1"
    assert "secret-1" not in json.dumps(page.sent)


def test_a_message_is_kept_while_there_is_no_model(page: Page) -> None:
    page.server.models = Refusal(503, error("starting"), {"retry-after": "1"})
    page.tab.open(page.server.url)
    page.tab.wait("!document.querySelector('#notice').hidden")
    assert "in a second" in page.tab.text("#notice")
    # The page asks for models again before it sends; the new notice says that it has the answer.
    page.tab.evaluate("document.querySelector('#notice .plain').dataset.first = 'yes'")
    page.ask("Hello")
    page.tab.wait("document.querySelector('#notice .plain:not([data-first])')")
    assert page.tab.evaluate("document.querySelector('#question').value") == "Hello"
    page.server.models = ("toy",)
    page.tab.click("#notice .plain")
    page.tab.wait("document.querySelector('#model').value === 'toy'")
    page.server.answers = [said("Hi")]
    page.tab.click("#send")
    page.ends()
