"""A client that goes away frees its request at once, at every endpoint that generates: its outputs in the
engine, its RPC at the server, and its task in the front.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.runtime.scheduling.load import Load
from tests.service.openai.rig import FrontRig, front_rig
from tests.service.rig import WAIT_S, fake, until

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
TEXT = {"model": "fake", "prompt": "a"}
TEXTS = {"model": "fake", "prompt": ["a", "b", "c"]}
ENDPOINTS = [
    ("/v1/chat/completions", CHAT, 1),
    ("/v1/chat/completions", CHAT | {"n": 3}, 3),
    ("/v1/completions", TEXT, 1),
    ("/v1/completions", TEXTS, 3),
    ("/v1/responses", {"model": "fake", "input": "a"}, 1),
    ("/v1/messages", CHAT | {"max_tokens": 9}, 1),
]


def num_held(rig: FrontRig) -> int:
    """Return how many outputs run or wait: for a slot, or for the prompt that they share with another."""
    load: Load = rig.engine.load()
    return load.num_running + load.num_waiting


def is_free(rig: FrontRig) -> bool:
    return not num_held(rig) and not rig.front.life.num_running and not rig.grpc.server._calls.num_running


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body", "outputs"), ENDPOINTS)
async def test_before_the_first_token(path: str, body: dict[str, Any], outputs: int, stream: bool) -> None:
    async with front_rig(fake(hold=True)) as rig:
        asking = asyncio.create_task(rig.http.post(path, json=body | {"stream": stream}))
        await until(lambda: num_held(rig) == outputs)
        assert not is_free(rig)
        asking.cancel()
        await until(lambda: is_free(rig))
        assert len(rig.engine.cancelled) == outputs


@pytest.mark.parametrize(("path", "body", "outputs"), ENDPOINTS)
async def test_in_the_middle_of_a_stream(path: str, body: dict[str, Any], outputs: int) -> None:
    async with front_rig(fake(hold=True)) as rig:
        rig.engine.step(2)
        async with rig.http.stream("POST", path, json=body | {"stream": True}) as reply:
            lines = reply.aiter_lines()  # httpx closes the connection when nobody holds this any more
            assert (await anext(lines)).startswith(("data: ", "event: "))
            await until(lambda: rig.engine.load().num_running == outputs)
        await until(lambda: is_free(rig))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_closes_its_side_is_one_that_goes_away(stream: bool) -> None:
    """TCP does not tell them apart, and a client that has gone must not hold the engine to the end."""
    body = json.dumps(TEXT | {"stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    async with front_rig(fake(hold=True)) as rig:
        reader, writer = await asyncio.open_connection(*rig.address)
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: rig.engine.load().num_running == 1)
        writer.write_eof()
        await until(lambda: is_free(rig))
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        writer.close()


async def test_another_request_takes_the_place_of_one_that_has_gone() -> None:
    async with front_rig(fake(hold=True, max_num_seqs=1)) as rig:
        gone = asyncio.create_task(rig.http.post("/v1/completions", json=TEXT))
        await until(lambda: rig.engine.load().num_running == 1)
        waiting = asyncio.create_task(rig.http.post("/v1/completions", json=TEXT | {"max_tokens": 2}))
        await until(lambda: rig.engine.load().num_waiting == 1)
        gone.cancel()
        await until(lambda: rig.engine.load().num_waiting == 0)
        rig.engine.release()
        assert (await waiting).json()["choices"][0]["text"] == "bc"
