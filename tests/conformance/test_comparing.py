"""The comparison finds every difference that a driver could make, and takes those for none that say nothing.

Each test begins with an answer that agrees, and changes one thing in it, as a driver with a defect would.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.comparing import agrees_with_table, compact, normal
from tests.conformance.table import Case, groups

CASES = [
    pytest.param(case, id=f"{group.name}: {case.name}", marks=[pytest.mark.ci] if place else [])
    for group in groups()
    for place, case in enumerate(group.cases)
]
"""`make test` has the first case of each group."""


def answer_of(case: Case) -> dict[str, Any]:
    """Return what a driver prints that agrees with the table."""
    return {"messages": [], **copy.deepcopy(dict(case.expect))}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all parts that have no parts of their own, but for those that may be anything."""
    parts: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    if not parts and value not in ({}, []):
        yield path
    for key, part in parts:
        yield from leaves(part, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def named(path: tuple[Any, ...], patterns: Any) -> bool:
    """Say whether one of the paths of `vary` or `near` leads to this part, or to what it is a part of."""
    for pattern in patterns:
        parts = pattern.split(".")
        if len(parts) <= len(path) and all(
            part in ("*", str(key)) for part, key in zip(parts, path, strict=False)
        ):
            return True
    return False


def other(value: Any) -> Any:
    """Nearly the same value."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value + 0.001 if isinstance(value, float) else value + "x"


def differs(case: Case, changed: Any) -> bool:
    """Say whether the changed answer differs from the table, and from the answer of another language."""
    try:
        agrees_with_table(case, normal(case, changed))
    except AssertionError:
        return compact(normal(case, changed)) != compact(normal(case, answer_of(case)))
    return False


@pytest.mark.parametrize("case", CASES)
def test_every_value_that_changes_is_found(case: Case) -> None:
    agrees_with_table(case, normal(case, answer_of(case)))
    for path in leaves(answer_of(case)):
        changed = answer_of(case)
        at(changed, path[:-1])[path[-1]] = other(at(changed, path))
        assert differs(case, changed) != named(path, case.vary), path


@pytest.mark.parametrize("case", CASES)
def test_every_value_that_is_missing_is_found(case: Case) -> None:
    """Also of those that vary: they have to be there."""
    for path in leaves(answer_of(case)):
        if named(path[:-1], case.vary):
            continue
        changed = answer_of(case)
        del at(changed, path[:-1])[path[-1]]
        assert differs(case, changed), path


@pytest.mark.parametrize("case", CASES)
def test_every_value_that_is_too_much_is_found(case: Case) -> None:
    changed = answer_of(case)
    changed["status"]["details"].append({"@type": "type.googleapis.com/google.rpc.Help"})
    assert differs(case, changed)
    for index, message in enumerate(case.expect.get("messages", [])):
        changed = answer_of(case)
        changed["messages"].insert(index, copy.deepcopy(message))
        assert differs(case, changed), index


STREAM = Case(name="stream", method="", expect={})
A = {"delta": {"text": "a", "tokenIds": [1]}}
B = {"delta": {"text": "b", "tokenIds": [2]}}
END = {"finished": {"finish": {"reason": "FINISH_REASON_EOS"}}}
OTHER = {"delta": {"index": 1, "text": "c", "tokenIds": [3]}}
STARTED: Any = {"started": {}}
SUMMARY: Any = {"summary": {}}


def compared(*messages: Any) -> str:
    return compact(normal(STREAM, {"messages": list(messages), "status": {}}))


def test_how_a_stream_is_cut_and_how_outputs_take_turns_says_nothing() -> None:
    joined = {"delta": {"text": "ab", "tokenIds": [1, 2]}}
    whole = compared(STARTED, joined, END, OTHER, SUMMARY)
    assert compared(STARTED, A, OTHER, B, END, SUMMARY) == whole
    assert compared(STARTED, OTHER, A, B, END, SUMMARY) == whole


@pytest.mark.parametrize(
    "messages",
    [
        (STARTED, B, A, END, OTHER, SUMMARY),
        (STARTED, A, END, B, OTHER, SUMMARY),
        (STARTED, A, B, OTHER, SUMMARY, END),
        (STARTED, A, B, END, OTHER),
        (STARTED, A, B, OTHER, SUMMARY),
        (A, STARTED, B, END, OTHER, SUMMARY),
        (STARTED, A, A, B, END, OTHER, SUMMARY),
        (STARTED, A, B, END, END, OTHER, SUMMARY),
        (STARTED, A, B, END, OTHER, SUMMARY, SUMMARY),
    ],
)
def test_messages_in_another_order_or_number_are_found(messages: Any) -> None:
    assert compared(*messages) != compared(STARTED, A, B, END, OTHER, SUMMARY)


def test_numbers_are_the_same_however_they_are_written() -> None:
    def written(**fields: Any) -> str:
        return compared({"message": fields})

    assert written(total=1) == written(total=1.0)
    assert written(logprob=-1.2345678) == written(logprob=-1.23456780000001)
    assert written(logprob=-1.2345678) != written(logprob=-1.234568)
    assert written(share=0.1) != written(share=0.1000000001)
    assert written(total="1") != written(total=1)
