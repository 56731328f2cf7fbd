"""Parsing addresses, which addresses go through a proxy, and where a token may be sent."""

from __future__ import annotations

import grpc
import pytest

from penstock.client import AsyncClient, Client, Tls
from penstock.client.connection.address import Access, Address, endpoint, parse, proxy_of


@pytest.mark.parametrize(
    ("addr", "expected"),
    [
        ("10.0.0.1:5", Address("10.0.0.1:5", ("10.0.0.1",))),
        ("server:5", Address("server:5", ("server",))),
        ("server", Address("server:50051", ("server",))),
        ("::1", Address("[::1]:50051", ("::1",), local=True)),
        ("[::1]", Address("[::1]:50051", ("::1",), local=True)),
        ("[2001:db8::1]:5", Address("[2001:db8::1]:5", ("2001:db8::1",))),
        ("127.3.2.1:5", Address("127.3.2.1:5", ("127.3.2.1",), local=True)),
        ("localhost:5", Address("localhost:5", ("localhost",), local=True)),
        ("localhost.example:5", Address("localhost.example:5", ("localhost.example",))),
        ("unix:/run/p.sock", Address("unix:/run/p.sock", local=True)),
        ("unix:p.sock", Address("unix:p.sock", local=True)),
        ("dns:///all.example:5", Address("dns:///all.example:5", ("all.example",), balanced=True)),
        ("dns:one.example:5", Address("dns:one.example:5", ("one.example",))),
        ("dns:localhost:5", Address("dns:localhost:5", ("localhost",), local=True)),
        ("dns:/localhost:5", Address("dns:/localhost:5", ("localhost",), local=True)),
        ("dns:///localhost:5", Address("dns:///localhost:5", ("localhost",), local=True, balanced=True)),
        ("dns://8.8.8.8/localhost:5", Address("dns://8.8.8.8/localhost:5", ("localhost",), balanced=True)),
        ("dns://localhost:5", Address("dns://localhost:5", ("localhost",), balanced=True)),
        ("dns:///a?/localhost:5", Address("dns:///a?/localhost:5", ("localhost",), balanced=True)),
        ("xds:///x", Address("xds:///x")),
        ("ipv4:127.0.0.1:5", Address("ipv4:127.0.0.1:5", ("127.0.0.1",), local=True)),
        (
            "127.0.0.1:5,127.0.0.2",
            Address("ipv4:127.0.0.1:5,127.0.0.2:50051", ("127.0.0.1", "127.0.0.2"), True, balanced=True),
        ),
        (
            "127.0.0.1:5,10.0.0.1:6",
            Address("ipv4:127.0.0.1:5,10.0.0.1:6", ("127.0.0.1", "10.0.0.1"), False, True),
        ),
        ("[::1]:5,[::1]:6", Address("ipv6:[::1]:5,[::1]:6", ("::1", "::1"), True, True)),
    ],
)
def test_addresses(addr, expected):
    assert parse(addr) == expected


@pytest.mark.parametrize(
    ("addr", "message"),
    [
        (" ", "must be HOST:PORT or unix:/PATH, not ' '"),
        ("a:1 ", "must be HOST:PORT"),
        ("127.0.0.1:1,[::1]:2", "must all have IPv4 or all have IPv6"),
        ("127.0.0.1:1,nohost.invalid:2", "'nohost.invalid:2' cannot be resolved"),
        ("127.0.0.1:1,", "'' cannot be resolved"),
    ],
)
@pytest.mark.parametrize("client", [Client, AsyncClient])
async def test_what_cannot_be_an_address(client, addr, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        client(addr)


@pytest.mark.parametrize(
    ("addr", "environ", "expected"),
    [
        ("server:5", {}, None),
        ("server:5", {"http_proxy": "http://p:3128"}, ("http_proxy", "http://p:3128")),
        ("server:5", {"http_proxy": "http://user:secret@p:3128/"}, ("http_proxy", "http://p:3128")),
        ("server:5", {"http_proxy": "http://p", "https_proxy": "http://q"}, ("https_proxy", "http://q")),
        ("server:5", {"https_proxy": "http://q", "grpc_proxy": "http://r"}, ("grpc_proxy", "http://r")),
        ("server:5", {"http_proxy": "http://p", "no_proxy": "x, server"}, None),
        ("server:5", {"http_proxy": "http://p", "no_proxy": "x"}, ("http_proxy", "http://p")),
        ("a.corp:5", {"http_proxy": "http://p", "no_grpc_proxy": ".corp", "no_proxy": "x"}, None),
        ("10.1.2.3:5", {"http_proxy": "http://p", "no_proxy": "10.0.0.0/8"}, None),
        ("localhost:5", {"http_proxy": "http://p"}, None),
        ("unix:/x", {"http_proxy": "http://p"}, None),
        ("server:5", {"http_proxy": "http://[p"}, ("http_proxy", "an address that cannot be read")),
    ],
)
def test_the_proxy_before_an_address(addr, environ, expected):
    assert proxy_of(addr, environ) == expected


@pytest.mark.parametrize(
    ("addr", "direct"), [("localhost:5", True), ("unix:/x", True), ("server:5", False), ("xds:///x", False)]
)
def test_only_this_machine_is_reached_without_the_proxy_of_the_environment(addr, direct):
    assert (("grpc.enable_http_proxy", 0) in endpoint(addr, Access()).options) == direct


def test_what_a_caller_says_of_the_proxy_counts():
    access = Access(options=[("grpc.enable_http_proxy", 1)])
    assert ("grpc.enable_http_proxy", 1) in endpoint("localhost:5", access).options


PLAIN = "in plaintext"


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize("addr", ["server:5", "127.0.0.1:1,192.0.2.1:2", "xds:///x", "vsock:1:2"])
async def test_a_token_does_not_cross_the_network_in_plaintext(client, addr):
    with pytest.raises(ValueError, match=PLAIN):
        client(addr, token="t")


@pytest.mark.parametrize(
    ("addr", "more"),
    [
        ("localhost:5", {}),
        ("unix:/x", {}),
        ("server:5", {"tls": True}),
        ("server:5", {"insecure": True}),
        ("server:5", {"credentials": grpc.ssl_channel_credentials()}),
    ],
)
def test_where_a_token_may_go(addr, more):
    assert endpoint(addr, Access(token="t", **more)).metadata == (("authorization", "Bearer t"),)


@pytest.mark.parametrize("token", ["", "two words", "schlüssel", "line\n", "\x1b"])
def test_what_is_no_token(token):
    with pytest.raises(ValueError, match="one word of printable ASCII") as caught:
        Client(token=token)
    assert not token or token not in str(caught.value)


def test_what_does_not_go_together():
    with pytest.raises(TypeError, match="give only one"):
        Client(tls=True, credentials=grpc.ssl_channel_credentials())
    with grpc.insecure_channel("localhost:5") as channel:
        for more in ({"tls": True}, {"token": "t"}, {"tls": Tls()}):
            with pytest.raises(TypeError, match="existing channel"):
                Client(channel=channel, **more)
    with pytest.raises(ValueError, match="need the name"):
        Client("10.0.0.1:5,10.0.0.2:5", tls=True)
    Client("10.0.0.1:5,10.0.0.2:5", tls=Tls(name="all.example")).close()
    with pytest.raises(ValueError, match="cert and key: must be given together"):
        Tls(cert="x")
