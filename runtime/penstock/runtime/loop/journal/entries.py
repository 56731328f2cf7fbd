"""The entries of the journal. No jax.

They are named tuples because the engine's thread makes them. They hold what the engine has anyway, and copy
nothing. Their `at_ns` are monotonic ns. Ids are the engine's ids of outputs: see `requests.fanout`.

An output that is queued has one `Queued`, then the `StepRecord`s in which it has rows, and last one `Ended`
or one `Cancelled`. The tokens of its outputs in the records are those that `num_tokens` of the last entry
counts. A record that comes after its last entry may still have a row of it, of a step that was dispatched
before its end was known; such a row made nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.runtime.loop.interface import Applied, Paused, Resumed, StepRecord, WeightsBroken
from penstock.runtime.requests.request import Request, RequestTiming, StepOutput

__all__ = ["Cancelled", "Changed", "Ended", "Entry", "Noted", "Preempted", "Queued", "StepRecord"]


class Queued(NamedTuple):
    """An output was queued."""

    at_ns: int
    request: Request


class Ended(NamedTuple):
    """An output ended, in any way but a cancellation: it finished, was aborted, or failed."""

    at_ns: int
    request: Request
    output: StepOutput
    """The last one that its sink gets, with `finish` or `error`, and with `timing`."""
    num_tokens: int
    """How many tokens were generated for it."""


class Cancelled(NamedTuple):
    """Nobody reads an output any more, so it was dropped without a last output."""

    at_ns: int
    request: Request
    timing: RequestTiming
    num_tokens: int
    """How many tokens were generated for it."""


class Preempted(NamedTuple):
    """Running outputs lost their pages and went back to the queue, because of a plan or of a change with the
    policy RECOMPUTE.
    """

    at_ns: int
    request_ids: tuple[str, ...]
    num_computed: tuple[int, ...]
    """For each of them, how many of its positions were computed, or were being computed."""


class Changed(NamedTuple):
    """A change was made between two steps, or an update in place failed halfway."""

    at_ns: int
    what: Applied | Paused | Resumed | WeightsBroken


class Noted(NamedTuple):
    """A note that is not the engine's: whoever reads the journal may write into it what it wants to find in
    order among the entries. Other readers pass over it.
    """

    at_ns: int
    what: object


Entry = StepRecord | Queued | Ended | Cancelled | Preempted | Changed | Noted
