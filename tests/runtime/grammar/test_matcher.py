"""One output under a grammar: how it ends, and how errors of the caller and of the grammar are reported."""

import numpy as np
import pytest

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.grammar.bad_words import BadWords
from penstock.runtime.grammar.compile.compiler import CompilerConfig, GrammarCompiler
from penstock.runtime.grammar.matcher import shorten
from penstock.runtime.requests.constraint import TokenConstraint
from penstock.runtime.requests.grammar import Grammar
from tests.support.schemas import allowed_ids

EOS = {2041, 2039}


@pytest.fixture
def allowed(backend):
    """The tokens that a constraint allows next, as texts; end tokens by their names."""

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
