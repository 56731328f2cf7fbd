"""One output under a grammar: how it ends, and how errors of the caller and of the grammar are reported."""

import json

import numpy as np
import pytest

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.grammar.bad_words import BadWords
from penstock.runtime.grammar.compile.compiler import CompilerConfig, GrammarCompiler
from penstock.runtime.grammar.matcher import TokenBits, shorten
from penstock.runtime.requests.constraint import TokenConstraint
from penstock.runtime.requests.grammar import Grammar
from tests.support.schemas import allowed_ids

EOS = {2041, 2039}


@pytest.fixture
def allowed(backend):
    """Return the tokens that a constraint allows next, as texts; end tokens by their names."""

    def read(constraint) -> set[str]:
        mask = np.full(64, 0x5A5A5A5A, np.int32)
        constraint.fill(mask)
        return {backend.id_to_token(int(i)) for i in allowed_ids(mask, 2048)}

    return read


ENDS = {"<|im_end|>", "<|endoftext|>"}


def test_both_are_constraints_for_the_engine(compiler: GrammarCompiler):
    constraint: TokenConstraint = compiler.constraint(Grammar.regex("a"))
    words: TokenConstraint = BadWords([], constraint, 2048)
    assert not words.is_complete


def test_step_by_step(compiler, backend, allowed):
    """Worked out by hand: of the demo model's vocabulary the pattern first allows only a and an."""
    constraint = compiler.constraint(Grammar.regex("an?"))
    a, an, n = (backend.token_to_id(text) for text in ("a", "an", "n"))
    assert allowed(constraint) == {"a", "an"}
    assert not constraint.is_complete
    constraint.accept([a])
    assert allowed(constraint) == {"n"} | ENDS
    assert not constraint.is_complete
    constraint.accept([n])
    assert constraint.is_complete, "it is complete without an end token, because nothing else may follow"
    assert allowed(constraint) == ENDS
    constraint.accept([2039])
    assert constraint.is_complete
    assert allowed(constraint) == ENDS
    quick = compiler.constraint(Grammar.regex("an?"))
    quick.accept([an, 2041])
    assert quick.is_complete


def test_an_end_token_completes_an_output_that_could_go_on(compiler, backend, allowed):
    constraint = compiler.constraint(Grammar.regex("a*"))
    constraint.accept([])
    constraint.accept([backend.token_to_id("a"), 2039])
    assert constraint.is_complete
    assert allowed(constraint) == ENDS


def test_the_empty_output(compiler, allowed):
    constraint = compiler.constraint(Grammar.choice([""]))
    assert allowed(constraint) == ENDS
    constraint.accept([2041])
    assert constraint.is_complete


def test_outputs_are_independent(compiler, backend, allowed):
    compiled = compiler.compile(Grammar.regex("ab|ac"))
    first, second = compiled.constraint(), compiled.constraint()
    first.accept([backend.token_to_id("a")])
    assert allowed(first) == {"b", "c"}
    assert allowed(second) == {"a", "ac", "ab"} & allowed(second)
    assert "a" in allowed(second)


@pytest.mark.parametrize("before", [[], ["a", "b"]])
def test_a_token_that_the_mask_forbids_is_a_bug(before, compiler, backend):
    constraint = compiler.constraint(Grammar.regex("abc+"))
    constraint.accept([backend.token_to_id(text) for text in before])
    with pytest.raises(RuntimeError, match="does not allow it"):
        constraint.accept([backend.token_to_id("z")])
    with pytest.raises(RuntimeError, match="does not end"):
        constraint.accept([2041])
    # Neither token was accepted.
    constraint.accept([backend.token_to_id(text) for text in "abc"[len(before) :]])


def test_nothing_comes_after_the_end(compiler, backend):
    constraint = compiler.constraint(Grammar.regex("a"))
    constraint.accept([backend.token_to_id("a")])
    with pytest.raises(RuntimeError, match="after the end"):
        constraint.accept([backend.token_to_id("a")])
    constraint.accept([2041])
    with pytest.raises(RuntimeError, match="after an end token"):
        constraint.accept([2041])


