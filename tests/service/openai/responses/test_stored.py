"""Responses that are kept, called with openai's own client, before a gRPC server on the fake engine."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses.response_item import ResponseItem
from pydantic import TypeAdapter

from penstock.openai.failures import ApiError
from penstock.openai.settings import Settings, SettingsError
from penstock.openai.store import Kept, ResponseStore
from tests.service.openai.responses.sent_events import accumulated, events_of
from tests.service.openai.responses.test_serving import TOOL, scripted
from tests.service.openai.rig import FrontRig, front_rig, fronting
from tests.service.openai.test_openapi import against

CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'
CALLED = 'T:get|u:hi|a:<tool_call>get{"city": "Rome"}</tool_call>|t:28=get|a:'
SCRIPTS = {
    "s:Be brief.|u:hi|a:": "Hello.",
    "u:hi|a:Hello.|u:more|a:": "Again.",
    "u:hi|a:Hello.|u:more|a:Again.|u:last|a:": "Bye.",
    "u:hi|a:": "Hello.",
    "u:bye|a:": "<think>\nHm.\n</think>\n\nBye.",
    "T:get|u:hi|a:": CALL,
    CALLED: "It is warm.",
}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[FrontRig]:
    async with front_rig(scripted(SCRIPTS), settings={"store": tmp_path / "kept.db"}) as made:
        made.http.headers["authorization"] = f"Bearer {made.openai.api_key}"
        yield made


async def say(rig: FrontRig, text: Any, **fields: Any) -> Any:
    return await rig.openai.responses.create(model="fake", input=text, **fields)


async def test_a_conversation_goes_on_and_instructions_are_not_carried_over(rig: FrontRig) -> None:
    first = await say(rig, "hi", instructions="Be brief.")
    assert first.store is True
    second = await say(rig, "more", previous_response_id=first.id)
    assert (second.output_text, second.previous_response_id) == ("Again.", first.id)
    await rig.openai.responses.delete(first.id)  # each response goes on by itself
    third = await say(rig, [{"role": "user", "content": "last"}], previous_response_id=second.id)
    assert third.output_text == "Bye."


@pytest.mark.parametrize("streams", [False, True])
async def test_a_function_answers_a_call_that_is_kept(rig: FrontRig, streams: bool) -> None:
    tools = {"tools": [TOOL], "tool_choice": "required"}
    reply = await rig.http.post(
        "/v1/responses", json={"model": "fake", "input": "hi", "stream": streams, **tools}
    )
    first = accumulated(events_of(reply.text)) if streams else reply.json()
    kept = (await rig.http.get(f"/v1/responses/{first['id']}")).json()
    assert kept == first
    output = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "28"}
    last = await say(rig, [output], previous_response_id=first["id"], tools=[TOOL])
    assert last.output_text == "It is warm."


async def test_the_items_of_a_conversation_are_listed_in_pages(rig: FrontRig) -> None:
    first = await say(rig, "hi", instructions="Be brief.")
    second = await say(rig, [{"role": "user", "content": "more"}], previous_response_id=first.id)
    listed = rig.openai.responses.input_items.list
    items = [item async for item in listed(second.id, limit=1, order="asc")]
    assert [item.type for item in items] == ["message"] * 3
    assert [item.model_dump()["content"][0]["text"] for item in items] == ["hi", "Hello.", "more"]
    assert [item async for item in listed(second.id)] == items[::-1]
    page = await rig.http.get(f"/v1/responses/{second.id}/input_items", params={"limit": 2})
    made = (await rig.http.get("/openapi.json")).json()
    against(made, "InputItems", page.json())
    assert page.json()["has_more"] is True
    for item in page.json()["data"]:
        TypeAdapter(ResponseItem).validate_python(item)


async def test_what_was_sent_is_listed_with_the_fields_that_openais_types_have(rig: FrontRig) -> None:
    sent: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "id": "rs_1"},
        {"role": "assistant", "content": "Hello."},
        {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "28"},
        {"type": "custom_tool_call", "call_id": "d", "name": "run", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "28"},
    ]
    made = await say(rig, sent)
    items = [item async for item in rig.openai.responses.input_items.list(made.id, order="asc")]
    for item, given in zip(items, sent, strict=True):
        told = item.model_dump(exclude_none=True)
        TypeAdapter(ResponseItem).validate_python(told)
        assert {**told, **given, "content": told.get("content")} == {"content": None, **told}
    assert len({item.id for item in items}) == len(sent)


@pytest.mark.parametrize(
    "fields", [{}, {"instructions": "Be brief."}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}]
)
async def test_as_many_tokens_are_counted_as_the_response_has(rig: FrontRig, fields: Any) -> None:
    first = await say(rig, "hi", store=True)
    for asked in ({"input": "hi"}, {"input": "more", "previous_response_id": first.id}):
        counted = await rig.openai.responses.input_tokens.count(**asked, **fields)
        assert counted.object == "response.input_tokens"
        made = await rig.openai.responses.create(model="fake", max_output_tokens=1, **asked, **fields)
        assert made.usage is not None
        assert counted.input_tokens == made.usage.input_tokens
    wrong = [{"type": "function_call_output", "call_id": "none", "output": "28"}]
    for items, param in (([], "input"), (wrong, "input[0].call_id")):
        with pytest.raises(openai.BadRequestError) as caught:
            await rig.openai.responses.input_tokens.count(**fields | {"input": items})
        assert caught.value.param == param


@pytest.mark.parametrize("fields", [{"store": False}, {"max_output_tokens": 2, "store": True}])
async def test_store_says_whether_a_response_is_kept(rig: FrontRig, fields: dict[str, Any]) -> None:
    made = await say(rig, "hi", **fields)
    assert made.store is fields["store"]
    if fields["store"]:
        assert (await rig.openai.responses.retrieve(made.id)).status == "incomplete"
    else:
        with pytest.raises(openai.NotFoundError):
            await rig.openai.responses.retrieve(made.id)


async def test_unknown_and_deleted_ones_are_told_as_openai_tells_them(rig: FrontRig) -> None:
    made = await say(rig, "hi")
    document = (await rig.http.get("/openapi.json")).json()
    deleted = await rig.http.delete(f"/v1/responses/{made.id}")
    against(document, "ResponseDeleted", deleted.json())
    path = f"/v1/responses/{made.id}"
    for reply in (
        await rig.http.delete(path),
        await rig.http.get(path),
        await rig.http.get(f"{path}/input_items"),
    ):
        assert reply.status_code == 404
        error = reply.json()["error"]
        assert error["message"] == f"Response with id '{made.id}' not found."
        assert (error["type"], error["param"]) == ("invalid_request_error", None)
    with pytest.raises(openai.BadRequestError) as caught:
        await say(rig, "more", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "msg_x"}, "after"),
        ({"before": "msg_x"}, "before"),
        ({"limit": ["1", "2"]}, "limit"),
    ],
)
async def test_wrong_pages_are_refused_by_name(rig: FrontRig, query: dict[str, Any], param: str) -> None:
    made = await say(rig, "hi")
    reply = await rig.http.get(f"/v1/responses/{made.id}/input_items", params=query)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    refused = await rig.http.get(f"/v1/responses/{made.id}", params={"stream": "true"})
    assert refused.json()["error"]["param"] == "stream"
    listed = {"include[]": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
    assert (await rig.http.get(f"/v1/responses/{made.id}", params=listed)).status_code == 200


async def test_items_that_are_kept_may_be_named(rig: FrontRig) -> None:
    """As Vercel's AI SDK does by default."""
    first = await say(rig, "hi")
    reference = {"type": "item_reference", "id": first.output[0].id}
    turns: Any = [{"role": "user", "content": "hi"}, reference, {"role": "user", "content": "more"}]
    second = await say(rig, turns)
    assert second.output_text == "Again."
    assert [item.id async for item in rig.openai.responses.input_items.list(second.id)][1] == reference["id"]
    counted = await rig.openai.responses.input_tokens.count(input=turns)
    assert second.usage is not None
    assert counted.input_tokens == second.usage.input_tokens
    for unknown in ("msg_x", f"{reference['id'][:-1]}9"):
        with pytest.raises(openai.NotFoundError) as caught:
            await say(rig, [{"type": "item_reference", "id": unknown}])
        assert caught.value.param == "input[0].id"


