"""`penstock classify`, through main()."""

from __future__ import annotations

import io
import json
import sys

from penstock.cli.__main__ import main
from penstock.v1 import inference_pb2, types_pb2


def test_a_line_for_each_text(server, capsys, monkeypatch):
    likely = inference_pb2.Classification(logits=[1, 2], probabilities=[0.25, 0.75], label="good")
    server.classes = inference_pb2.ClassifyResponse(labels=["bad", "good"], results=[likely] * 2)
    flags = ["--truncation", "left", "--model", "m"]
    assert main(["classify", "one", "two words", "--addr", server.addr, *flags]) == 0
    made = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    line = {"label": "good", "classes": {"bad": 0.25, "good": 0.75}}
    assert made == [{"index": 0, **line}, {"index": 1, **line}]
    texts = [inference_pb2.ClassifyInput(text=text) for text in ("one", "two words")]
    request = inference_pb2.ClassifyRequest(inputs=texts, truncation=types_pb2.TRUNCATION_LEFT, model="m")
    assert server.calls == [request]
    number = inference_pb2.Classification(logits=[1.5])
    server.classes = inference_pb2.ClassifyResponse(labels=["LABEL_0"], results=[number])
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    assert main(["classify", "--addr", server.addr]) == 0
    assert json.loads(capsys.readouterr().out) == {"index": 0, "label": "", "classes": {"LABEL_0": 1.5}}
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["classify", "--addr", server.addr]) == 2
    assert "give a text" in capsys.readouterr().err
