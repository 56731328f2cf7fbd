"""Every text written under a schema's masks is JSON that jsonschema, an independent validator, accepts."""

import json

import pytest
from jsonschema import Draft202012Validator

from penstock.runtime.requests.grammar import Grammar
from tests.support.schemas import corpus, violations

WALKS = 8
FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")


def text_of(vocabulary, token_ids) -> str:
    """Return the text; fails if there is a special token in it, or a byte that is not UTF-8."""
    spoken = [i for i in token_ids if i not in vocabulary.eos_token_ids]
    assert vocabulary.special.isdisjoint(spoken)
    return b"".join(vocabulary.tokens[i] for i in spoken).decode()


def test_the_corpus_is_large_and_itself_valid():
    assert len(corpus()) >= 40
    for case in corpus():
        Draft202012Validator.check_schema(case.schema)


def test_formats_are_really_checked():
    """jsonschema ignores formats whose packages are not installed, so the packages must be there."""
    assert set(FORMATS) <= Draft202012Validator.FORMAT_CHECKER.checkers.keys()
    assert {f"format {name}" for name in FORMATS} <= {case.name for case in corpus()}
    assert violations({"format": "date"}, '"2023-02-29"')
    assert not violations({"format": "date"}, '"2024-02-29"')


@pytest.mark.parametrize("case", corpus(), ids=lambda case: case.name)
def test_outputs_are_valid(case, compiler, vocabulary, writer):
    grammar = Grammar.json_schema(case.text)
    walks = [writer.write(compiler.constraint(grammar), seed) for seed in range(WALKS)]
    texts = [text_of(vocabulary, walk.token_ids) for walk in walks if walk.complete]
    assert len(texts) >= WALKS - 2, "most outputs should end by themselves"
    for text in texts:
        assert violations(case.schema, text) == [], text


def test_any_json_object(compiler, vocabulary, writer):
    walks = [writer.write(compiler.constraint(Grammar.json_object()), seed) for seed in range(40)]
    texts = [text_of(vocabulary, walk.token_ids) for walk in walks if walk.complete]
    assert len(texts) >= 30
    assert all(isinstance(json.loads(text), dict) for text in texts)
    assert len(set(texts)) > 20


def test_an_output_cut_by_max_tokens_can_be_completed(compiler, vocabulary, writer):
    """It is the beginning of a valid output, so the same masks complete it."""
    grammar = Grammar.json_schema(next(case.text for case in corpus() if case.name == "invoice"))
    for seed in range(10):
        constraint = compiler.constraint(grammar)
        first = writer.write(constraint, seed, max_tokens=10)
        assert not first.complete
        rest = writer.write(constraint, seed + 100, calm=5)
        if rest.complete:
            json.loads(text_of(vocabulary, first.token_ids + rest.token_ids))


def test_white_space_is_bounded(compiler, backend):
    """Between two tokens of JSON there may be nothing, a space, or a line break with at most 32 spaces or 8
    tabs.
    """
    grammar = Grammar.json_schema('{"type": "array", "items": {"type": "null"}}')

    def accepts(text):
        constraint = compiler.constraint(grammar)
        try:
            for char in text:
                constraint.accept(backend.encode(char).ids)
        except RuntimeError:
            return False
        return constraint.is_complete

    fine = ["[]", "[null,null]", "[null, null]", "[\n  null,\n  null\n]", "[\n" + 32 * " " + "null]"]
    fine += ["[\n\t\tnull\n]", "[ null , null ]"]
    assert all(map(accepts, fine))
    too_much = ["[  null]", "[\n\nnull]", "[\n" + 33 * " " + "null]", " []", "[] ", "[\t]", "[\r\n]"]
    assert not any(map(accepts, too_much))
