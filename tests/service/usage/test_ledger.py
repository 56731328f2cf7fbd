"""The ledger: what is in the file, when, and what becomes of it if a process is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock.cli.__main__ import main
from penstock.runtime.errors import ConfigError
from penstock.service.usage import ledger as ledger_module
from penstock.service.usage.ledger import HOUR_S, Counts, Kind, Ledger, read_usage
from penstock.service.usage.meter import Outcome, Usage
from tests.service.key_rig import as_, key, serving_keys
from tests.service.rig import failure_of, fake, generate, stream, until
from tests.support.clock import Clock

STREAM = "penstock.v1.InferenceService/Stream"
NOON = 1_793_534_400
"""2026-11-01T12:00:00Z."""


@contextmanager
def keeping(path: Path, clock: Clock | None = None) -> Iterator[Ledger]:
    ledger = Ledger(path, clock or Clock(NOON))
    try:
        yield ledger
    finally:
        ledger.close()


def answered(
    caller: str = "alice", prompt: int = 5, cached: int = 2, completion: int = 7, reasoning: int = 0
) -> Usage:
    return Usage(caller, STREAM, "r", Outcome.ANSWERED, "", prompt, cached, completion, reasoning)


def refused(caller: str, reason: str) -> Usage:
    return Usage(caller, STREAM, "", Outcome.REFUSED, reason)


async def noted(ledger: Ledger, usage: Usage) -> None:
    """Record an answer and wait for the disk."""
    future = ledger.record(usage)
    assert future is not None
    await asyncio.wait_for(future, 20)


async def test_requests_of_one_kind_are_summed(tmp_path: Path) -> None:
    with keeping(tmp_path / "usage.db") as ledger:
        await asyncio.gather(*(noted(ledger, answered(prompt=i, cached=1, completion=2)) for i in range(100)))
    found = read_usage(tmp_path / "usage.db")
    kind = Kind(NOON, "alice", STREAM, Outcome.ANSWERED, "")
    assert found == {kind: Counts(100, sum(range(100)), 100, 200)}


async def test_hours_keys_endings_and_reasons_are_kept_apart(tmp_path: Path) -> None:
    clock = Clock(NOON + HOUR_S - 1)
    with keeping(tmp_path / "usage.db", clock) as ledger:
        await noted(ledger, answered("alice"))
        clock.now += 1
        await noted(ledger, answered("alice"))
        assert ledger.record(refused("bob", "RATE_LIMITED")) is None, "nobody waits for a refusal"
        ledger.record(refused("bob", "BUSY"))
        ledger.record(Usage("bob", STREAM, "x", Outcome.VANISHED, "", 3, 0, 1))
    assert {
        (kind.hour - NOON, kind.key, kind.outcome, kind.reason): counts.requests
        for kind, counts in read_usage(tmp_path / "usage.db").items()
    } == {
        (0, "alice", Outcome.ANSWERED, ""): 1,
        (HOUR_S, "alice", Outcome.ANSWERED, ""): 1,
        (HOUR_S, "bob", Outcome.REFUSED, "RATE_LIMITED"): 1,
        (HOUR_S, "bob", Outcome.REFUSED, "BUSY"): 1,
        (HOUR_S, "bob", Outcome.VANISHED, ""): 1,
    }
    assert len(read_usage(tmp_path / "usage.db", since=NOON + HOUR_S)) == 4
    assert len(read_usage(tmp_path / "usage.db", until=NOON + HOUR_S)) == 1


async def test_an_answer_waits_until_its_count_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with keeping(path) as ledger, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # no other process can write now
        future = ledger.record(answered())
        assert future is not None
        done, _ = await asyncio.wait([future], timeout=0.3)
        assert not done
        other.execute("ROLLBACK")
        await asyncio.wait_for(future, 20)
        assert sum(counts.requests for counts in read_usage(path).values()) == 1


async def test_what_cannot_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets its answer nevertheless, and the log says what is missing."""
    monkeypatch.setattr("penstock.service.usage.ledger._RETRY_S", 0.01)
    path = tmp_path / "usage.db"
    with keeping(path) as ledger:
        with closing(sqlite3.connect(path)) as other, other:
            other.execute("ALTER TABLE usage RENAME TO hidden")
        await noted(ledger, answered())
        assert "the usage of 1 requests could not be written to" in caplog.text
        with closing(sqlite3.connect(path)) as other, other:
            other.execute("ALTER TABLE hidden RENAME TO usage")
        async with asyncio.timeout(20):
            while not read_usage(path):  # noqa: ASYNC110 -- a file has no event
                await asyncio.sleep(0.01)
    assert [counts.requests for counts in read_usage(path).values()] == [1]


