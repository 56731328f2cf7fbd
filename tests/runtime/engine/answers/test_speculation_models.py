"""Tokens are proposed for models of every kind of layer. In float32 outputs are PyTorch's. In bfloat16, which
native kernels compute, they have the same bits as without proposals.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime import Engine, EngineConfig, StoppingParams, building
from penstock.runtime.execution.backend import choose_backend
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.hub import DEMO_DIRECTORY
from penstock.runtime.loading.served_model import ServedModel, load_model
from penstock.runtime.models.configs.recurrent import DeltaNetConfig, MambaConfig, ShortConvConfig
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.params import abstract_model
from penstock.runtime.ops.native import library
from penstock.runtime.requests.request import Request, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.plan import drafted_tokens
from tests.runtime.engine.answers.test_layer_groups import CONFIG, write_model
from tests.support.batch import Answer, answers
from tests.support.goldens import GOLDEN, small_config
from tests.support.scheduler.proposing import Guesses, lies
from tests.support.suite.drawing import few

RECURRENT = (
    "lfm2",
    "qwen3_next",
    "qwen3_5",
    "mamba2",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "granite_hybrid",
)
NAMES = ("qwen3", "gpt_oss", "gemma3", "deepseek_v3", "mixtral", "gpt2", *RECURRENT)
"""Plain attention, windows and experts, windows in groups, latent attention, experts, positions that are
embedded, and those with a recurrent state."""
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8 KV": {"kv_cache_dtype": "int8"},
}


class Served:
    """An engine that checks proposals which are right, wrong, or no tokens at all."""

    def __init__(self, model: Path | str | ServedModel, config: EngineConfig) -> None:
        self.known: dict[str, list[int]] = {}
        """What is right, by request."""
        rng = random.Random(8)
        proposer = Guesses(lambda seq, most: (), rng)
        config = dataclasses.replace(config, speculation="lookup", max_proposed_tokens=6)
        with mock.patch.object(building, "Lookup", return_value=proposer):
            if isinstance(model, ServedModel):
                self.engine = Engine(model, config)
            else:
                self.engine = Engine.from_pretrained(str(model), config)
        self.engine.start()
        proposer.guess = lies(
            rng,
            self.engine.info.vocab_size,
            lambda seq, most: self.known[seq.request_id][seq.num_generated :][:most],
        )

    def answers(self, requests: list[Request]) -> list[Answer]:
        self.engine.flush_prefix_cache()
        return answers(self.engine, requests, together=True)

    def close(self) -> None:
        assert self.engine.compiles_after_warmup == 0
        assert self.engine.load().pages_used == 0
        self.engine.shutdown()


@pytest.mark.sweep  # CI always has those of proposed tokens beside adapters
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_pytorch(name: str) -> None:
    cases = json.loads((GOLDEN / name / "expected.json").read_text())["cases"]
    golden = Served(GOLDEN / name, small_config(name, cached_tokens=2 * 288))
    golden.known = {f"g{i}": case["tokens"] for i, case in enumerate(cases)} | {"gate": []}
    requests = [
        Request(
            f"g{i}",
            tuple(case["prompt"]),
            ResolvedSampling(temperature=0.0),
            StoppingParams(max_tokens=len(case["tokens"]), ignore_eos=True),
        )
        for i, case in enumerate(cases)
    ]
    found = [answer for _ in range(3) for answer in golden.answers(requests)]
    assert [each.tokens for each in found] == 3 * [case["tokens"] for case in cases]
    proposed, accepted = sum(a.proposed_tokens for a in found), sum(a.accepted_tokens for a in found)
    assert 0 < accepted < proposed
    golden.close()


DRAFTED = ("qwen3", "gpt_oss", "gemma3", "deepseek_v3", "gpt2")


def drafted(name: str, draft: str) -> list[Answer]:
    """Have a golden answer its cases, for which another golden guesses. The tokens are PyTorch's."""
    cases = json.loads((GOLDEN / name / "expected.json").read_text())["cases"]
    proposer = Guesses(lambda seq, most: drafted_tokens(most), random.Random(1), patience=1.0)
    config = small_config(
        name, cached_tokens=8 * 288
    )  # where it is cut, an EAGLE head's hidden states are not
    config = dataclasses.replace(config, speculation="draft", draft_model=str(GOLDEN / draft))
    with mock.patch.object(building, "Drafting", return_value=proposer):
        engine = Engine.from_pretrained(str(GOLDEN / name), config)
    engine.start()
    requests = [
        Request(
            f"g{i}",
            tuple(case["prompt"]),
            ResolvedSampling(temperature=0.0),
            StoppingParams(max_tokens=len(case["tokens"]), ignore_eos=True),
        )
        for i, case in enumerate(cases)
    ]
    found = answers(engine, requests, together=True)
    assert [each.tokens for each in found] == [case["tokens"] for case in cases]
    engine.shutdown()
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("name", DRAFTED)
def test_a_model_is_its_own_draft(name: str) -> None:
    """Then all that it guesses is right, because its layers keep what the model's keep."""
    assert all(0 < each.proposed_tokens == each.accepted_tokens for each in drafted(name, name))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "draft"),
    [("qwen3_next", "qwen3"), ("lfm2", "arcee"), ("falcon_h1", "arcee"), ("lfm2", "heads/eagle_llama")],
)
def test_a_draft_guesses_for_a_model_with_recurrent_layers(name: str, draft: str) -> None:
    """Its guesses are mostly wrong, so that the state goes back in almost every step."""
    found = drafted(name, draft)
    assert sum(each.accepted_tokens for each in found) < sum(each.proposed_tokens for each in found) // 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model of which one layer has a sliding window."""
    return Path(write_model(tmp_path_factory.mktemp("grouped")))


