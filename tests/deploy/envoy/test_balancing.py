"""Envoy between servers: who gets calls, and what its page of health says. The servers are stand-ins."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from grpc_health.v1 import health_pb2

from tests.deploy.envoy.running import envoy, health_of, wait_until
from tests.deploy.envoy.stand_in import Server
from tests.deploy.programs import program

pytestmark = pytest.mark.sweep


def answered_by(address: str) -> str:
    headers = {"content-type": "application/json"}
    request = Request(f"http://{address}/penstock.v1.InferenceService/Generate", b"{}", headers)
    with urlopen(request, timeout=60) as reply:
        return str(json.load(reply)["model"])


def test_the_page_of_health_says_whether_a_server_takes_requests(tmp_path: Path) -> None:
    program("envoy")
    server = Server("a")
    with server.serving() as address, envoy(tmp_path, address) as front:
        wait_until(lambda: health_of(front) == 200, lambda: health_of(front))
        server.say(health_pb2.HealthCheckResponse.NOT_SERVING)
        wait_until(lambda: health_of(front) == 503, lambda: health_of(front))
        server.say(health_pb2.HealthCheckResponse.SERVING)
        wait_until(lambda: health_of(front) == 200, lambda: health_of(front))


def test_a_server_that_is_about_to_end_is_passed_over(tmp_path: Path) -> None:
    """Before Envoy learns by health that it is: each of its refusals is a call for the other one."""
    program("envoy")
    ending, staying = Server("ending", is_draining=True), Server("staying")
    with ending.serving() as first, staying.serving() as second, envoy(tmp_path, first, second) as front:
        wait_until(lambda: health_of(front) == 200, lambda: health_of(front))
        assert {answered_by(front) for _ in range(40)} == {"staying"}
    assert ending.calls > 0


def test_a_server_that_is_not_healthy_gets_no_calls(tmp_path: Path) -> None:
    program("envoy")
    ill, well = Server("ill"), Server("well")
    ill.say(health_pb2.HealthCheckResponse.NOT_SERVING)
    with ill.serving() as first, well.serving() as second, envoy(tmp_path, first, second) as front:
        wait_until(lambda: health_of(front) == 200, lambda: health_of(front))
        assert {answered_by(front) for _ in range(40)} == {"well"}
    assert ill.calls == 0
