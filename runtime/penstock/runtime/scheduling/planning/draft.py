"""A plan that is being made. No jax."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.runtime.requests.request import Request
from penstock.runtime.scheduling.plan import (
    Encode,
    PageCopy,
    PageWrite,
    PictureRows,
    Plan,
    PlanRow,
    SnapshotUse,
)
from penstock.runtime.scheduling.sequence import Sequence


@dataclass(slots=True, kw_only=True)
class Draft:
    """The limits of the next plan, and what has been put into it so far. `Plan` explains the fields that it
    has too.
    """

    in_flight: bool
    """Whether an earlier plan is not committed yet."""
    admit: bool
    """Whether requests may start."""
    now_ns: int
    prefill_budget: int | None = None
    """Most prompt tokens beside decodes; None: the token budget is the only bound."""
    max_chunk: int | None = None
    """Most prompt tokens of one request; None: the token budget is the only bound."""
    apart_steps: int = 0
    """Rows that take part in no window get a step of their own after this many decode steps of the others; 0:
    all rows step together."""
    num_steps: int = 1
    """Decode steps of the plan."""
    single_rows: bool | None = None
    """True: only rows that never take part in windows do; False: only the other rows do; None: all do."""

    rows: list[PlanRow] = field(default_factory=list)
    sampling: list[Sequence | None] = field(default_factory=list)
    """For each row, the sequence that it samples a token for; None where it samples none."""
    writes: list[PageWrite] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    entered: list[tuple[int, Request]] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    sat_out: list[Sequence] = field(default_factory=list)
    """The sequences that were left out of this plan because of `Sequence.sits_out`."""
    chunked: set[Sequence] = field(default_factory=set)
    """The sequences that have a prefill row in this plan."""
    generated_before: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """See `Plan.generated_before`."""
    feature_slots: dict[int, int] = field(default_factory=dict)
    """See `Plan.feature_slots`."""
    snapshots: dict[int, SnapshotUse] = field(default_factory=dict)
    """See `Plan.snapshots`."""
    prompts: dict[int, Sequence] = field(default_factory=dict)
    """Row to sequence, for the rows from whose prompt tokens log-probabilities or an embedding are wanted."""
    pooled: dict[int, int] = field(default_factory=dict)
    """See `Plan.pooled`."""
    encodes: list[Encode] = field(default_factory=list)
    pictures: list[PictureRows] = field(default_factory=list)

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
            generated_before=self.generated_before,
            feature_slots=self.feature_slots,
            snapshots=self.snapshots,
            apart=self.single_rows is True,
            encodes=tuple(self.encodes),
            pictures=tuple(self.pictures),
            pooled=self.pooled,
        )
