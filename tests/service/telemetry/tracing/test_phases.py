"""The phases of a request leave no gap, whatever happened to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.requests.request import RequestTiming
from penstock.service.telemetry.tracing.notes import Begun
from penstock.service.telemetry.tracing.request_spans import engine_phases, phase_id, tiled

NAMES = ["tokenize", "grammar", "submit", "queue", "prefill", "decode", "reply"]
TIMES = st.integers(0, 100)


@given(
    start_ns=TIMES,
    length_ns=TIMES,
    times=st.lists(TIMES, min_size=1, max_size=len(NAMES)),
)
def test_phases_tile_the_request(start_ns, length_ns, times):
    """Also if the clocks of two threads disagree, or the caller was gone before some of it began."""
    end_ns = start_ns + length_ns
    begun = [Begun(name, at_ns) for name, at_ns in zip(NAMES, times, strict=False)]
    phases = tiled(begun, start_ns, end_ns)
    assert (phases[0].start_ns, phases[-1].end_ns) == (start_ns, end_ns)
    assert [phase.end_ns for phase in phases[:-1]] == [phase.start_ns for phase in phases[1:]]
    assert all(phase.start_ns <= phase.end_ns for phase in phases)
    assert sum(phase.end_ns - phase.start_ns for phase in phases) == length_ns
    assert [phase.name for phase in phases] == NAMES[: len(phases)]
    left_out = begun[len(phases) :]
    assert not left_out or left_out[0].at_ns >= end_ns


def test_phases_that_are_in_order_begin_when_they_began():
    begun = [Begun("tokenize", 10), Begun("submit", 12, {"a": 1}), Begun("queue", 15), Begun("reply", 30)]
    assert tiled(begun, 10, 40) == [
        ("tokenize", 10, 12, {}),
        ("submit", 12, 15, {"a": 1}),
        ("queue", 15, 30, {}),
        ("reply", 30, 40, {}),
    ]


def test_what_never_happened_is_no_phase():
    def names(has_ended=True, **times):
        return [(p.name, p.at_ns) for p in engine_phases(RequestTiming(**times), has_ended=has_ended)]

    assert names(arrived_ns=10, finished_ns=50) == [("queue", 10), ("reply", 50)]
    assert names(arrived_ns=10, scheduled_ns=20, finished_ns=50, has_ended=False) == [
        ("queue", 10),
        ("prefill", 20),
    ]
    assert names(arrived_ns=10, scheduled_ns=20, first_token_ns=30, finished_ns=50) == [
        ("queue", 10), ("prefill", 20), ("decode", 30), ("reply", 50)
    ]  # fmt: skip


@given(st.binary(min_size=8, max_size=8))
def test_phases_have_ids_of_their_own(request_id):
    ids = {request_id, *(phase_id(request_id, name) for name in NAMES)}
    assert len(ids) == len(NAMES) + 1
    assert {len(made) for made in ids} == {8}