@pytest.mark.sweep
@pytest.mark.skipif(not library.available(), reason="no native library on this machine")
@pytest.mark.parametrize("kind", FORMATS)
def test_native_kernels_give_the_same_bits_beside_a_draft(folder: Path, kind: str) -> None:
    """Sampled, too: then the likeliest token, which the draft guesses, is often not the one that is drawn."""
    proposer = Guesses(lambda seq, most: drafted_tokens(most), random.Random(1), patience=1.0)
    config = dataclasses.replace(CONFIG, dtype="bfloat16", **FORMATS[kind])
    plain = Engine.from_pretrained(str(folder), config)
    config = dataclasses.replace(config, speculation="draft", draft_model=str(folder))
    with mock.patch.object(building, "Drafting", return_value=proposer):
        drafting = Engine.from_pretrained(str(folder), config)
    requests = [
        Request(
            f"d{i}",
            tuple(random.Random(i).choices(range(10, 300), k=7 * i + 1)),
            ResolvedSampling(temperature=0.7 * (i % 3), seed=i, presence_penalty=0.3 * (i % 2)),
            StoppingParams(max_tokens=40, ignore_eos=True),
            logprobs=3,
        )
        for i in range(6)
    ]
    found = []
    for engine in (plain, drafting):
        engine.start()
        assert engine.info.batch_invariant
        found.append(answers(engine, requests))
        engine.shutdown()
    for one, other in zip(*found, strict=True):
        assert (one.tokens, one.logprobs, one.error) == (other.tokens, other.logprobs, None)
    assert 0 < sum(one.accepted_tokens for one in found[1]) < sum(one.proposed_tokens for one in found[1])


LAYERS: dict[str, DeltaNetConfig | MambaConfig | ShortConvConfig] = {
    "gated delta net": DeltaNetConfig(
        num_key_heads=8, num_value_heads=16, key_dim=32, value_dim=32, num_taps=4
    ),
    "Mamba-2": MambaConfig(num_heads=16, head_dim=32, state_dim=32, num_groups=1, num_taps=4),
    "short convolution": ShortConvConfig(channels=64, num_taps=3),
}


