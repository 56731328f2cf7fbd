"""/v1/batches as OpenAI's client uses it: every status, and what stops, goes on and is kept apart."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, get_args

import openai
import pytest
from openai.types import Batch

from penstock.openai.batches import runner, running, storing
from penstock.openai.batches.lines import URLS
from penstock.openai.batches.storing import UNFINISHED, Folder
from penstock.openai.schemas.batches import BatchBody
from penstock.runtime.adapters.interface import AdapterTensors
from tests.service.key_rig import key, write
from tests.service.openai.rig import front_rig, fronting
from tests.service.rig import WAIT_S, fake, serving, until
from tests.support.demo_server import ROOT


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOOK_S", 0.02)


def lines(*ids: str, **body: Any) -> bytes:
    asked = {"model": "fake", "prompt": "hi", "max_tokens": 2} | body
    return b"".join(
        json.dumps({"custom_id": one, "method": "POST", "url": "/v1/completions", "body": asked}).encode()
        + b"\n"
        for one in ids
    )


async def begun(client: openai.AsyncOpenAI, content: bytes, **more: Any) -> Batch:
    """Make a new batch of these lines."""
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    asked: Any = {"endpoint": "/v1/completions", "completion_window": "24h"} | more
    return await client.batches.create(input_file_id=file.id, **asked)


async def ended(client: openai.AsyncOpenAI, batch: Batch, *, until_is: str | None = None) -> Batch:
    """Return the batch once it has ended, or has come to a status."""
    async with asyncio.timeout(WAIT_S):
        while True:
            batch = await client.batches.retrieve(batch.id)
            if batch.status == until_is or (until_is is None and batch.status not in UNFINISHED):
                return batch
            await asyncio.sleep(0.02)


async def answers(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    told = [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]
    found = {one["custom_id"]: one for one in told}
    assert len(found) == len(told)
    return found


def counts(batch: Batch) -> tuple[int, int, int]:
    told = batch.request_counts
    assert told is not None
    return told.total, told.completed, told.failed


async def test_answers_and_errors_are_in_a_file_each_and_come_last(tmp_path: Path) -> None:
    engine = fake(scheduling_policy="priority")
    async with front_rig(engine, settings={"files": tmp_path}) as rig:
        content = lines("a", "b") + lines("bad", temperature=-1)
        made = await begun(
            rig.openai,
            content,
            metadata={"name": "night"},
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (made.object, made.status, made.completion_window) == ("batch", "validating", "24h")
        assert (made.metadata, made.output_file_id, made.errors) == ({"name": "night"}, None, None)
        assert made.expires_at == made.created_at + 24 * 3600
        done = await ended(rig.openai, made)
        assert (done.status, counts(done)) == ("completed", (3, 2, 1))
        assert made.created_at <= (done.in_progress_at or 0) <= (done.finalizing_at or 0)
        assert (done.finalizing_at or 0) <= (done.completed_at or 0)
        found = await answers(rig.openai, done.output_file_id)
        assert found.keys() == {"a", "b"}
        assert found["a"]["response"]["body"]["object"] == "text_completion"
        wrong = (await answers(rig.openai, done.error_file_id))["bad"]
        assert (wrong["response"]["status_code"], wrong["error"]) == (400, None)
        assert wrong["response"]["body"]["error"]["param"] == "temperature"
        output = await rig.openai.files.retrieve(str(done.output_file_id))
        assert (output.purpose, output.expires_at) == ("batch_output", output.created_at + 3600)
        assert {request.priority for request in engine.seen} == {1 - 2**31}
        assert [batch.id for batch in (await rig.openai.batches.list()).data] == [made.id]


async def test_a_line_may_name_an_adapter(tmp_path: Path) -> None:
    engine = fake(max_adapters=1)
    engine.adapters.load("sql", AdapterTensors({"r": 8}, ()))
    async with front_rig(engine, settings={"files": tmp_path}) as rig:
        done = await ended(rig.openai, await begun(rig.openai, lines("a", model="sql") + lines("b")))
        found = await answers(rig.openai, done.output_file_id)
        assert {one: found[one]["response"]["body"]["model"] for one in found} == {"a": "sql", "b": "fake"}


async def test_a_batch_without_errors_has_no_file_of_them(tmp_path: Path) -> None:
    async with front_rig(settings={"files": tmp_path}) as rig:
        done = await ended(rig.openai, await begun(rig.openai, lines("a")))
        assert (done.status, done.error_file_id) == ("completed", None)
        assert len((await rig.openai.files.list(purpose="batch_output")).data) == 1


@pytest.mark.parametrize(
    ("content", "line", "code", "param"),
    [
        (lines("a") + b"no json\n", 2, "invalid_json", None),
        (lines("a", "a"), 2, "duplicate_custom_id", "custom_id"),
        (lines("a", model="other"), 1, "model_mismatch", "body.model"),
        (lines("a").replace(b"/v1/completions", b"/v1/embeddings"), 1, "invalid_url", "url"),
        (b"\n", None, "empty_file", None),
        (lines("a", "b", "c"), 3, "too_many_lines", None),
    ],
)
async def test_a_batch_with_wrong_lines_fails_and_names_them(
    content: bytes,
    line: int | None,
    code: str,
    param: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "MOST_LINES", 2)
    async with front_rig(settings={"files": tmp_path}) as rig:
        done = await ended(rig.openai, await begun(rig.openai, content))
        assert not rig.engine.seen
    assert (done.status, done.output_file_id, done.in_progress_at) == ("failed", None, None)
    assert done.failed_at
    assert done.errors is not None
    assert done.errors.data is not None
    (error,) = done.errors.data
    assert (error.line, error.code, error.param) == (line, code, param)


async def test_a_batch_that_is_cancelled_keeps_its_answers_and_frees_its_requests(tmp_path: Path) -> None:
    engine = fake(hold=True, max_num_seqs=1)
    async with front_rig(engine, settings={"files": tmp_path, "batch_concurrency": 2}) as rig:
        made = await begun(rig.openai, lines("a", "b", "c"))
        await until(lambda: len(engine.seen) >= 2)
        file = str(made.input_file_id)
        with pytest.raises(openai.ConflictError):
            await rig.openai.files.delete(file)
        engine.step(2)  # the first line
        await until(lambda: len(engine.seen) == 3)
        assert (await rig.openai.batches.cancel(made.id)).status == "cancelling"
        done = await ended(rig.openai, made)
        assert (done.status, counts(done)) == ("cancelled", (3, 1, 0))
        assert done.cancelling_at
        assert done.cancelled_at
        assert len(await answers(rig.openai, done.output_file_id)) == 1
        assert len(engine.cancelled) == 2
        assert (await rig.openai.batches.cancel(made.id)).status == "cancelled"
        await rig.openai.files.delete(file)
        engine.release()
        finished = await ended(rig.openai, await begun(rig.openai, lines("a")))
        with pytest.raises(openai.ConflictError):
            await rig.openai.batches.cancel(finished.id)


async def test_lines_that_did_not_run_in_time_are_told_as_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake(hold=True, max_num_seqs=1)
    async with front_rig(engine, settings={"files": tmp_path, "batch_concurrency": 1}) as rig:
        made = await begun(rig.openai, lines("a", "b", "c"))
        await until(lambda: len(engine.seen) == 1)
        engine.step(2)  # the first line
        await until(lambda: len(engine.seen) == 2)
        monkeypatch.setattr(storing.Folder, "now", lambda self: int(time.time()) + storing.WINDOW_S)
        done = await ended(rig.openai, made)
        assert (done.status, counts(done)) == ("expired", (3, 1, 2))
        assert (await answers(rig.openai, done.output_file_id)).keys() == {"a"}
        found = await answers(rig.openai, done.error_file_id)
    assert {name: (one["response"], one["error"]["code"]) for name, one in found.items()} == {
        "b": (None, "batch_expired"),
        "c": (None, "batch_expired"),
    }


async def test_answers_for_which_there_is_no_room_end_the_batch(tmp_path: Path) -> None:
    async with front_rig(settings={"files": tmp_path, "files_max_bytes": 1 << 20}) as rig:
        await rig.openai.files.create(file=("a", b"x" * 940_000), purpose="batch")
        done = await ended(rig.openai, await begun(rig.openai, lines(*map(str, range(100)))))
        assert done.status == "failed"
        assert done.errors is not None
        assert [error.code for error in done.errors.data or ()] == ["files_full"]
        kept = await answers(rig.openai, done.output_file_id)
        assert 0 < len(kept) < 100
        size = sum(path.stat().st_size for path in (tmp_path / "contents").iterdir())
        assert size <= 1 << 20


async def test_a_full_disk_ends_the_batch_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, room = os.write, 1000

    def limited(descriptor: int, data: Any) -> int:
        nonlocal room
        if b"batch_req" not in bytes(data) and room:
            return write(descriptor, data)
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[:room])
        room -= written
        return written

    async with front_rig(settings={"files": tmp_path, "batch_concurrency": 1}) as rig:
        monkeypatch.setattr(os, "write", limited)
        done = await ended(rig.openai, await begun(rig.openai, lines(*map(str, range(9)))))
        assert done.status == "failed"
        assert done.errors is not None
        assert [error.code for error in done.errors.data or ()] == ["files_failed"]
        monkeypatch.undo()
        kept = await answers(rig.openai, done.output_file_id)
        assert 0 < len(kept) == counts(done)[1] < 9


async def test_a_batch_goes_on_when_the_front_starts_again(tmp_path: Path) -> None:
    engine = fake(hold=True, max_num_seqs=1)
    async with serving(engine) as grpc:

        def front() -> Any:
            return fronting(grpc.server.address, files=tmp_path, batch_concurrency=2)

        async with front() as (_, _, url), client_of(url) as client:
            made = await begun(client, lines(*map(str, range(6))))
            await until(lambda: len(engine.seen) >= 2)
            engine.step(2)
            await until(lambda: len(engine.seen) == 3)
        (output,) = [path for path in (tmp_path / "contents").iterdir() if b"batch_req" in path.read_bytes()]
        with output.open("ab") as file:
            file.write(b'{"custom_id": "9')  # as a kill in the middle of a line leaves it
        engine.release()
        async with front() as (_, _, url), client_of(url) as client:
            folder = Folder(tmp_path, 1 << 30, 1.0)
            # Nobody asks for it: a batch without a key needs nobody.
            await until(lambda: not folder.unfinished())
            folder.close()
            done = await ended(client, made)
            assert (done.status, counts(done)) == ("completed", (6, 6, 0))
            assert len(await answers(client, done.output_file_id)) == 6
    assert len(engine.seen) == 3 + 5


def client_of(url: str, key: str = "") -> openai.AsyncOpenAI:
    """OpenAI's client with this key; without one it sends none, of which it has to be talked out."""

    async def drop(request: Any) -> None:
        del request.headers["authorization"]

    http = None if key else openai.DefaultAsyncHttpxClient(event_hooks={"request": [drop]})
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0, http_client=http)


