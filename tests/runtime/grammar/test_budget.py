"""What an output may cost that follows a grammar, and what happens to one that costs more."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from tokenizers import Tokenizer

from penstock.runtime.errors import CostlyGrammar, InvalidRequest
from penstock.runtime.grammar import budget
from penstock.runtime.grammar.budget import FEW_TOKENS, Account, Budget
from penstock.runtime.grammar.compile.compiler import CompilerConfig, GrammarCompiler
from penstock.runtime.grammar.compile.costly import MOST, REFUSED_S, Costly
from penstock.runtime.grammar.matcher import GrammarConstraint
from penstock.runtime.grammar.vocabulary import Vocabulary
from penstock.runtime.requests.grammar import Grammar, GrammarKind
from tests.support.schemas import RandomWriter, allowed_ids

AMBIGUOUS = 'start: s\ns: s s s | s s | t\nt: /[a-z]/ | /[a-y]/ | /[ a-z]/ | ""'
"""A grammar from an attack: without limits each of its masks takes longer than the one before, up to seconds.
"""


@pytest.fixture
def compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary, CompilerConfig(time_limit_s=60.0))
    yield compiler
    compiler.close()


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REQUEST_S", "OUTPUT_S"):
        monkeypatch.setattr(budget, name, 0.0)


def fill(constraint: GrammarConstraint) -> None:
    constraint.fill(np.zeros(64, np.int32))


def test_a_budget_is_its_first_amount_and_what_tokens_earn() -> None:
    spent = Budget(1.0, 0.25)
    spent.earn()
    spent.use(1.0)
    states = [spent.is_spent]
    spent.use(0.25)
    states.append(spent.is_spent)
    spent.earn()
    states.append(spent.is_spent)
    assert states == [False, True, False], "a budget never exceeds its first amount"


def test_only_an_output_that_spends_all_within_a_few_tokens_blames_the_grammar() -> None:
    """Later the cause may be what the prompt made the model write, and then the grammar must stay available
    to others.
    """
    calls: list[str] = []
    for name, num_tokens in (("early", FEW_TOKENS - 1), ("late", FEW_TOKENS)):
        account = Account(Budget(0.05), partial(calls.append, name))
        for _ in range(num_tokens):
            account.earn()
        assert account.use(0.05)
        assert not account.use(0.025)
        account.refuse()
    assert calls == ["early", "early"]


def test_one_pause_of_the_process_ends_no_output(compiler: GrammarCompiler) -> None:
    """A collection of garbage may fall into any mask, and takes as long as there are objects. Of a grammar
    that is slow every mask is.
    """
    grammar = Grammar.regex("a*")
    constraint = compiler.constraint(grammar)
    constraint._charge(7.0)
    constraint._charge(7.0)
    with pytest.raises(InvalidRequest, match="too long to follow"):
        constraint._charge(7.0)


def test_a_request_that_spends_its_budget_ends_no_other(
    compiler: GrammarCompiler, backend: Tokenizer
) -> None:
    """Other outputs of the same grammar go on, and new requests may use it."""
    grammar = Grammar.regex("a*")
    compiled = compiler.compile(grammar)
    running, (steered,) = compiled.constraint(), compiled.constraints(1, grammar.field)
    for _ in range(FEW_TOKENS):
        steered.accept(backend.encode("a").ids)
    steered._charge(1000.0)
    steered._charge(1000.0)
    with pytest.raises(InvalidRequest, match="too long to follow"):
        steered._charge(1000.0)
    fill(running)
    fill(compiler.constraint(grammar))


def test_a_grammar_that_has_proven_quick_stays_so_when_it_is_compiled_again(vocabulary: Vocabulary) -> None:
    """A grammar is compiled again every few outputs. If it were unproven each time, all its outputs would be
    treated as new ones again and again.
    """
    compiler = GrammarCompiler(vocabulary, CompilerConfig(time_limit_s=60.0, outputs_per_lexer=1))
    grammar = Grammar.regex("a*")
    first = compiler.constraint(grammar)
    for _ in range(100):
        first.lexer.took(0.0)
    second = compiler.constraint(grammar)
    assert second.lexer is not first.lexer
    assert second.lexer.is_proven
    compiler.close()


@pytest.mark.usefixtures("nothing_left")
def test_the_outputs_of_a_request_share_its_budget(compiler: GrammarCompiler) -> None:
    first, second = compiler.compile(Grammar.regex("a*")).constraints(2, "constraint.regex")
    with pytest.raises(InvalidRequest, match=r"constraint\.regex: .*too long to follow"):
        fill(first)
    with pytest.raises(InvalidRequest, match="too long to follow"):
        fill(second)


@pytest.mark.usefixtures("nothing_left")
def test_a_costly_grammar_is_refused_at_once_for_a_while(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This concerns everybody who asks for the same source, whatever comes before it in the output. The error
    names the field of the request that asks.
    """
    now = 0.0
    monkeypatch.setattr(compiler, "_costly", Costly(lambda: now))
    grammar = Grammar.regex("a*")
    with pytest.raises(InvalidRequest):
        fill(compiler.constraint(grammar))
    now = REFUSED_S - 0.5
    thinking = Grammar(GrammarKind.REGEX, "a*", "chat.tool_choice", before='start: "x" @answer')
    for asked, field in ((grammar, "constraint.regex"), (thinking, "chat.tool_choice")):
        with pytest.raises(CostlyGrammar, match="is refused for another 1 s") as caught:
            compiler.compile(asked)
        assert (caught.value.field, caught.value.retry_after_s) == (field, 1)
    compiler.compile(Grammar.choice(["a*"]))
    now = REFUSED_S
    compiler.compile(grammar)