def recurrent_model(kind: str) -> ServedModel:
    """Return the demo model with random weights, and a recurrent layer before the others."""
    model = load_model(
        "demo", EngineConfig(dtype="bfloat16"), choose_backend(EngineConfig(), jax.devices()[0])
    )
    config = load_config(DEMO_DIRECTORY)
    first = dataclasses.replace(config.layers[0], attention=LAYERS[kind])
    config = dataclasses.replace(config, layers=(first, *config.layers[1:]))
    graphdef, shapes = abstract_model(config, jnp.bfloat16, LinearFormat(packed=True, int8=False))
    rng = np.random.default_rng(4)
    weights = jax.tree.map(
        lambda leaf: jax.device_put(rng.normal(0.1, 0.2, leaf.shape).astype(leaf.dtype)), shapes
    )
    return dataclasses.replace(model, graphdef=graphdef, weights=weights, cache=config.cache)


@pytest.mark.sweep
@pytest.mark.skipif(not library.available(), reason="no native library on this machine")
@pytest.mark.parametrize("kind", LAYERS)
def test_a_recurrent_state_has_the_same_bits(kind: str) -> None:
    """With prompts in chunks, several outputs of a prompt, prefixes that are cached with their snapshots, and
    so few pages that outputs are preempted.
    """
    model = recurrent_model(kind)
    page_bytes = model.cache.page_bytes(16, np.dtype(jnp.bfloat16))
    config = EngineConfig(
        dtype="bfloat16",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=96,
        page_size=16,
        state_snapshots=4,
        kv_cache_bytes=9 * page_bytes + model.cache.state_bytes(4, 4),
        show_progress=False,
    )
    native = Served(model, config)
    assert native.engine.info.batch_invariant
    rng = random.Random(6)
    shared = tuple(rng.choices(range(10, 250), k=40))
    requests: list[Request] = []
    for i in range(4):
        own = tuple(rng.choices(range(10, 250), k=rng.randint(3, 20)))
        request = Request(
            f"s{i}",
            shared + own if i % 2 else own,
            ResolvedSampling(temperature=0.0 if i % 3 else 1.0, seed=i, frequency_penalty=0.3 * (i % 2)),
            StoppingParams(max_tokens=30, ignore_eos=True),
            logprobs=2,
        )
        requests += outputs_of(request, 2) if i % 2 else [request]
    plain = native.answers([dataclasses.replace(request, max_proposed_tokens=0) for request in requests])
    native.known = {request.request_id: each.tokens for request, each in zip(requests, plain, strict=True)}
    native.known["gate"] = []
    for _ in range(3):
        found = native.answers(requests)
        for one, other in zip(found, plain, strict=True):
            assert (one.tokens, one.logprobs, one.error) == (other.tokens, other.logprobs, None)
        assert 0 < sum(each.accepted_tokens for each in found) < sum(each.proposed_tokens for each in found)
        assert max(each.cached_prompt_tokens for each in found) >= 16
        assert sum(each.preemptions for each in found) > 0
    native.close()


@pytest.mark.skipif(not library.available(), reason="no native library on this machine")
@pytest.mark.parametrize("kind", few(FORMATS, [], ci=["bf16"]))
def test_native_kernels_give_the_same_bits(folder: Path, kind: str) -> None:
    native = Served(folder, dataclasses.replace(CONFIG, dtype="bfloat16", **FORMATS[kind]))
    assert native.engine.info.batch_invariant
    rng = random.Random(2)
    requests = [
        Request(
            f"n{i}",
            tuple(rng.choices(range(10, 300), k=rng.randint(3, 90))),
            ResolvedSampling(
                temperature=0.0 if i % 2 else 1.0, top_p=0.9, seed=i, frequency_penalty=0.3 * (i % 3)
            ),
            StoppingParams(max_tokens=40, ignore_eos=True),
            logprobs=3,
        )
        for i in range(6)
    ]
    plain = native.answers([dataclasses.replace(request, max_proposed_tokens=0) for request in requests])
    native.known = {request.request_id: each.tokens for request, each in zip(requests, plain, strict=True)}
    native.known["gate"] = []
    for _ in range(2):
        found = native.answers(requests)
        for one, other in zip(found, plain, strict=True):
            assert (one.tokens, one.logprobs, one.error) == (other.tokens, other.logprobs, None)
        assert 0 < sum(each.accepted_tokens for each in found) < sum(each.proposed_tokens for each in found)
    native.close()
