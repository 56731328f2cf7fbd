"""Runs one request, on the path that Generate and Stream share: tokenizes, submits, takes deltas,
cleans up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from penstock.runtime.errors import DuplicateRequestId
from penstock.runtime.generation.preparing import (
    PreparedJob,
    assembler_of,
    constraints_of,
    with_bad_words,
)
from penstock.runtime.generation.results import merged_timing
from penstock.runtime.requests.constraint import TokenConstraint
from penstock.runtime.requests.context import Fitted, fit
from penstock.runtime.requests.fanout import outputs_of
from penstock.runtime.requests.media import MediaItem
from penstock.runtime.requests.request import (
    Finish,
    Request,
    RequestTiming,
    StepOutput,
    TokenLogprobs,
)
from penstock.service.access.ownership import own_id
from penstock.service.replies.messages import encode_logprobs
from penstock.service.replies.outputs import Buffer, Encode, RequestReader, Taken
from penstock.service.requests.generate import ServedJob
from penstock.service.requests.prompts import encode_prompt, encode_words
from penstock.service.servicers.serving import Arrival, Serving
from penstock.service.telemetry.tracing.service_spans import RECEIVED_NS
from penstock.service.usage.meter import current_meter

T = TypeVar("T")
TOKEN_COST, BIAS_COST = 2, 16
"""The cost of checking and preparing one token of a prompt, and one bias or bad word, in bytes of a message
(`Lanes.convert`): 2,000 tokens take a fraction of a millisecond.
"""
OUTPUTS_AT_ONCE = 16
"""How many outputs of one request are made, or submitted, before other tasks have a turn."""


class ServedRequest:
    """A request in the engine, as an async context. Leaving the context frees its slots and pages, whatever
    happened.
    """

    def __init__(
        self, job: ServedJob, serving: Serving, *, min_tokens: int = 1, stall_limit_s: float | None = None
    ) -> None:
        """`min_tokens` is the least number of tokens in a delta. `stall_limit_s` is None if everything is
        collected until the end.
        """
        self._trace = serving.telemetry.request(job, serving.engine.info.name, serving.engine.journal)
        trace_id, span_id = self._trace.ids
        received_ns = RECEIVED_NS.get() or time.monotonic_ns()
        self.job = dataclasses.replace(job, received_ns=received_ns, trace_id=trace_id, span_id=span_id)
        """Once the context is entered, it has no prompt any more, and nothing else that may be large."""
        self.prompt = Fitted((), job.stopping)
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        """Known once the first delta of output 0 was taken."""
        self.num_prompt_tokens = 0
        """Tokens of the prompt, or of all inputs."""
        self.num_completion_tokens = 0
        """Tokens of all outputs that were taken so far."""
        self.num_image_tokens = 0
        """Tokens of the prompt that stand for images."""
        self.serving = serving
        self._held_bytes = 0
        """Bytes of images that this request holds."""
        self._placed = 0
        """How many outputs are in the engine."""
        self._engine = serving.engine
        self._lanes = serving.lanes
        self._min_tokens = min_tokens
        self._stall_limit_s = stall_limit_s
        self._collects = stall_limit_s is None
        self._meter = current_meter()
        self._reader: RequestReader | None = None
        self._ends: dict[int, tuple[Finish, RequestTiming | None]] = {}

    async def __aenter__(self) -> Self:
        """Tokenize and submit. Raises what the engine refuses."""
        try:
            self.serving.budget.check_room()
            with (
                self.serving.places.taken(self.job.n),
                self.serving.arrivals.tokenizing(self.job.engine_id) as arrival,
            ):
                async with self.serving.calls.preparing():
                    prepared = await self.prepare()
                await self._submit(prepared, arrival)
            self._placed = self.job.n
            self._meter.began(self.num_prompt_tokens)
            self.job = self.job.without_load()
        except DuplicateRequestId as error:
            self._end(error)
            raise DuplicateRequestId(own_id(error.request_id)) from None  # with the id that the caller sent
        except BaseException as error:
            self._end(error)
            raise
        return self

    async def _submit(self, prepared: PreparedJob, arrival: Arrival) -> None:
        """Hand the outputs to the engine, or end those that were aborted before.

        Other tasks have a turn between some of them. An abort that comes then finds the submitted ones in the
        engine, and marks `arrival` for the rest. After the last one there is no `await`: see Arrivals.
        """
        self._reader = RequestReader(
            self._engine,
            self.job.engine_id,
            self.serving.budget,
            self.serving.stalls,
            stall_limit_s=self._stall_limit_s,
            collects=self._collects,
            on_stall=self._trace.stalled,
        )
        requests = prepared.requests
        self._trace.submits(self.num_prompt_tokens)
        buffers = [
            self._buffer(request, index, prepared.text, self._reader)
            async for index, request in in_turns(list(enumerate(requests)))
        ]
        self._reader.reads(buffers)
        triples = list(zip(requests, buffers, prepared.shared, strict=True))
        async for request, buffer, shared in in_turns(triples):
            if arrival.finish is None:
                buffer.submit(request, shared)
                self._trace.queued()
            else:
                buffer.deliver(self._never_ran(request.request_id, arrival.finish))

    async def prepare(self) -> PreparedJob:
        """Do what `prepare_job` does, in its order, but each part in a thread where it takes long."""
        job, engine, lanes = self.job, self._engine, self._lanes
        room = engine.info.max_model_len
        encoded = await encode_prompt(
            engine.text, job.prompt, lanes, room=room, cuts=job.cuts, reader=engine.images
        )
        self._hold(encoded.media)
        self._trace.tokenized(len(encoded.token_ids))
        self.prompt = fit(encoded.token_ids, job.context, job.stopping, room)
        self.num_prompt_tokens = len(self.prompt.token_ids)
        words = await encode_words(engine.text, job.bad_words, lanes)
        if job.prompt_logprobs is not None:
            self.serving.budget.check_prompt(len(self.prompt.token_ids), job.prompt_logprobs)
        num_biases = len(job.sampling.logit_bias) + len(job.sampling.allowed_token_ids) + len(words)
        cost = BIAS_COST * num_biases
        sampling = await lanes.convert(
            partial(with_bad_words, job.sampling, words, engine.info.vocab_size), cost
        )
        requests = outputs_of(
            job.request(self.prompt, sampling, encoded), job.n, await self._constraints(encoded.text)
        )
        cost += TOKEN_COST * len(self.prompt.token_ids)
        self._trace.enters("submit")
        shared = [await lanes.convert(partial(engine.prepare, requests[0]), cost)] * job.n
        return PreparedJob(job=job, requests=requests, shared=shared, prompt=self.prompt, text=encoded.text)

    def _hold(self, media: Sequence[MediaItem]) -> None:
        """Count the images until the request ends. Raises Busy."""
        num_bytes = sum(item.patches.nbytes for item in media)
        self.serving.held_images.hold(num_bytes)
        self._held_bytes = num_bytes
        self.num_image_tokens = sum(item.num_tokens for item in media)

    async def _constraints(self, text: str) -> Sequence[TokenConstraint]:
        """Return one constraint for each output, if there is a grammar. The work is done in a thread."""
        job, engine = self.job, self._engine
        if job.grammar is None and not job.calls_enforced_by:
            return ()
        self._trace.enters("grammar")
        return await self._lanes.heavy(
            lambda: constraints_of(job, text, engine.text, engine.forms, engine.grammars)
        )

    def _buffer(self, request: Request, index: int, text: str, reader: RequestReader) -> Buffer:
        engine = self._engine
        return Buffer(
            engine,
            self.serving.switchboard,
            request.request_id,
            assembler_of(self.job, request, index, text, engine.text, engine.forms),
            reader,
            encode=self._encode,
            min_tokens=self._min_tokens,
            made=self._meter.made,
        )

    def _never_ran(self, request_id: str, finish: Finish) -> StepOutput:
        """The output that the engine sends for a request that ends while it waits."""
        now_ns = time.monotonic_ns()
        timing = RequestTiming(received_ns=now_ns, arrived_ns=now_ns, finished_ns=now_ns)
        return StepOutput(
            request_id, finish=finish, timing=timing, weights_generation=self._engine.weights.generation
        )

    @property
    def _encode(self) -> Encode | None:
        """How log-probabilities are serialized; None if they are not sent."""
        top = self.job.logprobs
        if top is None or not self.job.return_token_ids:
            return None
        return partial(encode_logprobs, top=top)

    @property
    def is_done(self) -> bool:
        """Whether the end of every output was taken."""
        return self._reader is not None and self._reader.is_done

    async def take(self) -> tuple[int, Taken]:
        """Wait for the next delta of any output, and return the output's index and the delta. The last delta
        of each output has `finish`.
        """
        assert self._reader is not None, "not entered"
        index, taken = await self._reader.take()
        self.num_completion_tokens += len(taken.token_ids)
        if taken.prompt_logprobs:
            self.prompt_logprobs = taken.prompt_logprobs
        if taken.finish is not None:
            self._ends[index] = taken.finish, taken.timing
            if self.is_done:
                finishes = [finish for _, (finish, _) in sorted(self._ends.items())]
                self._trace.finished(finishes, self.timing)
                reasons = [finish.reason.value for finish in finishes]
                self._meter.finished(reasons, self.timing.cached_prompt_tokens if self.timing else 0)
        return index, taken

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of all outputs that belong to their reasoning, once all deltas were taken."""
        return self._meter.reasoning_tokens

    def sending(self, message: bytes) -> bytes:
        """Return the message, and note that it is being sent until the next message is, or the next delta is
        taken.
        """
        assert self._reader is not None, "not entered"
        self._reader.sending(len(message))
        return message

    def sent_prompt(self) -> None:
        """Note that the prompt's log-probabilities have been sent."""
        assert self._reader is not None, "not entered"
        self._reader.sent_prompt()

    @property
    def timing(self) -> RequestTiming | None:
        """The times of all outputs that have ended: from the first arrival to the last end."""
        return merged_timing([timing for _, timing in self._ends.values() if timing is not None])

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._reader is not None:
            self._reader.close()
            task = asyncio.current_task()
            if error is None and self._collects and task is not None:
                # The reply waits to be sent until the RPC's task ends.
                reader = self._reader
                task.add_done_callback(lambda _: reader.forget())
            else:
                self._reader.forget()
        self.serving.places.left(self._placed)
        self.serving.held_images.release(self._held_bytes)
        self._held_bytes = 0
        was_cancelled = isinstance(error, (asyncio.CancelledError, GeneratorExit))
        self._trace.end(self.num_completion_tokens, error, cancelled=was_cancelled)


async def in_turns(items: Sequence[T]) -> AsyncIterator[T]:
    """Yield all items. Other tasks on the event loop have a turn after each few, so never after
    the last one.
    """
    for index, item in enumerate(items):
        if index and index % OUTPUTS_AT_ONCE == 0:
            await asyncio.sleep(0)
        yield item
