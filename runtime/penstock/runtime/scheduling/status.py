"""Where each output stands, for whoever watches the engine. No jax."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.runtime.scheduling.sequence import Sequence, Status


class Phase(enum.Enum):
    """Where an output stands."""

    WAITING = "waiting"
    """It has no pages: it has not begun, or was preempted."""
    PREFILL = "prefill"
    """Its prompt is being computed; after a preemption also the tokens that it had."""
    DECODE = "decode"
    """Its tokens are being generated."""


@dataclass(frozen=True, slots=True)
class OutputStatus:
    """One output that waits or runs."""

    request_id: str
    """The engine's id of the output."""
    phase: Phase
    received_ns: int
    """When the request came, in monotonic ns."""
    num_prompt: int
    num_computed: int
    """Tokens of prompt and output whose KV is in the cache, or is being computed by a step in flight."""
    num_generated: int
    priority: int
    preemptions: int


def status_of(seq: Sequence) -> OutputStatus:
    """Tell where an active sequence stands."""
    if seq.status is not Status.RUNNING:
        phase = Phase.WAITING
    else:
        phase = Phase.PREFILL if seq.num_computed < seq.prefill_until else Phase.DECODE
    request = seq.request
    return OutputStatus(
        request_id=seq.request_id,
        phase=phase,
        received_ns=request.received_ns or seq.arrived_ns,
        num_prompt=seq.num_prompt,
        num_computed=seq.num_computed,
        num_generated=seq.num_generated,
        priority=request.priority,
        preemptions=seq.preemptions,
    )
