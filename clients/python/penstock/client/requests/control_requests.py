"""Builds the requests other than generation from keyword arguments. Both clients share these pure functions.

Values that the wire cannot carry raise InvalidRequest, as the server would answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from penstock.client.requests.chat_requests import chat_prompt
from penstock.client.requests.checks import Violations, checked, named, one_of
from penstock.client.requests.generation_requests import given_of
from penstock.client.requests.options import CHAT_FIELDS, ChatOptions
from penstock.v1 import control_pb2, inference_pb2, telemetry_pb2

TraceLevel = Literal["off", "requests", "steps", "detailed"]
"""How much a server traces: nothing; each call and the phases of its request; also the engine's steps; also a
span for each request and step.
"""


def abort_request(
    ids: str | Sequence[str] | None, prefix: str | None, all_requests: bool, reason: str
) -> inference_pb2.AbortRequest:
    """Build an AbortRequest. Raises TypeError unless there is exactly one target, and ValueError for an empty
    prefix, which must not mean everything.
    """
    targets = [
        name
        for name, on in (("ids", ids is not None), ("prefix", prefix is not None), ("all", all_requests))
        if on
    ]
    if len(targets) != 1:
        raise TypeError(
            "give one of ids, prefix and all=True" + (f", not {' and '.join(targets)}" if targets else "")
        )
    if prefix == "":
        raise ValueError("prefix: must not be empty; to abort every request use all=True")
    with checked("reason"):
        request = inference_pb2.AbortRequest(reason=reason)
    with checked("request_ids.ids" if ids is not None else "request_id_prefix"):
        if ids is not None:
            request.request_ids.SetInParent()
            request.request_ids.ids.extend([ids] if isinstance(ids, str) else ids)
        elif prefix is not None:
            request.request_id_prefix = prefix
        else:
            request.all.SetInParent()
    return request


def tokenize_request(
    text: str | None, add_special_tokens: bool | None, chat: ChatOptions
) -> control_pb2.TokenizeRequest:
    """Build a TokenizeRequest of a text or a conversation. Raises TypeError unless exactly one is given."""
    given = given_of(chat, CHAT_FIELDS)
    if (text is None) == ("messages" not in given):
        raise TypeError("give one of text and messages")
    if text is not None and given:
        raise TypeError(f"{next(iter(given))} goes with messages, not with text")
    request = control_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
    if text is not None:
        with checked("text"):
            request.text = text
    else:
        request.chat.CopyFrom(chat_prompt(chat))
    return request


def detokenize_request(
    token_ids: Sequence[int], skip_special_tokens: bool | None
) -> control_pb2.DetokenizeRequest:
    with checked("token_ids"):
        return control_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)


def watch_request(interval: float | None, max_requests: int) -> telemetry_pb2.WatchLoadRequest:
    """Build a WatchLoadRequest; the interval is in seconds."""
    request = telemetry_pb2.WatchLoadRequest()
    violations = Violations()
    with violations.of("interval"), named("interval"):
        if interval is not None:
            request.interval.FromNanoseconds(round(interval * 1e9))
    with violations.of("max_requests"), named("max_requests"):
        request.max_requests = max_requests
    violations.tell()
    return request


def profile_request(
    steps: int | None, max_time: float | None, *, send_files: bool
) -> telemetry_pb2.ProfileRequest:
    """Build a ProfileRequest; the time is in seconds."""
    request = telemetry_pb2.ProfileRequest(include_data=send_files)
    violations = Violations()
    with violations.of("steps"), named("steps"):
        if steps is not None:
            request.steps = steps
    with violations.of("timeout"), named("max_time"):
        if max_time is not None:
            request.timeout.FromNanoseconds(round(max_time * 1e9))
    violations.tell()
    return request


def tracing_request(level: TraceLevel | None) -> telemetry_pb2.SetTracingRequest:
    request = telemetry_pb2.SetTracingRequest()
    if level is not None:
        with checked("level"):
            name = one_of(level, get_args(TraceLevel))
        request.level = telemetry_pb2.TraceLevel.Value(f"TRACE_LEVEL_{name}")
    return request
