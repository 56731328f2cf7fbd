"""Feeds chat parsers in pieces; makes a tokenizer of bytes, and chat templates in the style of known ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.runtime.chat.tool_formats import gemma4
from penstock.runtime.chat.tool_formats.events import CallPiece, Event, Text, joined
from penstock.runtime.chat.tool_formats.reader import Reader, Stream, Wait
from penstock.runtime.chat.tool_formats.tools import TOOL_FORMS, CallParser
from tests.support.suite.drawing import few

TOOLS = ("get_weather", "f", "g", "ns.tool-2")
SOME_FORMS = few(sorted(TOOL_FORMS), ("hermes", "olmo3", "qwen3_coder"))
"""`make test` takes a form of JSON, one of Python's calls, and one of XML. CI draws some of the others."""


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    """Return the text, cut at these positions; pieces may be empty."""
    marks = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(marks)]


def merged(events: Iterable[Event]) -> list[Event]:
    """Return the events with adjacent texts, and pieces of calls, joined: how they are divided does not
    matter.
    """
    return joined(list(events))


def events_of(
    form: str,
    pieces: Sequence[str],
    tools: Sequence[str] = TOOLS,
    *,
    markup: Sequence[str] = (),
    is_forced: bool = False,
) -> list[Event]:
    """Return the events that a parser of this form finds in the pieces."""
    parser = CallParser(TOOL_FORMS[form], {name: {} for name in tools}, markup=markup, is_forced=is_forced)
    found = [event for piece in pieces for event in parser.push(piece)]
    return merged([*found, *parser.flush()])


def texts(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def calls(events: Iterable[Event]) -> list[tuple[str, str]]:
    return [(event.name, event.arguments) for event in events if isinstance(event, CallPiece)]


def spelled(form: str, made: Sequence[tuple[str, dict[str, Any]]], *, ascii_only: bool = False) -> str:
    """Return the calls as a model of this form writes them."""

    def dump(value: object) -> str:
        return json.dumps(value, ensure_ascii=ascii_only)

    def raw(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def elements(arguments: dict[str, Any], element: str) -> str:
        return "".join(element.format(key, raw(value)) for key, value in arguments.items())

    match form:
        case "hermes":
            one = '<tool_call>\n{{"name": {}, "arguments": {}}}\n</tool_call>'
            return "\n".join(one.format(dump(name), dump(arguments)) for name, arguments in made)
        case "llama3_json":
            return "; ".join(f'{{"name": {dump(name)}, "parameters": {dump(args)}}}' for name, args in made)
        case "mistral":
            return f"[TOOL_CALLS] {dump([{'name': name, 'arguments': args} for name, args in made])}"
        case "mistral, newer":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{dump(args)}" for name, args in made)
        case "pythonic":
            calls = (f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for name, args in made)
            return f"[{', '.join(calls)}]"
        case "qwen3_coder":
            one = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
            argument = "<parameter={}>\n{}\n</parameter>\n"
            return "\n".join(one.format(name, elements(args, argument)) for name, args in made)
        case "seed_oss":
            one = "<seed:tool_call>\n<function={}>\n{}</function>\n</seed:tool_call>"
            argument = "<parameter={}>{}</parameter>\n"
            return "\n".join(one.format(name, elements(args, argument)) for name, args in made)
        case "minimax_m2":
            one, argument = '<invoke name="{}">\n{}</invoke>\n', '<parameter name="{}">{}</parameter>\n'
            inner = "".join(one.format(name, elements(args, argument)) for name, args in made)
            return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"
        case "glm":
            argument = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
            one = "<tool_call>{}\n{}</tool_call>"
            return "\n".join(one.format(name, elements(args, argument)) for name, args in made)
        case "glm, newer":
            argument = "<arg_key>{}</arg_key><arg_value>{}</arg_value>"
            one = "<tool_call>{}{}</tool_call>"
            return "".join(one.format(name, elements(args, argument)) for name, args in made)
        case "deepseek":
            one = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            inner = "".join(one.format(name, dump(args)) for name, args in made)
            return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
        case "deepseek, older":
            one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
            inner = "\n".join(one.format(name, dump(args)) for name, args in made)
            return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
        case "granite":
            return f"<|tool_call|>{dump([{'name': name, 'arguments': args} for name, args in made])}"
        case "olmo3":
            lines = (f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for name, args in made)
            return "<function_calls>\n{}\n</function_calls>".format("\n".join(lines))
        case "gemma4":
            one = "<|tool_call>call:{}{}<tool_call|>"
            return "".join(one.format(name, _gemma4(args)) for name, args in made)
    raise AssertionError(form)


def _gemma4(value: Any) -> str:
    """Write a value as Gemma 4 writes it. Names of members have no quotes, unless they could not be read
    so.
    """
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(_gemma4, value))}]"
    if isinstance(value, dict):
        names = {key: key if gemma4.KEY.fullmatch(key) else _gemma4(key) for key in value}
        return f"{{{','.join(f'{names[key]}:{_gemma4(one)}' for key, one in value.items())}}}"
    return json.dumps(value)


