"""Converts frozen values back to the contract's messages. Large ones are built from serialized parts, so that
they never exist as objects.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from penstock.runtime.adapters.interface import AdapterInfo, AdapterState
from penstock.runtime.chat.messages import ToolCall
from penstock.runtime.images.image import ImageLimits
from penstock.runtime.images.reader import ImageReader
from penstock.runtime.loop.interface import AbortOutcome, InFlightReport, Paused, WeightsVersion
from penstock.runtime.prompting.prompts import Fitted
from penstock.runtime.requests.request import Finish, FinishReason, RequestTiming, TokenLogprobs
from penstock.runtime.text.decoder import TokenBytes
from penstock.runtime.updating.interface import UpdateOutcome, UpdateReport
from penstock.service.replies.outputs import Taken
from penstock.service.requests.generate import ServedJob
from penstock.shared.varints import varint
from penstock.v1 import adapters_pb2, control_pb2, inference_pb2, types_pb2, weights_pb2

_LENGTH_DELIMITED = 2


def field(message: type[Message], name: str, parts: Sequence[bytes]) -> list[bytes]:
    """Serialize the field `name` of `message`, which is a message itself, from its serialized parts.

    The parts of a message are serializations of it with some of its fields set; joined they are the whole
    message.
    """
    return [tag(message, name) + varint(sum(map(len, parts))), *parts]


def tag(message: type[Message], name: str) -> bytes:
    """Return what begins the field `name` of `message`: a message, text, or packed numbers. Its length
    follows.
    """
    return varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | _LENGTH_DELIMITED)


def enclosed(tag: bytes, body: bytes) -> bytes:
    """Make a field with this tag and this content."""
    return tag + varint(len(body)) + body


def packed(values: Iterable[int]) -> bytes:
    """Pack the content of a repeated field of unsigned numbers."""
    return b"".join(map(varint, values))


CANDIDATES_AT_ONCE = 1000
"""How many candidates are encoded at a time; that takes about a millisecond."""
_DELTA = tag(inference_pb2.StreamResponse, "delta")
_TEXT = tag(inference_pb2.OutputDelta, "text")
_TOKEN_IDS = tag(inference_pb2.OutputDelta, "token_ids")
_LOGPROBS = tag(inference_pb2.OutputDelta, "logprobs")
_HIDDEN_STATES = tag(inference_pb2.OutputDelta, "hidden_states")
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
    """Convert an output's end. `match` is set for a stop string, a stop token id and an end-of-sequence
    token.
    """
    message = types_pb2.Finish(reason=REASONS[value.reason], message=value.message)
    if value.stop is not None:
        message.match.stop = value.stop
    elif value.token_id is not None:
        message.match.token_id = value.token_id
    return message


def logprobs(values: Sequence[TokenLogprobs], top: int) -> types_pb2.Logprobs:
    """Convert log-probabilities, one entry per token. `top` stays empty if no candidates were asked for."""
    message = types_pb2.Logprobs(sampled=[v.sampled for v in values])
    if top:
        for value in values:
            candidates = message.top.add().candidates
            for token_id, logprob in value.top:
                candidates.add(token_id=token_id, logprob=logprob)
    return message


def encode_logprobs(values: Sequence[TokenLogprobs], top: int) -> bytes:
    """Serialize a `Logprobs`. It has only repeated fields, so messages of consecutive tokens may be joined as
    bytes.
    """
    return logprobs(values, top).SerializeToString()


def add_delta(message: inference_pb2.Output, taken: Taken, job: ServedJob) -> None:
    """Append what is new to the message: its text, and its token ids if they were asked for.
    Log-probabilities are bytes already, and are added when the message is serialized.
    """
    message.text += taken.text
    message.reasoning += taken.reasoning
    add_calls(message, taken.tool_calls)
    if job.return_token_ids:
        message.token_ids.extend(taken.token_ids)


def add_calls(message: inference_pb2.Output | inference_pb2.OutputDelta, calls: Iterable[ToolCall]) -> None:
    """Append calls of tools to the message."""
    for call in calls:
        message.tool_calls.add(id=call.id, name=call.name, arguments_json=call.arguments_json)


def response(
    message: inference_pb2.GenerateResponse,
    encoded_prompt: Sequence[bytes],
    outputs: Sequence[inference_pb2.Output],
    encoded_logprobs: Sequence[Sequence[bytes]],
    hidden: Sequence[Sequence[bytes]],
) -> bytes:
    """Serialize a `GenerateResponse` from its small fields, its `PromptInfo`, its outputs, and their
    log-probabilities and hidden states.
    """
    kind = type(message)
    parts = [message.SerializeToString(), *field(kind, "prompt", encoded_prompt)]
    for output, encoded, states in zip(outputs, encoded_logprobs, hidden, strict=True):
        large = [*_logprobs_field(encoded), *_hidden_states_field(states, len(output.token_ids))]
        parts += field(kind, "outputs", [output.SerializeToString(), *large])
    return b"".join(parts)


def stream_delta(
    index: int, taken: Taken, job: ServedJob, weights: types_pb2.WeightsVersion | None
) -> bytes | None:
    """Serialize a `StreamResponse` with a delta and its log-probabilities. `weights` is the version that made
    it, if that is to be told. Returns None if the delta would have nothing but an index.

    Text and token ids are written by hand, because that takes a third of the time of making a message of
    them, and there is one for each step of each output.
    """
    parts = []
    if taken.text:
        parts.append(enclosed(_TEXT, taken.text.encode()))
    if taken.token_ids and job.return_token_ids:
        parts.append(enclosed(_TOKEN_IDS, packed(taken.token_ids)))
        if taken.logprobs:
            parts.append(enclosed(_LOGPROBS, taken.logprobs))
        if taken.hidden:
            parts.append(enclosed(_HIDDEN_STATES, hidden_states(taken.hidden, len(taken.token_ids))))
    if weights is not None or taken.reasoning or taken.tool_calls or taken.tool_call_deltas:
        rest = inference_pb2.OutputDelta(weights=weights, reasoning=taken.reasoning)
        add_calls(rest, taken.tool_calls)
        for piece in taken.tool_call_deltas:
            rest.tool_call_deltas.add(
                index=piece.index, id=piece.id, name=piece.name, arguments_json=piece.arguments_json
            )
        parts.append(rest.SerializeToString())
    if not parts:
        return None
    if index:
        parts.append(inference_pb2.OutputDelta(index=index).SerializeToString())
    return enclosed(_DELTA, b"".join(parts))


def stream_started(message: inference_pb2.StreamStarted, encoded_prompt: Sequence[bytes]) -> bytes:
    """Serialize the `StreamResponse` that begins a stream, with its `PromptInfo`."""
    body = [message.SerializeToString(), *field(inference_pb2.StreamStarted, "prompt", encoded_prompt)]
    return b"".join(field(inference_pb2.StreamResponse, "started", body))


def _logprobs_field(encoded: Sequence[bytes]) -> list[bytes]:
    """Make the field of an output's log-probabilities; unset if there are none."""
    return field(inference_pb2.Output, "logprobs", encoded) if any(encoded) else []


