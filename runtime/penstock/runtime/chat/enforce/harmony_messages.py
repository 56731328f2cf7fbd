"""Writes grammars for outputs in Harmony (`forced_calls` says what they are for).

Each begins where the prompt leaves off: with a header, after the `<|start|>assistant` of the prompt, or
within a message that the template has begun. A text holds no marker, not even one that is spelt in other
tokens, because the parser would end the message there.

One call is all that an output has, also where several are allowed: `<|call|>` ends the model's turn.
"""

from __future__ import annotations

import re

from penstock.runtime.chat.enforce.arguments import arguments, check_names
from penstock.runtime.chat.enforce.lark import Lark, quote, spelt
from penstock.runtime.chat.messages import Chat
from penstock.runtime.chat.tool_formats.harmony import (
    ANALYSIS,
    CHANNEL,
    CONSTRAIN,
    END,
    ENDS,
    FUNCTIONS,
    MESSAGE,
    NAME,
    START,
    STOPS,
    begun_by,
)
from penstock.runtime.requests.grammar import ANSWER

NEEDED_TOKENS = (START, CHANNEL, MESSAGE, END)
"""Markers that must be tokens. If they were text, a message could not end where one is spelt."""
COMMENTARY = "commentary"
FINAL = "final"
_BEGUN = re.compile(rf"{re.escape(CHANNEL)}({ANALYSIS}|{COMMENTARY}|{FINAL}){re.escape(MESSAGE)}")


def calls(g: Lark, chat: Chat, prompt: str) -> str:
    """Add rules for a call of a tool that must be called, after any reasoning. Returns what derives it."""
    _words(g)
    return f"{_opening(g, prompt)} {_thoughts(g)} {_call(g, chat)}"


def free_text(g: Lark, chat: Chat, prompt: str) -> str:
    """Add rules for messages of any channel, the last of which may be a call. Returns what derives them."""
    _words(g)
    headers = " | ".join(_header(g, channel) for channel in (ANALYSIS, COMMENTARY, FINAL))
    opened = g.rule("opened", f"({headers}) text")
    last = g.rule("last", f"({opened} {g.marker(END)} {_next(g)})* ({opened} | {_call(g, chat)})")
    if _channel_begun_by(prompt):
        return f"text {g.marker(END)} {_next(g)} {last} | text"
    return last


def calls_or_answer(g: Lark, chat: Chat, prompt: str) -> str:
    """Add rules for what comes after the reasoning: a call, or the answer, of which the caller has a grammar
    of its own. Returns what derives it.
    """
    if _channel_begun_by(prompt) == FINAL:
        return f"@{ANSWER}"
    _words(g)
    answer = f"{_header(g, FINAL)} @{ANSWER}"
    return f"{_opening(g, prompt)} {_thoughts(g)} ({_call(g, chat)} | {answer})"


def thinking_first(g: Lark, prompt: str) -> str:
    """Do the same as `calls_or_answer`, for an answer that no call may stand for. "": the prompt has begun
    the answer.
    """
    if _channel_begun_by(prompt) == FINAL:
        return ""
    _words(g)
    return f"{_opening(g, prompt)} {_thoughts(g)} {_header(g, FINAL)} @{ANSWER}"


def _channel_begun_by(prompt: str) -> str:
    """Return the channel of the message in which the prompt ends; "" if it ends before one."""
    tail = begun_by(prompt)
    begun = _BEGUN.match(tail)
    return begun[1] if begun is not None and not any(end in tail for end in ENDS) else ""


def _opening(g: Lark, prompt: str) -> str:
    """Return what must come before the next header: the rest of the message that the prompt has begun."""
    channel = _channel_begun_by(prompt)
    if not channel:
        return ""
    return f"{'text' if channel == ANALYSIS else ''} {g.marker(END)} {_next(g)}"


def _words(g: Lark) -> None:
    """Add the rule `text`, for the text of a message."""
    g.rule("WORDS", " & ".join(["/(?s:.*)/", *(f"~/(?s:.*){spelt(stop)}(?s:.*)/" for stop in STOPS)]))
    g.rule("text", "WORDS?")


def _next(g: Lark) -> str:
    """Return what stands before the header of another message."""
    return f'{g.marker(START)} "assistant"'


def _header(g: Lark, channel: str) -> str:
    return f"{g.marker(CHANNEL)} {quote(channel)} {g.marker(MESSAGE)}"


def _thoughts(g: Lark) -> str:
    """Add a rule for any number of messages of reasoning, and what stands before the next header."""
    thought = g.rule("thought", f"{_header(g, ANALYSIS)} text {g.marker(END)} {_next(g)}")
    return f"{thought}*"


def _call(g: Lark, chat: Chat) -> str:
    """Add a rule for a call: with the recipient after the role, as gpt-oss' template writes it, or after the
    channel, as its description does. InvalidRequest if a recipient cannot spell the name of a tool whose
    calls must follow its schema.
    """
    check_names(chat, NAME, "a recipient in Harmony")
    constrained = f' | " "? {g.marker(CONSTRAIN)} "json"' if g.is_token(CONSTRAIN) else ""
    typed = g.rule("typed", f'(" json"{constrained})?')
    bodies = []
    for tool in chat.callable_tools:
        if not NAME.fullmatch(tool.name):
            continue
        recipient = f" to={FUNCTIONS}{tool.name}"
        header = f"{quote(recipient)} {g.marker(CHANNEL)} {quote(COMMENTARY)}"
        other = f"{g.marker(CHANNEL)} {quote(COMMENTARY + recipient)}"
        body = arguments(g, chat, tool)
        bodies.append(f"({header} | {other}) {typed} {g.marker(MESSAGE)} {body}")
    return g.rule("call", " | ".join(bodies))
