"""Makes of what JAX's profiler writes a trace that is easy to read in Perfetto.

JAX's own trace.json.gz says neither which operations are the model's and which the sampler's, nor which
native kernel a call runs, and it names all of Python's threads alike. This adds:

- the tracks "model" and "sampler", on which a slice covers operations that follow each other;
- for each operation its scope, such as "model/attention", and for each native kernel its name;
- the name of the engine's thread.

It leaves out the marks "end: X", half of all events, which say nothing that the slice X does not say.

It imports the standard library only, because it runs in a process of its own. Events are handled one at a
time, so that a large trace needs little memory.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from penstock.runtime.profiling.operations import PARTS, MalformedTrace, Operation, read_operations

TRACE_FILE = "perfetto_trace.json.gz"
ENGINE_PARTS = ("schedule", "pack", "dispatch", "wait", "emit")
"""The annotations of the engine's thread."""
ENGINE_THREAD = "penstock-engine"

Event = dict[str, Any]
_EVENTS = '"traceEvents":['
_PROGRAM = re.compile(r'"hlo_module":\s*("(?:[^"\\]|\\.)*")')
"""Matches the name of an operation's program, as JSON."""


class _Piece(NamedTuple):
    """One operation of a part, on the way to a track."""

    pid: int
    run: str
    """Which call of which program, on which device."""
    begin_us: float
    end_us: float
    part: str


def improve(folder: Path) -> Path:
    """Read the profiler's files below `folder`, and replace its trace.json.gz by TRACE_FILE in `folder`,
    which is returned. MalformedTrace if the files are not of the form that is known.
    """
    raw, xplane = _only(folder, "*.trace.json.gz"), _only(folder, "*.xplane.pb")
    with gzip.open(raw, "rt", encoding="utf-8") as file:
        text = file.read()
    programs = {json.loads(name) for name in set(_PROGRAM.findall(text))}
    operations = read_operations(xplane.read_bytes(), programs)
    result = folder / TRACE_FILE
    with gzip.open(result, "wt", encoding="utf-8", compresslevel=5) as file:
        write_trace(file, improved(events_of(text), operations))
    raw.unlink()
    return result


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.rglob(pattern))
    if len(found) != 1:
        raise MalformedTrace(f"the profiler has written {len(found)} files {pattern}, not one")
    return found[0]


def events_of(text: str) -> Iterator[Event]:
    """Yield the events of a trace in Chrome's JSON format, in order. MalformedTrace."""
    at = text.find(_EVENTS)
    if at < 0:
        raise MalformedTrace("the trace has no events")
    at += len(_EVENTS)
    decoder = json.JSONDecoder()
    while at < len(text) and text[at] != "]":
        try:
            event, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise MalformedTrace(f"the trace is no JSON: {error}") from None
        if isinstance(event, dict) and event.get("ph"):  # the profiler's last event is empty
            yield event
        if text[at : at + 1] == ",":
            at += 1


def improved(events: Iterable[Event], operations: Mapping[tuple[str, str], Operation]) -> Iterator[Event]:
    """Yield the events, with what this module adds."""
    pieces: list[_Piece] = []
    threads: dict[tuple[int, int], Event] = {}
    engine_threads: set[tuple[int, int]] = set()
    for event in events:
        name = event.get("name", "")
        if event["ph"] == "M" and name == "thread_name":
            threads[event["pid"], event["tid"]] = event
            continue
        if name.startswith("end: "):
            continue
        if name in ENGINE_PARTS:
            engine_threads.add((event["pid"], event["tid"]))
        piece = _explain(event, operations)
        if piece is not None:
            pieces.append(piece)
        yield event
    for key, event in threads.items():
        if key in engine_threads:
            event["args"] = {"name": ENGINE_THREAD}
        yield event
    yield from _tracks(pieces)


def _explain(event: Event, operations: Mapping[tuple[str, str], Operation]) -> _Piece | None:
    """Add to the event of an operation what it is for."""
    args = event.get("args")
    if args is None:
        return None
    args.pop("_src", None)  # the line of XLA's code that recorded it
    operation = operations.get((args.get("hlo_module", ""), args.get("hlo_op", "")))
    if operation is None:
        return None
    if operation.scope:
        args["scope"] = operation.scope
    if operation.target:
        event["name"] = operation.target
    if event["ph"] != "X" or not operation.part:
        return None
    run = f"{args['hlo_module']} {args.get('run_id', '')} {args.get('device_ordinal', '')}"
    return _Piece(event["pid"], run, event["ts"], event["ts"] + event.get("dur", 0.0), operation.part)


def _tracks(pieces: list[_Piece]) -> Iterator[Event]:
    """Yield a track for each part: a slice goes on until an operation of the other part, or of another call,
    has begun.
    """
    pieces.sort(key=lambda piece: (piece.pid, piece.run, piece.begin_us))
    named: set[tuple[int, str]] = set()
    at = 0
    while at < len(pieces):
        first = pieces[at]
        end_us = first.end_us
        while at < len(pieces) and (pieces[at].pid, pieces[at].run, pieces[at].part) == (
            first.pid,
            first.run,
            first.part,
        ):
            end_us = max(end_us, pieces[at].end_us)
            at += 1
        tid = 1 + PARTS.index(first.part)
        if (first.pid, first.part) not in named:
            named.add((first.pid, first.part))
            yield _metadata(first.pid, tid, "thread_name", {"name": first.part})
            yield _metadata(first.pid, tid, "thread_sort_index", {"sort_index": tid - len(PARTS) - 1})
        yield {
            "ph": "X",
            "pid": first.pid,
            "tid": tid,
            "ts": first.begin_us,
            "dur": end_us - first.begin_us,
            "name": first.part,
            "args": {"hlo_module": first.run.partition(" ")[0]},
        }


def _metadata(pid: int, tid: int, name: str, args: Event) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def write_trace(file: TextIO, events: Iterable[Event]) -> None:
    """Write events in Chrome's JSON format, which Perfetto reads."""
    file.write('{"displayTimeUnit":"ns","traceEvents":[')
    separator = "\n"
    for event in events:
        file.write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"
    file.write("\n]}\n")
