"""Both clients and the command line push weights into the real updater, beside a fake engine. The tensors
that serve afterwards are those that were sent, bit for bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from penstock import client as api
from penstock.cli.__main__ import main
from penstock.client import AsyncClient, Client, UpdateOutcome, weights_digest
from penstock.client.weights import update
from tests.service.fake import TENSORS
from tests.service.rig import Rig, serving
from tests.service.updatable import updatable

pytestmark = pytest.mark.ci

Arrays = dict[str, NDArray[Any]]
DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}


def drawn(seed: int) -> Arrays:
    """Make weights for the fake engine."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=sent.shape).astype(DTYPES[sent.dtype]) for name, sent in TENSORS.items()}


NEW = drawn(7)


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    """Make a directory that servers may read, with a checkpoint of the new weights in `new`."""
    (tmp_path / "new").mkdir()
    save_file(NEW, tmp_path / "new" / "model.safetensors")
    return tmp_path


@pytest.fixture
async def rig(roots: Path) -> AsyncIterator[Rig]:
    async with serving(updatable(), weights_roots=(roots,)) as served:
        yield served


def serves(rig: Rig, arrays: Arrays) -> bool:
    """Say whether the engine has these weights."""
    found: dict[str, bytes] = rig.engine.updater.serving
    return found == {name: value.tobytes() for name, value in arrays.items()}


async def test_arrays_become_what_serves(rig: Rig) -> None:
    def push() -> None:
        with Client(rig.server.address) as client:
            before = client.model_info()
            found = client.update_weights(NEW, label="step-1", expected_generation=before.weights)
            assert serves(rig, NEW)
            assert (found.outcome, found.previous) == (UpdateOutcome.COMMITTED, before.weights)
            assert found.current == api.WeightsVersion("step-1", before.weights.generation + 1)
            assert found.tensors_updated == len(NEW)
            assert found.bytes_received == sum(value.nbytes for value in NEW.values())
            assert found.digest == weights_digest(NEW)
            after = client.model_info()
            assert (after.weights, after.weights_digest) == (found.current, found.digest)
            assert before.weights_since is not None
            assert after.weights_since is not None
            assert after.weights_since > before.weights_since

    await asyncio.to_thread(push)


async def test_the_asyncio_client_with_arrays_of_jax(rig: Rig) -> None:
    arrays = {name: jnp.asarray(value) for name, value in NEW.items()}
    async with AsyncClient(rig.server.address) as client:
        found = await client.update_weights(arrays, label="step-1", policy="keep", staging="device")
    assert found.digest == weights_digest(NEW)
    assert serves(rig, NEW)


@pytest.mark.parametrize("kind", ["file", "directory", "uri"])
async def test_files(rig: Rig, roots: Path, kind: str) -> None:
    folder = roots / "new"
    async with AsyncClient(rig.server.address) as client:
        if kind == "uri":
            found = await client.update_weights(uri=folder.as_uri(), label="l", staging="in_place")
        else:
            source = folder / "model.safetensors" if kind == "file" else folder
            found = await client.update_weights(source, label="l")
    assert found.digest == weights_digest(folder)
    assert serves(rig, NEW)


async def test_a_part_of_the_weights(rig: Rig) -> None:
    names = list(NEW)
    async with AsyncClient(rig.server.address) as client:
        for part in (names[::2], names[1::2]):
            await client.update_weights({n: NEW[n] for n in part}, label="l", partial=True)
    assert serves(rig, NEW)


async def test_bad_tensors_are_told_as_the_model_has_them(rig: Rig) -> None:
    name, value = next(iter(NEW.items()))
    others = {n: v for n, v in NEW.items() if n != name}
    async with AsyncClient(rig.server.address) as client:
        for arrays, reason in (
            (others, api.TensorReason.MISSING),
            ({**NEW, "new": value}, api.TensorReason.UNKNOWN_NAME),
            ({**others, name: value.ravel()[:-1]}, api.TensorReason.SHAPE),
            ({**others, name: value.astype(np.int8)}, api.TensorReason.DTYPE),
        ):
            with pytest.raises(api.TensorsRefused) as caught:
                await client.update_weights(arrays, label="l", validate_only=True)
            assert [problem.reason for problem in caught.value.tensors] == [reason]
        with pytest.raises(api.TensorsRefused) as caught:
            await client.update_weights(
                {**others, name: np.full_like(value, np.nan)}, label="l", refuse_non_finite=True
            )
        assert [p.reason for p in caught.value.tensors] == [api.TensorReason.NON_FINITE]
        assert (await client.update_weights(NEW, label="l", validate_only=True)).digest == b""


