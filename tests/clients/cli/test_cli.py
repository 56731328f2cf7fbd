"""The commands that talk to a server, through main()."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.cli.__main__ import COMMANDS, main
from penstock.cli.calling.common import plain, write
from penstock.client import Client, ImageLimits, Logprobs
from penstock.v1 import control_pb2, inference_pb2, types_pb2

Code = grpc.StatusCode


def run(*argv):
    return main([str(argument) for argument in argv])


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        run("--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for name, line in COMMANDS.items():
        assert f"{name} " in shown
        assert line in " ".join(shown.split())


def test_json_has_no_nan():
    """The first prompt token has no log-probability but NaN, which JSON readers refuse."""
    assert plain(Logprobs((float("nan"), -1.0), ())) == {"sampled": [None, -1.0], "top": []}


@pytest.mark.parametrize(("tty", "shown"), [(True, "a\nb\tc�[2J��d\n"), (False, "a\nb\tc\x1b[2J\x9b\rd\r\n")])
def test_a_model_cannot_rewrite_the_terminal(monkeypatch, tty, shown):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: tty)
    monkeypatch.setattr(sys, "stdout", screen)
    write("a\nb\tc\x1b[2J\x9b\rd\r\n")
    assert screen.getvalue() == shown


def test_no_command_is_wrong_usage(capsys):
    assert run() == 2
    assert "COMMAND" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        run("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("penstock ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        pytest.param(["generate", "--help"], marks=pytest.mark.ci),
        pytest.param(["generate", "p", "--addr", "ADDR"], marks=pytest.mark.ci),
    ],
)
def test_no_command_of_the_client_loads_the_engine(server, arguments):
    """The help that lists all commands does not even load gRPC."""
    arguments = [server.addr if argument == "ADDR" else argument for argument in arguments]
    program = (
        "import sys\n"
        "from penstock.cli.__main__ import main\n"
        "try:\n"
        "    code = main(sys.argv[1:])\n"
        "except SystemExit as error:\n"
        "    code = error.code\n"
        "print('modules:', *sys.modules)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.rpartition("modules:")[2].split())
    assert "penstock.cli.__main__" in loaded
    assert not loaded & {"jax", "transformers", "flax", "numpy", "penstock.runtime", "penstock.service"}
    assert ("grpc" in loaded) == (arguments != ["--help"])


def test_generate_streams_and_sends_what_was_asked(server, capsys):
    flags = ["--max-tokens", 4, "--temperature", 0, "--top-p", 0.5, "--top-k", 3, "--min-p", 0.25]
    flags += ["--seed", 7, "--stop", "A", "--stop", "B"]
    flags += ["--ignore-eos", "--priority", -2, "--cache-salt", "S", "--no-prefix-cache"]
    assert run("generate", "p", "--addr", server.addr, *flags, "--request-id", "r") == 0
    assert capsys.readouterr().out == "Hello\n"
    assert server.calls == [
        inference_pb2.StreamRequest(
            request_id="r",
            prompt="p",
            sampling={"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.25, "seed": 7},  # type: ignore[arg-type]
            stopping={"max_tokens": 4, "stop": ["A", "B"], "ignore_eos": True},  # type: ignore[arg-type]
            priority=-2,
            cache={"cache_salt": "S", "bypass_prefix_cache": True},  # type: ignore[arg-type]
        )
    ]


def test_generate_leaves_unset_what_was_not_given(server):
    run("generate", "p", "--addr", server.addr)
    assert not server.calls[0].HasField("sampling")
    assert not server.calls[0].HasField("cache")
    assert server.calls[0].stopping.ListFields() == [
        (server.calls[0].stopping.DESCRIPTOR.fields_by_name["max_tokens"], 256)
    ]


def test_on_a_terminal_generate_says_how_it_ended(server, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run("generate", "p", "--addr", server.addr) == 0
    ending = "[stop: 4 tokens in 1.50 s, 2.7 tokens/s; 1 of 3 prompt tokens cached]\n"
    assert capsys.readouterr().err == ending


def test_generate_without_stream(server, capsys):
    assert run("generate", "p", "--addr", server.addr, "--no-stream") == 0
    assert capsys.readouterr().out == "Hello\n"
    assert type(server.calls[0]) is inference_pb2.GenerateRequest


@pytest.mark.parametrize("more", [[], ["--no-stream"]])
def test_generate_json(server, capsys, more):
    assert run("generate", "p", "--addr", server.addr, "--json", *more) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["outputs"][0]["text"] == "Hello"
    assert shown["outputs"][0]["finish"] == {"reason": "stop", "stop": "END", "token_id": None, "message": ""}
    assert shown["usage"] == {
        "prompt_tokens": 3,
        "cached_prompt_tokens": 1,
        "completion_tokens": 4,
        "reasoning_tokens": 2,
        "image_tokens": 0,
        "proposed_tokens": 0,
        "accepted_tokens": 0,
    }


@pytest.mark.parametrize(
    ("flags", "turns"),
    [
        (["--chat"], [("user", "p")]),
        (["--system", "be brief"], [("system", "be brief"), ("user", "p")]),
    ],
)
def test_generate_chat(server, flags, turns):
    assert run("generate", "p", "--addr", server.addr, *flags) == 0
    assert [(m.role, m.content) for m in server.calls[0].chat.messages] == turns


@pytest.mark.parametrize("prompt", [[], ["-"]])
def test_generate_reads_stdin(server, monkeypatch, prompt):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert run("generate", *prompt, "--addr", server.addr) == 0
    assert server.calls[0].prompt == "from a pipe"


def test_info(server, capsys):
    assert run("info", "--addr", server.addr) == 0
    shown = capsys.readouterr().out
    for line in (
        "  name               toy",
        "  sampling           temperature 0, top_k 20",
        "  KV cache           100 pages of 16 tokens",
        "  KV cache           7 of 100 pages used",
        "  speculation        lookup, up to 4 tokens in a step",
        "  state              paused",
        "  devices            cpu:0",
        "  features           chat, feature_42",
        "  template reads     none",
        "  images             none are taken",
        "  request            8 MiB at most",
        "  adapters           4 on the device, 64 in memory, rank 16 at most, also of experts",
        "  adapters           3 on the device",
    ):
        assert line in shown.splitlines()


def test_info_shows_defaults_that_have_an_effect(server, capsys):
    server.default_sampling = types_pb2.SamplingParams(
        temperature=0.7, top_p=1, min_p=0, presence_penalty=0.5, frequency_penalty=0, repetition_penalty=1.1,
        n=1, logit_bias={7: -1.5}, bad_words=["no"], allowed_token_ids=range(9),
    )  # fmt: skip
    assert run("info", "--addr", server.addr) == 0
    assert (
        "  sampling           temperature 0.7, presence_penalty 0.5, repetition_penalty 1.1, "
        "logit_bias 7=-1.5, bad_words 'no', allowed_token_ids (9 of them)"
    ) in capsys.readouterr().out.splitlines()


def test_info_tells_the_limits_of_images(server, capsys):
    limits = control_pb2.ImageLimits(
        max_images=4,
        max_image_bytes=5 << 20,
        max_image_pixels=2_500_000,
        media_types=["image/png"],
        image_token_id=7,
    )
    server.model_info = control_pb2.GetModelInfoResponse(image_limits=limits)
    assert run("info", "--addr", server.addr) == 0
    told = "  images             4 per request, each of 5 MiB and 2.5 million pixels at most"
    assert told in capsys.readouterr().out.splitlines()
    with Client(server.addr) as client:
        assert client.model_info().image_limits == ImageLimits(4, 5 << 20, 2_500_000, ("image/png",), 7)
        assert client.server_info().max_request_bytes == 8 << 20


@pytest.mark.parametrize(("ready", "state"), [(True, "serving"), (False, "not ready")])
def test_info_says_whether_it_serves(server, capsys, ready, state):
    server.paused = False
    server.set_health(ready)
    assert run("info", "--addr", server.addr) == 0
    assert f"  state              {state}" in capsys.readouterr().out.splitlines()


def test_info_json(server, capsys):
    assert run("info", "--addr", server.addr, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"]["default_sampling"]["top_k"] == 20
    assert shown["server"]["instance_id"] == "i-1"
    assert shown["ready"] is True
    assert shown["load"]["weights"] == {"label": "step-1", "generation": 1}


FAILURES = [
    ((Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG"), "shorten the prompt"),
    ((Code.UNAVAILABLE, "NOT_READY"), "still loading; try again"),
    ((Code.UNAVAILABLE, "DRAINING"), "shutting down"),
    ((Code.UNAVAILABLE, "A_REASON_OF_TOMORROW"), "is not available now (A_REASON_OF_TOMORROW): no"),
    ((Code.UNIMPLEMENTED, "UNSUPPORTED_FEATURE"), "cannot do that"),
    ((Code.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"), "choose another --request-id"),
    ((Code.DEADLINE_EXCEEDED, ""), "allow more time with --timeout"),
    ((Code.INTERNAL, ""), "the server failed (INTERNAL): no; its log says more"),
    ((Code.NOT_FOUND, "UNKNOWN_MODEL"), "the server refused (UNKNOWN_MODEL): no"),
]


@pytest.mark.parametrize(("status", "hint"), FAILURES)
@pytest.mark.parametrize("command", [["generate", "p"], ["info"], ["bench"]])
def test_a_refusal_is_one_line_that_helps(server, failure, capsys, command, status, hint):
    server.failure = failure(*status)
    assert run(*command, "--addr", server.addr) == 1
    shown = capsys.readouterr()
    assert hint in shown.err
    assert shown.err.startswith(f"penstock {command[0]}: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_violations_are_all_named(server, failure, capsys):
    violations = [("sampling.top_p", "is 2"), ("stopping.min_tokens", "is 9")]
    server.failure = failure(Code.INVALID_ARGUMENT, "INVALID_FIELD", violations=violations)
    assert run("generate", "p", "--addr", server.addr) == 1
    assert "sampling.top_p: is 2; stopping.min_tokens: is 9" in capsys.readouterr().err


def test_a_full_queue_says_when(server, failure, capsys):
    server.failure = failure(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=Duration(seconds=3))
    assert run("generate", "p", "--addr", server.addr) == 1
    assert "try again in 3 s" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "p"], ["info"], ["bench"], ["chat"]])
def test_no_server_is_one_line_that_helps(capsys, monkeypatch, command):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert run(*command, "--addr", "127.0.0.1:1") == 1
    shown = capsys.readouterr().err
    assert "no server at 127.0.0.1:1" in shown
    assert "penstock serve demo" in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("addr", ["no host", "nohost.invalid:5"])
def test_an_address_that_cannot_be_resolved_is_not_called_a_broken_connection(capsys, addr):
    assert run("generate", "p", "--addr", addr) == 1
    shown = capsys.readouterr().err
    assert f"the address {addr} cannot be resolved" in shown
    assert "]" not in shown


def test_a_failure_midway_shows_the_half_and_the_reason(server, failure, capsys):
    server.replies = server.replies[:2]
    server.stream_failure = failure(Code.INTERNAL, "", "the engine died")
    assert run("generate", "p", "--addr", server.addr) == 1
    shown = capsys.readouterr()
    assert shown.out == "Hel\n"
    assert "the engine died" in shown.err


def test_a_connection_that_breaks_is_not_called_a_missing_server(server, failure, capsys):
    server.stream_failure = failure(Code.UNAVAILABLE, "", "Stream removed (recvmsg: reset by peer)")
    assert run("generate", "p", "--addr", server.addr) == 1
    assert f"the connection to {server.addr} broke" in capsys.readouterr().err


def test_ctrl_c_ends_generate_on_the_server_too(server):
    server.hold_after = 2
    command = [sys.executable, "-m", "penstock.cli", "generate", "p", "--addr", server.addr]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.read(3) == "Hel"
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=60)
    assert (program.returncode, out, err) == (130, "\n", "")
    assert server.cancelled.wait(30)


def test_a_closed_pipe_is_no_traceback(server):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "penstock.cli", "generate", "p", "--addr", server.addr]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
