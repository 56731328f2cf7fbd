"""The masks of many rows, filled at once, are those that each row would get alone."""

from typing import cast

import numpy as np
import pytest
from llguidance import LLMatcher

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.grammar.bad_words import BadWords
from penstock.runtime.grammar.budget import OUTPUT_S, REQUEST_S, TOKEN_S
from penstock.runtime.grammar.masks.fill import PARALLEL_ROWS, MaskFiller
from penstock.runtime.grammar.masks.mask_thread import Ahead
from penstock.runtime.grammar.matcher import SHARED_PER_TOKEN_S, SHARED_S, GrammarConstraint, TokenBits
from penstock.runtime.requests.grammar import Grammar
from tests.support.schemas import allowed_ids

ROWS = PARALLEL_ROWS + 4


@pytest.mark.parametrize("threads", [None, 0, 1, 3])
def test_all_kinds_together(threads, compiler, backend):
    """The rows have grammars, of which one is complete and one can never go on, and bad words with and
    without a grammar.
    """
    a, b = backend.token_to_id("a"), backend.token_to_id("b")

    def rows():
        rows = {row: compiler.constraint(Grammar.regex(f"a{{{row}}}b")) for row in range(1, PARALLEL_ROWS)}
        ended = compiler.constraint(Grammar.regex("a"))
        ended.accept([a])
        stuck = compiler.constraint(Grammar.ebnf('start: "a" <|im_end|>'))
        stuck.accept([a])
        words = BadWords([(a, b)], compiler.constraint(Grammar.regex("a*b?c?")), 2048)
        words.accept([a])
        alone = BadWords([(a, b)], None, 2048)
        alone.accept([a])
        return {**rows, 0: ended, ROWS - 1: stuck, ROWS - 2: words, ROWS - 3: alone}

    masks = np.full((ROWS, 64), 7, np.int32)
    stuck = MaskFiller(threads).fill_all(rows(), masks)
    assert list(stuck) == [ROWS - 1]
    assert isinstance(stuck[ROWS - 1], InvalidRequest)
    assert (masks[ROWS - 1] == -1).all()
    expected = np.zeros(64, np.int32)
    for row, constraint in rows().items():
        if row != ROWS - 1:
            constraint.fill(expected)
            assert (masks[row] == expected).all(), row
    assert set(allowed_ids(masks[0], 2048)) == {2041, 2039}
    assert b not in allowed_ids(masks[ROWS - 2], 2048)
    assert (masks[PARALLEL_ROWS] == 7).all(), "the mask of a row without a constraint must not change"


def test_nothing_to_do():
    masks = np.full((2, 64), 7, np.int32)
    assert MaskFiller(2).fill_all({}, masks) == {}
    assert (masks == 7).all()


def test_masks_must_be_contiguous():
    with pytest.raises(ValueError, match="contiguous"):
        MaskFiller().fill_all({}, np.zeros((4, 4), np.int32).T[:2])


class PanicException(BaseException):
    """Stands for pyo3's exception of this name: a panic in Rust, which `except Exception` does not catch."""


@pytest.mark.parametrize("error", [ValueError("broken"), PanicException("broken"), SystemExit(1)])
def test_whatever_a_constraint_raises_ends_only_its_own_row(compiler, error):
    class Broken:
        is_complete = False

        def fill(self, mask):
            raise error

        def accept(self, token_ids):
            pass

    masks = np.zeros((2, 64), np.int32)
    stuck = MaskFiller().fill_all({0: Broken(), 1: compiler.constraint(Grammar.regex("ab"))}, masks)
    assert list(stuck) == [0]
    assert isinstance(stuck[0], Exception), "a BaseException would end its reader's event loop"
    assert error in (stuck[0], stuck[0].__cause__)
    assert (masks[0] == -1).all()
    assert allowed_ids(masks[1], 2048)


@pytest.mark.parametrize("error", [ValueError("broken"), PanicException("broken")])
def test_if_filling_in_parallel_fails_only_the_culprit_ends(compiler, backend, error):
    def fail(executor, jobs, masks):
        masks[:] = 7
        raise error

    a = backend.token_to_id("a")
    rows = {row: compiler.constraint(Grammar.regex("ab")) for row in range(PARALLEL_ROWS)}
    rows[3] = compiler.constraint(Grammar.ebnf('start: "a" <|im_end|>'))
    rows[3].accept([a])  # no token may follow
    masks = np.zeros((PARALLEL_ROWS, 64), np.int32)
    stuck = MaskFiller(2, fail).fill_all(rows, masks)
    assert list(stuck) == [3]
    for row in set(rows) - {3}:
        expected = np.zeros(64, np.int32)
        compiler.constraint(Grammar.regex("ab")).fill(expected)
        assert (masks[row] == expected).all(), row


