"""The port for Prometheus, seen by scrapers that are slow, hostile or many."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

from penstock.runtime.errors import ConfigError
from penstock.service.telemetry.metrics import endpoint as module
from penstock.service.telemetry.metrics.endpoint import MOST_CONNECTIONS, Endpoint, Page, Pages
from penstock.service.telemetry.metrics.families import families
from tests.service.telemetry.metrics.sample_metrics import sample_registry

WAIT_S = 20.0


def sample_pages() -> Pages:
    return Pages(lambda: families(sample_registry().snapshot().metrics))


@contextlib.contextmanager
def serving(pages: Pages | None = None, host: str = "127.0.0.1") -> Iterator[Endpoint]:
    made = Endpoint(host, 0, pages or sample_pages())
    made.start()
    try:
        yield made
    finally:
        made.stop()


def connected(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection(("127.0.0.1", endpoint.port), timeout=WAIT_S)


def answer_to(endpoint: Endpoint, request: bytes) -> bytes:
    """All that the server answers until it closes the connection."""
    with connected(endpoint) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return all_of(connection)


def all_of(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def is_served(endpoint: Endpoint) -> bool:
    with urllib.request.urlopen(f"http://{endpoint.address}/metrics", timeout=WAIT_S) as reply:
        return b"penstock_outputs_running 3.0" in reply.read()


def test_a_scrape():
    with serving() as endpoint:
        with urllib.request.urlopen(f"http://{endpoint.address}/metrics", timeout=WAIT_S) as reply:
            body = reply.read()
        assert reply.status == 200
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert int(reply.headers["Content-Length"]) == len(body)
        assert b"penstock_outputs_running 3.0" in body


def test_head_has_no_body():
    with serving() as endpoint:
        reply = answer_to(endpoint, b"HEAD /metrics HTTP/1.1\r\n\r\n")
        head, _, body = reply.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert body == b""


def test_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(host="::1") as endpoint:
        assert endpoint.address == f"[::1]:{endpoint.port}"
        assert is_served(endpoint)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.1", 404),
        (b"GET /metrics/ HTTP/1.1", 404),
        (b"GET //metrics HTTP/1.1", 404),
        (b"GET /../etc/passwd HTTP/1.1", 404),
        (b"GET http://127.0.0.1/metrics HTTP/1.1", 404),
        (b"GET /%6detrics HTTP/1.1", 404),
        (b"GET /m\xe9trics\x00 HTTP/1.1", 404),
        (b"OPTIONS * HTTP/1.1", 404),
        (b"GET /metrics?name[]=up HTTP/1.1", 400),
        (b"POST /metrics HTTP/1.1", 405),
        (b"DELETE /metrics HTTP/1.1", 405),
        (b"get /metrics HTTP/1.1", 405),
        (b"CONNECT /metrics HTTP/1.1", 405),
        (b"GET /metrics", 400),
        (b"GET /metrics HTTP/2.0", 400),
        (b"PRI * HTTP/2.0", 400),
        (b"GET  /metrics HTTP/1.1", 400),
        (b"", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400),
        (b"GET /metrics HTTP/1.1\r\nno colon here", 400),
        (b"GET /metrics HTTP/1.1\r\n folded: line", 400),
        (b"GET /metrics HTTP/1.1\r\n: nameless", 400),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 9000, 400),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1", 400),
    ],
)
def test_odd_requests_get_a_plain_answer(request_line, status):
    with serving() as endpoint:
        reply = answer_to(endpoint, request_line + b"\r\n\r\n")
        head, _, body = reply.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"passwd" not in body  # nothing of a request is quoted
        assert len(body) < 200
        assert is_served(endpoint)


def test_a_body_does_not_lose_the_answer():
    """If a socket is closed while a part of the request was not read, the peer may lose the answer."""
    with serving() as endpoint:
        connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=WAIT_S)
        connection.request("POST", "/metrics", body=b"x" * 5_000_000)
        reply = connection.getresponse()
        assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")
        connection.close()


def test_a_request_that_ends_within_its_head():
    with serving() as endpoint:
        assert answer_to(endpoint, b"GET /metr").startswith(b"HTTP/1.1 400 ")


@pytest.fixture
def long_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let connections last longer than a test waits, so that what ends them is what the test is about."""
    monkeypatch.setattr(module, "CONNECTION_S", 10 * WAIT_S)
    monkeypatch.setattr(module, "HEAD_S", 10 * WAIT_S)


def test_who_sends_nothing_is_cut_off(long_connections, monkeypatch):
    monkeypatch.setattr(module, "HEAD_S", 0.1)
    with serving() as endpoint, connected(endpoint) as silent:
        assert silent.recv(1) == b""


