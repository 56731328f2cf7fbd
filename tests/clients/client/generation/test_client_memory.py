"""What kept events hold: the text of each delta once, wherever it stands in the answer."""

from __future__ import annotations

import pickle

import pytest

from penstock.client import AsyncClient, Client, Delta
from penstock.v1 import inference_pb2

PIECE = "word of text "


def replies(count):
    event, delta = inference_pb2.StreamResponse, inference_pb2.OutputDelta
    yield event(started=inference_pb2.StreamStarted(request_id="r"))
    for i in range(count):
        yield event(delta=delta(text=PIECE, token_ids=[i], reasoning="hm "))
    yield event(finished=inference_pb2.OutputFinished())
    yield event(summary=inference_pb2.StreamSummary())


def held(events):
    """Bytes of everything that the deltas hold. They are pickled one by one, so that shared parts count for
    each.
    """
    return sum(len(pickle.dumps(event)) for event in events if isinstance(event, Delta))


def check(few, many, stream):
    assert sum(isinstance(event, Delta) for event in many) == 2000
    assert held(many) / held(few) == pytest.approx(
        10, rel=0.2
    )  # of ten times as many deltas; if each repeated all text, it would be 100 times as much
    assert stream.text() == PIECE * 2000
    assert stream.reasoning() == "hm " * 2000
    assert stream.result().text == PIECE * 2000


def test_events_hold_their_own_text_only(server):
    with Client(server.addr) as client:
        server.next_replies = lambda request: list(replies(200))
        few = list(client.stream("p"))
        server.next_replies = lambda request: list(replies(2000))
        stream = client.stream("p")
        check(few, list(stream), stream)


async def test_events_hold_their_own_text_only_async(server):
    async with AsyncClient(server.addr) as client:
        server.next_replies = lambda request: list(replies(200))
        few = [event async for event in client.stream("p")]
        server.next_replies = lambda request: list(replies(2000))
        stream = client.stream("p")
        many = [event async for event in stream]
        sync_view = type("View", (), {})()
        sync_view.text, sync_view.reasoning = stream.text, stream.reasoning
        whole = await stream.result()
        sync_view.result = lambda: whole
        check(few, many, sync_view)
