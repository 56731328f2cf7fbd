"""JSON over HTTP, through the real Envoy."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.client import Client
from tests.deploy.envoy.running import Gateway
from tests.deploy.files import ROOT
from tests.deploy.programs import program
from tests.docs.pages import Block, blocks
from tests.docs.shell import commands

PAGE = ROOT / "docs" / "how-to" / "http.md"
GENERATE, STREAM, ABORT = (f"penstock.v1.InferenceService/{name}" for name in ("Generate", "Stream", "Abort"))
PROMPT = {"prompt": "Once upon a time", "stopping": {"max_tokens": 12}, "sampling": {"temperature": 0}}

pytestmark = pytest.mark.sweep


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        """The reason of a refusal."""
        (info,) = (one for one in self.json["details"] if one["@type"].endswith("/google.rpc.ErrorInfo"))
        assert info["domain"] == "penstock"
        return str(info["reason"])


def post(gateway: Gateway, path: str, message: Any, headers: Mapping[str, str] | None = None) -> Reply:
    sent = gateway.authorization if headers is None else headers
    connection = http.client.HTTPConnection(gateway.address, timeout=120)
    try:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        connection.request("POST", f"/{path}", body, {"content-type": "application/json", **sent})
        reply = connection.getresponse()
        return Reply(reply.status, reply.read())
    finally:
        connection.close()


def test_generate_answers_what_it_answers_over_grpc(gateway: Gateway) -> None:
    reply = post(gateway, GENERATE, PROMPT)
    assert reply.status == 200
    (output,) = reply.json["outputs"]
    with Client(gateway.server, token=gateway.key) as client:
        wanted = client.generate("Once upon a time", max_tokens=12, temperature=0)
    assert (output["text"], tuple(output["tokenIds"])) == (wanted.text, wanted.outputs[0].token_ids)


def test_a_stream_is_a_line_for_each_message(gateway: Gateway) -> None:
    reply = post(gateway, STREAM, PROMPT)
    events = [json.loads(line) for line in reply.body.decode().splitlines()]
    assert [next(iter(event)) for event in (events[0], *events[-2:])] == ["started", "finished", "summary"]
    text = "".join(event["delta"]["text"] for event in events[1:-2])
    assert text == post(gateway, GENERATE, PROMPT).json["outputs"][0]["text"]


def test_a_stream_comes_while_it_is_made(gateway: Gateway) -> None:
    """The request can be ended by the id in its first line, so that line was here before the last token."""
    headers = {"content-type": "application/json", **gateway.authorization}
    endless = {"prompt": "x", "stopping": {"min_tokens": 2000}, "sampling": {"n": 64}}
    with contextlib.closing(http.client.HTTPConnection(gateway.address, timeout=120)) as connection:
        connection.request("POST", f"/{STREAM}", json.dumps(endless), headers)
        reply = connection.getresponse()
        started = json.loads(reply.readline())["started"]
        ended = post(gateway, ABORT, {"requestIds": {"ids": [started["requestId"]]}})
        rest = reply.read().decode()
    assert ended.status == 200, ended
    assert "FINISH_REASON_ABORTED" in rest


def test_a_refusal_has_its_status_and_all_its_details(gateway: Gateway) -> None:
    for method in (GENERATE, STREAM):
        reply = post(gateway, method, {"prompt": "x", "sampling": {"top_p": 7, "temperature": -1}})
        assert (reply.status, reply.reason) == (400, "INVALID_FIELD")
        (bad,) = (one for one in reply.json["details"] if one["@type"].endswith("/google.rpc.BadRequest"))
        fields = {violation["field"] for violation in bad["fieldViolations"]}
        assert fields == {"sampling.temperature", "sampling.top_p"}


@pytest.mark.parametrize(
    ("path", "message", "status", "reason"),
    [
        (GENERATE, {"prompt": "x", "adapter": "mine"}, 501, "UNSUPPORTED_FEATURE"),
        (GENERATE, {"prompt": "x", "model": "another"}, 404, "UNKNOWN_MODEL"),
        ("penstock.v1.ControlService/Pause", {}, 501, "SERVED_ELSEWHERE"),
    ],
    ids=["feature", "model", "control"],
)
def test_reasons(gateway: Gateway, path: str, message: Any, status: int, reason: str) -> None:
    reply = post(gateway, path, message)
    assert (reply.status, reply.reason) == (status, reason)


def test_a_caller_without_a_key_is_told_so(gateway: Gateway) -> None:
    reply = post(gateway, GENERATE, PROMPT, {})
    assert (reply.status, reply.reason) == (401, "UNAUTHENTICATED")


def test_what_is_no_message_is_refused(gateway: Gateway) -> None:
    assert post(gateway, GENERATE, b'{"prompt": "x",').status == 400
    assert post(gateway, f"{GENERATE}?n=3", PROMPT).status == 400
    assert post(gateway, "penstock.v1.InferenceService/Nothing", {}).status == 404
    assert post(gateway, "grpc.reflection.v1.ServerReflection/ServerReflectionInfo", {}).status == 404


def test_envoy_drops_fields_that_are_not_in_the_contract(gateway: Gateway) -> None:
    """A limit of Envoy's that the page tells of. Should a newer Envoy refuse them, the page can say so."""
    assert post(gateway, GENERATE, {**PROMPT, "max_tokkens": 3}).status == 200
    assert "drops" in PAGE.read_text()


