"""Which masks are made for a step, and how long the step waits for them.

A slow mask is one that the test holds back, so nothing depends on the machine's speed: limits that shall be
reached are zero, and others are far away.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import numpy as np
import pytest
from llguidance import LLMatcher

from penstock.runtime.grammar.bad_words import BadWords
from penstock.runtime.grammar.masks.fill import PARALLEL_ROWS, MaskFiller
from penstock.runtime.grammar.masks.mask_thread import MaskThread, Rows, RowsAhead
from penstock.runtime.grammar.masks.step_masks import MAX_LATE, Filled, StepMasks
from penstock.runtime.grammar.matcher import GrammarConstraint, Lexer, TokenBits
from penstock.runtime.requests.constraint import Mask, TokenConstraint

NEVER_S = 60.0


class Gated:
    """The part of llguidance's matcher that `GrammarConstraint` uses. It makes masks whose words are all
    `value`, once its gates are open.
    """

    def __init__(self, value: int, gate: threading.Event | None = None) -> None:
        self.value, self.gate = value, gate
        self.begun = threading.Event()
        self.num_made = 0
        self.shared_gate: threading.Event | None = None

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self.begun.set()
        if self.gate is not None:
            assert self.gate.wait(NEVER_S)
        ctypes.memmove(address, np.full(2, self.value, np.int32).tobytes(), num_bytes)
        self.num_made += 1

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        """Take the lexer's lock, as making a mask does."""
        if self.shared_gate is not None:
            assert self.shared_gate.is_set(), "the engine's thread would wait for a mask"
        return 1

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False

    def is_accepting(self) -> bool:
        return False


class Bits:
    eos_token_ids = frozenset({0})
    text, eos = np.full(2, -1, np.int32), np.ones(2, np.int32)


def constraint(
    value: int, gate: threading.Event | None = None, lexer: Lexer | None = None, *, proven: bool = False
) -> GrammarConstraint:
    lexer = lexer or Lexer()
    for _ in range(100 * proven):
        lexer.took(0.0)
    # The clock stands still, so that no row counts as slow unless a test says so.
    return GrammarConstraint(
        cast("LLMatcher", Gated(value, gate)),
        cast("TokenBits", Bits()),
        "constraint",
        clock=lambda: 0.0,
        lexer=lexer,
    )


def matcher(of: GrammarConstraint) -> Gated:
    return cast("Gated", of._matcher)


class Step:
    """Asks for the masks of steps, over and over if need be."""

    def __init__(self, step_masks: StepMasks) -> None:
        self.step_masks = step_masks

    def once(self, rows: Mapping[int, TokenConstraint], *, others: bool = True) -> Filled:
        return self.step_masks.fill(rows, np.full((max(rows) + 1, 2), -1, np.int32), others=others)

    def until(self, rows: Mapping[int, TokenConstraint], wanted: Callable[[Filled], bool]) -> Filled:
        while True:
            filled = self.once(rows)
            if wanted(filled):
                return filled


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def step() -> Iterator[Step]:
    step_masks = StepMasks(MaskFiller(0).fill_all, step_s=0.05, wall_s=0.05)
    yield Step(step_masks)
    step_masks.close()


def test_a_slow_mask_is_waited_for_by_its_own_row_only(step: Step, gate: threading.Event) -> None:
    rows: dict[int, TokenConstraint] = {0: constraint(5, gate), 1: constraint(6), 2: constraint(7)}
    for _ in range(5):
        filled = step.until(rows, lambda filled: filled.skipped == {0})
        assert (filled.masks == [[-1, -1], [6, 6], [7, 7]]).all()
        assert not filled.errors
    gate.set()
    filled = step.until(rows, lambda filled: not filled.skipped)
    assert (filled.masks == [[5, 5], [6, 6], [7, 7]]).all()


def test_a_late_mask_is_used_once(step: Step, gate: threading.Event) -> None:
    """The next mask of the row is made anew, and nobody reads what the thread that was left behind still
    writes.
    """
    slow = constraint(5, gate)
    first = step.until({0: slow, 1: constraint(6)}, lambda filled: filled.skipped == {0}).masks
    gate.set()
    step.until({0: slow}, lambda filled: not filled.skipped)
    matcher(slow).value = 8
    assert (step.until({0: slow}, lambda filled: not filled.skipped).masks == 8).all()
    assert (first[0] == -1).all()
    assert matcher(slow).num_made == 2


def test_a_row_may_have_another_index_when_its_late_mask_is_ready(step: Step, gate: threading.Event) -> None:
    slow, quick = constraint(5, gate), constraint(6)
    step.until({0: slow, 1: quick}, lambda filled: filled.skipped == {0})
    gate.set()
    filled = step.until({0: quick, 3: slow}, lambda filled: not filled.skipped)
    assert (filled.masks[[0, 3]] == [[6, 6], [5, 5]]).all()


