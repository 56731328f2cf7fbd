"""InferenceService: Generate, Stream, Abort. Each RPC: check, convert, call, convert back."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from penstock.runtime.assemble import Delta
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.errors import UnsupportedFeature
from penstock.runtime.interface import AbortOutcome, WeightsVersion
from penstock.runtime.outputs import MAX_OUTPUTS
from penstock.service import replies
from penstock.service.abort import Arrivals, to_target
from penstock.service.backend import Backend
from penstock.service.context import Truncation
from penstock.service.convert import Job, Limits, to_job
from penstock.service.generation import Generation
from penstock.service.lanes import Lanes
from penstock.service.places import Places
from penstock.service.streams import Switchboard
from penstock.service.support import check_supported
from penstock.service.telemetry import Telemetry
from penstock.v1 import inference_pb2, inference_pb2_grpc, types_pb2, weights_pb2

if TYPE_CHECKING:
    from penstock.v1.inference_pb2_grpc import _ServicerContext as Context


def limits_of(engine: Backend, truncation: Truncation = Truncation.REJECT) -> Limits:
    """What requests are checked against."""
    return Limits(
        info=engine.info,
        max_logprobs=engine.config.max_logprobs,
        codec=engine.text,
        has_grammars=engine.grammars is not None,
        has_priority=engine.config.scheduling_policy == "priority",
        max_outputs=min(MAX_OUTPUTS, engine.config.max_queued_requests),  # more could never all be queued
        truncation=truncation,
    )


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generation on one engine."""

    def __init__(
        self,
        engine: Backend,
        switchboard: Switchboard,
        telemetry: Telemetry,
        forms: ChatForms,
        lanes: Lanes,
        *,
        stall_limit_s: float,
        truncation: Truncation = Truncation.REJECT,
    ) -> None:
        self._engine = engine
        self._switchboard = switchboard
        self._telemetry = telemetry
        self._stall_limit_s = stall_limit_s
        self._limits = limits_of(engine, truncation)
        self._forms = forms
        self._lanes = lanes
        self._arrivals = Arrivals()
        self._places = Places(engine)

    def _generation(self, job: Job, *, min_tokens: int, stall_limit_s: float | None = None) -> Generation:
        return Generation(
            job,
            self._engine,
            self._switchboard,
            self._telemetry,
            self._arrivals,
            self._places,
            self._forms,
            self._lanes,
            min_tokens=min_tokens,
            stall_limit_s=stall_limit_s,
        )

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """The stream, collected: the buffers merge until the end, and only what that gives is read."""
        job = to_job(request, self._limits)
        outputs = [inference_pb2.Output(index=index) for index in range(job.n)]
        num_tokens = [0] * job.n
        async with self._generation(job, min_tokens=sys.maxsize) as generation:
            while not generation.is_done:
                index, delta = await generation.take()
                output = outputs[index]
                if not output.weights or output.weights[-1].version.generation != delta.generation:
                    output.weights.add(
                        first_output_token=num_tokens[index], version=self._version(delta.generation)
                    )
                num_tokens[index] += len(delta.token_ids)
                replies.add_delta(output, delta, job)
                if delta.finish is not None:
                    output.finish.CopyFrom(replies.finish(delta.finish))
            return inference_pb2.GenerateResponse(
                request_id=job.request_id,
                model=self._engine.info.name,
                prompt=replies.prompt_info(job, generation.prompt, generation.prompt_logprobs),
                outputs=outputs,
                usage=self._usage(generation),
                timing=replies.timing(generation.timing),
            )

    async def Stream(
        self, request: inference_pb2.StreamRequest, context: Context
    ) -> AsyncIterator[inference_pb2.StreamResponse]:
        """started; per output delta*, finished; summary."""
        job = to_job(request, self._limits)
        per_message = job.options.min_tokens_per_message
        async with self._generation(
            job, min_tokens=per_message, stall_limit_s=self._stall_limit_s
        ) as generation:
            weights = self._engine.weights
            taken: list[tuple[int, Delta]] = []
            while job.prompt_logprobs is not None and not any(index == 0 for index, _ in taken):
                taken.append(await generation.take())  # they are part of the first message
            started = inference_pb2.StreamStarted(
                request_id=job.request_id,
                model=self._engine.info.name,
                prompt=replies.prompt_info(job, generation.prompt, generation.prompt_logprobs),
                weights=replies.weights_version(weights),
            )
            yield inference_pb2.StreamResponse(started=started)
            sent_generations = [weights.generation] * job.n
            while taken or not generation.is_done:
                index, delta = taken.pop(0) if taken else await generation.take()
                message = inference_pb2.OutputDelta(index=index)
                replies.add_delta(message, delta, job)
                if delta.token_ids and delta.generation != sent_generations[index]:
                    message.weights.CopyFrom(self._version(delta.generation))
                    sent_generations[index] = delta.generation
                if replies.says_something(message):
                    yield inference_pb2.StreamResponse(delta=message)
                if delta.finish is not None:
                    finished = inference_pb2.OutputFinished(index=index, finish=replies.finish(delta.finish))
                    yield inference_pb2.StreamResponse(finished=finished)
            summary = inference_pb2.StreamSummary(
                usage=self._usage(generation), timing=replies.timing(generation.timing)
            )
            yield inference_pb2.StreamResponse(summary=summary)

    def _usage(self, generation: Generation) -> types_pb2.Usage:
        return replies.usage(
            len(generation.prompt.token_ids), generation.num_completion_tokens, generation.timing
        )

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
