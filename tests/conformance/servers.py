"""Starts the server of a group of cases, and brings it into the state in which the cases find it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import grpc

from tests.conformance.calling import call, outcome
from tests.conformance.table import Group, Step, for_run
from tests.front_processes import FLAGS
from tests.support.demo_server import running
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.toolchains import ROOT

WAIT_S = 120.0


@contextlib.contextmanager
def server_of(group: Group, folder: Path) -> Iterator[str]:
    """Run the group's server. Gives its address. `folder` is for its files."""
    model = group.server["model"]
    flags = [
        flag.replace("{root}", str(ROOT)).replace("{folder}", str(folder)) for flag in group.server["flags"]
    ]
    if "keys" in group.server:
        keys = folder / "keys.json"
        keys.write_text(json.dumps({"version": 1, "keys": group.server["keys"]}))
        keys.chmod(0o600)
        flags += ["--keys", str(keys)]
    if model == "fake":
        command = ["tests.service.serve_fake"]
    else:
        path = model if model == "demo" else str(ROOT / model)
        command = ["penstock.cli", "serve", path, "--compilation-cache", str(TEST_CACHE)]
    command += ["--grace", "0", *FLAGS, *flags]
    start = loading if group.server.get("loads_for_ever") else ready
    with start(*command) as addr:
        yield addr


@contextlib.contextmanager
def ready(*command: str) -> Iterator[str]:
    with running(*command, "--port", "0") as (_, addr):
        yield addr


@contextlib.contextmanager
def loading(*command: str) -> Iterator[str]:
    """Run a server that never says that it is ready. Gives its address as soon as it takes connections."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    addr = f"127.0.0.1:{port}"
    words = [sys.executable, "-m", *command, "--port", str(port)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            with grpc.insecure_channel(addr) as channel:
                grpc.channel_ready_future(channel).result(WAIT_S)
            yield addr
        finally:
            server.terminate()
            server.wait(60)


@contextlib.contextmanager
def prepared(group: Group, addr: str, run: str) -> Iterator[None]:
    """Make the group's steps: those before the cases, and at the end those after them."""
    give_up_at = time.monotonic() + WAIT_S
    with grpc.insecure_channel(addr) as channel:
        while True:
            with contextlib.ExitStack() as held:
                for step in group.before:
                    _make(channel, step, run, held)
                good = _is_at(channel, group.server.get("load", {}))
                if good:
                    yield
                for step in group.after:
                    _make(channel, step, run, held)
            if good:
                return
            assert time.monotonic() < give_up_at, f"{group.name}: the server does not get into its state"


def _is_at(channel: grpc.Channel, load: Mapping[str, Any]) -> bool:
    """Say whether GetLoad says this. A held request may have ended before a pause could stop it."""
    if not load:
        return True
    (now,) = outcome(call(channel, "penstock.v1.ControlService/GetLoad", [{}]))["messages"]
    return {name: now.get(name) for name in load} == load


def _make(channel: grpc.Channel, step: Step, run: str, stack: contextlib.ExitStack) -> None:
    requests: Any = for_run(list(step.requests), run)
    if not step.held:
        done = outcome(call(channel, step.method, requests, step.metadata))
        assert done["status"]["code"] == "OK", done
        return
    give_up_at = time.monotonic() + WAIT_S
    while not _holds(call(channel, step.method, requests, step.metadata, timeout_s=None), step.held, stack):
        assert time.monotonic() < give_up_at, f"{step.method} is refused for too long"
        time.sleep(0.1)


def _holds(replies: Any, num: int, stack: contextlib.ExitStack) -> bool:
    """Read so many replies, and cancel the call when the stack ends. False where the server refuses the call
    because the one of the run before, which was cancelled, has not ended yet.
    """
    try:
        assert len(list(islice(replies, num))) == num
    except grpc.RpcError as failed:
        error: Any = failed
        if error.code() in (grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED):
            return False
        raise
    stack.callback(replies.cancel)
    return True
