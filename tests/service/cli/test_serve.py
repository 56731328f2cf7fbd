"""`penstock serve` as a process: what it prints, what it refuses, and how signals end it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc, types_pb2
from tests.service.h2peer import Peer
from tests.service.rig import generate, stream
from tests.support.models.compilation_cache import TEST_CACHE

pytestmark = pytest.mark.ci

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3"
REPOSITORY = Path(__file__).parents[3]
ENGINE = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--kv-cache-bytes", "4M"]
START_S = 150.0


class Process:
    """A server process, whose output is collected as it comes."""

    def __init__(self, *command: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-u", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPOSITORY,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        self.lines.extend(iter(self.popen.stdout.readline, ""))

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = re.search(pattern, self.output)
            if found:
                return found
            if self.popen.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"never printed {pattern!r}:\n{self.output}")

    def wait(self, timeout_s: float = 60.0) -> int:
        code = self.popen.wait(timeout_s)
        self._reader.join(60)
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        return code


@contextlib.contextmanager
def running(*command: str) -> Iterator[Process]:
    started = Process(*command)
    try:
        yield started
    finally:
        if started.popen.poll() is None:
            started.popen.kill()
        started.wait()


def process(*arguments: str) -> contextlib.AbstractContextManager[Process]:
    """Run the command itself."""
    return running("-m", "penstock.cli", "serve", *arguments)


def fake_process(*arguments: str) -> contextlib.AbstractContextManager[Process]:
    """Run the command on the fake engine at ten tokens a second; see tests/service/serve_fake.py."""
    return running("-m", "tests.service.serve_fake", *arguments)


def free_port() -> int:
    """Find a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_checkpoint_is_served_until_sigterm() -> None:
    """On the real engine: what was resolved is logged, a running stream gets all of its tokens, and the exit
    code is 0.
    """
    cache = ["--compilation-cache", str(TEST_CACHE)]
    defaults = ["--override-generation-config", '{"temperature": 0, "presence_penalty": 0.5}']
    with process(str(GOLDEN), "--port", "0", "--grace", "60", *ENGINE, *cache, *defaults) as server:
        address = server.wait_for(r"ready on (127\.0\.0\.1:\d+)")[1]
        with grpc.insecure_channel(address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            assert health.Check(health_pb2.HealthCheckRequest()).status == 1
            info = control_pb2_grpc.ControlServiceStub(channel).GetModelInfo(
                control_pb2.GetModelInfoRequest()
            )
            assert info.default_sampling == types_pb2.SamplingParams(
                temperature=0, top_p=1, top_k=0, min_p=0, presence_penalty=0.5, frequency_penalty=0,
                repetition_penalty=1, n=1,
            )  # fmt: skip
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            asked = {"max_tokens": 200, "ignore_eos": True}
            call = stub.Stream(stream("def f(x):", stopping=asked, sampling={"temperature": 0}))
            assert next(call).WhichOneof("event") == "started"
            assert next(call).delta.token_ids
            server.popen.send_signal(signal.SIGTERM)
            server.wait_for("stopping")
            last = list(call)[-2:]
        assert last[0].finished.finish.reason == types_pb2.FINISH_REASON_MAX_TOKENS
        assert last[1].summary.usage.completion_tokens == 200
        assert server.wait() == 0
    for line in ("Qwen3ForCausalLM, float32", "context 1024 tokens", "KV cache", "device: cpu:0"):
        assert line in server.output
    assert "Traceback" not in server.output


@pytest.mark.parametrize("verbosity", [None, "ERROR"])
def test_grpcs_core_is_silent_unless_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verbosity: str | None
) -> None:
    """Its core complains about a missing tracer when a server is made. The model is missing, so the process
    ends then.
    """
    monkeypatch.setenv("GRPC_TRACE", "no_such_tracer")
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    if verbosity is not None:
        monkeypatch.setenv("GRPC_VERBOSITY", verbosity)
    with process(str(tmp_path / "missing"), "--port", "0") as server:
        assert server.wait(START_S) != 0
        assert "missing" in server.output, "it came so far as to look for the model"
        assert ("no_such_tracer" in server.output) == (verbosity is not None)


def test_sigterm_finishes_what_runs_and_refuses_new() -> None:
    with fake_process("--port", "0", "--grace", "60") as server:
        address = server.wait_for(r"ready on (127\.0\.0\.1:\d+)")[1]
        with grpc.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Stream(stream("a"))
            next(call)
            server.popen.send_signal(signal.SIGTERM)
            server.wait_for("stopping")
            while (failure := stub.Generate.future(generate("a")).exception(20)) is None:
                pass  # it came before the drain began, and was still accepted
            assert isinstance(failure, grpc.RpcError)
            # CANCELLED is what gRPC makes of a call that crosses its GOAWAY on the way.
            assert failure.code().name in ("UNAVAILABLE", "CANCELLED")
            text = "".join(message.delta.text for message in call)
        assert text == "bcdefghijklmnopqrstuvwxyz"
        assert server.wait() == 0
    assert "Traceback" not in server.output


