"""Prompts that leave too little room: which tokens are cut, and that replies say so."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.runtime.errors import InvalidRequest, PromptTooLong
from penstock.runtime.prompting.prompts import ContextParams, Fitted, Truncation, fit
from penstock.runtime.requests.request import StoppingParams
from penstock.v1 import types_pb2
from tests.service.rig import collect, failure_of, fake, generate, ids, serving, stream

REJECT, LEFT, RIGHT, MIDDLE = Truncation
CUTTING = (LEFT, RIGHT, MIDDLE)
ROOM = 16
LETTERS = "abcdefghijklmnopqrst"
"""20 tokens, 4 more than the context of these tests."""


async def answer(rig, prompt=LETTERS, **fields):
    """Return Generate's reply. Stream must say the same about the prompt."""
    fields = {"output": {"echo_prompt_token_ids": True}, **fields}
    reply = await asyncio.wait_for(rig.inference.Generate(generate(prompt, **fields)), 20)
    messages = await collect(rig.inference.Stream(stream(prompt, **fields)))
    assert messages[0].started.prompt == reply.prompt
    assert messages[-1].summary.usage == reply.usage
    assert reply.usage.prompt_tokens == reply.prompt.token_count == len(reply.prompt.token_ids)
    assert tuple(reply.prompt.token_ids) == rig.engine.seen[-1].prompt_token_ids
    return reply


def kept(reply):
    return bytes(reply.prompt.token_ids).decode(), reply.prompt.truncated_tokens


async def violations(rig, prompt=LETTERS, **fields):
    failure = await failure_of(rig.inference.Generate(generate(prompt, **fields)))
    assert failure.reason == "INVALID_FIELD"
    return failure.violations


# -- over a channel, by hand --


@pytest.mark.parametrize(
    ("truncation", "max_tokens", "expected"),
    [
        (types_pb2.TRUNCATION_LEFT, 4, "ijklmnopqrst"),
        (types_pb2.TRUNCATION_RIGHT, 4, "abcdefghijkl"),
        (types_pb2.TRUNCATION_MIDDLE, 4, "abcdefopqrst"),
        (types_pb2.TRUNCATION_MIDDLE, 5, "abcdeopqrst"),
        (types_pb2.TRUNCATION_LEFT, 15, "t"),
        (types_pb2.TRUNCATION_RIGHT, 15, "a"),
        (types_pb2.TRUNCATION_MIDDLE, 15, "t"),
        (types_pb2.TRUNCATION_MIDDLE, 14, "at"),
        (types_pb2.TRUNCATION_LEFT, None, "fghijklmnopqrst"),
    ],
)
async def test_truncation(truncation, max_tokens, expected):
    stopping = {} if max_tokens is None else {"max_tokens": max_tokens}
    async with serving(fake(max_model_len=ROOM)) as rig:
        reply = await answer(rig, context={"truncation": truncation}, stopping=stopping)
        assert kept(reply) == (expected, 20 - len(expected))
        assert len(reply.outputs[0].token_ids) <= ROOM - len(expected)
        by_ids = await answer(
            rig,
            None,
            prompt_token_ids={"ids": ids(LETTERS)},
            context={"truncation": truncation},
            stopping=stopping,
        )
        assert by_ids.prompt == reply.prompt


async def test_truncation_reject():
    """The default. A prompt that leaves room for one token is accepted, whatever max_tokens says."""
    for context in (
        {},
        {"truncation": types_pb2.TRUNCATION_REJECT},
        {"reserve_tokens": 9, "cap_max_tokens": True},
    ):
        async with serving(fake(max_model_len=ROOM)) as rig:
            failure = await failure_of(rig.inference.Generate(generate(LETTERS, context=context)))
            assert (failure.reason, failure.info.metadata["prompt_tokens"]) == ("PROMPT_TOO_LONG", "20")
            reply = await answer(rig, LETTERS[:15], context=context, stopping={"max_tokens": 99})
            assert kept(reply) == (LETTERS[:15], 0)
            assert len(reply.outputs[0].token_ids) == 1


