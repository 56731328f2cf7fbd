"""The page by keyboard, by screen reader, on a telephone, and in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.service.openai.page.rig import Page, opened
from tests.service.openai.page.stand_in import Hold, Refusal, called, delta, said
from tools.page.chromium import Chromium

pytestmark = pytest.mark.sweep

CONTRAST = """(() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [x, y, z] = [r, g, b].map((c) => linear(c / 255));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = rgba(getComputedStyle(one).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    const element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility()) continue;
    if (element.closest(".hidden, .skip, noscript, select")) continue;
    const [a, b] = [light(rgba(getComputedStyle(element).color)), light(ground(element))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.data.trim().slice(0, 40)]);
  }
  return found;
})()"""
"""The contrast of each text with what is behind it, by the formula of WCAG 2."""


@pytest.fixture(params=["light", "dark"])
def full(browser: Chromium, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Yield a page that shows one of everything."""
    with opened(browser, dark=request.param == "dark") as page:
        page.tab.click("#open-settings")
        page.tab.click(".toggle")
        page.tab.click(".more summary")
        page.tab.choose("#response_format", "json_schema")
        page.ask(
            "Weather?",
            called("get_weather", '{"city": "Paris"}'),
            [delta(reasoning="Hm."), *said("A `b`\n\n```c\nd\n```\n\n> e")],
        )
        page.shows("A ")
        page.ends()
        page.ask("More", Refusal(400, {"message": "no", "param": "temperature", "code": "invalid"}))
        page.ends("failed")
        yield page


def test_all_text_has_enough_contrast(full: Page) -> None:
    found = full.tab.evaluate(CONTRAST)
    assert len(found) > 40
    assert [(round(ratio, 2), text) for ratio, text in found if ratio < 4.5] == []


def tree(page: Page) -> list[dict[str, Any]]:
    """Return what assistive programs are told of the page."""
    page.tab.call("Accessibility.enable")
    nodes: list[dict[str, Any]] = page.tab.call("Accessibility.getFullAXTree")["nodes"]
    return [node for node in nodes if not node["ignored"]]


def test_every_control_has_a_name(full: Page) -> None:
    roles = {
        "button",
        "textbox",
        "combobox",
        "checkbox",
        "radio",
        "spinbutton",
        "dialog",
        "list",
        "DisclosureTriangle",
    }
    controls = [node for node in tree(full) if node["role"]["value"] in roles]
    names = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in controls}
    assert {
        ("textbox", "Message"),
        ("button", "Send"),
        ("combobox", "Model"),
        ("dialog", "Settings"),
    } <= names
    assert {("spinbutton", "Temperature"), ("checkbox", "Demo tools"), ("textbox", "API key")} <= names
    # Lists inside an answer are the model's own; all others are named.
    assert [role for role, name in names if not name and role != "list"] == []


def test_headings_are_in_order(full: Page) -> None:
    levels = full.tab.each("h1, h2, h3, h4", "Number(one.tagName[1])")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_a_whole_conversation_by_keyboard_alone(page: Page) -> None:
    """The message field has the focus from the start."""
    page.server.answers = [[delta("One"), Hold(), *said(" two")], said("Three")]
    page.tab.type("Hello")
    page.tab.press("Tab")  # to the switch for tools
    page.tab.press("Tab")
    assert page.tab.evaluate("document.activeElement.id") == "send"
    page.tab.press("Enter")
    page.shows("One")
    assert page.tab.evaluate("document.activeElement.id") == "stop", (
        "the focus goes on to the button in its place"
    )
    page.tab.press("Enter")
    page.ends("stopped")
    assert page.tab.evaluate("document.activeElement.id") == "question"
    page.tab.type("Again")
    page.tab.press("Enter")
    page.ends()
    assert page.tab.text(".answer:last-child .prose") == "Three"


def test_every_control_can_be_reached_with_tab(full: Page) -> None:
    reached = []
    for _ in range(80):
        full.tab.press("Tab")
        one = "document.activeElement"
        reached.append(full.tab.evaluate(f"{one}.id || {one}.getAttribute('aria-label') || {one}.innerText"))
    assert "Skip to the message field" in reached
    wanted = {
        "model",
        "new-chat",
        "open-settings",
        "question",
        "tools",
        "send",
        "system",
        "temperature",
        "schema",
        "key",
        "defaults",
    }
    assert wanted <= set(reached)
    assert {
        "Copy this answer",
        "Edit this message",
        "Try again",
        "Open the settings",
        "Copy this code",
    } <= set(reached)


