"""Rerank, on the fake engine, whose hidden state after some tokens is (their number, their sum, the last one,
1), and which gives a prompt's token t the log-probability -t/16; and on a golden with PyTorch's relevances.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.runtime import Engine
from penstock.runtime.prompting.relevance import INSTRUCTION
from penstock.runtime.text.codec import TextCodec
from penstock.service.servicers import inference
from penstock.v1 import control_pb2, inference_pb2, types_pb2
from tests.service.rig import failure_of, fake, ids, serving, until
from tests.support.goldens import CONFIG, GOLDEN
from tests.support.models.byte_text import END, byte_tokenizer

WAIT_S = 20
YES_NO, EMBEDDINGS = types_pb2.RERANK_METHOD_YES_NO, types_pb2.RERANK_METHOD_EMBEDDINGS
ANSWERS = ["yes", "no"]
"""Tokens 257 and 258 of `judge`."""
CHAT = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}a:{% endif %}"
)
DOCUMENT = "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
PAIRS = (
    "{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first }}|"
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}|"
    f"{DOCUMENT}="
)
"""A template as vLLM's users and Sentence Transformers give it to models that judge."""


def judge(template: str | None = PAIRS, **options: Any) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(markers=ANSWERS), eos_token=END)
    tokenizer.chat_template = template
    codec = TextCodec(tokenizer)
    return fake(**({"codec": codec, "vocab_size": 264, "max_model_len": 512} | options))


def rerank(query: str, *documents: str, **fields: Any) -> inference_pb2.RerankRequest:
    return inference_pb2.RerankRequest(query=query, documents=documents, **fields)


def state(text: str) -> tuple[int, int, int, int]:
    tokens = ids(text)
    return len(tokens), sum(tokens), tokens[-1], 1


def cosine(one: str, other: str) -> Any:
    a, b = state(one), state(other)
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return pytest.approx(product / math.hypot(*a) / math.hypot(*b), rel=1e-9)


async def test_documents_are_ordered_by_the_cosines_of_vectors():
    async with serving() as rig:
        reply = await rig.inference.Rerank(rerank("ab", "zzzzzzzz", "ba", "ab", "ab"))
        assert [one.index for one in reply.results] == [2, 3, 1, 0]
        assert [one.relevance for one in reply.results] == [
            *[pytest.approx(1)] * 2, cosine("ab", "ba"), cosine("ab", "zzzzzzzz"),
        ]  # fmt: skip
        assert [one.weights.generation for one in reply.results] == [1] * 4
        assert (reply.model, len(reply.request_id), reply.method) == ("fake", 32, EMBEDDINGS)
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2 + 8 + 3 * 2, 0)
        assert reply.timing.HasField("total")
        top = await rig.inference.Rerank(rerank("ab", "zzzzzzzz", "ba", "ab", top_n=2))
        assert [one.index for one in top.results] == [2, 1]
        cut = await rig.inference.Rerank(rerank("ab", "abzzz", "abc", max_document_tokens=2))
        assert [one.relevance for one in cut.results] == [pytest.approx(1)] * 2
        assert cut.usage.prompt_tokens == 3 * 2


async def test_a_model_that_judges_is_shown_each_pair_with_both_answers():
    engine = judge()
    async with serving(engine) as rig:
        reply = await rig.inference.Rerank(rerank("q", "d", "e", instruction="i"))
        assert reply.method == YES_NO
        assert [one.index for one in reply.results] == [0, 1]
        odds = (258 - 257) / 16
        assert [one.relevance for one in reply.results] == [pytest.approx(1 / (1 + math.exp(-odds)))] * 2
        assert [request.prompt_token_ids for request in engine.seen] == [
            (*ids(f"i|q|{document}="), answer) for document in "de" for answer in (257, 258)
        ]
        assert reply.usage.prompt_tokens == 2 * len("i|q|d=")
        await rig.inference.Rerank(rerank("q", "d", max_document_tokens=9))
        assert engine.seen[-1].prompt_token_ids == (*ids(f"{INSTRUCTION}|q|d="), 258)


