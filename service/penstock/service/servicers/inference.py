"""InferenceService: Generate, Stream, Embed, Score, Rerank, Classify, Abort and UpdateWeights. Each RPC
checks, converts, calls and converts back.

`ServedRequest` is what Generate and Stream share: it tokenizes, submits, takes deltas and cleans up.
`ServedReading` is one call of Embed, Score, Rerank or Classify, whose prompts become requests of the engine
that generate nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from penstock.runtime.errors import DuplicateRequestId, InvalidRequest, UnknownAdapterError, Violation
from penstock.runtime.loop.interface import AbortOutcome
from penstock.runtime.prompting.jobs import (
    PreparedJob,
    assembler_of,
    constraints_of,
    with_bad_words,
)
from penstock.runtime.prompting.prompts import (
    ContextParams,
    Fitted,
    Prompt,
    TextPrompt,
    Truncation,
    check_length,
    fit,
)
from penstock.runtime.prompting.relevance import (
    RelevanceMethod,
    best_first,
    check_fits,
    cosine,
    judged,
    pair_ids,
    yes_against_no,
)
from penstock.runtime.prompting.results import (
    Score,
    VectorForm,
    fit_input,
    fit_inputs,
    join,
    merged_timing,
    naming,
    special_around,
)
from penstock.runtime.requests.adapter import AdapterWeights
from penstock.runtime.requests.constraint import TokenConstraint
from penstock.runtime.requests.images import MediaItem
from penstock.runtime.requests.reader import Classes, sigmoid
from penstock.runtime.requests.request import (
    Finish,
    FinishReason,
    PreparedPrompt,
    PromptReading,
    Request,
    RequestTiming,
    StepOutput,
    TokenLogprobs,
    output_id,
    outputs_of,
    request_id_of,
)
from penstock.runtime.text.interface import Text
from penstock.service.access.callers import CURRENT_CALLER, Caller
from penstock.service.access.ownership import engine_id, own_id, owner_of
from penstock.service.access_errors import Forbidden
from penstock.service.backend import Backend
from penstock.service.errors import RequestAborted
from penstock.service.replies import messages
from penstock.service.replies.messages import Collected, encode_logprobs
from penstock.service.replies.outputs import Buffer, Encode, RequestReader, Taken
from penstock.service.requests.adapters import is_name
from penstock.service.requests.generate import ServedJob, encode_prompt, encode_words, message_cost, to_job
from penstock.service.requests.reading import (
    RERANK_METHODS,
    ClassifyJob,
    RankingJob,
    ReadingJob,
    TextPair,
    to_classify_job,
    to_embed_job,
    to_ranking_job,
    to_score_job,
)
from penstock.service.requests.support import check_supported
from penstock.service.rpcs.interceptors import Undecoded
from penstock.service.servicers.serving import AbortTarget, Arrival, Arrivals, Serving, to_target
from penstock.service.servicers.weights import WeightUpdates
from penstock.service.telemetry.tracing.service_spans import RECEIVED_NS
from penstock.service.threads.lanes import MESSAGE_BYTES
from penstock.service.usage.meter import current_meter
from penstock.v1 import inference_pb2, inference_pb2_grpc, types_pb2, weights_pb2

if TYPE_CHECKING:
    from penstock.v1.inference_pb2_grpc import _ServicerContext as Context


_RANK = (AbortOutcome.NOT_FOUND, AbortOutcome.ALREADY_FINISHED, AbortOutcome.ABORTED)


def means(target: AbortTarget, caller: Caller) -> Callable[[str], bool]:
    """Return a function that tells, for the engine's id of a request, whether `target` covers it when this
    caller names it.
    """

    def meant(engine_id: str) -> bool:
        return (caller.controls or owner_of(engine_id) == caller.id) and target.matches(own_id(engine_id))

    return meant


def end_requests(
    engine: Backend,
    arrivals: Arrivals,
    held: Iterable[str],
    caller: Caller,
    target: AbortTarget,
    message: str,
) -> Sequence[tuple[str, AbortOutcome]]:
    """End the requests that `target` covers. Their slots and pages are free when this returns.

    Returns one outcome for each id that was named, or for each request that was found, with ids as callers
    know them. Requests of others are NOT_FOUND, just as requests that do not exist. `held` are the engine's
    ids of all outputs that the service has in the engine now.
    """
    meant = means(target, caller)
    found: dict[str, AbortOutcome] = dict.fromkeys(arrivals.abort(meant, message), AbortOutcome.ABORTED)
    in_engine = dict(_end_own(engine, caller, target, message))
    if caller.controls and not target.everything:
        others = {request_id_of(one) for one in held if owner_of(one) != caller.id and meant(one)}
        if others:
            in_engine.update(engine.abort(sorted(others), message=message))
    found = in_engine | found
    if target.ids is None:
        return [(own_id(one), outcome) for one, outcome in found.items()]
    best = dict.fromkeys(target.ids, AbortOutcome.NOT_FOUND)
    # some of these ids may belong to no request
    named = {engine_id(caller.id, name): name for name in target.ids}
    for one, outcome in found.items():
        name = named.get(one) or own_id(one)
        best[name] = max(best[name], outcome, key=_RANK.index)
    return list(best.items())


def _end_own(
    engine: Backend, caller: Caller, target: AbortTarget, message: str
) -> Iterable[tuple[str, AbortOutcome]]:
    """End the caller's own requests; or everybody's, if the target is all requests and the caller may end
    them.
    """
    if target.ids is not None:
        return engine.abort([engine_id(caller.id, name) for name in target.ids], message=message)
    if target.everything and caller.controls:
        return engine.abort(all_requests=True, message=message)
    if target.everything and not caller.id:
        raise Forbidden("only a caller with a key, or with the role control, may abort all requests")
    return engine.abort(prefix=engine_id(caller.id, target.prefix or ""), message=message)


T = TypeVar("T")
ReadingT = TypeVar("ReadingT", bound=ReadingJob)
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
        self._adapter_weights: AdapterWeights | None = None
        """What the name of the adapter meant when the request came, for all of its outputs."""
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
                    await self._find_adapter()
                    prepared = await self.prepare()
                await self._submit(prepared, arrival)
            self._placed = self.job.n
            self._meter.began(self.num_prompt_tokens)
            if self.job.adapter is not None:
                self.serving.adapter_requests.took(self.job.adapter)
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
        request = job.request(self.prompt, sampling, encoded)
        if self._adapter_weights is not None:
            request = dataclasses.replace(request, adapter_weights=self._adapter_weights)
        requests = outputs_of(request, job.n, await self._constraints(encoded.text))
        cost += TOKEN_COST * len(self.prompt.token_ids)
        self._trace.enters("submit")
        shared = [await lanes.convert(partial(engine.prepare, requests[0]), cost)] * job.n
        return PreparedJob(job=job, requests=requests, shared=shared, prompt=self.prompt, text=encoded.text)

    async def _find_adapter(self) -> None:
        """Find what the name of the adapter means. Raise UnknownAdapterError before the request costs
        anything. An adapter that nobody has asked for yet may be read from the disk. A name that no adapter
        can have is that of none.
        """
        if self.job.adapter is not None:
            if not is_name(self.job.adapter):
                raise UnknownAdapterError(self.job.adapter)
            find = partial(self._engine.adapters.weights_of, self.job.adapter)
            self._adapter_weights = await self._lanes.heavy(find)

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
            calls_in_pieces=self.job.tool_call_deltas,
            made=self._meter.made,
        )

    def _never_ran(self, request_id: str, finish: Finish) -> StepOutput:
        """Make the output that the engine sends for a request that ends while it waits."""
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
    """Yield all items. Other tasks on the event loop have a turn after each few, so never after the last
    one.
    """
    for index, item in enumerate(items):
        if index and index % OUTPUTS_AT_ONCE == 0:
            await asyncio.sleep(0)
        yield item


MAX_JOINED_TOKENS = 16 * 1024 * 1024
"""The most tokens of all continuations of one call of Score, with the prompt before each. A message of half a
megabyte could otherwise ask for a thousand prompts of a hundred thousand tokens, which take gigabytes before
the first of them runs.
"""


class ServedReading(ServedRequest):
    """A request in the engine whose outputs end with their prompts, as an async context."""

    def __init__(self, job: ReadingJob, serving: Serving) -> None:
        super().__init__(job, serving)
        self._reading_job = job
        self.fitted: Sequence[Fitted] = ()
        """What the engine reads for each output. Of scores, the prompt and the continuation."""

    async def prepare(self) -> PreparedJob:
        """Tokenize everything, and make a request of each part."""
        self.fitted, readings = await self._read()
        self._trace.tokenized(self.num_prompt_tokens)
        requests = [
            self._request(i, one.token_ids, reading)
            for i, (one, reading) in enumerate(zip(self.fitted, readings, strict=True))
        ]
        self._trace.enters("submit")
        shared = [await self._prepared(request) async for request in in_turns(requests)]
        self._reading_job = self._reading_job.without_load()
        return PreparedJob(job=self.job, requests=requests, shared=shared, prompt=self.prompt, text="")

    async def _read(self) -> tuple[Sequence[Fitted], Sequence[PromptReading]]:
        """Return what the engine is to read for each output, and what of it is told."""
        job, info = self._reading_job, self.serving.engine.info
        room = info.room
        special = job.pooling is not None  # a continuation gets no special tokens
        parts = await self._tokens_of_all(job, special=special)
        if job.pooling is not None:
            around = special_around(self.serving.engine.text, info.reader)
            fitted = fit_inputs(parts, job.truncation, room, around)
            self.num_prompt_tokens = sum(len(one.token_ids) for one in fitted)
            readings = [PromptReading(pooling=job.pooling)] * len(fitted)
        else:
            prompt = await self._tokens_of(job.prompt, Truncation.REJECT, special=True)
            self.prompt = Fitted(prompt, job.stopping)
            num_joined = len(prompt) * len(parts) + sum(map(len, parts))
            if num_joined > MAX_JOINED_TOKENS:
                described = f"{num_joined} tokens, with the prompt before each; at most {MAX_JOINED_TOKENS}"
                raise InvalidRequest([Violation("continuations", described)])
            work = partial(join, prompt, parts, room)
            joined = await self.serving.lanes.convert(work, TOKEN_COST * num_joined)
            fitted = [Fitted(one, job.stopping) for one in joined]
            self.num_prompt_tokens = len(prompt) + sum(map(len, parts))
            readings = [PromptReading(scores_from=len(prompt))] * len(fitted)
        return fitted, readings

    async def _tokens_of_all(self, job: ReadingJob, *, special: bool) -> list[tuple[int, ...]]:
        """Return the tokens of each part. Short texts are tokenized on the event loop, so other tasks have a
        turn between some of them. InvalidRequest names all parts that are too long to be tokenized.
        """
        name, bad = "inputs" if job.pooling is not None else "continuations", list[Violation]()
        parts: list[tuple[int, ...]] = []
        async for i, part in in_turns(list(enumerate(job.parts))):
            with naming(f"{name}[{i}]", bad):
                parts.append(await self._tokens_of(part, job.truncation, special=special))
        if bad:
            raise InvalidRequest(bad)
        return parts

    async def _tokens_of(self, prompt: Prompt, truncation: Truncation, *, special: bool) -> tuple[int, ...]:
        encoded = await encode_prompt(
            self.serving.engine.text,
            prompt,
            self.serving.lanes,
            room=self.serving.engine.info.room,
            cuts=truncation is not Truncation.REJECT,
            add_special_tokens=special,
        )
        return encoded.token_ids

    async def _pair(self, first: str, second: str) -> Fitted:
        """Return what a classifier reads of two texts. PromptTooLong where they do not fit."""
        engine = self.serving.engine
        info, text = engine.info, engine.text
        assert text is not None, "conversion refuses pairs where there is no tokenizer"
        assert info.reader is not None, "conversion refuses models that are no classifiers"
        both = TextPrompt(first + second)
        check_length(both, both.text, text.max_token_chars, room=info.room, cuts=False)
        work = partial(pair_ids, text, info.reader, first, second, info.vocab_size)
        token_ids = await self.serving.lanes.text(work, len(both.text))
        return fit(token_ids, ContextParams(), self.job.stopping, info.room)

    def _request(self, index: int, token_ids: tuple[int, ...], reading: PromptReading) -> Request:
        job = self.job
        return Request(
            output_id(job.engine_id, index),
            token_ids,
            prompt_logprobs=None if reading.scores_from is None else 0,
            reading=reading,
            cache=job.cache,
            priority=job.priority,
            adapter=job.adapter,
            adapter_weights=self._adapter_weights,
            min_generation=job.min_generation,
            received_ns=job.received_ns,
            operation=job.operation,
            trace_id=job.trace_id,
            span_id=job.span_id,
        )

    async def _prepared(self, request: Request) -> PreparedPrompt:
        work = partial(self.serving.engine.prepare, request)
        return await self.serving.lanes.convert(work, TOKEN_COST * len(request.prompt_token_ids))

    async def take_all(self) -> list[Taken]:
        """Wait for all outputs, and return what each has. RequestAborted where one was ended before."""
        taken: dict[int, Taken] = {}
        while not self.is_done:
            index, one = await self.take()
            if one.finish is not None and one.finish.reason is not FinishReason.PROMPT_READ:
                raise RequestAborted(one.finish.message)
            taken[index] = one
        return [taken[index] for index in range(len(taken))]


class ServedRanking(ServedReading):
    """A call of Rerank in the engine, as an async context."""

    def __init__(self, job: RankingJob, serving: Serving) -> None:
        super().__init__(job, serving)
        self._ranking = job

    async def _read(self) -> tuple[Sequence[Fitted], Sequence[PromptReading]]:
        """Read query and documents, or what the model is asked about each document with both answers."""
        job = self._ranking
        self._ranking = job.without_load()
        if job.method is RelevanceMethod.YES_NO:
            return await self._questions(job)
        if job.method is RelevanceMethod.CLASSIFIER:
            return await self._pairs(job)
        bad = list[Violation]()
        fitted: list[Fitted] = []
        async for i, text in in_turns(list(enumerate((job.query, *job.documents)))):
            with naming(f"documents[{i - 1}]" if i else "query", bad):
                kept = await self._cut(text, job.max_document_tokens if i else None)
                token_ids = await self._tokens_of(TextPrompt(kept), Truncation.REJECT, special=True)
                fitted.append(fit(token_ids, ContextParams(), job.stopping, self._room))
                self.num_prompt_tokens += len(fitted[-1].token_ids)
            _check_joined(self.num_prompt_tokens)  # what is too much is not read to its end
        if bad:
            raise InvalidRequest(bad)
        return fitted, [PromptReading(pooling=job.pooling)] * len(fitted)

    async def _questions(self, job: RankingJob) -> tuple[Sequence[Fitted], Sequence[PromptReading]]:
        assert job.answer_token_ids is not None, "the job asks the model"
        bad = list[Violation]()
        fitted: list[Fitted] = []
        readings: list[PromptReading] = []
        async for i, document in in_turns(list(enumerate(job.documents))):
            with naming(f"documents[{i}]", bad):
                kept = await self._cut(document, job.max_document_tokens)
                work = partial(judged, self._text, job.instruction, job.query, kept)
                shown = await self.serving.lanes.text(work, len(job.query) + len(kept) + len(job.instruction))
                asked = await self._tokens_of(TextPrompt(shown), Truncation.REJECT, special=False)
                check_fits(len(asked), self._room)
                self.num_prompt_tokens += len(asked)
                fitted += [Fitted((*asked, answer), job.stopping) for answer in job.answer_token_ids]
                readings += [PromptReading(scores_from=len(asked))] * 2
            _check_joined(2 * self.num_prompt_tokens)
        if bad:
            raise InvalidRequest(bad)
        return fitted, readings

    async def _pairs(self, job: RankingJob) -> tuple[Sequence[Fitted], Sequence[PromptReading]]:
        bad = list[Violation]()
        fitted: list[Fitted] = []
        async for i, document in in_turns(list(enumerate(job.documents))):
            with naming(f"documents[{i}]", bad):
                kept = await self._cut(document, job.max_document_tokens)
                fitted.append(await self._pair(job.query, kept))
                self.num_prompt_tokens += len(fitted[-1].token_ids)
            _check_joined(self.num_prompt_tokens)
        if bad:
            raise InvalidRequest(bad)
        return fitted, [classes_reading(self.serving.engine)] * len(fitted)

    async def _cut(self, document: str, most: int | None) -> str:
        """Return the document, or the text of so many of its first tokens."""
        if most is None:
            return document
        encoded = await encode_prompt(
            self._text,
            TextPrompt(document),
            self.serving.lanes,
            room=self._room,
            cuts=True,
            add_special_tokens=False,
        )
        if len(encoded.token_ids) <= most:
            return document
        return self._text.decode(encoded.token_ids[:most])

    @property
    def _text(self) -> Text:
        text = self.serving.engine.text
        assert text is not None, "conversion refuses Rerank where there is no tokenizer"
        return text

    @property
    def _room(self) -> int:
        return self.serving.engine.info.room

    def relevances(self, outputs: Sequence[Taken]) -> list[tuple[float, int]]:
        """Return the relevance of each document, and the generation of the weights that computed it."""
        if self._ranking.method is RelevanceMethod.YES_NO:
            pairs = zip(outputs[::2], outputs[1::2], strict=True)
            return [(yes_against_no(_answer(yes), _answer(no)), no.weights_generation) for yes, no in pairs]
        if self._ranking.method is RelevanceMethod.CLASSIFIER:
            logits = (np.frombuffer(taken.hidden, "<f4").astype(np.float64) for taken in outputs)
            return [
                (float(sigmoid(logit)[0]), taken.weights_generation)
                for logit, taken in zip(logits, outputs, strict=True)
            ]
        query, *documents = (np.frombuffer(taken.hidden, "<f4") for taken in outputs)
        generations = [taken.weights_generation for taken in outputs[1:]]
        return [
            (cosine(query, document), generation)
            for document, generation in zip(documents, generations, strict=True)
        ]


class ServedClassification(ServedReading):
    """A call of Classify in the engine, as an async context."""

    def __init__(self, job: ClassifyJob, serving: Serving) -> None:
        super().__init__(job, serving)
        self._inputs = job.inputs

    async def _read(self) -> tuple[Sequence[Fitted], Sequence[PromptReading]]:
        inputs, self._inputs = self._inputs, ()
        engine, truncation = self.serving.engine, self._reading_job.truncation
        around = special_around(engine.text, engine.info.reader)
        bad = list[Violation]()
        fitted: list[Fitted] = []
        async for i, one in in_turns(list(enumerate(inputs))):
            with naming(f"inputs[{i}]", bad):
                if isinstance(one, TextPair):
                    fitted.append(await self._pair(one.first, one.second))
                else:
                    token_ids = await self._tokens_of(one, truncation, special=True)
                    fitted.append(fit_input(token_ids, truncation, engine.info.room, around))
        if bad:
            raise InvalidRequest(bad)
        self.num_prompt_tokens = sum(len(one.token_ids) for one in fitted)
        return fitted, [classes_reading(engine)] * len(fitted)


def classes_reading(engine: Backend) -> PromptReading:
    """Return what the numbers of the model's classes are asked for by."""
    return PromptReading(pooling=classes_of(engine).pooling, classes=True)


