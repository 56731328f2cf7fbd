"""Starts the server of a group of cases, and brings it into the state in which the cases find it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import grpc

from tests.conformance.calling import call, outcome
from tests.conformance.table import Group, Step, for_run
from tests.front_processes import FLAGS
from tests.support.demo_server import running, served
from tests.support.toolchains import ROOT


@contextlib.contextmanager
def server_of(group: Group) -> Iterator[str]:
    """Run the group's server. Gives its address."""
    flags = [flag.replace("{root}", str(ROOT)) for flag in group.server.get("flags", ())]
    model = group.server["model"]
    if model == "fake":
        command = ["tests.service.serve_fake", "--port", "0", "--grace", "0", *FLAGS]
        with running(*command, *flags) as (_, addr):
            yield addr
        return
    with served(model if model == "demo" else str(ROOT / model), *flags) as addr:
        yield addr


@contextlib.contextmanager
def prepared(group: Group, addr: str, run: str) -> Iterator[None]:
    """Make the group's steps: those before the cases, and at the end those after them."""
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(addr))
        for step in group.before:
            _make(channel, step, run, stack)
        yield
        for step in group.after:
            _make(channel, step, run, stack)


def _make(channel: grpc.Channel, step: Step, run: str, stack: contextlib.ExitStack) -> None:
    requests: Any = for_run(list(step.requests), run)
    replies = call(channel, step.method, requests, step.metadata, timeout_s=None if step.held else 60)
    if step.held:
        stack.callback(replies.cancel)
        assert len(list(islice(replies, step.held))) == step.held
    else:
        done = outcome(replies)
        assert done["status"]["code"] == "OK", done
