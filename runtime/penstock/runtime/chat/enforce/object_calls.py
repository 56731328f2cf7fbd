"""The grammars of calls that are written as JSON objects."""

from __future__ import annotations

from penstock.runtime.chat.enforce.arguments import arguments, check_names
from penstock.runtime.chat.enforce.lark import Lark, quote
from penstock.runtime.chat.messages import Chat
from penstock.runtime.chat.tool_formats import deepseek, granite, hermes, llama3_json, mistral


def objects(g: Lark, chat: Chat, key: str) -> str:
    """Add a rule for a call as an object with its name and, under `key`, its arguments. Returns the rule's
    name.
    """
    bodies = []
    for tool in chat.callable_tools:
        head = f'{{"name": {quote(tool.name)}, "{key}": '
        bodies.append(f"{quote(head)} {arguments(g, chat, tool)} {quote('}')}")
    return g.rule("call", " | ".join(bodies))


def tails(g: Lark, chat: Chat) -> str:
    """Add a rule for what comes after `{"name": "` in a call of Llama's form; return its name."""
    bodies = []
    for tool in chat.callable_tools:
        head = f'{quote(tool.name)[1:]}, "parameters": '
        bodies.append(f"{quote(head)} {arguments(g, chat, tool)} {quote('}')}")
    return g.rule("tail", " | ".join(bodies))


def hermes_body(g: Lark, chat: Chat) -> str:
    """Write what comes after the opening tag of a call."""
    return f'"\\n" {objects(g, chat, "arguments")} "\\n" {g.marker(hermes.END)}'


def mistral_body(g: Lark, chat: Chat, several: bool) -> tuple[str, bool]:
    """Write what comes after the marker, and whether each call has a marker of its own.

    It is the newer form if the tokenizer has its marker and the form can spell the names, else the older one.
    """
    tools = chat.callable_tools
    if g.is_token(mistral.ARGUMENTS) and all(mistral.NAME.fullmatch(tool.name) for tool in tools):
        named = [
            f"{quote(tool.name)} {g.marker(mistral.ARGUMENTS)} {arguments(g, chat, tool)}" for tool in tools
        ]
        return g.rule("call", " | ".join(named)), True
    return f'" "? {_array(g, chat, several)}', False


def granite_body(g: Lark, chat: Chat, several: bool) -> str:
    """Write what comes after the marker."""
    end = f" {g.marker(granite.END)}?" if g.is_token(granite.END) else ""
    return f'" "? {_array(g, chat, several)}{end}'


def _array(g: Lark, chat: Chat, several: bool) -> str:
    call = objects(g, chat, "arguments")
    others = f' (", " {call})*' if several else ""
    return f'"[" {call}{others} "]"'


def llama3_json_calls(g: Lark, chat: Chat, several: bool) -> str:
    """Match one or more calls, and nothing else."""
    call = objects(g, chat, "parameters")
    tag = f"{g.marker(llama3_json.TAG)}? " if g.is_token(llama3_json.TAG) else ""
    return f'{tag}{call} ("; " {call})*' if several else f"{tag}{call}"


def mistral_calls(g: Lark, chat: Chat, several: bool) -> str:
    """Match one or more calls, and nothing else."""
    body, each_marked = mistral_body(g, chat, several)
    calls = f"{g.marker(mistral.START)} {body}"
    return f"({calls})+" if several and each_marked else calls


def deepseek_body(g: Lark, chat: Chat, several: bool) -> str:
    """Write what comes after the opening marker. A model may write each call as V3.1 does or as V3 does: it
    writes what it has learnt, and nobody need know which that is.

    InvalidRequest if the form cannot spell the name of a tool whose calls must follow its schema; other tools
    that it cannot spell are left out.
    """
    check_names(chat, deepseek.NAME, "a call in DeepSeek's form")
    start, separator, end = map(g.marker, (deepseek.CALL_START, deepseek.SEPARATOR, deepseek.CALL_END))
    bodies = []
    for tool in chat.callable_tools:
        if deepseek.NAME.fullmatch(tool.name):
            body = arguments(g, chat, tool)
            bodies.append(f"{quote(tool.name)} {separator} {body}")
            before = quote(f"{tool.name}\n{deepseek.CODE_START}\n")
            bodies.append(f'"function" {separator} {before} {body} {quote(chr(10) + deepseek.CODE_END)}')
    call = g.rule("call", f"{start} ({' | '.join(bodies)}) {end}")
    others = f' ("\\n"? {call})*' if several else ""
    return f"{call}{others} {g.marker(deepseek.END)}"