async def test_any_chat_model_can_be_asked_as_qwen3_reranker_was_trained():
    """The words are those of its publisher's page, and its template leaves the thinking empty."""
    engine = judge(CHAT)
    async with serving(engine) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert info.default_rerank_method == EMBEDDINGS
        await rig.inference.Rerank(rerank("q", "d", method=YES_NO))
        *shown, answer = engine.seen[0].prompt_token_ids
        assert answer == 257
        assert engine.text.decode(shown, skip_special_tokens=False) == (
            "s:Judge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".|'
            "u:<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
            "<Query>: q\n<Document>: d|a:"
        )


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({}, YES_NO),
        ({"template": CHAT}, EMBEDDINGS),
        ({"template": CHAT, "answer_token_ids": (7, 8)}, YES_NO),
        ({"template": None}, EMBEDDINGS),
    ],
    ids=["its template knows pairs", "a chat model", "its files name the answers", "no template"],
)
async def test_the_checkpoint_chooses_the_method(options: Any, method: Any):
    engine = judge(**options)
    async with serving(engine) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert info.default_rerank_method == method
        assert control_pb2.FEATURE_RERANK in info.features
        assert (await rig.inference.Rerank(rerank("q", "d"))).method == method
        if "answer_token_ids" in options:
            assert [request.prompt_token_ids[-1] for request in engine.seen] == [7, 8]
        other = await rig.inference.Rerank(rerank("q", "d", method=EMBEDDINGS))
        assert other.method == EMBEDDINGS


@pytest.mark.parametrize(
    ("options", "hidden_size", "has_method"),
    [
        ({"template": None, "answer_token_ids": (7, 8)}, 4, True),  # it has vectors
        ({"template": None, "answer_token_ids": (7, 8)}, 0, False),
        ({"template": CHAT}, 0, True),  # it can be asked
        ({"codec": None}, 4, False),
    ],
)
async def test_the_feature_is_told_where_a_method_is_there(options: Any, hidden_size: int, has_method: bool):
    """No default is told where the method that the checkpoint is made for is not there."""
    engine = judge(**options)
    engine.info = dataclasses.replace(engine.info, hidden_size=hidden_size)
    async with serving(engine) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert info.default_rerank_method == types_pb2.RERANK_METHOD_UNSPECIFIED
        assert (control_pb2.FEATURE_RERANK in info.features) == has_method


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (rerank("", "a"), "query"),
        (rerank("a"), "documents"),
        (rerank("a", "b", ""), "documents[1]"),
        (rerank("a", *["b"] * 8), "documents"),
        (rerank("a", "b", top_n=0), "top_n"),
        (rerank("a", "b", max_document_tokens=0), "max_document_tokens"),
        (rerank("a", "b", method=9), "method"),
        (rerank("a", "b", method=EMBEDDINGS, instruction="i"), "instruction"),
        (rerank("a" * 70, "b"), "query"),
        (rerank("a", "b", "b" * 70), "documents[1]"),
    ],
)
async def test_what_is_wrong_is_named(request_: inference_pb2.RerankRequest, field: str):
    async with serving(fake(max_queued_requests=8)) as rig:
        failure = await failure_of(rig.inference.Rerank(request_))
        assert failure.reason == "INVALID_FIELD"
        assert field in failure.violations
        assert rig.engine.seen == []


async def test_questions_have_bounds_too(monkeypatch: pytest.MonkeyPatch):
    """Each document counts twice, with what the model is asked."""
    async with serving(judge(max_queued_requests=4)) as rig:
        failure = await failure_of(rig.inference.Rerank(rerank("q", "a", "b", "c")))
        assert "documents" in failure.violations
        failure = await failure_of(rig.inference.Rerank(rerank("q", "d", "d" * 500)))
        assert list(failure.violations) == ["documents[1]"]
        monkeypatch.setattr(inference, "MAX_JOINED_TOKENS", 2 * len("i|q|d="))
        failure = await failure_of(rig.inference.Rerank(rerank("q", "d", "d", instruction="i")))
        assert failure.violations == {"documents": "24 tokens, or more; at most 12 in all"}
        assert len((await rig.inference.Rerank(rerank("q", "d", instruction="i"))).results) == 1


