"""Clients that hang up while they are answered are no error of the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import grpc
import pytest

from penstock.service import grpc_log
from tests.service.h2peer import Peer
from tests.service.rig import fake, generate, serving, until

GENERATE = "/penstock.v1.InferenceService/Generate"


@pytest.fixture
def hushed() -> Iterator[None]:
    logger = logging.getLogger(grpc_log.LOGGER)
    before = logger.filters[:]
    grpc_log.hush()
    yield
    logger.filters[:] = before


async def test_a_client_that_hangs_up_while_it_is_answered(hushed: None, caplog) -> None:
    request = generate("a", stopping={"max_tokens": 50, "ignore_eos": True}).SerializeToString()
    async with serving(fake()) as rig, Peer(rig.server.address) as peer:  # which has no window for an answer
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
