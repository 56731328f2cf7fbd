"""Fills the masks of many rows at once, when `step_masks` asks for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from penstock.runtime.failing import as_exception
from penstock.runtime.grammar.bad_words import BadWords
from penstock.runtime.grammar.masks.mask_thread import NOTHING_AHEAD, Ahead, RowsAhead
from penstock.runtime.grammar.matcher import GrammarConstraint
from penstock.runtime.machine.processors import available_processors
from penstock.runtime.requests.constraint import ForesightedConstraint, Mask, TokenConstraint

log = logging.getLogger(__name__)

FillParallel = Callable[[LLExecutor, list[tuple[LLMatcher, int]], Mask], None]

PARALLEL_ROWS = 8
"""Fewest rows to fill in parallel. A mask takes 10 to 50 us if the lexer knows the state, and waking a thread
takes about as long, so fewer rows are done before the threads are awake."""
_MAX_THREADS = 8


def mask_threads(processors: int) -> int:
    """Tell how many threads fill masks, out of `processors`."""
    return min(_MAX_THREADS, processors // 4)


class MaskFiller:
    """Fills the masks of a step's rows; if many rows are under grammars, in parallel on threads of its
    own.
    """

    def __init__(
        self,
        num_threads: int | None = None,
        fill_parallel: FillParallel = fill_next_token_bitmask_par,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_threads` None: a quarter of the processors, at most 8. With fewer than two there are none, and
        the caller's thread does everything: on few cores, the step's own threads would hold up those for
        masks for longer than the masks take. `fill_parallel` is llguidance's; `clock` is in seconds.
        """
        if num_threads is None:
            num_threads = mask_threads(available_processors())
        self._executor = LLExecutor(num_threads) if num_threads > 1 else None
        self._fill_parallel = fill_parallel
        self._clock = clock

    @property
    def is_parallel(self) -> bool:
        """Whether many rows are filled in parallel."""
        return self._executor is not None

    def fill_all(
        self,
        constraints: Mapping[int, TokenConstraint],
        masks: Mask,
        ahead: RowsAhead = NOTHING_AHEAD,
    ) -> dict[int, Exception]:
        """Overwrite the rows of `masks`, int32[rows, mask_words(vocab_size)], contiguous, that `constraints`
        names, and those that `ahead` has for these, see `ForesightedConstraint`; others stay.

        Returns row to error for rows whose output cannot go on; their masks allow all tokens.
        """
        if not masks.flags.c_contiguous:
            raise ValueError("the masks must be contiguous")
        begun = self._fill_together(constraints, masks)
        stuck: dict[int, Exception] = {}
        for row, constraint in constraints.items():
            try:
                if row in begun:
                    begun[row].finish(masks[row])
                else:
                    constraint.fill(masks[row])
            except BaseException as error:  # noqa: BLE001  one request's, and not the engine's; see `failing`
                masks[row] = -1
                stuck[row] = as_exception(error)
            else:
                if row in ahead and isinstance(constraint, ForesightedConstraint):
                    _fill_ahead(constraint, masks, ahead[row])
        return stuck

    def _fill_together(
        self, constraints: Mapping[int, TokenConstraint], masks: Mask
    ) -> dict[int, GrammarConstraint | BadWords]:
        """Fill raw masks in parallel, if there are enough rows for it. Returns the rows that are still to be
        finished.

        If that fails nobody knows which row was at fault, so no row is returned, and each is filled alone.
        """
        if self._executor is None or len(constraints) < PARALLEL_ROWS:
            return {}
        begun: dict[int, GrammarConstraint | BadWords] = {}
        jobs: list[tuple[LLMatcher, int]] = []
        for row, constraint in constraints.items():
            if isinstance(constraint, GrammarConstraint | BadWords):
                matcher = constraint.to_share()
                if matcher is not None:
                    begun[row] = constraint
                    jobs.append((matcher, row))
        if len(jobs) < PARALLEL_ROWS:
            return {}
        started = self._clock()
        try:
            self._fill_parallel(self._executor, jobs, masks)
        except BaseException:  # see `fill_all`
            log.exception("masks could not be filled in parallel")
            return {}
        finally:
            elapsed = self._clock() - started
            for constraint in begun.values():
                constraint.shared(elapsed)
        return begun


def _fill_ahead(constraint: ForesightedConstraint, masks: Mask, ahead: Ahead) -> None:
    """Fill the masks behind the tokens that are proposed for a row. What goes wrong there concerns the row
    only once it comes there, so then it has no masks ahead.
    """
    behind = masks[ahead.rows.start : ahead.rows.stop]
    try:
        constraint.fill_ahead(behind, ahead.token_ids)
    except BaseException:  # see `fill_all`
        log.exception("masks behind proposed tokens could not be filled")
        behind[:] = 0
