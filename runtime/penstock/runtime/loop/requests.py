"""The engine's requests, from their checks on a caller's thread to their last output. No jax.

`Intake` is passed before a request is queued, `LiveRequests` knows those that are in the engine, and
`Delivery` hands the scheduler's outputs to their sinks.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from penstock.runtime.loop.interface import AbortOutcome, Sink
from penstock.runtime.loop.journal import Recording
from penstock.runtime.requests.checks import check_token_ids, in_vocabulary, knows_tokens
from penstock.runtime.requests.request import Finish, FinishReason, PreparedPrompt, Request, StepOutput
from penstock.runtime.requests.token_bias import bias_row
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.sequence import Sequence as ScheduledSequence

log = logging.getLogger(__name__)


class Delivery:
    """Any thread may post outputs; one thread, the engine's, hands them over, in order. All methods but
    `deliver` and `hand_over` are called with the engine's lock held.
    """

    def __init__(self, changed: threading.Condition, recording: Recording) -> None:
        """Take as `changed` a condition over the engine's lock; it is notified when a delivery has ended."""
        self._changed = changed
        self._recording = recording
        self._readers: dict[str, tuple[Sink, ScheduledSequence]] = {}
        """Id to sink and sequence, for every output that has not ended."""
        self._outbox: list[tuple[Sink, StepOutput]] = []
        self._delivering = False

    @property
    def is_pending(self) -> bool:
        """Whether outputs are posted and not yet being handed over."""
        return bool(self._outbox)

    @property
    def is_handing_over(self) -> bool:
        """Whether sinks are being told."""
        return self._delivering

    @property
    def is_done(self) -> bool:
        """Whether the sinks have taken all outputs that were posted."""
        return not (self._outbox or self._delivering)

    def attach(self, seq: ScheduledSequence, sink: Sink) -> None:
        """Send the outputs of this sequence, which was queued, to `sink`, up to the last one."""
        self._readers[seq.request_id] = sink, seq
        self._recording.queued(seq.request)

    def detach(self, request_id: str) -> None:
        """Drop all further outputs of this request, because nobody reads them."""
        reader = self._readers.pop(request_id, None)
        if reader is not None:
            _, seq = reader
            self._recording.cancelled(seq.request, seq.timing(time.monotonic_ns()), seq.num_generated)

    def post(self, outputs: Sequence[StepOutput]) -> None:
        """Post outputs, except those of detached requests."""
        readers = self._readers
        for output in outputs:
            reader = readers.get(output.request_id)
            if reader is None:
                continue
            sink, seq = reader
            self._outbox.append((sink, output))
            if output.last:
                del readers[output.request_id]
                self._recording.ended(seq.request, output, seq.num_generated)

    def deliver(self) -> None:
        """Hand over all posted outputs, in one call for each sink; on the engine's thread, without the
        lock.
        """
        with self._changed:
            outbox, self._outbox = self._outbox, []
            self._delivering = True
        self.hand_over(outbox)

    def fail(self, error: Exception) -> list[tuple[Sink, StepOutput]]:
        """Return what is posted, followed by a last output with `error` for every request that had none, for
        `hand_over`. `is_done` stays false until that was called.
        """
        outbox, self._outbox = self._outbox, []
        readers, self._readers = self._readers, {}
        self._delivering = True
        now_ns = time.monotonic_ns()
        for sink, seq in readers.values():
            output = StepOutput(seq.request_id, error=error, timing=seq.timing(now_ns))
            outbox.append((sink, output))
            self._recording.ended(seq.request, output, seq.num_generated)
        return outbox

    def hand_over(self, outbox: Sequence[tuple[Sink, StepOutput]]) -> None:
        """Hand over these outputs, in one call for each sink; on the engine's thread, without the lock."""
        try:
            by_sink: dict[int, tuple[Sink, list[StepOutput]]] = {}
            for sink, output in outbox:
                by_sink.setdefault(id(sink), (sink, []))[1].append(output)
            for sink, outputs in by_sink.values():
                try:
                    sink(outputs)
                except BaseException:  # one reader's fault must not end the others' requests
                    log.exception("a sink failed; its outputs are lost")
        finally:
            with self._changed:
                self._delivering = False
                self._changed.notify_all()  # drain waits for this


