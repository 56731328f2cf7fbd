"""A layer that predicts the token after the next one guesses tokens, and changes none: a layer of the
checkpoint, or an EAGLE head. What it guesses is compared with what PyTorch computed with it
(`tools.golden_heads`).
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from penstock.runtime import Engine, EngineConfig, StoppingParams, building
from penstock.runtime.errors import CheckpointError, ConfigError
from penstock.runtime.execution.device_state import follower_of
from penstock.runtime.execution.draft_model import DraftModel
from penstock.runtime.execution.runner import ProgramCalls
from penstock.runtime.loading import served_model
from penstock.runtime.loading.checkpoint import load_config, read_config
from penstock.runtime.loading.inspection import inspect_checkpoint
from penstock.runtime.loading.served_model import (
    load_model,
    read_checkpoint,
    read_draft,
    served_config,
    why_no_draft,
)
from penstock.runtime.models.params import load_rules
from penstock.runtime.models.registry import parse_config
from penstock.runtime.ops.attention import make_meta, paged_attention
from penstock.runtime.ops.native import library
from penstock.runtime.ops.recurrent.operations import XLA_RECURRENT
from penstock.runtime.requests.request import Request, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.plan import drafted_tokens
from tests.runtime.engine.answers.test_layer_groups import CONFIG as GROUPED
from tests.support.batch import answers
from tests.support.goldens import GOLDEN, golden_of, small_config, with_heads
from tests.support.models.table import random_tables, table_model
from tests.support.models.toy import toy_backend, toy_config
from tests.support.scheduler.proposing import Guesses
from tests.support.suite.drawing import few

MOST = 3
"""`EngineConfig.max_proposed_tokens`, and how many guesses PyTorch made behind each token."""
FLOAT32 = EngineConfig(dtype="float32", speculation="heads", max_model_len=64)
NAMES = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5", "mimo", "eagle_llama", "eagle_qwen3")
"""Folders in tests/golden/heads."""
RECURRENT = ("qwen3_next", "qwen3_5")


def guessing(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the model that has this head, and the options with which an engine has both."""
    if name.startswith("eagle_"):
        draft = str(GOLDEN / "heads" / name)
        return str(GOLDEN / golden_of(name)), {"speculation": "draft", "draft_model": draft}
    return str(with_heads(name, folder)), {"speculation": "heads"}


