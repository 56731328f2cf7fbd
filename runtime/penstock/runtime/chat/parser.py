"""Turns an output's text into words, reasoning and tool calls, in the forms that the model writes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from penstock.runtime.chat.messages import Chat
from penstock.runtime.chat.reasoning import REASONING_FORMS, ReasoningForm, ReasoningParser
from penstock.runtime.chat.tool_formats import harmony
from penstock.runtime.chat.tool_formats.events import CallPiece, Event, OutputParser, Parsed, Text
from penstock.runtime.chat.tool_formats.harmony import HarmonyParser
from penstock.runtime.chat.tool_formats.tools import TOOL_FORMS, CallParser, ToolForm
from penstock.runtime.errors import ConfigError

HARMONY = "harmony"
"""The value of both options for a model that writes Harmony, whose reasoning and calls are read together."""
TOOL_PARSERS = ("auto", "none", *TOOL_FORMS, HARMONY)
"""Values of the option --tool-call-parser."""
REASONING_PARSERS = ("auto", "none", *REASONING_FORMS, HARMONY)
"""Values of the option --reasoning-parser."""
_IN_TEMPLATE = (
    # Calls in XML, some of them within the outer tag of Hermes.
    ("<seed:tool_call>", "seed_oss"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<parameter=", "qwen3_coder"),
    ("<arg_key>", "glm"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tool_call>call:", "gemma4"),
    ("<function_calls>", "olmo3"),
    # Forms that no parser here reads: Functionary's, and MiniMax M3's.
    ("<function=", None),
    ("]<]minimax[>[", None),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    # Part of the instructions of Llama 3.2 and 4.
    ('"parameters": dictionary of argument name', "llama3_json"),
    # Before Granite's tag, because Granite 4's instructions differ from Granite 3's.
    ("<tool_call>", "hermes"),
    ("<|tool_call|>", "granite"),
    ("<|/tool|>", "granite"),  # Phi-4-mini
    ("<|tool_call_start|>", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
)
_IN_VOCABULARY = (
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ("<tool_call>", "hermes"),
    ("<|tool_call|>", "granite"),
    ("<|tool_call_start|>", "pythonic"),
    ("<|python_start|>", "pythonic"),
)


class ChatParser:
    """Parses one output's text (`OutputParser`): first its reasoning is taken out, then its calls. Without
    parsers all of it is words.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: CallParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def thinks(self) -> bool | None:
        """See `OutputParser.thinks`: whether the text begins with reasoning."""
        return False if self._reasoning is None else self._reasoning.has_block

    @property
    def is_past_reasoning(self) -> bool:
        """Whether no more reasoning can come."""
        return self._reasoning is None or self._reasoning.is_over

    def push(self, text: str) -> Parsed:
        """Return what this further text made certain. It does not matter how the text is split into
        pieces.
        """
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
        return _parsed(reasoning, [Text(text)] if self._tools is None else self._tools.push(text))

    def flush(self) -> Parsed:
        """Return the rest, when there is no more text."""
        reasoning, text = "", ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.flush()
        events: list[Event] = [Text(text)]
        if self._tools is not None:
            events = [*self._tools.push(text), *self._tools.flush()]
        return _parsed(reasoning, events)


def _parsed(reasoning: str, events: list[Event]) -> Parsed:
    text = "".join(event.text for event in events if isinstance(event, Text))
    return Parsed(text, reasoning, tuple(event for event in events if isinstance(event, CallPiece)))


