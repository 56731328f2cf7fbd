"""Adapters in an engine, compared with what PEFT computes with them in PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from penstock.runtime import CacheParams, Engine, SamplingParams, StoppingParams, building
from penstock.runtime.adapters.registry import AdapterRegistry
from penstock.runtime.errors import (
    AdapterExistsError,
    AdapterFormatError,
    TooManyAdaptersError,
    UnknownAdapterError,
    UnsupportedFeature,
)
from penstock.runtime.inprocess.scoring import read
from penstock.runtime.requests.adapter import AdapterWeights
from penstock.runtime.requests.request import PromptReading
from penstock.runtime.scheduling.adapter_slots import AdapterSlots
from penstock.runtime.scheduling.sequence import Sequence
from tests.support.goldens import GOLDEN, small_config
from tests.support.scheduler.proposing import Guesses, lies

LORA = GOLDEN / "lora"
GREEDY = SamplingParams(temperature=0.0)
Case = dict[str, Any]
pytestmark = pytest.mark.ci


def engine_of(name: str, **options: Any) -> Engine:
    """Make an engine with a small cache, whose chunks are shorter than the longest prompts."""
    config = small_config(name, cached_tokens=160)  # two of the longest prompts, but not all of both outputs
    experts = (
        any("expert" in folder.name for folder in folders(name)) if options.get("max_adapters") else False
    )
    options = {"adapter_experts": experts, **options}
    config = dataclasses.replace(config, max_model_len=100, max_num_batched_tokens=32, **options)
    return Engine.from_pretrained(str(GOLDEN / name), config)


def folders(name: str) -> list[Path]:
    """Return the adapters of a golden checkpoint, which may be in a folder such as `encoders`."""
    return sorted(LORA.joinpath(Path(name).name).iterdir())


def cases_of(folder: Path) -> list[Case]:
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    return [{**case, "adapter": folder.name} for case in cases]


def answer(engine: Engine, case: Case, **options: Any) -> tuple[list[int], list[float]]:
    stopping = StoppingParams(max_tokens=len(case["tokens"]), ignore_eos=True)
    made = engine.generate(
        case["prompt"], sampling=GREEDY, stopping=stopping, logprobs=0, adapter=case["adapter"], **options
    )
    return list(made.token_ids), [each.sampled for each in made.logprobs]


def collectives(engine: Engine) -> dict[str, list[tuple[str, str]]]:
    """(operation, shape of its result) of the collectives of each program of a step, in order."""
    pattern = re.compile(r"= (\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(")
    programs = engine.runner.calls.programs.steps
    found = {key.name: pattern.findall(program.as_text() or "") for key, program in programs.items()}
    assert any(found.values()) == (engine.runner.device.sharding.mesh.size > 1)
    return found


def check(case: Case, got: tuple[list[int], list[float]]) -> None:
    assert got[0] == case["tokens"], case["adapter"]
    np.testing.assert_allclose(got[1], case["logprobs"], atol=1e-4)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Two places on the device for four adapters."""
    with engine_of("qwen3", max_adapters=2) as engine:
        for folder in folders("qwen3"):
            engine.adapters.load(folder.name, folder)
        yield engine


CASES = [case for folder in folders("qwen3") for case in cases_of(folder)]


def test_each_alone_and_from_the_prefix_cache(engine: Engine) -> None:
    """All adapters have the same prompts, so a page of another one would be found out."""
    before = engine.totals().prefix_hit_tokens
    for case in CASES:
        check(case, answer(engine, case))
        check(case, answer(engine, case))
    assert engine.totals().prefix_hit_tokens > before


def test_all_mixed_with_rows_of_the_model_alone(engine: Engine) -> None:
    """More requests than fit the cache, so some are preempted."""
    plain = [{**case, "adapter": None, "tokens": case["base_tokens"]} for case in CASES[:3]]
    cache = CacheParams(bypass=True)
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda case: answer(engine, case, cache=cache), [*CASES, *plain]))
    for case, got in zip(CASES, together, strict=False):
        check(case, got)
    for case, (tokens, _) in zip(plain, together[len(CASES) :], strict=True):
        assert tokens == case["base_tokens"]
    assert engine.totals().preemptions > 0
    assert engine.compiles_after_warmup == 0