async def test_after_a_restart_a_batch_waits_for_its_callers_key(tmp_path: Path) -> None:
    keys, folder = write(tmp_path / "keys.json", [key("one"), key("two")]), tmp_path / "files"
    engine = fake(hold=True)
    async with serving(engine, keys=keys) as grpc:
        async with fronting(grpc.server.address, files=folder) as (_, _, url):
            async with client_of(url, "psk_one") as client:
                made = await begun(client, lines("a"))
                await until(lambda: len(engine.seen) == 1)
            async with client_of(url, "psk_two") as other:
                for ask in (other.batches.retrieve, other.batches.cancel):
                    with pytest.raises(openai.NotFoundError):
                        await ask(made.id)
                with pytest.raises(openai.BadRequestError) as refused:
                    await other.batches.create(
                        input_file_id=made.input_file_id, endpoint="/v1/completions", completion_window="24h"
                    )
                assert refused.value.param == "input_file_id"
        engine.release()
        async with fronting(grpc.server.address, files=folder) as (_, _, url):
            async with client_of(url, "psk_two") as other:
                await other.batches.list()
                await asyncio.sleep(0.2)  # many looks at the folder
                assert len(engine.seen) == 1
            async with client_of(url, "psk_one") as client:
                assert (await ended(client, made)).status == "completed"
    assert len(engine.seen) == 2
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert b"psk_one" not in path.read_bytes()


