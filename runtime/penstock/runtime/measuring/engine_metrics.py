"""What `Engine.metrics` returns: frozen values of one moment, for programs that embed an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.runtime.measuring.recent import Distribution
from penstock.runtime.scheduling.load import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTotals:
    """What an engine has counted since it was made. None of these numbers ever falls. What is counted is
    outputs: a request of n counts n times.
    """

    prompt_tokens: int
    """Of the outputs that got as far as their first token, those of cached prefixes included."""
    generated_tokens: int
    cached_tokens: int
    """Prompt tokens of ended outputs that were not computed, because their KV was in the cache."""
    recomputed_tokens: int
    """Tokens that were computed again after a preemption."""
    prefix_queried_tokens: int
    """Tokens that were looked for in the prefix cache."""
    prefix_hit_tokens: int
    """How many of these were found."""
    preemptions: int
    ended: Mapping[str, int]
    """Why outputs ended to how many did: the values of `FinishReason`, "cancelled" for those that nobody read
    any more, and "error"."""
    steps: Mapping[str, int]
    """The kind of step to how many were done: "prefill", "decode", "mixed", or "window", which is several
    decode steps at once."""
    step_rows: int
    """Rows of all steps."""
    computed_tokens: int
    """Tokens of outputs that the steps computed."""
    padding_tokens: int
    """Places of the steps' compiled programs that held no token."""
    step_time_s: Mapping[str, float]
    """The part of a step to the time it took in all steps: "schedule", "pack", "dispatch", "wait", "emit"."""
    proposed_tokens: int
    """Tokens that were proposed for outputs and checked by the model."""
    accepted_tokens: int
    """How many of these became tokens of their outputs."""
    put_off_rows: int
    """Rows that got their token in a later step, because a mask was not ready."""
    compiles_after_warmup: int
    """Programs that were compiled while serving; anything but 0 is a bug."""
    dropped_entries: int
    """Entries of the journal that were lost because this process was too busy. All that is counted here lacks
    what they told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """Means over the last 10 seconds, or since the engine was made if that is shorter."""

    prompt_tokens_per_s: float
    """Of the outputs that got their first token."""
    generated_tokens_per_s: float
    ended_per_s: float
    """Outputs that ended, for whatever reason."""
    steps_per_s: float
    rows_per_step: float
    """0 without steps, as the next three without their whole."""
    padding_share: float
    """Padding, of all that the steps computed: 0 to 1."""
    prefix_hit_share: float
    """Of the tokens that were looked for in the prefix cache, those that were found: 0 to 1."""
    accepted_share: float
    """Of the tokens that were proposed, those that were accepted: 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLatencies:
    """Latencies of the last 60 seconds, in seconds. They begin when the request was received."""

    time_to_first_token: Distribution
    """Of the outputs that got their first token in that time."""
    inter_token: Distribution
    """From each token to the next of the same output. The tokens of a window share its time evenly."""
    queue: Distribution
    """From when the engine got an output until it ran, of the outputs that ran or ended in that time."""
    end_to_end: Distribution
    """Of the outputs that ended in that time, in whatever way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """What an engine does, and has done."""

    at_s: float
    """When all of this was so, in Unix time."""
    started_at_s: float
    """Since when it was counted, in Unix time."""
    load: Load
    """How busy the engine is now."""
    totals: EngineTotals
    rates: EngineRates
    latencies: EngineLatencies