class LiveRequests:
    """Keeps the scheduler and the delivery together: each request that ends gets a last output, or none if
    nobody reads it. Every method but `cancel` and `has_cancelled` is called with the engine's lock held.
    """

    def __init__(self, scheduler: Scheduler, delivery: Delivery, changed: threading.Condition) -> None:
        """Take as `changed` what is notified when requests were dropped."""
        self._scheduler = scheduler
        self._delivery = delivery
        self._changed = changed
        self._cancelled: deque[tuple[str, ...]] = deque()

    @property
    def has_cancelled(self) -> bool:
        """Whether `drop_cancelled` has something to do. May be asked without the lock."""
        return bool(self._cancelled)

    def cancel(self, request_ids: tuple[str, ...]) -> None:
        """Note, without the lock, that nobody reads these requests any more. Whoever takes the lock next to
        look at the scheduler drops them first.
        """
        self._cancelled.append(request_ids)

    def drop_cancelled(self) -> None:
        """Free the slots and pages of cancelled requests; their sinks are told nothing."""
        while self._cancelled:
            for request_id in self._cancelled.popleft():
                self._delivery.detach(request_id)
                self._scheduler.abort(request_id, "", time.monotonic_ns())
            self._changed.notify_all()

    def forget_cancelled(self) -> None:
        """Drop the notes of cancelled requests, because the engine is dead."""
        self._cancelled.clear()

    def queue(self, seq: ScheduledSequence, sink: Sink) -> None:
        """Queue a request whose outputs go to `sink`. Raises DuplicateRequestId or QueueFull."""
        self._scheduler.queue(seq)
        self._delivery.attach(seq, sink)

    def end(self, request_id: str, finish: Finish) -> bool:
        """End the output with this id of the engine's, with a last output for its sink. False if it is not
        active.
        """
        output = self._scheduler.abort(
            request_id, finish.message, time.monotonic_ns(), reason=finish.reason, stop=finish.stop
        )
        if output is None:
            return False
        self._delivery.post([output])
        return True

    def end_all(self, request_ids: Iterable[str], message: str) -> None:
        """End the outputs with these ids of the engine's, as ABORTED."""
        for request_id in request_ids:
            self.end(request_id, Finish(FinishReason.ABORTED, message=message))

    def fail_all(self, error: Exception) -> None:
        """End all outputs with an error."""
        now_ns = time.monotonic_ns()
        self._delivery.post(
            [self._scheduler.fail(name, error, now_ns) for name in self._scheduler.active_ids()]
        )

    def abort(self, request_ids: Iterable[str], message: str) -> list[tuple[str, AbortOutcome]]:
        """End requests with all their outputs. Returns the outcome for each id, in the order given,
        duplicates once.
        """
        return [(request_id, self._abort(request_id, message)) for request_id in dict.fromkeys(request_ids)]

    def _abort(self, request_id: str, message: str) -> AbortOutcome:
        finish = Finish(FinishReason.ABORTED, message=message)
        ended = [self.end(output, finish) for output in self._scheduler.outputs_of(request_id)]
        if any(ended):
            return AbortOutcome.ABORTED
        if self._scheduler.finished(request_id):
            return AbortOutcome.ALREADY_FINISHED
        return AbortOutcome.NOT_FOUND

    def matching(self, prefix: str) -> Sequence[str]:
        """List the ids of the active requests that begin with `prefix`, in order of arrival."""
        return [
            request_id for request_id in self._scheduler.active_requests() if request_id.startswith(prefix)
        ]


MANY_BIASES = 1_000
"""From this many biases on, their array is made beforehand, once for all outputs. For fewer, it would take
more memory while the request waits than it saves time."""


class Intake:
    """All work that grows with the size of a request. It is done in the thread that submits, without the
    engine's lock.
    """

    def __init__(self, scheduler: Scheduler, vocab_size: int) -> None:
        self._scheduler = scheduler
        self._vocab_size = vocab_size

    def prepare(self, request: Request) -> PreparedPrompt:
        """Make what all outputs of one prompt can share: whether the model knows all tokens, the keys of the
        prefix cache, and the array of many biases. Takes about 10 ms for 100,000 tokens, or as many biases.
        Raises nothing.
        """
        token_ids, cache, sampling = request.prompt_token_ids, request.cache, request.sampling
        is_known = in_vocabulary(token_ids, self._vocab_size)
        keys = self._scheduler.page_keys(request) if is_known else ()
        if not knows_tokens(sampling, self._vocab_size):
            return PreparedPrompt(
                token_ids, cache, tuple(keys), is_known, adapter_weights=request.adapter_weights
            )
        row = None
        if len(sampling.logit_bias) + len(sampling.allowed_token_ids) >= MANY_BIASES:
            row = bias_row(sampling, self._vocab_size)
        return PreparedPrompt(
            token_ids, cache, tuple(keys), is_known, sampling, row, adapter_weights=request.adapter_weights
        )

    def admit(self, request: Request, prepared: PreparedPrompt | None) -> ScheduledSequence:
        """Make the sequence that `Scheduler.queue` takes. A request without a seed gets one.

        Raises ValueError if `prepared` belongs to another prompt, InvalidRequest for tokens that the model
        does not have and for too many stop ids, PromptTooLong and ExceedsKVCapacity.
        """
        if prepared is None:
            prepared = self.prepare(request)
        elif prepared.token_ids is not request.prompt_token_ids or prepared.cache != request.cache:
            raise ValueError("another prompt was prepared than is submitted")
        is_covered = prepared.covers(request.sampling)
        check_token_ids(
            request,
            self._vocab_size,
            len(self._scheduler.config.eos_token_ids),
            prompt_is_known=prepared.in_vocabulary,
            sampling_is_known=is_covered,
        )
        row = prepared.bias_row if is_covered else None
        if request.sampling.seed is None:
            sampling = request.sampling.seeded(secrets.randbits(64))
            request = dataclasses.replace(request, sampling=sampling, bias_row=row)
        elif row is not None:
            request = dataclasses.replace(request, bias_row=row)
        return self._scheduler.prepare(request, time.monotonic_ns(), prepared.page_keys)
