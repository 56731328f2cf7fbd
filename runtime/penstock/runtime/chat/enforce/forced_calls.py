"""Grammars for llguidance of what a chat's output must be: calls, and the thinking that may come before them.

tool_choice "required", or a tool's name, asks for calls in the model's form and nothing else. Strict tools
ask that calls follow their schemas where the model is free to call (`free_text`). A caller's own grammar is
for the answer: a model that thinks does so before it, without restriction.

The grammars are Lark, in llguidance's dialect. They accept what the form's parsers take for calls and for
reasoning. A marker that the tokenizer has as a token is written by its id, because llguidance distinguishes
such tokens from their text. Arguments follow the tool's schema as far as llguidance can express it, and are
laid out as Python's `json.dumps` does it, because templates show them so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.runtime.chat.enforce import harmony_messages
from penstock.runtime.chat.enforce.free_text import free_text
from penstock.runtime.chat.enforce.lark import Lark, quote, whole_within
from penstock.runtime.chat.enforce.marked_calls import MARKED, marked_calls
from penstock.runtime.chat.enforce.object_calls import llama3_json_calls, mistral_calls
from penstock.runtime.chat.enforce.pythonic_calls import pythonic
from penstock.runtime.chat.messages import Chat
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.chat.reasoning import ReasoningForm
from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.requests.grammar import ANSWER


def call_grammar(forms: ChatForms, chat: Chat, prompt: str, token_ids: Mapping[str, int]) -> str | None:
    """Return Lark text that forces the calls which `chat.tool_choice` asks for; None if it asks for none.

    "required" means one or more calls of any tools, or one where they may not be parallel; a name means
    exactly one call of that tool. Where the model is free to call, and some tools are strict, the text is
    free and calls follow the schemas.

    A reasoning block may come first; if `prompt`, the rendered chat, has opened it, it must end first.
    `token_ids`: see `Lark`. InvalidRequest if the form cannot write the tools, or if there is no form.
    """
    if not chat.enforced_by:
        return None
    g = Lark(token_ids)
    if forms.is_harmony:
        _check_tokens(g, chat.enforced_by)
        write = harmony_messages.calls if chat.required_tools else harmony_messages.free_text
        g.rule("start", write(g, chat, prompt))
        return str(g)
    form = _form_of(forms, chat)
    if chat.required_tools:
        output = _CALLS[form](g, chat, chat.tool_choice == "required" and chat.parallel_tool_calls)
    else:
        output = free_text(g, form, chat)
    g.rule("start", " ".join([*_reasoning(g, forms.reasoning, prompt), output]))
    return str(g)


def calls_or_answer(forms: ChatForms, chat: Chat, prompt: str, token_ids: Mapping[str, int]) -> str:
    """Return Lark text, as `Grammar.before` takes it, for an output under a caller's grammar in which the
    model is free to call strict tools: after the reasoning either calls, and nothing else, or the answer.

    InvalidRequest as of `call_grammar`, or if a call in this form can begin as an answer does.
    """
    g = Lark(token_ids)
    if forms.is_harmony:
        _check_tokens(g, chat.enforced_by)
        g.rule("start", harmony_messages.calls_or_answer(g, chat, prompt))
        return str(g)
    form = _form_of(forms, chat)
    if form not in _MARKED:
        told = f"not together with strict tools, whose calls may look like an answer in the form {form}"
        raise InvalidRequest([Violation("constraint", told)])
    calls = _CALLS[form](g, chat, chat.parallel_tool_calls)
    g.rule("start", " ".join([*_reasoning(g, forms.reasoning, prompt), f"({calls} | @{ANSWER})"]))
    return str(g)


def thinking_first(forms: ChatForms, prompt: str, token_ids: Mapping[str, int]) -> str:
    """Return Lark text, as `Grammar.before` takes it, for the reasoning block that comes before an answer
    under a grammar; "" if the model writes none, or if `prompt`, the rendered chat, has ended it.

    If `prompt` has opened the block it must end, else it is optional. `token_ids`: see `Lark`.
    """
    g = Lark(token_ids)
    if forms.is_harmony:
        _check_tokens(g, ["constraint"])
        before = harmony_messages.thinking_first(g, prompt)
        if not before:
            return ""
        g.rule("start", before)
        return str(g)
    thinking = _reasoning(g, forms.reasoning, prompt)
    if not thinking:
        return ""
    g.rule("start", " ".join([*thinking, f"@{ANSWER}"]))
    return str(g)


def _check_tokens(g: Lark, fields: Sequence[str]) -> None:
    """Raise InvalidRequest on the fields if the tokenizer has no tokens for the markers of Harmony."""
    lacks = [marker for marker in harmony_messages.NEEDED_TOKENS if not g.is_token(marker)]
    if lacks:
        told = f"grammars for Harmony need tokens that the tokenizer does not have: {', '.join(lacks)}"
        raise InvalidRequest([Violation(field, told) for field in fields])


def _form_of(forms: ChatForms, chat: Chat) -> str:
    if forms.tools is None:
        told = "no form of tool calls is known for this model, see the option --tool-call-parser"
        raise InvalidRequest([Violation(field, told) for field in chat.enforced_by])
    return forms.tools.name


def _reasoning(g: Lark, form: ReasoningForm | None, prompt: str) -> list[str]:
    """Return the parts that come before calls and answers: any text, up to the closing tag."""
    if form is None or form.closed_by(prompt):
        return []
    if g.is_token(form.end):
        g.rule("THOUGHT", whole_within(form.end))
        thought = f"THOUGHT {g.marker(form.end)}"
    else:
        thought = g.rule("thought[lazy]", f"/(?s:.*)/ {quote(form.end)}")
    g.rule("thinking", f'{thought} ("\\n" | "\\n\\n")?')
    title = f" {quote(form.title)}" if form.title else ""
    return ["thinking"] if form.opened_by(prompt) else [f"({g.marker(form.start)}{title} thinking)?"]


_CALLS: Mapping[str, Callable[[Lark, Chat, bool], str]] = {
    **{name: marked_calls(form) for name, form in MARKED.items()},
    "llama3_json": llama3_json_calls,
    "mistral": mistral_calls,
    "pythonic": pythonic,
}
"""Writes one or more calls, and nothing else."""
_MARKED = (*MARKED, "mistral")
"""Forms in which a call begins with a marker, so that it cannot be mistaken for an answer."""
