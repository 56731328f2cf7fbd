"""`penstock embed`, through main()."""

from __future__ import annotations

import io
import json
import struct
import sys

import pytest

from penstock.cli.__main__ import main
from penstock.cli.commands.embed import AT_ONCE
from penstock.v1 import inference_pb2, types_pb2


def vectors(count):
    values = [struct.pack("<2f", i, -1) for i in range(count)]
    return inference_pb2.EmbedResponse(
        embeddings=[inference_pb2.Embedding(values=value, token_count=3) for value in values]
    )


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_each_text_is_a_line_of_json(server, capsys):
    server.embeddings = vectors(2)
    flags = ["--pooling", "mean", "--dimensions", "2", "--no-normalize", "--truncation", "left"]
    assert main(["embed", "one", "two words", "--addr", server.addr, *flags]) == 0
    assert lines(capsys) == [
        {"index": 0, "tokens": 3, "embedding": [0, -1]},
        {"index": 1, "tokens": 3, "embedding": [1, -1]},
    ]
    assert server.calls == [
        inference_pb2.EmbedRequest(
            inputs=[inference_pb2.EmbedInput(text=text) for text in ("one", "two words")],
            pooling=types_pb2.POOLING_MEAN,
            normalize=False,
            dimensions=2,
            truncation=types_pb2.TRUNCATION_LEFT,
        )
    ]


def test_the_lines_of_stdin_are_sent_in_parts(server, capsys, monkeypatch):
    server.embeddings = vectors(AT_ONCE)
    text = "".join(f"line {i}\r\n\n" for i in range(2 * AT_ONCE))
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["embed", "--addr", server.addr]) == 0
    assert [line["index"] for line in lines(capsys)] == list(range(2 * AT_ONCE))
    assert [one.inputs[0].text for one in server.calls] == ["line 0", f"line {AT_ONCE}"]


def test_what_cannot_be_sent_is_told(server, capsys, monkeypatch):
    assert main(["embed", "a", "--dimensions", "-1", "--addr", server.addr]) == 1
    assert "dimensions" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["embed", "--addr", server.addr]) == 2
    assert "give a text" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["embed", "a", "--pooling", "median"])
