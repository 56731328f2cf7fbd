"""Wrong usage, missing parts and hostile texts: what each command says, in one line where that is enough."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import grpc
import pytest

from penstock.cli.__main__ import COMMANDS, main
from penstock.cli.calling.screen import complain, print_json, visible
from penstock.v1 import types_pb2

Code = grpc.StatusCode
EVIL = "a\x1b]0;owned\x07\x1b[2J\x9b1A\rb\nsecond\u202eline\x7f"
SHOWN = r"a\x1b]0;owned\x07\x1b[2J\x9b1A\rb\nsecond\u202eline\x7f"


def run(*argv):
    return main([str(argument) for argument in argv])


def wrong(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        run(*argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


ARGUMENTS = {
    "adapters": ["list"],
    "rerank": ["q"],
    "batch": ["in.jsonl", "out.jsonl"],
    "generate": ["p"],
    "serve": ["demo"],
    "check": ["demo"],
    "plan": ["demo"],
    "compile": ["demo", "--for", "cpu", "--out", "x"],
    "quantize": ["demo", "x"],
    "keys": ["list", "--file", "x"],
    "usage": ["x"],
    "push-weights": ["x", "--label", "l"],
    "commit-weights": ["x"],
    "discard-weights": ["x"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_is_told_with_the_usage_of_its_command(capsys, command):
    shown = wrong(capsys, command, *ARGUMENTS.get(command, []), "--frobnicate")
    assert shown.startswith(f"usage: penstock {command} ")
    assert f"penstock {command}: error: unrecognized arguments: --frobnicate" in shown


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "p", "--temperatur", "1"],
        ["generate", "p", "--add", "a:1"],
        ["chat", "--syst", "x"],
        ["info", "--js"],
        ["bench", "--request", "1"],
        ["demo", "--por", "70000"],
        ["serve", "demo", "--por", "70000"],
        ["keys", "list", "--fil", "x"],
    ],
    ids=" ".join,
)
def test_flags_cannot_be_abbreviated(capsys, argv):
    """The ports are invalid, so that nothing starts even if a flag were accepted."""
    flag = next(argument for argument in argv if argument.startswith("--"))
    shown = wrong(capsys, *argv)
    assert (
        f"unrecognized arguments: {flag}" in shown or "the following arguments are required: --file" in shown
    )


def test_a_flag_before_the_command(capsys):
    assert "unrecognized arguments: --frobnicate" in wrong(capsys, "--frobnicate")


WRONG_BENCH = [
    (["--requests", "abc"], "argument --requests: must be a whole number, not 'abc'"),
    (["--requests", "0"], "argument --requests: must be 1 or more, not 0"),
    (["--concurrency", "1.5"], "argument --concurrency: must be a whole number, not '1.5'"),
    (["--request-rate", "x"], "argument --request-rate: must be a number, not 'x'"),
    (["--request-rate", "nan"], "argument --request-rate: must be above 0, not nan"),
    (["--request-rate", "inf"], "argument --request-rate: must be above 0, not inf"),
    (["--temperature", "nan"], "argument --temperature: must be at least 0 and at most 100, not nan"),
    (["--seed", "-1"], "argument --seed: must be 0 or more, not -1"),
    (["--warmup", "-1"], "argument --warmup: must be 0 or more, not -1"),
    (["--prompt-tokens", "0"], "argument --prompt-tokens: must be 1 or more"),
    (["--max-tokens", "x"], "argument --max-tokens: must be a whole number"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG_BENCH, ids=lambda value: str(value))
def test_bench_says_what_is_wrong_with_a_value(capsys, flags, message):
    assert message in wrong(capsys, "bench", *flags)


@pytest.mark.ci
@pytest.mark.parametrize("command", [["generate"], ["chat"]], ids=lambda command: command[0])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_stdin_that_is_no_text(server, command, locale):
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", *command, "--addr", server.addr],
        input=b"abc \xff\xfe def\n",
        capture_output=True,
        timeout=120,
        env={
            "LC_ALL": locale,
            "PYTHONPATH": ":".join(sys.path),
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
        },
        check=False,
    )
    err = done.stderr.decode()
    assert (done.returncode, done.stdout) == (2, b"")
    assert err.startswith(f"penstock {command[0]}: stdin is not UTF-8 text")
    assert err.count("\n") == 1
    assert not server.calls


MISSING = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in sys.argv[1].split(",")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
from penstock.cli.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("lacking", "argv", "needs", "install"),
    [
        ("penstock.server_cli", ["serve", "demo"], "engine", "penstock too"),
        *(
            pytest.param("penstock.server_cli", command, "engine", "penstock too", marks=pytest.mark.ci)
            for command in (["demo"], ["keys", "list"], ["usage", "file"])
        ),
        pytest.param("jax", ["serve", "demo"], "Python module jax", "penstock again", marks=pytest.mark.ci),
        pytest.param(
            "opentelemetry",
            ["serve", "demo"],
            "Python module opentelemetry",
            "penstock again",
            marks=pytest.mark.ci,
        ),
        ("tqdm", ["bench"], "Python module tqdm", "penstock-client again"),
    ],
)
def test_a_command_says_what_to_install_where_something_is_missing(lacking, argv, needs, install):
    done = subprocess.run(
        [sys.executable, "-c", MISSING, lacking, *argv],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"penstock {argv[0]}: it needs the {needs}, which is not installed here. ")
    assert (
        f"Install the distribution {install}, from a clone of Penstock (pip install ./clients/python .)"
        in done.stderr
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.ci
def test_client_commands_need_no_engine(server):
    lacking = "jax,transformers,flax,opentelemetry,tqdm,llguidance,numpy"
    done = subprocess.run(
        [sys.executable, "-c", MISSING, lacking, "generate", "p", "--addr", server.addr],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "Hello\n"), done.stderr


def test_what_is_shown_of_control_characters(capsys):
    assert visible(EVIL) == SHOWN
    assert visible("tab\tand ümlaut 文") == "tab\tand ümlaut 文"
    complain("x", EVIL)
    assert capsys.readouterr().err == f"penstock x: {SHOWN}\n"
    print_json({"a": EVIL})
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"a": EVIL}
    assert shown.count("\n") == 3
    assert shown.replace("\n", "").isprintable()


@pytest.mark.parametrize("command", [["generate", "p"], ["info"], ["chat"], ["bench"]], ids=lambda c: c[0])
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (Code.INTERNAL, ""),
        (Code.UNAVAILABLE, ""),
        (Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        (Code.NOT_FOUND, EVIL),
    ],
    ids=str,
)
def test_errors_of_a_server_cannot_rewrite_the_terminal(
    server, failure, capsys, monkeypatch, command, code, reason
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    violations = [(EVIL, EVIL)] if reason == "INVALID_FIELD" else []
    server.failure = failure(code, reason, EVIL, violations=violations, request_id=EVIL)
    assert run(*command, "--addr", server.addr) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown[:-1].isprintable()
    assert r"\x1b]0;owned" in shown


def test_what_a_server_says_of_itself_cannot_rewrite_the_terminal(server, capsys):
    server.default_sampling = types_pb2.SamplingParams(bad_words=[EVIL])
    server.name = EVIL
    assert run("info", "--addr", server.addr) == 0
    shown = capsys.readouterr().out
    assert f"  name               {SHOWN}\n" in shown
    assert shown.replace("\n", "").isprintable()
    assert run("info", "--json", "--addr", server.addr) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown)["model"]["model"] == EVIL
    assert shown.replace("\n", "").isprintable()


def test_the_greeting_of_a_chat_cannot_rewrite_the_terminal(server, capsys, monkeypatch):
    server.name = EVIL
    screen = io.StringIO("/quit\n")
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", screen)
    assert run("chat", "--addr", server.addr) == 0
    assert f"{SHOWN} at {server.addr}" in capsys.readouterr().out


def test_the_report_of_bench_cannot_rewrite_the_terminal(server, failure, capsys):
    server.stream_failure = failure(Code.INTERNAL, "", EVIL)
    assert run("bench", "--addr", server.addr, "--requests", 1, "--prompt-tokens", 3, "--max-tokens", 4) == 1
    assert capsys.readouterr().out.replace("\n", "").isprintable()
