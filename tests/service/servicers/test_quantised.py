"""Quantised checkpoints through the whole server: tokens and log-probabilities are those that PyTorch
computed in float32 from the weights that other projects' own code read from the same files.
"""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from penstock.runtime.engine import Engine
from penstock.runtime.ops.native import library
from penstock.v1 import inference_pb2, types_pb2
from tests.service.rig import serving
from tests.service.servicers.test_goldens import ask, cases_of, served
from tests.support.goldens import QUANTISED, small_config
from tests.support.suite.drawing import few

NAMES = sorted(folder.name for folder in QUANTISED.iterdir())
CI = ("gptq_desc_act_g32",)
"""Rows in another order. CI also compares the values of all files, in `test_quantised_goldens.py`."""


@pytest.mark.parametrize("name", few(NAMES, (), ci=CI))
async def test_answers_equal_those_of_pytorch_on_the_dequantised_weights(name: str) -> None:
    golden = f"{QUANTISED.name}/{name}"
    async with served(golden, page_size=8) as (rig, _):
        await asyncio.gather(*(ask(rig, case) for case in cases_of(golden)))


@pytest.mark.parametrize(
    "name",
    few(
        [
            "awq_g64",
            "ct_w4a16_asym_g64",
            "gptq_8bit_channel",
            "ct_w8a8_int8",
            "mlx_4bit_g64",
            "ct_mxfp4a16",
            "ct_fp8_block",
        ],
        (),
        ci=("ct_w8a8_int8", "ct_mxfp4a16"),
    ),
)
async def test_answers_from_kept_codes_are_near_those_of_pytorch(name: str) -> None:
    """In bfloat16, and for integers with activations in 8 bits: log-probabilities of PyTorch's tokens, as a
    continuation.
    """
    if not library.available():
        pytest.skip("no native library on this machine")
    golden = f"{QUANTISED.name}/{name}"
    config = dataclasses.replace(small_config(golden, page_size=16), dtype="bfloat16", native="require")
    async with serving(Engine.from_pretrained(str(QUANTISED / name), config)) as rig:
        for case in cases_of(golden):
            reply = await rig.inference.Score(
                inference_pb2.ScoreRequest(
                    prompt_token_ids=types_pb2.TokenIds(ids=case["prompt"]),
                    continuations=[
                        inference_pb2.Continuation(token_ids=types_pb2.TokenIds(ids=case["tokens"]))
                    ],
                )
            )
            np.testing.assert_allclose(reply.scores[0].logprobs, case["logprobs"], atol=0.1)
