"""The page in a browser, with a server that answers as a test says."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from tests.service.openai.page.stand_in import Answer, StandIn, standing_in
from tests.support.toolchains import refuse
from tools.page.chromium import Chromium, Tab, find_chromium

LAST = "document.querySelector('.turns').lastElementChild"
"""The newest turn, in the page's language."""


@contextlib.contextmanager
def running_browser() -> Iterator[Chromium]:
    """Run a headless Chromium. Without one the test is skipped, or fails where toolchains are required."""
    program = find_chromium()
    if program is None:
        refuse("no chromium here: install Debian's package chromium")
    browser = Chromium(program)
    try:
        yield browser
    finally:
        browser.close()


class Page:
    """The page, and what a user does on it."""

    def __init__(self, tab: Tab, server: StandIn) -> None:
        self.tab = tab
        self.server = server

    def ask(self, text: str, *answers: Answer) -> None:
        """Write a message and send it. The server gives these answers."""
        self.server.answers += answers
        self.tab.click("#question")
        self.tab.type(text)
        self.tab.press("Enter")

    def ends(self, state: str = "done") -> None:
        """Wait until nothing runs any more and the newest answer has ended so."""
        self.tab.wait(
            f"{LAST}?.dataset.state === {json.dumps(state)} && !document.querySelector('#send').hidden"
        )

    def shows(self, text: str) -> None:
        """Wait until the newest turn shows this text."""
        self.tab.wait(f"{LAST}?.innerText.includes({json.dumps(text)})")

    @property
    def sent(self) -> dict[str, Any]:
        """The newest request's body."""
        return self.server.bodies[-1]


@contextlib.contextmanager
def opened(browser: Chromium, *, seeing: Sequence[str] = (), **options: Any) -> Iterator[Page]:
    """Open the page in a tab of its own, once it knows its models, of which those named in `seeing` take
    images; it must end without an error.
    """
    with standing_in() as server, browser.tab(**options) as tab:
        server.seeing = seeing
        page = Page(tab, server)
        tab.open(server.url)
        tab.wait("document.querySelector('#model').value === 'toy'")
        yield page
        # The browser itself logs each refused request.
        assert [text for text in tab.complaints if not text.startswith("Failed to load resource")] == []
