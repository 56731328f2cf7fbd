"""Converts reply messages to values. Both clients share these pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from penstock.client.errors import ProtocolError
from penstock.client.status import spelled, tensor_info
from penstock.client.values import results, sampling_values, server_values, weights_values
from penstock.client.values.chat_values import ToolCall
from penstock.v1 import control_pb2, inference_pb2, telemetry_pb2, types_pb2, weights_pb2

EnumT = TypeVar("EnumT", results.FinishReason, server_values.AbortOutcome, weights_values.UpdateOutcome)


def _member(kind: type[EnumT], number: int, names: Mapping[Any, str], prefix: str) -> EnumT:
    """Return the enum's member for a number; UNKNOWN for unspecified, and for numbers of a newer contract."""
    name = names.get(number, "").removeprefix(prefix).lower()
    return kind(name) if name in {member.value for member in kind} else kind("unknown")


_FINISH_NAMES = {number: name for name, number in types_pb2.FinishReason.items()}
_OUTCOME_NAMES = {number: name for name, number in inference_pb2.AbortOutcome.items()}
_POOLING_NAMES = {number: name for name, number in types_pb2.Pooling.items()}
METHOD_NAMES = {number: name for name, number in types_pb2.RerankMethod.items()}
_FEATURE_NAMES = {number: name for name, number in control_pb2.Feature.items()}
_LEVEL_NAMES = {number: name for name, number in telemetry_pb2.TraceLevel.items()}
_UPDATE_NAMES = {number: name for name, number in weights_pb2.UpdateOutcome.items()}


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def finish(message: types_pb2.Finish) -> results.Finish:
    kind = message.match.WhichOneof("match")
    return results.Finish(
        reason=_member(results.FinishReason, message.reason, _FINISH_NAMES, "FINISH_REASON_"),
        stop=message.match.stop if kind == "stop" else None,
        token_id=message.match.token_id if kind == "token_id" else None,
        message=message.message,
    )


def logprobs(message: types_pb2.Logprobs) -> results.Logprobs:
    return results.Logprobs(
        sampled=tuple(message.sampled),
        top=tuple(tuple((c.token_id, c.logprob) for c in entry.candidates) for entry in message.top),
    )


def weights_version(message: types_pb2.WeightsVersion) -> results.WeightsVersion:
    return results.WeightsVersion(message.label, message.generation)


def tool_call(message: types_pb2.ToolCall) -> ToolCall:
    return ToolCall(message.id, message.name, message.arguments_json)


def tool_call_delta(message: types_pb2.ToolCallDelta) -> results.ToolCallDelta:
    return results.ToolCallDelta(message.index, message.id, message.name, message.arguments_json)


def prompt_info(message: types_pb2.PromptInfo) -> results.PromptInfo:
    return results.PromptInfo(
        token_count=message.token_count,
        truncated_tokens=message.truncated_tokens,
        token_ids=tuple(message.token_ids),
        logprobs=logprobs(message.logprobs) if message.HasField("logprobs") else None,
    )


def usage(message: types_pb2.Usage) -> results.Usage:
    return results.Usage(
        message.prompt_tokens,
        message.cached_prompt_tokens,
        message.completion_tokens,
        message.reasoning_tokens,
        message.image_tokens,
        message.proposed_tokens,
        message.accepted_tokens,
    )


def timing(message: types_pb2.Timing) -> results.Timing:
    made = message.HasField("time_to_first_token")
    return results.Timing(
        queue=_seconds(message.queue),
        time_to_first_token=_seconds(message.time_to_first_token) if made else None,
        total=_seconds(message.total),
        preemptions=message.preemptions,
    )


def output(message: inference_pb2.Output) -> results.Output:
    return results.Output(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish=finish(message.finish),
        logprobs=logprobs(message.logprobs) if message.HasField("logprobs") else None,
        weights=tuple(
            results.WeightsSpan(span.first_output_token, weights_version(span.version))
            for span in message.weights
        ),
        reasoning=message.reasoning,
        tool_calls=tuple(tool_call(call) for call in message.tool_calls),
        hidden_states=hidden_states(message),
    )


def hidden_states(message: inference_pb2.Output | inference_pb2.OutputDelta) -> results.HiddenStates | None:
    if not message.HasField("hidden_states"):
        return None
    return results.HiddenStates(message.hidden_states.size, message.hidden_states.values)


def generation(message: inference_pb2.GenerateResponse) -> results.Generation:
    """Convert the reply of Generate. Raises ProtocolError unless its outputs are 0, 1, ... in this order."""
    check_indices([o.index for o in message.outputs])
    return results.Generation(
        request_id=message.request_id,
        model=message.model,
        prompt=prompt_info(message.prompt),
        outputs=tuple(output(o) for o in message.outputs),
        usage=usage(message.usage),
        timing=timing(message.timing),
    )


def check_indices(indices: Sequence[int]) -> None:
    """Raise ProtocolError unless the indices are 0, 1, ... and there is at least one, because `outputs[i]`
    must be output i.
    """
    if not indices or list(indices) != list(range(len(indices))):
        raise ProtocolError.local(f"the server answered with outputs {list(indices)} instead of 0 to n - 1")


def abort_results(message: inference_pb2.AbortResponse) -> tuple[server_values.AbortResult, ...]:
    return tuple(
        server_values.AbortResult(
            r.request_id, _member(server_values.AbortOutcome, r.outcome, _OUTCOME_NAMES, "ABORT_OUTCOME_")
        )
        for r in message.results
    )


def _sampling_defaults(message: types_pb2.SamplingParams) -> sampling_values.SamplingDefaults:
    numbers = {field.name: value for field, value in message.ListFields() if field.has_presence}
    return sampling_values.SamplingDefaults(
        **numbers,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        bad_words=tuple(message.bad_words),
        allowed_token_ids=tuple(message.allowed_token_ids),
    )


