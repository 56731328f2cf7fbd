"""One generation, the path that Generate and Stream share: tokenize, submit, take deltas, clean up."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from penstock.runtime.chat.enforce.forced_calls import call_grammar, thinking_first
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.errors import DuplicateRequestId
from penstock.runtime.requests.constraint import TokenConstraint
from penstock.runtime.requests.fanout import outputs_of
from penstock.runtime.requests.grammar import Grammar, GrammarKind
from penstock.runtime.requests.request import (
    Finish,
    Output,
    PreparedPrompt,
    Request,
    RequestTiming,
    SamplingParams,
    TokenLogprobs,
)
from penstock.runtime.text.assembler import Assembler
from penstock.service.access.ownership import own_id
from penstock.service.backend import Backend
from penstock.service.lifecycle.underway import Calls
from penstock.service.limits.places import Places
from penstock.service.replies.messages import encode_logprobs
from penstock.service.replies.pending import Encode, Taken
from penstock.service.replies.readers import RequestReader, StallLog
from penstock.service.replies.reply_budget import ReplyBudget
from penstock.service.replies.streams import Buffer, Switchboard
from penstock.service.requests.context import Fitted, Truncation, fit
from penstock.service.requests.convert import Job, TokenPrompt
from penstock.service.requests.convert_chat import ChatPrompt
from penstock.service.requests.convert_params import with_bad_words
from penstock.service.requests.prompts import Encoded, encode_prompt, encode_words
from penstock.service.servicers.abort import Arrival, Arrivals
from penstock.service.telemetry.traces import RequestTrace, Telemetry
from penstock.service.threads.lanes import Lanes
from penstock.service.usage.meter import current_meter

T = TypeVar("T")
TOKEN_COST, BIAS_COST = 2, 16
"""What a token of a prompt, a bias or a forbidden word cost to be checked and prepared, in bytes of a message
to be converted (`Lanes.convert`): 2,000 tokens are a fraction of a millisecond."""
OUTPUTS_AT_ONCE = 16
"""Outputs of one request that are made, or submitted, before others get their turn."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all generations of a server share."""

    engine: Backend
    switchboard: Switchboard
    telemetry: Telemetry
    arrivals: Arrivals
    places: Places
    forms: ChatForms
    lanes: Lanes
    calls: Calls
    budget: ReplyBudget
    stalls: StallLog


