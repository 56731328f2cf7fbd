"""The settings: what is sent of them, what is checked, and what is kept."""

from __future__ import annotations

import json

import pytest

from tests.service.openai.page.rig import Page
from tests.service.openai.page.stand_in import said
from tools.page.chromium import Chromium

pytestmark = pytest.mark.sweep

NUMBERS = {
    "temperature": 0.7,
    "top_p": 0.9,
    "max_tokens": 40,
    "seed": 7,
    "top_k": 20,
    "min_p": 0.05,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.1,
}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.fixture(autouse=True)
def shown(page: Page) -> None:
    """Open the settings."""
    page.tab.click("#open-settings")


def ask(page: Page) -> None:
    page.ask("Hello", said("Hi"))
    page.ends()


def test_every_setting_is_sent_under_its_name(page: Page) -> None:
    page.tab.click(".more summary")
    for name, value in NUMBERS.items():
        page.tab.fill(f"#{name}", str(value))
    page.tab.fill("#system", "Be brief.")
    page.tab.fill("#stop_strings", "END\n\n###")
    page.tab.choose("#reasoning_effort", "low")
    ask(page)
    assert page.sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: page.sent[name] for name in NUMBERS} == NUMBERS
    assert page.sent["stop"] == ["END", "###"]
    assert page.sent["reasoning_effort"] == "low"


def test_zero_is_sent_and_empty_is_not(page: Page) -> None:
    page.tab.fill("#temperature", "0")
    ask(page)
    assert page.sent["temperature"] == 0
    page.tab.fill("#temperature", "")
    ask(page)
    assert "temperature" not in page.sent


def test_json_is_asked_for(page: Page) -> None:
    page.tab.choose("#response_format", "json_object")
    assert page.tab.text("#format-flag") == "JSON object"
    ask(page)
    assert page.sent["response_format"] == {"type": "json_object"}
    page.tab.choose("#response_format", "json_schema")
    assert json.loads(page.tab.evaluate("document.querySelector('#schema').value"))["type"] == "object"
    page.tab.fill("#schema", json.dumps(SCHEMA))
    ask(page)
    form = {"name": "answer", "strict": True, "schema": SCHEMA}
    assert page.sent["response_format"] == {"type": "json_schema", "json_schema": form}


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", "3"), ("max_tokens", "0"), ("max_tokens", "1.5"), ("top_p", "-1")]
)
def test_a_number_that_cannot_be_is_shown_instead_of_sent(page: Page, field: str, value: str) -> None:
    page.tab.fill(f"#{field}", value)
    page.tab.click("#close-settings")
    page.ask("Hello")
    page.tab.wait(f"document.activeElement.id === '{field}'")
    assert page.server.bodies == []
    assert page.tab.evaluate("document.querySelector('#question').value") == "Hello"
    page.tab.fill(f"#{field}", "1")
    page.server.answers = [said("Hi")]
    page.tab.click("#send")
    page.ends()


@pytest.mark.parametrize(
    ("text", "why"), [("{", "This is not JSON"), ("[]", "A JSON Schema is a JSON object.")]
)
def test_a_schema_that_is_none_is_shown_instead_of_sent(page: Page, text: str, why: str) -> None:
    page.tab.choose("#response_format", "json_schema")
    page.tab.fill("#schema", text)
    page.ask("Hello")
    page.tab.wait("document.activeElement.id === 'schema'")
    assert why in page.tab.evaluate("document.activeElement.validationMessage")
    assert page.server.bodies == []
    page.tab.choose("#response_format", "text")  # then the schema does not matter
    page.server.answers = [said("Hi")]
    page.tab.click("#send")
    page.ends()


def test_settings_outlive_the_visit_and_the_key_outlives_no_tab(page: Page) -> None:
    page.tab.fill("#temperature", "0.5")
    page.tab.fill("#system", "Be brief.")
    page.tab.fill("#key", "secret-1")
    page.tab.click(".toggle")
    page.tab.open(page.server.url)
    page.tab.wait("document.querySelector('#model').value === 'toy'")
    ask(page)
    assert page.sent["temperature"] == 0.5
    assert page.sent["messages"][0]["content"] == "Be brief."
    assert page.sent["tools"]
    assert page.server.headers[-1]["authorization"] == "Bearer secret-1", "the tab is still the same"
    kept = page.tab.evaluate("JSON.stringify(Object.values(localStorage))")
    assert "Be brief." in kept
    assert "secret-1" not in kept
    assert page.tab.evaluate("Object.values(sessionStorage).join()") == "secret-1"
    page.tab.fill("#key", "")
    assert page.tab.evaluate("Object.values(sessionStorage).length") == 0


def test_kept_settings_that_cannot_be_read_do_no_harm(page: Page) -> None:
    bad = {"temperature": "<b>", "tools": 3, "response_format": "none", "theme": 7, "top_p": 0.5}
    for kept in ("{", "null", "[]", '"x"', json.dumps(bad)):
        page.tab.evaluate(f"localStorage.setItem('penstock.settings', {json.dumps(kept)})")
        page.tab.open(page.server.url)
        page.tab.wait("document.querySelector('#model').value === 'toy'")
    ask(page)
    assert page.sent["top_p"] == 0.5
    assert "temperature" not in page.sent
    assert "response_format" not in page.sent


def test_the_chosen_model_is_asked_and_remembered(page: Page) -> None:
    page.server.models = ("toy", "other/model-2")
    for _ in range(2):
        page.tab.open(page.server.url)
        page.tab.wait("document.querySelector('#model').options.length === 2")
        page.tab.choose("#model", "other/model-2")
    page.tab.open(page.server.url)
    page.tab.wait("document.querySelector('#model').value === 'other/model-2'")
    ask(page)
    assert page.sent["model"] == "other/model-2"
    assert page.tab.evaluate("document.title") == "other/model-2 · Penstock"


def test_the_defaults_can_be_had_back(page: Page) -> None:
    page.tab.fill("#temperature", "0.5")
    page.tab.fill("#key", "secret-1")
    page.tab.click("#defaults")
    ask(page)
    assert "temperature" not in page.sent
    assert page.sent["model"] == "toy"
    assert page.server.headers[-1]["authorization"] == "Bearer secret-1"


def test_a_page_without_storage_works(page: Page) -> None:
    """As where the browser is told to keep nothing."""
    source = """for (const name of ["localStorage", "sessionStorage"]) {
      Object.defineProperty(window, name, { get() { throw new Error("no"); } });
    }"""
    page.tab.call("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    page.tab.open(page.server.url)
    page.tab.wait("document.querySelector('#model').value === 'toy'")
    page.tab.click("#open-settings")
    page.tab.fill("#temperature", "0.5")
    ask(page)
    assert page.sent["temperature"] == 0.5


@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_theme_is_the_systems_until_one_is_chosen(browser: Chromium, page: Page, system: str) -> None:
    scheme = [{"name": "prefers-color-scheme", "value": system}]
    page.tab.call("Emulation.setEmulatedMedia", {"features": scheme})
    other = {"light": "dark", "dark": "light"}[system]
    assert background(page) == system
    page.tab.click(f"[name=theme][value={other}]")
    assert background(page) == other
    page.tab.open(page.server.url)
    assert background(page) == other
    page.tab.click("[name=theme][value=system]")
    assert background(page) == system


def background(page: Page) -> str:
    """Say whether the page is light or dark."""
    color = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    channels = [int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(",")]
    return "light" if sum(channels) > 3 * 128 else "dark"