@dataclass(frozen=True, slots=True)
class ChatForms:
    """The forms that a served model writes; None: it writes none, or it is not to be parsed."""

    tools: ToolForm | None = None
    reasoning: ReasoningForm | None = None
    is_harmony: bool = False
    """Whether it writes Harmony, and so none of the other forms."""
    tokens: frozenset[str] = frozenset()
    """Those of the forms' markers that are tokens of their own, and so never a text that only looks alike."""

    def parser(self, chat: Chat, prompt: str) -> OutputParser:
        """Make a parser for one output to `chat`, which was rendered as `prompt`. It looks for calls if the
        model was offered tools.
        """
        if self.is_harmony:
            names = [tool.name for tool in chat.offered_tools] or None
            return HarmonyParser(prompt, names, self.tokens if names else ())
        reasoning = tools = None
        if self.reasoning is not None:
            reasoning = ReasoningParser(self.reasoning, inside=self.reasoning.opened_by(prompt))
        if self.tools is not None and chat.offered_tools:
            tools = CallParser(
                self.tools,
                {tool.name: tool.parameters for tool in chat.offered_tools},
                markup=sorted(self.markers(chat) & self.tokens),
                is_forced=bool(chat.required_tools),
            )
        return ChatParser(reasoning, tools)

    def markers(self, chat: Chat) -> frozenset[str]:
        """Return the strings that the parser of `chat` must see, even if they are special tokens."""
        if self.is_harmony:
            return frozenset(harmony.MARKERS)
        tools = self.tools.markers if self.tools is not None and chat.offered_tools else ()
        reasoning = self.reasoning.markers if self.reasoning is not None else ()
        return frozenset([*tools, *reasoning])


def detect(template: str, added_tokens: Collection[str] = ()) -> ChatForms:
    """Detect the forms that the model's chat template shows; pass all its named templates joined. If the
    template takes tools but does not show how they are called, the tokens that the tokenizer has besides its
    vocabulary decide.
    """
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return ChatForms(is_harmony=True, tokens=_tokens(harmony.MARKERS, added_tokens))
    tools = next((name for mark, name in _IN_TEMPLATE if mark in template), "")
    if tools == "" and "tools" in template:
        tools = next((name for mark, name in _IN_VOCABULARY if mark in added_tokens), "")
    reasoning = [f for f in REASONING_FORMS.values() if f.start in template or f.end in template]
    return _forms(TOOL_FORMS[tools] if tools else None, reasoning[0] if reasoning else None, added_tokens)


def _forms(
    tools: ToolForm | None, reasoning: ReasoningForm | None, added_tokens: Collection[str]
) -> ChatForms:
    markers = [marker for form in (tools, reasoning) if form is not None for marker in form.markers]
    return ChatForms(tools, reasoning, tokens=_tokens(markers, added_tokens))


def _tokens(markers: Collection[str], added_tokens: Collection[str]) -> frozenset[str]:
    return frozenset(marker for marker in markers if marker in added_tokens)


def choose_forms(
    template: str, added_tokens: Collection[str] = (), *, tools: str = "auto", reasoning: str = "auto"
) -> ChatForms:
    """Choose the forms by option, see `TOOL_PARSERS` and `REASONING_PARSERS`. ConfigError for other
    values.
    """
    found = detect(template, added_tokens)
    for option, value, known in (
        ("tool_call_parser", tools, TOOL_PARSERS),
        ("reasoning_parser", reasoning, REASONING_PARSERS),
    ):
        if value not in known:
            raise ConfigError(f"{option}: must be one of {', '.join(known)}, not {value!r}")
    if _is_harmony(found, tools, reasoning):
        return ChatForms(is_harmony=True, tokens=_tokens(harmony.MARKERS, added_tokens))
    return _forms(
        found.tools if tools == "auto" else TOOL_FORMS.get(tools),
        found.reasoning if reasoning == "auto" else REASONING_FORMS.get(reasoning),
        added_tokens,
    )


def _is_harmony(found: ChatForms, tools: str, reasoning: str) -> bool:
    """Say whether the options choose Harmony. ConfigError if one of them does and the other chooses
    another.
    """
    named = {option for option in (tools, reasoning) if option != "auto"}
    if HARMONY not in named and not (found.is_harmony and "auto" in (tools, reasoning)):
        return False
    if named - {HARMONY}:
        raise ConfigError(
            "reasoning_parser: the model writes Harmony, whose reasoning and calls are read together, so this"
            f" and tool_call_parser must both choose it, or neither; not {reasoning!r} and {tools!r}"
        )
    return True
