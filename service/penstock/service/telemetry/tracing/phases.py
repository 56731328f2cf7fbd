"""Divides a request into phases that leave no gap: each ends where the next one begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.runtime.requests.request import RequestTiming
from penstock.service.telemetry.otlp.wire import Attributes
from penstock.service.telemetry.tracing.notes import Begun

QUEUE, PREFILL, DECODE, REPLY = "queue", "prefill", "decode", "reply"
_NUMBERS = {"tokenize": 1, "grammar": 2, "submit": 3, QUEUE: 4, PREFILL: 5, DECODE: 6, REPLY: 7}


class Phase(NamedTuple):
    """A part of a request. Times are monotonic ns."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes


def phase_id(request_id: bytes, name: str) -> bytes:
    """The id of a phase's span. It follows from the id of the request's span, so that spans below a phase can
    be sent before the phase has ended, and whoever makes them need not know each other.
    """
    return (int.from_bytes(request_id, "big") ^ _NUMBERS[name]).to_bytes(8, "big")


def engine_phases(timing: RequestTiming, *, has_ended: bool) -> list[Begun]:
    """The phases that the engine's times tell of. `has_ended`: whether the engine ended the request, rather
    than its caller, so that what comes after is the reply.
    """
    marks = [
        (QUEUE, timing.arrived_ns),
        (PREFILL, timing.scheduled_ns),
        (DECODE, timing.first_token_ns),
        (REPLY, timing.finished_ns if has_ended else 0),
    ]
    return [Begun(name, at_ns) for name, at_ns in marks if at_ns]


def tiled(begun: Sequence[Begun], start_ns: int, end_ns: int) -> list[Phase]:
    """The phases of a request that lasted from `start_ns` to `end_ns`; `begun` are in their order. Together
    they last exactly as long as the request: the first begins with it, and the last ends with it. A phase
    that began only after the request had ended for its caller is left out.
    """
    kept: list[Begun] = []
    at_ns = start_ns
    for phase in begun:
        if kept and phase.at_ns >= end_ns:
            break
        at_ns = max(at_ns, phase.at_ns) if kept else start_ns
        kept.append(Begun(phase.name, at_ns, phase.attributes))
    ends = [*(phase.at_ns for phase in kept[1:]), end_ns]
    return [
        Phase(phase.name, phase.at_ns, end, phase.attributes) for phase, end in zip(kept, ends, strict=True)
    ]
