"""Generate and Stream over a real channel, on the fake engine: the reply has what the request asks for."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import uuid
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.runtime.requests.sampling import GenerationDefaults, ResolvedSampling
from penstock.v1 import inference_pb2, types_pb2
from tests.service.rig import collect, failure_of, fake, generate, ids, joined, serving, stream, until
from tests.support.models.byte_text import EOS

pytestmark = pytest.mark.asyncio(loop_scope="module")

A_TO_Z = "abcdefghijklmnopqrstuvwxyz"


async def answer(rig, request):
    return await asyncio.wait_for(rig.inference.Generate(request), 20)


async def test_generate_answers_with_everything(rig):
    reply = await answer(rig, generate("a", request_id="one"))
    (output,) = reply.outputs
    assert (reply.request_id, reply.model, reply.prompt.token_count) == ("one", "fake", 1)
    assert (output.index, output.text) == (0, A_TO_Z[1:])
    assert list(output.token_ids) == [*ids(A_TO_Z[1:]), EOS], "the end token is an id, but no text"
    assert output.finish.reason == types_pb2.FINISH_REASON_EOS
    assert output.finish.match.token_id == EOS
    assert [(w.first_output_token, w.version.label, w.version.generation) for w in output.weights] == [
        (0, "initial", 1)
    ]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (1, 26)
    times = reply.timing
    queue, first, total = (t.ToNanoseconds() for t in (times.queue, times.time_to_first_token, times.total))
    assert 0 <= queue <= first <= total
    assert total > 0
    assert not output.HasField("logprobs")
    assert not reply.prompt.token_ids


async def test_stream_follows_the_grammar(rig):
    messages = await collect(rig.inference.Stream(stream("w", request_id="one")))
    started, finished, summary = messages[0].started, messages[-2].finished, messages[-1].summary
    assert (started.request_id, started.model, started.prompt.token_count) == ("one", "fake", 1)
    assert (started.weights.label, started.weights.generation) == ("initial", 1)
    assert "".join(m.delta.text for m in messages[1:-2]) == "xyz"
    assert (finished.index, finished.finish.reason) == (0, types_pb2.FINISH_REASON_EOS)
    assert summary.usage.completion_tokens == 4
    assert summary.timing.total.ToNanoseconds() > 0


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_tokens": {"stopping": {"max_tokens": 5}},
    "stop": {"stopping": {"stop": ["hij", "lm"]}},
    "stop_kept": {"stopping": {"stop": ["hij"], "include_stop": True}},
    "stop_id": {"stopping": {"stop_token_ids": [ord("k")]}},
    "logprobs": {"output": {"logprobs": 2}, "stopping": {"max_tokens": 4}},
    "no_text": {"output": {"text": False}},
    "no_ids": {"output": {"token_ids": False}},
    "specials": {"output": {"skip_special_tokens": False}},
    "echo": {"output": {"echo_prompt_token_ids": True}},
}


@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("name", OPTIONS)
async def test_deltas_are_generates_output(name, tokens_per_step):
    """Also if the engine makes several tokens a step, and whether or not deltas are merged."""
    fields = {**OPTIONS[name], "request_id": "one"}
    async with serving(fake(tokens_per_step=tokens_per_step)) as rig:
        whole = await answer(rig, generate("ab", **fields))
        for per_message in (1, 3, 1000):
            request = stream("ab", **fields, min_tokens_per_message=per_message)
            parts = joined(await collect(rig.inference.Stream(request)))
            parts.timing.CopyFrom(whole.timing)
            assert parts == whole


async def test_min_tokens_per_message_coalesces(rig):
    messages = await collect(rig.inference.Stream(stream("a", min_tokens_per_message=10)))
    sizes = [len(m.delta.token_ids) for m in messages[1:-2]]
    assert sum(sizes) == 26
    assert all(size >= 10 for size in sizes[:-1]), sizes


async def test_empty_request_id_is_a_new_uuid(rig):
    replies = [await answer(rig, generate("y")) for _ in range(2)]
    assert replies[0].request_id != replies[1].request_id
    assert all(uuid.UUID(reply.request_id) for reply in replies)


async def test_request_id_reaches_the_engine(rig):
    await answer(rig, generate("y", request_id="mine"))
    assert rig.engine.seen[0].request_id == "mine"


async def test_the_bound_of_proposals_reaches_the_engine_and_usage_tells_what_came_of_it():
    """0 is a bound, too. The counts of both outputs are added up."""
    engine = fake(guesses=(5, 3))
    async with serving(engine) as rig:
        none = await answer(rig, generate("a", max_proposed_tokens=0, sampling={"n": 2}))
        reply = await answer(rig, generate("a", sampling={"n": 2}))
        messages = await collect(rig.inference.Stream(stream("a", max_proposed_tokens=2)))
    assert [request.max_proposed_tokens for request in rig.engine.seen] == [0, 0, None, None, 2]
    assert (none.usage.proposed_tokens, none.usage.accepted_tokens) == (0, 0)
    assert (reply.usage.proposed_tokens, reply.usage.accepted_tokens) == (10, 6)
    usage = messages[-1].summary.usage
    assert (usage.proposed_tokens, usage.accepted_tokens) == (2, 2)


async def test_model_may_be_named(rig):
    assert (await answer(rig, generate("y", model="fake"))).model == "fake"


async def test_prompt_ids_are_used_as_they_are(rig):
    request = inference_pb2.GenerateRequest(prompt_token_ids=types_pb2.TokenIds(ids=ids("xy")))
    assert (await answer(rig, request)).outputs[0].text == "z"
    assert rig.engine.seen[0].prompt_token_ids == (120, 121)


async def test_chat_is_rendered_with_the_template(rig):
    turns = [
        types_pb2.ChatMessage(role="system", content="be"),
        types_pb2.ChatMessage(role="user", content="hi"),
    ]
    request = generate(chat=types_pb2.ChatPrompt(messages=turns), stopping={"max_tokens": 1})
    reply = await answer(rig, request)
    assert bytes(rig.engine.seen[0].prompt_token_ids) == b"s:be|u:hi|"
    assert reply.outputs[0].text == "}", "the byte after |"
    assert reply.prompt.token_count == 10


async def test_a_long_prompt_is_encoded_off_the_loop():
    """The prompt is longer than what is encoded on the event loop; the result is equal."""
    async with serving(fake(max_model_len=10_000)) as rig:
        reply = await answer(rig, generate("a" * 5000, stopping={"max_tokens": 2}))
    assert (reply.prompt.token_count, reply.outputs[0].text) == (5000, "bc")


# -- sampling --


async def sampling_seen(sampling, **engine_options):
    """Return the sampling values that the engine got. A seed that was not asked for is random, and left out
    here.
    """
    async with serving(fake(**engine_options)) as rig:
        await answer(rig, generate("y", sampling=sampling))
        await collect(rig.inference.Stream(stream("y", sampling=sampling)))
        seen = [request.sampling for request in rig.engine.seen]
    assert all(0 <= one.seed < 2**64 for one in seen)
    if "seed" not in sampling:
        assert seen[0].seed != seen[1].seed
        seen = [dataclasses.replace(one, seed=None) for one in seen]
    assert seen[0] == seen[1]
    return seen[0]


async def test_unset_sampling_is_the_models_default():
    values: dict[str, Any] = {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.2,
    }  # fmt: skip
    assert await sampling_seen({}, defaults=GenerationDefaults(**values)) == ResolvedSampling(**values)


async def test_zero_is_not_unset():
    defaults = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, presence_penalty=1)
    asked = {"temperature": 0.0, "top_k": 0, "min_p": 0.0, "seed": 0, "presence_penalty": 0.0}
    assert await sampling_seen(asked, defaults=defaults) == ResolvedSampling(
        temperature=0.0, top_k=0, top_p=0.95, min_p=0.0, seed=0
    )


async def test_sampling_reaches_the_engine():
    asked: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": 2**64 - 1,
        "presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5,
    }  # fmt: skip
    assert await sampling_seen(asked) == ResolvedSampling(**asked)


async def test_tokens_that_are_pushed_or_forbidden_reach_the_engine():
    """Words as the tokenizer spells them, alone and after a space; the others sorted, and each once."""
    asked: dict[str, Any] = {
        "logit_bias": {99: -0.5, 3: 2.0, 4: -math.inf},
        "bad_words": ["ab", "\u00e9", "x"],
        "allowed_token_ids": [7, 256, 7, 0],
    }
    assert await sampling_seen(asked) == ResolvedSampling(
        logit_bias=((3, 2.0), (4, -math.inf), (99, -0.5)),
        bad_words=((97, 98), (32, 97, 98), (0xC3, 0xA9), (32, 0xC3, 0xA9), (120,), (32, 120)),
        allowed_token_ids=(7, 256, 0),
    )


async def test_neutral_values_are_taken():
    asked = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "n": 1}
    assert await sampling_seen(asked) == ResolvedSampling()


# -- stopping --


async def finish_and_text(rig, prompt="a", **fields):
    reply = await answer(rig, generate(prompt, **fields))
    (output,) = reply.outputs
    assert len(output.token_ids) == reply.usage.completion_tokens
    return types_pb2.FinishReason.Name(output.finish.reason), output.text, output


async def test_max_tokens(rig):
    reason, text, _ = await finish_and_text(rig, stopping={"max_tokens": 3})
    assert (reason, text) == ("FINISH_REASON_MAX_TOKENS", "bcd")


async def test_max_tokens_beyond_the_context_ends_context_full():
    async with serving(fake(max_model_len=8)) as rig:
        reason, text, _ = await finish_and_text(rig, stopping={"max_tokens": 2**32 - 1})
    assert (reason, text) == ("FINISH_REASON_CONTEXT_FULL", "bcdefgh")


async def test_min_tokens_delays_the_end_and_stops(rig):
    """The fake engine writes an "a" if the end token is banned. "a" and "b" come too early; "d"
    is token 5.
    """
    asked = {"min_tokens": 5, "stop": ["a", "b", "d"]}
    assert (await finish_and_text(rig, "y", stopping=asked))[:2] == ("FINISH_REASON_STOP", "zabc")
    assert (await finish_and_text(rig, "y", stopping={"min_tokens": 5}))[1] == "zabcdefghijklmnopqrstuvwxyz"


async def test_stop_string_across_tokens(rig):
    reason, text, output = await finish_and_text(rig, stopping={"stop": ["zzz", "fgh"]})
    assert rig.engine.told[0][1].stop == "fgh", "the engine was told to stop"
    assert (reason, text, output.finish.match.stop) == ("FINISH_REASON_STOP", "bcde", "fgh")
    assert list(output.token_ids) == ids("bcdefgh"), "ids are not held back, so those of the stop are there"


@pytest.mark.parametrize("tokens_per_step", [1, 5, 64])
async def test_stop_string_drops_later_tokens(tokens_per_step):
    async with serving(fake(tokens_per_step=tokens_per_step)) as rig:
        reason, text, output = await finish_and_text(
            rig, stopping={"stop": ["fgh"], "include_stop": True}, output={"logprobs": 0}
        )
    assert (reason, text) == ("FINISH_REASON_STOP", "bcdefgh")
    assert list(output.token_ids) == ids("bcdefgh")
    assert len(output.logprobs.sampled) == 7
    assert not output.logprobs.top


async def test_stop_string_wins_over_a_later_end_in_the_same_step():
    async with serving(fake(tokens_per_step=64)) as rig:
        reason, text, _ = await finish_and_text(rig, "w", stopping={"stop": ["y"]})
    assert (reason, text) == ("FINISH_REASON_STOP", "x")


async def test_stop_token_id_is_left_out(rig):
    reason, text, output = await finish_and_text(rig, stopping={"stop_token_ids": [ord("e")]})
    assert (reason, text, output.finish.match.token_id) == ("FINISH_REASON_STOP", "bcd", ord("e"))
    assert list(output.token_ids) == ids("bcd")


async def test_include_stop_keeps_the_stop_token(rig):
    _, text, output = await finish_and_text(
        rig, stopping={"stop_token_ids": [ord("e")], "include_stop": True}
    )
    assert (text, list(output.token_ids)) == ("bcde", ids("bcde"))


async def test_ignore_eos(rig):
    reason, text, output = await finish_and_text(rig, "y", stopping={"ignore_eos": True, "max_tokens": 4})
    assert (reason, text) == ("FINISH_REASON_MAX_TOKENS", "zab")
    assert list(output.token_ids) == [122, EOS, 97, 98]


async def test_time_limit_is_soft():
    engine = fake(hold=True)
    async with serving(engine) as rig:
        call = rig.inference.Generate(generate("a", stopping={"time_limit": Duration(seconds=300)}))
        engine.step(3)
        await until(lambda: engine.num_steps == 3)
        engine.pass_time_limits()
        reply = await asyncio.wait_for(call, 20)
    assert reply.outputs[0].finish.reason == types_pb2.FINISH_REASON_TIME_LIMIT
    assert reply.outputs[0].text == "bcd"
    assert engine.seen[0].stopping.time_limit_s == 300


async def test_held_text_comes_with_the_end(rig):
    """ "xyz" might become the stop "xyz!", and does not."""
    assert (await finish_and_text(rig, "v", stopping={"stop": ["xyz!"]}))[1] == "wxyz"
    messages = await collect(rig.inference.Stream(stream("v", stopping={"stop": ["xyz!"]})))
    tokens = list(itertools.accumulate(len(m.delta.token_ids) for m in messages[1:-2]))
    assert tokens[-1] == 5


# -- output --


async def test_text_is_whole_characters():
    script = [*"\u00e9\U0001f600".encode(), 0xFF, 0xE2]
    async with serving(fake(scripts={"?": script})) as rig:
        messages = await collect(rig.inference.Stream(stream("?")))
    texts = [m.delta.text for m in messages[1:-2] if m.delta.text]
    assert "".join(texts) == "\u00e9\U0001f600\ufffd\ufffd"


async def test_text_off_runs_no_detokenizer(rig):
    reply = await answer(rig, generate("x", output={"text": False}))
    assert (reply.outputs[0].text, list(reply.outputs[0].token_ids)) == ("", [*ids("yz"), EOS])


async def test_token_ids_off(rig):
    reply = await answer(rig, generate("x", output={"token_ids": False}))
    assert (reply.outputs[0].text, list(reply.outputs[0].token_ids)) == ("yz", [])
    assert reply.usage.completion_tokens == 3


async def test_logprobs(rig):
    """By hand: the fake engine gives a token t the log-probability -t/8, and t and t + 1 as the likeliest
    tokens.
    """
    reply = await answer(rig, generate("a", output={"logprobs": 2}, stopping={"max_tokens": 2}))
    logprobs = reply.outputs[0].logprobs
    assert list(logprobs.sampled) == [-98 / 8, -99 / 8]
    assert [[(c.token_id, c.logprob) for c in t.candidates] for t in logprobs.top] == [
        [(98, -98 / 8), (99, -99 / 8)],
        [(99, -99 / 8), (100, -100 / 8)],
    ]


async def test_special_tokens_are_shown_when_asked(rig):
    reply = await answer(rig, generate("y", output={"skip_special_tokens": False}))
    assert reply.outputs[0].text == "z<|end|>"


async def test_prompt_ids_are_echoed_when_asked(rig):
    request = generate("xy", output={"echo_prompt_token_ids": True})
    assert list((await answer(rig, request)).prompt.token_ids) == ids("xy")
    messages = await collect(rig.inference.Stream(stream("xy", output={"echo_prompt_token_ids": True})))
    assert list(messages[0].started.prompt.token_ids) == ids("xy")


async def seen(engine, number):
    await until(lambda: len(engine.seen) == number)


async def stepped(engine, number):
    await until(lambda: engine.num_steps == number)


async def test_weights_spans():
    """New weights after three tokens: a second span, and in the stream a delta that names them."""
    for _ in range(2):
        engine = fake(hold=True)
        async with serving(engine) as rig:
            whole = rig.inference.Generate(generate("a", stopping={"max_tokens": 5}))
            parts = asyncio.create_task(
                collect(rig.inference.Stream(stream("a", stopping={"max_tokens": 5})))
            )
            await seen(engine, 2)
            engine.step(3)
            await stepped(engine, 3)
            engine.go_live("step-2")
            engine.step(10)
            reply = await asyncio.wait_for(whole, 20)
            messages = await parts
        for output in (reply.outputs[0], joined(messages).outputs[0]):
            assert output.text == "bcdef"
            spans = [(w.first_output_token, w.version.generation, w.version.label) for w in output.weights]
            assert spans == [(0, 1, "initial"), (3, 2, "step-2")], "also of weights that serve no more"
        assert [m.delta.weights.generation for m in messages[1:-2] if m.delta.HasField("weights")] == [2]


async def test_many_at_once():
    """More requests than run together: each gets its own answer."""
    async with serving(fake(max_num_seqs=4)) as rig:
        replies = await asyncio.gather(
            *(answer(rig, generate(chr(97 + i), request_id=f"r{i}")) for i in range(24)),
            *(collect(rig.inference.Stream(stream(chr(97 + i)))) for i in range(24)),
        )
    for i in range(24):
        assert replies[i].outputs[0].text == A_TO_Z[i + 1 :]
        assert joined(replies[24 + i]).outputs[0].text == A_TO_Z[i + 1 :]


async def test_without_a_tokenizer_ids_work_and_text_is_refused():
    async with serving(fake(codec=None)) as rig:
        request = generate(prompt_token_ids=types_pb2.TokenIds(ids=ids("xy")))
        reply = await answer(rig, request)
        assert (reply.outputs[0].text, list(reply.outputs[0].token_ids)) == ("", [122, EOS])
        failures = [
            await failure_of(rig.inference.Generate(bad))
            for bad in (
                generate("a", sampling={"bad_words": ["x"]}),
                generate(chat={"messages": [types_pb2.ChatMessage(role="user", content="x")]}),
                generate(
                    prompt_token_ids=types_pb2.TokenIds(ids=[97] * 999),
                    output={"text": True},
                    constraint={"regex": "a"},
                    stopping={"max_tokens": 0},
                ),
            )
        ]
        await answer(rig, generate(prompt_token_ids=types_pb2.TokenIds(ids=[97]), output={"text": False}))
    assert [f.reason for f in failures] == ["UNSUPPORTED_FEATURE"] * 3
    assert [f.info.metadata["field"] for f in failures] == [
        "prompt,sampling.bad_words",
        "chat",
        "output.text,constraint.regex",
    ]
