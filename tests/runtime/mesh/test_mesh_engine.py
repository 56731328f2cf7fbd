"""The engine's and the server's own tests, with goldens that are cut over two devices of the CPU: schedules,
prefix cache, forks, preemption, log-probabilities, hidden states, relevances, encoders, images, a cache of
int8, grammars, pauses, weight updates, adapters, drafts and heads are as on one device.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ADAPTED = "not come_and_go and not qwen2_moe and not mixtral"
"""Two of the four goldens with experts."""
GUESSING = "guesses_are and (deepseek_v3 or qwen3_next or eagle_llama)"
"""A layer of a checkpoint with latent attention, one beside a recurrent state, and an EAGLE head."""
DRAFTED = "own_draft and gpt_oss or recurrent_layers and (qwen3_next or eagle_llama)"
"""A draft with windows and experts, one beside a recurrent state, and an EAGLE head beside one."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "tests",
    [
        ("tests/runtime/engine/answers/test_engine_prompt_logprobs.py", "-k", "qwen3 and not qwen3_5"),
        ("tests/runtime/engine/answers/test_engine_hidden_states.py", "-k", "qwen3 and not qwen3_5"),
        ("tests/runtime/engine/answers/test_int8_kv.py", "-k", "qwen3", "-m", "not sweep"),
        ("tests/runtime/engine/test_golden_changes.py", "-m", ""),
        ("tests/service/servicers/test_goldens.py", "-k", "qwen3 or deepseek_v3", "-m", "not sweep"),
        ("tests/runtime/adapters/test_adapters_golden.py", "-k", ADAPTED, "-m", ""),
        ("tests/runtime/adapters/test_adapters_native.py", "-k", "neighbour and none", "-m", ""),
        ("tests/service/servicers/test_goldens.py", "-k", "native-lfm2 or native-olmo2", "-m", ""),
        ("tests/service/servicers/readings/test_rerank.py", "-k", "pytorchs", "-m", ""),
        ("tests/service/servicers/readings/test_encoders.py", "-m", ""),
        ("tests/service/weights/test_fresh.py::test_a_golden_that_is_pushed_answers_as_pytorch[qwen3]",),
        ("tests/service/servicers/images/test_golden_images.py", "-m", "not sweep"),
        ("tests/runtime/engine/test_heads.py", "-k", GUESSING, "-m", ""),
        ("tests/runtime/engine/answers/test_speculation_models.py", "-k", DRAFTED, "-m", ""),
    ],
    ids=lambda tests: Path(tests[0]).stem,
)
def test_what_holds_on_one_device_holds_on_two(tests):
    passes(tests, {})


@pytest.mark.sweep
@pytest.mark.parametrize(
    "tests",
    [
        ("tests/service/servicers/test_goldens.py", "-k", "xla and deepseek_v3", "-m", ""),
        ("tests/runtime/engine/answers/test_int8_kv.py", "-k", "deepseek_v3", "-m", ""),
        (
            "tests/runtime/engine/answers/test_speculation_models.py",
            "-k",
            "deepseek_v3 and not draft",
            "-m",
            "",
        ),
    ],
    ids=lambda tests: Path(tests[0]).stem,
)
def test_what_holds_on_one_device_holds_on_two_with_dealt_pages(tests):
    passes(tests, {"PENSTOCK_TEST_DEALT_PAGES": "1"})


def passes(tests, more):
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PENSTOCK_TEST_DEVICES": "2"} | more
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