@pytest.mark.sweep
def test_the_model_alone_has_the_bits_of_an_engine_without_adapters(engine: Engine) -> None:
    """XLA's bits depend on a step's size, so each answer is made alone. On several devices (see
    `test_mesh_engine`) adapters need no collective more.
    """
    plain = [{**case, "adapter": None} for case in CASES[:3]]
    cache = CacheParams(bypass=True)
    with engine_of("qwen3") as without:
        wanted = [answer(without, case, cache=cache) for case in plain]
        assert collectives(engine) == collectives(without)
    assert [answer(engine, case, cache=cache) for case in plain] == wanted


def test_forks_and_scores(engine: Engine) -> None:
    case = CASES[2]
    stopping = StoppingParams(max_tokens=16, ignore_eos=True)
    made = engine.generate(case["prompt"], sampling=GREEDY, stopping=stopping, n=3, adapter=case["adapter"])
    assert [list(output.token_ids) for output in made.outputs] == [case["tokens"]] * 3
    (score,) = engine.score(case["prompt"], [case["tokens"]], adapter=case["adapter"])
    np.testing.assert_allclose(score.logprobs, case["logprobs"], atol=1e-4)


def test_tokens_are_proposed_for_rows_with_adapters() -> None:
    """The rows of proposed tokens have the adapter of their slot, beside rows with others and with none."""
    rng = random.Random(8)
    plain = [{**case, "tokens": case["base_tokens"], "adapter": None} for case in CASES[:3]]
    cases = {f"r{i}": case for i, case in enumerate([*CASES, *plain])}

    def right(seq: Sequence, most: int) -> list[int]:
        tokens: list[int] = cases[seq.request_id]["tokens"]
        return tokens[seq.num_generated :][:most]

    proposer = Guesses(lambda seq, most: (), rng)
    with mock.patch.object(building, "Lookup", return_value=proposer):
        speculating = engine_of("qwen3", max_adapters=2, speculation="lookup", max_num_seqs=4)
    with speculating as engine, ThreadPoolExecutor(8) as pool:
        proposer.guess = lies(rng, engine.info.vocab_size, right)
        for folder in folders("qwen3"):
            engine.adapters.load(folder.name, folder)
        for name, got in pool.map(lambda name: (name, answer(engine, cases[name], request_id=name)), cases):
            assert got[0] == cases[name]["tokens"], cases[name]["adapter"]
        totals = engine.metrics().totals
    assert 0 < totals.accepted_tokens < totals.proposed_tokens


def test_a_name_that_gets_other_content(engine: Engine) -> None:
    """A stream that runs ends on the old weights, and nothing of them is read by the next request."""
    old, new = cases_of(LORA / "qwen3" / "attention_r8")[2], cases_of(LORA / "qwen3" / "patterns")[2]
    adapters = engine.adapters
    adapters.load("changes", LORA / "qwen3" / "attention_r8")
    with pytest.raises(AdapterExistsError):
        adapters.load("changes", LORA / "qwen3" / "patterns")
    stopping = StoppingParams(max_tokens=16, ignore_eos=True)
    with engine.stream(old["prompt"], sampling=GREEDY, stopping=stopping, adapter="changes") as stream:
        first = next(iter(stream))
        adapters.load("changes", LORA / "qwen3" / "patterns", replace=True)
        check(new, answer(engine, {**new, "adapter": "changes"}))
        adapters.unload("changes")
        assert list(stream.result().token_ids) == old["tokens"], first
    with pytest.raises(UnknownAdapterError):
        answer(engine, {**new, "adapter": "changes"})


def test_states_and_pins(engine: Engine) -> None:
    adapters = engine.adapters
    check(CASES[0], answer(engine, CASES[0]))
    info = adapters.get(CASES[0]["adapter"])
    assert (info.state, info.num_running, info.rank, info.scaling) == ("loaded", 0, 8, 2.0)
    assert info.targets == ("k_proj", "o_proj", "q_proj", "v_proj")
    states = [each.state for each in adapters.list()]
    assert sorted(states) == ["cached", "cached", "loaded", "loaded"]
    assert adapters.pin("q_only_r1", True).is_pinned
    with pytest.raises(TooManyAdaptersError):
        adapters.pin("patterns", True)
    for case in CASES:
        check(case, answer(engine, case))
    assert adapters.get("q_only_r1").state == "loaded"
    adapters.pin("q_only_r1", False)
    with pytest.raises(AdapterFormatError, match="no such layer"):
        adapters.load("of another model", LORA / "phi3" / "fused_r8")


