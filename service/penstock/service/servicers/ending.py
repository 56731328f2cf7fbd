"""Ends the requests that an `Abort` names: a caller's own, or everybody's if the caller has the
role control.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.runtime.loop.interface import AbortOutcome
from penstock.runtime.requests.fanout import request_id_of
from penstock.service.access.callers import Caller
from penstock.service.access.ownership import engine_id, own_id, owner_of
from penstock.service.access_errors import Forbidden
from penstock.service.backend import Backend
from penstock.service.servicers.serving import AbortTarget, Arrivals

_RANK = (AbortOutcome.NOT_FOUND, AbortOutcome.ALREADY_FINISHED, AbortOutcome.ABORTED)


def means(target: AbortTarget, caller: Caller) -> Callable[[str], bool]:
    """Return a function that tells, for the engine's id of a request, whether `target` covers it when this
    caller names it.
    """

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
    """End the requests that `target` covers. Their slots and pages are free when this returns.

    Returns one outcome for each id that was named, or for each request that was found, with ids as callers
    know them. Requests of others are NOT_FOUND, just as requests that do not exist. `held` are the engine's
    ids of all outputs that the service has in the engine now.
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
    # some of these ids may belong to no request
    named = {engine_id(caller.id, name): name for name in target.ids}
    for one, outcome in found.items():
        name = named.get(one) or own_id(one)
        best[name] = max(best[name], outcome, key=_RANK.index)
    return list(best.items())


def _end_own(
    engine: Backend, caller: Caller, target: AbortTarget, message: str
) -> Iterable[tuple[str, AbortOutcome]]:
    """End the caller's own requests; or everybody's, if the target is all requests and the caller may end
    them.
    """
    if target.ids is not None:
        return engine.abort([engine_id(caller.id, name) for name in target.ids], message=message)
    if target.everything and caller.controls:
        return engine.abort(all_requests=True, message=message)
    if target.everything and not caller.id:
        raise Forbidden("only a caller with a key, or with the role control, may abort all requests")
    return engine.abort(prefix=engine_id(caller.id, target.prefix or ""), message=message)
