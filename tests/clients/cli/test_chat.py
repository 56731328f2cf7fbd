"""`penstock chat`, line by line from a pipe, and Ctrl-C in a real process."""

from __future__ import annotations

import io
import signal
import subprocess
import sys

import grpc
import pytest
from google.protobuf import text_format

from penstock.cli.__main__ import main
from penstock.v1 import inference_pb2
from tests.clients import rich


@pytest.fixture
def chat(server, monkeypatch):
    """Run a whole conversation. Returns the exit code and the turns of each request."""

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


def test_images_go_with_the_next_question_and_stay_in_the_conversation(chat, server, tmp_path, capsys):
    for name in ("a", "b c", "d"):
        (tmp_path / name).write_bytes(name.encode())
    second = f"/image {tmp_path}/b c\n/image {tmp_path}/none\n/image\ntwo\n"
    lines = f"one\n{second}/image {tmp_path}/d\n/reset\nthree\n"
    assert chat(lines, "--image", str(tmp_path / "a"))[0] == 0
    said = [
        [[p.image.data or p.text for p in m.parts] or m.content for m in call.chat.messages]
        for call in server.calls
    ]
    assert said == [
        [[b"a", "one"]],
        [[b"a", "one"], "Hello", [b"b c", "two"]],
        ["three"],
    ]
    told = capsys.readouterr().out
    assert f"cannot read {tmp_path}/none: No such file" in told
    assert "/image needs the name of a file" in told


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
    server.failing_calls = {1}
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


TOOLS = '[{"name": "get_weather", "parameters": {"type": "object"}}]'
CALL = 'tool_calls { id: "%s" name: "get_weather" arguments_json: "{\\"city\\": \\"%s\\"}" }'


def stream_of(*deltas):
    ends = ["finished { finish { reason: FINISH_REASON_EOS } }", "summary {}"]
    return [
        text_format.Parse(message, inference_pb2.StreamResponse())
        for message in ("started {}", *(f"delta {{ {delta} }}" for delta in deltas), *ends)
    ]


@pytest.fixture
def scripted(server):
    """Make a server that answers each request with the next stream of the script."""

    def script(*streams):
        left = iter(streams)
        server.next_replies = lambda request: next(left)

    return script


def test_a_call_is_shown_and_answered(chat, server, scripted, capsys):
    scripted(stream_of('text: "Let me see."', CALL % ("c1", "Oslo")), stream_of('text: "It is cold."'))
    code, asked = chat("weather?\n/result 3 degrees\n", "--tools", TOOLS, "--tool-choice", "required")
    assert code == 0
    assert asked[1] == [("user", "weather?"), ("assistant", "Let me see."), ("tool", "3 degrees")]
    assert capsys.readouterr().out == ('Let me see.\ntool call: get_weather {"city": "Oslo"}\nIt is cold.\n')
    first, second = (call.chat for call in server.calls)
    assert (first.tools[0].name, first.tool_choice) == ("get_weather", "required")
    assert (second.tools[0].name, second.tool_choice) == ("get_weather", "")  # the server may answer now
    assert second.messages[1].tool_calls[0].id == second.messages[2].tool_call_id == "c1"


def test_the_model_goes_on_with_the_result_of_its_last_call(chat, server, scripted, capsys):
    scripted(stream_of(CALL % ("c1", "Oslo"), CALL % ("c2", "Rome")), stream_of('text: "done"'))
    chat("weather?\n/result 3\n/result 20\n/result 9\n", "--tools", TOOLS)
    assert [(m.role, m.content, m.tool_call_id) for m in server.calls[1].chat.messages[2:]] == [
        ("tool", "3", "c1"),
        ("tool", "20", "c2"),
    ]
    assert len(server.calls) == 2
    assert capsys.readouterr().out.splitlines() == [
        'tool call: get_weather {"city": "Oslo"}',
        'tool call: get_weather {"city": "Rome"}',
        'next: tool call: get_weather {"city": "Rome"}',
        "done",
        "no tool call is waiting for a result",
    ]


def test_a_question_takes_the_results_so_far_along(chat, scripted):
    scripted(stream_of(CALL % ("c1", "Oslo"), CALL % ("c2", "Rome")), stream_of('text: "well"'))
    _, asked = chat("weather?\n/result 3\nnever mind Rome\n", "--tools", TOOLS)
    assert asked[1] == [("user", "weather?"), ("assistant", ""), ("tool", "3"), ("user", "never mind Rome")]


def test_a_refused_result_can_be_given_again(chat, server, scripted, failure, capsys):
    scripted(stream_of(CALL % ("c1", "Oslo")), stream_of('text: "well"'))
    server.failure = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    server.failing_calls = {2}
    code, asked = chat("weather?\n/result 3\n/result 3\n", "--tools", TOOLS)
    assert code == 1
    assert asked[1] == asked[2]
    assert capsys.readouterr().out.endswith("well\n")


def test_reset_drops_calls_that_wait(chat, scripted, capsys):
    scripted(stream_of(CALL % ("c1", "Oslo")))
    chat("weather?\n/reset\n/result 3\n", "--tools", TOOLS)
    assert "no tool call is waiting" in capsys.readouterr().out


def test_several_outputs_are_numbered_and_the_first_goes_on(chat, server, capsys):
    server.replies = rich.STREAM
    _, asked = chat("hi\nmore\n", "--n", "2")
    assert [call.sampling.n for call in server.calls] == [2, 2]
    assert asked[1] == [("user", "hi"), ("assistant", "Let me see."), ("user", "more")]
    assert capsys.readouterr().out.startswith(
        '--- output 0 ---\nLet me see.\ntool call: get_weather {"city": "Oslo"}\n--- output 1 ---\nNo idea\n'
    )


def test_on_a_terminal_reasoning_is_dimmed_and_an_early_end_is_told(chat, server, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", screen)
    server.replies = [
        *stream_of('reasoning: "Hm\\n"', 'text: "Well"')[:-2],
        text_format.Parse(
            "finished { finish { reason: FINISH_REASON_MAX_TOKENS } }", inference_pb2.StreamResponse()
        ),
        inference_pb2.StreamResponse(summary=inference_pb2.StreamSummary()),
    ]
    chat("hi\n")
    assert screen.getvalue() == "\x1b[2mHm\n\x1b[22mWell\n[max_tokens]\n"


def test_template_flags_go_with_every_question(chat, server, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    chat("hi\n", "--chat-template", str(template), "--template-options", '{"enable_thinking": false}')
    asked = server.calls[0].chat
    assert asked.chat_template == "{{ messages }}"
    assert asked.template_options_json == '{"enable_thinking": false}'


def test_flags_that_do_not_fit_are_told_before_anything_is_asked(chat, capsys):
    assert chat("hi\n", "--tool-choice", "required") == (2, [])
    assert "--tool-choice required needs --tools" in capsys.readouterr().err