async def test_weights_that_change_while_they_are_sent_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a trainer goes on with its next step in the same memory. Chunks have at most 200 bytes, and a
    message one chunk, so that some are read after the first was sent.
    """
    monkeypatch.setattr(update, "_MOST_LISTED_BYTES", 1)
    moving = {name: value.copy() for name, value in NEW.items()}

    def disturb(sent: int, total: int) -> None:
        for value in moving.values():
            value.fill(0.0)

    def push(rig: Rig) -> api.TensorsRefused:
        with Client(rig.server.address) as client, pytest.raises(api.TensorsRefused) as caught:
            client.update_weights(moving, label="l", progress=disturb)
        return caught.value

    async with serving(updatable(), max_receive_bytes=264) as rig:
        old = rig.engine.updater.serving
        refused = await asyncio.to_thread(push, rig)
        assert {problem.reason for problem in refused.tensors} == {api.TensorReason.CHECKSUM}
        assert rig.engine.updater.serving == old


async def test_an_id_is_applied_once(rig: Rig) -> None:
    async with AsyncClient(rig.server.address) as client:
        first = await client.update_weights(NEW, label="l", update_id="once")
        again = await client.update_weights(drawn(3), label="other", update_id="once")
    assert again.outcome is UpdateOutcome.ALREADY_COMMITTED
    assert again.current == first.current
    assert serves(rig, NEW)


async def test_another_generation_is_a_conflict(rig: Rig) -> None:
    async with AsyncClient(rig.server.address) as client:
        with pytest.raises(api.GenerationChanged):
            await client.update_weights(NEW, label="l", expected_generation=10_000)


async def test_staged_weights_wait(rig: Rig) -> None:
    old = rig.engine.updater.serving
    async with AsyncClient(rig.server.address) as client:
        with pytest.raises(api.UnknownUpdate):
            await client.commit_weights("never-staged")
        assert await client.discard_weights("never-staged") is False
        staged = await client.update_weights(NEW, label="l", stage_only=True)
        assert staged.outcome is UpdateOutcome.STAGED
        assert (await client.model_info()).staged_update_id == staged.update_id
        with pytest.raises(api.UpdateUnderWay):
            await client.update_weights(NEW, label="l")
        assert await client.discard_weights(staged.update_id) is True
        staged = await client.update_weights(NEW, label="l", stage_only=True)
        assert rig.engine.updater.serving == old
        found = await client.commit_weights(staged.update_id)
        assert (found.outcome, found.digest) == (UpdateOutcome.COMMITTED, weights_digest(NEW))
        again = await client.commit_weights(staged.update_id)
        assert (again.outcome, again.current) == (UpdateOutcome.ALREADY_COMMITTED, found.current)
    assert serves(rig, NEW)


async def test_old_weights_can_be_refused(rig: Rig) -> None:
    async with AsyncClient(rig.server.address) as client:
        wanted = (await client.model_info()).weights.generation + 1
        with pytest.raises(api.WeightsTooOld):
            await client.generate("p", max_tokens=1, min_weights=wanted)
        found = await client.update_weights(NEW, label="l")
        answer = await client.generate("p", max_tokens=1, min_weights=found.current)
        assert answer.weights[0].version == found.current


async def test_a_pause_stops_tokens_until_resume(rig: Rig) -> None:
    async with AsyncClient(rig.server.address) as client:
        await client.pause(free_kv_cache=True)
        assert (await client.load()).paused
        stream = client.stream("p", max_tokens=2, ignore_eos=True)
        started = await anext(stream)
        assert isinstance(started, api.Started)
        assert started.paused
        with pytest.raises(api.DeadlineExceeded):
            await client.generate("p", max_tokens=1, timeout=0.5)
        await client.resume()
        assert len((await asyncio.wait_for(stream.result(), 60)).token_ids) == 2
        assert not (await client.load()).paused


async def test_the_command_line(rig: Rig, roots: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*argv: str) -> str:
        assert main([*argv, "--addr", rig.server.address]) == 0
        return capsys.readouterr().out

    def push() -> None:
        source = str(roots / "new")
        assert "would take these weights" in run("push-weights", source, "--label", "x", "--validate-only")
        run("push-weights", source, "--label", "step-7", "--stage-only", "--update-id", "staged-7")
        assert "staged-7" in run("info")
        assert run("commit-weights", "staged-7").startswith("step-7 (generation ")
        shown = run("info")
        assert weights_digest(roots / "new").hex() in shown
        assert "step-7 (generation" in shown
        run("pause", "--policy", "abort")
        assert "paused" in run("info")
        run("resume")
        assert "paused" not in run("info")

    await asyncio.to_thread(push)
    assert serves(rig, NEW)
