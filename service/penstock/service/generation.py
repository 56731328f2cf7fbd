"""One generation, the path that Generate and Stream share: tokenize, submit, take deltas, clean up."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from types import TracebackType
from typing import Self

from penstock.runtime.assemble import Assembler, Delta
from penstock.runtime.errors import InvalidRequest, PromptTooLong, Violation
from penstock.runtime.text import TextCodec
from penstock.service.backend import Backend
from penstock.service.convert import Job, Prompt, TextPrompt, TokenPrompt
from penstock.service.streams import Buffer, Switchboard
from penstock.service.telemetry import RequestTrace, Telemetry

INLINE_CHARS = 2000
"""Shorter prompts are tokenized on the event loop (well under a millisecond); a hop to a thread costs more.
"""


async def encode_prompt(
    codec: TextCodec | None, prompt: Prompt, add_special_tokens: bool | None = None
) -> tuple[int, ...]:
    """Token ids of a prompt; long ones are encoded in a thread. None adds special tokens to text, none to
    chats.
    """
    if isinstance(prompt, TokenPrompt):
        return prompt.token_ids
    assert codec is not None, "conversion refuses text where there is no tokenizer"
    if isinstance(prompt, TextPrompt):
        size = len(prompt.text)
        special = True if add_special_tokens is None else add_special_tokens
        encode = partial(codec.encode, prompt.text, add_special_tokens=special)
    else:
        size = sum(len(message["content"]) for message in prompt.messages)
        encode = partial(codec.encode_chat, prompt.messages, add_special_tokens=bool(add_special_tokens))
    return tuple(encode() if size <= INLINE_CHARS else await asyncio.to_thread(encode))


class Generation:
    """A request in the engine, as an async context: whatever happens, leaving it frees slot and pages."""

    def __init__(
        self,
        job: Job,
        engine: Backend,
        switchboard: Switchboard,
        telemetry: Telemetry,
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
        self._submitted = False

    async def __aenter__(self) -> Self:
        """Tokenize and submit; raises what the engine refuses."""
        try:
            started_ns = time.monotonic_ns()
            self._check_length(self.job.prompt)
            self.prompt_token_ids = await encode_prompt(self._engine.text, self.job.prompt)
            num_tokens = len(self.prompt_token_ids)
            self._trace.phase(
                "tokenize", started_ns, time.monotonic_ns(), {"gen_ai.usage.input_tokens": num_tokens}
            )
            self._trace.started(num_tokens)
            if not num_tokens:
                raise InvalidRequest([Violation("input", "the prompt has no tokens")])
            self._engine.submit(self.job.request(self.prompt_token_ids), self._buffer.sink)
            self._submitted = True
        except BaseException as error:
            self._end(error)
            raise
        return self

    def _check_length(self, prompt: Prompt) -> None:
        """Refuse megabytes of text before they are tokenized; what passes is counted exactly."""
        codec, limit = self._engine.text, self._engine.info.max_model_len
        most = None if codec is None else codec.max_token_chars
        if most is not None and isinstance(prompt, TextPrompt) and len(prompt.text) > limit * most:
            raise PromptTooLong(-(-len(prompt.text) // most), limit - 1)

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
        if self._submitted:
            self._buffer.close()
        self._trace.end(error, cancelled=isinstance(error, (asyncio.CancelledError, GeneratorExit)))
