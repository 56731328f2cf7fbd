"""An embedded engine for asyncio: the methods of `Engine` that generate or pause, with the same arguments and
errors.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.inprocess.active_ids import EmbeddedEngine
from penstock.runtime.inprocess.batch import Batch, progress_bar
from penstock.runtime.inprocess.options import (
    ChatOptions,
    Messages,
    PromptOptions,
    Prompts,
    chat_job,
    is_list_of_prompts,
    jobs_of,
    prompt_job,
)
from penstock.runtime.inprocess.scoring import Inbox as ReadingInbox
from penstock.runtime.inprocess.scoring import ReadingOptions, embed, score
from penstock.runtime.inprocess.streams import AsyncGenerationStream, Inbox, sinks
from penstock.runtime.loop.interface import InFlightPolicy, Paused
from penstock.runtime.measuring.engine_metrics import EngineMetrics
from penstock.runtime.prompting.jobs import Job
from penstock.runtime.prompting.outputs import Switchboard
from penstock.runtime.prompting.prompts import Truncation
from penstock.runtime.prompting.results import Generation, Score, VectorForm
from penstock.runtime.requests.request import Pooling

ReadT = TypeVar("ReadT")


class AsyncEngine:
    """Generates with an `Engine` from coroutines, and pauses it. Prompts are tokenized on other threads, so
    the event loop is never held for long. To start the engine, to shut it down and for all else, use its own
    methods.
    """

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self._switchboard: Switchboard | None = None

    @overload
    async def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, but one prompt
        self, prompt: str | Sequence[int], **options: Unpack[PromptOptions]
    ) -> Generation: ...
    @overload
    async def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        *,
        show_progress: bool | None = None,
        **options: Unpack[PromptOptions],
    ) -> list[Generation]: ...
    async def generate(
        self,
        prompt: Prompts,
        *,
        show_progress: bool | None = None,
        **options: Unpack[PromptOptions],
    ) -> Generation | list[Generation]:
        """See `Engine.generate`. Cancelling the task ends what runs."""
        if is_list_of_prompts(prompt):
            return await self._generate_all(jobs_of(self.engine, prompt, options), show_progress)
        if show_progress is not None:
            raise TypeError("show_progress goes with a list of prompts")
        return await self._whole(prompt_job(self.engine, prompt, options))

    def stream(self, prompt: str | Sequence[int], **options: Unpack[PromptOptions]) -> AsyncGenerationStream:
        """See `Engine.stream`. The request begins when the stream is entered, or first asked for a delta."""
        return self._stream(prompt_job(self.engine, prompt, options))

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Awaitable[Generation]: ...
    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> AsyncGenerationStream: ...
    def chat(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> Awaitable[Generation] | AsyncGenerationStream:
        """See `Engine.chat`. Await what it returns; with `stream`, use it as that of `stream`."""
        job = chat_job(self.engine, messages, options)
        return self._stream(job) if stream else self._whole(job)

    async def embed(
        self,
        inputs: Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: Pooling | str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        truncation: Truncation | str = Truncation.REJECT,
        **options: Unpack[ReadingOptions],
    ) -> NDArray[np.float32]:
        """See `Engine.embed`. Cancelling the task ends what runs."""
        form = VectorForm(normalize=normalize, dimensions=dimensions)
        return await _read(
            lambda inbox: embed(
                self.engine,
                inputs,
                pooling=pooling,
                form=form,
                truncation=truncation,
                options=options,
                inbox=inbox,
            )
        )

    async def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str] | Sequence[Sequence[int]],
        **options: Unpack[ReadingOptions],
    ) -> list[Score]:
        """See `Engine.score`. Cancelling the task ends what runs."""
        return await _read(lambda inbox: score(self.engine, prompt, continuations, options, inbox))

    async def pause(
        self,
        in_flight: InFlightPolicy = InFlightPolicy.WAIT,
        *,
        drain_timeout_s: float | None = None,
        free_kv_cache: bool = False,
        offload_weights: bool = False,
    ) -> Paused:
        """See `Engine.pause`. Cancelling the task before the pause is in force takes it back."""
        pausing = self.engine.pause(
            in_flight,
            drain_timeout_s=drain_timeout_s,
            free_kv_cache=free_kv_cache,
            offload_weights=offload_weights,
        )
        return await asyncio.wrap_future(pausing)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await asyncio.wrap_future(self.engine.resume())

    async def metrics(self) -> EngineMetrics:
        """See `Engine.metrics`. It is asked on another thread, because it waits for the step that ends."""
        return await asyncio.to_thread(self.engine.metrics)

    def _stream(self, job: Job) -> AsyncGenerationStream:
        return AsyncGenerationStream(self.engine, self._board(), job)

    async def _whole(self, job: Job) -> Generation:
        async with self._stream(job) as stream:
            return await stream.result()

    async def _generate_all(self, jobs: Sequence[Job], show_progress: bool | None) -> list[Generation]:
        inbox, board = Inbox(), self._board()
        bar = progress_bar(self.engine, len(jobs), show_progress)
        batch = Batch(self.engine, jobs, partial(sinks, board, inbox), bar)
        try:
            while not batch.is_done:
                await asyncio.to_thread(batch.fill)
                await inbox.wait()
                while (item := inbox.take()) is not None:
                    (number, index), output = item
                    batch.take(number, index, output)
            return batch.results()
        finally:
            batch.close()

    def _board(self) -> Switchboard:
        """Return the switchboard of the loop that runs now."""
        loop = asyncio.get_running_loop()
        if self._switchboard is None or self._switchboard.loop is not loop:
            self._switchboard = Switchboard(loop)
        return self._switchboard


async def _read(work: Callable[[ReadingInbox], ReadT]) -> ReadT:
    """Run `work` on another thread, with an inbox through which it is ended if the task is cancelled."""
    inbox: ReadingInbox = queue.SimpleQueue()
    reading = asyncio.ensure_future(asyncio.to_thread(work, inbox))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        reading.add_done_callback(lambda ended: ended.exception())  # what it raises is told to nobody
        inbox.put(None)
        raise