UNTYPED = ("qwen3_coder", "seed_oss", "minimax_m2", "glm")
"""Forms whose values have no types of their own, so that all are strings where the schema says nothing."""
MARKED = ("hermes", "mistral", "deepseek", "granite", "olmo3", "gemma4", *UNTYPED)
"""Forms whose calls a marker announces."""


def meant(form: str, made: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Return what the calls that `spelled` has written mean where the schema says nothing."""

    def value(one: Any) -> Any:
        return one if isinstance(one, str) or form not in UNTYPED else json.dumps(one, ensure_ascii=False)

    return [(name, {key: value(one) for key, one in arguments.items()}) for name, arguments in made]


class Scan:
    """Runs one scanner over the pieces of a text."""

    def __init__(self, scanner: Callable[[Reader], Wait[Any]], pieces: Sequence[str]) -> None:
        self.result: Any = None
        self.left = ""
        """The text that the scanner did not consume, if it was content."""
        self.known_after: int | None = None
        """How many characters had been fed when the result was known; None: it was known only at the end."""
        self._fed = 0
        self._reader = Reader()
        stream = Stream(lambda r: self._run(r, scanner))
        for piece in pieces:
            self._fed += len(piece)
            stream.push(piece)
        self._fed = -1
        stream.flush()
        self.left = self._reader.text[self._reader.pos :]

    def _run(self, r: Reader, scanner: Callable[[Reader], Wait[Any]]) -> Wait[None]:
        self._reader = r
        r.mark()
        self.result = yield from scanner(r)
        self.known_after = self._fed if self._fed >= 0 else None


def bytes_tokenizer(
    special: Sequence[str] = (),
    ordinary: Sequence[str] = (),
    chat_template: str | dict[str, str] | None = None,
    end: str = "<|end|>",
) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are the bytes, then the end token, then the special and the ordinary
    tokens that are given.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end, *special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ordinary])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
    fast.chat_template = chat_template
    return fast


# Small templates in the style of well-known models.
QWEN = """
{%- if tools %}
{{- "<|im_start|>system\\n# Tools\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{{- "<|im_start|>user\\n<tool_response>\\n" + message.content + "\\n</tool_response><|im_end|>\\n" }}
{%- else %}
{{- "<|im_start|>" + message.role + "\\n" + message.content }}
{%- for call in message.tool_calls %}
{%- if message.content or not loop.first %}{{- "\\n" }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + "}\\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|im_start|>assistant\\n" }}
{%- if enable_thinking is defined and not enable_thinking %}{{- "<think>\\n\\n</think>\\n\\n" }}{%- endif %}
{%- endif %}"""
LLAMA3 = """
{{- bos_token }}
{%- for message in messages %}
{%- set role = "ipython" if message.role == "tool" else message.role %}
{{- "<|start_header_id|>" + role + "<|end_header_id|>\\n\\n" }}
{%- if "tool_calls" in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("only single tool-calls") }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}" }}
{%- else %}
{%- if tools and loop.first %}
{{- 'Respond in the format {"name": function name, ' }}
{{- '"parameters": dictionary of argument name and its value}.\\n' }}
{{- tools | map(attribute="function") | map(attribute="name") | join(", ") + "\\n" }}
{%- endif %}
{{- message.content | trim }}
{%- endif %}
{{- "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% endif %}"""
MISTRAL = """
{{- "<s>" }}
{%- if tools %}{{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{%- for message in messages %}
{%- if message.role == "user" %}{{- "[INST] " + message.content + "[/INST]" }}
{%- elif message.role == "tool" %}
{%- set result = {"content": message.content, "call_id": message.tool_call_id} %}
{{- "[TOOL_RESULTS] " + (result | tojson) + "[/TOOL_RESULTS]" }}
{%- elif message.tool_calls is defined %}
{{- "[TOOL_CALLS] [" }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids must have nine characters") }}{% endif %}
{%- set f = call.function %}
{{- {"name": f.name, "arguments": f.arguments, "id": call.id} | tojson }}
{%- if not loop.last %}{{- ", " }}{%- endif %}
{%- endfor %}
{{- "]</s>" }}
{%- else %}{{- " " + message.content + "</s>" }}
{%- endif %}
{%- endfor %}"""
R1 = """
{%- for message in messages %}
{{- "<|" + message.role + "|>" + message.content.split("</think>")[-1] }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|><think>\\n" }}{%- endif %}"""
