"""OutputMeters: what outputs got, and how long they waited for it.

Times to the first token and in the queue are recorded when they are known, not when the output ends, which
may be minutes later. The time between tokens is the same for all rows of a step that were together in the
step before too, so such a step costs one value, not one for each row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.runtime.loop.interface import StepRecord
from penstock.runtime.loop.journal import Cancelled, Ended, Queued
from penstock.runtime.measuring import engine_instruments as defined
from penstock.runtime.measuring.recent import RecentValues
from penstock.runtime.measuring.registry import Histogram, Registry, by_label
from penstock.runtime.measuring.snapshot import Exemplar, Labels
from penstock.runtime.requests.request import FinishReason, Request, RequestTiming, StepOutput

PROVIDER = "penstock"
CANCELLED = "cancelled"
ERROR = "error"
END_REASONS = (*(reason.value for reason in FinishReason), CANCELLED, ERROR)
"""Why an output may end."""


class _Live:
    """An output that has not ended."""

    __slots__ = ("entered_ns", "last_ns", "queued_ns", "request")

    def __init__(self, queued: Queued) -> None:
        self.request = queued.request
        self.queued_ns = queued.at_ns
        self.entered_ns = 0
        """When the first step began that has it; 0 before."""
        self.last_ns = 0
        """When its newest token was on the host, unless `_together_ns` says that; 0 before the first one."""


@dataclass(slots=True)
class OutputTotals:
    """What was counted of outputs. See `EngineTotals`, but for `failed`."""

    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(END_REASONS, 0))
    failed: dict[str, int] = field(default_factory=dict)
    """Class of an error to how many outputs it has ended."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0