def test_only_so_many_costly_grammars_are_remembered() -> None:
    costly = Costly(lambda: 0.0)
    grammars = [Grammar.regex(str(i)) for i in range(MOST + 1)]
    for grammar in grammars:
        costly.note(grammar)
    assert [costly.refused_s(grammar) > 0 for grammar in grammars] == [False] + [True] * MOST


def test_any_json_object_is_never_refused() -> None:
    """This grammar is the server's own and is used by everybody."""
    costly = Costly(lambda: 0.0)
    costly.note(Grammar.json_object())
    assert costly.refused_s(Grammar.json_object()) == 0


def test_an_ambiguous_grammar_exceeds_the_work_of_a_step_at_any_speed(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work is counted in items, without a limit of time. Afterwards the grammar is refused."""
    monkeypatch.setattr(budget, "REQUEST_S", 1e9)
    grammar = Grammar.ebnf(AMBIGUOUS)
    compiled = compiler.compile(grammar)
    constraint = compiled.constraint(grammar.field)
    mask, num_tokens = np.zeros(64, np.int32), 0
    with pytest.raises(InvalidRequest, match="Too many items"):  # noqa: PT012  after some tokens
        while num_tokens < 40:
            constraint.fill(mask)
            constraint.accept([int(allowed_ids(mask, 2039)[-1])])
            num_tokens += 1
    with pytest.raises(CostlyGrammar, match="is refused for another"):
        compiler.compile(grammar)


def test_honest_grammars_use_less_than_they_earn(compiler: GrammarCompiler, writer: RandomWriter) -> None:
    """A schema of three hundred optional properties and a choice among ten thousand texts stay within the
    work that a step may take.
    """
    properties = ", ".join(f'"property_{i}": {{"type": "string"}}' for i in range(300))
    schema = f'{{"type": "object", "properties": {{{properties}}}, "additionalProperties": false}}'
    choices = [f"option number {i * 7919 % 100_003}" for i in range(10_000)]
    for grammar in (Grammar.json_schema(schema), Grammar.choice(choices)):
        for seed in range(3):
            compiled = compiler.compile(grammar)
            assert writer.write(compiled.constraint(), seed, max_tokens=60).token_ids
