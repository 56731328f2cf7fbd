"""`penstock serve --openai-port`: the OpenAI front beside the server, from its start to its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import time
from pathlib import Path

import httpx
import pytest

from tests.service.cli.test_serve import Process, fake_process
from tests.service.key_rig import key, write
from tests.service.tls_rig import CA, CERTS

WAIT_S = 60.0


def url_of(server: Process) -> str:
    """Where the front of a server that is ready listens."""
    url = server.wait_for(r"openai on (https?://\S+:\d+)\n")[1]
    server.wait_for("ready on")
    return url


def fronts_of(server: Process) -> list[int]:
    """Return the process ids of the server's front: one, or none while another is started."""
    pid = server.popen.pid
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"penstock.openai.serving.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def front_of(server: Process) -> int:
    """Return the process id of the server's front."""
    (front,) = fronts_of(server)
    return front


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_gone(pid: int) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while lives(pid):
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def text_of(line: str) -> str:
    """Return the text in a line of a stream of completions."""
    if not line.startswith("data: {"):
        return ""
    return "".join(choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"])


def test_the_front_begins_and_ends_with_its_server() -> None:
    with fake_process("--port", "0", "--openai-port", "0", "--grace", "60") as server:
        url = url_of(server)
        assert "unix:" not in server.output  # the socket between both is nobody's business
        with httpx.Client(base_url=url, timeout=WAIT_S) as http:
            assert http.get("/health").json() == {"status": "ok"}
            front = front_of(server)
            os.kill(front, signal.SIGTERM)  # as a service manager does, which asks all processes to end
            assert http.get("/v1/models").json()["data"][0]["id"] == "fake"
            assert front_of(server) == front
            asked = {"model": "fake", "prompt": "a", "max_tokens": 30, "stream": True}
            with http.stream("POST", "/v1/completions", json=asked) as stream:
                lines = stream.iter_lines()
                text = text_of(next(lines))
                server.popen.send_signal(signal.SIGTERM)
                server.wait_for("stopping")
                assert httpx.get(f"{url}/health", timeout=WAIT_S).status_code == 503
                text += "".join(map(text_of, lines))
            assert text == "bcdefghijklmnopqrstuvwxyz"
            assert server.wait() == 0
        until_gone(front)
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
    assert "Traceback" not in server.output
    assert "GET /v1/models: 200" in server.output  # the front's log is on the server's stderr


@pytest.mark.sweep
def test_a_front_whose_server_is_killed_ends() -> None:
    with fake_process("--port", "0", "--openai-port", "0") as server:
        url_of(server)
        front = front_of(server)
        server.popen.kill()
        until_gone(front)


@pytest.mark.sweep
def test_http_alone_can_be_served_with_tls_keys_and_certificates(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.toml", [key("alice")])
    tls = ["--tls-cert", str(CERTS / "server.pem"), "--tls-key", str(CERTS / "server.key")]
    flags = ["--port", "0", "--openai-port", "0", "--keys", str(keys), *tls, "--client-ca", str(CA)]
    context = ssl.create_default_context(cafile=CA)
    with fake_process(*flags) as server:
        url = url_of(server)
        assert url.startswith("https://127.0.0.1:")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/v1/models", verify=context, timeout=WAIT_S)
        context.load_cert_chain(CERTS / "client.pem", CERTS / "client.key")
        with httpx.Client(base_url=url, verify=context, timeout=WAIT_S) as http:
            assert http.get("/v1/models").status_code == 401
            for name, status in (("mallory", 401), ("alice", 200)):
                bearer = {"authorization": f"Bearer psk_{name}"}
                assert http.get("/v1/models", headers=bearer).status_code == status


@pytest.mark.sweep
def test_a_front_that_cannot_be_kept_alive_ends_the_server_with_1() -> None:
    with fake_process("--port", "0", "--openai-port", "0", "--grace", "0") as server:
        url_of(server)
        while server.popen.poll() is None:
            for front in fronts_of(server):
                os.kill(front, signal.SIGKILL)
            time.sleep(0.05)
        assert server.wait() == 1
    assert "times in a row, so the server ends" in server.output
    assert "Traceback" not in server.output
