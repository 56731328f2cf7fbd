"""InferenceService: Generate, Stream, Abort. Each RPC: check, convert, call, convert back."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from penstock.runtime.assemble import Delta
from penstock.runtime.errors import UnsupportedFeature
from penstock.runtime.interface import AbortOutcome, WeightsVersion
from penstock.service import replies
from penstock.service.abort import Arrivals, to_target
from penstock.service.backend import Backend
from penstock.service.convert import Limits, to_job
from penstock.service.generation import Generation
from penstock.service.streams import Switchboard
from penstock.service.support import check_supported
from penstock.service.telemetry import Telemetry
from penstock.v1 import inference_pb2, inference_pb2_grpc, types_pb2, weights_pb2

if TYPE_CHECKING:
    from penstock.v1.inference_pb2_grpc import _ServicerContext as Context


def limits_of(engine: Backend) -> Limits:
    """What requests are checked against."""
    codec = engine.text
    return Limits(
        info=engine.info,
        max_logprobs=engine.config.max_logprobs,
        has_text=codec is not None,
        has_chat=codec is not None and codec.has_chat_template,
        has_priority=engine.config.scheduling_policy == "priority",
    )


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generation on one engine."""

    def __init__(
        self, engine: Backend, switchboard: Switchboard, telemetry: Telemetry, *, stall_limit_s: float
    ) -> None:
        self._engine = engine
        self._switchboard = switchboard
        self._telemetry = telemetry
        self._stall_limit_s = stall_limit_s
        self._limits = limits_of(engine)
        self._arrivals = Arrivals()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """The stream, collected: the buffer merges until the end, and only what its end gives is read."""
        job = to_job(request, self._limits)
        output = inference_pb2.Output(index=0)
        async with Generation(
            job, self._engine, self._switchboard, self._telemetry, self._arrivals, min_tokens=sys.maxsize
        ) as generation:
            while True:
                delta = await generation.take()
                self._extend(output, generation, delta)
                if delta.finish is not None:
                    break
            output.finish.CopyFrom(replies.finish(delta.finish))
            return inference_pb2.GenerateResponse(
                request_id=job.request_id,
                model=self._engine.info.name,
                prompt=_prompt_info(generation),
                outputs=[output],
                usage=replies.usage(
                    len(generation.prompt_token_ids), generation.num_completion_tokens, delta.timing
                ),
                timing=replies.timing(delta.timing),
            )

    def _extend(self, output: inference_pb2.Output, generation: Generation, delta: Delta) -> None:
        """Append a delta to a whole output, with a new weights span where the weights changed."""
        if not output.weights or output.weights[-1].version.generation != delta.generation:
            first = generation.num_completion_tokens - len(delta.token_ids)
            output.weights.add(first_output_token=first, version=self._version(delta.generation))
        output.text += delta.text
        _add_tokens(output, generation, delta)

    async def Stream(
        self, request: inference_pb2.StreamRequest, context: Context
    ) -> AsyncIterator[inference_pb2.StreamResponse]:
        """started, delta*, finished, summary."""
        job = to_job(request, self._limits)
        async with Generation(
            job,
            self._engine,
            self._switchboard,
            self._telemetry,
            self._arrivals,
            min_tokens=job.options.min_tokens_per_message,
            stall_limit_s=self._stall_limit_s,
        ) as generation:
            weights = self._engine.weights
            started = inference_pb2.StreamStarted(
                request_id=job.request_id,
                model=self._engine.info.name,
                prompt=_prompt_info(generation),
                weights=replies.weights_version(weights),
            )
            yield inference_pb2.StreamResponse(started=started)
            sent_generation = weights.generation
            while True:
                delta = await generation.take()
                message = inference_pb2.OutputDelta(index=0, text=delta.text)
                _add_tokens(message, generation, delta)
                if delta.token_ids and delta.generation != sent_generation:
                    message.weights.CopyFrom(self._version(delta.generation))
                    sent_generation = delta.generation
                if message.text or message.token_ids:
                    yield inference_pb2.StreamResponse(delta=message)
                if delta.finish is not None:
                    break
            finished = inference_pb2.OutputFinished(index=0, finish=replies.finish(delta.finish))
            yield inference_pb2.StreamResponse(finished=finished)
            usage = replies.usage(
                len(generation.prompt_token_ids), generation.num_completion_tokens, delta.timing
            )
            summary = inference_pb2.StreamSummary(usage=usage, timing=replies.timing(delta.timing))
            yield inference_pb2.StreamResponse(summary=summary)

    async def Abort(
        self, request: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        """Answers once slots and pages are free. An unknown id is an outcome, not an error."""
        check_supported(request)
        target = to_target(request)
        early = self._arrivals.abort(target, request.reason)
        outcomes = dict(
            self._engine.abort(
                target.ids, prefix=target.prefix, all_requests=target.everything, message=request.reason
            )
        )
        outcomes.update(dict.fromkeys(early, AbortOutcome.ABORTED))
        return inference_pb2.AbortResponse(
            results=[
                inference_pb2.AbortResult(request_id=request_id, outcome=replies.OUTCOMES[outcome])
                for request_id, outcome in outcomes.items()
            ]
        )

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[weights_pb2.UpdateWeightsRequest], context: Context
    ) -> weights_pb2.UpdateWeightsResponse:
        """Not in this release."""
        raise UnsupportedFeature(["UpdateWeights"])

    def _version(self, generation: int) -> types_pb2.WeightsVersion:
        """The label is known for the weights in use; older ones are told by their number."""
        current = self._engine.weights
        if generation != current.generation:
            current = WeightsVersion("", generation)
        return replies.weights_version(current)


def _prompt_info(generation: Generation) -> types_pb2.PromptInfo:
    ids = generation.prompt_token_ids
    echo = generation.job.options.echo_prompt_token_ids
    return types_pb2.PromptInfo(token_count=len(ids), token_ids=ids if echo else ())


def _add_tokens(
    message: inference_pb2.Output | inference_pb2.OutputDelta, generation: Generation, delta: Delta
) -> None:
    """Token ids and log-probabilities, as far as they were asked for."""
    job = generation.job
    if not job.options.token_ids:
        return
    message.token_ids.extend(delta.token_ids)
    if job.logprobs is not None and delta.token_ids:
        message.logprobs.MergeFrom(replies.logprobs(delta.logprobs, job.logprobs))
