"""InferenceService: Generate, Stream, Embed, Score, Abort and UpdateWeights. Each RPC checks, converts, calls
and converts back.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.service.access.callers import CURRENT_CALLER
from penstock.service.replies import messages
from penstock.service.replies.messages import Collected
from penstock.service.replies.outputs import Taken
from penstock.service.requests.generate import ServedJob, message_cost, to_job
from penstock.service.requests.reading import ReadingJob, to_embed_job, to_score_job
from penstock.service.requests.support import check_supported
from penstock.service.rpcs.interceptors import Undecoded
from penstock.service.servicers.ending import end_requests
from penstock.service.servicers.generation import ServedRequest
from penstock.service.servicers.reading import ServedReading, embedding, score
from penstock.service.servicers.serving import Serving, to_target
from penstock.service.servicers.weights import WeightUpdates
from penstock.service.threads.lanes import MESSAGE_BYTES
from penstock.service.usage.meter import current_meter
from penstock.v1 import inference_pb2, inference_pb2_grpc, types_pb2, weights_pb2

if TYPE_CHECKING:
    from penstock.v1.inference_pb2_grpc import _ServicerContext as Context

ABORTED_AT_ONCE = 250
"""How many ids are aborted at a time: the engine's lock is held while they are looked up."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Runs requests on one engine."""

    def __init__(self, serving: Serving, updates: WeightUpdates) -> None:
        self._serving = serving
        self._updates = updates
        self._engine = serving.engine
        self._turns = asyncio.Lock()
        """Held while a piece of something large is encoded, see `replies.prompt_info`."""

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
                model=self._engine.info.name,
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
                model=self._engine.info.name,
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
                model=self._engine.info.name,
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
                model=self._engine.info.name,
                prompt=types_pb2.PromptInfo(token_count=first),
                scores=[
                    score(one.token_ids[first:], taken, self._version(taken.weights_generation))
                    for one, taken in pairs
                ],
                usage=self._usage(served),
                timing=messages.timing(served.timing),
            )

    async def _reading_job(self, work: Callable[[], ReadingJob], cost: int) -> ReadingJob:
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

    def _version(self, generation: int) -> types_pb2.WeightsVersion:
        """The version of weights that served or serve."""
        return messages.weights_version(self._engine.version_of(generation))