def test_a_folder_of_adapters_is_read_on_first_use(tmp_path: Path, engine: Engine) -> None:
    """No engine is made for it: the registry is that of the engine above, with other options."""
    for folder in folders("qwen3"):
        (tmp_path / folder.name).symlink_to(folder.resolve())
    options = dataclasses.replace(engine.config, adapter_dir=tmp_path, max_cached_adapters=2, max_adapters=2)
    registry = AdapterRegistry(options, engine.adapters._reader, AdapterSlots(2), lambda named, pinned: None)
    assert registry.list() == ()
    first = registry.weights_of("patterns")
    assert registry.weights_of("patterns") is first
    registry.weights_of("attention_r8")
    registry.weights_of("patterns")
    registry.weights_of("q_only_r1")
    assert [info.name for info in registry.list()] == ["patterns", "q_only_r1"]
    assert registry.evictions == {"device": 0, "host": 1}
    for name in ("nowhere", "../qwen3", "."):
        with pytest.raises(Exception, match="adapter"):
            registry.weights_of(name)
    registry.load("by name", LORA / "qwen3" / "patterns")
    registry.load("by name too", LORA / "qwen3" / "patterns")
    with pytest.raises(TooManyAdaptersError):
        registry.load("one too many", LORA / "qwen3" / "patterns")
    off = AdapterRegistry(options, None, AdapterSlots(0), lambda named, pinned: None)
    with pytest.raises(UnsupportedFeature, match="max_adapters 0"):
        off.weights_of("patterns")


@pytest.mark.sweep
def test_adapters_come_and_go_while_others_answer(engine: Engine) -> None:
    """200 loads and unloads at random beside streams. No answer changes, and nothing is left of what is
    gone.
    """
    rng = np.random.default_rng(0)
    adapters, before = engine.adapters, engine.adapters.list()
    names = [f"comes and goes {i}" for i in range(6)]
    is_over = threading.Event()

    def answer_all(first: int) -> int:
        count = 0
        while not is_over.is_set():
            case = CASES[(first + count) % len(CASES)]
            check(case, answer(engine, case))
            count += 1
        return count

    def use(name: str) -> None:
        with contextlib.suppress(UnknownAdapterError, TooManyAdaptersError):
            engine.generate([5, 6, 7], sampling=GREEDY, stopping=StoppingParams(max_tokens=2), adapter=name)

    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(answer_all, 4 * i) for i in range(2)]
        for _ in range(200):
            name, folder = str(rng.choice(names)), folders("qwen3")[rng.integers(4)]
            if rng.random() < 0.5:
                adapters.load(name, folder, replace=True)
                pool.submit(use, name)
            else:
                with contextlib.suppress(UnknownAdapterError):
                    adapters.unload(name)
        is_over.set()
        assert all(stream.result() > 0 for stream in streams)
    for name in names:
        with contextlib.suppress(UnknownAdapterError):
            adapters.unload(name)
    assert [info.name for info in adapters.list()] == [info.name for info in before]
    gc.collect()
    kept = {adapters.weights_of(info.name).digest for info in before}
    alive = [each for each in gc.get_objects() if isinstance(each, AdapterWeights)]
    assert len(alive) <= len(kept) + 6  # the last steps and entries of the journal name their requests
    assert engine.compiles_after_warmup == 0


OTHERS = [
    pytest.param("qwen3_moe"),
    *(
        pytest.param(name, marks=pytest.mark.sweep)
        for name in ("phi3", "deepseek_v3", "qwen3_next", "qwen2_moe", "mixtral", "gpt_oss")
    ),
]


@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_are_fused_latent_recurrent_or_experts(name: str) -> None:
    with engine_of(name, max_adapters=1) as engine:
        for folder in folders(name):
            engine.adapters.load(folder.name, folder)
            for case in cases_of(folder):
                check(case, answer(engine, case))
                plain = {**case, "adapter": None}
                assert answer(engine, plain)[0] == case["base_tokens"]


@pytest.mark.sweep
def test_a_classifier_s_numbers() -> None:
    """All texts together, with the adapter and without it."""
    (folder,) = folders("llama_classifier")
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    with engine_of("encoders/llama_classifier", max_adapters=1) as engine:
        reader = engine.info.reader
        assert reader is not None
        assert reader.classes is not None
        engine.adapters.load(folder.name, folder)
        reading = PromptReading(pooling=reader.classes.pooling, classes=True)
        prompts = [tuple(case["prompt"]) for case in cases]
        for adapter, name in ((folder.name, "logits"), (None, "base_logits")):
            made = read(engine, prompts, [reading] * len(prompts), {"adapter": adapter})
            found: list[Any] = [output.hidden for output in made]
            np.testing.assert_allclose(found, [case[name] for case in cases], atol=1e-5)
