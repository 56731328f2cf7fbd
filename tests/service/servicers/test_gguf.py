"""Models of GGUF files through the whole server: the answers are those of the same weights elsewhere.

tests/golden/gguf has files that the package `gguf` wrote, and what PyTorch computed of them, read by
transformers' own reader. Other files are written here, of goldens and of the demo model.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.runtime.engine import Engine
from penstock.runtime.loading.gguf.model import read_model
from penstock.runtime.loading.hub import DEMO_DIRECTORY
from penstock.v1 import inference_pb2, types_pb2
from tests.service.rig import Rig, serving
from tests.support.goldens import CONFIG, GOLDEN
from tests.support.suite.drawing import few

GGUF = GOLDEN / "gguf"
NAMES = ("llama_gqa4_q5_0", "qwen3_mixed", "llama_q4_k_m")
"""Permuted rows of fewer heads of keys than of queries; eight types in one layer; fall-backs of Q4_K_M."""
WRITTEN = ("llama", "gemma3", "gpt_oss", "deepseek_v3")
"""Goldens that are written as GGUF files: pairs of channels, norms plus one, stacks, latents taken apart."""


def expected_of(folder: Path) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return expected


async def ask(rig: Rig, prompt: list[int], num_tokens: int) -> inference_pb2.Output:
    reply: inference_pb2.GenerateResponse = await rig.inference.Generate(
        inference_pb2.GenerateRequest(
            prompt_token_ids=types_pb2.TokenIds(ids=prompt),
            sampling=types_pb2.SamplingParams(temperature=0),
            stopping=types_pb2.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
            output=types_pb2.OutputOptions(logprobs=1, text=False),
        )
    )
    return reply.outputs[0]


async def check_cases(path: Path, cases: list[dict[str, Any]]) -> None:
    """Check that a server of the file answers what PyTorch answers."""
    async with serving(Engine.from_pretrained(str(path), CONFIG)) as rig:
        for case in cases:
            output = await ask(rig, case["prompt"], len(case["tokens"]))
            assert list(output.token_ids) == case["tokens"]
            np.testing.assert_allclose(output.logprobs.sampled, case["logprobs"], rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_pytorch_was_given(name: str) -> None:
    tensors = read_model(GGUF / name / "model.gguf").tensors
    for module, expected in expected_of(GGUF / name)["weights"].items():
        tensor = tensors[f"{module}.weight"]
        values = tensor[0 : tensor.shape[0]]
        assert list(values.shape) == expected["shape"]
        np.testing.assert_array_equal(values.ravel()[:4], np.array(expected["head"], np.float32), module)
        np.testing.assert_array_equal(values.ravel()[-4:], np.array(expected["tail"], np.float32), module)
        np.testing.assert_allclose(values.sum(dtype=np.float64), expected["sum"], atol=1e-3)
        np.testing.assert_allclose(np.abs(values).sum(dtype=np.float64), expected["abs_sum"], rtol=1e-6)


@pytest.mark.parametrize("name", few(NAMES, (), ci=NAMES[:1]))
async def test_a_quantised_file_answers_as_pytorch_does(name: str) -> None:
    await check_cases(GGUF / name / "model.gguf", expected_of(GGUF / name)["cases"])


@pytest.mark.parametrize("name", few(WRITTEN, ()))
async def test_a_golden_answers_as_pytorch_does_also_from_a_gguf_file(tmp_path: Path, name: str) -> None:
    from tests.support.gguf_models import write_gguf  # noqa: PLC0415 -- skips this test without `gguf`

    write_gguf(GOLDEN / name, tmp_path / "model.gguf")
    await check_cases(tmp_path / "model.gguf", expected_of(GOLDEN / name)["cases"])


@pytest.mark.sweep
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="no package gguf here")
async def test_the_demo_answers_alike_from_gguf_files(tmp_path: Path) -> None:
    """In float32 its tokens are those of its safetensors file. In Q8_0 its log-probabilities differ by what
    rounding to 8 bits changes.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415

    from tests.support.gguf_models import write_gguf  # noqa: PLC0415
    from tests.support.gguf_tokenizers import metadata_of  # noqa: PLC0415

    keys = metadata_of(AutoTokenizer.from_pretrained(DEMO_DIRECTORY), pre="gpt-2")
    config = dataclasses.replace(CONFIG, max_num_seqs=1)
    prompt, num_tokens = "Once upon a time there was a little", 30
    found = {}
    for kind in ("safetensors", "F32", "Q8_0"):
        path = tmp_path / f"{kind}.gguf"
        if kind != "safetensors":
            write_gguf(DEMO_DIRECTORY, path, kind=kind, keys=keys)
        async with serving(
            Engine.from_pretrained("demo" if kind == "safetensors" else str(path), config)
        ) as rig:
            asked = inference_pb2.GenerateRequest(
                prompt=prompt,
                sampling=types_pb2.SamplingParams(temperature=0),
                stopping=types_pb2.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
                output=types_pb2.OutputOptions(logprobs=1),
            )
            found[kind] = (await rig.inference.Generate(asked)).outputs[0]
    expected = found["safetensors"]
    assert found["F32"].text == expected.text
    assert list(found["F32"].token_ids) == list(expected.token_ids)
    np.testing.assert_array_equal(found["F32"].logprobs.sampled, expected.logprobs.sampled)
    difference = abs(found["Q8_0"].logprobs.sampled[0] - expected.logprobs.sampled[0])
    assert 0 < difference < 0.05