def test_large_messages_pass(gateway: Gateway) -> None:
    long_prompt = {"prompt": "word " * 1_200_000}
    assert post(gateway, GENERATE, long_prompt).reason == "PROMPT_TOO_LONG"
    much = {"prompt": "x", "stopping": {"min_tokens": 900, "max_tokens": 900}, "sampling": {"n": 16}}
    reply = post(gateway, GENERATE, {**much, "output": {"logprobs": 20}})
    assert len(reply.json["outputs"]) == 16
    assert len(reply.body) > 4 << 20  # what gRPC refuses by default


def test_health_as_json(gateway: Gateway) -> None:
    assert post(gateway, "grpc.health.v1.Health/Check", {"service": "liveness"}, {}).json == {
        "status": "SERVING"
    }


def test_a_browser_may_ask_from_the_origins_that_are_named(gateway: Gateway) -> None:
    allowed = {}
    for origin in ("http://localhost:3000", "http://elsewhere.example"):
        connection = http.client.HTTPConnection(gateway.address, timeout=60)
        headers = {"origin": origin, "access-control-request-method": "POST"}
        connection.request("OPTIONS", f"/{STREAM}", headers=headers)
        reply = connection.getresponse()
        allowed[origin] = reply.getheader("access-control-allow-origin")
        connection.close()
    assert allowed == {"http://localhost:3000": "http://localhost:3000", "http://elsewhere.example": None}


# -- the page --


def of_page(language: str) -> list[Block]:
    return [block for block in blocks() if block.page == PAGE and block.language == language]


def on(gateway: Gateway, source: str) -> str:
    """Return the source of a block, with the addresses and the key of this test."""
    return source.replace("127.0.0.1:8080", gateway.address).replace('"none"', f'"{gateway.key}"')


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_commands_of_the_page_work(gateway: Gateway, tmp_path: Path) -> None:
    program("curl")
    calls = [line for block in of_page("sh") for line in commands(block.source) if line.startswith("curl ")]
    assert len(calls) >= 4
    for call in calls:
        asked = re.sub(r"^curl ", f"curl -H 'authorization: Bearer {gateway.key}' --fail-with-body ", call)
        run(["bash", "-c", on(gateway, asked)], tmp_path)


def test_the_program_for_browsers_runs(gateway: Gateway, tmp_path: Path) -> None:
    (block,) = of_page("js")
    file = tmp_path / "program.mjs"
    file.write_text(on(gateway, block.source))
    assert len(run([str(program("node")), str(file)], tmp_path)) > 10
