"""Clients that hang up while they are answered are not logged as errors of the server."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.service.telemetry.logs import grpc_log
from penstock.shared.logs import OneLine
from tests.service.h2peer import Peer
from tests.service.key_rig import key, serving_keys
from tests.service.rig import fake, generate, serving, until
from tests.support.otlp import Recorder

GENERATE = "/penstock.v1.InferenceService/Generate"
UNIMPLEMENTED, UNAUTHENTICATED = 12, 16


@pytest.fixture
def hushed() -> Iterator[None]:
    logger = logging.getLogger(grpc_log.LOGGER)
    before = logger.filters[:]
    grpc_log.hush()
    yield
    logger.filters[:] = before


async def test_a_client_that_hangs_up_while_it_is_answered(hushed: None, caplog) -> None:
    request = generate("a", stopping={"max_tokens": 50, "ignore_eos": True}).SerializeToString()
    # its window has no room for an answer
    async with serving(fake()) as rig, Peer(rig.server.address) as peer:
        streams = [await peer.call(GENERATE, request) for _ in range(5)]
        await peer.until(lambda: all(peer.headers(stream) for stream in streams))
        for stream in streams:
            await peer.reset(stream)
        await until(lambda: rig.server.admission.active_work == 0)
        await asyncio.sleep(0)
    assert not caplog.records, "at the level of warnings"


def test_other_errors_are_told(hushed: None, caplog) -> None:
    logger = logging.getLogger(grpc_log.LOGGER)
    for error in (
        ValueError('Failed "execute_batch"'),
        grpc.aio.InternalError("Failed grpc_call_start_batch: 8"),
        grpc.aio.InternalError('Failed "execute_batch": (...)'),
    ):
        try:
            raise error
        except Exception:
            logger.exception("raised")
    logger.error("without an exception")
    assert [r.exc_info is None for r in caplog.records] == [False, False, True]


async def test_metadata_that_are_no_text_are_not_quoted(tmp_path: Path, caplog: Any) -> None:
    """cygrpc logs them three times a call, and so would reveal a key with one wrong byte."""
    sent = [("authorization", b"Bearer psk_secret\xff"), ("x-note", b"\xfe\x1b[31m")]
    async with serving_keys(tmp_path / "keys.json", key("secret")) as rig, Peer(rig.server.address) as peer:
        with caplog.at_level(logging.DEBUG):
            stream = await peer.call(GENERATE, generate("a").SerializeToString(), metadata=sent)
            assert await peer.status(stream) == UNAUTHENTICATED
            stream = await peer.call("/some.other.Service/Method", b"", metadata=sent)
            assert await peer.status(stream) == UNIMPLEMENTED
    assert "psk_secret" not in caplog.text
    assert "Invalid encoding" not in caplog.text


@pytest.mark.parametrize("traced", [False, True])
async def test_a_tracestate_that_is_none_is_not_quoted(tmp_path: Path, caplog: Any, traced: bool) -> None:
    """OpenTelemetry logs a warning that quotes all of it."""
    sent = [
        ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("tracestate", b"evil psk_state"),
        ("authorization", b"Bearer psk_secret"),
    ]
    recorder = Recorder() if traced else None
    tracing = None if recorder is None else recorder.tracing
    file = tmp_path / "keys.json"
    async with (
        serving_keys(file, key("secret"), tracing=tracing) as rig,
        Peer(rig.server.address, initial_window=65535) as peer,
    ):
        for metadata, code in ((sent, 0), (sent[:2], UNAUTHENTICATED)):
            stream = await peer.call(GENERATE, generate("a").SerializeToString(), metadata=metadata)
            assert await peer.status(stream) == code
        if recorder is not None:
            await until(lambda: GENERATE[1:] in recorder.spans)
            spans = [s for s in recorder.finished if s.name == GENERATE[1:]]
            assert [span.status for span in spans] == ["UNSET"], "only the caller's own"
    assert "psk_state" not in caplog.text


def test_control_characters_of_a_log_line_are_escaped() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "to %s", ("\x1b[31m\r\n\x9b\u2028b",), None)
    assert OneLine().format(record).endswith(" a: to \\x1b[31m\\x0d\\n\\x9b\\u2028b")
    try:
        raise ValueError("\x1b[31m")
    except ValueError:
        record.exc_info = sys.exc_info()
    written = OneLine().format(record)
    assert "\x1b" not in written
    assert "\nTraceback" in written
