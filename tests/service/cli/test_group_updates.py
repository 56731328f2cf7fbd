"""Weight updates of a group of two processes: all of them get the new weights between the same two steps, or
none.

The group starts with other values in place of those of a golden. So the golden's tensors are new to it, and
what it makes of them must be PyTorch's tokens. When it gets the first values back, it must answer as in the
beginning.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from bench.probes.group_storm import STAGES, Group
from penstock.client import (
    Client,
    DeadlineExceeded,
    Draining,
    GroupEnded,
    PenstockClientError,
    TensorsRefused,
)
from penstock.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from tests.service.cli.test_group_processes import CACHE, ask
from tests.support.goldens import GOLDEN

pytestmark = pytest.mark.ci

NAME = "qwen3"
CASE = json.loads((GOLDEN / NAME / "expected.json").read_text())["cases"][0]
NEW: dict[str, NDArray[Any]] = load_file(GOLDEN / NAME / "model.safetensors")
OLD = {name: tensor[::-1].copy() for name, tensor in NEW.items()}
FIRST_HALF = sorted(NEW)[: len(NEW) // 2]


class Updated:
    """A group, and what its leader says."""

    def __init__(self, group: Group, folder: Path) -> None:
        self.group, self.folder = group, folder
        self.client = Client(group.address)
        self.channel = grpc.insecure_channel(group.address)
        self.before = self.tokens()

    def tokens(self) -> list[int]:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)
        return list(ask(stub, CASE).outputs[0].token_ids)

    def generation(self) -> int:
        stub: Any = control_pb2_grpc.ControlServiceStub(self.channel)
        info = stub.GetModelInfo(control_pb2.GetModelInfoRequest(), timeout=60)
        return int(info.weights.generation)


def write_models(folder: Path) -> Path:
    """Write the golden with other values, and as it is, once where followers may not read it."""
    for name, tensors in (("old", OLD), ("new", NEW), ("leader/new", NEW)):
        shutil.copytree(GOLDEN / NAME, folder / name)
        save_file(tensors, folder / name / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Updated]:
    folder = write_models(tmp_path_factory.mktemp("models"))
    own = [
        [f"--weights-root={root}" for root in roots] for roots in ([folder], [folder / "old", folder / "new"])
    ]
    with Group(str(folder / "old"), CACHE, own=own) as group:
        group.wait_ready()
        yield Updated(group, folder)


@pytest.mark.parametrize("source", ["sent", "files", "halves"])
@pytest.mark.parametrize("staging", ["host", "device", "in_place"])
def test_all_processes_get_the_new_weights(updated: Updated, source: str, staging: Any) -> None:
    check_updates(updated, source, staging)


def check_updates(updated: Updated, source: str, staging: Any) -> None:
    """Push the golden's tensors, and then the first ones again."""
    generation = updated.generation()
    for tensors, name, expected in ((NEW, "new", CASE["tokens"]), (OLD, "old", updated.before)):
        if source == "files":
            uri = (updated.folder / name).as_uri()
            updated.client.update_weights(uri=uri, label=name, staging=staging)
        elif source == "sent":
            updated.client.update_weights(tensors, label=name, staging=staging)
        else:
            first = {each: tensors[each] for each in FIRST_HALF}
            rest = {each: tensors[each] for each in tensors if each not in first}
            for half in (first, rest):
                updated.client.update_weights(half, label=name, staging=staging, partial=True)
        assert updated.tokens() == expected
    assert updated.generation() == generation + (4 if source == "halves" else 2)


