"""Schemas of tools of which a part cannot be enforced: a call comes all the same, and follows the rest. Where
the tool is strict, the request is refused, with the place of that part.
"""

import json
from types import SimpleNamespace

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.chat.messages import Chat, ChatTurn, Tool
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.chat.tool_formats.events import joined
from penstock.runtime.chat.tool_formats.tools import TOOL_FORMS
from penstock.runtime.errors import InvalidRequest
from penstock.runtime.prompting.jobs import Job, constraints_of
from penstock.runtime.prompting.prompts import ChatPrompt
from penstock.runtime.requests.request import StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling
from tests.support.suite.drawing import few

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""What pydantic writes for every Decimal."""
LIMITS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minimum",
          "exclusiveMaximum", "multipleOf")  # fmt: skip

FAULTY = {
    "a look-ahead": (
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}, "anyOf/1/pattern",
    ),
    "a look-behind": ({"type": "string", "pattern": "(?<=a)b"}, "pattern"),
    "a back-reference": ({"type": "string", "pattern": r"^(a|b)\1$"}, "pattern"),
    "a word boundary": ({"type": "string", "pattern": r"\bx\b"}, "pattern"),
    "an atomic group": ({"type": "string", "pattern": "(?>a)b"}, "pattern"),
    "an open group": ({"type": "string", "pattern": "(("}, "pattern"),
    "an open class": ({"type": "array", "items": {"type": "string", "pattern": "[a-"}}, "items/pattern"),
    "patterns of names": (
        {"type": "object", "patternProperties": {"^(?=x)": {"type": "null"}}}, "patternProperties",
    ),
    "patterns that overlap": (
        {"type": "object", "patternProperties": {"^a": {"type": "null"}, "^ab": {"type": "null"}}},
        "patternProperties",
    ),
    "a reference to nowhere": ({"$ref": "#/$defs/nowhere"}, "$ref"),
    "an anchor that is not there": ({"$ref": "#nowhere"}, "$ref"),
    "a reference to a file": ({"$ref": "other.json#/a"}, "$ref"),
    "an unknown type": ({"type": "decimal"}, "type"),
    "a null type": ({"type": None}, "type"),
    "an unknown type among others": ({"type": ["string", "date"]}, "type"),
    **{f"{key} of null": ({key: None}, key) for key in LIMITS},
    "a negative limit": ({"type": "array", "minItems": -1}, "minItems"),
    "a limit of text": ({"type": "string", "maxLength": "10"}, "maxLength"),
    "no schema": (7, ""),
    "no schema in a list": ({"anyOf": [{"type": "null"}, None]}, "anyOf/1"),
    "no list of schemas": ({"anyOf": {"type": "null"}}, "anyOf"),
    "no map of schemas": ({"type": "object", "properties": ["x"]}, "properties"),
    "no list of names": ({"type": "object", "required": "x"}, "required"),
    "required of null": ({"type": "object", "required": None}, "required"),
    "no values": ({"enum": []}, "enum"),
    "limits that exclude each other": (
        {"type": "integer", "minimum": 5, "maximum": 9, "allOf": [{"maximum": 3}]}, "allOf",
    ),
    "lengths that exclude each other": ({"type": "array", "minItems": 3, "maxItems": 1}, "maxItems"),
    "types that exclude each other": ({"type": "string", "allOf": [{"type": "null"}]}, "allOf"),
    "a required member that cannot be": (
        {"type": "object", "properties": {"x": False}, "required": ["x"]}, "required",
    ),
}  # fmt: skip
"""The schema of an argument, and where the part is that cannot be enforced."""
KEYWORDS = [
    *LIMITS, "type", "pattern", "enum", "const", "required", "properties", "items", "anyOf", "allOf", "$ref",
    "$defs", "additionalProperties", "patternProperties", "not", "format", "prefixItems", "x",
]  # fmt: skip
GOOD = {"type": "integer", "minimum": 1, "maximum": 14}
USER = (ChatTurn("user", "hi"),)


def tool(schema, *, strict=False):
    parameters = {"type": "object", "properties": {"a": schema, "days": GOOD}, "required": ["a", "days"]}
    return Tool("pay", "", parameters, strict)


def written(form, chat, compiler, backend, vocabulary, writer):
    """Return calls that a random model writes under the constraint of a conversation; none if it does not
    end.
    """
    job = Job(
        request_id="r",
        prompt=ChatPrompt(chat),
        sampling=ResolvedSampling(),
        stopping=StoppingParams(),
    )
    added = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
    forms = ChatForms(TOOL_FORMS[form])
    calls = []
    constraints = constraints_of(job, "", SimpleNamespace(added_tokens=added), forms, compiler)
    for seed, constraint in enumerate(constraints):
        walk = writer.write(constraint, seed, max_tokens=80, calm=5)
        if walk.complete:
            spoken = [i for i in walk.token_ids if i not in vocabulary.eos_token_ids]
            parser = forms.parser(chat, "")
            text = b"".join(vocabulary.tokens[i] for i in spoken).decode()
            calls += joined([call for part in (parser.push(text), parser.flush()) for call in part.calls])
    return calls


@pytest.fixture
def calls(compiler, backend, vocabulary, writer):
    return lambda form, chat: written(form, chat, compiler, backend, vocabulary, writer)


@pytest.mark.parametrize("part", few(FAULTY, ("a look-ahead", "a reference to nowhere"), ci=FAULTY))
def test_a_call_comes_and_the_rest_is_enforced(part, calls):
    """With every form, whether the tool stands alone or among good ones."""
    schema, _ = FAULTY[part]
    good = Tool("now", "", {"type": "object", "properties": {"days": GOOD}, "required": ["days"]})
    finished = 0
    for form in sorted(TOOL_FORMS):
        for chat in (
            Chat(USER, (tool(schema),), "required", parallel_tool_calls=False),
            Chat(USER, (good, tool(schema)), "pay"),
        ):
            made = calls(form, chat)
            finished += bool(made)
            for call in made:
                assert call.name == "pay"
                arguments = json.loads(call.arguments)
                assert arguments.keys() == {"a", "days"}, (form, arguments)
                assert jsonschema.Draft202012Validator(GOOD).is_valid(arguments["days"]), form
    # Random models seldom end a text that is not in quotes: in forms with such, only the grammar is tried.
    assert finished >= 8


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.sampled_from(["", "x", "string", "(?=x)", "#/$defs/x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(schema=JUNK, form=st.sampled_from(["hermes", "pythonic", "glm", "gemma4"]))
def test_no_schema_is_refused(schema, form, compiler):
    """Whatever stands in it, a tool that is not strict can be called."""
    parameters = {**schema, "type": "object"} if isinstance(schema, dict) else {"properties": {"a": schema}}
    chat = Chat(USER, (Tool("pay", "", parameters),), "required")
    job = Job(request_id="r", prompt=ChatPrompt(chat), sampling=ResolvedSampling(), stopping=StoppingParams())
    forms = ChatForms(TOOL_FORMS[form])
    assert constraints_of(job, "", SimpleNamespace(added_tokens={}), forms, compiler)


@pytest.mark.parametrize(("schema", "at"), FAULTY.values(), ids=FAULTY)
def test_a_strict_tool_is_refused_with_the_place(schema, at, calls):
    with pytest.raises(InvalidRequest) as caught:
        calls("hermes", Chat(USER, (Tool("now"), tool(schema, strict=True)), "auto"))
    (violation,) = caught.value.violations
    assert violation.field == "chat.tools[1].parameters_json"
    pointer = "/".join(["#/properties/a", *([at] if at else [])])
    assert violation.description.startswith(f"the strict tool 'pay' cannot be obeyed at {pointer}: ")
    keyword = at.rpartition("/")[2]
    assert keyword.isdecimal() or keyword in violation.description.partition(": ")[2]
    for line in ("%json", "json_0", "start:", "%llguidance"):
        assert line not in violation.description
