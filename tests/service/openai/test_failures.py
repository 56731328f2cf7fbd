"""The table from the errors of the contract to those of HTTP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.client import error_table
from penstock.client.errors import PenstockClientError, UnavailableError
from penstock.client.status import StatusDetails, Violation
from penstock.openai.failures import error_response, of_client_error


def failed(reason: str, code: grpc.StatusCode, **details: Any) -> PenstockClientError:
    kind = error_table.BY_REASON.get(reason) or error_table.BY_CODE.get(code, PenstockClientError)
    return kind(StatusDetails(code, "the message", reason, **details))


ERRORS = re.findall(
    r"^\| ([A-Z_]+) \| ([A-Z_]+) \|",
    (Path(__file__).parents[3] / "docs/reference/errors.md").read_text(),
    re.MULTILINE,
)
STATUSES = {
    "INVALID_ARGUMENT": {400},
    "UNIMPLEMENTED": {501},
    "ALREADY_EXISTS": {409},
    "NOT_FOUND": {404, 400},
    "ABORTED": {409},
    "FAILED_PRECONDITION": {409},
    "UNAUTHENTICATED": {401},
    "PERMISSION_DENIED": {403},
    "RESOURCE_EXHAUSTED": {429, 413, 408},
    "UNAVAILABLE": {503},
    "DEADLINE_EXCEEDED": {504},
    "INTERNAL": {500},
    "DATA_LOSS": {400},
}


@pytest.mark.parametrize(("reason", "code"), ERRORS)
def test_every_reason_of_the_contract_has_its_status(reason: str, code: str) -> None:
    error = failed(reason, grpc.StatusCode[code])
    told = of_client_error(error, {})
    assert told.status in STATUSES[code]
    assert "the message" in told.message or reason == "PROMPT_TOO_LONG"
    assert told.code
    assert told.code == told.code.lower()
    if told.status in (429, 503):
        assert told.retry_after, "clients are told when to come back"
    assert isinstance(error, UnavailableError) == (told.status in (429, 503))


def test_violations_have_the_names_of_http_fields() -> None:
    error = failed(
        "INVALID_FIELD",
        grpc.StatusCode.INVALID_ARGUMENT,
        violations=(Violation("chat.messages[3].content", "is empty"), Violation("sampling.top_p", "is 2")),
    )
    told = of_client_error(error, {"chat.messages": "messages", "chat.messages[3]": "input[5]"})
    assert told.param == "input[5].content"
    assert "'input[5].content': is empty" in told.message
    assert "'sampling.top_p': is 2" in told.message


def test_the_wait_is_rounded_up() -> None:
    error = failed("QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=1.2)
    headers = error_response(of_client_error(error, {})).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1200")
