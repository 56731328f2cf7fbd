"""The commands that change a running server: what they send, what they show, and what they say of errors."""

from __future__ import annotations

import json
import re

import grpc
import numpy as np
import pytest
from google.protobuf import text_format
from safetensors.numpy import save_file

from penstock.cli.__main__ import main
from penstock.v1 import control_pb2, weights_pb2
from tests.clients.failing import Failure
from tests.clients.updates import crc32c

Code = grpc.StatusCode


@pytest.fixture
def weights(tmp_path):
    """Make a file with one tensor of 12 bytes."""
    file = tmp_path / "model.safetensors"
    save_file({"a": np.ones(3, np.float32)}, file)
    return file


@pytest.fixture
def run(server, capsys):
    """Run a command against the fake server. Returns the exit code, stdout and stderr."""

    def call(*argv):
        code = main([*map(str, argv), "--addr", server.addr])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def test_push_sends_a_file_and_says_what_came_of_it(server, run, weights):
    code, out, err = run("push-weights", weights, "--label", "step-1")
    assert (code, err) == (0, "")
    assert out == (
        "step-1 (generation 1) is in use, after initial (generation 0)\n"
        "no token was made for 250.0 ms\n"
        "running requests: 1 finished first, 2 aborted, 3 went on, 4 went on after their prompts were "
        "computed again\n"
        "digest 0102\n"
        "1 tensors, 0.0 MB, staged in 2.50 s\n"
    )
    assert server.updates.received == [{"a": np.ones(3, np.float32).tobytes()}]


def test_push_sends_a_directory(server, run, weights):
    assert run("push-weights", weights.parent, "--label", "l")[0] == 0
    assert list(server.updates.received[0]) == ["a"]


def test_push_leaves_a_uri_to_the_server(server, run):
    assert run("push-weights", "file:///models/m", "--label", "l")[0] == 0
    assert server.updates.begins[0].uri == "file:///models/m"


def test_push_sends_every_flag(server, run, weights):
    flags = ["--label", "l", "--policy", "wait", "--drain-timeout", "1.5", "--partial", "--staging", "device"]
    flags += ["--expected-generation", "0", "--refuse-non-finite", "--stage-only", "--update-id", "u"]
    code, out, _ = run("push-weights", weights, *flags)
    begin = weights_pb2.UpdateWeightsBegin()
    begin.CopyFrom(server.updates.begins[0])
    begin.ClearField("manifest")
    assert begin == text_format.Parse(
        """
        update_id: "u" version_label: "l" in_flight: IN_FLIGHT_POLICY_WAIT partial: true
        expected_generation: 0
        drain_timeout { seconds: 1 nanos: 500000000 } staging: STAGING_MODE_DEVICE stage_only: true
        refuse_non_finite: true
        """,
        weights_pb2.UpdateWeightsBegin(),
    )
    assert code == 0
    assert "swap it in: penstock commit-weights u\nor drop it: penstock discard-weights u\n" in out


def test_push_leaves_unset_what_was_not_given(server, run, weights):
    run("push-weights", weights, "--label", "l")
    names = [field.name for field, _ in server.updates.begins[0].ListFields()]
    assert names == ["update_id", "version_label", "manifest"]


def test_push_can_only_ask(server, run, weights):
    code, out, _ = run("push-weights", weights, "--label", "l", "--validate-only")
    assert code == 0
    assert out.startswith("the server would take these weights; ")
    assert server.updates.chunk_sizes == []


def test_push_says_that_an_update_was_committed_before(server, run, weights):
    server.updates.committed.append("u")
    _, out, _ = run("push-weights", weights, "--label", "l", "--update-id", "u")
    assert out.startswith("the update u was committed before; ")


