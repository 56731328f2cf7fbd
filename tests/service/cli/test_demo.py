"""`penstock demo` around a stand-in for the server's process."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.cli.__main__ import main
from penstock.server_cli.commands import demo

# Serves health and one canned stream; SIGINT ends it with code 7, and a second one would with code 9.
SERVER = """
import os, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from penstock.v1 import inference_pb2 as pb, inference_pb2_grpc as rpc

class Fake(rpc.InferenceServiceServicer):
    def Stream(self, request, context):
        print("ASKED", request.prompt, request.stopping.max_tokens, flush=True)
        yield pb.StreamResponse(started=pb.StreamStarted(request_id="r"))
        yield pb.StreamResponse(delta=pb.OutputDelta(text=", there was a pond."))
        yield pb.StreamResponse(finished=pb.OutputFinished())
        yield pb.StreamResponse(summary=pb.StreamSummary())
    Generate = Abort = UpdateWeights = None

signals, parent = [], os.getppid()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: signals.append(number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
print("loading the model in group", os.getpgrp(), flush=True)
server = grpc.server(ThreadPoolExecutor(4))
rpc.add_InferenceServiceServicer_to_server(Fake(), server)
status = health.HealthServicer()
health_pb2_grpc.add_HealthServicer_to_server(status, server)
server.add_insecure_port(sys.argv[1])
server.start()
time.sleep(0.7)
status.set("penstock.v1.InferenceService", health_pb2.HealthCheckResponse.SERVING)
while not signals and os.getppid() == parent:  # the test may have killed a demo that hangs
    time.sleep(0.05)
time.sleep(0.5)  # for a second one
server.stop(None)
print("GOT", *signals, flush=True)
sys.exit(7 if len(signals) == 1 else 9)
"""

# What `penstock demo` runs, with the server's command replaced by what comes after the port.
DRIVER = """
import sys
from penstock.server_cli.commands import demo
from penstock.cli.__main__ import main
demo.server_command = lambda host, port, *_, **__: [sys.executable, "-c", sys.argv[2], f"{host}:{port}"]
demo.READY_LIMIT_S = 3.0 if "never ready" in sys.argv[2] else demo.READY_LIMIT_S
sys.exit(main(["demo", "--port", sys.argv[1]]))
"""

# The same program, where a thread other than the main one is given the signals, as any thread may be.
ELSEWHERE = """
import signal, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
"""


@pytest.fixture
def port():
    """Find a port below those that the system assigns, so that no test that runs meanwhile is given it."""
    for candidate in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", candidate))
            return candidate
    raise AssertionError("no free port")


@contextlib.contextmanager
def start(port, server, driver=DRIVER, **more):
    """Start the demo. It and its server end with the block, even if a test fails or is interrupted."""
    command = [sys.executable, "-c", driver, str(port), server]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **more) as program:
        try:
            yield program
        finally:
            if program.poll() is None:
                program.terminate()
                try:
                    program.wait(60)
                except subprocess.TimeoutExpired:
                    program.kill()
                    raise


def read_until(program, end):
    """Read what the program prints, up to the line that starts with `end`."""
    lines = []
    for line in program.stdout:
        lines.append(line)
        if line.startswith(end):
            return "".join(lines)
    raise AssertionError(f"ended without {end!r}: {''.join(lines)}{program.stderr.read()}")


def until_it_waits(program):
    """Wait until the main thread has slept for half a second without running."""
    status = Path(f"/proc/{program.pid}/status")
    turns, before = "", None
    while turns != before:
        time.sleep(0.5)
        before, turns = turns, status.read_text().partition("voluntary_ctxt_switches:")[2].split()[0]


def test_the_server_is_the_real_command():
    command = [
        sys.executable, "-P", "-m", "penstock.cli", "serve", "demo", "--host", "127.0.0.1", "--port", "5",
        "--openai-port", "8000",
    ]  # fmt: skip
    assert demo.server_command("127.0.0.1", 5, 8000, insecure=False) == command
    assert demo.server_command("127.0.0.1", 5, 8000, insecure=True) == [*command, "--insecure"]


@pytest.mark.ci
def test_other_machines_are_let_in_only_when_that_is_said(capfd, port):
    """The server's own message says what to do."""
    assert main(["demo", "--host", "0.0.0.0", "--port", str(port)]) == 2
    assert "0.0.0.0 can be reached from other machines" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.ci)])
def test_it_shows_an_answer_and_stays_up_until_it_is_told(port, number):
    with start(port, SERVER) as program:
        shown = read_until(program, "Serving on")
        program.send_signal(number)
        out, err = program.communicate(timeout=60)
    assert "loading the model" in shown
    assert "ASKED Once upon a time 120" in shown
    assert "Once upon a time, there was a pond." in shown
    assert f"127.0.0.1:{port} penstock.v1.InferenceService/Stream" in shown
    for command in ("generate", "chat", "info"):
        assert f"penstock {command}" in shown.replace(" -m penstock.cli", " penstock")
    assert f'with Client("127.0.0.1:{port}") as client:' in shown
    assert (out, err) == (f"GOT {number.value}\n", "")
    assert program.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.ci)])