def expected(folder: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((GOLDEN / folder / "expected.json").read_text())["cases"]
    return cases


def greedy(name: str, prompt: list[int], num: int) -> Request:
    rules = StoppingParams(max_tokens=num, ignore_eos=True)
    return Request(name, tuple(prompt), ResolvedSampling(temperature=0.0), rules)


class Seen:
    """Keeps what every slot has for guesses after each program that guesses."""

    def __init__(self) -> None:
        self.steps: list[NDArray[np.int32]] = []
        self._guess = ProgramCalls.guess

    def guess(self, calls: ProgramCalls, rows: int, packed: NDArray[np.int32]) -> None:
        """Stand in for `ProgramCalls.guess`."""
        self._guess(calls, rows, packed)
        self.steps.append(np.asarray(calls._device.rows.guesses).copy())


def counts(tokens: list[int], guesses: list[list[int]], *, again: bool) -> list[tuple[int, int, int]]:
    """Of each step with proposals how many tokens the output had, and how many were proposed and accepted.
    again: the step behind a wrong proposal computes the accepted tokens again, and has no proposals.
    """
    made, steps = 1, []
    while made < len(tokens):
        count, right = min(MOST, len(tokens) - made - 1), 0
        while right < count and guesses[made - 1][right] == tokens[made + right]:
            right += 1
        steps.append((made, count, right))
        made += right + 1 + (again and right < count)
    return [step for step in steps if step[1]]


@pytest.mark.parametrize("name", few(NAMES, [], ci=["deepseek_v3", "eagle_llama"]))
def test_logits_are_those_of_pytorch(name: str, tmp_path: Path) -> None:
    """Behind the first generated token, of a prompt that is computed in one step."""
    folder, options = guessing(name, tmp_path)
    model = load_model(folder, EngineConfig(dtype="float32", max_model_len=128, **options), toy_backend())
    draft = model.draft
    assert draft is not None
    target = nnx.merge(model.graphdef, model.weights)
    alone = None if draft.graphdef is None else nnx.merge(draft.graphdef, draft.weights)
    heads = follower_of(draft, target, alone, jnp.dtype(jnp.float32))
    pages = 4
    empty = model.whole_cache.arrays((pages,), 64, 1, np.dtype(np.float32))

    @jax.jit
    def last_logits(tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        meta = make_meta(
            starts=jnp.zeros((1,), jnp.int32),
            q_lens=count[None],
            page_table=jnp.arange(pages, dtype=jnp.int32)[::-1][None],
            num_tokens=len(tokens),
            decode_only=False,
            page_size=64,
            num_pages=pages,
            state_from=jnp.full((1,), 2**20, jnp.int32),
            state_to=jnp.zeros((1,), jnp.int32),
        )
        operations = (paged_attention, XLA_RECURRENT)
        kv = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), empty)
        own, given = len(model.cache.layers), {"taps": heads.taps} if heads.taps else {}
        hidden, written = target(tokens, meta.positions, kv[:own], (meta,), **given)
        read = hidden[:, model.hidden_size :] if heads.taps else hidden
        kv = heads.follow(tokens, read, (*written, *kv[own:]), meta, *operations)
        logits, _, _ = heads.guess(tokens, heads.before(kv, meta), kv, meta, *operations, count)
        return logits[count - 1], heads.tokens(logits.argmax(-1))[count - 1]

    for case, head in zip(expected(golden_of(name)), expected(f"heads/{name}"), strict=True):
        tokens = [*case["prompt"], case["tokens"][0]]
        padded = np.pad(np.array(tokens, np.int32), (0, 96 - len(tokens)))
        logits, guess = last_logits(jnp.asarray(padded), jnp.int32(len(tokens)))
        ids, values = zip(*head["first_logits_top"], strict=True)
        np.testing.assert_allclose(np.asarray(logits)[list(ids)], values, rtol=1e-3, atol=1e-4)
        assert guess == head["guesses"][0][0]


NORMS = {
    "deepseek_v3": {"model.layers.3.shared_head.norm.weight": 0.0},
    "glm4_moe": {"model.layers.3.shared_head.norm.weight": 0.0},
    "mimo": {"model.mtp_layers.0.final_layernorm.weight": 0.0},
    "qwen3_next": {"mtp.norm.weight": -1.0},
    "qwen3_5": {"mtp.norm.weight": -1.0},
}
"""An update in which the layer's last norm multiplies by zero."""


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_those_of_pytorch(name: str, tmp_path: Path) -> None:
    """Also where a prompt has several chunks, and where its pages are another request's."""
    proposer = Guesses(lambda seq, most: drafted_tokens(most), random.Random(1), patience=1.0)
    folder, options = guessing(name, tmp_path)
    config = small_config(golden_of(name), cached_tokens=4 * 288)
    config = dataclasses.replace(
        config,
        max_proposed_tokens=MOST,
        max_num_batched_tokens=64,
        max_num_seqs=1,
        max_decode_steps=1,
        **options,
    )
    with mock.patch.object(building, "Drafting", return_value=proposer):
        engine = Engine.from_pretrained(folder, config)
    engine.start()
    seen = Seen()
    told = list(zip(expected(golden_of(name)), expected(f"heads/{name}"), strict=True))
    accepted = []
    with mock.patch.object(ProgramCalls, "guess", lambda *arguments: seen.guess(*arguments)):
        for i, (case, head) in enumerate([*told, told[-1]]):
            seen.steps.clear()
            (got,) = answers(engine, [greedy(f"g{i}", case["prompt"], len(case["tokens"]))])
            assert got.tokens == case["tokens"]
            steps = counts(case["tokens"], head["guesses"], again=name in RECURRENT)
            assert got.proposed_tokens == sum(count for _, count, _ in steps)
            assert got.accepted_tokens == sum(right for *_, right in steps)
            for (made, count, _), found in zip(steps, seen.steps, strict=True):
                assert head["guesses"][made - 1][:count] in found[:, :count].tolist(), made
            accepted.append((got.accepted_tokens, got.proposed_tokens))
        assert got.cached_prompt_tokens >= 64
        assert all(0 < right < count for right, count in accepted)
        # The norm makes all logits zero, so every guess is token 0.
        for norm, value in NORMS.get(name, {}).items():
            update = {norm: np.full(48, value, np.float32)}
            engine.update_weights(update, label="norm", partial=True).result(60)
            seen.steps.clear()
            (got,) = answers(engine, [greedy("zeros", told[0][0]["prompt"], 8)])
            assert got.tokens == told[0][0]["tokens"][:8]
            assert not any(step[0, :1].any() for step in seen.steps)
    assert engine.compiles_after_warmup == 0
    engine.shutdown()


