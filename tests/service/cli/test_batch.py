"""`penstock batch`: what it writes, what it refuses, and how it goes on after it was stopped."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.openai.batches import running
from penstock.server_cli.commands import batch
from tests.service.key_rig import key, serving_keys
from tests.service.rig import WAIT_S, Rig, fake, serving, until
from tests.support.demo_server import ROOT

LOWEST = 1 - 2**31
"""The lowest priority of the contract whose negative is a priority of vLLM's."""


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    prompt = {"prompt": "hi", "max_tokens": 2} if url == "/v1/completions" else {}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": "fake"} | prompt | body,
    }


class Files:
    """The input and the output of runs."""

    def __init__(self, folder: Path) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def write(self, *lines: Any) -> None:
        self.input.write_text(
            "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines)
        )

    def answers(self) -> dict[str, Any]:
        """Return the lines of the output by their custom_ids, of which there is one each."""
        lines = [json.loads(data) for data in self.output.read_text().splitlines()]
        found = {one["custom_id"]: one for one in lines}
        assert len(found) == len(lines)
        return found

    async def run(self, rig: Rig, *flags: str) -> int:
        parser = argparse.ArgumentParser()
        batch.add_parser(parser.add_subparsers())
        arguments = ["batch", str(self.input), str(self.output), "--addr", rig.server.address, *flags]
        return await batch.run_async(parser.parse_args(arguments))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def test_lines_have_the_answers_of_their_endpoints_and_come_last(files: Files) -> None:
    ask = [{"role": "user", "content": "hi"}]
    files.write(
        line("chat", "/v1/chat/completions", messages=ask, max_tokens=2),
        line("text", priority=-3),
        "",
        line("response", "/v1/responses", input="hi", max_output_tokens=2),
        line("vector", "/v1/embeddings", input=[1, 2], priority=None),
    )
    async with serving(fake(scheduling_policy="priority")) as rig:
        assert await files.run(rig) == 0
        seen = {request.request_id.split("-")[0]: request.priority for request in rig.engine.seen}
    found = files.answers()
    assert {name: one["response"]["body"]["object"] for name, one in found.items()} == {
        "chat": "chat.completion",
        "text": "text_completion",
        "response": "response",
        "vector": "list",
    }
    for one in found.values():
        assert one.keys() == {"id", "custom_id", "response", "error"}
        assert one["id"].startswith("batch_req_")
        assert one["error"] is None
        assert one["response"]["status_code"] == 200
        assert one["response"]["request_id"].startswith("req-")
    assert sorted(seen.values()) == [LOWEST, LOWEST, LOWEST, 3]