@pytest.mark.sweep
def test_requests_beyond_the_grace_end_aborted() -> None:
    with fake_process("--port", "0", "--grace", "0.2") as server:
        address = server.wait_for(r"ready on (127\.0\.0\.1:\d+)")[1]
        with grpc.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Stream(stream("a", stopping={"ignore_eos": True, "max_tokens": 10_000}))
            next(call)
            server.popen.send_signal(signal.SIGTERM)
            finished = list(call)[-2].finished.finish
        assert finished.reason == types_pb2.FINISH_REASON_ABORTED
        assert server.wait() == 0


def test_sigint_ends_it_too() -> None:
    with fake_process("--port", "0") as server:
        server.wait_for("ready on")
        server.popen.send_signal(signal.SIGINT)
        assert server.wait() == 0
    assert "Traceback" not in server.output


def test_a_second_signal_ends_it_at_once() -> None:
    with fake_process("--port", "0", "--grace", "600") as server:
        address = server.wait_for(r"ready on (127\.0\.0\.1:\d+)")[1]
        with grpc.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Stream(stream("a", stopping={"ignore_eos": True, "max_tokens": 10_000}))
            next(call)
            server.popen.send_signal(signal.SIGTERM)
            server.wait_for("stopping")
            server.popen.send_signal(signal.SIGTERM)
            assert server.wait() == 128 + signal.SIGTERM
    assert "second signal" in server.output


def test_sigterm_during_warm_up_ends_it() -> None:
    """The fake engine's warm-up never ends here, like a long compilation."""
    with fake_process("--port", "0", "--served-model-name", "never-ready") as server:
        server.wait_for("compiled programs are kept in")
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert "ready on" not in server.output
    assert "Traceback" not in server.output


def test_health_answers_while_the_model_loads_and_sigterm_ends_that() -> None:
    """The fake engine's loading never ends here, like a long download."""
    port = free_port()
    with fake_process("--port", str(port), "--served-model-name", "never-loads") as server:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest
            assert health.Check(asked(), wait_for_ready=True, timeout=START_S).status == 2
            assert health.Check(asked(service="liveness"), timeout=60).status == 1
            failure = inference_pb2_grpc.InferenceServiceStub(channel).Generate.future(generate("a"))
            assert failure.code() is grpc.StatusCode.UNAVAILABLE
            assert "loading" in (failure.details() or "")
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert "Traceback" not in server.output


async def test_sigterm_ends_it_though_a_watcher_reads_nothing() -> None:
    with fake_process("--port", "0", "--grace", "1") as server:
        address = await asyncio.to_thread(lambda: server.wait_for(r"ready on (127\.0\.0\.1:\d+)")[1])
        async with Peer(address) as peer:
            watch = await peer.call("/grpc.health.v1.Health/Watch", b"")
            await peer.until(lambda: peer.headers(watch))
            server.popen.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.wait) == 0
    assert "Traceback" not in server.output


def test_a_dead_engine_ends_the_process_with_1() -> None:
    with fake_process("--port", "0", "--served-model-name", "dies") as server:
        address = server.wait_for(r"ready on (127\.0\.0\.1:\d+)")[1]
        with grpc.insecure_channel(address) as channel:
            failure = (
                inference_pb2_grpc.InferenceServiceStub(channel).Generate.future(generate("a")).exception(20)
            )
            assert isinstance(failure, grpc.RpcError)
            assert failure.code() is grpc.StatusCode.INTERNAL
        assert server.wait() == 1
    assert "the engine is dead" in server.output


@pytest.mark.sweep
def test_an_engine_that_hangs_does_not_keep_the_process_from_its_end() -> None:
    with fake_process("--port", "0", "--grace", "0.1", "--served-model-name", "hangs") as server:
        address = server.wait_for(r"ready on (127\.0\.0\.1:\d+)")[1]
        with grpc.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Stream(stream("a"))
            assert next(call).WhichOneof("event") == "started"
            server.popen.send_signal(signal.SIGTERM)
            assert server.wait() == 1
            call.cancel()
        assert "the engine hangs, so the server ends without it" in server.output
        assert "threading.Event().wait()" in server.output, "where it hangs"


def test_listening_for_others_is_warned_about() -> None:
    with fake_process("--port", "0", "--host", "0.0.0.0", "--insecure") as server:
        server.wait_for(r"WARNING.*0\.0\.0\.0.* no TLS .* no way to tell callers apart")
        server.wait_for(r"ready on 0\.0\.0\.0:\d+")
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_each_address_is_told(tmp_path: Path) -> None:
    """The control address comes before the line that scripts wait for."""
    path = tmp_path / "s"
    with fake_process("--port", "0", "--unix-socket", str(path), "--control-port", "0") as server:
        server.wait_for(rf"ready on 127\.0\.0\.1:\d+\npenstock: ready on unix:{path}\n")
        control = re.search(r"penstock: control on (127\.0\.0\.1:\d+)\n(.|\n)*ready on", server.output)
        assert control is not None
        with grpc.insecure_channel(control[1]) as channel:
            stub: Any = control_pb2_grpc.ControlServiceStub(channel)
            stub.FlushCache(control_pb2.FlushCacheRequest(), timeout=20)
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not path.exists()
