"""What is checked about a grammar before it is compiled."""

import pytest

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.requests.grammar import MAX_CHOICES, MAX_GRAMMAR_BYTES, Grammar, GrammarKind


def refusal(make) -> tuple[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        make()
    (violation,) = caught.value.violations
    return violation.field, violation.description


@pytest.mark.parametrize(
    ("make", "field", "part"),
    [
        (lambda: Grammar.json_schema(""), "constraint.json_schema", "empty"),
        (lambda: Grammar.json_schema(" \n"), "constraint.json_schema", "empty"),
        (lambda: Grammar.ebnf(""), "constraint.ebnf", "empty"),
        (lambda: Grammar.choice([]), "constraint.choice", "at least one"),
        (lambda: Grammar.choice(["x"] * (MAX_CHOICES + 1)), "constraint.choice", "at most 10000 choices"),
        (lambda: Grammar.regex("x" * (MAX_GRAMMAR_BYTES + 1)), "constraint.regex", "at most 262144 bytes"),
        (lambda: Grammar.regex("é" * (MAX_GRAMMAR_BYTES // 2 + 1)), "constraint.regex", "not 262146"),
        (lambda: Grammar.choice(["x" * 200_000, "y" * 200_000]), "constraint.choice", "not 400000"),
        (lambda: Grammar.regex("\ud800"), "constraint.regex", "valid Unicode"),
        (lambda: Grammar(GrammarKind.JSON_OBJECT, "{}"), "constraint.json_object", "no source"),
        (lambda: Grammar(GrammarKind.EBNF, "", "chat.tool_choice"), "chat.tool_choice", "empty"),
    ],
)
def test_refused_on_the_field_that_holds_it(make, field, part):
    at, why = refusal(make)
    assert at == field
    assert part in why


def test_the_largest_sizes_are_accepted():
    Grammar.regex("x" * MAX_GRAMMAR_BYTES)
    Grammar.choice([str(i) for i in range(MAX_CHOICES)])
    Grammar.choice([""])
    Grammar.regex("")


def test_grammars_of_different_fields_are_equal():
    from_tools = Grammar(GrammarKind.EBNF, 'start: "a"', field="chat.tool_choice")
    assert from_tools == Grammar.ebnf('start: "a"')
    assert hash(from_tools) == hash(Grammar.ebnf('start: "a"'))
    assert Grammar.choice(["a", "b"]) != Grammar.choice(["b", "a"])
    assert Grammar.regex("a") != Grammar.ebnf("a")


def test_a_source_of_the_wrong_type_is_a_bug():
    with pytest.raises(TypeError):
        Grammar(GrammarKind.CHOICE, "a")
    with pytest.raises(TypeError):
        Grammar(GrammarKind.REGEX, ("a",))
