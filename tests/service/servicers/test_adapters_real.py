"""Adapters over gRPC on the real engine: the tokens are those that PEFT computed in PyTorch."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import penstock.client as api
from penstock.runtime import Engine
from penstock.runtime.requests.adapter import AdapterWeights
from tests.service.rig import serving, until
from tests.service.weights.brake import Brake
from tests.support.goldens import GOLDEN, small_config

pytestmark = pytest.mark.ci

LORA = GOLDEN / "lora" / "qwen3"
MODEL = "qwen3"


def cases_of(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((LORA / name / "expected.json").read_text())["cases"]
    return cases


async def answer(client: api.AsyncClient, case: dict[str, Any], adapter: str | None) -> tuple[str, list[int]]:
    made = await client.generate(
        token_ids=case["prompt"],
        adapter=adapter,
        temperature=0,
        max_tokens=len(case["tokens"]),
        ignore_eos=True,
        return_text=False,
    )
    return made.model, list(made.outputs[0].token_ids)


async def test_adapters_are_pushed_loaded_used_together_and_unloaded(tmp_path: Path) -> None:
    """One is pushed, one is read by LoadAdapter, and one by the first request that names it."""
    (tmp_path / "q_only_r1").symlink_to(LORA / "q_only_r1")
    shutil.copytree(LORA / "patterns", tmp_path / "patterns")
    config = dataclasses.replace(small_config(MODEL), max_adapters=2, adapter_dir=tmp_path)
    async with (
        serving(Engine.from_pretrained(str(GOLDEN / MODEL), config)) as rig,
        api.AsyncClient(rig.server.address) as client,
    ):
        pushed = await client.push_adapter("attention_r8", LORA / "attention_r8")
        assert (pushed.rank, pushed.target_modules) == (8, ("k_proj", "o_proj", "q_proj", "v_proj"))
        await client.load_adapter("patterns")
        names: tuple[str | None, ...] = ("attention_r8", "patterns", "q_only_r1", None)
        asked = [(case, name) for name in names for case in cases_of(name or "patterns")]
        got = await asyncio.gather(*(answer(client, case, name) for case, name in asked))
        for (case, name), (model, tokens) in zip(asked, got, strict=True):
            assert model == (name or rig.engine.info.name)
            assert tokens == case["tokens" if name else "base_tokens"], name
        listed = await client.list_adapters()
        assert [one.name for one in listed] == ["attention_r8", "patterns", "q_only_r1"]
        assert sorted(one.state for one in listed) == ["cached", "loaded", "loaded"]
        broken = json.loads((LORA / "patterns" / "adapter_config.json").read_text()) | {"use_dora": True}
        (tmp_path / "patterns" / "adapter_config.json").write_text(json.dumps(broken))
        with pytest.raises(api.AdapterRefused) as refused:
            await client.load_adapter("dora", uri=f"file://{tmp_path}/patterns")
        assert refused.value.field == "use_dora"
        assert await client.unload_adapter("attention_r8") == 0
        with pytest.raises(api.UnknownAdapter):
            await answer(client, cases_of("attention_r8")[0], "attention_r8")
        assert rig.engine.compiles_after_warmup == 0


async def streamed(client: api.AsyncClient, case: dict[str, Any], adapter: str) -> list[int]:
    stream = client.stream(
        token_ids=case["prompt"],
        adapter=adapter,
        temperature=0,
        max_tokens=len(case["tokens"]),
        ignore_eos=True,
        return_text=False,
    )
    async with stream:
        return list((await stream.result()).outputs[0].token_ids)


@pytest.mark.sweep
async def test_adapters_come_and_go_under_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter is unloaded under 16 streams. Then 200 loads, pushes, unloads and pins at random go on
    beside answers with adapters that stay. Every answer is PEFT's, what is refused has a typed error, and the
    server holds no adapter that is gone.
    """
    names = sorted(folder.name for folder in LORA.iterdir())
    for name in names:
        shutil.copytree(LORA / name, tmp_path / name)
    config = dataclasses.replace(
        small_config(MODEL, cached_tokens=1024),
        max_num_seqs=16,
        max_adapters=2,
        max_cached_adapters=9,  # those that stay and those that come
        adapter_dir=tmp_path,
    )
    rng = random.Random(0)
    async with (
        serving(Engine.from_pretrained(str(GOLDEN / MODEL), config)) as rig,
        api.AsyncClient(rig.server.address) as client,
    ):
        adapters, brake = rig.engine.adapters, Brake(rig.engine, monkeypatch)
        await client.push_adapter("leaves", LORA / "patterns")
        case = cases_of("patterns")[0]
        await client.pause()
        streams = [asyncio.create_task(streamed(client, case, "leaves")) for _ in range(16)]
        await until(lambda: rig.engine.load().num_waiting == len(streams))
        brake.hold(tokens_of=1)
        await client.resume()
        try:
            await brake.holding()
            assert adapters.get("leaves").num_running > 0
            await client.unload_adapter("leaves")
            with pytest.raises(api.UnknownAdapter):
                await answer(client, case, "leaves")
        finally:
            brake.release()
        assert await asyncio.gather(*streams) == [case["tokens"]] * len(streams)
        is_over, count = asyncio.Event(), Counter[str]()

        async def answer_all(number: int) -> None:
            while not is_over.is_set():
                name = names[number % len(names)]
                one = rng.choice(cases_of(name))
                assert (await answer(client, one, name))[1] == one["tokens"], name
                count["answers"] += 1

        async def storm() -> None:
            for turn in range(200):
                name, folder = f"comes {rng.randrange(4)}", LORA / rng.choice(names)
                work = rng.choice(("push", "load", "unload", "pin", "use"))
                try:
                    if work == "push":
                        await client.push_adapter(name, folder, replace=rng.random() < 0.7)
                    elif work == "load":
                        await client.load_adapter(name, uri=f"file://{tmp_path / folder.name}")
                    elif work == "unload":
                        await client.unload_adapter(name)
                    elif work == "pin":
                        await client.pin_adapter(name, turn % 2 == 0)
                    else:
                        await answer(client, case, name)
                except (api.UnknownAdapter, api.AdapterExists, api.TooManyAdapters) as error:
                    count[type(error).__name__] += 1
            is_over.set()

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(answer_all(number))
            group.create_task(storm())
        assert count["answers"] >= 4
        assert set(count) >= {"answers", "UnknownAdapter", "AdapterExists"}
        for info in adapters.list():
            adapters.unload(info.name)
        await asyncio.sleep(0)
        gc.collect()
        alive = [each for each in gc.get_objects() if isinstance(each, AdapterWeights)]
        assert len(alive) <= 6  # the last steps and entries of the journal name their requests
        assert rig.engine.compiles_after_warmup == 0
