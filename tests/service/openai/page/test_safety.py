"""Whatever a model, a tool or a server says is shown as text, and the page talks with nobody else."""

from __future__ import annotations

import json

import pytest

from tests.service.openai.page.rig import Page
from tests.service.openai.page.stand_in import Refusal, called, delta, said

pytestmark = pytest.mark.sweep

BAD = [
    "<img src=x onerror=window.harmed=1>",
    "<script>window.harmed=1</script>",
    "<svg onload=window.harmed=1>",
    "<iframe srcdoc='<script>parent.harmed=1</script>'></iframe>",
    "[link](javascript:window.harmed=1)",
    "![image](https://example.com/leak.png)",
    "<style>body{display:none}</style>",
    "<a href='https://example.com/'>x</a>",
    "</p></div></main><h1>owned</h1>",
    "{{constructor.constructor('window.harmed=1')()}}",
]
ALL = "\n\n".join(BAD)


def check(page: Page, place: str) -> None:
    """All of it is readable as it was written, and nothing of it has become an element or a request."""
    shown = page.tab.evaluate(f"document.querySelector({json.dumps(place)}).textContent")
    for text in BAD:
        assert text in shown
    made = (
        "img, script:not([src]), iframe, style, a:not(.skip), h1:not(.hidden), svg[onload], link[href^=http]"
    )
    assert page.tab.evaluate(f"document.body.querySelectorAll({json.dumps(made)}).length") == 0
    assert page.tab.evaluate("typeof window.harmed") == "undefined"
    assert {url for url in page.tab.asked if not url.startswith((page.server.url, "about:"))} == set()


def test_an_answer_is_text(page: Page) -> None:
    page.ask("Hello", [delta(ALL), delta(finish="stop")])
    page.ends()
    check(page, ".answer > .prose")


def test_an_answer_in_pieces_is_text(page: Page) -> None:
    page.ask(
        "Hello", [*(delta(letter, tokens=at + 1) for at, letter in enumerate(ALL)), delta(finish="stop")]
    )
    page.ends()
    check(page, ".answer > .prose")


def test_an_answer_as_it_was_written_is_text(page: Page) -> None:
    page.tab.click("#open-settings")
    page.tab.click("#formatted")
    page.ask("Hello", [delta(ALL), delta(finish="stop")])
    page.ends()
    check(page, ".answer > .prose")


@pytest.mark.parametrize(
    "form",
    [
        "```{0}\n{0}\n```",
        "# {0}",
        "- {0}",
        "> {0}",
        "**{0}**",
        "`{0}`",
        "a|b\n-|-\n{0}|{0}",
        "1. {0}\n   - {0}",
    ],
)
def test_every_kind_of_block_is_text(page: Page, form: str) -> None:
    page.ask("Hello", [delta("\n\n".join(form.format(text) for text in BAD)), delta(finish="stop")])
    page.ends()
    check(page, ".answer > .prose")


def test_reasoning_is_text(page: Page) -> None:
    page.ask("Hello", [delta(reasoning=ALL), *said("Done.")])
    page.ends()
    check(page, ".reasoning")


def test_calls_and_results_are_text(page: Page) -> None:
    page.tab.click(".toggle")
    arguments = json.dumps(ALL).replace("/", "\\/")
    page.ask("Hello", called(ALL, arguments), said("Done."))
    page.ends()
    check(page, ".call summary")  # the name
    assert "There is no tool named <img" in page.tab.evaluate("document.querySelector('.call').textContent")


def test_arguments_are_text(page: Page) -> None:
    page.tab.click(".toggle")
    page.ask("Hello", called("get_weather", ALL), said("Done."))
    page.ends()
    check(page, "[data-part=arguments]")


def test_a_question_is_text(page: Page) -> None:
    page.ask(ALL, said("Hi"))
    page.ends()
    check(page, ".user")


def test_errors_are_text(page: Page) -> None:
    page.ask("Hello", Refusal(400, {"message": ALL, "type": ALL, "param": ALL, "code": ALL}))
    page.ends("failed")
    check(page, ".failure .words")


def test_names_of_models_are_text(page: Page) -> None:
    page.server.models = [ALL]
    page.tab.open(page.server.url)
    page.tab.wait("document.querySelector('#model').value.length > 10")
    check(page, "#model")


def test_errors_of_the_list_of_models_are_text(page: Page) -> None:
    page.server.models = Refusal(500, {"message": ALL})
    page.tab.open(page.server.url)
    page.tab.wait("!document.querySelector('#notice').hidden")
    check(page, "#notice")


def test_the_browser_itself_refuses_what_the_page_never_does(page: Page) -> None:
    """The second wall: the policy holds even if the page's code had a defect."""
    with pytest.raises(Exception, match="TrustedHTML"):
        page.tab.evaluate("document.body.innerHTML = '<b>x</b>'")
    assert page.tab.evaluate("fetch('https://example.com/').then(() => 'sent', () => 'refused')") == "refused"
    script = """new Promise((done) => {
      const image = document.createElement("img");
      image.onload = () => done("loaded");
      image.onerror = () => done("refused");
      image.src = "https://example.com/x.png";
      document.body.append(image);
    })"""
    assert page.tab.evaluate(script) == "refused"
    assert all("Content Security Policy" in text or "Trusted" in text for text in page.tab.complaints)
    assert page.tab.complaints
    page.tab.complaints.clear()


def test_marks_that_are_never_closed_do_not_freeze_the_page(page: Page) -> None:
    """Looking for the end of each through the whole rest would take minutes."""
    blank = " " * 200_000
    lines = [
        f"# x{blank}x",
        f"``` {blank}`",
        f"- {blank}x",
        f"|{blank}|{blank}x",
        f"-{blank}x",
        "#" * 200_000,
    ]
    whole = "\n\n".join(["**a " * 120_000, *lines, "x" + "`" * 5_000])
    page.ask("Hello", [delta(whole), delta(finish="stop")])
    page.ends()
    page.tab.click("#new-chat")
    assert page.tab.texts(".turn") == []
