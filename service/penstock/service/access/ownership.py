"""The engine's id of a request, which holds the id of the caller that the request belongs to.

Callers choose ids without knowing of each other. The engine is given the caller's id with each, so that two
callers may use the same id at the same time, and neither learns that the other does. In replies, errors and
traces callers see the id that they sent.

On a server without keys callers have no id. Their request ids stay as they are, unless they begin with the
mark used here. So no two pairs of caller and request id become the same engine's id.
"""

from __future__ import annotations

from penstock.runtime.requests.request import request_id_of

_MARK = "\x01"
"""This character occurs in no id of a key, but it may occur in a request's id."""


def engine_id(owner: str, request_id: str) -> str:
    """Make the engine's id of the request `request_id` of the caller `owner`. For the beginning of a request
    id it gives the beginning of the engine's id, and for an empty one what all of this caller's ids begin
    with.
    """
    if owner or request_id.startswith(_MARK):
        return f"{_MARK}{owner}{_MARK}{request_id}"
    return request_id


def owner_of(engine_id: str) -> str:
    """Return the id of the caller that the request belongs to; empty if the caller has none."""
    return engine_id[1:].partition(_MARK)[0] if engine_id.startswith(_MARK) else ""


def own_id(engine_id: str) -> str:
    """Return the request's id as its caller sent it, from the engine's id of the request or of one of its
    outputs.
    """
    request_id = request_id_of(engine_id)
    return request_id[1:].partition(_MARK)[2] if request_id.startswith(_MARK) else request_id


def told_id(engine_id: str) -> str:
    """Write the id as it is written to the log: 'r', or 'r' of 'alice'."""
    owner = owner_of(engine_id)
    return f"{own_id(engine_id)!r} of {owner!r}" if owner else repr(own_id(engine_id))
