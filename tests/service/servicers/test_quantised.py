"""Quantised checkpoints through the whole server: tokens and log-probabilities are those that PyTorch
computed in float32 from the weights that other projects' own code read from the same files.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.service.servicers.test_goldens import ask, cases_of, served
from tests.support.goldens import QUANTISED
from tests.support.suite.drawing import few

NAMES = sorted(folder.name for folder in QUANTISED.iterdir())
ALWAYS = ("gptq_desc_act_g32",)


@pytest.mark.parametrize("name", few(NAMES, ALWAYS, ci=NAMES))
async def test_answers_equal_those_of_pytorch_on_the_dequantised_weights(name: str) -> None:
    golden = f"{QUANTISED.name}/{name}"
    async with served(golden, page_size=8) as (rig, _):
        await asyncio.gather(*(ask(rig, case) for case in cases_of(golden)))
