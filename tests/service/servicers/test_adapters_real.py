"""Adapters over gRPC on the real engine: the tokens are those that PEFT computed in PyTorch."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import penstock.client as api
from penstock.runtime import Engine
from tests.service.rig import serving
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
