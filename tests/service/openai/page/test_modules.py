"""The page's functions that need no page: events of a stream, and blocks of Markdown."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.service.openai.page.rig import Page

pytestmark = pytest.mark.sweep

READ = """(async (pieces) => {
  const { eventData } = await import("./page/js/sse.js");
  const stream = new ReadableStream({
    start(controller) {
      for (const piece of pieces) controller.enqueue(new Uint8Array(piece));
      controller.close();
    },
  });
  const found = [];
  for await (const data of eventData(stream)) found.push(data);
  return found;
})(%s)"""
GROW = """(async (texts) => {
  const { Prose } = await import("./page/js/view/prose.js");
  return texts.filter((text) => {
    const [grown, whole] = [new Prose(), new Prose()];
    for (let end = 0; end <= text.length; end += 1) grown.show(text.slice(0, end), true);
    whole.show(text, true);
    return grown.root.outerHTML !== whole.root.outerHTML;
  });
})(%s)"""
SHOW = """(async (text) => {
  const { Prose } = await import("./page/js/view/prose.js");
  const prose = new Prose();
  prose.show(text, true);
  for (const one of prose.root.querySelectorAll("button")) one.remove();
  return prose.root.innerHTML;
})(%s)"""


def events(page: Page, pieces: list[bytes]) -> list[str]:
    found: list[str] = page.tab.evaluate(READ % json.dumps([list(piece) for piece in pieces]))
    return found


def test_events_do_not_depend_on_how_their_bytes_arrive(page: Page) -> None:
    data = (
        'data: {"a": "é€😀"}\n\n: a comment\n\ndata: one\r\ndata:two\r\n\r\n'
        "event: x\ndata:  three\n\ndata: [DONE]\n\n"
    )
    expected = ['{"a": "é€😀"}', "one\ntwo", " three", "[DONE]"]
    whole = data.encode()
    assert events(page, [whole]) == expected
    assert events(page, [whole[at : at + 1] for at in range(len(whole))]) == expected
    for at in range(len(whole)):
        assert events(page, [whole[:at], whole[at:]]) == expected, at


def test_an_event_that_is_not_complete_is_none(page: Page) -> None:
    """As the rules of server-sent events have it: the empty line is what ends an event."""
    assert events(page, [b"data: one\n\ndata: two\n"]) == ["one"]


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a\nb", "<p>a\nb</p>"),
        ("a\n\nb", "<p>a</p><p>b</p>"),
        ("## a #", "<h3>a</h3>"),
        ("#a", "<p>#a</p>"),
        ("a **b** c", "<p>a <strong>b</strong> c</p>"),
        ("*a* 2 * 3 * 4", "<p><em>a</em> 2 * 3 * 4</p>"),
        ("`a*b*`", "<p><code>a*b*</code></p>"),
        ("``a`b``", "<p><code>a`b</code></p>"),
        ("snake_case_name", "<p>snake_case_name</p>"),
        ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("- a\n\n- b\n\nc", "<ul><li>a</li><li>b</li></ul><p>c</p>"),
        ("1. a\n   - b\n2. c", '<ol start="1"><li>a<ul><li>b</li></ul></li><li>c</li></ol>'),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("---", "<hr>"),
        ("# ", "<p># </p>"),
        ("# C#", "<h2>C#</h2>"),
        ("a | b", "<p>a | b</p>"),
        ("a | b\n--|--|--", "<p>a | b\n--|--|--</p>"),
        ("<b>&amp;</b>", "<p>&lt;b&gt;&amp;amp;&lt;/b&gt;</p>"),
    ],
)
def test_markdown_becomes_elements(page: Page, text: str, html: str) -> None:
    assert page.tab.evaluate(SHOW % json.dumps(text)) == html


def test_tables_have_a_head_rows_and_columns(page: Page) -> None:
    shown = page.tab.evaluate(SHOW % json.dumps("| a | *b* |\n|:--|--:|\n| 1 | `x\\|y` |\n| 2 |\n\nc"))
    assert shown == (
        '<div class="table" tabindex="0"><table>'
        '<thead><tr><th class="start">a</th><th class="end"><em>b</em></th></tr></thead>'
        '<tbody><tr><td class="start">1</td><td class="end"><code>x|y</code></td></tr>'
        '<tr><td class="start">2</td><td class="end"></td></tr></tbody></table></div><p>c</p>'
    )


@pytest.mark.parametrize("text", ["```py\na\n\nb\n```", "~~~py\na\n\nb\n~~~", "```py\na\n\nb"])
def test_code_keeps_its_lines(page: Page, text: str) -> None:
    shown = page.tab.evaluate(SHOW % json.dumps(text))
    assert "<span>py</span>" in shown
    assert "<code>a\n\nb</code>" in shown


def test_a_text_that_grows_looks_like_one_that_came_at_once(page: Page) -> None:
    """Only the last blocks are made anew for each piece, and nobody may see that."""
    draw = random.Random(7)
    parts = [
        "\n",
        "\n\n",
        "- a",
        "  - b",
        "1. c",
        "```",
        "```py",
        "# d",
        "> e",
        "---",
        "**",
        "*f*",
        "`g`",
        " ",
        "h\n",
        "~~~",
        "   i",
        "|",
        "a|b\n",
        "-|-\n",
    ]
    texts: list[Any] = ["".join(draw.choices(parts, k=draw.randint(1, 14))) for _ in range(400)]
    assert page.tab.evaluate(GROW % json.dumps(texts)) == []
