"""`penstock rerank`, through main()."""

from __future__ import annotations

import io
import json
import sys

from penstock.cli.__main__ import main
from penstock.v1 import inference_pb2, types_pb2

RANKING = inference_pb2.RerankResponse(
    results=[
        inference_pb2.RankedDocument(index=1, relevance=0.5),
        inference_pb2.RankedDocument(index=0, relevance=0.25),
    ]
)
LINES = [
    {"index": 1, "relevance": 0.5, "document": "two words"},
    {"index": 0, "relevance": 0.25, "document": "one"},
]


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_most_relevant_documents_come_first(server, capsys):
    server.ranking = RANKING
    flags = ["--method", "yes_no", "--top", "2", "--instruction", "i", "--max-document-tokens", "9"]
    assert main(["rerank", "q", "one", "two words", "--addr", server.addr, *flags]) == 0
    assert lines(capsys) == LINES
    assert server.calls == [
        inference_pb2.RerankRequest(
            query="q",
            documents=["one", "two words"],
            method=types_pb2.RERANK_METHOD_YES_NO,
            top_n=2,
            instruction="i",
            max_document_tokens=9,
        )
    ]


def test_the_lines_of_stdin_are_documents(server, capsys, monkeypatch):
    server.ranking = RANKING
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\r\n\ntwo words\n"))
    assert main(["rerank", "q", "--addr", server.addr]) == 0
    assert lines(capsys) == LINES


def test_what_cannot_be_sent_is_told(server, capsys, monkeypatch):
    assert main(["rerank", "q", "a", "--top", "-1", "--addr", server.addr]) == 1
    assert "top_n" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["rerank", "q", "--addr", server.addr]) == 2
    assert "give documents" in capsys.readouterr().err