def classes_of(engine: Backend) -> Classes:
    """Return the classes of the model, which conversion has found to have some."""
    reader = engine.info.reader
    assert reader is not None, "conversion refuses models that are no classifiers"
    assert reader.classes is not None, "as above"
    return reader.classes


def classification(
    classes: Classes, fitted: Fitted, taken: Taken, weights: types_pb2.WeightsVersion
) -> inference_pb2.Classification:
    """Make the classes of one input."""
    logits = np.frombuffer(taken.hidden, "<f4").astype(np.float32)
    probabilities = classes.probabilities(logits)
    return inference_pb2.Classification(
        logits=logits.tolist(),
        probabilities=probabilities.tolist(),
        label=classes.labels[int(probabilities.argmax())] if len(probabilities) else "",
        token_count=len(fitted.token_ids),
        truncated_tokens=fitted.num_truncated,
        weights=weights,
    )


def _answer(taken: Taken) -> float:
    """Return the log-probability of the answer, which is the last token of what was read."""
    return taken.prompt_logprobs[-1].sampled


def _check_joined(num_tokens: int) -> None:
    if num_tokens > MAX_JOINED_TOKENS:
        described = f"{num_tokens} tokens, or more; at most {MAX_JOINED_TOKENS} in all"
        raise InvalidRequest([Violation("documents", described)])