async def test_without_priorities_it_says_so_and_sends_none(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(line("a"))
    async with serving(fake()) as rig:
        assert await files.run(rig) == 0
        assert rig.engine.seen[0].priority == 0
    said = capsys.readouterr()
    assert "does not schedule by priority" in said.err
    assert said.out.startswith("1 lines: 1 answered, 0 failed; ")


async def test_the_error_of_a_line_is_its_answer(files: Files) -> None:
    files.write(line("bad", temperature=-1), line("good"))
    async with serving(fake()) as rig:
        assert await files.run(rig) == 1
    found = files.answers()
    assert found["good"]["response"]["status_code"] == 200
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["response"]["body"]["error"]["param"] == "temperature"


WRONG = [
    ("no json", "the line is not a JSON object"),
    ('{"custom_id": "x", "custom_id": "y"}', "stands twice"),
    (line("a"), "line 1 has the same custom_id, 'a'"),
    (line(""), "custom_id must have 1 to 512 characters"),
    (line("b", "/v1/models"), "url must be /v1/chat/completions or "),
    (line("b") | {"method": "GET"}, "method must be 'POST'"),
    (line("b") | {"body": []}, "body must be an object"),
    (line("b") | {"extra": 1}, "Unknown parameter: 'extra'."),
    ({"custom_id": "b", "method": "POST", "body": {}}, "Missing required parameter: 'url'."),
    (line("b", model="other"), "body.model must be 'fake', which is served, not 'other'"),
    (line("b", stream=True), "body.stream: a batch has no streams"),
    (line("b", prompt="x" * 20_000), "the line has more than"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG, ids=[words for _, words in WRONG])
async def test_a_wrong_line_is_told_by_its_number_before_anything_runs(
    files: Files, wrong: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(line("a"), wrong, line("z"))
    async with serving(fake()) as rig:
        assert await files.run(rig, "--max-body-bytes", "4K") == 2
        assert not rig.engine.seen
    said = capsys.readouterr().err
    assert f"line 2: {words}" in said or ("line 2: " in said and words in said)
    assert "line 3" not in said
    assert not files.output.exists()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ('{"custom_id": "other", "response": {"status_code": 200}}\n', "line 1 is of 'other'"),
        ("a table\n", "line 1 is no output of a batch"),
    ],
)
async def test_a_file_with_something_else_is_not_written_to(
    files: Files, output: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(line("a"))
    files.output.write_text(output)
    async with serving(fake()) as rig:
        assert await files.run(rig) == 2
    assert words in capsys.readouterr().err
    assert files.output.read_text() == output


@pytest.mark.parametrize(
    ("given", "output", "words"),
    [
        ("lacking", "out", "lacking: there is no such file"),
        (".", "out", "is no file"),
        ("in", "/dev/null", "/dev/null: is no file"),
        ("in", "in", "is the file of the requests"),
        ("in", "no/folder", "No such file or directory"),
    ],
)
async def test_files_that_cannot_be_used_are_told(
    given: str, output: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = Files(tmp_path)
    (tmp_path / "in").write_text(json.dumps(line("a")) + "\n")
    files.input, files.output = tmp_path / given, tmp_path / output
    async with serving(fake()) as rig:
        assert await files.run(rig) == 2
        assert not rig.engine.seen
    assert words in capsys.readouterr().err


async def test_a_disk_that_gets_full_ends_the_run_which_can_go_on(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(*(line(str(number)) for number in range(9)))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with serving(fake()) as rig:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most[1]))  # in the middle of a line
        try:
            assert await files.run(rig, "--concurrency", "1") == 3
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)
        assert files.output.stat().st_size == 1000
        assert "out.jsonl: File too large; the same command goes on" in capsys.readouterr().err
        assert await files.run(rig) == 0
    assert len(files.answers()) == 9


async def test_a_second_run_leaves_out_what_has_an_answer_and_cuts_off_half_a_line(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(*(line(str(number)) for number in range(4)))
    whole = '{"custom_id": "%d", "response": {"status_code": %d}}\n'
    files.output.write_text(whole % (2, 200) + whole % (0, 400) + '{"custom_id": "1", "resp')
    async with serving(fake()) as rig:
        assert await files.run(rig) == 1
        assert len(rig.engine.seen) == 2
        assert files.answers().keys() == {"0", "1", "2", "3"}
        assert await files.run(rig) == 1
        assert len(rig.engine.seen) == 2
    assert "4 lines: 3 answered, 1 failed, 2 of them by earlier runs; " in capsys.readouterr().out


async def test_no_more_lines_run_at_a_time_than_it_is_told(files: Files) -> None:
    files.write(*(line(str(number)) for number in range(8)))
    async with serving(fake(hold=True)) as rig:
        task = asyncio.create_task(files.run(rig, "--concurrency", "3"))
        await until(lambda: len(rig.engine.seen) >= 3)
        await asyncio.sleep(0.1)
        assert len(rig.engine.seen) == 3
        rig.engine.release()
        assert await task == 0


async def test_lines_that_a_full_server_refuses_are_tried_again(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses, call = [], running.call

    async def noting(*asked: Any) -> running.Reply:
        reply = await call(*asked)
        statuses.append(reply.status)
        return reply

    monkeypatch.setattr(running, "call", noting)
    files.write(*(line(str(number)) for number in range(12)))
    async with serving(fake(hold=True, max_num_seqs=1, max_queued_requests=2)) as rig:
        task = asyncio.create_task(files.run(rig, "--concurrency", "6"))
        await until(lambda: statuses.count(429) >= 3)
        rig.engine.release()
        assert await task == 0
    assert statuses.count(200) == 12
    assert {one["response"]["status_code"] for one in files.answers().values()} == {200}


async def test_a_server_that_takes_nothing_ends_the_run_which_can_go_on(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(*(line(str(number)) for number in range(3)))
    async with serving(fake(hold=True, max_num_seqs=1, max_queued_requests=1)) as rig:
        assert await files.run(rig, "--give-up-after", "0.3") == 3
        assert files.output.read_text() == ""
        rig.engine.release()
        assert await files.run(rig) == 0
    assert len(files.answers()) == 3
    assert "the server takes no more lines: " in capsys.readouterr().err


async def test_a_key_that_ends_ends_the_run_and_another_one_answers_the_rest(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call, called = running.call, 0

    async def ending(app: Any, method: str, path: str, body: bytes, key: str) -> running.Reply:
        nonlocal called
        called += 1
        return await call(app, method, path, body, key if called <= 2 else "Bearer psk_no")

    monkeypatch.setenv("PENSTOCK_TOKEN", "psk_one")
    files.write(*(line(str(number)) for number in range(5)))
    async with serving_keys(tmp_path / "keys.json", key("one")) as rig:
        with monkeypatch.context() as patched:
            patched.setattr(running, "call", ending)
            assert await files.run(rig, "--concurrency", "1") == 3
        assert files.answers().keys() == {"0", "1"}
        assert await files.run(rig) == 0
    assert {one["response"]["status_code"] for one in files.answers().values()} == {200}
    assert "the server takes no more lines: " in capsys.readouterr().err


async def test_two_runs_do_not_write_to_one_file(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(line("a"))
    async with serving(fake(hold=True)) as rig:
        task = asyncio.create_task(files.run(rig))
        await until(lambda: bool(rig.engine.seen))
        assert await files.run(rig) == 2
        rig.engine.release()
        assert await task == 0
    assert "another run writes to it" in capsys.readouterr().err


@pytest.mark.ci
async def test_after_a_kill_the_same_command_answers_the_rest(files: Files) -> None:
    files.write(*(line(str(number), max_tokens=3) for number in range(40)))
    command = [sys.executable, "-m", "penstock.cli", "batch", str(files.input), str(files.output)]
    async with serving(fake(hold=True, max_num_seqs=2)) as rig:

        async def start() -> asyncio.subprocess.Process:
            return await asyncio.create_subprocess_exec(
                *command, "--addr", rig.server.address, "--concurrency", "4", cwd=ROOT
            )

        async with asyncio.timeout(3 * WAIT_S):
            first = await start()
            while not (files.output.exists() and len(files.output.read_bytes().splitlines()) > 4):
                rig.engine.step()
                await asyncio.sleep(0.01)
            first.send_signal(signal.SIGKILL)
            await first.wait()
            had = files.output.read_bytes()
            rig.engine.release()
            assert await (await start()).wait() == 0
    assert files.output.read_bytes().startswith(had)
    assert files.answers().keys() == {str(number) for number in range(40)}