async def test_a_locked_file_slows_one_batch_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that come after a failure do not wait for the file, which is tried again later."""
    monkeypatch.setattr("penstock.service.usage.ledger._RETRY_S", 3600.0)
    path = tmp_path / "usage.db"
    opened = 0

    def counted(path: Path, busy_s: float) -> sqlite3.Connection:
        nonlocal opened
        opened += 1
        return open_file(path, busy_s)

    with keeping(path) as ledger:
        with closing(sqlite3.connect(path, isolation_level=None)) as other, monkeypatch.context() as patch:
            other.execute("BEGIN IMMEDIATE")
            open_file = ledger_module._open
            patch.setattr(ledger_module, "_BUSY_S", 0.05)
            patch.setattr(ledger_module, "_open", counted)
            for _ in range(20):
                await noted(ledger, answered())
            other.execute("ROLLBACK")
        assert opened == 1
        assert not read_usage(path)
    assert [counts.requests for counts in read_usage(path).values()] == [20], "the end is one more try"


async def test_after_a_write_answers_wait_for_the_disk_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.service.usage.ledger._RETRY_S", 0.01)
    monkeypatch.setattr("penstock.service.usage.ledger._BUSY_S", 60.0)
    path = tmp_path / "usage.db"
    with keeping(path) as ledger, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("ALTER TABLE usage RENAME TO hidden")
        await noted(ledger, answered())
        other.execute("ALTER TABLE hidden RENAME TO usage")
        await until(lambda: bool(read_usage(path)))
        other.execute("BEGIN IMMEDIATE")
        future = ledger.record(answered())
        assert future is not None
        done, _ = await asyncio.wait([future], timeout=0.5)
        other.execute("ROLLBACK")
        assert not done
        await asyncio.wait_for(future, 20)
        assert [counts.requests for counts in read_usage(path).values()] == [2]


async def test_a_bug_in_writing_holds_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged with its traceback, and the counts are written later."""
    monkeypatch.setattr("penstock.service.usage.ledger._RETRY_S", 0.01)

    def broken(kept: object) -> object:
        raise RuntimeError("a bug")

    path = tmp_path / "usage.db"
    with keeping(path) as ledger:
        with monkeypatch.context() as patch:
            patch.setattr(ledger_module, "_rows", broken)
            await noted(ledger, answered())
            await noted(ledger, answered())
        assert "could not be written to" in caplog.text
        assert "RuntimeError: a bug" in caplog.text
        await until(lambda: bool(read_usage(path)))
    assert [counts.requests for counts in read_usage(path).values()] == [2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_no_answer_waits_for_a_thread_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaving(kept: object) -> object:
        raise SystemExit

    monkeypatch.setattr(ledger_module, "_rows", leaving)
    with keeping(tmp_path / "usage.db") as ledger:
        for _ in range(3):
            await noted(ledger, answered())
    await noted(ledger, answered())


async def test_two_servers_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with keeping(path) as one, keeping(path) as two:
        await asyncio.gather(*(noted(ledger, answered()) for ledger in (one, two) * 20))
    assert [counts.requests for counts in read_usage(path).values()] == [40]


def seen(path: Path) -> dict[tuple[str, str, Outcome, str], Counts]:
    """Return what a server wrote, in whichever hour."""
    return {
        (kind.key, kind.method.rpartition("/")[2], kind.outcome, kind.reason): counts
        for kind, counts in read_usage(path).items()
    }


async def test_a_server_keeps_the_books(tmp_path: Path) -> None:
    """It counts answers, refusals and clients that vanish. An answer is in the file when its
    client has it.
    """
    path = tmp_path / "usage.db"
    entries = [key("alice"), key("bob", requests_per_minute=1)]
    engine = fake(hold=True)
    async with serving_keys(tmp_path / "keys.json", *entries, engine=engine, usage_file=path) as rig:
        request = generate(prompt="abc", stopping={"max_tokens": 4})
        engine.step(4)
        await rig.inference.Generate(request, **as_("alice"))
        assert seen(path)["alice", "Generate", Outcome.ANSWERED, ""] == Counts(1, 3, 0, 4)
        engine.step(4)
        await rig.inference.Generate(request, **as_("bob"))
        failure = await failure_of(rig.inference.Generate(request, **as_("bob")))
        assert failure.reason == "RATE_LIMITED"
        call = rig.inference.Stream(stream(prompt="abcd", stopping={"max_tokens": 50}), **as_("alice"))
        engine.step(3)
        while not (await call.read()).delta.token_ids:
            pass
        call.cancel()
        await until(lambda: ("alice", "Stream", Outcome.VANISHED, "") in seen(path))
    found = seen(path)
    assert found["bob", "Generate", Outcome.REFUSED, "RATE_LIMITED"] == Counts(1, 0, 0, 0)
    vanished = found["alice", "Stream", Outcome.VANISHED, ""]
    assert vanished.prompt_tokens == 4
    assert vanished.completion_tokens > 0


CRASHING = """
import asyncio, sys
from pathlib import Path
from penstock.service.usage.ledger import Ledger
from penstock.service.usage.meter import Outcome, Usage
from tests.service.key_rig import as_, key, serving_keys
from tests.service.rig import fake, failure_of, generate, stream, until

async def answer():
    ledger = Ledger(Path(sys.argv[1]))
    while True:
        await ledger.record(Usage("alice", "m", "r", Outcome.ANSWERED, "", 1, 0, 1))
        print("answered", flush=True)

asyncio.run(answer())
"""


@pytest.mark.ci
def test_what_was_answered_outlives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    command = [sys.executable, "-c", CRASHING, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(50)]
        os.kill(process.pid, signal.SIGKILL)
        seen += process.stdout.readlines()
    (counts,) = read_usage(path).values()
    said = seen.count("answered\n")
    assert said <= counts.requests <= said + 1, "the last one may have been noted and not said"


@pytest.mark.parametrize("content", [b"this is no database, whatever its name says" * 100, None])
def test_a_file_that_cannot_be_used_is_told_at_once(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "usage.db"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"usage file .*usage\.db cannot be used"):
        Ledger(path)


def test_a_file_of_another_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("PRAGMA user_version = 7")
    with pytest.raises(ConfigError, match="another version of penstock"):
        Ledger(path)


OLD_TABLE = """CREATE TABLE usage (hour INTEGER NOT NULL, key TEXT NOT NULL, method TEXT NOT NULL,
outcome TEXT NOT NULL, reason TEXT NOT NULL, requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
cached_prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
PRIMARY KEY (hour, key, method, outcome, reason)) WITHOUT ROWID"""


async def test_a_file_without_tokens_of_reasoning_goes_on_with_them(tmp_path: Path) -> None:
    """It can be read as it is; a server that opens it adds the column."""
    path = tmp_path / "usage.db"
    hour = int(NOON) // 3600 * 3600
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(OLD_TABLE)
        file.execute("INSERT INTO usage VALUES (?, 'alice', ?, 'answered', '', 2, 10, 4, 14)", (hour, STREAM))
        file.execute("PRAGMA user_version = 1")
    assert list(read_usage(path).values()) == [Counts(2, 10, 4, 14)]
    for _ in range(2):
        with keeping(path, Clock(NOON)) as ledger:
            await noted(ledger, answered(reasoning=3))
    assert list(read_usage(path).values()) == [Counts(4, 20, 8, 28, 6)]


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("table", ["people (name TEXT)", "usage (what TEXT)"])
def test_the_database_of_something_else_is_left_alone(tmp_path: Path, version: int, table: str) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(f"CREATE TABLE {table}")
        file.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"other\.db is the database of another program"):
        Ledger(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path], "no journal beside it"


