"""The client and the command line against a real server that asks for keys."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from penstock import client as api
from penstock.cli.__main__ import main
from penstock.client import AsyncClient
from tests.service.key_rig import CONTROL, INFER, key, serving_keys
from tests.service.rig import fake


@pytest.fixture
async def addr(tmp_path):
    engine = fake(page_size=1, cached=["abc"])
    entries = [
        key("user"),
        key("boss", INFER | CONTROL),
        key("late", expires=datetime(2020, 1, 1, tzinfo=UTC)),
        key("hasty", requests_per_minute=1),
    ]
    async with serving_keys(tmp_path / "keys.json", *entries, engine=engine) as rig:
        yield rig.server.address


async def test_with_a_key(addr):
    async with AsyncClient(addr, token="psk_user") as client:
        await client.wait_ready(timeout=20)
        assert (await client.generate("x")).text == "yz"
        assert (await client.stream("x").result()).text == "yz"
        assert (await client.model_info()).model == "fake"
        with pytest.raises(api.Forbidden):
            await client.flush_cache()
        own = {"authorization": "Bearer psk_boss"}
        flushed = await client.flush_cache(metadata=own)  # a call's own key replaces the client's
        assert flushed.pages_freed == len("abc") + len("xyz")


@pytest.mark.parametrize(
    ("token", "kind"),
    [(None, api.Unauthenticated), ("psk_nobody", api.Unauthenticated), ("psk_late", api.KeyExpired)],
)
async def test_without_one(addr, token, kind):
    async with AsyncClient(addr, token=token) as client:
        await client.wait_ready(timeout=20)  # health needs no key
        with pytest.raises(kind) as caught:
            await client.generate("x")
        assert type(caught.value) is kind
        assert caught.value.request_id
        assert "psk_" not in str(caught.value)
        with pytest.raises(kind):
            await client.load()


async def test_a_rate(addr):
    async with AsyncClient(addr, token="psk_hasty") as client:
        await client.generate("x")
        with pytest.raises(api.RateLimited) as caught:
            await client.generate("x")
        assert caught.value.retry_after is not None
        assert 0 < caught.value.retry_after <= 60


async def test_the_command_line(addr, tmp_path, capsys, monkeypatch):
    def run(*argv):
        return asyncio.to_thread(main, [*argv, "--addr", addr])

    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    assert await run("generate", "x") == 1
    assert "wants a key" in capsys.readouterr().err
    (tmp_path / "key").write_text("psk_user\n")
    assert await run("generate", "x", "--token-file", str(tmp_path / "key")) == 0
    assert capsys.readouterr().out == "yz\n"
    monkeypatch.setenv("PENSTOCK_TOKEN", "psk_late")
    assert await run("info") == 1
    assert "the key has expired" in capsys.readouterr().err