def test_outputs_that_share_a_lexer_wait_for_it(step: Step, gate: threading.Event) -> None:
    """Their masks would wait for llguidance's lock on the thread that serves all other rows."""
    lexer = Lexer()
    slow, sibling = constraint(5, gate, lexer), constraint(6, None, lexer)
    words = BadWords([(1, 2)], constraint(7, None, lexer), 64)
    step.until({0: slow, 3: constraint(8)}, lambda filled: filled.skipped == {0})
    filled = step.until(
        {0: slow, 1: sibling, 2: words, 3: constraint(8)}, lambda filled: 3 not in filled.skipped
    )
    assert filled.skipped == {0, 1, 2}
    assert matcher(sibling).num_made == 0
    gate.set()
    step.until({0: slow, 1: sibling, 2: words}, lambda filled: not filled.skipped)


def test_a_step_does_not_wait_for_outputs_that_share_the_lexer_of_a_slow_one(
    gate: threading.Event,
) -> None:
    """Here a step waits forever for the thread that makes masks, so it would never end if it waited for the
    sibling.
    """
    step_masks = StepMasks(MaskFiller(0).fill_all, step_s=NEVER_S, wall_s=NEVER_S, alone_s=NEVER_S)
    lexer = Lexer()
    slow, sibling, other = constraint(5, gate, lexer), constraint(6, gate, lexer), constraint(7)
    slow.expected_s = 1.0
    step = Step(step_masks)
    filled = step.once({0: sibling, 1: slow, 2: other})
    assert filled.skipped == {0, 1}
    assert filled.late == {1}, "the sibling's own mask is not late"
    assert (filled.masks[2] == 7).all()
    assert matcher(sibling).num_made == 0
    gate.set()
    step.until({0: sibling, 1: slow, 2: other}, lambda filled: not filled.skipped)
    step_masks.close()


def test_a_token_is_never_accepted_while_a_mask_holds_its_lexer(gate: threading.Event) -> None:
    """Otherwise the engine's thread would wait for the mask to accept the token. The mask that is ready
    already is kept.
    """
    lexer = Lexer()
    first, late = constraint(5, None, lexer), constraint(6, gate, lexer)

    class Slow(MaskThread):
        """Seems to use no processor time until it comes to the mask that is late."""

        def cpu_s(self) -> float:
            return NEVER_S * matcher(late).begun.is_set()

    step_masks = StepMasks(MaskFiller(0).fill_all, step_s=0.01, wall_s=NEVER_S, make_thread=Slow)
    step = Step(step_masks)
    for shared in (first, late):
        matcher(shared).shared_gate = gate
    rows: dict[int, TokenConstraint] = {2: constraint(7), 0: first, 1: late}
    for _ in range(5):
        filled = step.once(rows)
        for row in set(rows) - filled.skipped:
            rows[row].accept([1])
        assert filled.skipped == {0, 1}
        assert (filled.masks == [[-1, -1], [-1, -1], [7, 7]]).all()
    gate.set()
    filled = step.until(rows, lambda filled: not filled.skipped)
    assert (filled.masks == [[5, 5], [6, 6], [7, 7]]).all()
    assert matcher(first).num_made == 1
    step_masks.close()


def test_a_late_mask_is_kept_while_its_row_sits_out(step: Step, gate: threading.Event) -> None:
    slow, quick = constraint(5, gate), constraint(6)
    step.until({0: slow, 1: quick}, lambda filled: filled.skipped == {0})
    (late,) = step.step_masks._late.values()
    gate.set()
    assert late.job.wait(NEVER_S)
    for _ in range(3):
        step.once({1: quick})
    filled = step.until({0: slow, 1: quick}, lambda filled: 0 not in filled.skipped)
    assert (filled.masks[0] == 5).all()
    assert matcher(slow).num_made == 1


def test_kept_masks_are_dropped_with_their_request(step: Step, gate: threading.Event) -> None:
    rows: dict[int, TokenConstraint] = {0: constraint(5, gate), 1: constraint(6)}
    step.until(rows, lambda filled: filled.skipped == {0})
    gate.set()
    gone = weakref.ref(rows.pop(0))

    def forgotten(_: Filled) -> bool:
        gc.collect()
        return gone() is None and not step.step_masks._kept

    step.until(rows, forgotten)


