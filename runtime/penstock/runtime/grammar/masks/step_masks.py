"""Decides which masks are made for a step: the host time for masks is bounded, and rows whose masks take
longer get their token in a later step.

A mask usually takes some 20 us, in new states of the lexer up to 3 ms, and in a very ambiguous grammar
hundreds of milliseconds, which llguidance can neither foretell nor break off. So masks are made on a thread
of their own, and a step waits for that thread only for a limited time. A row whose mask is not ready then has
no token in this step. Its mask is finished on the thread, which is left behind with it at a low priority, and
is used in a later step. Rows that share the lexer of that mask, which is locked, have no tokens meanwhile; a
new thread makes the masks of all other rows.

This decides in which step a row gets its token, never which token.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import numpy as np

from penstock.runtime.errors import PenstockError
from penstock.runtime.grammar.bad_words import BadWords
from penstock.runtime.grammar.masks.fill import PARALLEL_ROWS
from penstock.runtime.grammar.masks.mask_thread import (
    NOTHING_AHEAD,
    FillRows,
    Job,
    MaskThread,
    Rows,
    RowsAhead,
)
from penstock.runtime.grammar.matcher import QUICK_S, GrammarConstraint
from penstock.runtime.requests.constraint import Mask, TokenConstraint

STEP_S = 0.01
"""Seconds of processor time that a step waits for, beyond what its masks are expected to take."""
WALL_S = 0.1
"""Longest time that a step waits for that, in seconds, on a busy machine."""
_LEAST_PAUSE_S = 0.001
ALONE_S = 0.25
"""Seconds that a step waits if no other row would have a token of it: as long as callers may wait until the
engine's thread answers them."""
_IMPATIENT, _PAUSES = 0.1, 4
"""A step that waited in vain is followed by impatient steps, which wait for this fraction of STEP_S, for this
many times as long as it waited."""
MAX_LATE = 2
"""Most threads that are left behind. Beyond that, only masks of lexers that have always been quick are made.
"""


class Filled(NamedTuple):
    """The masks of a step's rows."""

    masks: Mask
    """The masks. Nobody writes them any more, and those of `errors` and `skipped` allow all tokens."""
    errors: dict[int, Exception]
    """Row to error, for rows whose output cannot go on."""
    skipped: frozenset[int]
    """Rows that have no token in this step."""
    late: frozenset[int]
    """The skipped rows whose own mask takes long; the others are skipped because of these, or because it was
    not their turn."""


class _Late(NamedTuple):
    job: Job
    row: int
    constraint: TokenConstraint


class _Kept(NamedTuple):
    constraint: Callable[[], TokenConstraint | None]
    """Returns None once nobody has the constraint any more, because its request has ended."""
    mask: Mask
    error: Exception | None


