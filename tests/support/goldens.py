"""The golden checkpoints: tiny random models, and what PyTorch computed from them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from penstock.runtime import EngineConfig
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.models.cutting import cut_for
from penstock.runtime.models.stages import largest_groups, stages_of
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.models.witness import log_softmax

Logits = NDArray[np.float32]
GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = (
    "apertus",
    "arcee",
    "bamba",
    "bloom",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "falcon",
    "falcon_7b",
    "falcon_h1",
    "flex_olmo",
    "gemma",
    "glm",
    "glm4",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_neox_serial",
    "gptj",
    "granite_moe",
    "granite_moe_shared",
    "helium",
    "hunyuan_dense",
    "hunyuan_moe",
    "mamba2",
    "mpt",
    "nemotron",
    "nemotron_h",
    "olmo",
    "olmoe",
    "opt",
    "phi",
    "phimoe",
    "stablelm",
    "stablelm_parallel",
    "starcoder2",
    "vaultgemma",
)
"""Folders in GOLDEN of families that are data: a row of a table, or a function that reads config.json. CI
draws of them.
"""
QUANTISED = GOLDEN / "quantised"
"""Checkpoints of two families in every form of quantised weights."""
NAMES = (
    "deepseek_v3",
    "qwen3",
    "qwen2",
    "qwen2_yarn",
    "llama",
    "llama_linear_rope",
    "mistral_swa",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_moe",
    "glm4_moe",
    "minimax_m2",
    "granite",
    "ministral3",
    "olmo2",
    "olmo3",
    "phi3",
    "seed_oss",
    "smollm3",
    "gpt_oss",
    "llama4",
    "lfm2",
    "granite_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    *ROWS,
)
"""The folders in GOLDEN. Every test that compares all models with PyTorch takes its names from here."""
KINDS = (
    "qwen3",
    "mistral_swa",
    "gemma2",
    "gemma4",
    "gemma4_moe",
    "granite",
    "gpt_oss",
    "llama4",
    "deepseek_v3",
    "lfm2",
    "granite_hybrid",
    "qwen3_5",
)
"""One of NAMES for each kind of head, cache and state, for tests of what an engine tells beside tokens. The
other families differ in products, norms and rotation. CI draws some of them, because to compile all of them
takes a quarter of an hour.
"""
QWEN_WITH_IMAGES = ("qwen2_5_vl", "qwen3_5_vl", "qwen3_vl")
"""Goldens with the encoder of Qwen's models."""
MARKS = {
    **dict.fromkeys(QWEN_WITH_IMAGES, "<|image_pad|>"),
    "gemma3_vl": "<start_of_image>",
    "gemma4_vl": "<|image|>",
    "internvl": "<IMG_CONTEXT>",
    "llama4_vl": "<|image|>",
    "mistral3_vl": "[IMG]",
    "pixtral": "[IMG]",
}
"""The further folders in GOLDEN, whose prompts have images, and what stands for one in a text."""
WITH_IMAGES = tuple(MARKS)
IMAGE_TOKENS = dict.fromkeys(WITH_IMAGES, (5,)) | {
    "internvl": (3,),
    "llama4_vl": (3,),
    "mistral3_vl": (3, 4, 5),
    "pixtral": (3, 4, 5),
}
"""The tokens that images become in each of them, the first of which is that of an embedding. Of Mistral's
the others are text, behind rows and behind the image."""
WRITTEN_TOKENS = {name: tokens[0] for name, tokens in IMAGE_TOKENS.items()} | {"llama4_vl": 4}
"""The token that a prompt of each of them has for an image."""
RUNS = {"gemma3_vl": 5}
"""The token of images where the processor writes more into a text than its mark."""
CONFIG = EngineConfig(
    dtype="float32",
    tensor_parallel_size=int(os.environ.get("PENSTOCK_TEST_DEVICES", "1")),
    pipeline_parallel_size=int(os.environ.get("PENSTOCK_TEST_STAGES", "1")),
    context_parallel=os.environ.get("PENSTOCK_TEST_DEALT_PAGES") == "1",
    max_num_seqs=4,
    max_num_batched_tokens=128,
    page_size=8,
    max_model_len=256,
    compilation_cache=TEST_CACHE,
    show_progress=False,
)
"""The options under which tests compare answers with PyTorch."""
CACHED_TOKENS = 288
"""Four requests fit when they enter, but not when they have grown."""


def small_config(
    name: str, *, page_size: int = CONFIG.page_size, cached_tokens: int = CACHED_TOKENS
) -> EngineConfig:
    """CONFIG with a KV cache of so many tokens. XLA compiles for the size of the cache, and to compile all
    goldens takes minutes, so tests that ask for the same pages of a golden share its compiled programs.
    """
    config = cut_for(load_config(GOLDEN / name), CONFIG, CONFIG.tensor_parallel_size or 1)
    stages, num_slots = stages_of(config, CONFIG.pipeline_parallel_size), CONFIG.max_num_seqs or 0
    caches = [stage.cache for stage in stages] or [config.cache]
    groups = largest_groups(caches, page_size, np.dtype(np.float32))
    pages = -(-cached_tokens // page_size) * sum(group.page_bytes for group in groups)
    snapshots = num_slots if config.cache.has_state else 0
    state = max(cache.state_bytes(num_slots, snapshots) for cache in caches)
    return dataclasses.replace(
        CONFIG,
        page_size=page_size,
        state_snapshots=snapshots,
        kv_cache_bytes=pages + state,
    )


def check_last_logits(logits: Logits, case: Mapping[str, Any]) -> None:
    """Check that the logits after a golden's prompt [V] are PyTorch's, as far as those are known."""
    ids, values = zip(*case["last_logits_top"], strict=True)
    np.testing.assert_allclose(logits[list(ids)], values, rtol=1e-4)


def check_greedy(logits: Logits, feed: Callable[[list[int]], Logits], case: Mapping[str, Any]) -> None:
    """Check that the likeliest tokens after a golden's prompt, and their log-probabilities, are PyTorch's.
    `feed` gives the logits after further tokens.
    """
    tokens, logprobs = [], []
    for _ in case["tokens"]:
        tokens.append(int(logits.argmax()))
        logprobs.append(log_softmax(logits.astype(np.float64))[tokens[-1]])
        logits = feed(tokens[-1:])
    assert tokens == case["tokens"]
    np.testing.assert_allclose(logprobs, case["logprobs"], atol=1e-4)


def golden_of(name: str) -> str:
    """Return the golden that a head is of."""
    return "qwen2" if name == "mimo" else name.removeprefix("eagle_")


def with_heads(name: str, folder: Path) -> Path:
    """Write a golden together with the layer that predicts further tokens. MiMo is a Qwen2 with one."""
    shutil.copytree(GOLDEN / golden_of(name), folder, dirs_exist_ok=True)
    if name == "mimo":
        fields = json.loads((folder / "config.json").read_text())
        fields |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(fields))
    layer = load_file(GOLDEN / "heads" / name / "layer.safetensors")
    save_file({**load_file(folder / "model.safetensors"), **layer}, folder / "model.safetensors")
    return folder
