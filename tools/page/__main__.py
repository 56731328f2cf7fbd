"""Takes the pictures of the web page in docs/images: `python -m tools.page http://127.0.0.1:8000/`.

What is asked is a server that runs, such as that of `penstock serve demo --openai-port 8000`: nothing on the
pictures is made up but the weather. Debian's packages `chromium` and `fonts-inter` make them look as they do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.page.chromium import Chromium, Tab, find_chromium

IMAGES = Path(__file__).parents[2] / "docs" / "images"
QUESTIONS = ("Tell me a short story about a fox.", "What is the weather in Paris?")
DONE = "document.querySelector('.turns').lastElementChild?.dataset.state === 'done'"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.page", description=__doc__)
    parser.add_argument("url", help="where the page is, such as http://127.0.0.1:8000/")
    url: str = parser.parse_args().url
    program = find_chromium()
    if program is None:
        parser.error("there is no chromium on the PATH")
    browser = Chromium(program)
    try:
        with browser.tab(width=1120, height=700, scale=2) as tab:
            _converse(tab, url)
            tab.save_picture(IMAGES / "page-light.webp")
        with browser.tab(width=1120, height=700, scale=2, dark=True) as tab:
            _open(tab, url)
            _ask(tab, QUESTIONS[0])
            tab.save_picture(IMAGES / "page-dark.webp")
        with browser.tab(width=390, height=780, scale=2, touch=True) as tab:
            _converse(tab, url)
            tab.save_picture(IMAGES / "page-narrow.webp")
    finally:
        browser.close()


def _open(tab: Tab, url: str) -> None:
    tab.open(url)
    tab.wait("document.querySelector('#model').value")
    # The same seed gives the same story in all pictures.
    tab.evaluate("document.querySelector('#seed').value = 7")


def _converse(tab: Tab, url: str) -> None:
    """A sum, and a question for which the model calls a tool."""
    _open(tab, url)
    _ask(tab, "What is 3 + 4?")
    tab.click(".toggle")
    _ask(tab, QUESTIONS[1], answers=3)
    assert tab.texts(".call .status") == ["returned"], "the model has called its tool"


def _ask(tab: Tab, question: str, answers: int = 1) -> None:
    tab.click("#question")
    tab.type(question)
    tab.click("#send")
    tab.wait(f"document.querySelectorAll('.answer').length === {answers} && {DONE}")
    tab.evaluate("document.activeElement.blur()")


if __name__ == "__main__":
    main()