class Generation:
    """A request in the engine, as an async context: whatever happens, leaving it frees slots and pages."""

    def __init__(
        self, job: Job, around: Surroundings, *, min_tokens: int = 1, stall_limit_s: float | None = None
    ) -> None:
        """`min_tokens`: what a delta should have; `stall_limit_s`: None where the whole is collected."""
        self.job = job
        """Once entered, it has no prompt any more, and nothing else that may be large."""
        self.prompt = Fitted((), job.stopping)
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        """Known once the first delta of output 0 was taken."""
        self.num_completion_tokens = 0
        """Of all outputs taken so far."""
        self._around = around
        self._placed = 0
        """Outputs that are in the engine."""
        self._engine = around.engine
        self._lanes = around.lanes
        self._min_tokens = min_tokens
        self._stall_limit_s = stall_limit_s
        self._collects = stall_limit_s is None
        self._trace: RequestTrace = around.telemetry.request(job, around.engine.info.name)
        self._meter = current_meter()
        self._reader: RequestReader | None = None
        self._ends: dict[int, tuple[Finish, RequestTiming | None]] = {}

    async def __aenter__(self) -> Self:
        """Tokenize and submit; raises what the engine refuses."""
        try:
            self._around.budget.check_room()
            with (
                self._around.places.taken(self.job.n),
                self._around.arrivals.tokenizing(self.job.engine_id) as arrival,
            ):
                async with self._around.calls.preparing():
                    requests, prepared, text = await self._prepare()
                await self._submit(requests, prepared, text, arrival)
            self._placed = self.job.n
            self._meter.began(len(self.prompt.token_ids))
            self.job = _without_load(self.job)
        except DuplicateRequestId as error:
            self._end(error)
            raise DuplicateRequestId(own_id(error.request_id)) from None  # as its caller calls it
        except BaseException as error:
            self._end(error)
            raise
        return self

    async def _submit(
        self, requests: Sequence[Request], prepared: PreparedPrompt, text: str, arrival: Arrival
    ) -> None:
        """Hand the outputs to the engine, or end those that were aborted before.

        Between some of them others get their turn. An abort then finds in the engine what has been submitted,
        and `arrival` tells of it for the rest. After the last there is no `await`: see Arrivals.
        """
        self._reader = RequestReader(
            self._engine,
            self.job.engine_id,
            self._around.budget,
            self._around.stalls,
            stall_limit_s=self._stall_limit_s,
            collects=self._collects,
        )
        buffers = [self._buffer(request, text, self._reader) async for request in _in_turns(requests)]
        self._reader.reads(buffers)
        async for request, buffer in _in_turns(list(zip(requests, buffers, strict=True))):
            if arrival.finish is None:
                buffer.submit(request, prepared)
            else:
                buffer.deliver(self._never_ran(request.request_id, arrival.finish))

    async def _prepare(self) -> tuple[list[Request], PreparedPrompt, str]:
        """A request for each output, what all of them share, and a chat's text."""
        started_ns = time.monotonic_ns()
        job, room = self.job, self._engine.info.max_model_len
        cuts = job.context.truncation is not Truncation.REJECT
        encoded = await encode_prompt(self._engine.text, job.prompt, self._lanes, room=room, cuts=cuts)
        words = await encode_words(self._engine.text, job.bad_words, self._lanes)
        made = {"gen_ai.usage.input_tokens": len(encoded.token_ids)}
        self._trace.phase("tokenize", started_ns, time.monotonic_ns(), made)
        self.prompt = fit(encoded.token_ids, job.context, job.stopping, room)
        if job.prompt_logprobs is not None:
            self._around.budget.check_prompt(len(self.prompt.token_ids), job.prompt_logprobs)
        num_biases = len(job.sampling.logit_bias) + len(job.sampling.allowed_token_ids) + len(words)
        cost = BIAS_COST * num_biases
        sampling = await self._lanes.convert(
            partial(with_bad_words, job.sampling, words, self._engine.info.vocab_size), cost
        )
        constraints = await self._constraints(encoded)
        requests = outputs_of(job.request(self.prompt, sampling), job.n, constraints)
        cost += TOKEN_COST * len(self.prompt.token_ids)
        prepared = await self._lanes.convert(partial(self._engine.prepare, requests[0]), cost)
        self._trace.started(len(self.prompt.token_ids))
        return requests, prepared, encoded.text

    async def _constraints(self, encoded: Encoded) -> Sequence[TokenConstraint]:
        """One per output, where there is a grammar; all of it is done in a thread."""
        prompt = self.job.prompt
        calls = isinstance(prompt, ChatPrompt) and bool(prompt.chat.required_tools)
        if self.job.grammar is None and not calls:
            return ()
        started_ns = time.monotonic_ns()
        constraints = await self._lanes.heavy(partial(self._compile, encoded))
        self._trace.phase("grammar", started_ns, time.monotonic_ns())
        return constraints

    def _compile(self, encoded: Encoded) -> Sequence[TokenConstraint]:
        grammar, codec = self.job.grammar, self._engine.text
        if isinstance(self.job.prompt, ChatPrompt) and codec is not None:
            calls = call_grammar(self._around.forms, self.job.prompt.chat, encoded.text, codec.added_tokens)
            if calls is not None:
                grammar = Grammar(GrammarKind.EBNF, calls, "chat.tool_choice")
            elif grammar is not None:
                before = thinking_first(self._around.forms, encoded.text, codec.added_tokens)
                grammar = dataclasses.replace(grammar, before=before)
        assert grammar is not None, "asked for where there is one"
        compiler = self._engine.grammars
        assert compiler is not None, "conversion refuses grammars where there is no tokenizer"
        return compiler.compile(grammar).constraints(self.job.n, grammar.field)

    def _buffer(self, request: Request, text: str, reader: RequestReader) -> Buffer:
        job = self.job
        parser, visible = None, frozenset[str]()
        if isinstance(job.prompt, ChatPrompt) and job.options.text:
            parser = self._around.forms.parser(job.prompt.chat, text)
            visible = self._around.forms.markers(job.prompt.chat)
        assembler = Assembler(
            request.stopping,
            self._engine.text if job.options.text else None,
            skip_special_tokens=job.options.skip_special_tokens,
            parser=parser,
            visible=visible,
        )
        return Buffer(
            self._engine,
            self._around.switchboard,
            request.request_id,
            assembler,
            reader,
            encode=self._encode,
            min_tokens=self._min_tokens,
            made=self._meter.made,
        )

    def _never_ran(self, request_id: str, finish: Finish) -> Output:
        """What the engine says of a request that ends while it waits."""
        now_ns = time.monotonic_ns()
        timing = RequestTiming(
            arrived_ns=now_ns, scheduled_ns=0, first_token_ns=0, finished_ns=now_ns, preemptions=0
        )
        return Output(request_id, finish=finish, timing=timing, generation=self._engine.weights.generation)

    @property
    def _encode(self) -> Encode | None:
        """How log-probabilities are sent, if they are."""
        top = self.job.logprobs
        if top is None or not self.job.options.token_ids:
            return None
        return partial(encode_logprobs, top=top)

    @property
    def is_done(self) -> bool:
        """Whether the end of every output was taken."""
        return self._reader is not None and self._reader.is_done

    async def take(self) -> tuple[int, Taken]:
        """The next delta of any output and its index; the last one of each has `finish`."""
        assert self._reader is not None, "not entered"
        index, taken = await self._reader.take()
        self.num_completion_tokens += len(taken.token_ids)
        if taken.prompt_logprobs:
            self.prompt_logprobs = taken.prompt_logprobs
        if taken.finish is not None:
            self._ends[index] = taken.finish, taken.timing
            if self.is_done:
                finishes = [finish for _, (finish, _) in sorted(self._ends.items())]
                self._trace.finished(finishes, self.timing, self.num_completion_tokens)
                self._meter.cached(self.timing.cached_prompt_tokens if self.timing else 0)
        return index, taken

    def sending(self, message: bytes) -> bytes:
        """The message, which is sent until the next is, or the next delta is taken."""
        assert self._reader is not None, "not entered"
        self._reader.sending(len(message))
        return message

    def sent_prompt(self) -> None:
        """The prompt's log-probabilities have left."""
        assert self._reader is not None, "not entered"
        self._reader.sent_prompt()

    @property
    def timing(self) -> RequestTiming | None:
        """Of all outputs that have ended: from the first arrival to the last end."""
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
                # The reply waits to be sent, until the end of the RPC's task.
                reader = self._reader
                task.add_done_callback(lambda _: reader.forget())
            else:
                self._reader.forget()
        self._around.places.left(self._placed)
        self._trace.end(error, cancelled=isinstance(error, (asyncio.CancelledError, GeneratorExit)))