async def test_a_file_with_our_table_and_no_version_yet_is_ours(tmp_path: Path) -> None:
    """A server finds that if it starts at the same time as another; later versions may have more tables."""
    path = tmp_path / "usage.db"
    Ledger(path).close()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("PRAGMA user_version = 0")
    with keeping(path) as ledger:
        await noted(ledger, answered())
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("CREATE VIEW answers AS SELECT * FROM usage WHERE outcome = 'answered'")
    with keeping(path) as ledger:
        await noted(ledger, answered())
    assert [counts.requests for counts in read_usage(path).values()] == [2]


@pytest.fixture
async def filled(tmp_path: Path) -> Path:
    """Make a file with two keys on two days."""
    clock = Clock(NOON)
    with keeping(tmp_path / "usage.db", clock) as ledger:
        await noted(ledger, answered("alice", prompt=1500, cached=500, completion=20, reasoning=6))
        ledger.record(refused("bob", "RATE_LIMITED"))
        ledger.record(refused("", "BUSY"))
        clock.now += 86_400
        await noted(ledger, answered("alice", prompt=10, cached=0, completion=3, reasoning=3))
    return tmp_path / "usage.db"


def test_the_command_prints_a_table_with_a_total(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", str(filled)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        *("key", "requests", "answered", "refused", "failed", "vanished"),
        *("prompt", "cached", "completion", "reasoning"),
    ]
    assert [line.split() for line in lines[1:]] == [
        ["-", "1", "0", "1", "0", "0", "0", "0", "0", "0"],
        ["alice", "2", "2", "0", "0", "0", "1,510", "500", "23", "9"],
        ["bob", "1", "0", "1", "0", "0", "0", "0", "0", "0"],
        ["total", "4", "2", "2", "0", "0", "1,510", "500", "23", "9"],
    ]


def test_the_command_groups_and_picks(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["usage", str(filled), "--by", "day", "--by", "method", "--key", "alice", "--format", "json"]
    assert main([*arguments, "--since", "2026-11-01T13:00Z"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["day"], row["method"], row["prompt"], row["completion"]) == ("2026-11-02", "Stream", 10, 3)
    assert main([*arguments, "--until", "2026-11-02"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["day"], row["prompt"]) == ("2026-11-01", 1500)


def test_the_command_writes_csv(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", str(filled), "--by", "key", "--by", "reason", "--format", "csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == "key,reason,requests,answered,refused,failed,vanished,prompt,cached,completion,reasoning"
    )
    assert lines[1:] == [
        "-,BUSY,1,0,1,0,0,0,0,0,0",
        "alice,-,2,2,0,0,0,1510,500,23,9",
        "bob,RATE_LIMITED,1,0,1,0,0,0,0,0,0",
    ]


def test_the_command_says_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", str(tmp_path / "none.db")]) == 1
    assert "there is no usage file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["usage", "x", "--since", "yesterday"])
    assert "'yesterday' is no time" in capsys.readouterr().err