def test_push_as_json(run, weights):
    _, out, _ = run("push-weights", weights, "--label", "l", "--json")
    shown = json.loads(out)
    assert (shown["outcome"], shown["digest"], shown["in_flight"]["kept"]) == ("committed", "0102", 3)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", r"penstock push-weights: cannot read nowhere: No such file or directory\n"),
        ("empty", r"penstock push-weights: cannot read .*: .* holds no \*\.safetensors files\n"),
        ("text.safetensors", r"penstock push-weights: .* is no complete safetensors file: .*\n"),
    ],
)
def test_push_of_what_cannot_be_read(run, tmp_path, monkeypatch, server, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.safetensors").write_text("no tensors at all")
    code, out, err = run("push-weights", source, "--label", "l")
    assert (code, out) == (2, "")
    assert re.fullmatch(message, err)
    assert server.updates.begins == []


def test_push_needs_a_label(run, weights, capsys):
    with pytest.raises(SystemExit) as caught:
        run("push-weights", weights)
    assert caught.value.code == 2
    assert "--label" in capsys.readouterr().err


def test_push_lists_refused_tensors(server, run, weights):
    errors = [
        weights_pb2.TensorError(
            name=f"t{i}",
            reason=weights_pb2.TENSOR_ERROR_REASON_SHAPE,
            expected=weights_pb2.TensorSpec(name=f"t{i}", dtype=weights_pb2.DATA_TYPE_BF16, shape=[2, 3]),
            received=weights_pb2.TensorSpec(name=f"t{i}", dtype=weights_pb2.DATA_TYPE_F32, shape=[6]),
        )
        for i in range(7)
    ]
    refused = Failure(
        Code.INVALID_ARGUMENT, "INVALID_TENSORS", tensors=weights_pb2.TensorErrors(errors=errors)
    )
    server.updates.failure_after = (1, refused)
    code, _, err = run("push-weights", weights, "--label", "l")
    assert code == 1
    assert "the old ones are in use: t0: must be bf16[2, 3], not f32[6]; t1: " in err
    assert err.endswith("; and 2 more\n")


def test_push_whose_answer_was_lost_names_the_id_to_ask_with(server, run, weights):
    server.updates.lose_reply = True
    code, _, err = run("push-weights", weights, "--label", "l")
    assert code == 1
    found = re.search(r"repeat the command with --update-id (\w+),", err)
    assert found is not None
    assert [found[1]] == server.updates.committed


def test_push_whose_wait_was_too_long_changed_nothing(server, run, weights):
    server.updates.failure_after = (1, Failure(Code.DEADLINE_EXCEEDED, "DRAIN_TIMEOUT", "after 1 s"))
    _, _, err = run("push-weights", weights, "--label", "l", "--drain-timeout", "1")
    assert "allow more with --drain-timeout" in err
    assert "--update-id" not in err


def test_a_staged_update_in_the_way_is_named_with_what_to_do(server, run, weights):
    server.updates.failure_after = (
        1,
        Failure(
            Code.ABORTED, "UPDATE_UNDER_WAY", "'u' is staged: commit or discard it first", {"staged": "true"}
        ),
    )
    _, _, err = run("push-weights", weights, "--label", "l")
    assert "with `penstock commit-weights ID` or `penstock discard-weights ID`" in err


def test_commit(server, run):
    code, out, _ = run("commit-weights", "u", "--policy", "keep")
    assert code == 0
    assert out == (
        "step-1 (generation 1) is in use, after initial (generation 0)\n"
        "no token was made for 250.0 ms\n"
        "running requests: 3 went on\n"
        "digest 0102\n"
    )
    assert server.calls == [
        control_pb2.CommitWeightsRequest(update_id="u", in_flight=weights_pb2.IN_FLIGHT_POLICY_KEEP)
    ]


def test_commit_as_json(run):
    assert json.loads(run("commit-weights", "u", "--json")[1])["update_id"] == "u"


def test_discard(server, run):
    assert run("discard-weights", "staged")[:2] == (0, "dropped the update staged\n")
    code, out, err = run("discard-weights", "other")
    assert (code, out) == (1, "")
    assert "no update other is staged; `penstock info` shows the one that is" in err


def test_pause_and_resume(server, run):
    code, out, _ = run(
        "pause", "--policy", "abort", "--drain-timeout", "0.5", "--free-kv-cache", "--offload-weights"
    )
    assert code == 0
    assert out == (
        "the server is paused; `penstock resume` ends that\n"
        "running requests: 2 aborted\n"
        "freed 0.0 MB of the device's memory\n"
    )
    assert server.calls == [
        text_format.Parse(
            """
            in_flight: IN_FLIGHT_POLICY_ABORT drain_timeout { nanos: 500000000 } free_kv_cache: true
            offload_weights: true
            """,
            control_pb2.PauseRequest(),
        )
    ]
    assert json.loads(run("pause", "--json")[1])["freed_bytes"] == 4096
    assert run("resume")[:2] == (0, "the server makes tokens\n")
    assert server.calls[1:] == [control_pb2.PauseRequest(), control_pb2.ResumeRequest()]


def test_flush_cache(run):
    assert run("flush-cache")[:2] == (0, "12 pages are free; running requests keep 3\n")
    assert json.loads(run("flush-cache", "--json")[1]) == {"pages_freed": 12, "pages_in_use": 3}


def test_trace(server, run):
    counts = "spans since the server's start: 12 exported, 3 dropped because too many waited, 4 failed\n"
    assert run("trace")[:2] == (0, f"the level is steps\n{counts}")
    assert run("trace", "--level", "off")[:2] == (0, f"the level is off, was steps\n{counts}")
    assert json.loads(run("trace", "--level", "detailed", "--json")[1]) == {
        "previous": "steps",
        "current": "detailed",
        "spans_exported": 12,
        "spans_dropped": 3,
        "spans_failed": 4,
    }
    assert [call.level for call in server.calls] == [0, 1, 4]


def test_info_shows_the_update_in_use(server, run):
    server.model_info = text_format.Parse(
        """
        weights { label: "step-1" generation: 1 } weights_digest: "\\001\\377" staged_update_id: "u-2"
        weights_since { seconds: 1764547200 }
        """,
        control_pb2.GetModelInfoResponse(),
    )
    _, out, _ = run("info")
    rows = dict(re.findall(r"^  (\S.*?)  +(.*)$", out, re.M))
    assert (rows["digest"], rows["staged update"], rows["state"]) == ("01ff", "u-2", "paused")
    assert re.fullmatch(r"2025-1[12]-\d\d \d\d:\d\d:00 [+-]\d{4}", rows["in use since"])
    shown = json.loads(run("info", "--json")[1])["model"]
    assert (shown["weights_digest"], shown["staged_update_id"]) == ("01ff", "u-2")
    assert shown["weights_since"] == "2025-12-01T00:00:00+00:00"


@pytest.mark.parametrize(
    "arguments",
    [("pause",), ("resume",), ("commit-weights", "u"), ("push-weights", "file:///x", "--label", "l")],
)
def test_several_servers_are_wrong_usage(server, second_server, capsys, arguments):
    code = main([*arguments, "--addr", f"{server.addr},{second_server.addr}"])
    assert code == 2
    assert "make a client for each address" in capsys.readouterr().err


def test_the_fake_knows_the_checksum_of_the_standard():
    """The check value of CRC-32C, as RFC 3720 and catalogues of CRCs have it."""
    assert crc32c(b"123456789") == 0xE3069283
