"""The network between client and server: a frozen connection, a Unix socket, several servers, proxies."""

from __future__ import annotations

import time

import pytest

from penstock import client as api
from penstock.client import AsyncClient, Client
from penstock.client.connection.channel import channel_options
from tests.support.freezing_proxy import freezing_proxy

# The times of the client's own keepalive, made shorter. Everything else about them is the client's.
QUICK = (("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_timeout_ms", 1000))
# Far above the time in which a frozen network must be noticed, and below the two minutes that gRPC takes by
# default.
PATIENCE_S = 60


def test_a_frozen_network_is_found(server):
    server.hold_after = 2
    with freezing_proxy(server.addr) as proxy, Client(proxy.addr, options=QUICK) as client:
        stream = client.stream("p", timeout=PATIENCE_S)
        next(stream)
        next(stream)
        proxy.freeze()
        with pytest.raises(api.Unreachable, match=r"(?i)ping|keepalive"):
            next(stream)


async def test_a_frozen_network_is_found_async(server):
    server.hold_after = 2
    with freezing_proxy(server.addr) as proxy:
        async with AsyncClient(proxy.addr, options=QUICK) as client:
            stream = client.stream("p", timeout=PATIENCE_S)
            await anext(stream)
            await anext(stream)
            proxy.freeze()
            with pytest.raises(api.Unreachable, match=r"(?i)ping|keepalive"):
                await anext(stream)


def test_the_times_of_keepalive_are_those_stated():
    options = dict(channel_options(()))
    assert options["grpc.keepalive_time_ms"] == 30_000
    assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] == 10_000
    assert options["grpc.http2.max_pings_without_data"] == 0
    mine = dict(channel_options([("grpc.keepalive_timeout_ms", 5), ("grpc.http2.max_pings_without_data", 2)]))
    assert (mine["grpc.http2.ping_timeout_ms"], mine["grpc.http2.max_pings_without_data"]) == (5, 2)
    assert dict(channel_options([("grpc.http2.ping_timeout_ms", 7)]))["grpc.http2.ping_timeout_ms"] == 7


@pytest.fixture
def nowhere(monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_this_machine_is_reached_past_a_proxy_of_the_environment(nowhere, server):
    with Client(server.addr) as client:
        assert client.load().queued_requests == 2
    with Client(server.addr.replace("127.0.0.1", "localhost")) as client:
        assert client.load().queued_requests == 2


async def test_this_machine_is_reached_past_a_proxy_of_the_environment_async(nowhere, server):
    async with AsyncClient(server.addr) as client:
        assert (await client.load()).queued_requests == 2


def test_another_machine_is_reached_through_the_proxy(nowhere):
    with Client("192.0.2.1:5") as client, pytest.raises(api.Unreachable, match=r"127\.0\.0\.1:1"):
        client.load(timeout=20)


def test_a_unix_socket(nowhere, unix_server, expected):
    with Client(unix_server.addr, token="t") as client:
        assert client.generate("p") == expected
    assert unix_server.metadata[0]["authorization"] == "Bearer t"


async def test_a_unix_socket_async(unix_server, expected):
    async with AsyncClient(unix_server.addr) as client:
        assert await client.stream("p").result() == expected


def asked_of(client, servers):
    """Return the servers that six calls went to."""
    before = [len(server.calls) for server in servers]
    for _ in range(6):
        client.load()
    return [len(server.calls) > count for server, count in zip(servers, before, strict=True)]


def until(condition):
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_several_servers_are_asked_in_turns_those_that_serve(server, second_server):
    servers = [server, second_server]
    with Client(f"{server.addr},{second_server.addr}") as client:
        client.wait_ready(timeout=PATIENCE_S)
        until(lambda: asked_of(client, servers) == [True, True])
        server.set_health(False)
        until(lambda: asked_of(client, servers) == [False, True])
        assert asked_of(client, servers) == [False, True]
        server.set_health(True)
        until(lambda: asked_of(client, servers) == [True, True])
        server.set_health(False)
        second_server.set_health(False)

        def nobody():
            try:
                client.load()
            except api.Unreachable as error:
                return "unhealthy" in str(error)
            return False

        until(nobody)


async def test_several_servers_async(server, second_server):
    async with AsyncClient(f"{server.addr},{second_server.addr}") as client:
        limit = time.monotonic() + PATIENCE_S
        while not (server.calls and second_server.calls):
            await client.load()
            assert time.monotonic() < limit


def test_one_of_several_servers_that_is_gone_is_left_out(server):
    with Client(f"127.0.0.1:1,{server.addr}") as client:
        client.wait_ready(timeout=PATIENCE_S)
        assert asked_of(client, [server]) == [True]
