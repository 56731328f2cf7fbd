"""What every request to the front has, whatever its endpoint: an id, a key, a trace, an origin, a status."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from penstock.openai import app
from penstock.openai.counts import Meters
from penstock.openai.endpoints import Endpoint
from penstock.shared.logs import JsonLines, OneLine
from tests.service.key_rig import key, write
from tests.service.openai.rig import front_rig, fronting
from tests.service.openai.test_replying import ENDPOINTS
from tests.service.rig import WAIT_S, fake, serving, until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


async def test_the_callers_id_is_in_the_headers_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with front_rig(endpoints=ENDPOINTS) as rig:
        sent = {"x-request-id": "mine-1", "traceparent": PARENT}
        reply = await rig.http.post("/whole", json={"prompt": "secret", "max_tokens": 1}, headers=sent)
        assert reply.headers["x-request-id"] == "mine-1"
        (seen,) = rig.engine.seen
        number = seen.request_id.removeprefix("test-")
        (line,) = [record for record in caplog.records if record.name == "penstock.openai.access"]
        text = OneLine().format(line)
        assert "POST /whole: 200 after" in text
        assert f"request 'mine-1', number {number}, trace {TRACE}" in text
        assert "secret" not in text
        fields = json.loads(JsonLines().format(line))
        assert (fields["request_id"], fields["trace_id"]) == ("mine-1", TRACE)
        assert fields["number"] == number


TOO_MUCH = {"model": "fake", "prompt": "a", "x" * 500: 1}


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/chat/completions", {"model": "fake"}, 400, "missing_required_parameter", "messages"),
        ("/v1/responses", {"model": "fake", "input": "a", "nobodys": 1}, 400, "unknown_parameter", "nobodys"),
        ("/v1/completions", {"model": "fake", "prompt": "a", "top_p": 2}, 400, "invalid_value", "top_p"),
        (
            "/v1/completions",
            TOO_MUCH,
            400,
            "unknown_parameter",
            "x" * 100,
        ),
        ("/v1/nothing", {}, 404, "unknown_url", None),
        ("/streamed", {"prompt": "a"}, 200, "timeout", None),
    ],
)
async def test_the_log_and_the_metrics_say_why_a_request_failed(
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
    status: int,
    code: str,
    param: str | None,
) -> None:
    """The last one fails when its reply has begun."""
    caplog.set_level(logging.INFO)
    settings = {"request_timeout_s": 0.3}
    async with front_rig(fake(hold=True), endpoints=ENDPOINTS, settings=settings) as rig:
        rig.engine.step(2)
        reply = await rig.http.post(path, json=body)
        assert reply.status_code == status
        assert f'"code":"{code}"' in reply.text
        page = (await rig.http.get("/metrics")).text
    (line,) = [record for record in caplog.records if record.name == "penstock.openai.access"]
    fields = json.loads(JsonLines().format(line))
    assert (fields["status"], fields["code"], fields.get("param")) == (status, code, param)
    assert OneLine().format(line).endswith(f", code {code}" + (f", field '{param}'" if param else ""))
    endpoint = "other" if status == 404 else path
    assert f'requests_total{{code="{code}",endpoint="{endpoint}",status="{status}"}} 1.0' in page
    assert "nobodys" not in page


def test_the_metrics_bound_the_codes() -> None:
    """Codes come from the server, too, so nothing here bounds them otherwise."""
    meters = Meters()
    for i in range(1000):
        meters.count("/health", 503, f"code_{i}")
    counts = [line for line in meters.page().decode().splitlines() if "requests_total{" in line]
    assert len(counts) == 101
    assert 'penstock_openai_requests_total{code="other",endpoint="/health",status="503"} 900.0' in counts


@pytest.mark.parametrize("sent", ["", "two words", "x" * 129])
async def test_an_id_that_is_none_is_replaced(sent: str) -> None:
    async with front_rig() as rig:
        reply = await rig.http.get("/health", headers={"x-request-id": sent})
        assert re.fullmatch("req-[0-9a-f]{32}", reply.headers["x-request-id"])


def metadata_of(monkeypatch: pytest.MonkeyPatch, rig: Any) -> list[dict[str, str]]:
    """Return the metadata of each RPC that the front makes from now on."""
    found: list[dict[str, str]] = []
    client = rig.front.backend.client
    sent = client._sent

    def noting(metadata: Any) -> Any:
        found.append(dict(metadata))
        return sent(metadata)

    monkeypatch.setattr(client, "_sent", noting)
    return found


async def test_key_and_trace_go_on_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async with front_rig() as rig:
        found = metadata_of(monkeypatch, rig)
        headers = {"authorization": "Bearer abc", "traceparent": PARENT, "tracestate": "a=b", "cookie": "no"}
        await rig.http.get("/v1/models", headers=headers)
        await rig.http.get("/v1/models", headers={"traceparent": "00-" + "0" * 32 + "-00f067aa0ba902b7-01"})
        assert found == [
            {"authorization": "Bearer abc", "traceparent": PARENT, "tracestate": "a=b"},
            {},
        ]


async def test_keys_are_the_servers(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.json", [key("one"), key("slow", requests_per_minute=1)])
    async with front_rig(fake(), endpoints=ENDPOINTS, keys=keys) as rig:
        for path in ("/v1/models", "/v1/models/fake"):
            refused = await rig.http.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
        allowed = {"authorization": "Bearer psk_one"}
        assert (await rig.http.get("/v1/models", headers=allowed)).status_code == 200
        # What is known by now is told to nobody else.
        assert (await rig.http.get("/v1/models")).status_code == 401
        body = {"prompt": "a", "max_tokens": 1}
        assert (await rig.http.post("/whole", json=body)).status_code == 401
        slow = {"authorization": "Bearer psk_slow"}
        assert (await rig.http.post("/whole", json=body, headers=slow)).status_code == 200
        limited = await rig.http.post("/streamed", json=body, headers=slow)
        assert (limited.status_code, limited.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(limited.headers["retry-after"]) <= 60
        assert int(limited.headers["retry-after-ms"]) > 0
        assert (await rig.http.get("/health")).status_code == 200


@pytest.mark.parametrize("sent", [b"Bearer \xe9", b"Bearer " + b"a" * 5000], ids=["not ASCII", "long"])
async def test_a_key_that_cannot_be_sent_on_is_not_replaced_by_the_fronts(
    tmp_path: Path, sent: bytes
) -> None:
    keys = write(tmp_path / "keys.json", [key("one")])
    async with front_rig(fake(), settings={"token": "psk_one"}, keys=keys) as rig:
        assert (await rig.http.get("/v1/models")).status_code == 200
        refused = await rig.http.get("/v1/models", headers={b"authorization": sent})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_a_body_that_is_compressed_is_refused_as_such() -> None:
    async with front_rig(endpoints=ENDPOINTS) as rig:
        for coding, status in (("gzip", 415), ("identity", 200)):
            reply = await rig.http.post("/whole", json={"prompt": "a"}, headers={"content-encoding": coding})
            assert reply.status_code == status
            assert status == 200 or "'gzip'" in reply.json()["error"]["message"]


async def test_pages_of_other_origins_may_call_only_if_that_is_allowed() -> None:
    asked = {
        "origin": "https://example.org",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    async with front_rig() as rig:
        refused = await rig.http.options("/v1/chat/completions", headers=asked)
        got = await rig.http.get("/health", headers={"origin": "https://example.org"})
        for reply in (refused, got):
            assert not [name for name in reply.headers if name.startswith("access-control")]
    async with front_rig(settings={"cors_origins": ("https://example.org",)}) as rig:
        allowed = await rig.http.options("/v1/chat/completions", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://example.org"
        assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
        got = await rig.http.get("/health", headers={"origin": "https://example.org"})
        assert "x-request-id" in got.headers["access-control-expose-headers"]
        other = await rig.http.get("/health", headers={"origin": "https://example.com"})
        assert "access-control-allow-origin" not in other.headers


async def test_no_server_is_503_until_there_is_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with (
        fronting(f"127.0.0.1:{port}") as (_, _, url),
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        reply = await http.get("/v1/models")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unreachable")
        assert reply.headers["retry-after"] == "1"
        assert (await http.get("/health")).status_code == 503
        async with serving(port=port), asyncio.timeout(WAIT_S):
            while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            assert (await http.get("/v1/models")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 503


async def test_a_request_that_takes_too_long_is_504() -> None:
    async with front_rig(fake(hold=True), endpoints=ENDPOINTS, settings={"request_timeout_s": 0.3}) as rig:
        for path in ("/whole", "/streamed"):
            reply = await rig.http.post(path, json={"prompt": "a"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")
            assert reply.headers["x-should-retry"] == "false"
        await until(lambda: rig.engine.load().num_running == 0)


async def test_a_defect_is_500_and_says_nothing() -> None:
    async def broken(_: Request) -> Response:
        raise ValueError("an internal secret")

    endpoints = (Endpoint("GET", "/broken", broken, "Fails."), *app.ENDPOINTS)
    async with front_rig(endpoints=endpoints) as rig:
        reply = await rig.http.get("/broken")
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal")
        assert "secret" not in reply.text
        assert reply.headers["x-should-retry"] == "false"
        page = (await rig.http.get("/metrics")).text
        assert 'penstock_openai_requests_total{code="internal",endpoint="/broken",status="500"} 1.0' in page


async def test_unknown_paths_and_methods_have_an_envelope() -> None:
    async with front_rig() as rig:
        unknown = await rig.http.post("/v1/nothing", json={})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")
        wrong = await rig.http.delete("/v1/models")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"]
        two = await rig.http.put("/v1/responses/resp_x")
        assert (two.status_code, set(two.headers["allow"].split(", "))) == (405, {"DELETE", "GET", "HEAD"})
        one = await rig.http.put("/v1/responses/input_tokens")
        assert one.headers["allow"] == "POST"
        other = await rig.http.post("/v1/responses/compact", json={})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "unknown_url")
        page = (await rig.http.get("/metrics")).text
        assert 'endpoint="other",status="404"' in page
        assert "nothing" not in page
