"""The vocabulary is fetched once for as long as the same server runs, and shows the tokens of answers."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.client import ProtocolError, ServerInfo
from penstock.client import Vocabulary as Told
from penstock.openai.backend import CHECK_S, Vocabularies
from penstock.openai.calls import Call
from tests.service.openai.rig import front_rig
from tests.service.rig import fake

A, B = Told((b"a", b"b"), frozenset({1}), True, 0), Told((b"x",), frozenset(), True, 1)


def call(key: str = "") -> Call:
    metadata = (("authorization", key),) if key else ()
    return Call(request_id="r", number="1", metadata=metadata, created=0, timeout=None)


class Server:
    """Answers as a client does whose server has this vocabulary, and counts what is asked."""

    def __init__(self) -> None:
        self.instance, self.told = "one", A
        self.failures: list[Exception] = []
        self.asked: list[str] = []
        self.now = 0.0
        self.known = Vocabularies(self, lambda: self.now)  # type: ignore[arg-type]  # what it needs of a client

    async def server_info(self, **options: Any) -> ServerInfo:
        self.asked.append("instance")
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop()
        return ServerInfo("1", self.instance, 4, 1, 1, 16, 1, 1, 1, ())

    async def vocabulary(self, **options: Any) -> Told:
        self.asked.append("vocabulary")
        await asyncio.sleep(0)
        return self.told

    def taken(self) -> list[str]:
        """Return what was asked since the last look."""
        asked, self.asked = self.asked, []
        return asked


async def test_requests_that_come_together_ask_once() -> None:
    server = Server()
    found = await asyncio.gather(*(server.known.of(call()) for _ in range(10)))
    assert server.taken() == ["instance", "vocabulary"]
    assert (found[0].bytes_of(1), found[0].bytes_of(2)) == (b"b", b"")
    assert found[0].special_token_ids == {1}
    assert all(one is found[0] for one in found)


async def test_it_is_fetched_again_when_another_server_answers() -> None:
    server = Server()
    first = await server.known.of(call())
    server.now += CHECK_S - 1
    assert await server.known.of(call()) is first
    assert server.taken() == ["instance", "vocabulary"]
    server.now += 1
    assert await server.known.of(call()) is first
    assert server.taken() == ["instance"], "the same server runs"
    server.instance, server.told = "two", B
    server.known.forget()
    second = await server.known.of(call())
    assert (second.tokens, second.dropped_leading_spaces) == ((b"x",), 1)
    assert server.taken() == ["instance", "vocabulary"]


async def test_servers_with_the_same_vocabulary_may_take_turns() -> None:
    server = Server()
    first = await server.known.of(call())
    for instance in ("two", "one", "two"):
        server.instance = instance
        server.known.forget()
        assert await server.known.of(call()) is first
    assert server.taken() == ["instance", "vocabulary", "instance", "vocabulary", "instance", "instance"]


async def test_a_failure_is_told_to_those_with_the_same_key_and_not_kept() -> None:
    server = Server()
    server.failures = [ProtocolError.local("gone")]
    bad, bad_too, good = await asyncio.gather(
        server.known.of(call("bad")),
        server.known.of(call("bad")),
        server.known.of(call()),
        return_exceptions=True,
    )
    assert isinstance(bad, ProtocolError)
    assert bad_too is bad
    assert good == await server.known.of(call("bad"))


async def test_a_caller_that_goes_away_takes_it_from_nobody() -> None:
    server = Server()
    leaving, staying = (asyncio.ensure_future(server.known.of(call())) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).tokens == A.tokens
    await server.known.close()


async def test_an_answers_tokens_are_shown() -> None:
    """After "m" the fake engine writes "n", and tells of each place that "n" is the likeliest."""
    async with front_rig(fake(scripts={"m": list("o€".encode())})) as rig:
        answer = await rig.openai.completions.create(model="fake", prompt="m", max_tokens=4, logprobs=1)
    shown = answer.choices[0].logprobs
    assert shown is not None
    assert shown.tokens == ["o", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert shown.text_offset == [0, 1, 2, 2]


async def test_a_model_without_a_tokenizer_shows_none() -> None:
    async with front_rig(fake(codec=None)) as rig:
        body = {"model": "fake", "prompt": [1], "max_tokens": 1, "logprobs": 1}
        reply = await rig.http.post("/v1/completions", json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("logprobs", "unsupported_parameter")
    assert "no tokenizer" in error["message"]