def test_with_enough_threads_left_behind_only_proven_lexers_are_served(
    step: Step, gate: threading.Event
) -> None:
    slow: dict[int, TokenConstraint] = {row: constraint(5, gate) for row in range(MAX_LATE)}
    proven, new = constraint(6, proven=True), constraint(7)
    rows = {**slow, MAX_LATE: proven}
    step.until(
        rows, lambda _: all(matcher(cast("GrammarConstraint", c)).begun.is_set() for c in slow.values())
    )
    filled = step.until({**rows, MAX_LATE + 1: new}, lambda filled: MAX_LATE not in filled.skipped)
    assert filled.skipped == {*slow, MAX_LATE + 1}
    assert filled.late == set(slow)
    assert matcher(new).num_made == 0
    gate.set()
    step.until({**rows, MAX_LATE + 1: new}, lambda filled: not filled.skipped)


def test_if_no_other_row_has_a_token_the_step_waits_for_masks() -> None:
    """Otherwise the same position would be computed over and over for nothing."""
    step_masks = StepMasks(MaskFiller(0).fill_all, step_s=0.0, wall_s=0.0, alone_s=NEVER_S)
    gate = threading.Event()
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    assert not Step(step_masks).once({0: constraint(5, gate)}, others=False).skipped
    opener.join()
    step_masks.close()


def test_a_thread_that_gets_no_processor_time_does_not_count_as_slow() -> None:
    """The mask comes late here, but its thread has used no processor time."""
    step_masks = StepMasks(MaskFiller(0).fill_all, step_s=0.001, wall_s=NEVER_S)
    gate = threading.Event()
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    assert not Step(step_masks).once({0: constraint(5, gate), 1: constraint(6)}).skipped
    opener.join()
    step_masks.close()


def test_a_mask_that_was_slow_before_is_begun_but_not_waited_for(gate: threading.Event) -> None:
    """Here every wait of a step has a limit that is never reached."""
    step_masks = StepMasks(MaskFiller(0).fill_all, step_s=NEVER_S, wall_s=NEVER_S, alone_s=NEVER_S)
    slow, quick = constraint(5, gate), constraint(6)
    slow.expected_s = 1.0
    step = Step(step_masks)
    filled = step.once({0: slow, 1: quick})
    assert filled.skipped == {0}
    assert (filled.masks[1] == 6).all()
    gate.set()
    filled = step.until({0: slow, 1: quick}, lambda filled: not filled.skipped)
    assert (filled.masks[0] == 5).all()
    step_masks.close()


def test_an_error_ends_its_own_row_and_may_come_late(step: Step, gate: threading.Event) -> None:
    class Broken:
        is_complete = False

        def __init__(self, gate: threading.Event | None) -> None:
            self.gate = gate

        def fill(self, mask: Mask) -> None:
            if self.gate is not None:
                self.gate.wait(NEVER_S)
            raise ValueError("broken")

        def accept(self, token_ids: object) -> None:
            pass

    late: TokenConstraint = Broken(gate)
    filled = step.until({0: Broken(None), 1: late, 2: constraint(6)}, lambda filled: filled.skipped == {1})
    assert list(filled.errors) == [0]
    gate.set()
    filled = step.until({1: late, 2: constraint(6)}, lambda filled: not filled.skipped)
    assert list(filled.errors) == [1]
    assert str(filled.errors[1]) == "broken"


def test_a_bug_is_raised_to_the_engine() -> None:
    def fail(rows: Rows, masks: Mask, ahead: RowsAhead) -> Mapping[int, Exception]:
        raise ZeroDivisionError

    step_masks = StepMasks(fail, step_s=NEVER_S, wall_s=NEVER_S)
    with pytest.raises(ZeroDivisionError):
        Step(step_masks).once({0: constraint(5)})
    step_masks.close()


def test_only_masks_of_proven_lexers_are_filled_in_parallel() -> None:
    batches: list[set[int]] = []

    def fill(rows: Rows, masks: Mask, ahead: RowsAhead) -> Mapping[int, Exception]:
        batches.append(set(rows))
        return {}

    step_masks = StepMasks(fill, in_parallel=True, step_s=NEVER_S, wall_s=NEVER_S)
    sure = {row: constraint(5, proven=True) for row in range(PARALLEL_ROWS)}
    Step(step_masks).once({**sure, 20: constraint(6), 21: constraint(7)})
    assert batches == [set(sure), {20}, {21}]
    batches.clear()
    Step(step_masks).once({row: sure[row] for row in range(2)})
    assert batches == [{0}, {1}]
    step_masks.close()


def test_the_thread_ends_when_it_is_closed() -> None:
    thread = MaskThread(MaskFiller(0).fill_all)
    thread.close()
    thread._thread.join(NEVER_S)
    assert not thread._thread.is_alive()
