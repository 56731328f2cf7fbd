"""Constrained outputs. The fake engine would write "b" after "a", then "c", ...; under a constraint it writes
the lowest allowed token that is not below the expected one, or else the lowest allowed one. Each expected
text follows from that rule by hand.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.runtime.errors import InvalidRequest, UnavailableError, Violation
from penstock.runtime.grammar import budget
from penstock.runtime.grammar.compile.compiler import CompilerConfig, GrammarCompiler
from penstock.v1 import control_pb2, types_pb2
from tests.service.rig import CODEC, collect, failure_of, fake, generate, ids, joined, serving, stream
from tests.support.models.byte_text import EOS, VOCAB

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "of": {"enum": ["tea", "coffee"]}},
        "required": ["on", "of"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "[m-p]{3}x?"}, "mnox"),
    "choice": ({"choice": {"choices": ["no", "yes", "maybe"]}}, "maybe"),
    "ebnf": ({"ebnf": 'start: "<" inner ">"\ninner: "c" | "d" inner'}, "<c>"),
    "gbnf": ({"ebnf": 'root ::= "c" [0-9] "."'}, "c0."),
    "json_schema": ({"json_schema": SCHEMA}, '{"on":false,"of":"coffee"}'),
}


async def both(rig, prompt="a", **fields):
    """Return Generate's one output, which must equal Stream's."""
    whole = await asyncio.wait_for(rig.inference.Generate(generate(prompt, **fields)), 20)
    parts = joined(await collect(rig.inference.Stream(stream(prompt, **fields))))
    assert parts.outputs == whole.outputs
    return whole.outputs[0]


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind(kind, tokens_per_step):
    """Without the constraint the prompt is continued differently."""
    constraint, expected = KINDS[kind]
    async with serving(fake(tokens_per_step=tokens_per_step)) as rig:
        output = await both(rig, constraint=constraint)
        assert (await both(rig, stopping={"max_tokens": 3})).text == "bcd"
    assert output.text == expected
    assert output.finish.reason == types_pb2.FINISH_REASON_EOS
    text_ids = [t for t in output.token_ids if t != EOS]
    assert bytes(text_ids).decode() == expected


async def test_json_object():
    """A model that writes JSON is not disturbed; one that does not is made to begin with a brace."""
    good = '{"a": [1, {"b": null}]}'
    async with serving(fake(scripts={"json": ids(good), "text": ids("hi"), "list": ids("[1]")})) as rig:
        assert (await both(rig, "json", constraint={"json_object": {}})).text == good
        for prompt in ("text", "list"):
            output = await both(rig, prompt, constraint={"json_object": {}}, stopping={"max_tokens": 1})
            assert output.text == "{"


async def test_a_complete_grammar_ends_the_output():
    """Without an end token, and before min_tokens. If more may follow, the model chooses the end token."""
    async with serving(fake(scripts={"a": ids("xy"), "m": ids("mm")})) as rig:
        output = await both(rig, constraint={"choice": {"choices": ["xy"]}}, stopping={"min_tokens": 9})
        assert (output.text, list(output.token_ids)) == ("xy", ids("xy"))
        assert (output.finish.reason, output.finish.HasField("match")) == (types_pb2.FINISH_REASON_EOS, False)
        output = await both(rig, "m", constraint={"regex": "m*"})
        assert list(output.token_ids) == [*ids("mm"), EOS]
        assert output.finish.match.token_id == EOS


async def test_limits_and_stops_still_end_it(rig):
    output = await both(rig, constraint={"regex": "[b-y]*"}, stopping={"max_tokens": 4})
    assert (output.text, output.finish.reason) == ("bcde", types_pb2.FINISH_REASON_MAX_TOKENS)
    output = await both(rig, constraint={"regex": "[b-y]*"}, stopping={"stop": ["ef"]})
    assert (output.text, output.finish.match.stop) == ("bcd", "ef")


async def test_each_output_has_its_own(rig):
    """Each of n outputs, and each of several requests that share a compiled grammar."""
    constraint = {"regex": "[d-f]{2}"}
    reply = await rig.inference.Generate(generate("b", sampling={"n": 4}, constraint=constraint))
    assert [o.text for o in reply.outputs] == ["de", "de", "ef", "fd"]
    replies = await asyncio.gather(
        *(rig.inference.Generate(generate("b", constraint=constraint)) for _ in range(8))
    )
    assert {reply.outputs[0].text for reply in replies} == {"de"}
    assert len({id(request.constraint) for request in rig.engine.seen}) == 12


async def test_chats_and_token_ids_too(rig):
    chat = {"messages": [types_pb2.ChatMessage(role="user", content="hi")]}
    for request in ({"chat": chat}, {"prompt_token_ids": {"ids": ids("a")}}):
        assert (await both(rig, None, constraint={"regex": "[m-p]{3}"}, **request)).text in ("mno", "mmm")
    output = await both(rig, constraint={"regex": "[m-p]{3}"}, output={"text": False})
    assert (output.text, list(output.token_ids)) == ("", ids("mno"))


# -- refusals --

BAD = [
    ({}, "constraint", "one of json_schema, json_object, regex, ebnf and choice is required"),
    ({"json_schema": ""}, "constraint.json_schema", "must not be empty"),
    ({"json_schema": "{"}, "constraint.json_schema", "not JSON"),
    ({"json_schema": '{"type": "nonsense"}'}, "constraint.json_schema", "nonsense"),
    ({"json_schema": '{"type": "string", "uniqueItems": 3, "not": {}}'}, "constraint.json_schema", "not"),
    ({"regex": "(a"}, "constraint.regex", "unclosed group"),
    ({"ebnf": 'start: "a" nowhere'}, "constraint.ebnf", "nowhere"),
    ({"ebnf": " "}, "constraint.ebnf", "must not be empty"),
    ({"choice": {}}, "constraint.choice", "must hold at least one string"),
    ({"regex": "x" * 300_000}, "constraint.regex", "at most 262144 bytes, not 300000"),
]


@pytest.mark.parametrize(("constraint", "field", "message"), BAD, ids=range(len(BAD)))
async def test_a_bad_grammar_is_refused_with_what_is_wrong(rig, constraint, field, message):
    """In llguidance's words if llguidance finds it."""
    for call in (
        rig.inference.Generate(generate("a", constraint=constraint)),
        rig.inference.Stream(stream("a", constraint=constraint)).read(),
    ):
        failure = await failure_of(call)
        assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert list(failure.violations) == [field]
        assert message in failure.violations[field]
    assert not rig.engine.seen


