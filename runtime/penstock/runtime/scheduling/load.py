"""How busy a scheduler is, what it has counted since its start, and who was preempted. No jax."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy the scheduler is, for routing and metrics."""

    num_running: int
    """Sequences that run."""
    num_waiting: int
    """Sequences that wait."""
    waiting_prompt_tokens: int
    """Prompt tokens of all waiting sequences."""
    pages_used: int
    """Pages that requests hold; a page that only caches a prefix counts as free."""
    pages_cached: int
    """Pages that no request holds and that cache a prefix."""
    pages_total: int

    @classmethod
    def idle(cls, pages_total: int) -> Load:
        """Return the load of an engine in which nothing runs or waits, and nothing is cached."""
        return cls(
            num_running=0,
            num_waiting=0,
            waiting_prompt_tokens=0,
            pages_used=0,
            pages_cached=0,
            pages_total=pages_total,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a scheduler has counted since its start. None of these numbers ever falls."""

    preemptions: int
    """How many times a running sequence lost its pages and went back to the queue."""
    recomputed_tokens: int
    """Positions that were computed again because of a preemption."""
    prefix_queried_tokens: int
    """Prompt tokens of the sequences that looked for pages to share when they first entered."""
    prefix_hit_tokens: int
    """How many of these lay in shared pages, or in the pages of the output that computed the prompt."""
    put_off_rows: int
    """Rows that made no token because the mask of their constraint was not ready in time."""


@dataclass(slots=True)
class Counts:
    """The same numbers while they are counted. See `Totals`."""

    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    put_off_rows: int = 0

    def totals(self) -> Totals:
        """Return what has been counted so far. Another thread may count meanwhile."""
        prefix_hit_tokens = self.prefix_hit_tokens  # first, so that there are never more than were queried
        return Totals(
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            prefix_queried_tokens=self.prefix_queried_tokens,
            prefix_hit_tokens=prefix_hit_tokens,
            put_off_rows=self.put_off_rows,
        )


@dataclass(frozen=True, slots=True)
class LostPages:
    """A sequence that lost its pages."""

    request_id: str
    """The engine's id of the output."""
    num_computed: int
    """How many of its positions were computed, or were being computed."""
