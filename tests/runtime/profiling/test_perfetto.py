"""What becomes of the profiler's events on their way to Perfetto. The traces are written by hand."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.profiling.operations import MalformedTrace, Operation
from penstock.runtime.profiling.perfetto import Event, events_of, improve, improved, write_trace

MODEL = Operation("model/mlp", "", is_container=False)
KERNEL = Operation("model/attention", "penstock_attention", is_container=False)
SAMPLER = Operation("sampler", "", is_container=False)
LOOP = Operation("model", "", is_container=True)
OPERATIONS = {
    ("jit_window", "add.1"): MODEL,
    ("jit_window", "ffi_call.2"): KERNEL,
    ("jit_window", "draw.3"): SAMPLER,
    ("jit_window", "while.4"): LOOP,
}


def operation(op: str, ts: float, dur: float, *, run: str = "7", tid: int = 900) -> Event:
    args = {"hlo_op": op, "hlo_module": "jit_window", "run_id": run, "_src": "thunk.cc"}
    return {"ph": "X", "pid": 701, "tid": tid, "ts": ts, "dur": dur, "name": op, "args": args}


def slices(events: list[Event], name: str) -> list[tuple[float, float]]:
    """When the slices of this name begin and end."""
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["name"] == name]


def run(*events: Event) -> list[Event]:
    copies: list[Event] = json.loads(json.dumps(events))
    return list(improved(copies, OPERATIONS))


def test_model_and_sampler_get_tracks_of_their_own() -> None:
    """Two steps of a window, on two threads; the loop lasts as long as both and makes no slice."""
    made = run(
        operation("while.4", 0.0, 100.0),
        operation("add.1", 1.0, 4.0),
        operation("ffi_call.2", 5.0, 6.0, tid=901),
        operation("draw.3", 12.0, 3.0),
        operation("add.1", 20.0, 4.0),
        operation("ffi_call.2", 24.0, 6.0),
        operation("draw.3", 30.0, 3.0),
    )
    assert slices(made, "model") == [(1.0, 11.0), (20.0, 30.0)]
    assert slices(made, "sampler") == [(12.0, 15.0), (30.0, 33.0)]
    tracks = {e["args"]["name"]: e["tid"] for e in made if e["name"] == "thread_name"}
    assert set(tracks) == {"model", "sampler"}
    assert {e["tid"] for e in made if e["name"] == "model"} == {tracks["model"]}
    assert tracks["model"] not in (tracks["sampler"], 900, 901)


def test_slices_of_two_calls_are_not_joined() -> None:
    made = run(operation("add.1", 1.0, 2.0, run="1"), operation("add.1", 4.0, 2.0, run="2"))
    assert slices(made, "model") == [(1.0, 3.0), (4.0, 6.0)]


def test_operations_say_what_they_are() -> None:
    made = run(operation("ffi_call.2", 1.0, 2.0), operation("copy.8", 4.0, 1.0))
    kernel, copy = made[:2]
    assert (kernel["name"], kernel["args"]["scope"]) == ("penstock_attention", "model/attention")
    assert kernel["args"]["hlo_op"] == "ffi_call.2"
    assert (copy["name"], "scope" in copy["args"], "_src" in copy["args"]) == ("copy.8", False, False)


def test_the_engines_thread_gets_its_name_and_marks_of_ends_go() -> None:
    def thread(tid: int) -> Event:
        return {"ph": "M", "pid": 701, "tid": tid, "name": "thread_name", "args": {"name": "python"}}

    def slice_of(tid: int, name: str) -> Event:
        return {"ph": "X", "pid": 701, "tid": tid, "ts": 1.0, "dur": 1.0, "name": name}

    made = run(thread(5), thread(6), slice_of(5, "schedule"), slice_of(6, "other"), slice_of(6, "end: add.1"))
    assert {e["tid"]: e["args"]["name"] for e in made if e["ph"] == "M"} == {
        5: "penstock-engine",
        6: "python",
    }
    assert [e["name"] for e in made if e["ph"] == "X"] == ["schedule", "other"]


def test_events_are_read_one_by_one() -> None:
    """As JAX writes them: other members before, and an empty event last."""
    events: list[Any] = [{"ph": "M", "name": 'a]"{'}, {"ph": "X", "args": {"b": [1, {"c": 2}]}}]
    text = json.dumps({"metadata": {"x": [1]}, "traceEvents": [*events, {}]}, separators=(",", ":"))
    assert list(events_of(text)) == events
    written = io.StringIO()
    write_trace(written, events)
    assert json.loads(written.getvalue()) == {"displayTimeUnit": "ns", "traceEvents": events}
    for damaged in ("{}", text[: len(text) // 2], '{"traceEvents":[nonsense]}'):
        with pytest.raises(MalformedTrace):
            list(events_of(damaged))


def test_files_that_are_not_the_profilers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MalformedTrace, match="0 files"):
        improve(tmp_path)
    with gzip.open(tmp_path / "a.trace.json.gz", "wt") as file:
        file.write('{"traceEvents":[]}')
    (tmp_path / "a.xplane.pb").write_bytes(b"")
    assert json.loads(gzip.decompress(improve(tmp_path).read_bytes()))["traceEvents"] == []
    assert not (tmp_path / "a.trace.json.gz").exists()