class StepMasks:
    """Fills the masks of one step after the other. It is used on one thread."""

    def __init__(
        self,
        fill: FillRows,
        *,
        in_parallel: bool = False,
        step_s: float = STEP_S,
        wall_s: float = WALL_S,
        alone_s: float = ALONE_S,
        make_thread: Callable[[FillRows], MaskThread] = MaskThread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fill` is `MaskFiller.fill_all`, which fills many rows at once if `in_parallel`."""
        self._fill = fill
        self._in_parallel = in_parallel
        self._step_s, self._wall_s, self._alone_s = step_s, wall_s, alone_s
        self._make_thread = make_thread
        self._clock = clock
        self._patient_again = -math.inf
        self._thread: MaskThread | None = None
        self._late: dict[int, _Late] = {}
        """Masks that are being made on threads left behind, by the identity of the constraint, which is kept
        alive here."""
        self._kept: dict[int, _Kept] = {}
        """Masks that were made and not used yet, by the identity of the constraint, which lives as long as
        its request."""

    def fill(
        self, constraints: Rows, masks: Mask, *, others: bool, ahead: RowsAhead = NOTHING_AHEAD
    ) -> Filled:
        """Fill the rows of `masks` that `constraints` names, and those of `ahead` that can be had. `masks` is
        contiguous and holds -1 throughout, but for 0 in the rows of `ahead`, and belongs to the masks' thread
        from now on.

        `others`: whether the step has a token for rows that slow masks should not hold up.
        """
        ready = self._ready(constraints)
        waiting = self._waiting(constraints) - ready
        if not others and len(waiting) == len(constraints) and self._late:
            next(iter(self._late.values())).job.wait(self._alone_s)
            ready = self._ready(constraints)
            waiting = self._waiting(constraints) - ready
        quick, slow = self._sort({row: c for row, c in constraints.items() if row not in waiting | ready})
        if slow and (others or quick or ready):
            # Nobody waits for these. They are made one after the other, because each takes a processor.
            if self._num_late < MAX_LATE:
                self._begin_late(dict([slow[0]]), masks)
                # Rows that share its lexer would wait for it, on the thread that serves all other rows.
                waiting = self._waiting(constraints)
                quick = [item for item in quick if item[0] not in waiting]
        else:
            quick = quick + slow
        made = Job((), masks)
        if quick:
            made = self._make(quick, masks, ahead, patient=not (others or ready))
        if made.failure is not None:
            raise made.failure
        return self._filled(constraints, made, ready)

    def _make(
        self, rows: list[tuple[int, TokenConstraint]], masks: Mask, ahead: RowsAhead, *, patient: bool
    ) -> Job:
        """Make the masks of these rows in the time that a step has, or in more if `patient` and none was
        made. Returns what was made.
        """
        job = Job(list(self._batches(rows)), masks, ahead)
        began = self._clock()
        extra = self._step_s if began >= self._patient_again else _IMPATIENT * self._step_s
        num_masks = {row: 1 + len(behind.rows) for row, behind in ahead.items()}
        expected = sum(expected_s(constraint) * num_masks.get(row, 1) for row, constraint in rows)
        ended = self._wait(job, extra + expected)
        if patient and not (ended or job.done):
            ended = job.wait(self._alone_s)
        if not ended:
            job = self._leave(job)
            now = self._clock()
            self._patient_again = now + _PAUSES * (now - began)
        return job

    def _wait(self, job: Job, cpu_s: float) -> bool:
        """Say whether the job ended before its thread used this much processor time for it. A thread that
        gets no processor is not slow, so it is waited for, up to a limit.
        """
        thread = self._thread = self._thread or self._make_thread(self._fill)
        before_s, until = thread.cpu_s(), self._clock() + self._wall_s
        thread.put(job)
        pause = min(cpu_s, self._wall_s)
        while not job.wait(pause):
            left_s = cpu_s - (thread.cpu_s() - before_s)
            if left_s <= 0 or self._clock() >= until:
                return False
            pause = max(left_s, _LEAST_PAUSE_S)
        return True

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _filled(self, constraints: Rows, made: Job, ready: set[int]) -> Filled:
        """Return the step's rows as they are now. A row that shares a lexer with a mask that is still being
        made has no token, even if its own mask is ready, because to accept that token the engine's thread
        would wait for the lexer's lock. Its mask is kept.
        """
        self._keep_finished()
        busy = self._busy
        errors: dict[int, Exception] = {}
        served: set[int] = set()
        masks = made.masks
        for row in ready | made.done:
            constraint = constraints[row]
            kept = self._kept.get(id(constraint)) if row in ready else None
            error = made.errors.get(row) if kept is None else kept.error
            if error is not None:
                errors[row] = error
            elif lexer_of(constraint) in busy:
                if kept is None:
                    self._keep(constraint, made, row)
                continue
            elif kept is not None:
                masks[row] = kept.mask
            served.add(row)
            self._kept.pop(id(constraint), None)
        skipped = frozenset(constraints).difference(served)
        if skipped:
            masks = masks.copy()  # a thread that was left behind may be writing
            masks[list(skipped)] = -1
        late = frozenset(row for row in skipped if id(constraints[row]) in self._late)
        return Filled(masks, errors, skipped, late)

    # -- rows that take long --

    @property
    def _num_late(self) -> int:
        return len({id(late.job) for late in self._late.values()})

    @property
    def _busy(self) -> set[Hashable]:
        """The lexers that are locked by masks which nobody waits for."""
        return {lexer_of(late.constraint) for late in self._late.values()}

    def _keep_finished(self) -> None:
        """Keep masks that came late, until their row asks for them or its request is gone."""
        if self._kept:
            self._kept = {key: kept for key, kept in self._kept.items() if kept.constraint() is not None}
        for key, late in list(self._late.items()):
            if _is_done(late):
                del self._late[key]
                self._keep(late.constraint, late.job, late.row)

    def _keep(self, constraint: TokenConstraint, job: Job, row: int) -> None:
        error = job.errors.get(row)
        if isinstance(error, PenstockError):
            error.with_traceback(
                None
            )  # the traceback would keep the constraint alive, and the message says enough
        self._kept[id(constraint)] = _Kept(_weakly(constraint), job.masks[row].copy(), error)

    def _ready(self, constraints: Rows) -> set[int]:
        """Return the rows whose masks or errors came late and are ready now."""
        self._keep_finished()
        busy = self._busy
        ready: set[int] = set()
        for row, constraint in constraints.items():
            kept = self._kept.get(id(constraint))
            if kept is not None and (kept.error is not None or lexer_of(constraint) not in busy):
                ready.add(row)
        return ready

    def _waiting(self, constraints: Rows) -> set[int]:
        """Return the rows whose masks are still being made, or that share a lexer with such a row; and, if
        enough threads are left behind, all rows that might be slow too.
        """
        busy = self._busy
        waiting = {row for row, c in constraints.items() if lexer_of(c) in busy}
        if self._num_late >= MAX_LATE:
            waiting |= {row for row, c in constraints.items() if not is_proven(c)}
        return waiting

    def _begin_late(self, batch: Rows, masks: Mask) -> None:
        """Have these rows filled on a thread that nobody waits for."""
        thread = self._make_thread(self._fill)
        job = Job([batch], np.empty_like(masks))
        thread.put(job)
        thread.slow_down()
        self._remember(job, batch)

    def _leave(self, job: Job) -> Job:
        """Leave the thread behind with what it does now. Return what it has done."""
        current, until_now = job.leave()
        if current:
            assert self._thread is not None
            self._thread.slow_down()
            self._thread = None
            self._remember(job, current)
        return until_now

    def _remember(self, job: Job, batch: Rows) -> None:
        self._late.update({id(c): _Late(job, row, c) for row, c in batch.items()})

    # -- order --

    def _sort(
        self, rows: Rows
    ) -> tuple[list[tuple[int, TokenConstraint]], list[tuple[int, TokenConstraint]]]:
        """Sort the rows into those that should be quick, the surest first, and those that were slow the last
        time.
        """
        ordered = sorted(rows.items(), key=lambda item: (not is_proven(item[1]), expected_s(item[1])))
        quick = [item for item in ordered if expected_s(item[1]) < QUICK_S]
        return quick, [item for item in ordered if expected_s(item[1]) >= QUICK_S]

    def _batches(self, rows: list[tuple[int, TokenConstraint]]) -> Iterator[Rows]:
        """Yield each row on its own, except those that are sure to be quick, which are filled in parallel."""
        if self._in_parallel:
            sure = dict(item for item in rows if is_proven(item[1]))
            if len(sure) >= PARALLEL_ROWS:
                yield sure
                rows = [item for item in rows if item[0] not in sure]
        for row, constraint in rows:
            yield {row: constraint}


def _weakly(constraint: TokenConstraint) -> Callable[[], TokenConstraint | None]:
    try:
        return weakref.ref(constraint)
    except TypeError:  # a constraint that an embedder made, with __slots__
        return lambda: constraint


def _is_done(late: _Late) -> bool:
    return late.row in late.job.done


def _grammar(constraint: TokenConstraint) -> GrammarConstraint | None:
    if isinstance(constraint, BadWords):
        return constraint.grammar
    return constraint if isinstance(constraint, GrammarConstraint) else None


def expected_s(constraint: TokenConstraint) -> float:
    """Tell how long a constraint's next mask should take, in seconds; 0 if that is not known."""
    grammar = _grammar(constraint)
    return 0.0 if grammar is None else grammar.expected_s


def is_proven(constraint: TokenConstraint) -> bool:
    """Say whether the masks of the constraint's lexer have been quick for a while; those of bad words alone
    always are.
    """
    grammar = _grammar(constraint)
    return isinstance(constraint, BadWords) if grammar is None else grammar.lexer.is_proven


def lexer_of(constraint: TokenConstraint) -> Hashable:
    """Return the identity of the lexer that the constraint shares, for which others must wait."""
    grammar = _grammar(constraint)
    return id(constraint) if grammar is None else id(grammar.lexer)
