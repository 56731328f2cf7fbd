"""The masks of many rows at once. `turns` is who asks for them in a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from penstock.runtime.failing import as_exception
from penstock.runtime.grammar.bad_words import BadWords
from penstock.runtime.grammar.matcher import GrammarConstraint
from penstock.runtime.host.processors import available_processors
from penstock.runtime.requests.constraint import Mask, TokenConstraint

log = logging.getLogger(__name__)

FillParallel = Callable[[LLExecutor, list[tuple[LLMatcher, int]], Mask], None]

PARALLEL_ROWS = 8
"""A mask takes 10 to 50 us where the lexer knows the state, and waking a thread about as long. Fewer rows are
done before the threads are awake."""
_MAX_THREADS = 8


def mask_threads(processors: int) -> int:
    """How many of so many processors' threads are for masks."""
    return min(_MAX_THREADS, processors // 4)


class MaskFiller:
    """Fills the rows of a step: where many are under grammars, in parallel on threads of its own."""

    def __init__(
        self,
        num_threads: int | None = None,
        fill_parallel: FillParallel = fill_next_token_bitmask_par,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_threads` None: a quarter of the processors, at most 8. With fewer than two there are
        none, and the caller's thread does all: on few cores a step's own threads keep those for masks waiting
        for longer than the masks take. `fill_parallel` is llguidance's, `clock` in seconds.
        """
        if num_threads is None:
            num_threads = mask_threads(available_processors())
        self._executor = LLExecutor(num_threads) if num_threads > 1 else None
        self._fill_parallel = fill_parallel
        self._clock = clock

    @property
    def is_parallel(self) -> bool:
        """Whether many rows are filled at once."""
        return self._executor is not None

    def fill_all(self, constraints: Mapping[int, TokenConstraint], masks: Mask) -> dict[int, Exception]:
        """Overwrite the rows named of `masks`, int32[rows, mask_words(vocab_size)], contiguous; others stay.

        Returns the rows whose output cannot go on, with what to tell its caller; their masks allow all.
        """
        if not masks.flags.c_contiguous:
            raise ValueError("the masks must be contiguous")
        ahead = self._fill_ahead(constraints, masks)
        stuck: dict[int, Exception] = {}
        for row, constraint in constraints.items():
            try:
                if row in ahead:
                    ahead[row].finish(masks[row])
                else:
                    constraint.fill(masks[row])
            except BaseException as error:  # noqa: BLE001  one request's, and not the engine's; see `failing`
                masks[row] = -1
                stuck[row] = as_exception(error)
        return stuck

    def _fill_ahead(
        self, constraints: Mapping[int, TokenConstraint], masks: Mask
    ) -> dict[int, GrammarConstraint | BadWords]:
        """Fill masks in parallel, if there are enough that may be; returns the rows that are to be finished.

        Where that fails nobody knows whose fault it was: then there are none, and each row is filled alone.
        """
        if self._executor is None or len(constraints) < PARALLEL_ROWS:
            return {}
        ahead: dict[int, GrammarConstraint | BadWords] = {}
        jobs: list[tuple[LLMatcher, int]] = []
        for row, constraint in constraints.items():
            if isinstance(constraint, GrammarConstraint | BadWords):
                matcher = constraint.to_share()
                if matcher is not None:
                    ahead[row] = constraint
                    jobs.append((matcher, row))
        if len(jobs) < PARALLEL_ROWS:
            return {}
        started = self._clock()
        try:
            self._fill_parallel(self._executor, jobs, masks)
        except BaseException:  # as above
            log.exception("masks could not be filled in parallel")
            return {}
        finally:
            elapsed = self._clock() - started
            for constraint in ahead.values():
                constraint.shared(elapsed)
        return ahead