class Clock:
    """A clock of processor time and of wall time, which are the same, because nothing else runs."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class SlowMatcher:
    """The part of llguidance's matcher that `GrammarConstraint` uses. Every mask allows all tokens and takes
    `cost` seconds.
    """

    def __init__(self, clock, cost):
        self.clock, self.cost = clock, cost

    def unsafe_compute_mask_ptr(self, address, num_bytes):
        self.clock.now += self.cost

    def try_consume_tokens(self, tokens):
        return len(tokens)

    def is_error(self):
        return False

    is_stopped = is_error

    def is_accepting(self):
        return True


class Masks:
    eos_token_ids = frozenset({0})
    text, eos = np.full(2, -2, np.int32), np.ones(2, np.int32)


def slow(clock, cost):
    matcher, masks = cast("LLMatcher", SlowMatcher(clock, cost)), cast("TokenBits", Masks())
    return GrammarConstraint(matcher, masks, "constraint", clock=clock)


def test_masks_behind_proposed_tokens_are_filled_beside_the_others(compiler, backend):
    """Of rows whose constraint knows them. What goes wrong there gives these rows no masks, and no error."""
    a = backend.token_to_id("a")

    class Broken(BadWords):
        def fill_ahead(self, masks, token_ids):
            masks[:] = 1
            raise ZeroDivisionError

    rows = {
        0: compiler.constraint(Grammar.regex("aab")),
        1: Broken([], None, 2048),
        2: compiler.constraint(Grammar.regex("ab")),
    }
    ahead = {0: Ahead(range(3, 5), (a, a)), 1: Ahead(range(5, 6), (a,))}
    masks = np.zeros((7, 64), np.int32)
    assert MaskFiller().fill_all(rows, masks, ahead) == {}
    expected = compiler.constraint(Grammar.regex("aab"))
    for row in (0, 3, 4):
        mask = np.zeros(64, np.int32)
        expected.fill(mask)
        np.testing.assert_array_equal(masks[row], mask)
        expected.accept([a] if row < 4 else [])
    assert masks[1].any()
    assert masks[2].any()
    assert not masks[5:].any()


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("costs", [[0.021], [0.05], [0.3], [7.0], [0.1, 0.3, 0.021]])
def test_a_hostile_grammar_costs_other_rows_no_more_than_its_budgets(costs, wrapped):
    """A hostile output is ended, and until then has cost the rows beside it at most its budgets, the call
    that exceeded the one for shared masks, and the three that may exceed its own. These rows go on, and
    later ones share calls again. Masks that are filled in parallel take as long as the slowest of them; the
    others are filled one after the other.
    """
    clock, calls = Clock(), []

    def fill_parallel(executor, jobs, masks):
        calls.append(len(jobs))
        clock.now += max(matcher.cost for matcher, _ in jobs)

    def constraint(cost):
        return BadWords([(1, 2)], slow(clock, cost), 64) if wrapped else slow(clock, cost)

    filler = MaskFiller(2, fill_parallel, clock)
    usual, num_usual = 20e-6, PARALLEL_ROWS + 2
    rows = dict(enumerate(constraint(cost) for cost in [*costs, *[usual] * num_usual]))
    masks = np.zeros((len(rows), 2), np.int32)
    steps = 0
    while any(row in rows for row in range(len(costs))):
        stuck = filler.fill_all(rows, masks)
        assert all(row < len(costs) for row in stuck), "a row beside the hostile ones was ended"
        for row in stuck:
            assert "too long to follow" in str(stuck[row])
            del rows[row]
        steps += 1
        for row in rows.values():
            row.accept([5])
        hostile_s = clock.now - steps * num_usual * usual
        each = SHARED_S + REQUEST_S + OUTPUT_S + steps * (SHARED_PER_TOKEN_S + TOKEN_S)
        assert hostile_s <= len(costs) * each + 4 * sum(costs)
    late = {row: constraint(usual) for row in range(len(costs) + num_usual, len(masks) + num_usual)}
    calls.clear()
    masks = np.zeros((len(masks) + num_usual, 2), np.int32)
    assert filler.fill_all(rows | late, masks) == {}
    assert calls == [num_usual]


def test_masks_of_the_usual_cost_are_always_filled_in_parallel():
    clock, calls = Clock(), []

    def fill_parallel(executor, jobs, masks):
        calls.append(len(jobs))
        clock.now += 0.003

    filler = MaskFiller(2, fill_parallel, clock)
    rows = {row: slow(clock, 0.003) for row in range(PARALLEL_ROWS)}
    for _ in range(2000):
        assert filler.fill_all(rows, np.zeros((PARALLEL_ROWS, 2), np.int32)) == {}
        for row in rows.values():
            row.accept([5])
    assert calls == [PARALLEL_ROWS] * 2000
