"""The table of cases is well formed, and leaves nothing of the contract out."""

from __future__ import annotations

from itertools import chain

import pytest
from google.protobuf import descriptor_pool, json_format, message_factory

from tests.conformance.calling import DEFINED
from tests.conformance.table import Case, for_run, groups

CASES = [(group, case) for group in groups() for case in group.cases]
SERVICES = {name: service for file in DEFINED for name, service in file.DESCRIPTOR.services_by_name.items()}


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60


def test_names_differ() -> None:
    names = [(group.name, case.name) for group, case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("method", "end"), [("input_type", "requests"), ("output_type", "messages")])
def test_messages_are_those_of_the_contract(method: str, end: str) -> None:
    """Also what is expected, so that a name that was misspelt in `vary` or `expect` is noticed."""
    for group, case in CASES:
        found = descriptor_pool.Default().FindMethodByName(case.method.replace("/", "."))
        kind = message_factory.GetMessageClass(getattr(found, method))
        messages = case.requests if end == "requests" else _without_varying(case)
        for message in for_run(list(messages), "run"):
            json_format.ParseDict(message, kind())
        if end == "requests" and not found.client_streaming:
            assert len(case.requests) == 1, (group.name, case.name)


def _without_varying(case: Case) -> list[dict[str, object]]:
    """The expected messages without the values at the ends of `vary`, which may be anything."""
    ends = {path.split(".")[-1] for path in case.vary}

    def cut(value: object) -> object:
        if isinstance(value, dict):
            return {name: cut(part) for name, part in value.items() if name not in ends}
        return [cut(part) for part in value] if isinstance(value, list) else value

    return [cut(message) for message in case.expect.get("messages", [])]  # type: ignore[misc]


def test_every_method_is_called() -> None:
    called = {case.method for _, case in CASES}
    there = chain.from_iterable(
        (f"{service.full_name}/{method.name}" for method in service.methods) for service in SERVICES.values()
    )
    assert (
        sorted(set(there) - called - {"grpc.health.v1.Health/List"}) == []
    )  # which grpc-java does not know yet
