"""`penstock keys` through main(): what it prints where, and what is in the file afterwards."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.cli.__main__ import main
from penstock.server_cli.processes.servers import reload_hint, serving_with
from penstock.service.access.callers import Role
from penstock.service.access.key_file import KeyEntry
from penstock.service.access.key_store import digest_of, read_keys

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def run(file: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `penstock keys ACTION ...` on the file. Returns exit code, stdout and stderr."""

    def command(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(["keys", *arguments, "--file", str(file)])
        except SystemExit as end:
            code = int(str(end.code))
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


def test_add_prints_the_key_once_and_keeps_its_digest(run, file):
    code, out, err = run("add", "alice")
    assert code == 0
    secret = out.removesuffix("\n")
    assert re.fullmatch(r"psk_alice_[A-Za-z0-9_-]{43}", secret)
    assert read_keys(file) == (KeyEntry("alice", digest_of(secret)),)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret not in err
    assert "cannot be shown again" in err
    assert "kill -HUP" in err
    for text in (file.read_text(), run("list")[1]):
        assert secret not in text
        assert secret.removeprefix("psk_alice_") not in text


def test_every_option_arrives(run, file):
    code, out, _ = run(
        *("add", "bob", "--role", "control", "--role", "infer", "--requests-per-minute", "60"),
        *("--tokens-per-minute", "1000", "--max-parallel-requests", "4", "--model", "a", "--model", "b"),
        *("--expires", "2027-01-31T00:00:00Z", "--certificate", "bob.example", "--private-cache"),
    )
    assert code == 0
    assert read_keys(file) == (
        KeyEntry(
            "bob",
            digest_of(out.strip()),
            frozenset({Role.INFER, Role.CONTROL}),
            60,
            1000,
            4,
            ("a", "b"),
            datetime(2027, 1, 31, tzinfo=UTC),
            False,
            ("bob.example",),
            True,
        ),
    )


def test_expires_in_days(run, file):
    before = datetime.now(UTC)
    assert run("add", "a", "--expires-in", "1.5")[0] == 0
    expires = read_keys(file)[0].expires
    assert expires is not None
    assert timedelta(seconds=-1) <= expires - before - timedelta(days=1.5) <= timedelta(minutes=10)


def test_a_certificate_may_do_without_a_key(run, file):
    code, out, _ = run("add", "c", "--certificate", "c.example", "--certificate-only")
    assert (code, out) == (0, "")
    assert read_keys(file) == (KeyEntry("c", certificates=("c.example",)),)


def test_revoke_keeps_the_mode(run, file):
    """Otherwise a server that reads the file as any user would keep the revoked key."""
    run("add", "alice")
    file.chmod(0o644)
    assert run("revoke", "alice")[0] == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_revoke_marks_and_the_id_is_not_given_again(run, file):
    run("add", "alice")
    run("add", "bob")
    before = read_keys(file)
    code, out, err = run("revoke", "alice")
    assert (code, out) == (0, "")
    assert "revoked 'alice'" in err
    assert "kill -HUP" in err
    assert [(entry.id, entry.revoked) for entry in read_keys(file)] == [("alice", True), ("bob", False)]
    assert read_keys(file)[1] == before[1]
    assert read_keys(file)[0].sha256 == before[0].sha256
    code, out, err = run("add", "alice")
    assert (code, out) == (1, "")
    assert "already, which is revoked" in err
    assert run("revoke", "alice")[0] == 0


def test_list_shows_states_and_limits(run, file):
    run("add", "first", "--tokens-per-minute", "5", "--role", "control")
    run("add", "gone", "--expires", "2020-01-01T00:00:00Z", "--certificate", "x\x1b[2J")
    run("add", "out", "--private-cache", "--model", "m")
    run("revoke", "out")
    code, out, _ = run("list")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == [
        *("ID", "STATE", "ROLES", "REQ/MIN", "TOKENS/MIN", "PARALLEL", "EXPIRES", "ALSO"),
    ]
    assert lines[1].split() == ["first", "valid", "control", "any", "5", "any", "never"]
    assert lines[2].split()[:3] == ["gone", "expired", "infer"]
    assert "\x1b" not in out
    assert lines[3].split()[:3] == ["out", "revoked", "infer"]
    assert lines[3].endswith("model 'm', private cache")


def test_list_warns_of_a_file_that_others_read(run, file):
    run("add", "a")
    file.chmod(0o644)
    code, _, err = run("list")
    assert code == 0
    assert "warning" in err
    assert "chmod 600" in err


@pytest.mark.parametrize(
    ("arguments", "complaint", "expected"),
    [
        (["add", "not/an/id"], "ID: must be 1 to 64", 1),
        (["add", "a", "--certificate-only"], "needs a --certificate", 1),
        (["add", "a", "--requests-per-minute", "0"], "must be a whole number from 1", 2),
        (["add", "a", "--tokens-per-minute", "many"], "must be a whole number from 1", 2),
        (["add", "a", "--expires", "tomorrow"], "must be a time with its zone", 2),
        (["add", "a", "--expires-in", "0"], "must be a number of days", 2),
        (["add", "a", "--expires-in", "nan"], "must be a number of days", 2),
        (["add", "a", "--role", "root"], "invalid choice", 2),
        (["revoke", "nobody"], "does not exist", 1),
        (["list"], "cannot be read", 1),
        (["frobnicate"], "invalid choice", 2),
    ],
)
def test_what_is_wrong_is_one_clear_line_and_writes_nothing(run, file, arguments, complaint, expected):
    code, out, err = run(*arguments)
    assert (code, out) == (expected, "")
    assert complaint in err
    assert "Traceback" not in err
    assert not file.exists()


def test_revoking_who_is_not_there(run, file):
    run("add", "alice")
    before = file.read_bytes()
    code, _, err = run("revoke", "bob")
    assert code == 1
    assert "has no key 'bob'" in err
    assert file.read_bytes() == before


def test_one_certificate_stands_for_one_key(run, file):
    run("add", "alice", "--certificate", "x")
    code, out, err = run("add", "bob", "--certificate", "x")
    assert (code, out) == (1, "")
    assert "stands for 'alice' already" in err


def test_a_broken_file_is_not_replaced(run, file):
    file.write_text('{"version": 1, "keys": [{"id": "x"}]}')
    code, out, err = run("add", "alice")
    assert (code, out) == (1, "")
    assert "keys[0] ('x'): " in err
    assert json.loads(file.read_text())["keys"] == [{"id": "x"}]


@pytest.mark.parametrize("arguments", [[], ["add"], ["revoke"], ["list"]])
def test_help_is_worth_reading(run, arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(["keys", *arguments, "--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in {
        "": ("examples:", "SIGHUP", "authorization: Bearer KEY", "penstock keys revoke alice"),
        "add": ("cannot be shown again", "default: infer", "--private-cache", "--expires-in"),
        "revoke": ("Calls that are under way go on",),
        "list": ("no secrets",),
    }["".join(arguments)]:
        assert part in shown


def test_the_running_server_is_named(file, tmp_path):
    """A process with such a command line, started in the folder, and given the file by its short name."""
    program = "import sys; print('up', flush=True); sys.stdin.read()"
    sleeper = [sys.executable, "-c", program, "penstock", "serve", "demo", "--keys", "keys.json"]
    file.write_text("")
    pipe = subprocess.PIPE
    with subprocess.Popen(sleeper, stdin=pipe, stdout=pipe, cwd=tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline()  # it may have no command line before that
        try:
            assert serving_with(file) == [process.pid]
            assert reload_hint(file).endswith(f": kill -HUP {process.pid}")
            assert serving_with(tmp_path / "other.json") == []
        finally:
            process.stdin.close()
    assert serving_with(file) == []
    assert reload_hint(file).endswith("kill -HUP PID")


@pytest.mark.parametrize("arguments", [["serve", "--keys=FILE"], ["serve", "demo", "--keys", "FILE"]])
def test_processes_that_are_no_such_server_are_passed_over(tmp_path, arguments):
    file = tmp_path / "keys.json"
    lines = [
        ["/usr/bin/python3", "/usr/bin/penstock", *(a.replace("FILE", str(file)) for a in arguments)],
        ["penstock", "keys", "--keys", str(file)],
        ["penstock", "serve", "demo"],
        ["penstock", "serve", "--keys"],
        ["timeout", "60", "python", "penstock", "serve", "--keys", str(file)],
        ["sudo", "penstock", "serve", "--keys", str(file)],
        ["python", "other", "serve", "--keys", str(file)],
    ]
    for number, line in enumerate(lines, 1):
        folder = tmp_path / "proc" / str(number)
        folder.mkdir(parents=True)
        (folder / "cmdline").write_bytes(("\0".join(line) + "\0").encode())
        (folder / "cwd").symlink_to(tmp_path)
    (tmp_path / "proc" / "99").mkdir()  # a process that ended meanwhile
    assert serving_with(file, tmp_path / "proc") == [1]


def test_no_engine_is_loaded(file):
    """Nor gRPC, so that the command is quick."""
    program = (
        "import sys\nfrom penstock.cli.__main__ import main\n"
        f"main(['keys', 'add', 'a', '--file', {str(file)!r}])\n"
        "print(*(name for name in ('jax', 'transformers', 'grpc') if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
        check=True,
    )
    assert done.stdout.splitlines()[1] == ""
