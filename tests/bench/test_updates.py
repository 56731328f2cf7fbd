"""The benchmark of weight updates: it sends what the checkpoint has, and its figures are what they say."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from bench.checkpoint import SHAPES, Shape, write_checkpoint
from bench.probes import drop_server, pusher
from bench.probes.updates import Streams, table
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.v1 import types_pb2

WIDE = Shape(1024, 128, 1, 4, 2, 64, 2048, 300, 64)
"""Its embeddings are two chunks."""


def test_the_messages_are_the_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, WIDE)
    entries = find_tensors(tmp_path)
    first, *chunks, last = pusher.messages(entries, update_id="u", version_label="l", stage_only=True)
    assert (first.begin.update_id, first.begin.version_label, first.begin.stage_only) == ("u", "l", True)
    found = [b""] * len(entries)
    for message in chunks:
        assert message.chunk.offset == len(found[message.chunk.tensor_index])
        assert len(message.chunk.data) <= pusher.CHUNK_BYTES
        found[message.chunk.tensor_index] += message.chunk.data
    assert len(chunks) > len(entries), "one tensor at least is more than a chunk"
    for spec, data, (name, entry) in zip(first.begin.manifest.tensors, found, entries.items(), strict=True):
        assert (spec.name, tuple(spec.shape)) == (name, entry.shape)
        assert data == np.asarray(entry.map()).tobytes()
    assert last.commit.total_bytes == sum(map(len, found))


async def test_the_server_to_compare_with_takes_every_message(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SHAPES["tiny"])
    entries = find_tensors(tmp_path)

    async def messages() -> AsyncIterator[pusher.Message]:
        for message in pusher.messages(entries, update_id="u", version_label="l"):
            yield message

    reply = await drop_server.drop(messages(), None)
    assert reply.bytes_received == sum(entry.num_bytes for entry in entries.values())


def test_a_rate_counts_the_tokens_of_its_time() -> None:
    streams = Streams(None, count=0, vocab=10, max_tokens=5)
    streams.arrivals += [(1.0, 5), (2.0, 3), (2.9, 4), (3.0, 100)]
    assert streams.rate(2.0, 3.0) == 7.0
    assert streams.rate(1.0, 3.0) == 6.0
    streams.stop()


def test_streams_begin_again_until_they_are_stopped() -> None:
    """The stub ends each stream after two messages of three tokens."""
    enough = threading.Event()
    asked: list[types_pb2.TokenIds] = []

    class Call(list[object]):
        def cancel(self) -> None:
            pass

    class Delta:
        token_ids = (1, 2, 3)

    class Message:
        delta = Delta()

        def HasField(self, name: str) -> bool:
            return name == "delta"

    class Stub:
        def Stream(self, request: object) -> Call:
            asked.append(request.prompt_token_ids)  # type: ignore[attr-defined]  # it is a StreamRequest
            if len(asked) >= 6:
                enough.set()
            return Call([Message(), Message()])

    streams = Streams(Stub(), count=2, vocab=10, max_tokens=5)
    assert enough.wait(60)
    streams.stop()
    assert len({tuple(ids.ids) for ids in asked}) == 2, "each has its own prompt"
    assert sum(count for _, count in streams.arrivals) >= 5 * 6


def test_the_table_has_medians() -> None:
    told = table([{"a": 3.0, "b": 10.0}, {"a": 1.0, "b": 30.0}, {"a": 2.0, "b": 20.0}])
    assert told.splitlines()[2:] == ["| a | 2.0 | 3.0, 1.0, 2.0 |", "| b | 20.0 | 10.0, 30.0, 20.0 |"]
