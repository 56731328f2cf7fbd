"""Reads the engine's journal and sends the spans of steps, and of requests that are recorded.

All of it is done on the journal's thread, in batches. A request is followed from its note `Opened` until its
note `Closed` has come and its outputs have ended in the engine. A step is recorded if it has a row of a
request that is followed, so where nothing is sampled, nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, Protocol, assert_never

from penstock.runtime.loop.interface import (
    Applied,
    Paused,
    Resumed,
    StepKind,
    StepRecord,
    StepShape,
    WeightsBroken,
)
from penstock.runtime.loop.journal import (
    Cancelled,
    Changed,
    Ended,
    Entry,
    Journal,
    Noted,
    Preempted,
    Queued,
)
from penstock.runtime.requests.request import SEPARATOR, RequestTiming
from penstock.runtime.scheduling.plan import PlanRow
from penstock.service.telemetry.options import TraceLevel
from penstock.service.telemetry.otlp.wire import Attributes
from penstock.service.telemetry.tracing.notes import Closed, Happened, Opened, WallClock
from penstock.service.telemetry.tracing.request_spans import (
    ID_BYTES,
    LEAST_STEPS_OF_SHAPE,
    FollowedOutput,
    FollowedRequest,
    NewId,
    Step,
    request_spans,
    step_of,
    step_trace,
)

MOST_FOLLOWED = 8192
"""So many outputs are followed at once. Beyond that, those of the oldest requests are followed no more."""
LONGEST_WAIT_S = 5.0
"""The journal may have dropped an output's end. After so long, a request that has ended for its caller is
recorded without it.
"""


class Outlet(Protocol):
    """What sends spans."""

    @property
    def level(self) -> TraceLevel:
        """How much is recorded now."""
        ...

    def emit(self, spans: Sequence[bytes]) -> None:
        """Send spans that `wire.span` made, some time later. It never blocks."""
        ...


class Tracer:
    """A reader of one engine's journal."""

    def __init__(
        self,
        outlet: Outlet,
        wall_clock: WallClock,
        *,
        new_id: NewId | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`new_id` makes random bytes for ids; `now_ns` gives monotonic ns."""
        self._outlet = outlet
        self._wall_clock = wall_clock
        self._new_id = new_id or Random().randbytes
        self._now_ns = now_ns
        self._level = TraceLevel.OFF
        self._requests: dict[bytes, FollowedRequest] = {}
        """By the ids of their spans, oldest first."""
        self._outputs: dict[str, FollowedOutput] = {}
        """Those that have not ended in the engine, by their engine ids."""
        self._closing: dict[bytes, FollowedRequest] = {}
        """Those that have ended for their caller and not in the engine, by the ids of their spans."""
        self._last_waited_ns = 0
        self._last_shape: StepShape | None = None
        self._stop_reading: Callable[[], None] = lambda: None
        self._made: list[bytes] = []
        """Spans that are to be sent."""
        self._takers: dict[type, Callable[[Any], None]] = {
            StepRecord: self._step,
            Noted: self._noted,
            Queued: self._queued,
            Ended: self._ended,
            Cancelled: self._cancelled,
            Preempted: self._preempted,
            Changed: self._changed,
        }

    @property
    def num_followed(self) -> int:
        """How many outputs are followed, and have not ended in the engine."""
        return len(self._outputs)

    def read(self, entries: Sequence[Entry]) -> None:
        """Take the next entries of the journal."""
        level = self._outlet.level
        if level is not self._level:
            self._end_windows(self._outputs.values())
            self._level = level
        takers = self._takers
        for entry in entries:
            take = takers.get(type(entry))
            if take is not None:
                take(entry)
        if self._closing:
            self._give_up(self._now_ns() - int(LONGEST_WAIT_S * 1e9))
        self._send()

    def follow(self, journal: Journal) -> None:
        """Read this journal from now on, until `close`."""
        self._stop_reading = journal.read_by(self.read)

    def close(self) -> None:
        """Read what was written, and record the requests that have ended for their caller."""
        self._stop_reading()
        self._give_up(self._now_ns())
        self._send()

    # -- requests --

    def _noted(self, entry: Noted) -> None:
        what = entry.what
        if isinstance(what, Opened):
            self._requests[what.context.span_id] = FollowedRequest(what.context)
            while len(self._requests) > MOST_FOLLOWED:  # the journal has dropped many ends
                self._forget(next(iter(self._requests.values())))
        elif isinstance(what, Closed):
            followed = self._requests.get(what.context.span_id)
            if followed is None:  # it never came so far, or is followed no more
                self._record(FollowedRequest(what.context), what)
                return
            followed.closed = what
            if not self._finish(followed):
                self._closing[what.context.span_id] = followed

    def _queued(self, entry: Queued) -> None:
        request = entry.request
        before = self._take_output(request.request_id)
        if before is not None:  # the journal dropped its end, and the id is used again
            self._end_windows([before])
        if not request.span_id:
            return
        followed = self._requests.get(bytes.fromhex(request.span_id))
        if followed is None:  # the note was dropped by the journal
            return
        _, _, index = request.request_id.partition(SEPARATOR)
        output = FollowedOutput(followed, int(index or 0), entry.at_ns)
        followed.outputs[request.request_id] = output
        self._outputs[request.request_id] = output
        while len(self._outputs) > MOST_FOLLOWED:
            self._forget(next(iter(self._outputs.values())).request)

    def _ended(self, entry: Ended) -> None:
        output = self._take_output(entry.request.request_id)
        if output is None:
            return
        output.request.weights_generation = entry.output.weights_generation
        self._settle(output, entry.output.timing, entry.num_tokens)

    def _cancelled(self, entry: Cancelled) -> None:
        output = self._take_output(entry.request.request_id)
        if output is None:
            return
        output.request.was_cancelled = True
        self._settle(output, entry.timing, entry.num_tokens)

    def _take_output(self, engine_id: str) -> FollowedOutput | None:
        output = self._outputs.pop(engine_id, None)
        if output is not None:
            del output.request.outputs[engine_id]
        return output

    def _settle(self, output: FollowedOutput, timing: RequestTiming | None, num_tokens: int) -> None:
        """Note how an output, which is followed no more, ended in the engine."""
        self._end_windows([output])
        followed = output.request
        if timing is not None:
            followed.timings.append(timing)
        followed.num_tokens += num_tokens
        followed.num_settled += 1
        self._finish(followed)

    def _finish(self, followed: FollowedRequest) -> bool:
        """Record a request, if it has ended for its caller and in the engine. Returns whether it has."""
        if followed.closed is None or not followed.is_settled:
            return False
        self._forget(followed)
        return True

    def _forget(self, followed: FollowedRequest) -> None:
        """Follow a request no more. If it has ended for its caller, it is recorded as it is known now."""
        self._requests.pop(followed.context.span_id, None)
        self._closing.pop(followed.context.span_id, None)
        self._end_windows(followed.outputs.values())
        for engine_id in followed.outputs:
            del self._outputs[engine_id]
        if followed.closed is not None:
            self._record(followed, followed.closed)

    def _record(self, followed: FollowedRequest, closed: Closed) -> None:
        self._made += request_spans(followed, closed)

    def _give_up(self, before_ns: int) -> None:
        """Forget those that had ended for their caller by then."""
        for followed in list(self._closing.values()):
            if followed.closed is not None and followed.closed.end_ns <= before_ns:
                self._forget(followed)

    # -- what happens to them --

    def _preempted(self, entry: Preempted) -> None:
        for engine_id, num_computed in zip(entry.request_ids, entry.num_computed, strict=True):
            output = self._outputs.get(engine_id)
            if output is None:
                continue
            self._end_windows([output])
            output.was_preempted = True
            told = {"penstock.output.index": output.index, "penstock.tokens.computed": num_computed}
            output.request.happened(Happened("preempted", entry.at_ns, told))

    def _changed(self, entry: Changed) -> None:
        happened = _event_of(entry)
        self._end_windows(self._outputs.values())
        for followed in dict.fromkeys(output.request for output in self._outputs.values()):
            followed.happened(happened)

    def _step(self, record: StepRecord) -> None:
        begin_ns = max(record.dispatched_ns, self._last_waited_ns)
        self._last_waited_ns = record.waited_ns
        if self._level < TraceLevel.STEPS:
            return
        find, started_ns = self._outputs.get, record.started_ns
        # A row of a plan older than the output is one of an earlier output with the same id.
        rows = [
            (row, output)
            for row in record.plan.rows
            if (output := find(row[0])) is not None and output.queued_ns <= started_ns
        ]
        if not rows:
            return
        made = {output[0]: len(output[1]) for output in record.outputs}  # by their engine ids
        ids = self._new_id(ID_BYTES)
        kind = record.kind
        prefills = kind is StepKind.PREFILL or kind is StepKind.MIXED
        step = step_of(record, ids=ids, begin_ns=begin_ns, prefills=prefills)
        begin_to_decode = self._rows(rows, step, made)
        self._made += step_trace(
            record,
            ids=ids,
            kind=kind.value,
            prefills=prefills,
            id_attribute=step.id_attribute,
            wall_offset_ns=self._wall_clock.offset_ns,
            requests=list(dict.fromkeys([output.request.link for _, output in rows])),
            num_generated=sum(made.values()),
        )
        for followed in begin_to_decode:
            followed.is_decoding = True

    def _rows(
        self, rows: Sequence[tuple[PlanRow, FollowedOutput]], step: Step, made: Mapping[str, int]
    ) -> list[FollowedRequest]:
        """Record what a step did for each row. `made` has the numbers of tokens. Returns the requests that
        have their first token after this step.
        """
        new_id, is_detailed = self._new_id, self._level >= TraceLevel.DETAILED
        if step.shape != self._last_shape:
            self._last_shape = step.shape
            self._end_windows(output for _, output in rows if len(output.window) >= LEAST_STEPS_OF_SHAPE)
        begin_to_decode = []
        for row, output in rows:
            num_tokens = made.get(row[0], 0)
            if row[4] is not None:  # its tokens, which are known
                span = output.chunk(new_id, row, step)
            elif is_detailed:
                span = output.decode_step(new_id, step, num_tokens)
            else:
                span = output.decoded(new_id, step, num_tokens)
            if span is not None:
                self._made.append(span)
            request = output.request
            if not request.is_decoding and (num_tokens or row[4] is None):
                begin_to_decode.append(request)
        return begin_to_decode

    def _end_windows(self, outputs: Iterable[FollowedOutput]) -> None:
        for output in outputs:
            span = output.take_window(self._new_id)
            if span is not None:
                self._made.append(span)

    def _send(self) -> None:
        if self._made:
            self._outlet.emit(self._made)
            self._made = []


def _event_of(entry: Changed) -> Happened:
    match entry.what:
        case Applied() as applied:
            told: Attributes = {
                "penstock.weights.generation": applied.version.generation,
                "penstock.weights.label": applied.version.label,
                "penstock.weights.pause": applied.paused_ns / 1e9,
            }
            return Happened("weights_updated", entry.at_ns, told)
        case WeightsBroken(reason):
            return Happened("weights_broken", entry.at_ns, {"penstock.weights.problem": reason})
        case Paused():
            return Happened("paused", entry.at_ns)
        case Resumed():
            return Happened("resumed", entry.at_ns)
        case _:
            assert_never(entry.what)