def test_who_sends_byte_by_byte_is_cut_off(long_connections, monkeypatch):
    """The time counts from the first byte on; it does not begin anew with each byte."""
    monkeypatch.setattr(module, "HEAD_S", 0.3)
    with serving() as endpoint, connected(endpoint) as slow, contextlib.suppress(ConnectionError):
        for _ in range(int(WAIT_S / 0.05)):
            slow.sendall(b"a")
            time.sleep(0.05)
        pytest.fail("the connection is open all the time")


def test_who_does_not_read_is_cut_off(monkeypatch):
    """The page is too large for the buffers of the system, so that sending it must wait for the reader."""
    monkeypatch.setattr(module, "CONNECTION_S", 0.3)
    large = type("Large", (), {"page": lambda *_: Page("text/plain", b"x" * 50_000_000)})()
    with serving(large) as endpoint, connected(endpoint) as reader:
        reader.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        time.sleep(1.0)
        with contextlib.suppress(ConnectionError):
            assert len(all_of(reader)) < 50_000_000


def test_silent_connections_do_not_keep_a_scraper_out(long_connections, monkeypatch):
    """Three times as many as there are places: the oldest gives way once it has had its time."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    with serving() as endpoint, contextlib.ExitStack() as held:
        for _ in range(3 * MOST_CONNECTIONS):
            held.enter_context(connected(endpoint))
        deadline = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(OSError):
                if is_served(endpoint):
                    break
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_who_finds_no_place_is_told_so(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    with serving() as endpoint, contextlib.ExitStack() as held:
        for _ in range(MOST_CONNECTIONS):
            held.enter_context(connected(endpoint))
        assert all_of(held.enter_context(connected(endpoint))).startswith(b"HTTP/1.1 503 ")


def test_few_connections_are_open_at_once(long_connections, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    with serving() as endpoint, contextlib.ExitStack() as held:
        taken = [held.enter_context(connected(endpoint)) for _ in range(4 * MOST_CONNECTIONS)]
        for early in taken[:-MOST_CONNECTIONS]:
            with contextlib.suppress(ConnectionError):
                assert early.recv(1) == b""  # closed for those that came later


def test_many_scrapers_at_once_are_all_served(monkeypatch):
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 64)
    with serving() as endpoint:
        served = []
        threads = [threading.Thread(target=lambda: served.append(is_served(endpoint))) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert served == [True] * 40


def test_metrics_that_cannot_be_read(caplog):
    def fail():
        if broken:
            raise RuntimeError("no such device")
        return families(sample_registry().snapshot().metrics)

    broken = True
    with serving(Pages(fail)) as endpoint:
        for _ in range(3):
            reply = answer_to(endpoint, b"GET /metrics HTTP/1.1\r\n\r\n")
            assert reply.startswith(b"HTTP/1.1 500 ")
            assert b"no such device" not in reply
        broken = False
        assert is_served(endpoint)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "no such device" in caplog.text


def test_the_same_port_twice():
    with serving() as endpoint:
        with pytest.raises(ConfigError, match=f"cannot listen on {endpoint.address}: .* --metrics-port"):
            Endpoint("127.0.0.1", endpoint.port, sample_pages())
        assert is_served(endpoint)


def test_a_host_that_is_none_of_this_machine():
    with pytest.raises(ConfigError, match="cannot listen on"):
        Endpoint("203.0.113.1", 0, sample_pages())


def test_stopping_closes_everything_and_may_be_said_twice():
    endpoint = Endpoint("127.0.0.1", 0, sample_pages())
    endpoint.start()
    with connected(endpoint) as open_one:
        endpoint.stop()
        endpoint.stop()
        with contextlib.suppress(ConnectionResetError):  # if it was not accepted yet
            assert open_one.recv(1) == b""
    with pytest.raises(OSError, match="refused"):
        connected(endpoint)


def test_stopping_what_was_never_started():
    endpoint = Endpoint("127.0.0.1", 0, sample_pages())
    endpoint.stop()
    with pytest.raises(OSError, match="refused"):
        connected(endpoint)


def test_open_files_that_run_out_are_told_once_and_survived(monkeypatch, caplog):
    accept, left = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files") for _ in range(3)]

    def failing(self):
        if left:
            raise left.pop()
        return accept(self)

    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    monkeypatch.setattr(socket.socket, "accept", failing)
    with serving() as endpoint:
        assert is_served(endpoint)
    assert not left
    assert caplog.text.count("cannot accept connections for metrics: ") == 1
