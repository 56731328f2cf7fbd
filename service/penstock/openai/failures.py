"""What a caller is told when a request fails: one table from the client's errors to HTTP, and errors for
fields that cannot be taken, in the words of OpenAI's API, by which clients tell them apart. Callers of
Anthropic's API are told the same in its form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.client import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Denied,
    DuplicateRequestId,
    ExceedsKVCapacity,
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    PenstockClientError,
    PreconditionFailed,
    PromptTooLong,
    RateLimited,
    RefusedError,
    ServedElsewhere,
    TooManyAdapters,
    UnavailableError,
    UnknownAdapter,
    UnknownModel,
    Unreachable,
    Unsupported,
)
from penstock.openai.calls import Call
from penstock.openai.jsonbytes import json_bytes

INVALID: Final = "invalid_request_error"
_KEY: Final = "penstock.error"
_AT: Final = re.compile(r"[.\[]")
_MOST_VIOLATIONS: Final = 20


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        may_retry: bool = True,
    ) -> None:
        """`status` is that of HTTP, `param` the path of the bad field, `retry_after` in seconds. `may_retry`
        is false where a client that tries again by itself would do harm.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.may_retry = may_retry


class ClientGone(Exception):
    """The client went away before its reply was whole. Nobody is told; the log has the status 499."""


def draining() -> ApiError:
    """Make the error of a request that comes, or still runs, when the front ends."""
    return ApiError(503, "the server is shutting down", "server_error", None, "draining", retry_after=1.0)


def defect() -> ApiError:
    """Make the error of a request that failed by a defect of the front. What went wrong is only in the
    log.
    """
    return ApiError(500, "internal error", "server_error", None, "internal", may_retry=False)


ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""From a status of HTTP to the type of an error of Anthropic's API. Any other status is an
`invalid_request_error`. Its own status for an overloaded server is 529, which proxies do not know.
"""


_DETAILS: Final[Mapping[str, Mapping[str, Any]]] = {
    "thread": {"error_code": "thread_unsupported_request"},
}
"""From a field that is refused to the details that tell Anthropic's clients to do without it."""


def envelope(error: ApiError, call: Call | None) -> dict[str, Any]:
    """Write the error in the form of the API that the caller speaks; that of OpenAI if the call is not
    known.
    """
    if call is not None and call.is_anthropic:
        told: dict[str, Any] = {
            "type": ANTHROPIC_TYPES.get(error.status, INVALID),
            "message": error.message,
        }
        if details := _DETAILS.get(error.param or ""):
            told["details"] = details
        return {"type": "error", "error": told, "request_id": call.request_id}
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: ApiError, call: Call | None = None) -> Response:
    """Make the reply of a request that failed before its reply began. `call` is None where its headers could
    not be read.
    """
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after * 1000)))
    if not error.may_retry:
        headers["x-should-retry"] = "false"  # the clients obey it; they try 409 and 5xx again otherwise
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return _ErrorReply(error, call, headers)


