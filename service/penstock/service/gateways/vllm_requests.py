"""Converts requests of vLLM's gRPC service to requests of the contract.

What the contract checks is not checked here. Its violations name its own fields, and `renamed` gives them
back the names that the caller knows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from penstock.runtime.errors import InvalidRequest, RequestError, UnsupportedFeature, Violation
from penstock.runtime.requests.sampling import SamplingNumbers
from penstock.service.gateways import vllm_engine_pb2 as vllm
from penstock.service.requests.generate import Violations
from penstock.v1 import inference_pb2, types_pb2

MAX_TOP_K = 2**31 - 1
_NEUTRAL = types_pb2.SamplingParams(**dataclasses.asdict(SamplingNumbers()))
_MAX_SEED = 2**64
_FIELDS: Mapping[str, str] = {
    "prompt_token_ids.ids": "tokenized.input_ids",
    "prompt": "text",
    "request_ids.ids": "request_ids",
    "sampling.n": "sampling_params.n",
    "output.logprobs": "sampling_params.logprobs",
    "output.prompt_logprobs": "sampling_params.prompt_logprobs",
    "constraint.ebnf": "sampling_params.grammar",
    "constraint": "sampling_params",
    "sampling": "sampling_params",
    "stopping": "sampling_params",
}
"""Fields of the contract and what vLLM calls them. A name also stands for all that begin with it and a dot.
"""


_REFUSED = (
    "kv_transfer_params",
    "kv_transfer_params_json",
    "mm_inputs",
    "extra_mm_inputs",
    "media_refs",
)
"""Fields of the request that Penstock has nothing for."""


def to_stream_request(message: vllm.GenerateRequest, max_context_tokens: int) -> inference_pb2.StreamRequest:
    """Convert the whole request.

    Raises UnsupportedFeature for parts of vLLM's service that Penstock has not, and InvalidRequest for values
    that the contract cannot express.
    """
    _check_supported(message)
    params, bad = message.sampling_params, Violations()
    request = inference_pb2.StreamRequest(request_id=message.request_id)
    if message.data_parallel_rank:
        bad.add("data_parallel_rank", f"must be 0, the only one, not {message.data_parallel_rank}")
    kind = message.WhichOneof("input")
    if kind == "tokenized":
        request.prompt_token_ids.ids.extend(_kept(message, max_context_tokens, bad))
    elif kind == "text":
        request.prompt = message.text
    _sample(params, request.sampling, bad)
    _stop(params, request.stopping)
    _constrain(params, request)
    if kind == "text" and params.HasField("truncate_prompt_tokens"):
        bad.add("sampling_params.truncate_prompt_tokens", "needs tokenized.input_ids")
    elif params.truncate_prompt_tokens == -1:
        request.context.truncation = types_pb2.TRUNCATION_LEFT
    request.output.text = bool(params.stop)  # stop strings are searched in it; it is not sent
    request.output.skip_special_tokens = params.skip_special_tokens
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            value = getattr(params, name)
            if value < 0:
                bad.add(f"sampling_params.{name}", f"must be at least 0, not {value}")
            else:
                setattr(request.output, name, value)
    request.output.echo_prompt_token_ids = params.HasField("prompt_logprobs")
    bad.raise_if_any()
    return request


def _check_supported(message: vllm.GenerateRequest) -> None:
    found = [field.name for field, _ in message.ListFields() if field.name in _REFUSED]
    if message.sampling_params.HasField("structural_tag"):
        found.append("sampling_params.structural_tag")
    if found:
        raise UnsupportedFeature(found)


def renamed(error: RequestError) -> RequestError:
    """Return the same error, with vLLM's names for the fields that it names."""
    if isinstance(error, InvalidRequest):
        return InvalidRequest([Violation(_name(one.field), one.description) for one in error.violations])
    if isinstance(error, UnsupportedFeature):
        return UnsupportedFeature([_name(field) for field in error.fields], error.why)
    return error


def _name(field: str) -> str:
    for ours, theirs in _FIELDS.items():
        if field == ours or field.startswith((f"{ours}.", f"{ours}[")):
            return theirs + field.removeprefix(ours)
    return field


def _kept(message: vllm.GenerateRequest, max_context_tokens: int, bad: Violations) -> list[int]:
    """Return the ids of the prompt that `truncate_prompt_tokens` leaves."""
    ids, params = message.tokenized.input_ids, message.sampling_params
    keep = params.truncate_prompt_tokens if params.HasField("truncate_prompt_tokens") else -1
    if keep < -1 or keep == 0:
        bad.add("sampling_params.truncate_prompt_tokens", f"must be -1 or at least 1, not {keep}")
        return []
    if keep > max_context_tokens:
        described = f"must be at most {max_context_tokens}, the context, not {keep}"
        bad.add("sampling_params.truncate_prompt_tokens", described)
        return []
    return list(ids) if keep == -1 else list(ids[-keep:])


def _sample(params: vllm.SamplingParams, sampling: types_pb2.SamplingParams, bad: Violations) -> None:
    """Set everything, because a gateway has applied the defaults of the model by itself."""
    sampling.MergeFrom(_NEUTRAL)
    if params.HasField("temperature"):
        sampling.temperature = _plain(params.temperature)
    sampling.top_p = _plain(params.top_p) or 1.0
    sampling.top_k = params.top_k if params.top_k <= MAX_TOP_K else 0  # -1, "off", as an unsigned number
    sampling.min_p = _plain(params.min_p)
    sampling.frequency_penalty = _plain(params.frequency_penalty)
    sampling.presence_penalty = _plain(params.presence_penalty)
    sampling.repetition_penalty = _plain(params.repetition_penalty) or 1.0
    sampling.n = params.n or 1
    if params.HasField("seed"):
        sampling.seed = params.seed % _MAX_SEED  # a negative seed is one like any other
    for token_id, bias in params.logit_bias.items():
        if token_id < 0:
            bad.add("sampling_params.logit_bias", f"has the id {token_id}, which is below 0")
        else:
            sampling.logit_bias[token_id] = bias


def _plain(value: float) -> float:
    """Return the decimal number that a float of 32 bits stands for: 0.7 and not 0.699999988."""
    return float(f"{value:.7g}") if math.isfinite(value) else value


def _stop(params: vllm.SamplingParams, stopping: types_pb2.StoppingParams) -> None:
    if params.HasField("max_tokens"):
        stopping.max_tokens = params.max_tokens
    stopping.min_tokens = params.min_tokens
    stopping.stop.extend(params.stop)
    stopping.stop_token_ids.extend(params.stop_token_ids)
    stopping.ignore_eos = params.ignore_eos
    stopping.include_stop = True  # vLLM always sends the token that ended an output


def _constrain(params: vllm.SamplingParams, request: inference_pb2.StreamRequest) -> None:
    kind = params.WhichOneof("constraint")
    if kind == "json_schema":
        request.constraint.json_schema = params.json_schema
    elif kind == "regex":
        request.constraint.regex = params.regex
    elif kind == "grammar":
        request.constraint.ebnf = params.grammar
    elif kind == "json_object" and params.json_object:
        request.constraint.json_object.SetInParent()
    elif kind == "choice":
        request.constraint.choice.choices.extend(params.choice.choices)
        request.constraint.choice.SetInParent()