async def test_errors_name_the_items_of_the_request_and_not_those_that_are_kept(rig: FrontRig) -> None:
    made = await say(rig, "hi")
    wrong = {"type": "function_call_output", "call_id": "none", "output": "28"}
    other = {"type": "telepathy"}
    for item, param in ((wrong, "input[0].call_id"), (other, "input[0].type")):
        with pytest.raises(openai.BadRequestError) as caught:
            await say(rig, [item], previous_response_id=made.id)
        assert caught.value.param == param


async def test_callers_see_their_own_responses_only_and_the_file_has_no_key(
    rig: FrontRig, tmp_path: Path
) -> None:
    def as_caller(key: str) -> Any:
        return {"headers": {"authorization": f"Bearer {key}"}}

    body = {"model": "fake", "input": "hi", "request_id": "same"}
    for key in ("secret-of-anna", "secret-of-bert"):
        await rig.http.post("/v1/responses", json=body | {"metadata": {"of": key[-4:]}}, **as_caller(key))
    shown = await rig.http.get("/v1/responses/resp_same", **as_caller("secret-of-anna"))
    assert shown.json()["metadata"] == {"of": "anna"}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        reply = await rig.http.request(
            method, f"/v1/responses/resp_same{path}", **as_caller("secret-of-carl")
        )
        assert reply.status_code == 404
    going_on = body | {"previous_response_id": "resp_same", "request_id": None}
    reply = await rig.http.post("/v1/responses", json=going_on, **as_caller("secret-of-carl"))
    assert reply.status_code == 400
    for file in (tmp_path / "kept.db", tmp_path / "kept.db-wal", tmp_path / "kept.db-shm"):
        assert b"secret-of" not in file.read_bytes()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_without_a_store_nothing_is_kept_and_callers_are_told_how_to_change_that() -> None:
    async with front_rig(scripted(SCRIPTS)) as rig:
        made = await rig.openai.responses.with_raw_response.create(model="fake", input="hi", store=True)
        assert made.headers["x-penstock-ignored"] == "store"
        assert made.http_response.json()["store"] is False
        with pytest.raises(openai.NotFoundError, match="--store"):
            await rig.openai.responses.retrieve("resp_x")
        with pytest.raises(openai.BadRequestError, match="--store") as caught:
            await say(rig, "hi", previous_response_id="resp_x")
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "unsupported_parameter")