@pytest.mark.sweep
def test_processes_with_a_stage_each_get_the_new_weights_in_every_way(tmp_path: Path) -> None:
    """Each gets the leaves of its stage. The head and the small parameters are leaves of both. A bad tensor
    of one stage leaves the old weights in both.
    """
    folder = write_models(tmp_path)
    with Group(str(folder / "old"), CACHE, *STAGES, f"--weights-root={folder}") as group:
        group.wait_ready()
        updated = Updated(group, folder)
        for staging in ("host", "device", "in_place"):
            for source in ("sent", "files", "halves"):
                check_updates(updated, source, staging)
        generation = updated.generation()
        with pytest.raises(TensorsRefused, match="NaN"):
            updated.client.update_weights(with_nan(), label="bad", refuse_non_finite=True)
        assert (updated.tokens(), updated.generation()) == (updated.before, generation)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("qwen3", ["--tensor-parallel-size=4"]),  # two devices of each process
        ("deepseek_v3", []),
        ("qwen3_moe", ["--expert-parallel"]),
        ("gpt_oss", []),
        ("qwen3_5", []),
        ("gemma4", [*STAGES]),
        ("gpt_oss", ["--pipeline-parallel-size=2"]),
    ],
)
def test_a_follower_that_gets_its_own_parts_gives_pytorch_s_tokens(
    tmp_path: Path, name: str, flags: list[str]
) -> None:
    cases = json.loads((GOLDEN / name / "expected.json").read_text())["cases"]
    new = load_file(GOLDEN / name / "model.safetensors")
    folder = tmp_path / "old"
    shutil.copytree(GOLDEN / name, folder)
    save_file({each: tensor[::-1].copy() for each, tensor in new.items()}, folder / "model.safetensors")
    with Group(str(folder), CACHE, *flags) as group, grpc.insecure_channel(group.address) as channel:
        group.wait_ready()
        with Client(group.address) as client:
            client.update_weights(new, label="new")
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        for case in cases:
            output = ask(stub, case).outputs[0]
            assert list(output.token_ids) == case["tokens"]
            np.testing.assert_allclose(output.logprobs.sampled, case["logprobs"], rtol=1e-4)


def with_nan() -> dict[str, NDArray[Any]]:
    """Return the golden's tensors, the last of which has a value that is none."""
    name = max(NEW)
    bad = NEW[name].copy()
    bad.reshape(-1)[-1] = np.nan
    return {**NEW, name: bad}


@pytest.mark.parametrize("staging", ["host", "device"])
def test_a_bad_tensor_leaves_the_old_weights_in_all(updated: Updated, staging: Any) -> None:
    generation = updated.generation()
    with pytest.raises(TensorsRefused, match="NaN"):
        updated.client.update_weights(with_nan(), label="bad", staging=staging, refuse_non_finite=True)
    assert (updated.tokens(), updated.generation()) == (updated.before, generation)


def test_what_one_process_cannot_read_none_takes(updated: Updated) -> None:
    """The leader finds the files, and the other process is not allowed to read them."""
    generation = updated.generation()
    uri = (updated.folder / "leader" / "new").as_uri()
    with pytest.raises(PenstockClientError, match=r"process 1 of the group: .*takes weights"):
        updated.client.update_weights(uri=uri, label="bad")
    assert (updated.tokens(), updated.generation()) == (updated.before, generation)


def test_weights_that_are_half_replaced_serve_again_after_an_update_of_all(updated: Updated) -> None:
    with pytest.raises(TensorsRefused, match="NaN"):
        updated.client.update_weights(with_nan(), label="bad", staging="in_place", refuse_non_finite=True)
    with pytest.raises(grpc.RpcError, match="replaced only some") as refused:
        updated.tokens()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    updated.client.update_weights(OLD, label="old")
    assert updated.tokens() == updated.before


def test_staged_weights_wait_in_all_processes(updated: Updated) -> None:
    """Another update may go live meanwhile, and what was staged may be discarded."""
    for then in ("discard", "commit"):
        staged = updated.client.update_weights(NEW, label="new", stage_only=True)
        assert updated.tokens() == updated.before
        if then == "discard":
            updated.client.discard_weights(staged.update_id)
        else:
            updated.client.commit_weights(staged.update_id)
    assert updated.tokens() == CASE["tokens"]
    updated.client.update_weights(OLD, label="old")
    assert updated.tokens() == updated.before


def test_an_update_that_its_caller_gives_up_while_a_process_stands_still_changes_nothing(
    updated: Updated,
) -> None:
    generation = updated.generation()
    other = updated.group.processes[1]
    other.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineExceeded):
            updated.client.update_weights(NEW, label="new", timeout=2.0)
    finally:
        other.send_signal(signal.SIGCONT)
    assert (updated.tokens(), updated.generation()) == (updated.before, generation)
    updated.client.update_weights(NEW, label="new")
    assert updated.tokens() == CASE["tokens"]
    updated.client.update_weights(OLD, label="old")


def test_a_process_that_is_lost_during_an_update_ends_the_group(updated: Updated) -> None:
    """The last test of the group: the other process stands still, so the update waits for it."""
    updated.group.processes[1].send_signal(signal.SIGSTOP)
    with pytest.raises((GroupEnded, Draining)):  # the server ends as soon as the group has
        updated.client.update_weights(NEW, label="new", timeout=120)
    assert "process 1 has said nothing for 15 s" in updated.group.output(0)
    assert updated.group.processes[0].wait(30.0) == 75
