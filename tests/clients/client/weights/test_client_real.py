"""Both clients and the command line push weights into the real engine, of a golden checkpoint.

The witness is a fresh server that has loaded the new weights from a file: it must answer with the same tokens
and the same log-probabilities.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from penstock import client as api
from penstock.cli.__main__ import main
from penstock.client import AsyncClient, Client, UpdateOutcome, weights_digest
from penstock.client.weights import update
from penstock.runtime.engine import Engine
from tests.service.rig import Kept, serving
from tests.support.goldens import CONFIG, GOLDEN

pytestmark = pytest.mark.ci

Arrays = dict[str, NDArray[Any]]
Answer = tuple[tuple[int, ...], tuple[float, ...]]

CHECKPOINT = GOLDEN / "qwen3"
OLD: Arrays = dict(load_file(CHECKPOINT / "model.safetensors"))


def turned(arrays: Arrays, places: int) -> Arrays:
    """Other weights: the values of each tensor in another order."""
    return {name: np.roll(value.ravel(), places).reshape(value.shape) for name, value in arrays.items()}


NEW = turned(OLD, 7)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory that servers may read, with a checkpoint of the new weights in `new`."""
    folder = tmp_path_factory.mktemp("roots")
    shutil.copytree(CHECKPOINT, folder / "new")
    save_file(NEW, folder / "new" / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def engine() -> Iterator[Kept]:
    loaded = Engine.from_pretrained(str(CHECKPOINT), CONFIG)
    loaded.start()
    yield Kept(loaded)
    loaded.shutdown()


def answer_of(client: Client) -> Answer:
    output = client.generate(
        "def decode(self, text):",
        temperature=0,
        max_tokens=24,
        ignore_eos=True,
        logprobs=0,
        return_token_ids=True,
        bypass_prefix_cache=True,
        timeout=60,
    )
    assert output.logprobs is not None
    return output.token_ids, output.logprobs.sampled


@pytest.fixture(scope="module")
def new_answer(roots: Path) -> Answer:
    """Return what a fresh server on the new weights answers."""

    async def ask() -> Answer:
        async with serving(Engine.from_pretrained(str(roots / "new"), CONFIG)) as rig:
            return await asyncio.to_thread(ask_at, rig.server.address)

    return asyncio.run(ask())


def ask_at(addr: str) -> Answer:
    with Client(addr) as client:
        return answer_of(client)


@pytest.fixture
async def addr(engine: Kept, roots: Path) -> AsyncIterator[str]:
    """Yield the address of a server on the old weights."""
    async with serving(engine, weights_roots=(roots,)) as rig:
        yield rig.server.address
        await asyncio.to_thread(restore, rig.server.address)


def restore(addr: str) -> None:
    with Client(addr) as client:
        client.resume()
        client.discard_weights(client.model_info().staged_update_id or "none")
        client.update_weights(OLD, label="old")


async def test_arrays_become_what_a_fresh_server_has(addr: str, new_answer: Answer) -> None:
    def push() -> None:
        with Client(addr) as client:
            before, old = client.model_info(), answer_of(client)
            found = client.update_weights(NEW, label="step-1", expected_generation=before.weights)
            assert old != answer_of(client) == new_answer
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


async def test_the_asyncio_client_with_arrays_of_jax(addr: str, new_answer: Answer) -> None:
    arrays = {name: jnp.asarray(value) for name, value in NEW.items()}
    async with AsyncClient(addr) as client:
        found = await client.update_weights(arrays, label="step-1", policy="keep", staging="device")
    assert found.digest == weights_digest(NEW)
    assert await asyncio.to_thread(ask_at, addr) == new_answer


@pytest.mark.parametrize("kind", ["file", "directory", "uri"])
async def test_files(addr: str, roots: Path, new_answer: Answer, kind: str) -> None:
    folder = roots / "new"
    async with AsyncClient(addr) as client:
        if kind == "uri":
            found = await client.update_weights(uri=folder.as_uri(), label="l", staging="in_place")
        else:
            source = folder / "model.safetensors" if kind == "file" else folder
            found = await client.update_weights(source, label="l")
    assert found.digest == weights_digest(folder)
    assert await asyncio.to_thread(ask_at, addr) == new_answer


async def test_a_part_of_the_weights(addr: str, new_answer: Answer) -> None:
    names = list(NEW)
    async with AsyncClient(addr) as client:
        for part in (names[::2], names[1::2]):
            await client.update_weights({n: NEW[n] for n in part}, label="l", partial=True)
    assert await asyncio.to_thread(ask_at, addr) == new_answer


async def test_bad_tensors_are_told_as_the_model_has_them(addr: str) -> None:
    name, value = next(iter(NEW.items()))
    others = {n: v for n, v in NEW.items() if n != name}
    async with AsyncClient(addr) as client:
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


async def test_weights_that_change_while_they_are_sent_are_refused(
    addr: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a trainer goes on with its next step in the same memory."""
    monkeypatch.setattr(update, "_MOST_LISTED_BYTES", 1)  # or one message would bring all of these few bytes
    moving = {name: value.copy() for name, value in NEW.items()}
    old = await asyncio.to_thread(ask_at, addr)

    def disturb(sent: int, total: int) -> None:
        for value in moving.values():
            value.fill(0.0)

    def push() -> api.TensorsRefused:
        with Client(addr) as client, pytest.raises(api.TensorsRefused) as caught:
            client.update_weights(moving, label="l", progress=disturb)
        return caught.value

    refused = await asyncio.to_thread(push)
    assert {problem.reason for problem in refused.tensors} == {api.TensorReason.CHECKSUM}
    assert await asyncio.to_thread(ask_at, addr) == old


async def test_an_id_is_applied_once(addr: str, new_answer: Answer) -> None:
    async with AsyncClient(addr) as client:
        first = await client.update_weights(NEW, label="l", update_id="once")
        again = await client.update_weights(turned(OLD, 3), label="other", update_id="once")
    assert again.outcome is UpdateOutcome.ALREADY_COMMITTED
    assert again.current == first.current
    assert await asyncio.to_thread(ask_at, addr) == new_answer


async def test_another_generation_is_a_conflict(addr: str) -> None:
    async with AsyncClient(addr) as client:
        with pytest.raises(api.GenerationChanged):
            await client.update_weights(NEW, label="l", expected_generation=10_000)


async def test_staged_weights_wait(addr: str, new_answer: Answer) -> None:
    old = await asyncio.to_thread(ask_at, addr)
    async with AsyncClient(addr) as client:
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
        assert await asyncio.to_thread(ask_at, addr) == old
        found = await client.commit_weights(staged.update_id)
        assert (found.outcome, found.digest) == (UpdateOutcome.COMMITTED, weights_digest(NEW))
        again = await client.commit_weights(staged.update_id)
        assert (again.outcome, again.current) == (UpdateOutcome.ALREADY_COMMITTED, found.current)
    assert await asyncio.to_thread(ask_at, addr) == new_answer


async def test_old_weights_can_be_refused(addr: str) -> None:
    async with AsyncClient(addr) as client:
        wanted = (await client.model_info()).weights.generation + 1
        with pytest.raises(api.WeightsTooOld):
            await client.generate("p", max_tokens=1, min_weights=wanted)
        found = await client.update_weights(NEW, label="l")
        answer = await client.generate("p", max_tokens=1, min_weights=found.current)
        assert answer.weights[0].version == found.current


async def test_a_pause_stops_tokens_until_resume(addr: str) -> None:
    async with AsyncClient(addr) as client:
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


async def test_the_command_line(
    addr: str, roots: Path, new_answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*argv: str) -> str:
        assert main([*argv, "--addr", addr]) == 0
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
    assert await asyncio.to_thread(ask_at, addr) == new_answer