async def test_what_conversion_sees_comes_with_all_else(rig):
    fields = {"constraint": {"choice": {}}, "sampling": {"temperature": -1}, "stopping": {"max_tokens": 0}}
    failure = await failure_of(rig.inference.Generate(generate("a", **fields)))
    assert set(failure.violations) == {"constraint.choice", "sampling.temperature", "stopping.max_tokens"}


TOO_SLOW = InvalidRequest([Violation("constraint.regex", "compiling it took more than 1 s")])


class Slow:
    """A compiler that never finishes in time."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def compile(self, grammar):
        raise self._error


@pytest.mark.parametrize(
    ("error", "reason"), [(TOO_SLOW, "INVALID_FIELD"), (UnavailableError("busy"), "UNAVAILABLE")]
)
async def test_a_grammar_that_cannot_be_compiled_now(error, reason):
    engine = fake()
    engine.__dict__["grammars"] = Slow(error)
    async with serving(engine) as rig:
        failure = await failure_of(rig.inference.Generate(generate("a", constraint={"regex": "a"})))
        assert failure.reason == reason
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"


async def test_a_grammar_that_turns_out_too_complex_ends_its_output_only():
    """The lexer needs more states than an output may have: the engine ends that request, and goes on."""
    engine = fake(max_model_len=4000)
    assert CODEC.backend is not None
    engine.__dict__["grammars"] = GrammarCompiler.from_tokenizer(
        CODEC.backend, vocab_size=VOCAB, eos_token_ids=[EOS], config=CompilerConfig(max_lexer_states=40)
    )
    hard = {"regex": "(a|b)*a(a|b){8}c"}
    scripts = ids("ab" * 200 + "a")
    engine.runner.scripts = {(tuple(ids("a")), None): scripts}
    async with serving(engine) as rig:
        failure = await failure_of(rig.inference.Generate(generate("a", constraint=hard)))
        assert (failure.code.name, list(failure.violations)) == ("INVALID_ARGUMENT", ["constraint.regex"])
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"
        assert engine.load().pages_used == 0


async def test_a_grammar_that_was_too_costly_to_follow_is_refused_at_once(monkeypatch):
    """All outputs of its request end, and whoever sends it again is told how long that is in vain; other
    requests are served. No grammar has any time left here, so nothing depends on the machine's speed.
    """
    for name in ("REQUEST_S", "OUTPUT_S"):
        monkeypatch.setattr(budget, name, 0.0)
    engine = fake()
    assert CODEC.backend is not None
    engine.__dict__["grammars"] = GrammarCompiler.from_tokenizer(
        CODEC.backend, vocab_size=VOCAB, eos_token_ids=[EOS], config=CompilerConfig(time_limit_s=60.0)
    )
    async with serving(engine) as rig:
        asked = {"constraint": {"regex": "[a-z]*"}, "sampling": {"n": 3}}
        failure = await failure_of(rig.inference.Generate(generate("a", **asked)))
        assert (failure.code.name, list(failure.violations)) == ("INVALID_ARGUMENT", ["constraint.regex"])
        assert "takes too long to follow" in failure.violations["constraint.regex"]
        num_seen = len(rig.engine.seen)
        for call in (
            rig.inference.Generate(generate("a", **asked)),
            rig.inference.Stream(stream("b", **asked)).read(),
        ):
            failure = await failure_of(call)
            assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "COSTLY_GRAMMAR")
            assert failure.info.metadata["field"] == "constraint.regex"
            assert "is refused for another" in failure.message
            assert failure.retry_after_s is not None
        assert len(rig.engine.seen) == num_seen
        monkeypatch.undo()
        assert (await both(rig, constraint={"regex": "[d-f]{2}"})).text == "de"
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"


async def test_a_model_that_cannot_have_grammars_says_so(monkeypatch):
    """The tokens of its tokenizer do not stand for bytes."""
    engine = fake()
    monkeypatch.setattr(type(engine), "has_grammars", False)
    engine.__dict__["grammars"] = None
    chat = {
        "messages": [types_pb2.ChatMessage(role="user", content="x")],
        "tools": [types_pb2.ToolDefinition(name="f")],
        "tool_choice": "required",
    }
    async with serving(engine) as rig:
        for fields, named in (
            ({"prompt": "a", "constraint": {"json_object": {}}}, "constraint.json_object"),
            ({"prompt": None, "chat": chat}, "chat.tool_choice"),
        ):
            failure = await failure_of(rig.inference.Generate(generate(**fields)))
            assert (failure.reason, failure.info.metadata["field"]) == ("UNSUPPORTED_FEATURE", named)
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert control_pb2.FEATURE_PROMPT_LOGPROBS in info.features
        assert not {control_pb2.FEATURE_JSON_SCHEMA, control_pb2.FEATURE_REGEX} & set(info.features)