async def _in_turns(items: Sequence[T]) -> AsyncIterator[T]:
    """All of them; after each few others get their turn on the event loop, so never after the last."""
    for index, item in enumerate(items):
        if index and index % OUTPUTS_AT_ONCE == 0:
            await asyncio.sleep(0)
        yield item


def _without_load(job: Job) -> Job:
    """What is still asked of a job once its requests are made."""
    return dataclasses.replace(
        job, prompt=TokenPrompt(()), sampling=SamplingParams(), grammar=None, bad_words=()
    )


def merged_timing(times: Sequence[RequestTiming]) -> RequestTiming | None:
    """One timing for all outputs: the earliest first token, the latest end, the sum of preemptions. Cached
    tokens are those of the output that was scheduled first, because it computed what the others found.
    """
    if not times:
        return None
    scheduled = [t for t in times if t.scheduled_ns]
    first = min(scheduled, key=lambda t: (t.scheduled_ns, t.cached_prompt_tokens), default=times[0])
    return RequestTiming(
        arrived_ns=min(t.arrived_ns for t in times),
        scheduled_ns=first.scheduled_ns,
        first_token_ns=min((t.first_token_ns for t in times if t.first_token_ns), default=0),
        finished_ns=max(t.finished_ns for t in times),
        preemptions=sum(t.preemptions for t in times),
        cached_prompt_tokens=first.cached_prompt_tokens,
    )
