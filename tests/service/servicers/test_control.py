"""ControlService's answers on the fake engine, whose facts are written down in tests/service/fake.py."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC

import pytest

from penstock.runtime.errors import EngineFailure
from penstock.runtime.requests.sampling import GenerationDefaults
from penstock.service.identity import version
from penstock.v1 import control_pb2, types_pb2, weights_pb2
from tests.service.codecs import byte_codec
from tests.service.rig import failure_of, fake, generate, ids, serving, until
from tests.support.models.byte_text import CHAT_TEMPLATE, EOS

FEATURES = [
    control_pb2.FEATURE_PROMPT_LOGPROBS,
    control_pb2.FEATURE_JSON_SCHEMA,
    control_pb2.FEATURE_REGEX,
    control_pb2.FEATURE_UPDATE_WEIGHTS,
]
READINGS = [
    control_pb2.FEATURE_EMBED,
    control_pb2.FEATURE_SCORE,
    control_pb2.FEATURE_HIDDEN_STATES,
    control_pb2.FEATURE_RERANK,
]
"""The features of every model with a tokenizer."""


async def test_model_info():
    defaults = GenerationDefaults(
        temperature=0.6,
        top_k=20,
        top_p=0.5,
        min_p=0.25,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
    )
    async with serving(fake(defaults=defaults, eos_token_ids=(EOS, 3), max_model_len=77)) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert not info.tensors
        full = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest(include_tensors=True))
        told = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest(include_tokenizer=True))
    assert not info.HasField("tokenizer")
    assert told.tokenizer == control_pb2.TokenizerInfo(
        special_tokens={"eos_token": "<|end|>"},
        chat_template=CHAT_TEMPLATE,
        tokenizer_class="TokenizersBackend",
    )
    assert (info.model, info.architecture) == ("fake", "FakeForCausalLM")
    assert (info.vocab_size, info.max_context_tokens) == (260, 77)
    assert list(info.eos_token_ids) == [EOS, 3]
    assert info.default_sampling == types_pb2.SamplingParams(
        temperature=0.6,
        top_k=20,
        top_p=0.5,
        min_p=0.25,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        n=1,
    )
    assert (info.weights.label, info.weights.generation) == ("initial", 1)
    assert (info.weights_digest, info.staged_update_id) == (b"", "")
    assert info.weights_since.ToDatetime(UTC) == rig.engine.weights_since
    assert list(info.features) == [control_pb2.FEATURE_CHAT, *FEATURES, *READINGS]
    assert [(t.name, t.dtype, list(t.shape)) for t in full.tensors] == [
        ("model.embed_tokens.weight", weights_pb2.DATA_TYPE_BF16, [260, 8]),
        ("model.norm.weight", weights_pb2.DATA_TYPE_F32, [8]),
    ]


@pytest.mark.parametrize(
    ("template", "names"),
    [("{{ effort }}{{ messages }}{% if thinking %}x{% endif %}", ["effort", "thinking"]), (None, [])],
)
async def test_the_variables_of_the_models_template_are_told(template, names):
    async with serving(fake(codec=byte_codec(chat_template=template))) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
    assert list(info.template_variables) == names


async def test_chat_is_no_feature_without_a_template():
    async with serving(fake(codec=byte_codec(chat_template=None))) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert list(info.features) == [*FEATURES, *READINGS]
        chat = {"messages": [types_pb2.ChatMessage(role="user", content="hi")]}
        failure = await failure_of(rig.inference.Generate(generate(chat=chat)))
        assert failure.violations == {"chat": "the model has no chat template, and the request brings none"}


async def test_priority_is_a_feature_where_it_has_an_effect():
    async with serving(fake(scheduling_policy="priority")) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
    assert list(info.features) == [
        control_pb2.FEATURE_CHAT,
        *FEATURES[:3],
        control_pb2.FEATURE_PRIORITY,
        *FEATURES[3:],
        *READINGS,
    ]


async def test_batch_invariance_is_a_feature_where_the_engine_promises_it():
    engine = fake()
    engine.info = dataclasses.replace(engine.info, batch_invariant=True)
    async with serving(engine) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
    assert list(info.features) == [
        control_pb2.FEATURE_CHAT,
        *FEATURES,
        control_pb2.FEATURE_BATCH_INVARIANT,
        *READINGS,
    ]


async def test_without_a_tokenizer_there_are_neither_chats_nor_grammars():
    async with serving(fake(codec=None)) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
    assert list(info.features) == [FEATURES[0], FEATURES[-1], *READINGS[:-1]]
    assert not info.template_variables


async def test_server_info():
    async with serving(fake(max_num_seqs=3, max_queued_requests=5, max_logprobs=7)) as rig:
        info = await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert info.instance_id == rig.server.instance_id
    assert info.server_version == version()
    assert info.contract_revision == 9
    assert info.max_request_bytes == 8 * 2**20
    assert info.max_chunk_bytes == 2 << 20
    assert (info.max_running_requests, info.max_queued_requests, info.max_logprobs) == (3, 5, 7)
    assert (info.kv_page_tokens, info.kv_pages_total) == (64, 3)
    assert list(info.devices) == ["fake:0"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, ("", 0)),
        ({"speculation": "lookup", "max_proposed_tokens": 6}, ("lookup", 6)),
        ({"speculation": "heads"}, ("heads", 4)),
        ({"speculation": "draft", "max_proposed_tokens": 6, "draft_model": "small"}, ("draft", 6)),
    ],
)
async def test_the_proposer_and_its_bound_are_told(options, told):
    async with serving(fake(**options)) as rig:
        info = await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())
    assert (info.proposer, info.max_proposed_tokens) == told


async def test_a_model_that_takes_no_weight_updates_says_so():
    engine = fake()
    engine.tensor_specs = list  # type: ignore[method-assign]
    async with serving(engine) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest(include_tensors=True))
        assert control_pb2.FEATURE_UPDATE_WEIGHTS not in info.features
        assert (await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())).max_chunk_bytes == 0


async def test_instance_ids_differ():
    async with serving() as one, serving() as two:
        assert one.server.instance_id != two.server.instance_id


async def seen(rig, number):
    await until(lambda: len(rig.engine.seen) == number)


async def test_load():
    """One request runs, and two wait with prompts of 2 and 3 tokens."""
    async with serving(fake(hold=True, max_num_seqs=1)) as rig:
        calls = []
        for i, prompt in enumerate(("a", "bb", "ccc"), 1):
            calls.append(asyncio.ensure_future(rig.inference.Generate(generate(prompt))))
            await seen(rig, i)
        load = await rig.control.GetLoad(control_pb2.GetLoadRequest())
        assert (load.running_requests, load.queued_requests, load.queued_prompt_tokens) == (1, 2, 5)
        assert (load.kv_pages_used, load.kv_pages_total, load.paused) == (1, 1, False)
        assert load.weights.generation == 1
        rig.engine.release()
        await asyncio.wait_for(asyncio.gather(*calls), 20)
        load = await rig.control.GetLoad(control_pb2.GetLoadRequest())
        assert (load.running_requests, load.queued_requests, load.kv_pages_used) == (0, 0, 0)


async def test_flush_cache():
    """One request runs; flushing again finds nothing."""
    async with serving(fake(hold=True, page_size=1, cached=["vwxyz"])) as rig:
        call = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        await seen(rig, 1)
        flush = rig.control.FlushCache
        reply = await flush(control_pb2.FlushCacheRequest())
        assert (reply.pages_freed, reply.pages_in_use) == (5, 1)
        rig.engine.release()
        await asyncio.wait_for(call, 20)
        reply = await flush(control_pb2.FlushCacheRequest())
        assert (reply.pages_freed, reply.pages_in_use) == (0, 0)


async def test_flush_cache_fails_as_everything_does():
    engine = fake()

    def flush():
        raise EngineFailure("the device is gone")

    engine.flush_prefix_cache = flush  # type: ignore[method-assign]
    async with serving(engine) as rig:
        failure = await failure_of(rig.control.FlushCache(control_pb2.FlushCacheRequest()))
        assert (failure.code.name, failure.reason) == ("INTERNAL", "ENGINE_FAILURE")
        newer = await failure_of(rig.raw("ControlService/FlushCache", b"\xd8\x06\x05"))
        assert newer.reason == "UNSUPPORTED_FEATURE"


# -- Tokenize and Detokenize --


async def test_tokenize_text():
    async with serving(fake(max_model_len=7777)) as rig:
        reply = await rig.control.Tokenize(control_pb2.TokenizeRequest(text="h\u00e9"))
        assert list(reply.token_ids) == [0x68, 0xC3, 0xA9]
        assert reply.max_context_tokens == 7777
        assert not (await rig.control.Tokenize(control_pb2.TokenizeRequest(text=""))).token_ids
        long = await rig.control.Tokenize(control_pb2.TokenizeRequest(text="ab" * 5000))
        assert list(long.token_ids) == ids("ab" * 5000)


async def test_tokenize_counts_beyond_the_context_but_not_megabytes():
    """No token of the fake engine stands for more than 7 characters, so 57 characters cannot be 8 tokens."""
    chat = types_pb2.ChatPrompt(messages=[types_pb2.ChatMessage(role="user", content="a" * 54)])
    async with serving(fake(max_model_len=8)) as rig:
        tokenize = rig.control.Tokenize
        assert len((await tokenize(control_pb2.TokenizeRequest(text="a" * 56))).token_ids) == 56
        for request in (control_pb2.TokenizeRequest(text="a" * 57), control_pb2.TokenizeRequest(chat=chat)):
            failure = await failure_of(tokenize(request))
            assert failure.reason == "PROMPT_TOO_LONG"
            assert failure.info.metadata["prompt_tokens"] == "9"


async def test_detokenize_takes_no_more_than_the_context():
    async with serving(fake(max_model_len=8)) as rig:
        detokenize = rig.control.Detokenize
        assert (await detokenize(control_pb2.DetokenizeRequest(token_ids=[97] * 8))).text == "a" * 8
        failure = await failure_of(detokenize(control_pb2.DetokenizeRequest(token_ids=[97] * 9)))
    assert failure.violations == {"token_ids": "at most 8 ids, not 9"}


def codec_with_begin_token():
    """Make a codec that puts token 256 before every text, unless told not to."""
    from tokenizers.processors import TemplateProcessing  # noqa: PLC0415 -- only here

    codec = byte_codec(CHAT_TEMPLATE)
    codec._backend.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", EOS)])
    return codec


async def test_tokenize_special_tokens():
    """A text gets them by default, a chat only when asked, because its template writes its own."""
    chat = types_pb2.ChatPrompt(messages=[types_pb2.ChatMessage(role="user", content="x")])
    async with serving(fake(codec=codec_with_begin_token())) as rig:

        async def tokens(**fields):
            return list((await rig.control.Tokenize(control_pb2.TokenizeRequest(**fields))).token_ids)

        assert await tokens(text="a") == [EOS, 97]
        assert await tokens(text="a", add_special_tokens=False) == [97]
        assert await tokens(chat=chat) == ids("u:x|")
        assert await tokens(chat=chat, add_special_tokens=True) == [EOS, *ids("u:x|")]
        await rig.inference.Generate(generate("y"))
        assert rig.engine.seen[0].prompt_token_ids == (EOS, ord("y")), "Generate does as Tokenize says"


async def test_tokenize_bad_input():
    async with serving() as rig:
        unset = await failure_of(rig.control.Tokenize(control_pb2.TokenizeRequest()))
        assert list(unset.violations) == ["input"]
        turns = [types_pb2.ChatMessage(role="robot"), types_pb2.ChatMessage(role="")]
        chat = types_pb2.ChatPrompt(messages=turns)
        roles = await failure_of(rig.control.Tokenize(control_pb2.TokenizeRequest(chat=chat)))
        assert list(roles.violations) == ["chat.messages[0].role", "chat.messages[1].role"]
        tools = types_pb2.ChatPrompt(messages=turns[:1], tool_choice="required")
        lacking = await failure_of(rig.control.Tokenize(control_pb2.TokenizeRequest(chat=tools)))
        assert list(lacking.violations) == ["chat.messages[0].role", "chat.tool_choice"]


async def test_detokenize():
    async with serving(fake(max_model_len=5000)) as rig:

        async def text(*token_ids, **fields):
            request = control_pb2.DetokenizeRequest(token_ids=token_ids, **fields)
            return (await rig.control.Detokenize(request)).text

        assert await text(*ids("h\u00e9"), EOS) == "h\u00e9"
        assert await text(97, EOS, skip_special_tokens=False) == "a<|end|>"
        assert await text(97, 0xC3) == "a\ufffd"
        assert await text() == ""
        assert await text(*[97] * 5000) == "a" * 5000
        failure = await failure_of(
            rig.control.Detokenize(control_pb2.DetokenizeRequest(token_ids=[259, 260, 2**32 - 1]))
        )
        assert list(failure.violations) == ["token_ids[1]", "token_ids[2]"]


@pytest.mark.parametrize("method", ["Tokenize", "Detokenize", "GetVocabulary"])
async def test_no_tokenizer(method):
    request = {
        "Tokenize": control_pb2.TokenizeRequest(text="a"),
        "Detokenize": control_pb2.DetokenizeRequest(token_ids=[1]),
        "GetVocabulary": control_pb2.GetVocabularyRequest(),
    }[method]
    async with serving(fake(codec=None)) as rig:
        assert (await failure_of(getattr(rig.control, method)(request))).reason == "UNSUPPORTED_FEATURE"


async def test_control_answers_before_the_engine_is_ready():
    async with serving(start=False) as rig:
        assert (await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())).model == "fake"
        assert (await failure_of(rig.inference.Generate(generate("a")))).reason == "NOT_READY"
