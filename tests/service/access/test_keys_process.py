"""`penstock serve --keys` as a process: SIGHUP, and `penstock keys` beside it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.cli.__main__ import main
from penstock.v1 import control_pb2, control_pb2_grpc
from tests.service.cli.test_serve import fake_process


def keys(*arguments: str, file: Path) -> int:
    return main(["keys", *arguments, "--file", str(file)])


def answer(channel: grpc.Channel, secret: str) -> str:
    """ "OK", or the code."""
    stub: Any = control_pb2_grpc.ControlServiceStub(channel)
    metadata = [("authorization", f"Bearer {secret}")]
    error = stub.GetLoad.future(control_pb2.GetLoadRequest(), metadata=metadata).exception(20)
    return "OK" if error is None else str(error.code().name)


def test_keys_that_come_and_go_with_sighup(tmp_path, capsys):
    file = tmp_path / "keys.json"
    assert keys("add", "alice", file=file) == 0
    alice = capsys.readouterr().out.strip()
    with fake_process("--port", "0", "--keys", str(file)) as server:
        address = server.wait_for(r"ready on (127\.0\.0\.1:\d+)")[1]
        with grpc.insecure_channel(address) as channel:
            assert answer(channel, alice) == "OK"
            assert answer(channel, alice[:-1]) == "UNAUTHENTICATED"

            assert keys("add", "bob", file=file) == 0
            bob = capsys.readouterr().out.strip()
            assert keys("revoke", "alice", file=file) == 0
            assert answer(channel, alice) == "OK", "not read again so far"
            server.popen.send_signal(signal.SIGHUP)
            server.wait_for("has 2 keys, of which 1 are valid")
            assert (answer(channel, alice), answer(channel, bob)) == ("UNAUTHENTICATED", "OK")

            file.write_text("{}")
            server.popen.send_signal(signal.SIGHUP)
            line = server.wait_for(r".*could not be read again, so the server keeps those it has.*")[0]
            assert "ERROR" in line
            assert str(file) in line
            assert answer(channel, bob) == "OK"
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert "Traceback" not in server.output
    for secret in (alice, bob):
        assert secret not in server.output


@pytest.mark.ci
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        pytest.param(None, "cannot be read: No such file", id="none", marks=pytest.mark.ci),
        pytest.param("{", "not JSON", id="bad"),
    ],
)
def test_a_file_that_cannot_be_used_ends_the_start(tmp_path, content, complaint):
    file = tmp_path / "keys.json"
    if content is not None:
        file.write_text(content)
    with fake_process("--port", "0", "--keys", str(file)) as server:
        assert server.wait() == 1
    assert f"penstock serve: --keys: {file}" in server.output
    assert complaint in server.output
    assert "Traceback" not in server.output


@pytest.mark.ci
def test_a_hangup_without_keys_still_ends_the_process():
    """As for any program whose terminal is closed, unless it was started with `nohup`."""
    ours = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with fake_process("--port", "0") as server:
            server.wait_for("ready on")
            server.popen.send_signal(signal.SIGHUP)
            assert server.wait() == -signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, ours)
