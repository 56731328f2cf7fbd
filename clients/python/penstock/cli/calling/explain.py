"""Explains what a server's refusal means, and what to do next.

Errors that the user can do something about have a sentence of their own. Others have a general one, which
quotes the server's reason and message; tests/clients/cli/test_cli_explain.py lists their reasons.
"""

from __future__ import annotations

import re

from penstock.client import (
    AdapterExists,
    Busy,
    Cancelled,
    Conflict,
    CostlyGrammar,
    DeadlineExceeded,
    Denied,
    Draining,
    DrainTimeout,
    DuplicateRequestId,
    EngineDead,
    Forbidden,
    GenerationChanged,
    GroupEnded,
    InvalidRequest,
    KeyExpired,
    NotReady,
    PenstockClientError,
    ProfileUnderWay,
    PromptTooLong,
    QueueFull,
    RateLimited,
    ServedElsewhere,
    ServerError,
    TensorsRefused,
    UnavailableError,
    UnknownAdapter,
    UnknownUpdate,
    Unreachable,
    Unsupported,
    UpdateUnderWay,
)
from penstock.client.connection.address import proxy_of

_MOST_TENSORS = 5


def explain(error: PenstockClientError, addr: str) -> str:
    """Say in one line what went wrong and what to do next, with the request's id if the server told it."""
    text = _meaning(error, addr)
    if error.update_id and _is_answer_lost(error):
        text += (
            "; the new weights may be in use or not: repeat the command with --update-id "
            f"{error.update_id}, which applies them once at most"
        )
    return f"{text} (request {error.request_id})" if error.request_id else text


def _meaning(error: PenstockClientError, addr: str) -> str:
    text = " ".join(str(error).split())
    match error:
        case Unreachable():
            return _unreachable(text, addr)
        case NotReady():
            return (
                f"the server at {addr} is still loading; try again in a moment, or watch its output ({text})"
            )
        case Draining():
            return f"the server at {addr} is shutting down; try again when it is back"
        case QueueFull():
            return f"the queue of {addr} is full; {_again(error)}"
        case Busy():
            return f"the server at {addr} is busy ({text}); {_again(error)}"
        case RateLimited():
            return f"the rate of your key is used up ({text}); {_again(error)}"
        case CostlyGrammar():
            return f"{text}; {_again(error)}, or write a simpler grammar"
        case EngineDead():
            return f"the engine of {addr} is dead ({text}); try again when the server has been restarted"
        case GroupEnded():
            return f"the processes of {addr} start again ({text}); try again when they have"
        case PromptTooLong():
            return f"{text}; shorten the prompt, or have it cut with --truncation left"
        case UnavailableError():
            return f"{addr} is not available now ({error.reason}): {text}; try again later"
        case InvalidRequest() if error.violations:
            listed = "; ".join(f"{v.field}: {v.description}" for v in error.violations)
            return f"the request is not valid: {listed}"
        case ServedElsewhere():
            return f"{text}; name that address with --addr"
        case Unsupported():
            untold = ", ".join(field for field in error.fields if field not in text)
            what = f" ({untold})" if untold else ""
            said = text.removeprefix("not supported by this server: ")  # the service begins so
            return f"this server cannot do that{what}: {said}; see `penstock info`"
        case DuplicateRequestId():
            return f"{text}; choose another --request-id"
        case KeyExpired():
            return f"the key has expired ({text}); ask the operator of {addr} for another"
        case Forbidden():
            return f"the key does not allow this ({text})"
        case Denied():
            return f"{addr} wants a key ({text}); give yours in PENSTOCK_TOKEN or with --token-file"
        case TensorsRefused():
            return _tensors(error, text)
        case GenerationChanged():
            return f"{text}; look at the weights in use with `penstock info`, and decide anew"
        case UpdateUnderWay() if error.metadata.get("staged") == "true":
            return f"{text}, with `penstock commit-weights ID` or `penstock discard-weights ID`"
        case UpdateUnderWay():
            return f"{text}; {_again(error)}"
        case ProfileUnderWay():
            return f"{text}; {_again(error)}"
        case Conflict() if error.reason == "REQUEST_ABORTED":
            return f"{text}; ask again, if it is still wanted"
        case UnknownAdapter():
            return f"{text}; look at those that are there with `penstock adapters list`"
        case AdapterExists():
            return f"{text}: with --replace"
        case UnknownUpdate():
            return f"{text}; send it with `penstock push-weights`"
        case DrainTimeout():
            return f"{text}; allow more with --drain-timeout, or choose another --policy"
        case DeadlineExceeded():
            return f"no answer in time from {addr}; allow more time with --timeout"
        case ServerError():
            return f"the server failed ({error.code.name}): {text}; its log says more"
        case _:
            return f"the server refused ({error.reason or error.code.name}): {text}"


def _is_answer_lost(error: PenstockClientError) -> bool:
    """Say whether it is not known what the server did."""
    return isinstance(error, Unreachable | Cancelled | DeadlineExceeded) and not isinstance(
        error, DrainTimeout
    )


def _tensors(error: TensorsRefused, text: str) -> str:
    """Name the first bad tensors. A checkpoint of another model has hundreds."""
    if not error.tensors:
        return text
    named = "; ".join(map(str, error.tensors[:_MOST_TENSORS]))
    left = len(error.tensors) - _MOST_TENSORS
    more = f"; and {left} more" if left > 0 else "; and more" if error.has_more else ""
    return f"the server refused the weights, and the old ones are in use: {named}{more}"


def _again(error: PenstockClientError) -> str:
    return "try again" if error.retry_after is None else f"try again in {error.retry_after:g} s"


def _unreachable(text: str, addr: str) -> str:
    """Explain a connection that could not be made, or broke. gRPC tells the cases apart only in words."""
    last = text.removesuffix(": OK").rpartition(": ")[2].rstrip("].")
    cause = re.sub(r" \(\d+\)$", "", last)  # older versions of grpcio add the system's number of the error
    proxy = _proxy(addr)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"the certificate of {addr} is not trusted ({cause}); name its authority with --ca"
    if "Hostname Verification" in text:
        return f"the certificate of {addr} is for another name; if it is the right server, say --tls-name"
    if "WRONG_VERSION_NUMBER" in text:
        return f"{addr} does not use TLS; leave out the flags of TLS, or give another server with --addr"
    if "handshake failed" in text:
        return f"no TLS with {addr} ({cause}); see which certificates it wants{proxy}"
    if "resolving" in text or "resolution" in text:
        return f"the address {addr} cannot be resolved ({cause}); give HOST:PORT with --addr{proxy}"
    if "failed to connect" not in text and "all backends failing" not in text:
        return f"the connection to {addr} broke ({cause}); check whether the server still runs{proxy}"
    if cause == "Socket closed":
        return (
            f"{addr} ends every connection; it may want TLS (--tls), or a certificate of yours (--cert and "
            f"--key) that it trusts{proxy}"
        )
    return (
        f"no server at {addr} ({cause}); start one with `penstock serve demo`, or name it with --addr{proxy}"
    )


def _proxy(addr: str) -> str:
    """Name the proxy of a connection, because it may be what refuses; empty if there is none."""
    try:
        found = proxy_of(addr)
    except ValueError:
        return ""
    if found is None:
        return ""
    variable, proxy = found
    return f" (it was tried through the proxy {proxy} of {variable}; no_proxy excludes hosts)"
