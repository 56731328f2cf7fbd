"""Adapters through both clients and the command line, at a server with the fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import penstock.client as api
from penstock.cli.__main__ import main
from penstock.runtime.adapters.interface import AdapterTensors
from tests.service.adapters_rig import TENSORS, on_disk
from tests.service.rig import Rig, fake, serving

CONFIG = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Yield a server with room for two adapters in memory, which may read "law" and "med"."""
    on_disk(tmp_path / "adapters", "law"), on_disk(tmp_path / "adapters", "med", "2")
    engine = fake(max_adapters=2, max_cached_adapters=2, adapter_dir=tmp_path / "adapters")
    async with serving(engine) as rig:
        yield rig


@pytest.fixture
def peft(tmp_path: Path) -> Path:
    """Make a directory as PEFT writes it."""
    folder = tmp_path / "sql-lora"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    save_file(dict(TENSORS), folder / "adapter_model.safetensors")
    return folder


def taken(rig: Rig, name: str) -> tuple[Any, dict[str, Any]]:
    """Return the config and the tensors that the engine was given."""
    source = rig.engine.adapter_reader.read_from[-1]
    assert isinstance(source, AdapterTensors)
    return source.config, dict(source.tensors)


def same(found: dict[str, Any]) -> bool:
    return list(found) == list(TENSORS) and all(np.array_equal(found[n], TENSORS[n]) for n in TENSORS)


async def test_the_asyncio_client(rig: Rig, peft: Path) -> None:
    told: list[tuple[int, int]] = []
    async with api.AsyncClient(rig.server.address) as client:
        pushed = await client.push_adapter("sql", peft, pinned=True, progress=lambda *n: told.append(n))
        config, tensors = taken(rig, "sql")
        assert (config, same(tensors)) == (CONFIG, True)
        assert told[-1] == (256, 256)
        assert pushed == api.Adapter(
            name="sql",
            state="cached",
            rank=4,
            target_modules=("k_proj", "q_proj"),
            size_bytes=pushed.size_bytes,
            digest=pushed.digest,
            last_used=pushed.last_used,
            running_requests=0,
            pinned=True,
            source="pushed",
        )
        again = await client.push_adapter("sql", (CONFIG, TENSORS), pinned=True)
        assert replace(again, last_used=pushed.last_used) == pushed, "of arrays"
        assert (await client.load_adapter("law")).source.endswith("/law")
        assert [one.name for one in await client.list_adapters()] == ["law", "sql"]
        with pytest.raises(api.TooManyAdapters):
            await client.load_adapter("med")
        with pytest.raises(api.AdapterExists):
            await client.push_adapter("law", peft)
        with pytest.raises(api.AdapterRefused) as refused:
            await client.push_adapter("sql", ({"r": "x"}, TENSORS), replace=True)
        assert (refused.value.field, refused.value.tensor) == ("r", "")
        assert not (await client.pin_adapter("sql", False)).pinned
        await client.generate("a", adapter="sql")
        await client.embed(["a"], adapter="sql")
        await client.score("a", ["b"], adapter="sql")
        await client.rerank("a", ["b"], adapter="sql")
        assert {request.adapter for request in rig.engine.seen} == {"sql"}
        assert (await client.load()).loaded_adapters == 1
        assert (await client.server_info()).max_adapters == 2
        assert await client.unload_adapter("sql") == 0
        with pytest.raises(api.UnknownAdapter):
            await client.unload_adapter("sql")


async def test_the_sync_client(rig: Rig, peft: Path) -> None:
    def use() -> None:
        with api.Client(rig.server.address) as client:
            pushed = client.push_adapter("sql", str(peft))
            assert same(taken(rig, "sql")[1])
            assert client.list_adapters() == (pushed,)
            law = client.load_adapter("v2", uri=f"file://{rig.engine.config.adapter_dir}/law", pinned=True)
            assert (law.name, law.pinned) == ("v2", True)
            with pytest.raises(api.TooManyAdapters):  # one place stays for those that are not pinned
                client.pin_adapter("sql")
            assert not client.pin_adapter("v2", False).pinned
            assert client.pin_adapter("sql").pinned
            assert client.unload_adapter("sql") == 0
            with pytest.raises(api.InvalidRequest):
                client.load_adapter("../law")
            with pytest.raises(FileNotFoundError):
                client.push_adapter("x", peft.parent)

    await asyncio.to_thread(use)


async def test_the_command_line(rig: Rig, peft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def run(*words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, ["adapters", *words, "--addr", rig.server.address])
        return code, *capsys.readouterr()

    code, text, _ = await run("push", "sql", str(peft), "--pin")
    assert code == 0
    head, row = text.splitlines()
    assert head.split() == ["NAME", "STATE", "RANK", "SIZE", "RUNNING", "LAST", "USED", "DIGEST", "ALSO"]
    told = json.loads((await run("list", "--json"))[1])
    last_used = datetime.fromisoformat(row.split()[6])
    assert last_used == datetime.fromisoformat(told["last_used"]).replace(microsecond=0)
    assert row.split() == [
        *("sql", "cached", "4", "0.0", "MiB", "0", row.split()[6]),
        *(told["digest"][:12], "pinned,", "from", "pushed"),
    ]
    assert (await run("unpin", "sql"))[1].split()[-2:] == ["from", "pushed"]
    assert (await run("load", "law"))[0] == 0
    assert [line.split()[0] for line in (await run("list"))[1].splitlines()] == ["NAME", "law", "sql"]
    code, _, complaint = await run("load", "med")
    assert (code, "TOO_MANY_ADAPTERS" in complaint) == (1, True)
    code, _, complaint = await run("push", "law", str(peft))
    assert (code, "or replace it: with --replace" in complaint) == (1, True)
    assert await run("unload", "sql") == (0, "sql is unloaded\n", "")
    code, _, complaint = await run("pin", "sql")
    assert (code, "penstock adapters list" in complaint) == (1, True)
    code, _, complaint = await run("push", "x", str(peft / "none"))
    assert (code, "cannot read" in complaint) == (2, True)