def test_a_signal_that_does_not_wake_the_main_thread_is_not_lost(port, number):
    """A signal may come just before the main thread begins to wait, and Python's handlers run only there."""
    with start(port, SERVER, ELSEWHERE + DRIVER) as program:
        read_until(program, "Serving on")
        until_it_waits(program)
        program.send_signal(number)
        out, err = program.communicate(timeout=60)
    assert (out, err, program.returncode) == (f"GOT {number.value}\n", "", 7)


@pytest.mark.ci
def test_it_gives_up_on_a_server_that_is_never_ready(port):
    never = SERVER.replace("SERVING)", "NOT_SERVING)  # never ready")
    assert never != SERVER
    with start(port, never) as program:
        out, err = program.communicate(timeout=60)
    assert (out.count("GOT 15"), program.returncode) == (1, 7)
    assert err.startswith("penstock demo: the server was not ready 3 s after its start, so it is stopped")
    assert err.count("\n") == 1


@pytest.mark.ci
def test_a_failure_is_no_success_though_the_server_ended_well(port):
    never = SERVER.replace("SERVING)", "NOT_SERVING)  # never ready").replace("sys.exit(7 ", "sys.exit(0 ")
    with start(port, never) as program:
        program.communicate(timeout=60)
    assert program.returncode == 1


@pytest.mark.ci
def test_a_proxy_of_the_environment_is_not_asked_for_the_server_on_this_machine(port):
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:1")
    with start(port, SERVER, env=os.environ | nowhere) as program:
        assert "there was a pond" in read_until(program, "Serving on")
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=60)


@pytest.mark.ci
def test_ctrl_c_of_the_terminal_reaches_the_server_once(port):
    """A terminal signals the whole foreground group; the server must not be in it."""
    with start(port, SERVER, process_group=0) as program:
        shown = read_until(program, "Serving on")
        assert f"in group {program.pid}\n" not in shown
        subprocess.run(["kill", "-INT", "--", f"-{program.pid}"], check=True)
        out, _ = program.communicate(timeout=60)
    assert (out, program.returncode) == ("GOT 2\n", 7)


def test_the_lines_to_paste_are_real(port):
    """The Python lines run as they are printed."""
    with start(port, SERVER) as program:
        shown = read_until(program, "Serving on")
        snippet = shown[shown.index("  from penstock.client") : shown.index("Serving on")]
        program_text = "\n".join(line[2:] for line in snippet.splitlines())
        done = subprocess.run(
            [sys.executable, "-c", program_text], capture_output=True, text=True, timeout=60, check=False
        )
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=60)
    assert (done.stdout, done.stderr) == (", there was a pond.", "")


def test_a_server_that_dies_while_loading(port):
    with start(port, "import sys; sys.exit(3)") as program:
        out, err = program.communicate(timeout=60)
    assert (out, program.returncode) == ("", 3)
    assert err == "penstock demo: the server ended with exit code 3; its output above says why\n"


def test_a_server_that_is_killed(port):
    with start(port, "import os; os.kill(os.getpid(), 9)") as program:
        _, err = program.communicate(timeout=60)
    assert program.returncode == 128 + 9
    assert "exit code -9" in err


@pytest.mark.ci
def test_ctrl_c_while_loading(port):
    loading = "import time; print('loading', flush=True); time.sleep(600)"
    with start(port, loading) as program:
        read_until(program, "loading")
        program.send_signal(signal.SIGTERM)
        _, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (128 + 15, "")


@pytest.mark.ci
def test_a_server_that_refuses_the_sample_is_not_left_behind(port):
    refusing = SERVER.replace(
        'yield pb.StreamResponse(started=pb.StreamStarted(request_id="r"))',
        'context.abort(grpc.StatusCode.INTERNAL, "the engine died")',
    )
    with start(port, refusing) as program:
        _, err = program.communicate(timeout=60)
    assert program.returncode == 7
    assert "penstock demo: the server failed (INTERNAL): the engine died" in err


@pytest.mark.ci
def test_a_reader_that_goes_away_leaves_no_server_behind(port):
    silent = SERVER.replace('print("ASKED", request.prompt, request.stopping.max_tokens, flush=True)', "pass")
    assert silent != SERVER
    with start(port, silent) as program:
        read_until(program, "loading")
        program.stdout.close()
        assert program.wait(60) == 1
    assert demo.problem_of("127.0.0.1", port) is None


def test_a_taken_port_is_named_before_anything_starts(port, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert main(["demo", "--port", str(port)]) == 1
    shown = capsys.readouterr()
    assert shown.err == (
        f"penstock demo: port {port} on 127.0.0.1 is taken, perhaps by a running demo; "
        f"choose another: penstock demo --port {port + 1}\n"
    )
    assert shown.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "0"], "--port must be from 1 to 65535, not 0"),
        (["--port", "65536"], "--port must be from 1 to 65535, not 65536"),
        (["--host", "nohost.invalid"], "cannot listen on nohost.invalid, port 50051: "),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1, port 50051: Cannot assign requested address"),
    ],
)
def test_an_address_nobody_can_listen_on_is_not_called_taken(arguments, message, capsys):
    assert main(["demo", *arguments]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"penstock demo: {message}")
    assert shown.count("\n") == 1