async def test_reserve_tokens():
    """It replaces max_tokens; 0 still leaves room for one token."""
    cut = types_pb2.TRUNCATION_LEFT
    async with serving(fake(max_model_len=ROOM)) as rig:
        for reserve, max_tokens, expected in ((10, 4, 6), (10, 12, 6), (2, 99, 14), (1, 9, 15), (0, 9, 15)):
            context = {"truncation": cut, "reserve_tokens": reserve}
            reply = await answer(
                rig, context=context, stopping={"max_tokens": max_tokens, "ignore_eos": True}
            )
            assert kept(reply) == (LETTERS[-expected:], 20 - expected)
            assert len(reply.outputs[0].token_ids) == min(max_tokens, ROOM - expected)


async def test_a_reserve_that_leaves_no_room_for_a_prompt_is_refused():
    """Also if the prompt is short, because the reserve can never be kept."""
    cut = types_pb2.TRUNCATION_MIDDLE
    async with serving(fake(max_model_len=ROOM)) as rig:
        for reserve in (16, 17, 2**32 - 1):
            for prompt in (LETTERS, "a"):
                found = await violations(rig, prompt, context={"truncation": cut, "reserve_tokens": reserve})
                assert found == {
                    "context.reserve_tokens": f"{reserve} tokens for generation leave no room for a prompt: "
                    "the context has 16"
                }
        assert set(await violations(rig, context={"truncation": cut}, stopping={"max_tokens": 16})) == {
            "stopping.max_tokens"
        }
        assert not rig.engine.seen


async def test_cap_max_tokens():
    """Generation is shortened before the prompt: it ends MAX_TOKENS instead of CONTEXT_FULL."""
    full, most = types_pb2.FINISH_REASON_CONTEXT_FULL, types_pb2.FINISH_REASON_MAX_TOKENS
    cut = types_pb2.TRUNCATION_LEFT
    async with serving(fake(max_model_len=ROOM)) as rig:
        for context, prompt, max_tokens, num_kept, num_made, reason in (
            ({}, LETTERS[:10], 99, 10, 6, full),
            ({"cap_max_tokens": True}, LETTERS[:10], 99, 10, 6, most),
            ({"cap_max_tokens": True}, LETTERS[:10], 3, 10, 3, most),
            ({"truncation": cut}, LETTERS[:10], 9, 7, 9, most),
            ({"truncation": cut, "cap_max_tokens": True}, LETTERS[:10], 9, 10, 6, most),
            ({"truncation": cut, "cap_max_tokens": True}, LETTERS, 99, 15, 1, most),
            ({"truncation": cut, "cap_max_tokens": True, "reserve_tokens": 5}, LETTERS, 99, 11, 5, most),
        ):
            stopping = {"max_tokens": max_tokens, "ignore_eos": True, "min_tokens": max_tokens}
            reply = await answer(rig, prompt, context=context, stopping=stopping)
            assert (reply.prompt.token_count, len(reply.outputs[0].token_ids)) == (num_kept, num_made)
            assert reply.outputs[0].finish.reason == reason
            assert reply.prompt.truncated_tokens == len(prompt) - num_kept


async def test_a_server_may_cut_by_default_and_a_request_decides():
    async with serving(fake(max_model_len=ROOM), truncation=RIGHT) as rig:
        for context, expected in (
            ({}, LETTERS[:15]),
            ({"truncation": types_pb2.TRUNCATION_UNSPECIFIED}, LETTERS[:15]),
            ({"truncation": types_pb2.TRUNCATION_LEFT}, LETTERS[5:]),
        ):
            assert kept(await answer(rig, context=context)) == (expected, 5)
            request = {"prompt_token_ids": {"ids": ids(LETTERS)}, "context": context}
            assert kept(await answer(rig, None, **request)) == (expected, 5)
        reject = generate(LETTERS, context={"truncation": types_pb2.TRUNCATION_REJECT})
        assert (await failure_of(rig.inference.Generate(reject))).reason == "PROMPT_TOO_LONG"


