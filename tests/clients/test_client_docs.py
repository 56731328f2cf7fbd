"""The examples of docs/client.md and the README run as they are, here against the server by hand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from penstock.cli.__main__ import main
from penstock.v1 import inference_pb2 as pb
from penstock.v1 import types_pb2

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs" / "client.md", ROOT / "README.md")


def blocks(language):
    """(page and number, source) of each block."""
    for page in PAGES:
        found = re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
        yield from ((f"{page.name}-{i}", source) for i, source in enumerate(found))


PROGRAMS = [pytest.param(source, id=name) for name, source in blocks("python") if "penstock.client" in source]
COMMANDS = [
    line
    for name, source in blocks("sh")
    for line in source.replace("\\\n", " ").splitlines()
    if name.startswith("client") and line.startswith("penstock generate")
]


def text_for(request):
    match request.constraint.WhichOneof("kind"):
        case "json_schema":
            return '{"name": "Mia", "age": 7}'
        case "choice":
            return request.constraint.choice.choices[0]
        case _:
            return "Hello"


def answer(request):
    """A call where a tool is offered and has not answered, else a text; as many outputs as were asked for."""
    turns = request.chat.messages
    reply = pb.GenerateResponse(request_id="r", model="toy")
    for i in range(request.sampling.n or 1):
        output = reply.outputs.add(index=i, token_ids=[5])
        output.finish.reason = types_pb2.FINISH_REASON_EOS
        if request.output.HasField("logprobs"):
            output.logprobs.sampled.append(-0.5)
            output.logprobs.top.add()
        if request.chat.tools and turns[-1].role != "tool":
            output.tool_calls.add(id="c1", name="get_weather", arguments_json='{"city": "Paris"}')
        else:
            output.text = text_for(request)
    return reply


def stream(request):
    whole = answer(request)
    yield pb.StreamResponse(started=pb.StreamStarted(request_id="r", model="toy"))
    for o in whole.outputs:
        delta = pb.OutputDelta(index=o.index, text=o.text, token_ids=o.token_ids, tool_calls=o.tool_calls)
        if o.HasField("logprobs"):
            delta.logprobs.CopyFrom(o.logprobs)
        yield pb.StreamResponse(delta=delta)
        yield pb.StreamResponse(finished=pb.OutputFinished(index=o.index, finish=o.finish))
    yield pb.StreamResponse(summary=pb.StreamSummary())


@pytest.fixture
def demo(server, monkeypatch):
    """Answers where the examples look for the demo model."""
    server.answer = answer
    server.next_replies = lambda request: list(stream(request))
    monkeypatch.setattr("penstock.client.calls.DEFAULT_ADDR", server.addr)
    return server


@pytest.mark.parametrize("source", PROGRAMS)
def test_the_programs_run(demo, source, capsys):
    source = source.replace("127.0.0.1:50051", demo.addr)
    exec(compile(source, "example", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out
    assert demo.calls


def test_there_are_programs_and_commands():
    assert len(PROGRAMS) == 7
    assert len(COMMANDS) == 5


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_run(demo, line, capsys):
    assert main([*shlex.split(line)[1:], "--addr", demo.addr]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip()
    assert shown.err == ""


def test_the_tool_loop_of_the_page_ends_with_the_answer(demo, capsys):
    source = next(source for _, source in blocks("python") if "call.result" in source)
    exec(compile(source, "example", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "Hello\n"
    assert [m.role for m in demo.calls[-1].chat.messages] == ["user", "assistant", "tool"]
    assert (
        demo.calls[-1].chat.messages[2].content
        == '{"city": "Paris", "temperature": 21, "condition": "sunny"}'
    )
