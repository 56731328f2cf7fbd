"""Which operations take the device's time, from the trace that an engine's profile has. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
_DECODE = re.compile(r"jit_(window|decode|choice)")
"""The programs of decode steps: see `ProgramKey.name`."""
_CONTAINERS = frozenset({"while", "conditional", "cond", "call"})
"""Operations that last as long as those within them, which are in the trace too."""
_NUMBER = re.compile(r"([._]\d+)+$")


@dataclass(frozen=True, slots=True)
class Share:
    """All operations of one name and scope."""

    operation: str
    scope: str
    calls: int
    us: float


def device_events(events: Iterable[Event]) -> list[Event]:
    """Return the slices of operations on the device. On a GPU these are on the tracks of its streams; on a
    CPU they are on the tracks of threads, and name their program.
    """
    slices, processes, threads = [], {}, {}
    for event in events:
        if event["ph"] == "X":
            slices.append(event)
        elif event.get("name") == "process_name":
            processes[event["pid"]] = str(event["args"]["name"])
        elif event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = str(event["args"]["name"])
    on_streams = [
        each
        for each in slices
        if "/device:" in processes.get(each["pid"], "")
        and threads.get((each["pid"], each.get("tid")), "").lower().startswith("stream")
    ]
    if on_streams:
        return on_streams
    named = [each for each in slices if "hlo_op" in each.get("args", {})]
    return [each for each in named if _plain(each["name"]) not in _CONTAINERS]


def of_decode_steps(events: Iterable[Event]) -> list[Event]:
    """Return the events of the programs of decode steps; all events, if none says of which program it is."""
    given = list(events)
    chosen = [each for each in given if _DECODE.match(str(each.get("args", {}).get("hlo_module", "")))]
    return chosen or given


def shares(events: Iterable[Event]) -> list[Share]:
    """Sum up operations: those of the same name, but for a number at its end, and of the same scope are one
    line; what takes longest comes first.
    """
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        scope = str(event.get("args", {}).get("scope", ""))
        found[_plain(event["name"]), scope].append(float(event.get("dur", 0.0)))
    lines = [Share(name, scope, len(times), sum(times)) for (name, scope), times in found.items()]
    return sorted(lines, key=lambda line: -line.us)


def by_scope(lines: Iterable[Share]) -> list[Share]:
    """Return the same, added up by the first two parts of the scope: a piece of the model, or the sampler."""
    found: defaultdict[str, list[Share]] = defaultdict(list)
    for line in lines:
        found["/".join(line.scope.split("/")[:2])].append(line)
    sums = [
        Share("all", scope, sum(each.calls for each in those), sum(each.us for each in those))
        for scope, those in found.items()
    ]
    return sorted(sums, key=lambda line: -line.us)


def _plain(name: str) -> str:
    return _NUMBER.sub("", name)
