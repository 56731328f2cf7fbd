"""What changes between steps, with a real decoder: after a pause that moved its weights away, and after
updates in host memory or on the device, its tokens are PyTorch's. `tests/runtime/mesh` runs this on two
devices, and in two stages.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.runtime import Engine, Regex, SamplingParams, StoppingParams
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.loop.interface import InFlightPolicy
from penstock.runtime.updating.interface import Staging, UpdateOptions
from tests.runtime.engine.answers.test_engine_prompt_logprobs import ask, check
from tests.support.batch import answer, answers
from tests.support.goldens import GOLDEN, small_config

pytestmark = pytest.mark.sweep

CHECKPOINT = GOLDEN / "qwen3"
CASES = json.loads((CHECKPOINT / "expected.json").read_text())["cases"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.from_pretrained(str(CHECKPOINT), small_config("qwen3"))
    device = engine.runner.device
    # The CPU stands in for an accelerator whose weights can be moved to host memory.
    for state in (*getattr(device, "before", ()), device):  # of all stages
        state._backend = dataclasses.replace(state._backend, host_memory="pinned_host")
    engine.start()
    yield engine
    assert engine.compiles_after_warmup == 0
    engine.shutdown()


def check_all(engine: Engine) -> None:
    """Check the golden's prompts together, each with what PyTorch generated behind it."""
    known = [len(case["tokens"]) for case in CASES]
    requests = [ask(case, count, f"{i}") for i, (case, count) in enumerate(zip(CASES, known, strict=True))]
    for result, case, count in zip(answers(engine, requests), CASES, known, strict=True):
        check(result, case, count)


def test_a_pause_moves_weights_away_and_back(engine: Engine) -> None:
    device = engine.runner.device
    check_all(engine)
    before = [leaf.sharding for leaf in device.leaves]
    sizes = device.weights_bytes, device.cache_bytes
    paused = engine.pause(InFlightPolicy.RECOMPUTE, free_kv_cache=True, offload_weights=True).result(60)
    assert paused.freed_bytes == sum(sizes)
    assert {leaf.sharding.memory_kind for leaf in device.leaves} == {"pinned_host"}
    engine.resume().result(60)
    assert [leaf.sharding for leaf in device.leaves] == before
    assert (device.weights_bytes, device.cache_bytes) == sizes
    check_all(engine)


@pytest.mark.parametrize("staging", [Staging.HOST, Staging.DEVICE])
def test_updates_there_and_back(engine: Engine, staging: Staging) -> None:
    device, updater = engine.runner.device, engine.updater
    before = [leaf.sharding for leaf in device.leaves]
    old = {name: np.array(entry.map()) for name, entry in find_tensors(CHECKPOINT).items()}
    new = {name: -tensor for name, tensor in old.items()}
    told = []
    for label, tensors in (("new", new), ("old", old)):
        options = UpdateOptions(update_id="", label=label, staging=staging)
        updater.update(options, tensors).result(120)
        assert [leaf.sharding for leaf in device.leaves] == before
        told.append(answer(engine, ask(CASES[0], 0, max_tokens=8)).tokens)
    assert told[1] == CASES[0]["tokens"][:8] != told[0]
    check_all(engine)


def test_a_grammar_holds(engine: Engine) -> None:
    pattern = "[0-9]{3}-[a-f]{5}"
    made = engine.generate(
        "def decode(",
        constraint=Regex(pattern),
        sampling=SamplingParams(temperature=0),
        stopping=StoppingParams(max_tokens=20),
    )
    assert re.fullmatch(pattern, made.outputs[0].text)
