"""A plan in the making. No jax."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.runtime.requests.request import Request
from penstock.runtime.scheduling.plan import PageWrite, Plan, PlanRow
from penstock.runtime.scheduling.sequence import Sequence


@dataclass(slots=True, kw_only=True)
class Draft:
    """The limits of the next plan, and what it holds so far."""

    in_flight: bool
    """Whether a plan made before was not committed yet."""
    admit: bool
    """Whether requests may enter that never ran."""
    now_ns: int
    prefill_budget: int | None = None
    """Most prompt tokens beside decodes; None: as many as the token budget has."""
    max_chunk: int | None = None
    """Most prompt tokens of one request; None: as many as the token budget has."""
    apart_steps: int = 0
    """Rows under a constraint have a step of their own after so many decode steps of the others; 0: all step
    together.
    """
    num_steps: int = 1
    """Decode steps of the plan."""
    turn: bool | None = None
    """Whether only rows under a constraint (True) or only the others (False) have a part; None: all have."""

    rows: list[PlanRow] = field(default_factory=list)
    sampling: list[Sequence | None] = field(default_factory=list)
    """For each row the sequence that it samples a token for; None where it samples none."""
    writes: list[PageWrite] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    entered: list[tuple[int, Request]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination) of pages."""
    sat_out: list[Sequence] = field(default_factory=list)
    """The sequences that were passed over because they sit out (`Sequence.sits_out`)."""
    chunked: set[Sequence] = field(default_factory=set)
    """The sequences that have a row of prefill."""
    made: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By slot, see `Plan.made`."""
    feature_slots: dict[int, int] = field(default_factory=dict)
    """By slot, see `Plan.feature_slots`."""
    prompts: dict[int, Sequence] = field(default_factory=dict)
    """By row, the sequences that get log-probabilities of their prompts' tokens back."""

    def plan(self, step_id: int) -> Plan:
        """The finished plan."""
        return Plan(
            step_id=step_id,
            rows=tuple(self.rows),
            new_requests=tuple(self.entered),
            page_writes=tuple(self.writes),
            preempted=tuple(self.preempted),
            num_steps=self.num_steps,
            page_copies=tuple(self.copies),
            made=self.made,
            feature_slots=self.feature_slots,
            apart=self.turn is True,
        )
