"""`penstock serve` as a group of two processes with a device of the CPU each: goldens of several kinds of
layers give PyTorch's tokens through gRPC, and a process that is lost, or is told to stop, ends both.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bench.probes.group_storm import (
    PROMPTS,
    STAGES,
    Group,
    Reading,
    expected,
    other_weights,
    storm_round,
)
from penstock.client import Client
from penstock.v1 import (
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    types_pb2,
)
from tests.service.group.test_group import certificates
from tests.service.tls_rig import CA, CERTS
from tests.support.goldens import golden_of, with_heads
from tests.support.models.compilation_cache import TEST_CACHE

GOLDEN = Path(__file__).parents[2] / "golden"
CACHE = f"--compilation-cache={TEST_CACHE / 'groups'}"
"""A folder of their own, because only the sets of programs that were used last are kept."""

TLS = (
    f"--tls-cert={CERTS / 'server.pem'}",
    f"--tls-key={CERTS / 'server.key'}",
    f"--client-ca={CA}",
    f"--group-ca={CA}",
)


def ask(stub: Any, case: dict[str, Any], **more: Any) -> Any:
    return stub.Generate(
        inference_pb2.GenerateRequest(
            prompt_token_ids=types_pb2.TokenIds(ids=case["prompt"]),
            stopping=types_pb2.StoppingParams(max_tokens=len(case["tokens"]), ignore_eos=True),
            output=types_pb2.OutputOptions(logprobs=1, prompt_logprobs=1, text=False),
            **{"sampling": types_pb2.SamplingParams(temperature=0), **more},
        ),
        timeout=120,
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "size", "stages", "more"),
    [
        ("qwen3", 2, 1, ()),
        ("qwen3", 1, 2, ()),
        *(
            pytest.param(name, size, stages, more, marks=pytest.mark.sweep)
            for name, size, stages, more in (
                ("qwen3", 4, 1, ()),  # two devices of each process
                ("deepseek_v3", 2, 1, ()),
                ("deepseek_v3", 2, 1, ("--context-parallel",)),
                ("qwen3_moe", 2, 1, ()),
                ("qwen3_5", 2, 1, ()),
                ("gpt_oss", 2, 1, ()),
                ("qwen3", 2, 2, ()),
                ("deepseek_v3", 1, 2, ()),
                ("gemma4", 1, 2, ()),  # whose stages also pass embeddings for each layer
                ("qwen3_5", 1, 2, ()),
                ("gpt_oss", 2, 2, ()),
                ("deepseek_v3", 1, 3, ()),
            )
        ),
    ],
)
def test_goldens_of_a_group_are_pytorch_s(name: str, size: int, stages: int, more: tuple[str, ...]) -> None:
    """Prefill in chunks, windows, log-probabilities, outputs that fork, a bias and a pause that frees the
    cache pass through the log, and adapters, which the leader reads and is sent; with stages no adapters. At
    the end the follower is told to stop, and all end gracefully.
    """
    cases = json.loads((GOLDEN / name / "expected.json").read_text())["cases"]
    adapters = sorted((GOLDEN / "lora" / name).glob("*")) if stages == 1 else []
    flags = [
        f"--tensor-parallel-size={size}",
        f"--pipeline-parallel-size={stages}",
        *more,
        *(["--max-adapters=1"] if adapters else []),
    ]
    if any("expert" in folder.name for folder in adapters):
        flags.append("--adapter-experts")
    processes = max(2, stages)
    own = ([f"--adapter={folder.name}={folder}" for folder in adapters[:1]], *[()] * (processes - 1))
    with Group(str(GOLDEN / name), CACHE, *flags, own=own, processes=processes) as group:
        group.wait_ready()
        with grpc.insecure_channel(group.address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            for bypass, n in ((False, 1), (True, 2)):
                with ThreadPoolExecutor(len(cases)) as pool:  # so that stages have rows in turns
                    sampling = types_pb2.SamplingParams(temperature=0, n=n)
                    cache = types_pb2.CacheOptions(bypass_prefix_cache=bypass)
                    replies = list(pool.map(partial(ask, stub, sampling=sampling, cache=cache), cases))
                for case, reply in zip(cases, replies, strict=True):
                    assert len(reply.outputs) == n
                    for output in reply.outputs:
                        assert list(output.token_ids) == case["tokens"]
                        np.testing.assert_allclose(output.logprobs.sampled, case["logprobs"], rtol=1e-4)
            with Client(group.address) as client:
                for folder in adapters[1:]:
                    client.push_adapter(folder.name, folder)
                for folder in adapters:
                    for case in json.loads((folder / "expected.json").read_text())["cases"]:
                        output = ask(stub, case, adapter=folder.name).outputs[0]
                        assert list(output.token_ids) == case["tokens"]
                        np.testing.assert_allclose(output.logprobs.sampled, case["logprobs"], atol=1e-4)
                        output = ask(stub, case).outputs[0]
                        assert list(output.token_ids) == case["base_tokens"]
                for folder in adapters:
                    client.unload_adapter(folder.name)
            biased = inference_pb2.GenerateRequest(
                prompt_token_ids=types_pb2.TokenIds(ids=cases[0]["prompt"]),
                sampling=types_pb2.SamplingParams(temperature=0, allowed_token_ids=[11]),
                stopping=types_pb2.StoppingParams(max_tokens=5, ignore_eos=True),
                output=types_pb2.OutputOptions(text=False),
            )
            assert list(stub.Generate(biased, timeout=120).outputs[0].token_ids) == [11] * 5
            control: Any = control_pb2_grpc.ControlServiceStub(channel)
            assert control.Pause(control_pb2.PauseRequest(free_kv_cache=True), timeout=60).freed_bytes > 0
            control.Resume(control_pb2.ResumeRequest(), timeout=60)
            assert list(ask(stub, cases[0]).outputs[0].token_ids) == cases[0]["tokens"]
        group.processes[1].send_signal(signal.SIGTERM)
        others = [75] * (processes - 2)
        assert group.wait_codes(60.0) == [75, 0, *others], group.output(0) + group.output(1)


@pytest.mark.sweep
def test_texts_keep_to_their_grammars_in_stages() -> None:
    """Masks go to the leader, which has the last stage, while other rows take turns with these. The model is
    computed by the native kernels where the machine has them.
    """
    patterns = ["[ab]{9}", "(one|two) [0-9]{1,5}\\.", "x{0,5}y", '\\{"a": (true|null)\\}']
    with Group("demo", CACHE, *STAGES, "--dtype=bfloat16", "--page-size=16") as group:
        group.wait_ready()
        with grpc.insecure_channel(group.address) as channel, ThreadPoolExecutor(8) as pool:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)

            def answer(pattern: str | None) -> str:
                request = inference_pb2.GenerateRequest(
                    prompt="Once upon a time",
                    sampling=types_pb2.SamplingParams(temperature=0),
                    stopping=types_pb2.StoppingParams(max_tokens=60),
                )
                if pattern is not None:
                    request.constraint.regex = pattern
                return str(stub.Generate(request, timeout=120).outputs[0].text)

            alone = answer(None)
            answers = list(pool.map(answer, [*patterns, *4 * [None]]))
    for pattern, text in zip(patterns, answers, strict=False):
        assert re.fullmatch(pattern, text), (pattern, text)
    assert answers[4:] == 4 * [alone]
    assert alone


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["deepseek_v3", "eagle_llama"])
def test_what_guesses_in_a_group_changes_no_token(name: str, tmp_path: Path) -> None:
    """The layer of the checkpoint that guesses, or an EAGLE head beside it, is cut over both processes."""
    target = golden_of(name)
    cases = json.loads((GOLDEN / target / "expected.json").read_text())["cases"]
    if name.startswith("eagle_"):
        model, flags = GOLDEN / target, ["--speculation=draft", f"--draft-model={GOLDEN / 'heads' / name}"]
    else:
        model, flags = with_heads(name, tmp_path), ["--speculation=heads"]
    with Group(str(model), CACHE, "--tensor-parallel-size=2", *flags) as group:
        group.wait_ready()
        proposed = 0
        with grpc.insecure_channel(group.address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            for _ in range(4):
                for case in cases:
                    reply = ask(stub, case)
                    assert list(reply.outputs[0].token_ids) == case["tokens"]
                    proposed += reply.usage.proposed_tokens
        assert proposed > 0
        group.processes[1].send_signal(signal.SIGTERM)
        assert group.wait_codes(60.0) == [75, 0], group.output(0) + group.output(1)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["mpnet", "llama_classifier"])
def test_what_generates_nothing_is_served_by_a_group(name: str, tmp_path: Path) -> None:
    """An encoder's vectors, and a classifier's numbers, are PyTorch's, also of the largest number of each
    channel. The group starts with other values; the golden's are pushed to it.
    """
    directory, old = GOLDEN / "encoders" / name, tmp_path / "old"
    new = load_file(directory / "model.safetensors")
    shutil.copytree(directory, old)
    save_file({each: tensor[::-1].copy() for each, tensor in new.items()}, old / "model.safetensors")
    cases = json.loads((directory / "expected.json").read_text())["cases"]
    ids = [types_pb2.TokenIds(ids=case["ids"]) for case in cases]
    with Group(str(old), CACHE, "--max-num-batched-tokens=256") as group:
        group.wait_ready()
        with Client(group.address) as client:
            client.update_weights(new, label="new")
        with grpc.insecure_channel(group.address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            inputs = [inference_pb2.EmbedInput(token_ids=one) for one in ids]
            for pooling in ("mean", "max"):
                wanted = types_pb2.Pooling.Value(f"POOLING_{pooling.upper()}")
                asked = inference_pb2.EmbedRequest(inputs=inputs, pooling=wanted)
                found = stub.Embed(asked, timeout=120).embeddings
                vectors = [np.frombuffer(one.values, "<f4") for one in found]
                np.testing.assert_allclose(vectors, [case[pooling] for case in cases], atol=1e-5)
            if cases[0]["logits"] is not None:
                given = [inference_pb2.ClassifyInput(token_ids=one) for one in ids]
                told = stub.Classify(inference_pb2.ClassifyRequest(inputs=given), timeout=120).results
                numbers = [list(one.logits) for one in told]
                np.testing.assert_allclose(numbers, [case["logits"] for case in cases], atol=1e-5)


@pytest.mark.ci
def test_a_leader_that_stops_lets_all_end_well_and_a_second_start_compiles_nothing() -> None:
    """A stream gets all of its tokens. The follower was not told to stop, and wants to be started again. The
    second time all of it goes over TLS, where the follower shows a certificate; and the follower stands still
    while the leader stops, which waits for it, because JAX would abort it otherwise.
    """
    tokens = []
    for start, (flags, credentials) in enumerate((((), None), (TLS, certificates("ca.pem", "client")))):
        with Group(str(GOLDEN / "qwen3"), CACHE, "--grace=60", *flags) as group:
            group.wait_ready()
            reading = Reading(group.address, PROMPTS[0], credentials=credentials)
            thread = reading.start()
            while not reading.tokens:
                thread.join(0.01)
            leader, follower = group.processes
            if start == 0:
                leader.send_signal(signal.SIGTERM)
                thread.join()
            else:
                thread.join()
                follower.send_signal(signal.SIGSTOP)
                leader.send_signal(signal.SIGTERM)
                time.sleep(3.0)
                follower.send_signal(signal.SIGCONT)
            assert reading.is_done
            assert group.wait_codes(60.0) == [0, 75], group.output(0) + group.output(1)
            tokens.append(reading.tokens)
            # The leader may have its programs from JAX's cache, where they stayed when our code changed.
            assert start == 0 or "loaded 9 compiled programs" in group.output(1)
            assert start == 0 or "compiled 1 of" not in group.output(1)
    assert tokens[0] == tokens[1]


@pytest.mark.ci
def test_a_process_with_other_options_is_refused_on_both_sides() -> None:
    own = ((), ("--max-logprobs=7",))
    with Group(str(GOLDEN / "qwen3"), CACHE, own=own) as group:
        assert group.wait_codes(120.0) == [1, 1]
        for number in range(2):
            assert "--max-logprobs is 7, and the leader's 20" in group.output(number)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("flags", "num_rounds"), [((), 16), (STAGES, 8)], ids=["parts", "stages"])
def test_no_loss_leaves_a_process_or_a_wrong_token(
    tmp_path: Path, flags: tuple[str, ...], num_rounds: int
) -> None:
    """Kills and stops at random moments, also of updates, of which `bench.probes.group_storm` tries more."""
    chance = random.Random(7)
    weights = [str(GOLDEN / "qwen3"), other_weights(str(GOLDEN / "qwen3"), tmp_path)]
    right = expected(weights, CACHE, *flags)
    rounds = [storm_round(weights, right, chance, 30.0, CACHE, *flags) for _ in range(num_rounds)]
    assert [each for each in rounds if each.problems] == []
