"""Grammars for outputs in which the model is free to call tools, of which some are strict: text that holds no
call, and calls whose arguments follow the schemas.

What the text may not hold is what the form's parser would take for a call. Where calls begin with a marker,
that is the marker. In the other forms it is the beginning of a call at the beginning of a line; it also may
not hold a little that the parser would take for text, but regular expressions cannot tell from a call.

A terminal that ends where a call begins is lazy, because the lexer prefers a longer text. In Python's form
there would be one for each tool, so that the lexer would become too large: there the text is lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.runtime.chat.enforce.lark import Lark, spelt
from penstock.runtime.chat.enforce.marked_calls import MARKED, Marked
from penstock.runtime.chat.enforce.object_calls import mistral_body, objects, tails
from penstock.runtime.chat.enforce.pythonic_calls import call_list, calls_of
from penstock.runtime.chat.messages import Chat
from penstock.runtime.chat.tool_formats import llama3_json, mistral, pythonic

_ANY = "(?s:.*)"
_SPACES = r"[ \t\r\n]*"
_LINE = rf"({_ANY}\n|{_SPACES};)?{_SPACES}"
"""What may stand before a call that no marker announces: whole lines, or the `;` after a call."""
_OTHER_KEY = r'"(type"|id"|parameters"|arguments"|[^"\\]*\\)'
"""The beginning of a member that may stand before the name, or whose own name is spelt with escapes."""
_NAME_KEY = rf'"(name|[^"\\]*\\[^"]*)"{_SPACES}:'
_OBJECT = rf"\{{{_SPACES}({_OTHER_KEY}{_ANY})?{_NAME_KEY}"
"""The beginning of an object that may be a call in Llama's form."""


def free_text(g: Lark, form: str, chat: Chat) -> str:
    """Add rules for an output in this form; return what derives it."""
    items = _FORMS[form](g, chat)
    item = g.rule("item", " | ".join(items))
    words = "LINE* TEXT?" if form == "pythonic" else "TEXT?"
    return f"({item}* {words})" if chat.parallel_tool_calls else f"({item} | {words})"


def _text(g: Lark, never: Sequence[str], text: str = _ANY, name: str = "TEXT") -> None:
    """Add a terminal: what `text` matches as a whole, and none of the other expressions does. They are one
    expression, because the lexer takes several times the work for the intersection of several.
    """
    g.rule(name, f"/{text}/ & ~/{'|'.join(never)}/" if never else f"/{text}/")


def _within(text: str) -> str:
    return f"{_ANY}{spelt(text)}{_ANY}"


def _announced(g: Lark, marker: str, also: Sequence[str] = ()) -> str:
    """Match text up to the marker, which holds none of `also`, and the marker."""
    if g.is_token(marker):
        return f"TEXT? {g.marker(marker)}"
    _text(g, list(map(_within, also)), f"{_ANY}{spelt(marker)}", "ANNOUNCED")
    return g.rule("announced[lazy]", "ANNOUNCED")


def _marked(form: Marked) -> Callable[[Lark, Chat], list[str]]:
    def items(g: Lark, chat: Chat) -> list[str]:
        _text(g, list(map(_within, (form.start, *form.also))))
        return [f"{_announced(g, form.start, form.also)} {form.body(g, chat, chat.parallel_tool_calls)}"]

    return items


def _mistral(g: Lark, chat: Chat) -> list[str]:
    _text(g, [_within(mistral.START)])
    return [f"{_announced(g, mistral.START)} {mistral_body(g, chat, chat.parallel_tool_calls)[0]}"]


def _llama3_json(g: Lark, chat: Chat) -> list[str]:
    tag = _within(llama3_json.TAG)
    _text(g, [tag, f"{_LINE}{_OBJECT}{_ANY}"])
    # No call begins after a line that may have begun one in another way: that one could go on around it.
    others = [tag, rf"{_LINE}\{{{_SPACES}{_OTHER_KEY}{_ANY}", rf"{_LINE}{_OBJECT}{_ANY}\{{{_ANY}"]
    _text(g, others, rf'{_LINE}\{{"name": "', "BEGUN")
    begun = g.rule("begun[lazy]", "BEGUN")
    items = [f"{begun} {tails(g, chat)}"]
    if g.is_token(llama3_json.TAG):
        call = objects(g, chat, "parameters")
        others_too = f' ("; " {call})*' if chat.parallel_tool_calls else ""
        items.append(f"TEXT? {g.marker(llama3_json.TAG)} {call}{others_too}")
    return items


def _pythonic(g: Lark, chat: Chat) -> list[str]:
    """Write rules for a text of lines, of which none begins as a list of calls does. White space after the
    bracket may hold line breaks.
    """
    bodies = calls_of(g, chat)
    names = "|".join(map(spelt, bodies))
    line = rf"{_SPACES}(\[{_SPACES})?[^\n]*"
    never = [rf"{_SPACES}\[{_SPACES}({names})\({_ANY}", *map(_within, pythonic.ENDS)]
    _text(g, never, line)
    _text(g, never, rf"{line}\n", "LINE")
    rest = call_list(g, bodies, chat.parallel_tool_calls)
    items = []
    for i, (name, body) in enumerate(bodies.items()):
        g.rule(f"BEGUN_{i}", rf"/{_SPACES}\[{spelt(name)}\(/")
        items.append(f"LINE* BEGUN_{i} {body} {rest.after_first}")
    for start, end in pythonic.ENDS.items():
        if g.is_token(start):
            items.append(f"LINE* TEXT? {g.marker(start)} {rest.whole} {g.marker(end)}")
    return items


_FORMS: Mapping[str, Callable[[Lark, Chat], list[str]]] = {
    **{name: _marked(form) for name, form in MARKED.items()},
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "pythonic": _pythonic,
}