def test_what_is_read_of_the_layer_and_what_it_takes(tmp_path: Path) -> None:
    """A token takes 48 numbers of latent attention in each of three layers and in the one behind them, and 48
    of the hidden state. Every tensor of the layer is read, so an update may send each of them.
    """
    folder = with_heads("deepseek_v3", tmp_path)
    facts = read_checkpoint(folder, FLOAT32, toy_backend())
    layer = load_file(GOLDEN / "heads" / "deepseek_v3" / "layer.safetensors")
    assert layer.keys() <= {each.name for each in facts.rules.tensors}
    without = dataclasses.replace(FLOAT32, speculation="off")
    plain = read_checkpoint(folder, without, toy_backend())
    assert not layer.keys() & {each.name for each in plain.rules.tensors}
    found, fewer = (inspect_checkpoint(folder, each, toy_backend()) for each in (FLOAT32, without))
    assert (found.token_bytes, fewer.token_bytes) == (4 * 5 * 48, 4 * 3 * 48)
    numbers = sum(each.size for each in layer.values())
    assert found.num_parameters == fewer.num_parameters + numbers


@pytest.mark.parametrize(
    ("name", "options", "error", "problem"),
    [
        ("qwen3", {}, ConfigError, "speculation: Qwen3ForCausalLM has no heads here"),
        ("encoders/bert", {}, ConfigError, "speculation: BertModel has no heads here"),
        ("lfm2", {}, ConfigError, "speculation: Lfm2ForCausalLM has no heads here"),
        ("deepseek_v3", {}, CheckpointError, "model.layers.3.eh_proj.weight"),
        (
            "deepseek_v3",
            {"tensor_parallel_size": 2, "context_parallel": True},
            ConfigError,
            "speculation: heads do not go with context_parallel",
        ),
        ("deepseek_v3", {"draft_model": "demo"}, ConfigError, "draft_model: goes with"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], error: type[Exception], problem: str) -> None:
    """Before any weights are read."""
    with pytest.raises(error, match=problem):
        load_model(str(GOLDEN / name), dataclasses.replace(FLOAT32, **options), toy_backend())


def test_heads_need_a_layer_without_a_window() -> None:
    """They have the pages of the first group of layers, and pages behind a window are given back."""
    config = load_config(GOLDEN / "mistral_swa")
    config = dataclasses.replace(config, predictor=config.layers[-1])
    with pytest.raises(ConfigError, match="speculation: all layers of MistralForCausalLM have a sliding"):
        served_config(config, FLOAT32)


def test_heads_of_a_gguf_file_are_refused() -> None:
    config = load_config(GOLDEN / "deepseek_v3")
    made = mock.Mock(config=config, tensors={"model.embed_tokens.weight": mock.Mock()})
    with (
        mock.patch.object(served_model, "is_gguf", return_value=True),
        mock.patch.object(served_model, "read_model", return_value=made),
        mock.patch.object(served_model, "config_for_tensors", return_value=config),
        pytest.raises(ConfigError, match="speculation: heads of a GGUF file are not read"),
    ):
        read_checkpoint(Path("model.gguf"), FLOAT32, toy_backend())


def test_heads_and_options_go_together() -> None:
    alone = table_model(random_tables())
    heads = DraftModel(
        name="heads", graphdef=None, weights=None, cache=alone.cache, vocab_size=alone.vocab_size
    )
    both, config = dataclasses.replace(alone, draft=heads), toy_config(speculation="heads")
    for model, options in ((alone, config), (both, toy_config(speculation="lookup")), (both, toy_config())):
        with pytest.raises(ConfigError, match="speculation: a model has heads"):
            Engine(model, options)


NATIVE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
"""Sizes that the native kernels compute."""


HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
EAGLE = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 160,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
}


