"""What a server tells of its load while somebody watches it. Durations are in seconds."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime

from penstock.client.values.server_values import Load


@dataclass(frozen=True, slots=True)
class EndedRequests:
    """How many requests ended, by why."""

    eos: int = 0
    stop: int = 0
    max_tokens: int = 0
    context_full: int = 0
    time_limit: int = 0
    aborted: int = 0
    cancelled: int = 0
    """The client went away, cancelled, or its deadline passed."""
    failed: int = 0
    """An error ended them."""
    prompt_read: int = 0
    """Inputs of `embed` and continuations of `score`, of which nothing is generated."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """How many steps the engine made, by what was in them."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    """Prompts and next tokens together."""
    window: int = 0
    """Several decode steps in one dispatch; each counts once."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Where the seconds of all steps went. Parts of two steps may pass at the same time."""

    schedule: float = 0.0
    pack: float = 0.0
    dispatch: float = 0.0
    wait: float = 0.0
    """For the device."""
    emit: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadTotals:
    """What the server has counted since `since`. Each of the n outputs of a request counts as one request."""

    since: datetime
    """In UTC."""
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    recomputed_tokens: int
    ended: EndedRequests
    preemptions: int
    steps: StepCounts
    step_rows: int
    """Rows of all steps together."""
    computed_tokens: int
    padding_tokens: int
    step_time: StepTime


@dataclass(frozen=True, slots=True)
class LoadRates:
    """Means over the last 10 seconds. Shares are from 0 to 1."""

    prompt_tokens_per_second: float
    generated_tokens_per_second: float
    ended_requests_per_second: float
    steps_per_second: float
    rows_per_step: float
    padding_share: float
    prefix_hit_share: float


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """How `count` latencies are distributed, in seconds; the others are None if there are none."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class LoadLatencies:
    """Latencies of the last 60 seconds. They begin when the server received the request."""

    time_to_first_token: LatencySummary
    inter_token: LatencySummary
    queue: LatencySummary
    end_to_end: LatencySummary


class RequestPhase(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    UNKNOWN = "unknown"
    """A phase of a newer contract, which this client does not know."""


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """One output of a request that the engine has."""

    request_id: str
    output_index: int
    key_id: str
    """Whose it is; empty on a server without keys."""
    phase: RequestPhase
    age: float
    """Seconds since the server received it."""
    prompt_tokens: int
    computed_tokens: int
    """Tokens of prompt and output whose keys and values are in the cache."""
    generated_tokens: int
    priority: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How busy the server was at one moment."""

    at: datetime
    """By the server's clock, in UTC."""
    load: Load
    kv_pages_cached: int
    """Free pages that cache a prefix until a request needs them."""
    max_running_requests: int
    totals: LoadTotals | None = None
    """None, as the next two, if the server was started without metrics."""
    rates: LoadRates | None = None
    latencies: LoadLatencies | None = None
    requests: tuple[RequestStatus, ...] = ()
    """The oldest ones first; empty unless `max_requests` was given."""
