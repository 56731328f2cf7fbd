"""Whose a request is, in the id under which the engine knows it.

Callers choose ids without asking each other, so the engine is given the caller's id with each: two callers
may use the same id at the same time, and neither learns that the other does. What callers see, in replies,
errors and traces, is what they sent.

An id of a caller that has no id itself, on a server without keys, stays as it is, unless it begins as those
made here do. So no two pairs of caller and id become one.
"""

from __future__ import annotations

from penstock.runtime.requests.fanout import request_id_of

_MARK = "\x01"
"""Stands in no id of a key; in a request's id it may."""


def engine_id(owner: str, request_id: str) -> str:
    """What the engine calls the request `request_id` of the caller `owner`. With the beginning of an id it
    gives the beginning of what the engine calls it; with nothing, what all of this caller's begin with.
    """
    if owner or request_id.startswith(_MARK):
        return f"{_MARK}{owner}{_MARK}{request_id}"
    return request_id


def owner_of(engine_id: str) -> str:
    """The id of the caller; empty for one without."""
    return engine_id[1:].partition(_MARK)[0] if engine_id.startswith(_MARK) else ""


def own_id(engine_id: str) -> str:
    """The request's id as its caller sent it, of any of its outputs."""
    request_id = request_id_of(engine_id)
    return request_id[1:].partition(_MARK)[2] if request_id.startswith(_MARK) else request_id


def told_id(engine_id: str) -> str:
    """For logs: 'r', or 'r' of 'alice'."""
    owner = owner_of(engine_id)
    return f"{own_id(engine_id)!r} of {owner!r}" if owner else repr(own_id(engine_id))
