"""What a user asks and reads, in a real browser."""

from __future__ import annotations

import pytest

from tests.service.openai.page.rig import LAST, Page
from tests.service.openai.page.stand_in import WAIT_S, Hold, delta, said

pytestmark = pytest.mark.sweep


def test_text_is_shown_while_it_comes(page: Page) -> None:
    page.ask("Hello", [delta("One "), delta("two", tokens=2), Hold(), *said(" three")])
    page.shows("One two")
    assert page.tab.evaluate(f"{LAST}.dataset.state") == "streaming"
    assert page.tab.evaluate(f"{LAST}.getAttribute('aria-busy')") == "true"
    assert "three" not in page.tab.text(".turns")
    page.server.release()
    page.ends()
    assert page.tab.text(".answer .prose") == "One two three"
    assert page.tab.evaluate(f"{LAST}.getAttribute('aria-busy')") == "false"


def test_the_request_holds_the_conversation_and_asks_for_a_stream_with_usage(page: Page) -> None:
    page.ask("What is 3 + 4?", said("3 + 4 = 7."))
    page.ends()
    page.ask("And 5?", said("12"))
    page.ends()
    assert page.sent == {
        "model": "toy",
        "messages": [
            {"role": "user", "content": "What is 3 + 4?"},
            {"role": "assistant", "content": "3 + 4 = 7."},
            {"role": "user", "content": "And 5?"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def test_while_nothing_has_come_the_page_says_so(page: Page) -> None:
    page.ask("Hello", [Hold(), *said("Hi")])
    page.shows("Waiting for the first token")
    page.server.release()
    page.ends()
    assert "Waiting" not in page.tab.text(".answer")


def test_the_stop_button_closes_the_request_and_keeps_the_text(page: Page) -> None:
    page.ask("Hello", [delta("Once upon"), Hold(), *said(" a time")])
    page.shows("Once upon")
    page.tab.click("#stop")
    page.ends("stopped")
    assert page.server.left.wait(WAIT_S), "the server sees that its client has gone"
    assert page.tab.text(".answer .prose") == "Once upon"
    assert "You stopped this answer." in page.tab.text(".answer")
    page.ask("Go on", said("a time"))
    page.ends()
    assert [message["content"] for message in page.sent["messages"]] == ["Hello", "Once upon", "Go on"]


def test_escape_stops_before_the_first_token_too(page: Page) -> None:
    page.ask("Hello", [Hold()])
    page.shows("Waiting")
    page.tab.press("Escape")
    page.ends("stopped")
    page.ask("Again", said("Hi"))
    page.ends()
    assert [message["content"] for message in page.sent["messages"]] == ["Hello", "Again"]


def test_reasoning_is_open_while_it_comes_and_closes_when_the_answer_begins(page: Page) -> None:
    page.ask(
        "Hello",
        [
            delta(reasoning="Let me think."),
            Hold(),
            *said("Done."),
        ],
    )
    page.shows("Let me think.")
    assert page.tab.text(".reasoning summary") == "Thinking"
    assert page.tab.evaluate("document.querySelector('.reasoning').open") is True
    page.server.release()
    page.ends()
    assert page.tab.evaluate("document.querySelector('.reasoning').open") is False
    assert page.tab.text(".reasoning summary").startswith("Thought for ")
    assert page.tab.text(".answer > .prose") == "Done."
    page.tab.click(".reasoning summary")
    page.shows("Let me think.")
    page.ask("Go on", said("Yes."))
    page.ends()
    assert page.sent["messages"][1] == {"role": "assistant", "content": "Done.", "reasoning": "Let me think."}


def test_figures_are_those_of_the_usage(page: Page) -> None:
    """The rate counts what came after the first piece, over the time that it took."""
    first = delta("a", tokens=5, prompt=1200)
    page.ask(
        "Hello",
        [first, Hold(), delta("b", tokens=25, prompt=1200), delta(tokens=25, prompt=1200, finish="stop")],
    )
    page.shows("a")
    page.tab.evaluate("new Promise((done) => setTimeout(done, 100))")
    page.server.release()
    page.ends()
    tokens, rate, first_token, prompt = page.tab.texts(".figures span")
    assert tokens.startswith("25 tokens")
    assert 0 < float(rate.split(" ")[0]) <= 20 / 0.1
    assert first_token.startswith("first token ")
    assert prompt == "1,200 in the prompt"


def test_an_answer_that_was_cut_says_why(page: Page) -> None:
    page.ask("Hello", [delta("One"), delta(finish="length")])
    page.ends()
    assert "reached the limit of tokens" in page.tab.text(".answer")


def test_an_empty_answer_is_told(page: Page) -> None:
    page.ask("Hello", [delta(finish="stop")])
    page.ends()
    assert "The model answered with nothing." in page.tab.text(".answer")


def test_asking_again_replaces_the_last_answer(page: Page) -> None:
    page.ask("Hello", said("First"))
    page.ends()
    page.server.answers = [said("Second")]
    page.tab.click(".answer [aria-label='Try again']")
    page.shows("Second")
    page.ends()
    assert page.tab.texts(".answer > .prose") == ["Second"]
    assert page.sent["messages"] == [{"role": "user", "content": "Hello"}]


def test_an_edited_message_replaces_what_came_after_it(page: Page) -> None:
    for question, answer in (("One", "1"), ("Two", "2")):
        page.ask(question, said(answer))
        page.ends()
    page.tab.click(".user [aria-label='Edit this message']")
    assert page.tab.evaluate("document.querySelector('#question').value") == "One"
    page.ask(" more", said("3"))
    page.shows("3")
    page.ends()
    assert page.tab.texts(".user p") == ["One more"]
    assert page.sent["messages"] == [{"role": "user", "content": "One more"}]


def test_an_edit_can_be_given_up(page: Page) -> None:
    page.ask("One", said("1"))
    page.ends()
    page.tab.click(".user [aria-label='Edit this message']")
    page.tab.press("Escape")
    assert page.tab.evaluate("document.querySelector('#question').value") == ""
    page.ask("Two", said("2"))
    page.shows("2")
    page.ends()
    assert page.tab.texts(".user p") == ["One", "Two"]


def test_a_new_chat_forgets_the_old_one_even_while_it_runs(page: Page) -> None:
    page.ask("Hello", [delta("One"), Hold()])
    page.shows("One")
    page.tab.click("#new-chat")
    assert page.server.left.wait(WAIT_S)
    assert page.tab.texts(".turn") == []
    page.tab.wait("!document.querySelector('#send').hidden")
    page.ask("Again", said("Hi"))
    page.ends()
    assert page.sent["messages"] == [{"role": "user", "content": "Again"}]


@pytest.mark.parametrize("text", ["word " * 300, "\n".join("line" for _ in range(60))])
def test_a_long_message_is_shown_shortened_until_all_of_it_is_asked_for(page: Page, text: str) -> None:
    page.server.answers = [said("Hi")]
    page.tab.fill("#question", text)
    page.tab.click("#send")
    page.ends()
    height = "one.getBoundingClientRect().height"
    short = page.tab.each(".user p", height)[0]
    page.tab.click(".user .message button")
    assert page.tab.text(".user .message button") == "Show less"
    assert page.tab.each(".user p", height)[0] > short
    page.tab.click(".user .message button")
    assert page.tab.each(".user p", height)[0] == short
    assert page.sent["messages"][0]["content"] == text.strip()


def test_an_answer_that_comes_at_once_has_a_rate_too(page: Page) -> None:
    """It is the rate from the question to the end, as no time passed since the first piece."""
    page.ask("Hello", [Hold(), delta("Hi", tokens=3, finish="stop")])
    page.shows("Waiting for the first token, 2")
    page.server.release()
    page.ends()
    _, rate, *_ = page.tab.texts(".figures span")
    assert rate.endswith(" tokens/s")
    assert 0 < float(rate.split(" ")[0]) <= 3 / 0.2


def test_a_message_of_several_lines_is_sent_as_it_was_written(page: Page) -> None:
    page.server.answers = [said("Hi")]
    page.tab.click("#question")
    page.tab.type("One")
    page.tab.press("Enter", shift=True)
    page.tab.type("two")
    page.tab.press("Enter")
    page.ends()
    assert page.sent["messages"][0]["content"] == "One\ntwo"


def test_an_empty_message_is_not_sent(page: Page) -> None:
    page.tab.click("#question")
    page.tab.type("  ")
    page.tab.press("Enter")
    page.tab.click("#send")
    assert page.server.bodies == []


def test_markdown_is_shown_formatted_or_as_it_is(page: Page) -> None:
    code = "```python\nprint('*not* **bold**')\n```"
    text = f"# Title\n\nA **bold** `word`.\n\n{code}\n\n1. one\n2. two\n   - inner"
    page.ask("Hello", said(text))
    page.ends()
    prose = ".answer > .prose"
    assert page.tab.texts(f"{prose} :is(h2, strong, p code)") == ["Title", "bold", "word"]
    assert page.tab.text(f"{prose} pre") == "print('*not* **bold**')"
    assert page.tab.texts(f"{prose} > ol > li > ul > li") == ["inner"]
    page.tab.click("#open-settings")
    page.tab.click("#formatted")
    assert page.tab.text(prose) == text


def test_an_answer_and_its_request_can_be_copied(page: Page) -> None:
    page.tab.click("#open-settings")
    page.tab.fill("#key", "secret")
    page.ask("It's me", said("Hi there"))
    page.ends()
    # The clipboard of a headless browser cannot be read; what is written to it can be.
    page.tab.evaluate(
        "navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }"
    )
    page.tab.click(".answer [aria-label='Copy this answer']")
    page.tab.wait("window.copied === 'Hi there'")
    page.tab.click(".answer [aria-label^='Copy this request']")
    page.tab.wait("window.copied.startsWith('curl')")
    command = page.tab.evaluate("window.copied")
    assert f"{page.server.url}v1/chat/completions" in command
    assert r"It'\''s me" in command
    assert "$OPENAI_API_KEY" in command
    assert "secret" not in command


def test_the_page_works_under_a_prefix(page: Page) -> None:
    before = len(page.tab.asked)
    page.tab.open(f"{page.server.url}under/a-prefix/")
    page.tab.wait("document.querySelector('#model').value === 'toy'")
    page.ask("Hello", said("Hi"))
    page.ends()
    asked = page.tab.asked[before:]
    assert len(asked) > 20
    assert [url for url in asked if not url.startswith(f"{page.server.url}under/a-prefix/")] == []


def test_the_newest_text_stays_in_view_unless_the_reader_scrolls_away(page: Page) -> None:
    lines = [delta(f"Line {number}\n\n", tokens=number) for number in range(60)]
    page.ask("Hello", [*lines, Hold(), *lines, Hold(), *lines, delta(finish="stop")])
    page.shows("Line 59")
    scroller = "document.querySelector('#scroller')"
    at_end = f"{scroller}.scrollHeight - {scroller}.scrollTop - {scroller}.clientHeight < 5"
    page.tab.wait(at_end)
    page.tab.evaluate(f"{scroller}.scrollTop = 0")
    page.tab.wait("!document.querySelector('#latest').hidden")
    page.server.release()
    page.tab.wait("document.querySelectorAll('.answer p').length > 120")
    assert page.tab.evaluate(f"{scroller}.scrollTop") == 0
    page.tab.click("#latest")
    page.tab.wait(at_end)
    page.server.release()
    page.ends()
    page.tab.wait(at_end)