async def test_a_revoked_key_fails_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = write(tmp_path / "keys.json", [key("one")])
    async with front_rig(settings={"files": tmp_path / "files"}, key="psk_one", keys=keys) as rig:
        monkeypatch.setattr(
            runner.BatchRunner,
            "remember",
            lambda self, caller, key: self._keys.update({caller: "Bearer psk_no"}),
        )
        made = await begun(rig.openai, lines("a"))
        done = await ended(rig.openai, made)
    assert done.status == "failed"
    assert done.errors is not None
    assert [error.code for error in done.errors.data or ()] == ["invalid_api_key"]


@pytest.mark.parametrize("why", ["invalid_api_key", "internal"])
async def test_a_batch_that_cannot_go_on_keeps_its_answers(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, folder = write(tmp_path / "keys.json", [key("one")]), tmp_path / "files"
    engine = fake(hold=True, max_num_seqs=1)
    async with serving(engine, keys=keys) as grpc:
        async with (
            fronting(grpc.server.address, files=folder, batch_concurrency=1) as (_, _, url),
            client_of(url, "psk_one") as client,
        ):
            made = await begun(client, lines("a", "b"))
            await until(lambda: len(engine.seen) == 1)
            engine.step(2)  # the first line
            await until(lambda: len(engine.seen) == 2)
        for path in (folder / "contents").iterdir():
            if b"batch_req" in path.read_bytes():
                with path.open("ab") as file:
                    file.write(b'{"custom_id": "b')  # as a kill in the middle of a line leaves it
        if why == "internal":
            monkeypatch.setattr(runner, "take_in", lambda *_: 1 / 0)
        else:
            remember = runner.BatchRunner.remember
            monkeypatch.setattr(
                runner.BatchRunner,
                "remember",
                lambda self, caller, _: remember(self, caller, "Bearer psk_no"),
            )
        async with (
            fronting(grpc.server.address, files=folder) as (_, _, url),
            client_of(url, "psk_one") as client,
        ):
            done = await ended(client, made)
            assert (done.status, counts(done), done.error_file_id) == ("failed", (2, 1, 0), None)
            assert done.errors is not None
            assert [error.code for error in done.errors.data or ()] == [why]
            assert (await answers(client, done.output_file_id)).keys() == {"a"}


async def test_a_key_that_ends_while_its_batch_runs_ends_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, call, called = write(tmp_path / "keys.json", [key("one")]), running.call, 0

    async def ending(app: Any, method: str, path: str, body: bytes, key: str) -> running.Reply:
        nonlocal called
        called += 1
        return await call(app, method, path, body, key if called <= 2 else "Bearer psk_no")

    monkeypatch.setattr(running, "call", ending)
    settings = {"files": tmp_path / "files", "batch_concurrency": 1}
    async with front_rig(settings=settings, key="psk_one", keys=keys) as rig:
        done = await ended(rig.openai, await begun(rig.openai, lines(*map(str, range(9)))))
        assert (done.status, counts(done), done.error_file_id) == ("failed", (9, 2, 0), None)
        assert done.errors is not None
        assert [error.code for error in done.errors.data or ()] == ["invalid_api_key"]
        assert (await answers(rig.openai, done.output_file_id)).keys() == {"0", "1"}
    assert called == 3


async def test_a_front_that_stops_refuses_requests_while_its_batches_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, stop, is_told = fake(hold=True), runner.BatchRunner.stop, []
    async with front_rig(engine, settings={"files": tmp_path}) as rig:

        async def noting(self: runner.BatchRunner) -> None:
            is_told.append((await rig.http.get("/health")).status_code)
            await stop(self)

        await begun(rig.openai, lines("a", "b", "c"))
        await until(lambda: len(engine.seen) == 3)
        monkeypatch.setattr(runner.BatchRunner, "stop", noting)
        async with asyncio.timeout(WAIT_S):
            await rig.server.stop(grace_s=1.0)  # the lines, which are held, are ended with the batch
        monkeypatch.undo()
    assert is_told == [503]


async def test_of_two_workers_one_runs_a_batch_and_the_other_takes_it_when_that_one_ends(
    tmp_path: Path,
) -> None:
    engine = fake(hold=True, max_num_seqs=64)
    async with (
        serving(engine) as grpc,
        fronting(grpc.server.address, files=tmp_path) as (_, _, other_url),
        client_of(other_url) as other,
    ):
        async with (
            fronting(grpc.server.address, files=tmp_path) as (_, _, url),
            client_of(url) as client,
        ):
            made = await begun(client, lines(*map(str, range(8))))
            await until(lambda: len(engine.seen) >= 8)
            await asyncio.sleep(0.2)  # many looks at the folder, of both
            assert len(engine.seen) == 8
            assert (await ended(other, made, until_is="in_progress")).status == "in_progress"
            holder = client
            assert holder is client
        engine.release()
        done = await ended(other, made)
        assert (done.status, counts(done)) == ("completed", (8, 8, 0))
        assert len(await answers(other, done.output_file_id)) == 8


@pytest.mark.ci
async def test_a_front_that_was_killed_goes_on_with_two_workers(tmp_path: Path) -> None:
    engine = fake(hold=True, max_num_seqs=2)
    async with serving(engine) as grpc:

        async def front(workers: int) -> tuple[asyncio.subprocess.Process, str]:
            flags = ["--addr", grpc.server.address, "--port", "0", "--files", str(tmp_path)]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.cli", "openai", *flags, "--workers", str(workers)),
                cwd=ROOT,
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            return process, (await process.stdout.readline()).decode().split()[-1]

        async with asyncio.timeout(3 * WAIT_S):
            process, url = await front(1)
            async with client_of(url) as client:
                made = await begun(client, lines(*map(str, range(20))))
                await until(lambda: len(engine.seen) == 20)
                while not any(
                    b"batch_req" in path.read_bytes() for path in (tmp_path / "contents").iterdir()
                ):
                    engine.step()
                    await asyncio.sleep(0.02)
            process.kill()
            await process.communicate()
            engine.release()
            process, url = await front(2)
            async with client_of(url) as client:
                done = await ended(client, made)
                assert (done.status, counts(done)) == ("completed", (20, 20, 0))
                assert len(await answers(client, done.output_file_id)) == 20
            process.terminate()
            await process.communicate()
            assert process.returncode == 0


def test_two_claims_exclude_each_other(tmp_path: Path) -> None:
    one, two = (Folder(tmp_path, 1 << 30, 1.0) for _ in range(2))
    held = one.claim("batch_1")
    assert held is not None
    assert two.claim("batch_1") is None
    held.close()
    other = two.claim("batch_1")
    assert other is not None
    other.close()
    for folder in (one, two):
        folder.close()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-x"}, "input_file_id"),
        ({"metadata": {"x": "y" * 513}}, "metadata.x"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"extra": 1}, "extra"),
    ],
)
async def test_wrong_batches_are_refused(fields: dict[str, Any], param: str, tmp_path: Path) -> None:
    async with front_rig(settings={"files": tmp_path}) as rig:
        file = await rig.openai.files.create(file=("a", lines("a")), purpose="batch")
        asked = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
        reply = await rig.http.post("/v1/batches", json=asked | fields, headers=KEY)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


