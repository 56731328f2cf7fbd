"""What `Abort` ends for whom: a caller's own requests, or everybody's with the role control."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.runtime.loop.interface import AbortOutcome
from penstock.runtime.requests.fanout import request_id_of
from penstock.service.access.callers import Caller
from penstock.service.access.ownership import engine_id, own_id, owner_of
from penstock.service.access_errors import Forbidden
from penstock.service.backend import Backend
from penstock.service.servicers.abort import AbortTarget, Arrivals

_RANK = (AbortOutcome.NOT_FOUND, AbortOutcome.ALREADY_FINISHED, AbortOutcome.ABORTED)


def means(target: AbortTarget, caller: Caller) -> Callable[[str], bool]:
    """Whether a request, by the engine's id, is meant by the target when this caller names it."""

    def meant(engine_id: str) -> bool:
        return (caller.controls or owner_of(engine_id) == caller.id) and target.matches(own_id(engine_id))

    return meant


def end_requests(
    engine: Backend,
    arrivals: Arrivals,
    held: Iterable[str],
    caller: Caller,
    target: AbortTarget,
    message: str,
) -> Sequence[tuple[str, AbortOutcome]]:
    """End what is meant; slots and pages are free when this returns. One result for each id that was named,
    or for each request that was found, with ids as callers know them. What others have is NOT_FOUND, as what
    does not exist.

    `held` are the engine's ids of all outputs that the service has in the engine now.
    """
    meant = means(target, caller)
    found: dict[str, AbortOutcome] = dict.fromkeys(arrivals.abort(meant, message), AbortOutcome.ABORTED)
    in_engine = dict(_end_own(engine, caller, target, message))
    if caller.controls and not target.everything:
        others = {request_id_of(one) for one in held if owner_of(one) != caller.id and meant(one)}
        if others:
            in_engine.update(engine.abort(sorted(others), message=message))
    found = in_engine | found
    if target.ids is None:
        return [(own_id(one), outcome) for one, outcome in found.items()]
    best = dict.fromkeys(target.ids, AbortOutcome.NOT_FOUND)
    named = {engine_id(caller.id, name): name for name in target.ids}  # some may be no id that anything has
    for one, outcome in found.items():
        name = named.get(one) or own_id(one)
        best[name] = max(best[name], outcome, key=_RANK.index)
    return list(best.items())


def _end_own(
    engine: Backend, caller: Caller, target: AbortTarget, message: str
) -> Iterable[tuple[str, AbortOutcome]]:
    """Of the caller alone; or of everybody, where all are meant and the caller may."""
    if target.ids is not None:
        return engine.abort([engine_id(caller.id, name) for name in target.ids], message=message)
    if target.everything and caller.controls:
        return engine.abort(all_requests=True, message=message)
    if target.everything and not caller.id:
        raise Forbidden("only a caller with a key, or with the role control, may abort all requests")
    return engine.abort(prefix=engine_id(caller.id, target.prefix or ""), message=message)
