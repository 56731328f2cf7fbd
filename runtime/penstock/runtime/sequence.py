"""The scheduler's own, mutable view of a request. Nobody outside the scheduler changes one."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from penstock.runtime.request import Request, RequestTiming
from penstock.runtime.stopping import StopRules


class Status(enum.Enum):
    WAITING = "waiting"
    """Holds no pages and no slot: new, or preempted."""
    RUNNING = "running"
    """Holds a slot and pages: prefilling or decoding."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the scheduler.

    Positions count from 0 over prompt and generated tokens alike. `num_computed` positions have their KV
    written once every step dispatched so far has run. In decode the newest token has no KV yet: num_computed
    is len(token_ids) - 1 before `schedule`, and len(token_ids) between `schedule` and `commit`.
    """

    request: Request
    order: int
    """Arrival number: the key of first come, first served, kept through preemptions."""
    token_ids: list[int]
    """Prompt, then generated tokens."""
    num_prompt: int
    rules: StopRules
    arrived_ns: int

    request_id: str = field(init=False)
    """Of `request`; kept here because it is read for every row of every step."""
    bans_until: int = field(init=False)
    """A token sampled at an input position below this is one of the first min_tokens: no EOS, no stop id."""
    status: Status = Status.WAITING
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    """Page i holds positions [i * page_size, (i + 1) * page_size)."""
    num_computed: int = 0
    prefill_until: int = 0
    """Positions below this are (re)computed from `token_ids`; from here on each input is the slot's own last
    sample. Set at entry to len(token_ids), so a prefill chunk of one token is never taken for a decode."""
    pending: bool = False
    """A dispatched step samples this sequence's next token and was not committed yet."""
    preemptions: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        # Input position p samples the token at p + 1, which is generated token number p + 2 - num_prompt.
        self.bans_until = self.num_prompt - 1 + self.rules.min_tokens

    def timing(self, now_ns: int) -> RequestTiming:
        return RequestTiming(
            arrived_ns=self.arrived_ns,
            scheduled_ns=self.scheduled_ns,
            first_token_ns=self.first_token_ns,
            finished_ns=now_ns,
            preemptions=self.preemptions,
        )