class OutputMeters:
    """Folds the entries of outputs. One thread at a time may use it; the registry may be read meanwhile."""

    def __init__(self, registry: Registry, model: str) -> None:
        self._model = model
        self.totals = totals = OutputTotals()
        registry.observed_counter(defined.OUTPUTS_FINISHED, lambda: by_label(totals.ended))
        registry.observed_counter(defined.OUTPUTS_FAILED, lambda: by_label(totals.failed))
        registry.observed_counter(defined.TOKENS_PROMPT, lambda: {(): totals.prompt_tokens})
        registry.observed_counter(defined.TOKENS_GENERATED, lambda: {(): totals.generated_tokens})
        registry.observed_counter(defined.TOKENS_CACHED, lambda: {(): totals.cached_tokens})
        self._first_token = registry.histogram(defined.TIME_TO_FIRST_TOKEN)
        self._per_token = registry.histogram(defined.TIME_PER_OUTPUT_TOKEN)
        self._duration = registry.histogram(defined.REQUEST_DURATION)
        self._inter_token = registry.histogram(defined.INTER_TOKEN_LATENCY)
        self._queue = registry.histogram(defined.QUEUE_TIME)
        self._prefill = registry.histogram(defined.PREFILL_TIME)
        self._decode = registry.histogram(defined.DECODE_TIME)
        self._running = registry.histogram(defined.RUNNING_TIME)
        self._prompt_tokens = registry.histogram(defined.PROMPT_TOKENS)
        self._generated_tokens = registry.histogram(defined.GENERATED_TOKENS)
        self.recent_first_token = RecentValues()
        self.recent_inter_token = RecentValues()
        self.recent_queue = RecentValues()
        self.recent_duration = RecentValues()
        self._live: dict[str, _Live] = {}
        self._together: set[str] = set()
        """The outputs that had tokens in the last step, all of which are in `_live`. When that was is noted
        once for all of them, in `_together_ns`, instead of in each."""
        self._together_ns = 0

    def forget(self) -> None:
        """Forget the outputs that have not ended, because entries about some of them were lost: their ends
        may have been among these. What they do from now on is counted, and their times are not.
        """
        self._live.clear()
        self._together.clear()

    def queued(self, entry: Queued) -> None:
        """Take an output that was queued."""
        self._live[entry.request.request_id] = _Live(entry)

    # -- steps --

    def step(self, record: StepRecord) -> None:
        """Take the tokens that a step made."""
        plan, outputs, at_ns = record.plan, record.outputs, record.waited_ns
        for _, request in plan.new_requests:
            self._enter(request.request_id, record.started_ns)
        num_tokens = sum([len(output.token_ids) for output in outputs])
        if not num_tokens:
            return
        self.totals.generated_tokens += num_tokens
        # With as many tokens as rows and steps, every row has one of each step, because none has more: unless
        # some were proposed.
        if num_tokens == len(outputs) * plan.num_steps and not record.speculated:
            self._all_alike({output.request_id for output in outputs}, at_ns, plan.num_steps)
        else:
            self._one_by_one(outputs, at_ns)

    def _enter(self, request_id: str, at_ns: int) -> None:
        live = self._live.get(request_id)
        if live is not None and not live.entered_ns:
            live.entered_ns = at_ns
            self._waited(at_ns, at_ns - live.queued_ns, live.request)

    def _waited(self, at_ns: int, waited_ns: int, request: Request) -> None:
        self._time(self._queue, at_ns, waited_ns, request)
        self.recent_queue.add(at_ns, max(waited_ns, 0) / 1e9)

    def _all_alike(self, ids: set[str], at_ns: int, num_new: int) -> None:
        """Take a step in which each of these outputs got as many tokens."""
        before, self._together = self._together, ids
        before_ns, self._together_ns = self._together_ns, at_ns
        if ids == before:
            self._gap(at_ns, at_ns - before_ns, num_new, len(ids))
            return
        num_stayed = len(ids & before)
        if num_stayed:
            self._gap(at_ns, at_ns - before_ns, num_new, num_stayed)
        for request_id in before - ids:
            self._live[request_id].last_ns = before_ns
        for request_id in ids - before:
            one = self._live.get(request_id)
            if one is None:
                ids.discard(request_id)
            else:
                self._came(one, at_ns, num_new)

    def _one_by_one(self, outputs: Sequence[StepOutput], at_ns: int) -> None:
        """Take a step in which outputs got different numbers of tokens."""
        for request_id in self._together:
            self._live[request_id].last_ns = self._together_ns
        self._together, self._together_ns = set(), at_ns
        for output in outputs:
            one = self._live.get(output.request_id)
            if one is not None and output.token_ids:
                self._came(one, at_ns, len(output.token_ids))
                self._together.add(output.request_id)

    def _came(self, one: _Live, at_ns: int, num_new: int) -> None:
        """Take new tokens of one output. When they came is noted for all of the step."""
        if one.last_ns:
            self._gap(at_ns, at_ns - one.last_ns, num_new, 1)
        else:
            self._begin(one, at_ns, num_new)

    def _gap(self, at_ns: int, gap_ns: int, num_new: int, num_rows: int) -> None:
        """Record that each of some rows has so many new tokens, so long after the token before them."""
        share_s, times = gap_ns / num_new / 1e9, num_new * num_rows
        self._inter_token.record(share_s, times)
        self.recent_inter_token.add(at_ns, share_s, times)

    def _begin(self, one: _Live, at_ns: int, num_new: int) -> None:
        """Take the first tokens of an output."""
        request = one.request
        self.totals.prompt_tokens += len(request.prompt_token_ids)
        first_ns = at_ns - (request.received_ns or one.queued_ns)
        self._time(self._first_token, at_ns, first_ns, request, self._labels(request))
        self.recent_first_token.add(at_ns, first_ns / 1e9)
        if one.entered_ns:
            self._time(self._prefill, at_ns, at_ns - one.entered_ns, request)
        if num_new > 1:  # the others came with the first
            self._gap(at_ns, 0, num_new - 1, 1)

    # -- ends --

    def ended(self, entry: Ended) -> None:
        """Take an output that finished or failed."""
        output = entry.output
        if output.error is not None:
            kind = type(output.error).__name__
            self.totals.failed[kind] = self.totals.failed.get(kind, 0) + 1
            self._end(entry, output.timing, ERROR, kind)
        else:
            assert output.finish is not None, "a last output has a finish or an error"
            self._end(entry, output.timing, output.finish.reason.value, "")

    def cancelled(self, entry: Cancelled) -> None:
        """Take an output that nobody reads any more."""
        self._end(entry, entry.timing, CANCELLED, CANCELLED)

    def _end(self, entry: Ended | Cancelled, timing: RequestTiming | None, reason: str, error: str) -> None:
        """Count an output's end. `reason` is one of END_REASONS; `error` the class of the error, empty if
        there was none.
        """
        self.totals.ended[reason] += 1
        at_ns, request, num_tokens = entry.at_ns, entry.request, entry.num_tokens
        self._together.discard(request.request_id)  # it may be used again
        live = self._live.pop(request.request_id, None)
        if live is not None and not live.entered_ns:
            self._waited(at_ns, at_ns - live.queued_ns, request)
        if reason == FinishReason.PROMPT_READ.value:  # it made no first token, with which others count theirs
            self.totals.prompt_tokens += len(request.prompt_token_ids)
        self._prompt_tokens.record(len(request.prompt_token_ids))
        self._generated_tokens.record(num_tokens)
        if timing is None:
            return
        labels = self._labels(request)
        self.totals.cached_tokens += timing.cached_prompt_tokens
        whole_ns = timing.finished_ns - (timing.received_ns or timing.arrived_ns)
        self._time(self._duration, at_ns, whole_ns, request, (*labels, error))
        self.recent_duration.add(at_ns, max(whole_ns, 0) / 1e9)
        if timing.scheduled_ns:
            self._time(self._running, at_ns, timing.finished_ns - timing.scheduled_ns, request)
        if timing.first_token_ns:
            decode_ns = timing.finished_ns - timing.first_token_ns
            self._time(self._decode, at_ns, decode_ns, request)
            if num_tokens > 1 and not error and reason != FinishReason.ABORTED.value:
                self._time(self._per_token, at_ns, decode_ns / (num_tokens - 1), request, labels)

    # -- values --

    def _labels(self, request: Request) -> Labels:
        return (request.operation, PROVIDER, self._model)

    def _time(
        self, histogram: Histogram, at_ns: int, value_ns: float, request: Request, labels: Labels = ()
    ) -> None:
        """Record a time of an output, with the span of its request if that is traced."""
        value = max(value_ns, 0) / 1e9
        exemplar = None
        if request.trace_id:
            at_s = (time.time_ns() - time.monotonic_ns() + at_ns) / 1e9  # the clock may be set at any time
            exemplar = Exemplar(value, request.trace_id, request.span_id, at_s)
        histogram.record(value, 1, labels, exemplar)