def hidden_states(values: bytes, num_tokens: int) -> bytes:
    """Serialize a `HiddenStates` with the states of at least one token."""
    size = len(values) // (4 * num_tokens)
    return types_pb2.HiddenStates(size=size, values=values).SerializeToString()


def _hidden_states_field(parts: Sequence[bytes], num_tokens: int) -> list[bytes]:
    """Make the field of an output's hidden states; unset if there are none."""
    if not any(parts):
        return []
    return field(inference_pb2.Output, "hidden_states", [hidden_states(b"".join(parts), num_tokens)])


async def prompt_info(
    job: ServedJob, prompt: Fitted, values: Sequence[TokenLogprobs], turns: asyncio.Lock
) -> list[bytes]:
    """Serialize the prompt as the model saw it. Its first token has no log-probability: it gets NaN, and no
    candidates.

    There may be hundreds of thousands of candidates. They are encoded in pieces of about a millisecond, each
    under the lock `turns`, so that other tasks never wait longer than that for the event loop.
    """
    ids = prompt.token_ids
    message = types_pb2.PromptInfo(
        token_count=len(ids),
        token_ids=ids if job.echo_prompt_token_ids else (),
        truncated_tokens=prompt.num_truncated,
    )
    encoded = [message.SerializeToString()]
    # otherwise the request ended before they were computed
    if job.prompt_logprobs is not None and len(values) == len(ids) - 1:
        pieces = [encode_logprobs([TokenLogprobs(math.nan)], job.prompt_logprobs)]
        size = max(1, CANDIDATES_AT_ONCE // (1 + job.prompt_logprobs))
        for start in range(0, len(values), size):
            async with turns:
                pieces.append(encode_logprobs(values[start : start + size], job.prompt_logprobs))
                await asyncio.sleep(0)
        encoded += field(types_pb2.PromptInfo, "logprobs", pieces)
    return encoded


def usage(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    num_reasoning_tokens: int,
    num_image_tokens: int,
    times: RequestTiming | None,
) -> types_pb2.Usage:
    """Convert the counts of tokens. `completion_tokens` counts generated ids, whether or not they
    are sent.
    """
    return types_pb2.Usage(
        prompt_tokens=num_prompt_tokens,
        cached_prompt_tokens=times.cached_prompt_tokens if times else 0,
        completion_tokens=num_completion_tokens,
        reasoning_tokens=num_reasoning_tokens,
        image_tokens=num_image_tokens,
        proposed_tokens=times.proposed_tokens if times else 0,
        accepted_tokens=times.accepted_tokens if times else 0,
    )


def timing(times: RequestTiming | None) -> types_pb2.Timing:
    """Convert times, counted from the arrival in the queue. What never happened (no token, never scheduled)
    stays unset.
    """
    message = types_pb2.Timing()
    if times is None:
        return message
    message.preemptions = times.preemptions
    for duration, end in (
        (message.queue, times.scheduled_ns),
        (message.time_to_first_token, times.first_token_ns),
        (message.total, times.finished_ns),
    ):
        if end:
            duration.FromNanoseconds(max(0, end - times.arrived_ns))
            duration.SetInParent()
    return message


def image_limits(limits: ImageLimits | None, reader: ImageReader | None) -> control_pb2.ImageLimits | None:
    """Say what the model takes of images; None if it takes none."""
    if limits is None or reader is None:
        return None
    return control_pb2.ImageLimits(
        max_images=limits.max_images,
        max_image_bytes=limits.max_bytes,
        max_image_pixels=limits.max_pixels,
        media_types=limits.media_types,
        image_token_id=reader.image_token_id,
    )


def tensor_spec(name: str, dtype: str, shape: Sequence[int]) -> weights_pb2.TensorSpec:
    return weights_pb2.TensorSpec(
        name=name, dtype=DTYPES.get(dtype, weights_pb2.DATA_TYPE_UNSPECIFIED), shape=shape
    )


class Collected:
    """All outputs of one request, delta by delta. Log-probabilities and hidden states stay bytes."""

    def __init__(self, job: ServedJob, version_of: Callable[[int], types_pb2.WeightsVersion]) -> None:
        """`version_of` tells the version of the weights of a generation."""
        self._job = job
        self._version_of = version_of
        self._outputs = [inference_pb2.Output(index=index) for index in range(job.n)]
        self._logprobs: list[list[bytes]] = [[] for _ in self._outputs]
        self._hidden: list[list[bytes]] = [[] for _ in self._outputs]
        self._num_tokens = [0] * job.n

    def add(self, index: int, taken: Taken) -> None:
        """Append a delta to output `index`. The output says from which token on other weights made it."""
        output = self._outputs[index]
        if not output.weights or output.weights[-1].version.generation != taken.weights_generation:
            output.weights.add(
                first_output_token=self._num_tokens[index], version=self._version_of(taken.weights_generation)
            )
        self._num_tokens[index] += len(taken.token_ids)
        add_delta(output, taken, self._job)
        self._logprobs[index].append(taken.logprobs)
        self._hidden[index].append(taken.hidden)
        if taken.finish is not None:
            output.finish.CopyFrom(finish(taken.finish))

    def response(self, message: inference_pb2.GenerateResponse, encoded_prompt: Sequence[bytes]) -> bytes:
        """Serialize a `GenerateResponse` from its small fields, its `PromptInfo` and all outputs."""
        return response(message, encoded_prompt, self._outputs, self._logprobs, self._hidden)


_UPDATE_OUTCOMES = {
    UpdateOutcome.COMMITTED: weights_pb2.UPDATE_OUTCOME_COMMITTED,
    UpdateOutcome.STAGED: weights_pb2.UPDATE_OUTCOME_STAGED,
    UpdateOutcome.VALIDATED: weights_pb2.UPDATE_OUTCOME_VALIDATED,
    UpdateOutcome.ALREADY_COMMITTED: weights_pb2.UPDATE_OUTCOME_ALREADY_COMMITTED,
}


def update_response(report: UpdateReport) -> weights_pb2.UpdateWeightsResponse:
    """Make the answer to UpdateWeights."""
    return weights_pb2.UpdateWeightsResponse(
        current=weights_version(report.current),
        previous=weights_version(report.previous),
        outcome=_UPDATE_OUTCOMES[report.outcome],
        tensors_updated=report.num_tensors,
        bytes_received=report.num_bytes,
        staged_in=duration_of(report.staged_s),
        paused_for=duration_of(report.paused_s),
        in_flight=in_flight(report.in_flight),
        digest=report.digest,
    )


def commit_response(report: UpdateReport) -> control_pb2.CommitWeightsResponse:
    """Make the answer to CommitWeights."""
    return control_pb2.CommitWeightsResponse(
        current=weights_version(report.current),
        previous=weights_version(report.previous),
        outcome=_UPDATE_OUTCOMES[report.outcome],
        paused_for=duration_of(report.paused_s),
        in_flight=in_flight(report.in_flight),
        digest=report.digest,
    )


_ADAPTER_STATES: Mapping[AdapterState, adapters_pb2.AdapterState.ValueType] = {
    "loading": adapters_pb2.ADAPTER_STATE_LOADING,
    "cached": adapters_pb2.ADAPTER_STATE_CACHED,
    "loaded": adapters_pb2.ADAPTER_STATE_LOADED,
}


def adapter_message(info: AdapterInfo, *, with_source: bool) -> adapters_pb2.Adapter:
    """Make the message of an adapter; where it was read from only `with_source`."""
    used = Timestamp()
    used.FromNanoseconds(int(info.last_used_s * 1e9))
    return adapters_pb2.Adapter(
        name=info.name,
        state=_ADAPTER_STATES[info.state],
        rank=info.rank,
        target_modules=info.targets,
        size_bytes=info.num_bytes,
        digest=bytes.fromhex(info.digest),
        last_used=used,
        running_requests=info.num_running,
        pinned=info.is_pinned,
        source=info.source if with_source else "",
    )


def pause_response(paused: Paused) -> control_pb2.PauseResponse:
    """Make the answer to Pause."""
    return control_pb2.PauseResponse(in_flight=in_flight(paused.in_flight), freed_bytes=paused.freed_bytes)


def in_flight(report: InFlightReport) -> weights_pb2.InFlightReport:
    """Say what became of the running requests."""
    return weights_pb2.InFlightReport(
        waited=report.waited, aborted=report.aborted, kept=report.kept, recomputed=report.recomputed
    )


def timestamp(moment: datetime) -> Timestamp:
    """Make the message of a moment, which has a time zone."""
    made = Timestamp()
    made.FromDatetime(moment)
    return made


def duration_of(seconds: float) -> Duration:
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


PAGE_BYTES = 1024 * 1024
"""About the most bytes of a page: gRPC's clients refuse messages above 4 MiB by default, and in JSON bytes
take a third more.
"""
_FIELD_BYTES = 3
"""Bytes around a token in a message."""


def vocabulary_page(known: TokenBytes, page: range, vocab_size: int) -> control_pb2.GetVocabularyResponse:
    """Return the tokens of the page, or the first of them if all have more than PAGE_BYTES. Takes some
    milliseconds for ten thousand tokens, so it is called in a thread.
    """
    reply = control_pb2.GetVocabularyResponse(
        vocab_size=vocab_size,
        is_exact=known.is_exact,
        dropped_leading_spaces=known.dropped_leading_spaces,
    )
    size = 0
    for token in map(known.of, page):
        size += len(token) + _FIELD_BYTES
        if size > PAGE_BYTES and reply.tokens:
            break
        reply.tokens.append(token)
    end = page.start + len(reply.tokens)
    reply.special_token_ids.extend(i for i in range(page.start, end) if i in known.special)
    if end < vocab_size:
        reply.next_token_id = end
    return reply
