"""One generation, the path that Generate and Stream share: tokenize, submit, take deltas, clean up."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

from penstock.runtime.assemble import Assembler, Delta
from penstock.runtime.errors import PromptTooLong, QueueFull
from penstock.runtime.request import Finish, Output, RequestTiming
from penstock.runtime.text import TextCodec
from penstock.service.abort import Arrivals
from penstock.service.backend import Backend
from penstock.service.convert import Job, Prompt, TextPrompt, TokenPrompt
from penstock.service.streams import Buffer, Switchboard
from penstock.service.telemetry import RequestTrace, Telemetry

INLINE_CHARS = 2000
"""Shorter prompts are tokenized on the event loop (well under a millisecond); a hop to a thread costs more.
"""
TURN_CHARS = 20
"""What the template adds to a turn of a chat, roughly: a thousand empty turns are no short prompt."""


async def encode_prompt(
    codec: TextCodec | None, prompt: Prompt, max_model_len: int, add_special_tokens: bool | None = None
) -> tuple[int, ...]:
    """Token ids of a prompt; long ones are encoded in a thread. None adds special tokens to text, none to
    chats.

    Raises PromptTooLong for text that cannot fit the context whatever its tokens are: megabytes are not
    tokenized to learn that. What passes is counted exactly by the engine.
    """
    if isinstance(prompt, TokenPrompt):
        return prompt.token_ids
    assert codec is not None, "conversion refuses text where there is no tokenizer"
    most = codec.max_token_chars

    def encode() -> tuple[int, ...]:
        if isinstance(prompt, TextPrompt):
            text, special = prompt.text, add_special_tokens is not False
        else:  # the template writes its own special tokens
            text, special = codec.render_chat(prompt.messages), bool(add_special_tokens)
        if most is not None and len(text) > max_model_len * most:
            raise PromptTooLong(-(-len(text) // most), max_model_len - 1)
        return tuple(codec.encode(text, add_special_tokens=special))

    if isinstance(prompt, TextPrompt):
        size = len(prompt.text)
    else:
        size = sum(TURN_CHARS + len(message["content"]) for message in prompt.messages)
    return encode() if size <= INLINE_CHARS else await asyncio.to_thread(encode)


class Generation:
    """A request in the engine, as an async context: whatever happens, leaving it frees slot and pages."""

    def __init__(
        self,
        job: Job,
        engine: Backend,
        switchboard: Switchboard,
        telemetry: Telemetry,
        arrivals: Arrivals,
        *,
        min_tokens: int = 1,
        stall_limit_s: float | None = None,
    ) -> None:
        self.job = job
        self.prompt_token_ids: tuple[int, ...] = ()
        self.num_completion_tokens = 0
        self._engine = engine
        self._trace: RequestTrace = telemetry.request(job, engine.info.name)
        self._buffer = Buffer(
            engine,
            switchboard,
            job.request_id,
            Assembler(
                job.stopping,
                engine.text if job.options.text else None,
                skip_special_tokens=job.options.skip_special_tokens,
            ),
            min_tokens=min_tokens,
            stall_limit_s=stall_limit_s,
        )
        self._arrivals = arrivals

    async def __aenter__(self) -> Self:
        """Tokenize and submit; raises what the engine refuses."""
        try:
            self._check_queue()
            aborted = await self._tokenize()
            request = self.job.request(self.prompt_token_ids)  # no `await` from here on: see Arrivals
            if aborted is None:
                self._buffer.submit(request)
            else:
                self._buffer.deliver(self._never_ran(aborted))
        except BaseException as error:
            self._end(error)
            raise
        return self

    def _check_queue(self) -> None:
        """QueueFull before a prompt is tokenized for nothing; `submit` checks again, and all else.

        An engine that takes no requests at all says why on `submit`.
        """
        limit = self._engine.config.max_queued_requests
        if self._engine.ready and self._engine.load().num_waiting >= limit:
            raise QueueFull(limit)

    async def _tokenize(self) -> Finish | None:
        """Set `prompt_token_ids`; how the request was aborted meanwhile, if it was."""
        started_ns = time.monotonic_ns()
        with self._arrivals.tokenizing(self.job.request_id) as arrival:
            self.prompt_token_ids = await encode_prompt(
                self._engine.text, self.job.prompt, self._engine.info.max_model_len
            )
        num_tokens = len(self.prompt_token_ids)
        self._trace.phase(
            "tokenize", started_ns, time.monotonic_ns(), {"gen_ai.usage.input_tokens": num_tokens}
        )
        self._trace.started(num_tokens)
        return arrival.finish

    def _never_ran(self, finish: Finish) -> Output:
        """What the engine says of a request that ends while it waits."""
        now_ns = time.monotonic_ns()
        timing = RequestTiming(
            arrived_ns=now_ns, scheduled_ns=0, first_token_ns=0, finished_ns=now_ns, preemptions=0
        )
        return Output(
            self.job.request_id, finish=finish, timing=timing, generation=self._engine.weights.generation
        )

    async def take(self) -> Delta:
        """The next delta; the last one has `finish`."""
        delta = await self._buffer.take()
        self.num_completion_tokens += len(delta.token_ids)
        if delta.finish is not None:
            self._trace.finished(delta.finish, delta.timing, self.num_completion_tokens)
        return delta

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._buffer.close()
        self._trace.end(error, cancelled=isinstance(error, (asyncio.CancelledError, GeneratorExit)))