async def test_chats_and_long_texts_are_cut_too():
    """Also texts that would certainly be too long, which are refused unread if nothing may be cut."""
    cut = {"truncation": types_pb2.TRUNCATION_LEFT}
    chat = {"messages": [types_pb2.ChatMessage(role="user", content=LETTERS)]}
    async with serving(fake(max_model_len=ROOM)) as rig:
        assert kept(await answer(rig, None, chat=chat, context=cut)) == ("ghijklmnopqrst|", 8)
        assert kept(await answer(rig, LETTERS * 200, context=cut)) == (LETTERS[5:], 3985)


async def test_an_unknown_truncation_is_refused():
    async with serving() as rig:
        assert await violations(rig, "a", context={"truncation": 9}) == {
            "context.truncation": "9 is no value of Truncation"
        }


# -- whatever is asked for --

PROMPTS = st.integers(1, 60).map(lambda n: tuple(range(n)))
PARAMS = st.builds(ContextParams, st.sampled_from(Truncation), st.none() | st.integers(0, 40), st.booleans())


@st.composite
def stoppings(draw):
    most = draw(st.none() | st.integers(1, 50))
    return StoppingParams(max_tokens=most, min_tokens=draw(st.integers(0, most or 50)))


def fitted(prompt: tuple[int, ...], params: ContextParams, stopping: StoppingParams, room: int) -> Fitted:
    try:
        return fit(prompt, params, stopping, room)
    except (InvalidRequest, PromptTooLong):
        assume(False)
        raise


@given(PROMPTS, PARAMS, stoppings(), st.integers(2, 40))
def test_what_is_kept_fits_and_nothing_is_cut_silently(prompt, params, stopping, room):
    result = fitted(prompt, params, stopping, room)
    num = len(result.token_ids)
    assert 1 <= num < room, "there is room for a token"
    assert result.num_truncated == len(prompt) - num
    if result.num_truncated:
        assert params.truncation in CUTTING
        if params.reserve_tokens is not None:
            reserve = params.reserve_tokens or 1
        else:
            reserve = 1 if params.cap_max_tokens else stopping.max_tokens or 1
        assert num == room - reserve, "no more is cut than must be"


@given(PROMPTS, PARAMS, stoppings(), st.integers(2, 40))
def test_the_right_tokens_are_kept(prompt, params, stopping, room):
    """The prompt is 0, 1, 2, ..., so each kept token shows where it stood."""
    result = fitted(prompt, params, stopping, room)
    num, last = len(result.token_ids), prompt[-1]
    gaps = [a for a, b in zip(result.token_ids, result.token_ids[1:], strict=False) if b != a + 1]
    if params.truncation is MIDDLE:
        assert len(gaps) <= 1
        assert result.token_ids[-1] == last
        if result.num_truncated and num > 1:
            head = gaps[0] + 1
            assert result.token_ids[0] == 0
            assert num - head - head in (0, 1), "both ends alike, or the newest has one more"
    else:
        assert not gaps
        assert result.token_ids[0] == (len(prompt) - num if params.truncation is LEFT else 0)


@given(PROMPTS, PARAMS, stoppings(), st.integers(2, 40))
def test_generation_is_shortened_only_when_asked(prompt, params, stopping, room):
    result = fitted(prompt, params, stopping, room)
    if not params.cap_max_tokens or stopping.max_tokens is None:
        assert result.stopping == stopping
        return
    most = min(stopping.max_tokens, room - len(result.token_ids))
    assert most >= 1
    expected = dataclasses.replace(stopping, max_tokens=most, min_tokens=min(stopping.min_tokens, most))
    assert result.stopping == expected


@given(PROMPTS, PARAMS, stoppings(), st.integers(2, 40))
def test_only_what_cannot_be_is_refused(prompt, params, stopping, room):
    try:
        fit(prompt, params, stopping, room)
    except PromptTooLong:
        assert params.truncation is REJECT
        assert len(prompt) >= room
    except InvalidRequest as error:
        assert params.truncation in CUTTING
        (violation,) = error.violations
        if params.reserve_tokens is None:
            assert (violation.field, params.cap_max_tokens) == ("stopping.max_tokens", False)
            assert (stopping.max_tokens or 0) >= room
        else:
            assert violation.field == "context.reserve_tokens"
            assert params.reserve_tokens >= room
    else:
        assert params.truncation in CUTTING or len(prompt) < room
