"""Brings what drivers print into one form, and compares it with the table and between languages.

README.md beside this file says what is brought into one form, and why.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from tests.conformance.table import Case

FLOATS = {"sampled", "logprob"}
"""Fields of the contract's type `float`, in lists or alone."""
TOLERANCE = 1e-4
VARIES = "(varies)"


def compact(value: Any) -> str:
    """Write a document in one line, with sorted keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def normal(case: Case, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Make a copy of a driver's answer in the form in which answers are compared."""
    made = {"messages": list(_merged(outcome["messages"])), "status": outcome["status"]}
    in_one_way: dict[str, Any] = _numbers(made)
    for path in case.vary:
        _mask(in_one_way, path.split("."))
    return in_one_way


def agrees_with_table(case: Case, answer: Mapping[str, Any]) -> None:
    """Raise AssertionError where the answer is not what the table expects."""
    expected = normal(case, {"messages": [], **case.expect})
    got = json.loads(json.dumps(answer))
    for path in case.near:
        _take_near(got, expected, path.split("."))
    assert _lines(got) == _lines(expected), case.name


def _lines(value: Any) -> list[str]:
    """Write a document in many lines, so that pytest shows the ones that differ."""
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False).splitlines()


def _merged(messages: Sequence[Any]) -> Iterator[Any]:
    """Yield the messages, where events of outputs that follow one another are sorted by output, and in each
    output deltas that follow one another are made one.
    """
    for are_of_outputs, run in groupby(messages, lambda message: isinstance(_of_output(message), dict)):
        consecutive = list(run)
        yield from _by_output(consecutive) if are_of_outputs else consecutive


def _of_output(message: Any) -> Any:
    return message.get("delta", message.get("finished"))


def _by_output(messages: Iterable[Any]) -> Iterator[Any]:
    outputs: dict[int, list[Any]] = {}
    for message in messages:
        event = _of_output(message)
        events = outputs.setdefault(event.get("index", 0), [])
        if "delta" in message and events and "delta" in events[-1]:
            events[-1] = {"delta": _added(events[-1]["delta"], event)}
        else:
            events.append(message)
    for index in sorted(outputs):
        yield from outputs[index]


def _added(one: Any, other: Any) -> Any:
    """Two deltas as one: texts and lists are appended to one another."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = {name: _added(one[name], other[name]) for name in one.keys() & other.keys()}
        return {**one, **other, **both}
    if isinstance(one, (str, list)):
        return one + other
    return other


def _numbers(value: Any, name: str = "") -> Any:
    """Return the document with each number written in one way, whatever the library that wrote it."""
    if isinstance(value, dict):
        return {key: _numbers(part, key) for key, part in value.items()}
    if isinstance(value, list):
        return [_numbers(part, name) for part in value]
    if isinstance(value, float) and math.isfinite(value):
        if name in FLOATS:
            value = struct.unpack("f", struct.pack("f", value))[0]
        return int(value) if value.is_integer() else value
    return value


def _mask(value: Any, path: Sequence[str]) -> None:
    """Put VARIES wherever the path leads. A path that leads nowhere changes nothing."""
    for place, key in _places(value, path):
        place[key] = VARIES


def _take_near(got: Any, expected: Any, path: Sequence[str]) -> None:
    """Put the expected numbers in the place of those that are nearly the same."""
    for (place, key), (source, _) in zip(_places(got, path), _places(expected, path), strict=False):
        if isinstance(place[key], (int, float)) and math.isclose(
            place[key], source[key], rel_tol=0, abs_tol=TOLERANCE
        ):
            place[key] = source[key]


def _places(value: Any, path: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """Each container and key that a path such as "messages.*.started.requestId" leads to."""
    head, rest = path[0], path[1:]
    keys: Sequence[Any] = []
    if isinstance(value, list):
        keys = range(len(value)) if head == "*" else [i for i in [int(head)] if i < len(value)]
    elif isinstance(value, dict):
        keys = list(value) if head == "*" else [head] if head in value else []
    for key in keys:
        if rest:
            yield from _places(value[key], rest)
        else:
            yield value, key
