"""How replies begin, go on and end, seen from the client: by two endpoints of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from penstock.openai import app
from penstock.openai.calls import call_of
from penstock.openai.endpoints import Endpoint
from penstock.openai.front import front_of
from penstock.openai.generation.frames import DONE
from penstock.openai.jsonbytes import json_bytes
from penstock.openai.reading import read_body
from penstock.openai.replying import Events, answered, event, json_response, sse
from penstock.openai.schemas.base import RequestBody
from tests.service.openai.rig import FrontRig, front_rig
from tests.service.rig import WAIT_S, fake, until


class Body(RequestBody):
    prompt: str
    max_tokens: int | None = None


async def whole(request: Request) -> Response:
    call, body = call_of(request), await read_body(request, Body)
    client = front_of(request).backend.client
    made = await answered(
        request,
        client.generate(
            body.prompt,
            max_tokens=body.max_tokens,
            request_id=call.answer_id("test"),
            metadata=call.metadata,
            timeout=call.timeout,
        ),
    )
    return json_response({"text": made.text})


async def streamed(request: Request) -> Response:
    call, body = call_of(request), await read_body(request, Body)

    async def events() -> Events:
        client = front_of(request).backend.client
        options: Any = {"max_tokens": body.max_tokens, "metadata": call.metadata, "timeout": call.timeout}
        async with client.stream(body.prompt, request_id=call.answer_id("test"), **options) as stream:
            async for made in stream:
                if made.delta:
                    yield event(json_bytes({"text": made.delta}))
        yield DONE

    return await sse(request, events())


PARAMS = {"prompt": "prompt", "stopping.max_tokens": "max_tokens"}
ENDPOINTS = (
    *app.ENDPOINTS,
    Endpoint("POST", "/whole", whole, "Generates.", Body, PARAMS),
    Endpoint("POST", "/streamed", streamed, "Streams.", Body, PARAMS),
)
PATHS = ["/whole", "/streamed"]


async def lines(reply: Any) -> AsyncIterator[str]:
    """Yield the data of the events of a reply."""
    async for line in reply.aiter_lines():
        if line:
            assert line.startswith("data: ")
            yield line.removeprefix("data: ")


def num_held(rig: FrontRig) -> int:
    """How many requests the engine has, and how many RPCs run at the server."""
    load = rig.engine.load()
    return int(load.num_running + load.num_waiting + rig.front.life.num_running)


async def test_a_stream_is_the_whole_in_parts() -> None:
    async with front_rig(endpoints=ENDPOINTS) as rig:
        reply = await rig.http.post("/whole", json={"prompt": "a", "max_tokens": 4})
        assert (reply.status_code, reply.json()) == (200, {"text": "bcde"})
        async with rig.http.stream("POST", "/streamed", json={"prompt": "a", "max_tokens": 4}) as streamed:
            found = [data async for data in lines(streamed)]
        assert found[-1] == "[DONE]"
        assert "".join(json.loads(data)["text"] for data in found[:-1]) == "bcde"
        assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_goes_away_frees_its_request(path: str) -> None:
    """Before the first token, where nothing has been sent yet."""
    async with front_rig(fake(hold=True), endpoints=ENDPOINTS) as rig:
        asking = asyncio.create_task(rig.http.post(path, json={"prompt": "a"}))
        await until(lambda: rig.engine.load().num_running == 1)
        asking.cancel()
        await until(lambda: num_held(rig) == 0)
        (request_id,) = rig.engine.cancelled
        assert request_id.startswith("test-")
        page = (await rig.http.get("/metrics")).text
        assert f'penstock_openai_requests_total{{code="",endpoint="{path}",status="499"}} 1.0' in page


async def test_a_client_that_goes_away_in_the_middle_frees_its_request() -> None:
    async with front_rig(fake(hold=True), endpoints=ENDPOINTS) as rig:
        rig.engine.step(2)
        async with rig.http.stream("POST", "/streamed", json={"prompt": "a"}) as reply:
            async for data in lines(reply):
                assert "text" in json.loads(data)
                break
            assert rig.engine.load().num_running == 1
        await until(lambda: num_held(rig) == 0)


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_before_the_reply_has_a_status(path: str) -> None:
    async with front_rig(endpoints=ENDPOINTS) as rig:
        reply = await rig.http.post(path, json={"prompt": "a", "max_tokens": 0})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["type"], error["param"], error["code"]) == (
            "invalid_request_error",
            "max_tokens",
            "invalid_value",
        )
        assert error["message"].startswith("Invalid value for 'max_tokens': ")


async def test_an_error_after_the_reply_began_is_its_last_event() -> None:
    async with front_rig(fake(hold=True), endpoints=ENDPOINTS) as rig:
        rig.engine.step(1)
        async with rig.http.stream("POST", "/streamed", json={"prompt": "a"}) as reply:
            found = lines(reply)
            assert "text" in json.loads(await anext(found))
            rig.engine.die("the device is gone")
            error = json.loads(await anext(found))["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_failure")
            assert [data async for data in found] == []


async def test_a_defect_after_the_reply_began_is_logged_with_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(request: Request) -> Response:
        async def events() -> Events:
            yield event(b"{}")
            raise ValueError("an internal secret")

        return await sse(request, events())

    async with front_rig(endpoints=(*ENDPOINTS, Endpoint("POST", "/broken", broken, "Breaks."))) as rig:
        reply = await rig.http.post("/broken", headers={"x-request-id": "mine"})
        assert reply.status_code == 200
        first, last = (line.removeprefix("data: ") for line in reply.text.split("\n\n") if line)
        assert (first, json.loads(last)["error"]["code"]) == ("{}", "internal")
    assert "secret" not in reply.text
    assert "request 'mine' failed after its reply began" in caplog.text


async def test_requests_that_run_are_ended_after_the_grace() -> None:
    async with front_rig(fake(hold=True), endpoints=ENDPOINTS) as rig:
        rig.engine.step(1)
        async with rig.http.stream("POST", "/streamed", json={"prompt": "a"}) as reply:
            found = lines(reply)
            await anext(found)
            asking = asyncio.create_task(rig.http.post("/whole", json={"prompt": "a"}))
            await until(lambda: rig.front.life.num_running == 2)
            stopping = asyncio.create_task(rig.server.stop(0.2))
            assert json.loads(await anext(found))["error"]["code"] == "draining"
            assert [data async for data in found] == []
        whole = await asking
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "draining")
        async with asyncio.timeout(WAIT_S):
            await stopping
        await until(lambda: rig.engine.load().num_running == 0)


async def test_requests_that_run_end_by_themselves_within_the_grace() -> None:
    async with front_rig(fake(hold=True), endpoints=ENDPOINTS) as rig:
        rig.engine.step(1)
        async with rig.http.stream("POST", "/streamed", json={"prompt": "a", "max_tokens": 3}) as reply:
            found = lines(reply)
            await anext(found)
            stopping = asyncio.create_task(rig.server.stop(WAIT_S))
            await until(lambda: rig.front.life.is_draining)
            late = await rig.http.post("/whole", json={"prompt": "a"})
            assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
            assert (await rig.http.get("/health")).status_code == 503
            rig.engine.release()
            assert [data async for data in found][-1] == "[DONE]"
        async with asyncio.timeout(WAIT_S):
            await stopping
