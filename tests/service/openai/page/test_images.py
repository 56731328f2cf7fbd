"""Images of a message: chosen, dropped, pasted, shown, sent, edited and taken away."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.openai.page.rig import Page, opened
from tests.service.openai.page.stand_in import said
from tools.page.chromium import Chromium

pytestmark = pytest.mark.sweep

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
GIVE = """((kind, files) => {
  const data = new DataTransfer();
  for (const [name, type, bytes] of files) data.items.add(new File([new Uint8Array(bytes)], name, { type }));
  const form = document.querySelector("#composer");
  if (kind === "choose") {
    const chooser = document.querySelector("#image");
    chooser.files = data.files;
    chooser.dispatchEvent(new Event("change"));
  } else {
    const options = { bubbles: true, cancelable: true };
    form.dispatchEvent(kind === "drop"
      ? new DragEvent("drop", { ...options, dataTransfer: data })
      : new ClipboardEvent("paste", { ...options, clipboardData: data }));
  }
})(%s, %s)"""


@pytest.fixture
def page(browser: Chromium) -> Iterator[Page]:
    """Yield the page of a server whose model takes images."""
    with opened(browser, seeing=("toy",)) as page:
        page.tab.wait("!document.querySelector('#add-image').hidden")
        yield page


def give(page: Page, kind: str, *names: str, media_type: str = "image/png") -> None:
    """Choose, drop or paste files of these names."""
    files = [[name, media_type, list(PNG)] for name in names]
    page.tab.evaluate(GIVE % (json.dumps(kind), json.dumps(files)))


def chosen(page: Page) -> list[str]:
    return page.tab.each("#images img", "one.alt")


def has(page: Page, *names: str) -> None:
    """Wait until exactly these images go with the message."""
    images = "[...document.querySelectorAll('#images img')].map((one) => one.alt)"
    page.tab.wait(f"JSON.stringify({images}) === {json.dumps(json.dumps(names, separators=(',', ':')))}")


def image(url: str = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("kind", ["choose", "drop", "paste"])
def test_an_image_is_sent_before_the_text_and_shown_in_the_conversation(page: Page, kind: str) -> None:
    give(page, kind, "one.png")
    has(page, "one.png")
    page.ask("What is it?", said("A dot."))
    page.ends()
    assert page.sent["messages"] == [
        {"role": "user", "content": [image(), {"type": "text", "text": "What is it?"}]}
    ]
    assert page.tab.each(".turn.user img", "one.src") == [URL]
    page.tab.wait(
        "document.querySelector('.turn.user img').naturalWidth === 1"
    )  # the policy lets it be shown
    assert chosen(page) == []
    page.ask("Sure?", said("Yes."))
    page.ends()
    assert page.sent["messages"][0]["content"][0] == image()
    assert page.sent["messages"][2] == {"role": "user", "content": "Sure?"}


def test_images_alone_are_a_message_and_one_can_be_removed(page: Page) -> None:
    assert page.tab.evaluate("document.querySelector('#send').getAttribute('aria-disabled')") == "true"
    give(page, "choose", "one.png", "two.png", "three.png")
    has(page, "one.png", "two.png", "three.png")
    page.tab.click("#images li:nth-child(2) button")
    has(page, "one.png", "three.png")
    page.server.answers.append(said("Two dots."))
    page.tab.click("#send")
    page.ends()
    assert page.sent["messages"] == [{"role": "user", "content": [image(), image()]}]


def test_a_message_that_is_edited_has_its_images_again(page: Page) -> None:
    give(page, "choose", "one.png")
    has(page, "one.png")
    page.ask("What?", said("A dot."))
    page.ends()
    page.tab.click(".turn.user button")
    has(page, "one.png")
    page.ask(" Really?", said("Yes."))
    page.ends()
    content = page.sent["messages"][0]["content"]
    assert content == [image(), {"type": "text", "text": "What? Really?"}]
    assert len(page.sent["messages"]) == 1


def test_what_is_no_image_is_said_and_left_out(page: Page) -> None:
    give(page, "drop", "notes.txt", media_type="text/plain")
    page.tab.wait("document.querySelector('#said').textContent.includes('PNG, JPEG, WebP or GIF')")
    assert chosen(page) == []


def test_a_model_that_reads_text_gets_no_images(browser: Chromium) -> None:
    with opened(browser) as page:
        assert page.tab.evaluate("document.querySelector('#add-image').hidden") is True
        give(page, "paste", "one.png")
        give(page, "drop", "one.png")
        page.ask("Hello", said("Hi"))
        page.ends()
        assert page.sent["messages"] == [{"role": "user", "content": "Hello"}]
