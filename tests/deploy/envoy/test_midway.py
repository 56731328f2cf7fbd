"""Streams that fail after they have begun, through the real Envoy."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from penstock.v1 import inference_pb2
from tests.deploy.envoy.grpc_web import call
from tests.deploy.envoy.running import envoy, health_of, wait_until
from tests.deploy.envoy.stand_in import FAILURE, Server
from tests.deploy.programs import program, run_program

STREAM = "penstock.v1.InferenceService/Stream"

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Envoy in front of a server whose streams fail."""
    program("envoy")
    with Server("a").serving() as server, envoy(tmp_path_factory.mktemp("envoy"), server) as address:
        wait_until(lambda: health_of(address) == 200, lambda: health_of(address))
        yield address


def json_stream(front: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Return what curl reads of a stream as JSON. What it says of headers and trailers is on stderr."""
    asked = ["--data", "{}", "--header", "content-type: application/json", f"http://{front}/{STREAM}"]
    done = run_program("curl", "--silent", "--verbose", *flags, *asked)
    assert json.loads(done.stdout) == {"started": {"model": "a"}}
    return done


def test_json_over_http_1_has_no_summary_and_nothing_else_that_tells(front: str) -> None:
    assert "grpc-status" not in json_stream(front, "--http1.1").stderr


def test_json_over_http_2_has_the_status_in_trailers(front: str) -> None:
    said = json_stream(front, "--http2-prior-knowledge").stderr
    assert "< grpc-status: 13" in said
    assert f"< grpc-message: {FAILURE}" in said


@pytest.mark.parametrize("text", [False, True], ids=["binary", "base64"])
def test_grpc_web_tells_the_reason_after_the_messages(front: str, text: bool) -> None:
    reply = call(front, STREAM, inference_pb2.StreamRequest(), text=text)
    (message,) = reply.messages
    assert inference_pb2.StreamResponse.FromString(message).started.model == "a"
    assert (reply.code, reply.status.message) == (13, FAILURE)
    assert b"ENGINE_FAILURE" in reply.status.details[0].value
