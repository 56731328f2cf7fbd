"""The flags and variables that say which server to call and with which key, through main()."""

from __future__ import annotations

import argparse
import io
import sys

import grpc
import pytest

from penstock.cli.__main__ import main
from penstock.cli.calling.connection import WrongConnection, add_addr, connection
from penstock.client import Retry, Tls

Code = grpc.StatusCode


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("PENSTOCK_ADDR", "PENSTOCK_TOKEN", "http_proxy", "https_proxy", "grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def parsed(*argv):
    parser = argparse.ArgumentParser()
    add_addr(parser)
    return parser.parse_args([str(argument) for argument in argv])


def run(*argv):
    return main([str(argument) for argument in argv])


def test_what_is_not_given():
    args = parsed()
    assert args.addr == "127.0.0.1:50051"
    assert connection(args) == {
        "tls": False,
        "token": None,
        "insecure": False,
        "timeout": None,
        "retries": None,
    }


def test_every_flag():
    flags = ["--ca", "ca.pem", "--cert", "c.pem", "--key", "/k.pem", "--tls-name", "n", "--token", "t"]
    args = parsed("--addr", "a:1", *flags, "--insecure", "--timeout", "1.5", "--retries", "3")
    assert args.addr == "a:1"
    found = connection(args)
    assert {name: str(getattr(found["tls"], name)) for name in ("ca", "cert", "key", "name")} == {
        "ca": "ca.pem",
        "cert": "c.pem",
        "key": "/k.pem",
        "name": "n",
    }
    assert (found["token"], found["insecure"], found["timeout"]) == ("t", True, 1.5)
    assert found["retries"] == Retry(attempts=4)


def test_tls_alone():
    assert connection(parsed("--tls"))["tls"] == Tls()


def test_a_command_may_have_a_timeout_of_its_own():
    parser = argparse.ArgumentParser()
    add_addr(parser, timeout=False)
    parser.add_argument("--timeout")


def test_variables(monkeypatch, server, capsys):
    monkeypatch.setenv("PENSTOCK_ADDR", server.addr)
    monkeypatch.setenv("PENSTOCK_TOKEN", "from-env\n")
    assert run("info") == 0
    assert {m["authorization"] for m in server.metadata} == {"Bearer from-env"}
    assert connection(parsed("--token", "given"))["token"] == "given"
    monkeypatch.setenv("PENSTOCK_TOKEN", "")
    assert connection(parsed())["token"] is None


COMMANDS = [
    ["generate", "p"],
    ["info"],
    ["chat"],
    ["bench", "--requests=1", "--prompt-tokens=2", "--max-tokens=4"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_command_sends_the_key_of_a_file(server, tmp_path, monkeypatch, command):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    (tmp_path / "key").write_text(" of-file \nanother line\n")
    assert run(*command, "--addr", server.addr, "--token-file", tmp_path / "key") == 0
    assert {m["authorization"] for m in server.metadata} == {"Bearer of-file"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--token", "t", "--addr", "192.0.2.1:5"], "the token would be sent to 192.0.2.1:5 in plaintext"),
        (["--token", "a b"], "a token must be one word"),
        (["--token-file", "no-such-file"], "cannot read --token-file no-such-file: No such file"),
        (["--cert", "x"], "cert and key: must be given together"),
        (["--ca", "no-such-file"], "cannot read no-such-file: No such file"),
        (["--addr", "127.0.0.1:1,[::1]:2"], "must all have IPv4 or all have IPv6"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_line(capsys, monkeypatch, command, flags, message):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert run(*command, *flags) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith(f"penstock {command[0]}: ")
    assert (shown.err.count("\n"), shown.out) == (1, "")


def test_a_file_without_a_key(tmp_path):
    (tmp_path / "empty").write_text("\nkey\n")
    with pytest.raises(WrongConnection, match="has no key in its first line"):
        connection(parsed("--token-file", tmp_path / "empty"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(WrongConnection, match="it is not UTF-8 text"):
        connection(parsed("--token-file", tmp_path / "binary"))


def test_one_key_at_most(capsys):
    with pytest.raises(SystemExit):
        run("info", "--token", "t", "--token-file", "f")
    assert "not allowed with argument --token" in capsys.readouterr().err


def test_retries(server, failure, capsys):
    server.failures = [failure(Code.UNAVAILABLE, "NOT_READY")]
    assert run("generate", "p", "--addr", server.addr, "--retries", "2") == 0
    assert capsys.readouterr().out == "Hello\n"


def test_timeout(server, capsys):
    server.hold_after = 0
    assert run("generate", "p", "--addr", server.addr, "--timeout", "0.3") == 1
    assert "allow more time with --timeout" in capsys.readouterr().err


def test_a_unix_socket(unix_server, capsys):
    assert run("generate", "p", "--addr", unix_server.addr) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert run("generate", "p", "--addr", "unix:/no/such.sock") == 1
    assert "no server at unix:/no/such.sock (No such file or directory)" in capsys.readouterr().err


def test_several_servers_that_are_not_there(capsys):
    assert run("info", "--addr", "127.0.0.1:1,127.0.0.1:2") == 1
    assert "no server at 127.0.0.1:1,127.0.0.1:2 (Connection refused)" in capsys.readouterr().err


def test_the_proxy_is_named_where_there_is_one(monkeypatch, capsys):
    monkeypatch.setenv("https_proxy", "http://user:secret@127.0.0.1:1")
    assert run("info", "--addr", "192.0.2.1:5") == 1
    shown = capsys.readouterr().err
    assert "through the proxy http://127.0.0.1:1 of https_proxy; no_proxy excludes hosts" in shown
    assert "secret" not in shown
    assert run("info", "--addr", "127.0.0.1:1") == 1
    assert "proxy" not in capsys.readouterr().err


REFUSALS = [
    (
        (Code.UNAUTHENTICATED, "UNAUTHENTICATED"),
        "wants a key (no); give yours in PENSTOCK_TOKEN or with --token-file",
    ),
    ((Code.UNAUTHENTICATED, "KEY_EXPIRED"), "the key has expired (no); ask the operator"),
    ((Code.PERMISSION_DENIED, "FORBIDDEN"), "the key does not allow this (no)"),
    ((Code.RESOURCE_EXHAUSTED, "BUSY"), "is busy (no); try again"),
    ((Code.RESOURCE_EXHAUSTED, "RATE_LIMITED"), "the rate of your key is used up (no); try again"),
    ((Code.UNAVAILABLE, "ENGINE_DEAD"), "is dead (no); try again when the server has been restarted"),
    ((Code.INVALID_ARGUMENT, "RESPONSE_TOO_LARGE"), "the server refused (RESPONSE_TOO_LARGE): no"),
]


@pytest.mark.parametrize(("status", "hint"), REFUSALS)
def test_refusals(server, failure, capsys, status, hint):
    server.failure = failure(*status)
    assert run("generate", "p", "--addr", server.addr) == 1
    shown = capsys.readouterr().err
    assert hint in shown
    assert shown.count("\n") == 1


def test_the_id_under_which_the_server_knows_the_request(server, failure, capsys):
    server.failure = failure(Code.INTERNAL, "", "no", request_id="r-7")
    assert run("generate", "p", "--addr", server.addr) == 1
    assert capsys.readouterr().err.endswith("(request r-7)\n")