def test_special_tokens_are_no_text(compiler, backend, allowed):
    constraint = compiler.constraint(Grammar.regex("(?s:.*)"))
    everything = allowed(constraint)
    assert {"<|im_start|>", "<think>", "<tool_call>"}.isdisjoint(everything)
    assert len(everything) > 1900
    with pytest.raises(RuntimeError):
        constraint.accept([backend.token_to_id("<|im_start|>")])


@pytest.mark.parametrize("text", ['start: "a" <|im_end|> "b"', 'start: "a" <[2039]>'])
def test_a_grammar_with_an_end_token_in_the_middle_cannot_go_on(text, compiler, backend, allowed):
    constraint = compiler.constraint(Grammar.ebnf(text))
    constraint.accept([backend.token_to_id("a")])
    with pytest.raises(InvalidRequest) as caught:
        allowed(constraint)
    (violation,) = caught.value.violations
    assert violation.field == "constraint.ebnf"
    assert "cannot go on" in violation.description


def test_an_end_token_is_never_part_of_the_output(compiler, allowed):
    """With `stop=""` or `<[*]>`, llguidance would allow end tokens where the grammar cannot end."""
    anything = compiler.constraint(Grammar.ebnf('start: <[*]> "b"'))
    assert allowed(anything).isdisjoint(ENDS)
    assert len(allowed(anything)) > 2000


def test_the_mask_must_be_one_row_of_the_right_size(compiler):
    constraint = compiler.constraint(Grammar.regex("a"))
    with pytest.raises(ValueError, match="contiguous"):
        constraint.fill(np.zeros((64, 2), np.int32)[:, 0])
    with pytest.raises(ValueError, match="size"):
        constraint.fill(np.zeros(63, np.int32))


def test_a_limit_ends_the_outputs_that_share_a_lexer(vocabulary, backend, allowed):
    """If one output needs more states than allowed, it ends, and so do the outputs that share its lexer,
    whatever they wrote. A new output starts with a new lexer.
    """
    compiler = GrammarCompiler(vocabulary, CompilerConfig(time_limit_s=60.0, max_lexer_states=2000))
    grammar = Grammar.json_schema('{"type": "string", "maxLength": 100000}')
    quote, a = backend.token_to_id('"'), backend.token_to_id("a")
    greedy, sibling, idle = (compiler.constraint(grammar) for _ in range(3))
    greedy.accept([quote])
    sibling.accept([quote])
    with pytest.raises(InvalidRequest, match="too many states"):  # noqa: PT012  after some hundred steps
        for _ in range(2000):
            allowed(greedy)
            greedy.accept([a])
    with pytest.raises(InvalidRequest, match="too many states"):
        allowed(sibling)
    with pytest.raises(InvalidRequest, match="too many states"):
        idle.accept([quote])
    fresh = compiler.constraint(grammar)
    fresh.accept([quote, a])
    assert '"' in allowed(fresh)
    compiler.close()


def test_messages_are_cut_to_what_matters():
    assert shorten("bad\n<state>\nTokens: x") == "bad"
    assert shorten("bad\n<non-verbose/>") == "bad"
    assert shorten("panic: no\n<backtrace>\n 0: x") == "panic: no"
    assert shorten("x" * 300) == "x" * 77 + " ... " + "x" * 77
    assert len(shorten("y\n" * 1000)) == 600


def test_what_may_follow_proposed_tokens_by_hand(compiler, backend):
    """The constraint itself stays where it is. Rows stay as they are from the first token on that may not
    follow, or behind which nothing more follows.
    """
    a, an, n, x = (backend.token_to_id(text) for text in ("a", "an", "n", "x"))
    constraint = compiler.constraint(Grammar.regex("an?x?x?"))
    for proposed, expected in (
        ([a, n, x], [{"n", "x"} | ENDS, {"x"} | ENDS, {"x"} | ENDS]),
        ([an, x, x], [{"x"} | ENDS, {"x"} | ENDS, set()]),
        ([a, a, n], [{"n", "x"} | ENDS, set(), set()]),
        ([a, 2041, n], [{"n", "x"} | ENDS, set(), set()]),
        ([2045, 2046, 2047], [set(), set(), set()]),
    ):
        masks = np.zeros((3, 64), np.int32)
        constraint.fill_ahead(masks, proposed)
        found = [{backend.id_to_token(int(i)) for i in allowed_ids(mask, 2048)} for mask in masks]
        assert [names - {"xx"} for names in found] == expected
    constraint.accept([a, n])
    masks = np.zeros((1, 64), np.int32)
    constraint.fill_ahead(masks, [x])
    assert masks.any()
    constraint.accept([x, x])
    assert constraint.is_complete
    masks[:] = 0
    constraint.fill_ahead(masks, [x])
    assert not masks.any()