KEY = {"authorization": "Bearer unused"}
"""What OpenAI's client of a rig sends."""


async def test_the_batches_of_a_caller_that_have_not_ended_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "MOST_UNFINISHED", 2)
    keys = write(tmp_path / "keys.json", [key("one"), key("two")])
    engine = fake(hold=True)
    async with front_rig(engine, settings={"files": tmp_path / "f"}, key="psk_one", keys=keys) as rig:
        made = [await begun(rig.openai, lines("a")) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as refused:
            await begun(rig.openai, lines("a"))
        assert refused.value.code == "too_many_batches"
        assert refused.value.response.headers["x-should-retry"] == "false"
        await begun(rig.openai.with_options(api_key="psk_two"), lines("a"))
        await rig.openai.batches.cancel(made[0].id)
        await ended(rig.openai, made[0])
        await begun(rig.openai, lines("a"))


async def test_lists_of_batches_have_pages(tmp_path: Path) -> None:
    async with front_rig(settings={"files": tmp_path}) as rig:
        file = await rig.openai.files.create(file=("a", lines("a")), purpose="batch")
        made = [
            await rig.openai.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            for _ in range(3)
        ]
        found = [batch.id async for batch in rig.openai.batches.list(limit=2)]
        assert found == [batch.id for batch in made][::-1]


def test_statuses_and_endpoints_are_those_of_openais_client_and_of_lines() -> None:
    assert set(get_args(storing.Status)) == set(get_args(Batch.model_fields["status"].annotation))
    assert set(get_args(BatchBody.model_fields["endpoint"].annotation)) == set(URLS)