def write_random(folder: Path, fields: dict[str, Any]) -> Path:
    """Write a checkpoint of random weights."""
    folder.mkdir()
    config = parse_config(fields, heads=True)
    config = dataclasses.replace(config, predicts=config.predictor is not None)
    rng = np.random.default_rng(3)
    tensors = {
        each.name: (rng.standard_normal(each.shape) * (0.3 if len(each.shape) > 1 else 0.1)).astype(
            np.float32
        )
        + (each.name.endswith("norm.weight") and np.float32(1 - config.norm_offset))
        for each in load_rules(config).tensors
    }
    if config.eagle is not None:
        tensors["d2t"] = np.arange(config.eagle.draft_vocab_size)  # type: ignore[assignment]  # every second token
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.sweep
@pytest.mark.skipif(not library.available(), reason="no native library on this machine")
@pytest.mark.parametrize(
    ("fields", "head", "more"),
    [
        (NATIVE, None, {}),
        (HYBRID, None, {}),
        (LLAMA, EAGLE, {}),
        (LLAMA, EAGLE, {"kv_cache_dtype": "int8", "quantization": "int8"}),
        (HYBRID, EAGLE | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, {}),
    ],
    ids=["mixture", "hybrid", "EAGLE", "EAGLE in int8", "EAGLE of a hybrid"],
)
def test_native_kernels_give_the_same_bits(
    fields: dict[str, Any], head: dict[str, Any] | None, more: dict[str, Any], tmp_path: Path
) -> None:
    """Tokens and log-probabilities, greedy and sampled, in steps with proposals and without, also of several
    outputs of a prompt.
    """
    folder = write_random(tmp_path / "model", fields)
    guessing: dict[str, Any] = {"speculation": "heads"}
    if head is not None:
        draft = str(write_random(tmp_path / "draft", head))
        guessing = {"speculation": "draft", "draft_model": draft}
    options = dataclasses.replace(GROUPED, dtype="bfloat16", **more)
    requests = [
        Request(
            f"r{i}",
            tuple(random.Random(i).choices(range(10, 300), k=11 * i + 1)),
            ResolvedSampling(temperature=0.7 * (i % 3), seed=i, presence_penalty=0.3 * (i % 2)),
            StoppingParams(max_tokens=30, ignore_eos=True),
            logprobs=3,
        )
        for i in range(6)
    ]
    requests += outputs_of(dataclasses.replace(requests[-1], request_id="n"), 3)
    found = []
    for changes in ({}, guessing):
        proposer = Guesses(lambda seq, most: drafted_tokens(most), random.Random(1), patience=1.0)
        with mock.patch.object(building, "Drafting", return_value=proposer):
            engine = Engine.from_pretrained(str(folder), dataclasses.replace(options, **changes))
        engine.start()
        assert engine.info.batch_invariant
        found.append(answers(engine, requests))
        assert engine.compiles_after_warmup == 0
        engine.shutdown()
    for one, other in zip(*found, strict=True):
        assert (one.tokens, one.logprobs, one.error) == (other.tokens, other.logprobs, None)
    assert sum(each.proposed_tokens for each in found[1]) > 50


@pytest.mark.sweep
def test_a_cache_of_int8_in_columns_gives_the_same_answers(tmp_path: Path) -> None:
    """As a TPU's lies, here computed by XLA: latents, and the states from which heads guess."""
    folder, guesses = guessing("deepseek_v3", tmp_path)
    case = expected("deepseek_v3")[0]
    found = []
    for lanes in (1, 128):
        backend = dataclasses.replace(toy_backend(), attention=paged_attention, lanes=lanes)
        changes = {**guesses, "kv_cache_dtype": "int8", "kv_cache_bytes": 4 << 20}
        options = dataclasses.replace(small_config("deepseek_v3"), **changes)
        # Which asks in every step, however long steps take.
        proposer = Guesses(lambda seq, most: drafted_tokens(most), random.Random(1), patience=1.0)
        with mock.patch.object(building, "Drafting", return_value=proposer):
            engine = Engine(load_model(folder, options, backend), options, backend=backend)
        engine.start()
        found.append(answers(engine, [greedy("r", case["prompt"], 40)])[0])
        engine.shutdown()
    rows, columns = found
    assert (columns.tokens, columns.error) == (rows.tokens, None)
    assert columns.proposed_tokens == rows.proposed_tokens > 0
    assert columns.accepted_tokens == rows.accepted_tokens