@pytest.mark.parametrize("method", [YES_NO, EMBEDDINGS])
async def test_documents_after_too_many_tokens_are_not_read(method: Any, monkeypatch: pytest.MonkeyPatch):
    """Otherwise a request of many documents takes a thread for as long as all of them take."""
    monkeypatch.setattr(inference, "MAX_JOINED_TOKENS", 40)
    engine = judge()
    async with serving(engine) as rig:
        read: list[str] = []
        encode = engine.text.encode

        def noting(text: str, **options: Any) -> Any:
            read.append(text)
            return encode(text, **options)

        monkeypatch.setattr(engine.text, "encode", noting)
        failure = await failure_of(rig.inference.Rerank(rerank("q", "a" * 41, "~", "c" * 900, method=method)))
        assert list(failure.violations) == ["documents"]
        assert any("aaa" in text for text in read)
        assert not any("~" in text or "ccc" in text for text in read)


async def test_what_a_model_cannot_do_is_unsupported():
    for engine, request in (
        (judge(None, answer_token_ids=(7, 8)), rerank("q", "d")),
        (fake(codec=None), rerank("q", "d")),
        (fake(), rerank("q", "d", method=YES_NO)),
        (judge(None), rerank("q", "d", method=YES_NO)),
    ):
        async with serving(engine) as rig:
            assert (await failure_of(rig.inference.Rerank(request))).reason == "UNSUPPORTED_FEATURE"


async def test_an_abort_ends_all():
    async with serving(fake(hold=True)) as rig:
        call = asyncio.ensure_future(failure_of(rig.inference.Rerank(rerank("a", "b", request_id="r"))))
        await until(lambda: len(rig.engine.seen) == 2)
        await rig.inference.Abort(inference_pb2.AbortRequest(request_ids=inference_pb2.RequestIds(ids=["r"])))
        assert (await asyncio.wait_for(call, WAIT_S)).reason == "REQUEST_ABORTED"


def made_to_judge(folder: Path) -> Path:
    """Write the golden as a model that writes tokens: the head of its classifier is that of "yes", and "no"
    has zeros, so the difference of both is the classifier's logit. Token i is written as "<i>", and the
    template, which knows queries and documents by their roles, shows documents alone.
    """
    golden = GOLDEN / "judges" / "qwen3_reranker"
    tensors = load_file(golden / "model.safetensors")
    config = json.loads((golden / "config.json").read_text())
    head = np.zeros((config["vocab_size"], config["hidden_size"]), np.float32)
    head[7] = tensors.pop("score.weight")[0]
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    config["architectures"] = ["Qwen3ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(config["vocab_size"])}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<2>")
    tokenizer.chat_template = DOCUMENT + "{# 'query' #}"
    tokenizer.save_pretrained(folder)
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    (folder / "modules.json").write_text(json.dumps([{"idx": 1, "path": "1_LogitScore", "type": kind}]))
    (folder / "1_LogitScore").mkdir()
    told = {"true_token_id": 7, "false_token_id": 8}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(told))
    return folder


@pytest.mark.ci
async def test_the_relevance_is_pytorchs(tmp_path: Path):
    cases = json.loads((GOLDEN / "judges" / "qwen3_reranker" / "expected.json").read_text())["cases"]
    expected = [1 / (1 + math.exp(-case["logits"][0])) for case in cases]
    documents = [" ".join(f"<{i}>" for i in case["ids"]) for case in cases]
    async with serving(Engine.from_pretrained(str(made_to_judge(tmp_path)), CONFIG)) as rig:
        reply = await rig.inference.Rerank(rerank("<1>", *documents))
        assert reply.method == YES_NO
        found = {one.index: one.relevance for one in reply.results}
        assert [found[i] for i in range(len(cases))] == pytest.approx(expected, abs=1e-4)
        assert [one.index for one in reply.results] == sorted(found, key=lambda i: -expected[i])
