"""`penstock profile` against the handwritten server."""

from __future__ import annotations

import json

import grpc
import pytest

from penstock.cli.__main__ import main
from penstock.v1 import telemetry_pb2
from tests.clients.failing import Failure
from tests.clients.profiling import FILES, NUM_BYTES, PATH


@pytest.fixture
def run(server, capsys):
    """Run the command. Returns the exit code, stdout and stderr."""

    def call(*argv):
        code = main(["profile", *map(str, argv), "--addr", server.addr])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def test_it_says_where_the_profile_is_and_how_to_open_it(server, run):
    code, out, err = run("--steps", 20, "--max-time", 2)
    assert (code, err) == (0, "")
    assert out == (
        "recorded 7 steps in 1.25 s\n"
        f"at the server: {PATH} (0.0 MB)\n"
        "open perfetto_trace.json.gz in it at https://ui.perfetto.dev\n"
    )
    (call,) = server.calls
    assert (call.steps, call.timeout.seconds, call.include_data) == (20, 2, False)
    run()
    assert server.calls[1] == telemetry_pb2.ProfileRequest()


def test_it_says_that_there_was_nothing_to_record(server, run):
    server.profile.steps = 0
    out = run()[1]
    assert out.startswith("recorded 0 steps in 1.25 s: the server had no work, so start some meanwhile\n")


def test_it_fetches_the_files(run, tmp_path):
    code, out, _ = run("--out", tmp_path / "out")
    folder = tmp_path / "out" / "profile-20261122T120000-000"
    assert code == 0
    assert f"here: {folder}\n" in out
    assert (folder / "perfetto_trace.json.gz").read_bytes() == FILES["perfetto_trace.json.gz"]


def test_the_report_as_json(run, tmp_path):
    report = json.loads(run("--json", "--out", tmp_path)[1])
    assert report == {
        "path": PATH,
        "steps": 7,
        "num_bytes": NUM_BYTES,
        "duration": 1.25,
        "folder": str(tmp_path / "profile-20261122T120000-000"),
    }


def test_a_path_cannot_change_the_screen(server, run):
    server.profile.path = "/p/\x1b[2Jx"
    assert "\x1b" not in run()[1]


def test_errors(server, run, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run("--out", tmp_path / "file")
    assert (code, "cannot write" in err) == (2, True)
    server.failure = Failure(grpc.StatusCode.ABORTED, "PROFILE_UNDER_WAY", "another profile is under way")
    code, _, err = run()
    assert code == 1
    assert "another profile is under way" in err
    server.failure = Failure(
        grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FEATURE", "the server was started without --profile-dir"
    )
    code, _, err = run()
    assert code == 1
    assert "--profile-dir" in err


@pytest.mark.parametrize("wrong", [("--steps", 0), ("--steps", 1001), ("--max-time", 301), ("--max-time", 0)])
def test_wrong_flags(run, wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        run(*wrong)
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err