EAGLE_LLAMA = GOLDEN / "heads" / "eagle_llama"


def test_what_is_read_of_an_eagle_head_and_what_it_takes() -> None:
    """A token takes 2 x 2 heads of 12 numbers in each of two layers, and beside them a hidden state of 48
    numbers and 2 x 2 heads of 28.
    """
    options = EngineConfig(
        dtype="float32", max_model_len=64, speculation="draft", draft_model=str(EAGLE_LLAMA)
    )
    found = inspect_checkpoint(GOLDEN / "llama", options, toy_backend())
    assert found.token_bytes == 4 * (2 * 48 + 48 + 2 * 2 * 28)
    facts = read_draft(
        str(EAGLE_LLAMA), read_checkpoint(GOLDEN / "llama", options, toy_backend()), options, toy_backend()
    ).facts
    held = load_file(EAGLE_LLAMA / "model.safetensors")
    assert {each.name for each in facts.rules.tensors} == held.keys() - {"t2d"}
    numbers = sum(each.size for name, each in held.items() if name != "t2d")
    assert found.draft_bytes >= 4 * numbers


def test_an_eagle_head_is_no_model_of_its_own() -> None:
    with pytest.raises(ConfigError, match="is an EAGLE head, which is no model of its own"):
        load_model(str(EAGLE_LLAMA), EngineConfig(dtype="float32"), toy_backend())


@pytest.mark.parametrize(
    ("target", "fields", "problem"),
    [
        ("llama", {"target_hidden_size": 64}, "fc.weight has shape"),
        ("llama", {"vocab_size": 500}, "it knows 500 tokens"),
        ("llama", {"eagle_aux_hidden_state_layer_ids": None}, "it reads what layers 2, 1, -1 read"),
        ("llama", {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "it reads what layers 0, 1, 3 read"),
        ("gemma", {}, "it has no embeddings, and GemmaForCausalLM changes its own"),
        ("mamba2", {}, "the model that is served has no layers that attend"),
        ("llama", {"num_hidden_layers": 2}, "num_hidden_layers: must be 1, not 2"),
        ("llama", {"draft_vocab_size": 100}, "lm_head.weight"),
    ],
)
def test_an_eagle_head_is_refused_where_it_cannot_guess(
    target: str, fields: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    """Before any weights are read."""
    shutil.copytree(EAGLE_LLAMA, tmp_path, dirs_exist_ok=True)
    config = json.loads((EAGLE_LLAMA / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    options = EngineConfig(dtype="float32", max_model_len=64, speculation="draft", draft_model=str(tmp_path))
    with pytest.raises(ConfigError, match=problem) as refused:
        load_model(str(GOLDEN / target), options, toy_backend())
    assert str(refused.value).startswith(f"draft_model: {tmp_path}: ")


def test_an_eagle_head_reads_hidden_states_of_one_size() -> None:
    head = read_config(EAGLE_LLAMA, heads=True)
    target = load_config(GOLDEN / "llama")
    assert why_no_draft(head, target) == ""
    wider = dataclasses.replace(target, hidden_size=64)
    assert why_no_draft(head, wider).startswith("it reads hidden states of 48 numbers, and those of Llama")


def test_an_eagle_head_names_tokens_of_its_target(tmp_path: Path) -> None:
    shutil.copytree(EAGLE_LLAMA, tmp_path, dirs_exist_ok=True)
    held = load_file(EAGLE_LLAMA / "model.safetensors")
    held["d2t"][-1] = 512
    save_file(held, tmp_path / "model.safetensors")
    options = EngineConfig(dtype="float32", max_model_len=64, speculation="draft", draft_model=str(tmp_path))
    with pytest.raises(ConfigError, match="d2t: it names tokens that LlamaForCausalLM has not"):
        load_model(str(GOLDEN / "llama"), options, toy_backend())