def model_info(message: control_pb2.GetModelInfoResponse) -> server_values.ModelInfo:
    return server_values.ModelInfo(
        model=message.model,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        max_context_tokens=message.max_context_tokens,
        eos_token_ids=tuple(message.eos_token_ids),
        default_sampling=_sampling_defaults(message.default_sampling),
        weights=weights_version(message.weights),
        features=tuple(spelled(_FEATURE_NAMES, number, "FEATURE_") for number in message.features),
        tensors=tuple(map(tensor_info, message.tensors)),
        weights_digest=message.weights_digest,
        weights_since=message.weights_since.ToDatetime(UTC) if message.HasField("weights_since") else None,
        staged_update_id=message.staged_update_id,
        template_variables=tuple(message.template_variables),
        image_limits=_image_limits(message.image_limits) if message.HasField("image_limits") else None,
        hidden_size=message.hidden_size,
        default_pooling=spelled(_POOLING_NAMES, message.default_pooling, "POOLING_"),
        default_rerank_method=spelled(METHOD_NAMES, message.default_rerank_method, "RERANK_METHOD_"),
        tokenizer=_tokenizer(message.tokenizer) if message.HasField("tokenizer") else None,
    )


def _tokenizer(message: control_pb2.TokenizerInfo) -> server_values.TokenizerInfo:
    return server_values.TokenizerInfo(
        special_tokens=dict(message.special_tokens),
        chat_template=message.chat_template,
        tokenizer_class=message.tokenizer_class,
    )


def _image_limits(message: control_pb2.ImageLimits) -> server_values.ImageLimits:
    return server_values.ImageLimits(
        max_images=message.max_images,
        max_image_bytes=message.max_image_bytes,
        max_image_pixels=message.max_image_pixels,
        media_types=tuple(message.media_types),
        image_token_id=message.image_token_id,
    )


def server_info(message: control_pb2.GetServerInfoResponse) -> server_values.ServerInfo:
    return server_values.ServerInfo(
        server_version=message.server_version,
        instance_id=message.instance_id,
        contract_revision=message.contract_revision,
        max_running_requests=message.max_running_requests,
        max_queued_requests=message.max_queued_requests,
        kv_page_tokens=message.kv_page_tokens,
        kv_pages_total=message.kv_pages_total,
        max_chunk_bytes=message.max_chunk_bytes,
        max_logprobs=message.max_logprobs,
        devices=tuple(message.devices),
        max_request_bytes=message.max_request_bytes,
        proposer=message.proposer,
        max_proposed_tokens=message.max_proposed_tokens,
        max_adapters=message.max_adapters,
        max_cached_adapters=message.max_cached_adapters,
        max_adapter_rank=message.max_adapter_rank,
        adapter_experts=message.adapter_experts,
    )


def load(message: control_pb2.GetLoadResponse) -> server_values.Load:
    return server_values.Load(
        running_requests=message.running_requests,
        queued_requests=message.queued_requests,
        queued_prompt_tokens=message.queued_prompt_tokens,
        kv_pages_used=message.kv_pages_used,
        kv_pages_total=message.kv_pages_total,
        paused=message.paused,
        weights=weights_version(message.weights),
        loaded_adapters=message.loaded_adapters,
    )


def flushed_cache(message: control_pb2.FlushCacheResponse) -> server_values.FlushedCache:
    return server_values.FlushedCache(message.pages_freed, message.pages_in_use)


def tracing_status(message: telemetry_pb2.SetTracingResponse) -> server_values.TracingStatus:
    return server_values.TracingStatus(
        previous=spelled(_LEVEL_NAMES, message.previous, "TRACE_LEVEL_"),
        current=spelled(_LEVEL_NAMES, message.current, "TRACE_LEVEL_"),
        spans_exported=message.spans_exported,
        spans_dropped=message.spans_dropped,
        spans_failed=message.spans_failed,
    )


def tokens(message: control_pb2.TokenizeResponse) -> server_values.Tokens:
    return server_values.Tokens(tuple(message.token_ids), message.max_context_tokens)


def _in_flight(message: weights_pb2.InFlightReport) -> weights_values.InFlight:
    return weights_values.InFlight(message.waited, message.aborted, message.kept, message.recomputed)


def _update_outcome(number: int) -> weights_values.UpdateOutcome:
    return _member(weights_values.UpdateOutcome, number, _UPDATE_NAMES, "UPDATE_OUTCOME_")


def weights_update(
    message: weights_pb2.UpdateWeightsResponse, update_id: str
) -> weights_values.WeightsUpdate:
    return weights_values.WeightsUpdate(
        update_id=update_id,
        outcome=_update_outcome(message.outcome),
        current=weights_version(message.current),
        previous=weights_version(message.previous),
        tensors_updated=message.tensors_updated,
        bytes_received=message.bytes_received,
        staged_s=_seconds(message.staged_in),
        paused_s=_seconds(message.paused_for),
        in_flight=_in_flight(message.in_flight),
        digest=message.digest,
    )


def committed_weights(
    message: control_pb2.CommitWeightsResponse, update_id: str
) -> weights_values.CommittedWeights:
    return weights_values.CommittedWeights(
        update_id=update_id,
        outcome=_update_outcome(message.outcome),
        current=weights_version(message.current),
        previous=weights_version(message.previous),
        paused_s=_seconds(message.paused_for),
        in_flight=_in_flight(message.in_flight),
        digest=message.digest,
    )


def paused(message: control_pb2.PauseResponse) -> weights_values.Paused:
    return weights_values.Paused(_in_flight(message.in_flight), message.freed_bytes)