async def test_workers_share_the_file(rig: FrontRig, tmp_path: Path) -> None:
    made = await say(rig, "hi")
    async with fronting(rig.grpc.server.address, store=tmp_path / "kept.db") as (_, _, url):
        other = rig.openai.with_options(base_url=f"{url}/v1")
        assert (await other.responses.retrieve(made.id)).output_text == "Hello."
        await asyncio.gather(*(say(rig, "hi") for _ in range(20)), other.responses.delete(made.id))
    with pytest.raises(openai.NotFoundError):
        await rig.openai.responses.retrieve(made.id)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_store_that_fails_fails_the_request_and_not_the_next(
    rig: FrontRig, tmp_path: Path, streams: bool
) -> None:
    other = sqlite3.connect(tmp_path / "kept.db", isolation_level=None)
    try:
        other.execute("CREATE TRIGGER full BEFORE INSERT ON responses BEGIN SELECT RAISE(ABORT, 'full'); END")
        body = {"model": "fake", "input": "hi", "stream": streams}
        reply = await rig.http.post("/v1/responses", json=body)
        if streams:
            events = events_of(reply.text)
            assert events[-1]["type"] == "response.failed"
            assert events[-1]["response"]["status"] == "failed"
        else:
            assert (reply.status_code, reply.json()["error"]["code"]) == (500, "store_failed")
        assert (await rig.http.post("/v1/responses", json=body | {"store": False})).status_code == 200
        other.execute("DROP TRIGGER full")
    finally:
        other.close()
    assert (await say(rig, "hi")).store is True


async def test_a_conversation_that_is_longer_than_a_body_does_not_go_on(tmp_path: Path) -> None:
    settings = {"store": tmp_path / "kept.db", "max_body_bytes": 2000}
    async with front_rig(scripted(SCRIPTS), settings=settings) as rig:
        short, long = await say(rig, "hi"), await say(rig, "a" * 1200, max_output_tokens=1)
        assert (await say(rig, "more", previous_response_id=short.id)).output_text == "Again."
        with pytest.raises(openai.APIStatusError) as caught:
            await say(rig, "more", previous_response_id=long.id)
        assert (caught.value.status_code, caught.value.param) == (413, "previous_response_id")


def opened(file: Path, **settings: Any) -> ResponseStore:
    clock = settings.pop("clock", None)
    made = Settings(store=file, **settings)
    return ResponseStore(made) if clock is None else ResponseStore(made, clock)


async def test_the_oldest_leave_so_that_the_file_stays_within_its_bound(tmp_path: Path) -> None:
    most, file = 1 << 20, tmp_path / "kept.db"
    store = opened(file, store_max_bytes=most)
    for i in range(200):
        await store.keep("k", f"r{i}", Kept(b"{}", bytes(30_000)))
        assert file.stat().st_size <= most
    there = [i for i in range(200) if await store.find("k", f"r{i}") is not None]
    assert there == list(range(there[0], 200))
    assert len(there) > 15, "much of the room is used"
    with pytest.raises(ApiError, match="larger than the store"):
        await store.keep("k", "large", Kept(b"{}", bytes(most)))
    assert await store.find("k", "r199") is not None, "what cannot be kept drives nothing out"
    store.close()


async def test_old_ones_are_not_found_and_leave_the_file(tmp_path: Path) -> None:
    now, file = [1_000_000.0], tmp_path / "kept.db"
    store = opened(file, store_days=2.0, clock=lambda: now[0])
    await store.keep("k", "old", Kept(b"{}", b"7" * 50_000))
    now[0] += 2 * 86400 - 1
    assert await store.find("k", "old") is not None
    now[0] += 2
    assert await store.find("k", "old") is None
    assert not await store.forget("k", "old")
    await store.keep("k", "new", Kept(b"{}", b"[]"))
    store.close()
    assert b"7777777" not in file.read_bytes(), "its pages are free, and overwritten"
    with sqlite3.connect(file) as other:
        assert other.execute("SELECT id FROM responses").fetchall() == [("new",)]
    other.close()


@pytest.mark.parametrize("what", ["no database", "a folder", "another version"])
def test_a_file_that_cannot_be_used_is_told_at_the_start(tmp_path: Path, what: str) -> None:
    file = tmp_path / "kept.db"
    if what == "no database":
        file.write_bytes(b"x" * 5000)
    elif what == "a folder":
        file.mkdir()
    else:
        opened(file).close()
        with sqlite3.connect(file) as other:
            other.execute("PRAGMA user_version = 99")
        other.close()
    with pytest.raises(SettingsError, match=r"^store: .*kept\.db cannot be used"):
        opened(file)
