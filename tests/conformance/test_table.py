"""The table of cases is well formed, and leaves nothing of the contract out."""

from __future__ import annotations

import re
from itertools import chain

import pytest
from google.protobuf import descriptor_pool, json_format, message_factory

from penstock.v1 import inference_pb2
from tests.conformance.calling import DEFINED
from tests.conformance.table import Case, for_run, groups
from tests.support.toolchains import ROOT

CASES = [(group, case) for group in groups() for case in group.cases]
UNREACHABLE = {
    "EXCEEDS_KV_CAPACITY": "the context that a server offers always fits its KV cache",
    "COSTLY_GRAMMAR": "it depends on how fast the machine is",
    "UNAVAILABLE": "all processes that compile grammars would have to be busy",
    "STALLED_SENDER": "a driver sends everything at once",
    "STALLED_READER": "a driver reads everything at once",
    "DRAINING": "a server that shuts down takes no new connections; the tests of the clients show it",
    "REQUEST_ABORTED": "it needs another caller while the call waits",
    "DRAIN_TIMEOUT": "requests would have to run for as long as a driver takes to start",
    "PAUSE_TAKEN_BACK": "it needs another caller while the call waits",
    "PROFILE_FAILED": "it needs a disk that is full",
    "GENERATION_FAILED": "it needs a fault",
    "ENGINE_DEAD": "a server whose engine has died ends",
    "GROUP_ENDED": "it needs a process that is lost",
    "INTERNAL": "it needs a bug",
}
"""Reasons that no case is answered with. Tests of the service have them."""
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
    """Return the expected messages without the values at the ends of `vary`, which may be anything."""
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


def test_every_reason_of_an_error_is_in_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    explained = set(re.findall(r"^\| ([A-Z_]+) \| [A-Z_]+ \|", page, re.M))
    details = [detail for _, case in CASES for detail in case.expect["status"]["details"]]
    found = {detail["reason"] for detail in details if "reason" in detail}
    assert found | UNREACHABLE.keys() == explained
    assert found.isdisjoint(UNREACHABLE)


def test_every_event_of_a_stream_is_in_the_table() -> None:
    events = {name for _, case in CASES for message in case.expect.get("messages", ()) for name in message}
    stream = inference_pb2.StreamResponse.DESCRIPTOR.oneofs_by_name["event"]
    assert {field.json_name for field in stream.fields} <= events
