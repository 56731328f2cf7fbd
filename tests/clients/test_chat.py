"""`penstock chat`, line by line from a pipe, and Ctrl-C in a real process."""

from __future__ import annotations

import io
import signal
import subprocess
import sys

import grpc
import pytest

from penstock.cli.__main__ import main


@pytest.fixture
def chat(server, monkeypatch):
    """Run a whole conversation; returns the exit code and the turns of each request."""

    def run(lines, *flags):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = main(["chat", "--addr", server.addr, *flags])
        return code, [[(m.role, m.content) for m in call.chat.messages] for call in server.calls]

    return run


def test_each_answer_is_asked_for_with_the_conversation_so_far(chat, capsys):
    code, asked = chat("hi\n\nmore\n")
    assert code == 0
    assert asked == [
        [("user", "hi")],
        [("user", "hi"), ("assistant", "Hello"), ("user", "more")],
    ]
    assert capsys.readouterr().out == "Hello\nHello\n"


def test_reset_forgets(chat):
    _, asked = chat("hi\n/reset\nmore\n", "--system", "be brief")
    assert asked == [
        [("system", "be brief"), ("user", "hi")],
        [("system", "be brief"), ("user", "more")],
    ]


def test_system_starts_over(chat):
    _, asked = chat("hi\n/system be long\nmore\n/system\nlast\n")
    assert asked == [[("user", "hi")], [("system", "be long"), ("user", "more")], [("user", "last")]]


@pytest.mark.parametrize("word", ["/quit", "/exit"])
def test_quit(chat, word):
    assert chat(f"hi\n{word}\nnever\n") == (0, [[("user", "hi")]])


def test_commands_are_no_questions(chat, capsys):
    assert chat("/help\n/nonsense\n") == (0, [])
    shown = capsys.readouterr().out
    assert "/reset" in shown
    assert "no command /nonsense" in shown


def test_sampling_flags_go_with_every_question(chat, server):
    chat("hi\nmore\n", "--temperature", "0", "--max-tokens", "9")
    assert [(c.sampling.temperature, c.stopping.max_tokens) for c in server.calls] == [(0.0, 9)] * 2


def test_priority_and_cache_flags_go_with_every_question(chat, server):
    chat("hi\nmore\n", "--priority", "3", "--cache-salt", "me", "--no-prefix-cache")
    asked = [(c.priority, c.cache.cache_salt, c.cache.bypass_prefix_cache) for c in server.calls]
    assert asked == [(3, "me", True)] * 2


def test_a_refused_question_leaves_no_trace_but_the_exit_code(chat, server, failure, capsys):
    server.failure = failure(grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "too long")
    server.failing_calls = 1
    assert chat("hi\nmore\n") == (1, [[("user", "hi")], [("user", "more")]])
    shown = capsys.readouterr()
    assert shown.out == "Hello\n"
    assert "too long; shorten the prompt" in shown.err


def test_a_server_that_goes_away_ends_the_chat(chat, server, failure):
    server.failure = failure(grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert chat("hi\nnever\n") == (1, [[("user", "hi")]])


def test_ctrl_c_stops_the_answer_and_not_the_program(server):
    server.hold_after = 2
    command = [sys.executable, "-m", "penstock.cli", "chat", "--addr", server.addr]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as program:  # type: ignore[call-overload]
        program.stdin.write("hi\n")
        program.stdin.flush()
        assert program.stdout.read(3) == "Hel"
        program.send_signal(signal.SIGINT)
        assert server.cancelled.wait(60)
        assert program.stdout.readline() == " [stopped]\n"
        server.hold_after = None
        out, err = program.communicate("more\n", timeout=60)
    assert (program.returncode, out, err) == (0, "Hello\n", "")
    assert [(m.role, m.content) for m in server.calls[1].chat.messages] == [
        ("user", "hi"),
        ("assistant", "Hel"),
        ("user", "more"),
    ]
