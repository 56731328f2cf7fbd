"""Adapters as models of the OpenAI front: how they are listed, asked for, loaded and unloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.service.adapters_rig import on_disk
from tests.service.key_rig import CONTROL, INFER, key, write
from tests.service.openai.rig import FrontRig, front_rig
from tests.service.rig import fake

CHAT: Any = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
UPDATES = {"adapter_updates": True}


def engine(folder: Path) -> Any:
    """Make a fake engine with the adapter "sql" loaded, and "law" on the disk."""
    made = fake(max_adapters=2, adapter_dir=folder)
    made.adapters.load("sql", on_disk(folder, "sql"))
    on_disk(folder, "law", "2")
    return made


async def ask(rig: FrontRig, path: str, body: dict[str, Any]) -> Any:
    reply = await rig.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply


async def test_adapters_are_models(tmp_path: Path) -> None:
    async with front_rig(engine(tmp_path)) as rig:
        base, adapter = (await rig.openai.models.list()).data
        assert (base.id, base.to_dict().get("parent")) == ("fake", None)
        assert (adapter.id, adapter.to_dict()["parent"]) == ("sql", "fake")
        assert (await rig.openai.models.retrieve("sql")) == adapter
        assert (await rig.http.get("/v1/models/law")).status_code == 404
        page = (await rig.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
        assert [one["id"] for one in page["data"]] == ["fake", "sql"]
        assert (page["first_id"], page["last_id"]) == ("fake", "sql")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 16}),
        ("/v1/messages", CHAT),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "method": "embeddings"}),
        ("/v1/score", {"text_1": "a", "text_2": "b", "method": "embeddings"}),
    ],
)
async def test_a_request_names_an_adapter_as_its_model(tmp_path: Path, path: str, body: Any) -> None:
    async with front_rig(engine(tmp_path)) as rig:
        reply = await ask(rig, path, {**body, "model": "sql"})
        assert reply.json()["model"] == "sql"
        assert {one.adapter for one in rig.engine.seen} == {"sql"}
        assert (await ask(rig, path, {**body, "model": "fake"})).json()["model"] == "fake"
        assert rig.engine.seen[-1].adapter is None
        refused = await rig.http.post(path, json={**body, "model": "none"})
        assert refused.status_code == 404
        error = refused.json()["error"]
        if path != "/v1/messages":
            assert (error["param"], error["code"]) == ("model", "model_not_found")
        else:
            assert error["type"] == "not_found_error"


async def test_a_stream_tells_its_adapter(tmp_path: Path) -> None:
    async with front_rig(engine(tmp_path)) as rig:
        stream = await rig.openai.chat.completions.create(**CHAT, model="sql", stream=True)
        assert {chunk.model async for chunk in stream} == {"sql"}


async def test_tokens_of_an_adapter_are_those_of_its_model(tmp_path: Path) -> None:
    async with front_rig(engine(tmp_path)) as rig:
        told = [(await ask(rig, "/tokenize", {"prompt": "ab", "model": m})).json() for m in ("fake", "sql")]
        assert told[0] == told[1]
        assert (await rig.http.post("/tokenize", json={"prompt": "a", "model": "x"})).status_code == 404


async def test_vllms_endpoints_load_and_unload(tmp_path: Path) -> None:
    async with front_rig(engine(tmp_path), settings=UPDATES) as rig:
        body = {"lora_name": "law", "lora_path": str(tmp_path / "law")}
        loaded = await ask(rig, "/v1/load_lora_adapter", body)
        assert loaded.text == "Success: LoRA adapter 'law' added successfully."
        assert await ask(rig, "/v1/load_lora_adapter", body), "the same again"
        (tmp_path / "law" / "content").write_text("changed")
        again = await rig.http.post("/v1/load_lora_adapter", json=body)
        assert again.status_code == 400
        assert "'law' has already been loaded" in again.json()["error"]["message"]
        await ask(rig, "/v1/load_lora_adapter", {**body, "load_inplace": True})
        await ask(rig, "/v1/completions", {"prompt": "a", "model": "law", "max_tokens": 1})
        gone = await ask(rig, "/v1/unload_lora_adapter", {"lora_name": "law"})
        assert gone.text == "Success: LoRA adapter 'law' removed successfully."
        refused = await rig.http.post("/v1/unload_lora_adapter", json={"lora_name": "law"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            404,
            "The lora adapter 'law' cannot be found.",
        )
        for wrong, param in (
            ({"lora_name": "law"}, "lora_path"),
            ({**body, "lora_path": "law"}, "lora_path"),
            ({**body, "lora_path": "/etc"}, "lora_path"),
            ({**body, "lora_name": "a/b"}, "lora_name"),
        ):
            reply = await rig.http.post("/v1/load_lora_adapter", json=wrong)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_they_are_off_unless_the_operator_wants_them(tmp_path: Path) -> None:
    async with front_rig(engine(tmp_path)) as rig:
        reply = await rig.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")
        assert "/v1/unload_lora_adapter" not in (await rig.http.get("/openapi.json")).json()["paths"]


async def test_keys_say_who_may_load_and_see_what(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.json", [key("tenant", adapters=("law",)), key("boss", INFER | CONTROL)])
    options: dict[str, Any] = {"keys": keys, "settings": UPDATES}
    async with front_rig(engine(tmp_path / "adapters"), key="psk_tenant", **options) as rig:
        assert [one.id for one in (await rig.openai.models.list()).data] == ["fake"]
        with pytest.raises(openai.PermissionDeniedError):
            await rig.openai.completions.create(model="sql", prompt="a")
        for name, status in (("tenant", 403), ("boss", 200)):
            reply = await rig.http.post(
                "/v1/unload_lora_adapter",
                json={"lora_name": "sql"},
                headers={"authorization": f"Bearer psk_{name}"},
            )
            assert reply.status_code == status
