"""Takes the pictures of the web page in docs/images: `python -m tools.page http://127.0.0.1:8000/`.

What is asked is a server that runs, such as that of `penstock serve demo --openai-port 8000`: nothing on the
pictures is made up but the weather. Debian's packages `chromium` and `fonts-inter` make them look as they do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.page.chromium import Chromium, Tab, find_chromium

IMAGES = Path(__file__).parents[2] / "docs" / "images"
DONE = "document.querySelector('.turns').lastElementChild?.dataset.state === 'done'"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.page", description=__doc__)
    parser.add_argument("url", help="where the page is, such as http://127.0.0.1:8000/")
    url: str = parser.parse_args().url
    program = find_chromium()
    if program is None:
        parser.error("there is no chromium on the PATH")
    browser = Chromium(program)
    try:
        with browser.tab(width=1120, height=740, scale=1.5) as tab:
            _open(tab, url)
            _ask(tab, "What is 3 + 4?")
            _ask_with_tool(tab, "What is the weather in Paris?")
            tab.save_picture(IMAGES / "page-light.webp")
        with browser.tab(width=1120, height=740, scale=1.5, dark=True) as tab:
            _open(tab, url)
            _ask(tab, "Tell me a short story.")
            tab.save_picture(IMAGES / "page-dark.webp")
        with browser.tab(width=390, height=780, scale=1.5, touch=True) as tab:
            _open(tab, url)
            _ask_with_tool(tab, "What is the weather in Paris?")
            tab.save_picture(IMAGES / "page-narrow.webp")
    finally:
        browser.close()


def _open(tab: Tab, url: str) -> None:
    tab.open(url)
    tab.wait("document.querySelector('#model').value")
    tab.evaluate("document.querySelector('#seed').value = 7")  # so that a later run shows the same answers


def _ask_with_tool(tab: Tab, question: str) -> None:
    tab.click(".toggle")
    _ask(tab, question, answers=2)
    assert tab.texts(".call .status") == ["returned"], "the model has called its tool"


def _ask(tab: Tab, question: str, answers: int = 1) -> None:
    """Ask, and wait for as many answers: a call of a tool is one, and what follows its result another."""
    there = len(tab.texts(".answer"))
    tab.click("#question")
    tab.type(question)
    tab.click("#send")
    tab.wait(f"document.querySelectorAll('.answer').length === {there + answers} && {DONE}")
    tab.evaluate("document.activeElement.blur()")


if __name__ == "__main__":
    main()
