"""Frozen values back to the contract's messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.runtime.assemble import Delta
from penstock.runtime.interface import AbortOutcome, WeightsVersion
from penstock.runtime.request import Finish, FinishReason, RequestTiming, TokenLogprobs
from penstock.service.context import Fitted
from penstock.service.convert import Job
from penstock.v1 import inference_pb2, types_pb2, weights_pb2

REASONS = {
    FinishReason.EOS: types_pb2.FINISH_REASON_EOS,
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.MAX_TOKENS: types_pb2.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_FULL: types_pb2.FINISH_REASON_CONTEXT_FULL,
    FinishReason.TIME_LIMIT: types_pb2.FINISH_REASON_TIME_LIMIT,
    FinishReason.ABORTED: types_pb2.FINISH_REASON_ABORTED,
}
OUTCOMES = {
    AbortOutcome.ABORTED: inference_pb2.ABORT_OUTCOME_ABORTED,
    AbortOutcome.ALREADY_FINISHED: inference_pb2.ABORT_OUTCOME_ALREADY_FINISHED,
    AbortOutcome.NOT_FOUND: inference_pb2.ABORT_OUTCOME_NOT_FOUND,
}
DTYPES = {
    "bfloat16": weights_pb2.DATA_TYPE_BF16,
    "float16": weights_pb2.DATA_TYPE_F16,
    "float32": weights_pb2.DATA_TYPE_F32,
    "float8_e4m3fn": weights_pb2.DATA_TYPE_F8_E4M3,
    "float8_e5m2": weights_pb2.DATA_TYPE_F8_E5M2,
    "int8": weights_pb2.DATA_TYPE_I8,
    "int4": weights_pb2.DATA_TYPE_I4,
}


def weights_version(version: WeightsVersion) -> types_pb2.WeightsVersion:
    return types_pb2.WeightsVersion(label=version.label, generation=version.generation)


def finish(value: Finish) -> types_pb2.Finish:
    """The match is set for a stop string, a stop token id and an end-of-sequence token."""
    message = types_pb2.Finish(reason=REASONS[value.reason], message=value.message)
    if value.stop is not None:
        message.match.stop = value.stop
    elif value.token_id is not None:
        message.match.token_id = value.token_id
    return message


def logprobs(values: Sequence[TokenLogprobs], top: int) -> types_pb2.Logprobs:
    """One entry per token; `top` is left empty where no candidates were asked for."""
    message = types_pb2.Logprobs(sampled=[v.sampled for v in values])
    if top:
        for value in values:
            candidates = message.top.add().candidates
            for token_id, logprob in value.top:
                candidates.add(token_id=token_id, logprob=logprob)
    return message


def add_delta(message: inference_pb2.Output | inference_pb2.OutputDelta, delta: Delta, job: Job) -> None:
    """Append what is new: text always (it is empty where none was asked for), ids and log-probabilities as
    far
    as they were asked for.
    """
    message.text += delta.text
    message.reasoning += delta.reasoning
    for call in delta.tool_calls:
        message.tool_calls.add(id=call.id, name=call.name, arguments_json=call.arguments)
    if not job.options.token_ids:
        return
    message.token_ids.extend(delta.token_ids)
    if job.logprobs is not None and delta.token_ids:
        message.logprobs.MergeFrom(logprobs(delta.logprobs, job.logprobs))


def says_something(message: inference_pb2.OutputDelta) -> bool:
    """Whether there is more in it than an index."""
    return any(field.name != "index" for field, _ in message.ListFields())


def prompt_info(job: Job, prompt: Fitted, values: Sequence[TokenLogprobs]) -> types_pb2.PromptInfo:
    """The prompt as the model saw it. Its first token has no log-probability: NaN, and no candidates."""
    ids = prompt.token_ids
    message = types_pb2.PromptInfo(
        token_count=len(ids),
        token_ids=ids if job.options.echo_prompt_token_ids else (),
        truncated_tokens=prompt.num_truncated,
    )
    if job.prompt_logprobs is not None and len(values) == len(ids) - 1:  # else it ended before
        first = TokenLogprobs(math.nan)
        message.logprobs.CopyFrom(logprobs([first, *values], job.prompt_logprobs))
    return message


def usage(num_prompt_tokens: int, num_completion_tokens: int, times: RequestTiming | None) -> types_pb2.Usage:
    """`completion_tokens` counts the token ids of the output, whether or not they are sent."""
    return types_pb2.Usage(
        prompt_tokens=num_prompt_tokens,
        cached_prompt_tokens=times.cached_prompt_tokens if times else 0,
        completion_tokens=num_completion_tokens,
    )


def timing(times: RequestTiming | None) -> types_pb2.Timing:
    """Since the request entered the queue. What never happened (no token, never scheduled) is left unset."""
    message = types_pb2.Timing()
    if times is None:
        return message
    message.preemptions = times.preemptions
    for field, end in (
        (message.queue, times.scheduled_ns),
        (message.time_to_first_token, times.first_token_ns),
        (message.total, times.finished_ns),
    ):
        if end:
            field.FromNanoseconds(max(0, end - times.arrived_ns))
            field.SetInParent()
    return message


def tensor_spec(name: str, dtype: str, shape: Sequence[int]) -> weights_pb2.TensorSpec:
    return weights_pb2.TensorSpec(
        name=name, dtype=DTYPES.get(dtype, weights_pb2.DATA_TYPE_UNSPECIFIED), shape=shape
    )