class _ErrorReply(Response):
    """The reply that tells of an error. The log and the metrics of its request are told as well."""

    def __init__(self, error: ApiError, call: Call | None, headers: Mapping[str, str]) -> None:
        super().__init__(json_bytes(envelope(error, call)), error.status, headers, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_error(scope, self._error)
        await super().__call__(scope, receive, send)


def note_error(scope: Scope, error: ApiError) -> None:
    """Note with which error a request ends, for the log and the metrics."""
    scope[_KEY] = error


def error_of(scope: Scope) -> ApiError | None:
    """Return the error with which a request ended; None for one that did not fail, or whose client went
    away.
    """
    error: ApiError | None = scope.get(_KEY)
    return error


@dataclass(frozen=True, slots=True)
class _Row:
    """How the errors of one class are told."""

    status: int
    type: str
    code: str | None = None
    """None: the reason of the contract, in lower case."""
    param: str | None = None
    retry_after: float | None = None
    """Seconds, where the server did not say."""
    may_retry: bool = True


_SERVER: Final = "server_error"
TABLE: Final[Mapping[type[PenstockClientError], _Row]] = {
    InvalidRequest: _Row(400, INVALID, "invalid_value"),
    PromptTooLong: _Row(400, INVALID, "context_length_exceeded"),
    ExceedsKVCapacity: _Row(400, INVALID, "context_length_exceeded"),
    Unsupported: _Row(501, INVALID, "unsupported_endpoint", may_retry=False),
    ServedElsewhere: _Row(501, INVALID, may_retry=False),
    UnknownModel: _Row(404, INVALID, "model_not_found", "model"),
    UnknownAdapter: _Row(404, INVALID, "model_not_found", "model"),
    TooManyAdapters: _Row(413, INVALID, "too_many_adapters"),
    DuplicateRequestId: _Row(409, INVALID, "duplicate_request_id", may_retry=False),
    PreconditionFailed: _Row(409, INVALID, may_retry=False),
    Forbidden: _Row(403, "permission_error", "forbidden"),
    Denied: _Row(401, INVALID, "invalid_api_key"),
    RefusedError: _Row(400, INVALID),
    RateLimited: _Row(429, "rate_limit_error", "rate_limit_exceeded", retry_after=1.0),
    Unreachable: _Row(503, _SERVER, "unreachable", retry_after=1.0),
    UnavailableError: _Row(503, _SERVER, retry_after=1.0),
    LimitExceeded: _Row(413, INVALID, "too_large"),
    Conflict: _Row(409, INVALID, may_retry=False),
    DeadlineExceeded: _Row(504, _SERVER, "timeout", may_retry=False),
    Cancelled: _Row(503, _SERVER, "cancelled", retry_after=1.0),
}
"""From a class of errors to how they are told. A class that is not here is told as the class that it is of.
"""
_OTHERWISE: Final = _Row(500, _SERVER, may_retry=False)
_OVERLOADED: Final = _Row(429, "rate_limit_error", retry_after=1.0)
"""For errors of the status RESOURCE_EXHAUSTED after which a later attempt may succeed."""
_RECEIVED_TOO_SLOWLY: Final = _Row(408, INVALID)
_BY_REASON: Final[Mapping[str, _Row]] = {
    "STALLED_SENDER": _RECEIVED_TOO_SLOWLY,
    "STALLED_READER": _RECEIVED_TOO_SLOWLY,
    "RESPONSE_TOO_LARGE": _Row(400, INVALID),
}


def of_client_error(error: PenstockClientError, params: Mapping[str, str]) -> ApiError:
    """Make the reply to a request whose RPC failed. `params` has the names of HTTP fields by the contract's
    paths, such as {"sampling.top_p": "top_p"}, and the name of the field that the prompt was made of, as
    "input". The messages begin as those of OpenAI's API do, because clients look for that: LiteLLM for the
    words on keys and on the context's length, LangChain for "prompt is too long", and Claude Code for what
    follows it.
    """
    row = _row_of(error)
    reason = error.reason.lower() or row.code or error.code.name.lower()
    message, param = str(error), row.param
    if isinstance(error, InvalidRequest) and error.violations:
        named = [(_named(v.field, params), v.description) for v in error.violations]
        texts = [f"Invalid value for '{name}': {text}" if name else text for name, text in named]
        message = "; ".join(texts[:_MOST_VIOLATIONS])
        param = named[0][0] or None
    elif isinstance(error, Unsupported) and error.fields:
        param = _named(error.fields[0], params)
        row = _Row(400, INVALID, "unsupported_parameter")
        names = ", ".join(f"'{_named(field, params)}'" for field in error.fields)
        message = f"Unsupported parameter: {names}: {message}"
    elif isinstance(error, PromptTooLong):
        param = params.get("input")
        message = _too_long(error)
    elif row is TABLE[Denied]:
        message = f"Incorrect API key provided: {message}"
    retry_after = error.retry_after if error.retry_after is not None else row.retry_after
    return ApiError(
        row.status, message, row.type, param, row.code or reason, retry_after, may_retry=row.may_retry
    )


def _too_long(error: PromptTooLong) -> str:
    told = error.metadata
    if not told.get("max_prompt_tokens", "").isdecimal():
        return f"This model's maximum context length is exceeded: {error}"
    return (
        f"This model's maximum context length is {int(told['max_prompt_tokens']) + 1} tokens. However, your "
        f"prompt is too long: {told.get('prompt_tokens', 'more')} tokens > {told['max_prompt_tokens']} "
        "maximum, because one at least must be left to generate."
    )


def _row_of(error: PenstockClientError) -> _Row:
    by_reason = _BY_REASON.get(error.reason)
    if by_reason is not None:
        return by_reason
    row = next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), _OTHERWISE)
    if isinstance(error, UnavailableError) and error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return TABLE[RateLimited] if isinstance(error, RateLimited) else _OVERLOADED
    return row


def _named(path: str, params: Mapping[str, str]) -> str:
    """Return the HTTP field's name for a path of the contract. What is below a path that has a name is kept:
    with {"chat.messages": "messages"}, "chat.messages[3].content" becomes "messages[3].content".
    """
    ends = [len(path), *(match.start() for match in reversed(list(_AT.finditer(path))))]
    for end in ends:
        if path[:end] in params:
            return params[path[:end]] + path[end:]
    return path


def invalid_value(param: str, why: str) -> ApiError:
    """Refuse a value that no request can have."""
    return _refusal(param, f"Invalid value for '{param}': {why}", "invalid_value")


def invalid_type(param: str, why: str) -> ApiError:
    """Make the error of a value of a kind of JSON that the field does not have."""
    return _refusal(param, f"Invalid type for '{param}': {why}", "invalid_type")


def unsupported_value(param: str, why: str) -> ApiError:
    """Refuse a value that others may take, and that this front or the served model does not."""
    return _refusal(param, f"Unsupported value: '{param}': {why}", "unsupported_value")


def unsupported_parameter(param: str, why: str) -> ApiError:
    """Refuse a field that OpenAI or vLLM has, and that this front or the served model does not honour."""
    return _refusal(param, f"Unsupported parameter: '{param}': {why}", "unsupported_parameter")


def unknown(param: str) -> ApiError:
    """Refuse a field that nobody has."""
    return _refusal(param, f"Unknown parameter: '{param}'.", "unknown_parameter")


def missing(param: str) -> ApiError:
    """Make the error of a required field that was left out."""
    return _refusal(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")


def _refusal(param: str, message: str, code: str) -> ApiError:
    return ApiError(400, message, INVALID, param or None, code)
