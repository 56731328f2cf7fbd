"""ARCHITECTURE.md's list of things that the engine and the contract call by different names."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.config import EngineConfig
from penstock.runtime.model_info import ModelInfo
from penstock.runtime.scheduling.load import Load
from penstock.v1 import control_pb2
from tests.service.rig import Rig, fake, serving

TEXT = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text(encoding="utf-8")
PAIRS = re.findall(r"`(\w+)` is\s`(\w+)`", TEXT)
MESSAGES = (
    control_pb2.GetModelInfoResponse,
    control_pb2.GetServerInfoResponse,
    control_pb2.GetLoadResponse,
)
IN_CONTRACT = {field.name: message for message in MESSAGES for field in message.DESCRIPTOR.fields}


def test_the_list_is_there() -> None:
    assert ("max_model_len", "max_context_tokens") in PAIRS
    assert ("num_waiting", "queued_requests") in PAIRS


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_both_names_exist_and_no_third(ours: str, theirs: str) -> None:
    in_engine = {field.name for kind in (EngineConfig, ModelInfo, Load) for field in dataclasses.fields(kind)}
    assert ours in in_engine
    assert ours not in IN_CONTRACT
    assert theirs in IN_CONTRACT
    assert theirs not in in_engine


async def test_both_names_mean_the_same_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """All values are different, so that none can be taken for another."""
    engine = fake(max_model_len=777, max_num_seqs=11)
    load = Load(
        num_running=3, num_waiting=5, waiting_prompt_tokens=7, pages_used=13, pages_cached=19, pages_total=23
    )
    monkeypatch.setattr(engine, "load", lambda: load)
    async with serving(engine) as rig:
        replies = await _replies(rig)
    sources = (load, engine.info, engine.config)
    held = {ours: next(getattr(one, ours) for one in sources if hasattr(one, ours)) for ours, _ in PAIRS}
    assert len(set(held.values())) == len(PAIRS)
    assert {ours: getattr(replies[IN_CONTRACT[theirs]], theirs) for ours, theirs in PAIRS} == held


async def _replies(rig: Rig) -> dict[Any, Any]:
    return {
        control_pb2.GetModelInfoResponse: await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest()),
        control_pb2.GetServerInfoResponse: await rig.control.GetServerInfo(
            control_pb2.GetServerInfoRequest()
        ),
        control_pb2.GetLoadResponse: await rig.control.GetLoad(control_pb2.GetLoadRequest()),
    }