def embedding(
    form: VectorForm, fitted: Fitted, taken: Taken, weights: types_pb2.WeightsVersion
) -> inference_pb2.Embedding:
    """Make the vector of one input."""
    pooled = np.frombuffer(taken.hidden, "<f4").astype(np.float32)
    return inference_pb2.Embedding(
        values=form.vector(pooled).astype("<f4", copy=False).tobytes(),
        token_count=len(fitted.token_ids),
        truncated_tokens=fitted.num_truncated,
        weights=weights,
    )


def score(
    token_ids: tuple[int, ...], taken: Taken, weights: types_pb2.WeightsVersion
) -> inference_pb2.ContinuationScore:
    """Make the score of one continuation with these tokens."""
    made = Score.of(token_ids, taken.prompt_logprobs)
    return inference_pb2.ContinuationScore(
        token_ids=made.token_ids, logprobs=made.logprobs, total_logprob=made.total, weights=weights
    )


ABORTED_AT_ONCE = 250
"""How many ids are aborted at a time: the engine's lock is held while they are looked up."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Runs requests on one engine."""

    def __init__(self, serving: Serving, updates: WeightUpdates) -> None:
        self._serving = serving
        self._updates = updates
        self._engine = serving.engine
        self._turns = asyncio.Lock()
        """Held while a piece of something large is encoded, see `messages.prompt_info`."""

    async def _to_job(
        self, request: inference_pb2.GenerateRequest | inference_pb2.StreamRequest
    ) -> ServedJob:
        async with self._serving.calls.preparing():
            work = partial(to_job, request, self._serving.limits)
            return await self._serving.lanes.convert(work, message_cost(request.chat))

    async def Generate(  # type: ignore[override]  # the interceptor takes what is serialized
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> bytes:
        """Run a request and answer with all of its outputs.

        The buffers merge everything until the end, and only the result is read. The answer is a serialized
        GenerateResponse, which as an object could take twenty times the memory.
        """
        job = (await self._to_job(request)).of(CURRENT_CALLER.get())
        del request  # it would otherwise live as long as this RPC
        info = self._engine.info
        self._serving.budget.check_job(job, info.max_model_len, info.hidden_size)
        async with ServedRequest(job, self._serving, min_tokens=sys.maxsize) as served:
            job = served.job
            collected = Collected(job, self._version)
            while not served.is_done:
                collected.add(*await served.take())
                await asyncio.sleep(0)  # lets other tasks run, because taking what is there does not wait
            response = inference_pb2.GenerateResponse(
                request_id=job.request_id,
                model=self._name_of(job),
                usage=self._usage(served),
                timing=messages.timing(served.timing),
            )
            prompt = await messages.prompt_info(job, served.prompt, served.prompt_logprobs, self._turns)
            return collected.response(response, prompt)

    async def Stream(  # type: ignore[override]  # as above
        self, request: inference_pb2.StreamRequest, context: Context
    ) -> AsyncIterator[inference_pb2.StreamResponse | bytes]:
        """Run a request and stream it: started; for each output deltas and finished; summary. Messages that
        may be large are serialized.
        """
        job = (await self._to_job(request)).of(CURRENT_CALLER.get())
        del request  # as above
        per_message = job.min_tokens_per_message
        stall_limit_s = self._serving.stall_limit_s
        async with ServedRequest(
            job, self._serving, min_tokens=per_message, stall_limit_s=stall_limit_s
        ) as served:
            job = served.job
            weights = self._engine.weights
            waiting: list[tuple[int, Taken]] = []
            while job.prompt_logprobs is not None and not any(index == 0 for index, _ in waiting):
                # the prompt's log-probabilities are part of the first message
                waiting.append(await served.take())
            started = inference_pb2.StreamStarted(
                request_id=job.request_id,
                model=self._name_of(job),
                weights=messages.weights_version(weights),
                paused=self._engine.is_paused,
            )
            prompt = await messages.prompt_info(job, served.prompt, served.prompt_logprobs, self._turns)
            served.prompt_logprobs = ()
            first = messages.stream_started(started, prompt)
            del prompt
            yield served.sending(first)
            del first
            served.sent_prompt()
            sent_generations = [weights.generation] * job.n
            while waiting or not served.is_done:
                index, taken = waiting.pop(0) if waiting else await served.take()
                version = None
                if taken.token_ids and taken.weights_generation != sent_generations[index]:
                    version = self._version(taken.weights_generation)
                    sent_generations[index] = taken.weights_generation
                message = messages.stream_delta(index, taken, job, version)
                if message is not None:
                    yield served.sending(message)
                if taken.finish is not None:
                    finished = inference_pb2.OutputFinished(index=index, finish=messages.finish(taken.finish))
                    yield inference_pb2.StreamResponse(finished=finished)
            summary = inference_pb2.StreamSummary(
                usage=self._usage(served), timing=messages.timing(served.timing)
            )
            await current_meter().answered()
            yield inference_pb2.StreamResponse(summary=summary)

    def _usage(self, served: ServedRequest) -> types_pb2.Usage:
        return messages.usage(
            served.num_prompt_tokens,
            served.num_completion_tokens,
            served.num_reasoning_tokens,
            served.num_image_tokens,
            served.timing,
        )

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        """Make a vector of each input. The first that fails ends all."""
        work = partial(to_embed_job, request, self._serving.limits)
        job = await self._reading_job(work, request.ByteSize())
        del request
        self._serving.budget.check_vectors(job.n, self._engine.info.hidden_size)
        async with ServedReading(job, self._serving) as served:
            outputs = await served.take_all()
            pairs = zip(served.fitted, outputs, strict=True)
            return inference_pb2.EmbedResponse(
                request_id=job.request_id,
                model=self._name_of(job),
                embeddings=[
                    embedding(job.form, one, taken, self._version(taken.weights_generation))
                    for one, taken in pairs
                ],
                usage=self._usage(served),
                timing=messages.timing(served.timing),
            )

    async def Score(
        self, request: inference_pb2.ScoreRequest, context: Context
    ) -> inference_pb2.ScoreResponse:
        """Tell how likely each continuation is. The first that fails ends all."""
        work = partial(to_score_job, request, self._serving.limits)
        job = await self._reading_job(work, request.ByteSize())
        del request
        async with ServedReading(job, self._serving) as served:
            outputs = await served.take_all()
            first = len(served.prompt.token_ids)
            pairs = zip(served.fitted, outputs, strict=True)
            return inference_pb2.ScoreResponse(
                request_id=job.request_id,
                model=self._name_of(job),
                prompt=types_pb2.PromptInfo(token_count=first),
                scores=[
                    score(one.token_ids[first:], taken, self._version(taken.weights_generation))
                    for one, taken in pairs
                ],
                usage=self._usage(served),
                timing=messages.timing(served.timing),
            )

    async def Rerank(
        self, request: inference_pb2.RerankRequest, context: Context
    ) -> inference_pb2.RerankResponse:
        """Tell how relevant each document is. The first that fails ends all."""
        work = partial(to_ranking_job, request, self._serving.limits)
        job = await self._reading_job(work, request.ByteSize())
        del request
        async with ServedRanking(job, self._serving) as served:
            outputs = await served.take_all()
            relevances = served.relevances(outputs)
            return inference_pb2.RerankResponse(
                request_id=job.request_id,
                model=self._name_of(job),
                method=RERANK_METHODS[job.method],
                results=[
                    inference_pb2.RankedDocument(
                        index=i, relevance=relevances[i][0], weights=self._version(relevances[i][1])
                    )
                    for i in best_first([relevance for relevance, _ in relevances], job.top_n)
                ],
                usage=self._usage(served),
                timing=messages.timing(served.timing),
            )

    async def Classify(
        self, request: inference_pb2.ClassifyRequest, context: Context
    ) -> inference_pb2.ClassifyResponse:
        """Tell to which classes each input belongs. The first that fails ends all."""
        work = partial(to_classify_job, request, self._serving.limits)
        job = await self._reading_job(work, request.ByteSize())
        del request
        classes = classes_of(self._engine)
        self._serving.budget.check_vectors(job.n, 2 * len(classes.labels))
        async with ServedClassification(job, self._serving) as served:
            outputs = await served.take_all()
            pairs = zip(served.fitted, outputs, strict=True)
            return inference_pb2.ClassifyResponse(
                request_id=job.request_id,
                model=self._name_of(job),
                labels=classes.labels,
                results=[
                    classification(classes, one, taken, self._version(taken.weights_generation))
                    for one, taken in pairs
                ],
                usage=self._usage(served),
                timing=messages.timing(served.timing),
            )

    async def _reading_job(self, work: Callable[[], ReadingT], cost: int) -> ReadingT:
        async with self._serving.calls.preparing():
            job = await self._serving.lanes.convert(work, cost)
        return job.of(CURRENT_CALLER.get())

    async def Abort(
        self, request: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        """End requests, and answer once their slots and pages are free. An unknown id is an outcome, not an
        error.
        """
        check_supported(request)
        target = await self._serving.lanes.convert(partial(to_target, request), MESSAGE_BYTES.get())
        response = inference_pb2.AbortResponse()
        for part in target.parts(ABORTED_AT_ONCE):
            outcomes = end_requests(
                self._engine,
                self._serving.arrivals,
                self._serving.switchboard.holders,
                CURRENT_CALLER.get(),
                part,
                request.reason,
            )
            for request_id, outcome in outcomes:
                response.results.add(request_id=request_id, outcome=messages.OUTCOMES[outcome])
            await asyncio.sleep(0)  # lets other tasks run
        return response

    async def UpdateWeights(  # type: ignore[override]  # the interceptor gives messages undecoded
        self, steps: AsyncIterator[Undecoded], context: Context
    ) -> weights_pb2.UpdateWeightsResponse:
        """Replace the weights; see `WeightUpdates.update`."""
        confirm: Any = partial(context.send_initial_metadata, ())  # a coroutine, whatever its type hint says
        return await self._updates.update(steps, confirm)

    def _name_of(self, job: ServedJob) -> str:
        """Return the name of what answers: the adapter's, or else the model's."""
        return job.adapter or self._engine.info.name

    def _version(self, generation: int) -> types_pb2.WeightsVersion:
        """Return the version of weights that served or serve."""
        return messages.weights_version(self._engine.version_of(generation))