def test_what_has_the_focus_is_seen(full: Page) -> None:
    for selector in ("#new-chat", "#temperature", ".call summary", "[name=theme]", "#tools"):
        full.tab.evaluate(f"document.querySelector('{selector}').focus({{focusVisible: true}})")
        near = f"{selector}, {selector} + *, :has(> {selector})"
        outlines = full.tab.each(near, "[getComputedStyle(one).outlineStyle, getComputedStyle(one).opacity]")
        assert ["solid", "1"] in outlines, selector


def test_a_screen_reader_hears_an_answer_once_and_whole(page: Page) -> None:
    page.ask("Hello", [delta("One "), Hold(), *said("two")])
    page.shows("One")
    assert page.tab.text("#said") == "The model is answering."
    assert page.tab.evaluate("document.querySelector('.turns').closest('[aria-live], [role=log]')") is None
    page.server.release()
    page.ends()
    assert page.tab.text("#said") == "The model answered: One two"


def test_the_settings_lie_above_a_narrow_page_and_give_the_focus_back(browser: Chromium) -> None:
    with opened(browser, width=390, height=780, touch=True) as page:
        assert page.tab.evaluate("document.querySelector('#panel').open") is False
        page.tab.click("#open-settings")
        assert page.tab.evaluate("document.querySelector('#panel').matches(':modal')") is True
        assert page.tab.evaluate("document.querySelector('#panel').contains(document.activeElement)") is True
        page.tab.press("Escape")
        page.tab.wait("!document.querySelector('#panel').open")
        assert page.tab.evaluate("document.activeElement.id") == "open-settings"
        page.tab.wait("document.querySelector('#open-settings').getAttribute('aria-expanded') === 'false'")


def test_the_settings_stand_beside_a_wide_page_and_are_as_they_were_left(page: Page) -> None:
    """At the first visit they are closed. Of what is in them, the key is in view at once."""
    assert page.tab.evaluate("document.querySelector('#panel').open") is False
    page.tab.click("#open-settings")
    assert page.tab.evaluate("document.querySelector('#panel').matches('[open]:not(:modal)')") is True
    for field in ("#key", "[name=theme]", "#temperature"):
        assert page.tab.each(field, "one.getBoundingClientRect().bottom")[0] <= 800
    page.tab.open(page.server.url)
    page.tab.wait("document.querySelector('#panel').open")
    page.tab.size(600, 800)
    page.tab.wait("!document.querySelector('#panel').open")
    page.tab.size(1280, 800)
    page.tab.wait("document.querySelector('#panel').open")
    page.tab.click("#close-settings")
    page.tab.open(page.server.url)
    page.tab.wait("document.querySelector('#model').value === 'toy'")
    assert page.tab.evaluate("document.querySelector('#panel').open") is False


@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1280, 1920])
def test_nothing_is_cut_off_at_any_width(browser: Chromium, width: int) -> None:
    with opened(browser, width=width, height=700) as page:
        long = "word" * 80
        page.ask(
            long, [delta(f"{long}\n\n```{long}\n{long}\n```\n\n- {long}\n\n`{long}`"), delta(finish="stop")]
        )
        page.ends()
        page.ask("Go", Refusal(400, {"message": long, "param": long, "code": long}))
        page.ends("failed")
        page.server.models = Refusal(401, {"message": "a key is needed, which you can ask the operator for"})
        page.tab.evaluate("document.querySelector('#key').dispatchEvent(new Event('change'))")
        page.tab.wait("!document.querySelector('#notice').hidden")
        assert page.tab.each("#notice", "one.getBoundingClientRect().height")[0] < 250
        assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        right = "one.closest('pre, .hidden') ? 0 : one.getBoundingClientRect().right"
        assert max(page.tab.each(".turns *", right)) <= width
        box = page.tab.each(
            "#send", "[one.getBoundingClientRect().bottom, one.getBoundingClientRect().right]"
        )[0]
        assert box[0] <= 700
        assert box[1] <= width


def test_on_a_telephone_enter_begins_a_line_and_fields_are_large_enough(browser: Chromium) -> None:
    with opened(browser, width=390, height=780, touch=True) as page:
        page.tab.click("#question")
        page.tab.type("One")
        page.tab.press("Enter")
        page.tab.type("two")
        assert page.tab.evaluate("document.querySelector('#question').value") == "One\ntwo"
        page.server.answers = [said("Hi")]
        page.tab.click("#send")
        page.ends()
        page.tab.click("#open-settings")
        sizes = page.tab.each(
            ".field :is(input, select, textarea)", "parseFloat(getComputedStyle(one).fontSize)"
        )
        assert min(sizes) >= 16, "iOS zooms into smaller ones"
        boxes = page.tab.each("button, select", "one.getBoundingClientRect().height")
        assert min(boxes) >= 24, "the least size of a target in WCAG 2.2"
