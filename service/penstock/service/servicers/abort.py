"""Abort: whom it means, and the requests that have come but are not in the engine yet.

The engine learns of an id with `submit`. `Abort` must know it from the moment the RPC starts: one that came
while the prompt is being tokenized would otherwise find nothing, and the request would run after all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.runtime.errors import DuplicateRequestId
from penstock.runtime.requests.request import Finish, FinishReason
from penstock.service.requests.convert_params import Violations
from penstock.v1 import inference_pb2

MAX_ABORT_IDS = 10_000
MAX_REASON_CHARS = 1000


@dataclass(frozen=True, slots=True)
class AbortTarget:
    """Whom Abort means: exactly one of the three."""

    ids: Mapping[str, None] | None
    """In the order in which they were named; a mapping, so that it costs little to ask for one."""
    prefix: str | None
    everything: bool

    def parts(self, size: int) -> Sequence[AbortTarget]:
        """The same in several, of at most so many ids each."""
        if self.ids is None:
            return [self]
        ids = list(self.ids)
        starts = range(0, len(ids), size)
        return [AbortTarget(dict.fromkeys(ids[at : at + size]), None, False) for at in starts]

    def matches(self, request_id: str) -> bool:
        if self.prefix is not None:
            return request_id.startswith(self.prefix)
        return self.everything or request_id in (self.ids or {})


def to_target(message: inference_pb2.AbortRequest) -> AbortTarget:
    """Raises InvalidRequest: an abort that names nothing never means everything."""
    bad = Violations()
    # The engine stands still while it looks for them.
    num_ids = len(message.request_ids.ids)
    few = bad.allows("request_ids.ids", num_ids, MAX_ABORT_IDS, "ids")
    ids = dict.fromkeys(message.request_ids.ids) if few else {}
    kind = message.WhichOneof("target")
    if kind is None:
        bad.add("target", "one of request_ids, request_id_prefix and all is required")
    elif kind == "request_ids" and not num_ids:
        bad.add("request_ids.ids", "must not be empty")
    elif kind == "request_id_prefix" and not message.request_id_prefix:
        bad.add("request_id_prefix", "must not be empty")
    if len(message.reason) > MAX_REASON_CHARS:  # every request that is ended answers with it
        bad.add("reason", f"must have at most {MAX_REASON_CHARS} characters, not {len(message.reason)}")
    bad.raise_if_any()
    return AbortTarget(
        ids if kind == "request_ids" else None, message.request_id_prefix or None, kind == "all"
    )


@dataclass(slots=True)
class Arrival:
    """A request whose prompt is being tokenized; `finish` is set once it was aborted."""

    finish: Finish | None = None


class Arrivals:
    """All of those of one server, by the engine's id. Used on the event loop only."""

    def __init__(self) -> None:
        self._arrivals: dict[str, Arrival] = {}

    @contextlib.contextmanager
    def tokenizing(self, request_id: str) -> Iterator[Arrival]:
        """The id can be aborted inside. DuplicateRequestId where another request of that id is inside too.

        Whoever leaves must end the request or submit it to the engine without an `await` in between.
        """
        if request_id in self._arrivals:
            raise DuplicateRequestId(request_id)
        arrival = self._arrivals[request_id] = Arrival()
        try:
            yield arrival
        finally:
            del self._arrivals[request_id]

    def abort(self, meant: Callable[[str], bool], message: str) -> list[str]:
        """Mark the requests that match and are still being prepared, so that they are never submitted.
        Returns their ids. If a request is aborted twice, the first message is kept.
        """
        found = [request_id for request_id in self._arrivals if meant(request_id)]
        for request_id in found:
            arrival = self._arrivals[request_id]
            arrival.finish = arrival.finish or Finish(FinishReason.ABORTED, message=message)
        return found
