"""`penstock top`, through main() and on a terminal of its own, against the handwritten server."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.cli.__main__ import main
from penstock.cli.calling.screen import plain
from penstock.v1 import control_pb2, telemetry_pb2
from tests.clients.conftest import running
from tests.clients.failing import Failure
from tests.clients.watching import DRAINING, MESSAGE, REPORT

Code = grpc.StatusCode
WAIT_S = 60.0
NOT_READY = Failure(Code.UNAVAILABLE, "NOT_READY", "the server loads")
GONE = Failure(Code.UNIMPLEMENTED, "UNSUPPORTED_FEATURE", "not supported", metadata={"field": "WatchLoad"})


def run(server, *argv):
    return main(["top", "--addr", server.addr, *map(str, argv)])


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def watches(server):
    return [call for call in server.calls if isinstance(call, telemetry_pb2.WatchLoadRequest)]


def test_once(server, capsys):
    assert run(server, "--once", "--interval", 0.5, "--requests", 2) == 0
    shown = capsys.readouterr().out
    for part in ("toy at", "1,234", "62.5 ms", "oldest [1]", "second", "and 3 more"):
        assert part in shown
    assert "newest" not in shown
    assert "\x1b" not in shown
    assert watches(server) == [
        telemetry_pb2.WatchLoadRequest(interval=Duration(nanos=500_000_000), max_requests=2)
    ]


def test_once_as_json(server, capsys):
    assert run(server, "--once", "--json") == 0
    assert json.loads(capsys.readouterr().out) == plain(REPORT)


def test_it_asks_for_no_more_than_it_was_told(server, capsys):
    assert run(server, "--once", "--requests", 0) == 0
    assert watches(server)[0].max_requests == 0
    assert "5 requests" in capsys.readouterr().out


@pytest.mark.parametrize("code", [Code.PERMISSION_DENIED, Code.UNIMPLEMENTED])
def test_a_caller_that_may_not_see_requests_sees_the_rest(server, capsys, code):
    """The key lacks a role, or the server has another address for control."""
    reason = "FORBIDDEN" if code is Code.PERMISSION_DENIED else "SERVED_ELSEWHERE"
    server.watch.may_list = False
    server.watch.refusal = Failure(code, reason, "not for you")
    assert run(server, "--once") == 0
    shown = capsys.readouterr().out
    assert "1,234" in shown
    assert "not for you" in shown
    assert [call.max_requests for call in watches(server)] == [50, 0]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (GONE, "this server cannot do that (WatchLoad)"),
        (Failure(Code.UNAUTHENTICATED, "UNAUTHENTICATED", "no key"), "wants a key"),
        (Failure(Code.UNAVAILABLE, "BUSY", "too many"), "is busy"),
    ],
)
def test_a_server_that_never_answers_as_it_should(server, capsys, failure, said):
    server.failure = failure
    assert run(server) == 1
    assert said in capsys.readouterr().err


def test_no_server(capsys):
    assert main(["top", "--addr", "127.0.0.1:1"]) == 1
    assert "no server at 127.0.0.1:1" in capsys.readouterr().err


def test_a_server_that_loads_is_waited_for(server, capsys):
    server.failures = [NOT_READY, NOT_READY]
    assert run(server, "--once") == 0
    captured = capsys.readouterr()
    assert captured.err.count("still loading") == 1
    assert "1,234" in captured.out


@pytest.mark.parametrize("flags", [["--interval", "0.05"], ["--interval", "61"], ["--requests", "1001"]])
def test_wrong_flags(server, flags, capsys):
    with pytest.raises(SystemExit) as caught:
        run(server, *flags)
    assert caught.value.code == 2
    assert server.calls == []


class Program:
    """`penstock top` as a process, whose output is read as it comes."""

    def __init__(self, addr, *flags, terminal=None):
        """`terminal` is its columns and lines; None: it writes to a pipe."""
        argv = [sys.executable, "-m", "penstock.cli", "top", "--addr", addr, "--interval", "0.1", *flags]
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1"}
        environment = {k: v for k, v in environment.items() if k not in ("COLUMNS", "LINES")}
        if terminal is None:
            self._fd, theirs = os.pipe()
        else:
            self._fd, theirs = pty.openpty()
            self.resize(*terminal)
        self.process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE, env=environment
        )
        os.close(theirs)
        self.seen = b""

    def resize(self, columns, lines):
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, part, after=0):
        """Read until this text has come; returns where it ends."""
        ends = time.monotonic() + WAIT_S
        while (at := self.seen.find(part.encode(), after)) < 0:
            assert time.monotonic() < ends, self.seen[-3000:]
            if select.select([self._fd], [], [], 0.5)[0]:
                self.seen += os.read(self._fd, 65536)
        return at + len(part.encode())

    def end(self, number=signal.SIGINT):
        """Interrupt it, and return its exit code and what it said on stderr."""
        self.process.send_signal(number)
        drain = threading.Thread(target=self._drain, daemon=True)
        drain.start()
        _, errors = self.process.communicate(timeout=WAIT_S)
        drain.join(WAIT_S)
        os.close(self._fd)
        return self.process.returncode, errors.decode()

    def _drain(self):
        try:
            while data := os.read(self._fd, 65536):
                self.seen += data
        except OSError:  # Linux's way to say that nobody has the terminal open any more
            pass


def more_tokens(times):
    """Yield the report again and again, a second apart, with ten more tokens each."""
    for i in range(times):
        report = control_pb2.WatchLoadResponse()
        report.CopyFrom(MESSAGE)
        report.at.seconds += i
        report.totals.generated_tokens += 10 * i
        yield report


def test_without_a_terminal_there_is_a_line_for_each_report(server):
    server.watch.reports = list(more_tokens(25))
    program = Program(server.addr)
    end = program.until("inter p99", program.until("inter p99"))  # the names come again after 20 lines
    assert end
    assert program.end() == (0, "")
    lines = program.seen.decode().splitlines()
    assert lines[0].split()[:3] == ["UTC", "gen/s", "prompt/s"]
    numbers = ["1,234", "100", "3", "2", "60", "%", "62.5", "ms", "2", "s", "7.81", "ms", "1", "s"]
    assert lines[1].split() == ["03:00:30", *numbers]
    assert b"\x1b" not in program.seen


def test_numbers_that_no_server_should_send(server, capsys):
    """They are shown somehow, and break nothing."""
    strange = control_pb2.WatchLoadResponse()
    strange.CopyFrom(MESSAGE)
    strange.load.kv_pages_used = 2**63
    strange.load.running_requests = 2**32 - 1
    strange.rates.generated_tokens_per_second = float("inf")
    strange.rates.padding_share = float("nan")
    strange.totals.since.seconds = 253402300799  # the last second of the year 9999
    strange.at.seconds = -62135596800  # the first second of the year 1
    strange.requests[0].age.seconds = -5
    server.watch.reports = (strange, MESSAGE)
    assert run(server, "--once") == 0
    assert "SERVING" in capsys.readouterr().out
    assert run(server, "--once", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rates"]["padding_share"] is None
    program = Program(server.addr)
    program.until("03:00:30")
    assert program.end() == (0, "")


@pytest.mark.ci
def test_json_lines_go_on_after_the_server_was_gone(server):
    server.watch.failures = [DRAINING]
    server.watch.reports = list(more_tokens(2))
    program = Program(server.addr, "--json")
    program.until('"generated_tokens": 4010', program.until('"generated_tokens": 4010'))
    code, errors = program.end(signal.SIGTERM)
    assert (code, errors.count("is shutting down")) == (0, 1)
    found = [json.loads(line) for line in program.seen.decode().splitlines()]
    assert [report["totals"]["generated_tokens"] for report in found] == [4000, 4010, 4000, 4010]
    assert found[0] == plain(REPORT)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.ci)])
def test_on_a_terminal_it_draws_and_leaves_the_screen_as_it_was(server, number):
    server.name = "toy\x1b]0;owned\x07\x1b[2J\x1b[31mx"
    server.watch.reports = list(more_tokens(5))
    program = Program(server.addr, terminal=(100, 30))
    program.until("oldest")
    program.resize(40, 6)
    assert program.until("running", program.until("\x1b[H", len(program.seen)))
    assert program.end(number) == (0, "")
    seen = program.seen.decode()
    assert seen.count("\x1b[?1049h") == seen.count("\x1b[?1049l") == 1  # the other screen, and back
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")  # the cursor is shown again
    # what the server says reaches the terminal without its controls
    assert "\x1b]" not in seen
    assert "\x1b[2J" not in seen
    assert "\\x1b[31mx" in seen
    controls = set(re.findall(r"\x1b\[\??[0-9;]*[A-Za-z]", seen))
    assert all(re.fullmatch(r"\x1b\[[0-9;]*m|\x1b\[H|\x1b\[\?(25|1049)[hl]", found) for found in controls)


@pytest.mark.ci
def test_a_lost_server_is_told_and_found_again():
    """It stops while it is watched, and another one starts at its address."""
    with running() as server:
        program = Program(server.addr, terminal=(100, 30))
        program.until("SERVING")
    lost = program.until("LOST")
    with running(server.addr) as again:
        again.name = "risen"
        program.until("risen", program.until("SERVING", lost))
        assert program.end() == (0, "")
