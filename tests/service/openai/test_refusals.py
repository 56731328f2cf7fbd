"""Refusals are worded as OpenAI's API words them, and name the field as it stands in the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import grpc
import pytest
from starlette.requests import Request
from starlette.responses import Response

from penstock.client import (
    InvalidRequest,
    PenstockClientError,
    PromptTooLong,
    Unauthenticated,
    Unsupported,
)
from penstock.client.status import StatusDetails, Violation
from penstock.openai.endpoints import Endpoint
from penstock.openai.failures import of_client_error
from penstock.openai.reading import read_body
from penstock.openai.replying import json_response
from penstock.openai.schemas import base
from tests.service.openai.rig import front_rig


class Part(base.Body):
    kind: Literal["text"]
    text: str = ""


class Read(base.RequestBody):
    unsupported: ClassVar[Mapping[str, str]] = {"parts.audio": "it is text", "verbosity": "say it"}

    model: str
    num: int | None = None
    parts: str | list[Part] = ""


async def read(request: Request) -> Response:
    return json_response((await read_body(request, Read)).model_dump())


ENDPOINTS = (Endpoint("POST", "/read", read, "Reads.", Read),)


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"),
    [
        ({"model": None}, "model", "missing_required_parameter", "Missing required parameter: 'model'."),
        ({"foo": 1}, "foo", "unknown_parameter", "Unknown parameter: 'foo'."),
        (
            {"verbosity": "low"},
            "verbosity",
            "unsupported_parameter",
            "Unsupported parameter: 'verbosity': say it.",
        ),
        (
            {"num": "1"},
            "num",
            "invalid_type",
            "Invalid type for 'num': must be a valid integer.",
        ),
        ({"num": True}, "num", "invalid_type", "Invalid type for 'num': must be a valid integer."),
        (
            {"parts": [{"kind": "text"}, {"kind": "image"}]},
            "parts[1].kind",
            "unsupported_value",
            "Unsupported value: 'parts[1].kind': must be 'text'.",
        ),
        (
            {"parts": [{"kind": "text", "audio": {}}]},
            "parts[0].audio",
            "unsupported_parameter",
            "Unsupported parameter: 'parts[0].audio': it is text.",
        ),
    ],
)
async def test_bodies(fields: dict[str, Any], param: str, code: str, message: str) -> None:
    async with front_rig(endpoints=ENDPOINTS) as rig:
        reply = await rig.http.post("/read", json={"model": "m", **fields})
    assert reply.status_code == 400
    assert reply.json() == {
        "error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    }


def error_of(kind: type[PenstockClientError], *violations: Violation, **metadata: str) -> PenstockClientError:
    details = StatusDetails(
        grpc.StatusCode.INVALID_ARGUMENT, "the server's words", "REASON", tuple(metadata.items()), violations
    )
    return kind(details)


@pytest.mark.parametrize(
    ("error", "param", "message"),
    [
        (
            error_of(PromptTooLong, prompt_tokens="2100", max_prompt_tokens="2047"),
            "messages",
            (
                "This model's maximum context length is 2048 tokens. However, your prompt is too long: "
                "2100 tokens > 2047 maximum, because one at least must be left to generate."
            ),
        ),
        (
            error_of(
                InvalidRequest, Violation("sampling.top_p", "is 2"), Violation("chat.tools[1].name", "is no")
            ),
            "top_p",
            "Invalid value for 'top_p': is 2; Invalid value for 'tools[1].name': is no",
        ),
        (
            error_of(Unsupported, field="sampling.top_p,priority"),
            "top_p",
            "Unsupported parameter: 'top_p', 'priority': the server's words",
        ),
    ],
)
def test_errors_of_the_server(error: PenstockClientError, param: str, message: str) -> None:
    params = {"input": "messages", "sampling.top_p": "top_p", "chat.tools": "tools"}
    told = of_client_error(error, params)
    assert (told.status, told.param, told.message) == (400, param, message)


def test_a_wrong_key_is_told_in_the_words_that_clients_look_for() -> None:
    told = of_client_error(error_of(Unauthenticated), {})
    assert (told.status, told.code) == (401, "invalid_api_key")
    assert told.message == "Incorrect API key provided: the server's words"