def test_masks_ahead_are_those_that_come(compiler, backend):
    """Of all tokens of a text, and of words that are forbidden in it; wherever the output stands."""
    properties = {"name": {"type": "string"}, "size": {"type": "integer"}}
    schema = json.dumps({"type": "object", "properties": properties, "required": ["name"]})
    text = '{"name": "an old tree", "size": 12}'
    ids = backend.encode(text, add_special_tokens=False).ids
    words = [tuple(ids[i : i + 2]) for i in (1, 5)]  # forbidden, but for the words before them

    def constraint():
        inner = compiler.constraint(Grammar.json_schema(schema))
        inner._clock = lambda: 0.0  # so that there is time for all of them
        return BadWords(words, inner, 2048)

    expected = np.zeros((len(ids) + 1, 64), np.int32)
    whole = constraint()
    for mask, token in zip(expected, [*ids, None], strict=True):
        whole.fill(mask)
        if token is not None:
            whole.accept([token])
    for begun in range(0, len(ids), 4):
        one = constraint()
        one.accept(ids[:begun])
        masks = np.zeros((len(ids) - begun, 64), np.int32)
        one.fill_ahead(masks, ids[begun:])
        # The last row stays empty, because the output is complete there.
        np.testing.assert_array_equal(masks[:-1], expected[begun + 1 : -1])
        again = np.zeros(64, np.int32)
        one.fill(again)
        np.testing.assert_array_equal(again, expected[begun])


def test_an_error_ahead_does_not_end_the_output(compiler, backend):
    """What was proposed ran into a limit of llguidance's, which ends a matcher for ever."""
    constraint = compiler.constraint(Grammar.regex("a*"))
    matcher = constraint._matcher

    class Failing:
        def deep_copy(self):
            copy = matcher.deep_copy()
            copy.consume_tokens([backend.token_to_id("x")])  # an error
            assert copy.is_error()
            return copy

        def __getattr__(self, name):
            return getattr(matcher, name)

    constraint._matcher = Failing()
    masks = np.zeros((2, 64), np.int32)
    constraint.fill_ahead(masks, [backend.token_to_id("a")] * 2)
    assert not masks.any()
    constraint.fill(masks[0])
    assert masks[0].any()


def test_text_that_must_come_is_expected_in_the_models_tokens(compiler, backend):
    """But for the last of them, which may be written together with what follows. By hand: behind the
    beginning of a JSON object with one key, only that key may come.
    """
    properties = {"quantity": {"enum": ["alphabet", "beta"]}}
    schema = json.dumps({"type": "object", "properties": properties, "required": ["quantity"]})
    constraint = compiler.constraint(Grammar.json_schema(schema))
    assert not constraint.forced()
    for written, expected in (
        ('{"', 'quantity"'),
        ("qu", 'antity"'),
        ('antity": "al', 'phabet"'),
        ("phabet", ""),
    ):
        constraint.accept(backend.encode(written, add_special_tokens=False).ids)
        *known, _ = backend.encode(expected, add_special_tokens=False).ids or [0]
        assert list(constraint.forced()) == known
        assert list(BadWords([], constraint, 2048).forced()) == known


def test_nothing_is_expected_where_the_tokenizer_adds_to_the_text(vocabulary, backend):
    space = backend.token_to_id("\u0120")
    a = backend.token_to_id("a")
    for encode, expected in ((lambda text: [a, a], [a, a]), (lambda text: [space, a, a], [])):
        assert list(TokenBits(vocabulary, encode).tokens_of(b"aa")) == expected
    assert list(TokenBits(vocabulary).tokens_of(b"aa")) == []
