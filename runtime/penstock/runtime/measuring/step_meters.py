"""StepMeters: how many steps there were, what they computed, and how long their parts took."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.runtime.loop.interface import StepKind, StepRecord
from penstock.runtime.measuring import engine_instruments as defined
from penstock.runtime.measuring.registry import Registry, by_label
from penstock.runtime.measuring.snapshot import Labels
from penstock.runtime.scheduling.plan import Speculated

_KINDS = {
    (True, False): StepKind.PREFILL,
    (False, True): StepKind.DECODE,
    (True, True): StepKind.MIXED,
}
"""By whether there are rows of known tokens, and whether there are decodes."""


@dataclass(slots=True)
class StepTotals:
    """What was counted of steps. See `EngineTotals`."""

    steps: dict[str, int] = field(default_factory=lambda: {kind.value: 0 for kind in StepKind})
    rows: int = 0
    computed_tokens: int = 0
    padding_tokens: int = 0
    schedule_ns: int = 0
    pack_ns: int = 0
    dispatch_ns: int = 0
    wait_ns: int = 0
    emit_ns: int = 0
    proposed: dict[Labels, int] = field(default_factory=dict)
    """Proposer and position to the tokens that were proposed there."""
    accepted: dict[Labels, int] = field(default_factory=dict)
    """The same for the tokens that were accepted."""

    def parts_s(self) -> dict[str, float]:
        """Return the parts of steps with how long they took, in seconds."""
        return {
            "schedule": self.schedule_ns / 1e9,
            "pack": self.pack_ns / 1e9,
            "dispatch": self.dispatch_ns / 1e9,
            "wait": self.wait_ns / 1e9,
            "emit": self.emit_ns / 1e9,
        }


class StepMeters:
    """Folds the records of steps. One thread at a time may use it; the registry may be read meanwhile."""

    def __init__(self, registry: Registry) -> None:
        self.totals = totals = StepTotals()
        registry.observed_counter(defined.STEPS, lambda: by_label(totals.steps))
        registry.observed_counter(defined.STEP_TOKENS_COMPUTED, lambda: {(): totals.computed_tokens})
        registry.observed_counter(defined.STEP_TOKENS_PADDING, lambda: {(): totals.padding_tokens})
        registry.observed_counter(defined.STEP_TIME, lambda: by_label(totals.parts_s()))
        registry.observed_counter(defined.SPECULATION_PROPOSED, lambda: dict(totals.proposed))
        registry.observed_counter(defined.SPECULATION_ACCEPTED, lambda: dict(totals.accepted))
        self._duration = registry.histogram(defined.STEP_DURATION)
        self._rows = registry.histogram(defined.STEP_ROWS)
        self._waited_ns = 0
        """When the tokens of the last step were on the host."""

    def step(self, record: StepRecord) -> None:
        """Take one step."""
        plan, shape, at_ns, totals = record.plan, record.shape, record.waited_ns, self.totals
        num_rows = len(plan.rows)
        if plan.num_steps > 1:
            kind = StepKind.WINDOW
            made = [len(output.token_ids) for output in record.outputs]
            computed, num_steps = sum(made), max(made, default=0)
        else:
            # As `StepRecord.kind` and `num_tokens`, at a third of their cost. Other rows have one token, but
            # for those with proposed ones.
            known = [row.num_tokens for row in plan.rows if row.token_ids is not None]
            kind = _KINDS[bool(known), len(known) < num_rows]
            computed, num_steps = num_rows - len(known) + sum(known), 1
            if record.speculated:
                computed = plan.num_tokens
        padding = 0 if shape is None else max(shape.tokens * num_steps - computed, 0)
        totals.steps[kind.value] += 1
        totals.rows += num_rows
        totals.computed_tokens += computed
        totals.padding_tokens += padding
        totals.schedule_ns += record.scheduled_ns - record.started_ns
        totals.pack_ns += record.packed_ns - record.scheduled_ns
        totals.dispatch_ns += record.dispatched_ns - record.packed_ns
        totals.wait_ns += at_ns - record.waiting_ns
        totals.emit_ns += record.delivered_ns - at_ns
        for one in record.speculated:
            self._speculated(one)
        self._rows.record(num_rows)
        began_ns = max(record.dispatched_ns, self._waited_ns)
        self._waited_ns = at_ns
        self._duration.record((at_ns - began_ns) / 1e9, 1, (kind.value,))

    def _speculated(self, found: Speculated) -> None:
        proposed, accepted = self.totals.proposed, self.totals.accepted
        for position, counts in enumerate(zip(found.proposed, found.accepted, strict=True), 1):
            labels = (found.proposer, str(position))
            proposed[labels] = proposed.get(labels, 0) + counts[0]
            accepted[labels] = accepted.get(labels, 0) + counts[1]
