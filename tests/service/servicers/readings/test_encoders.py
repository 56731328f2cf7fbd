"""Embed and Rerank of an encoder with a classifier, through gRPC, compared with PyTorch's."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from penstock.runtime import Engine
from penstock.v1 import control_pb2, inference_pb2, types_pb2
from tests.service.rig import failure_of, serving
from tests.support.goldens import CONFIG, GOLDEN

POOLINGS = {
    types_pb2.POOLING_MEAN: "mean",
    types_pb2.POOLING_FIRST_TOKEN: "cls",
    types_pb2.POOLING_LAST_TOKEN: "last",
    types_pb2.POOLING_MAX: "max",
}
OPTIONS = dataclasses.replace(CONFIG, max_model_len=None)
CLASSIFIER = types_pb2.RERANK_METHOD_CLASSIFIER


def with_words(name: str, folder: Path) -> Path:
    """Write the golden with a tokenizer that writes token i as "<i>". Two texts stand side by side, and the
    tokens of the second have type 1, as in the golden's cases.
    """
    shutil.copytree(GOLDEN / "encoders" / name, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(config["vocab_size"])}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def spelled(ids: list[int]) -> str:
    return " ".join(f"<{i}>" for i in ids)


def cases_of(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((GOLDEN / "encoders" / name / "expected.json").read_text())[
        "cases"
    ]
    return cases


@pytest.mark.ci
async def test_a_cross_encoder(tmp_path: Path) -> None:
    cases = cases_of("bert_reranker")
    async with serving(Engine.from_pretrained(str(with_words("bert_reranker", tmp_path)), OPTIONS)) as rig:
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert (info.default_pooling, info.default_rerank_method) == (types_pb2.POOLING_MEAN, CLASSIFIER)
        assert info.max_context_tokens == 128  # of a step; the checkpoint has 512 positions
        assert {control_pb2.FEATURE_EMBED, control_pb2.FEATURE_RERANK} <= set(info.features)
        assert not {control_pb2.FEATURE_SCORE, control_pb2.FEATURE_CHAT} & set(info.features)
        for case in cases:
            half = len(case["ids"]) // 2
            query, document = spelled(case["ids"][:half]), spelled(case["ids"][half:])
            request = inference_pb2.RerankRequest(query=query, documents=["<9> <8>", document, "<7>"])
            reply = await rig.inference.Rerank(request)
            assert reply.method == CLASSIFIER
            found = {one.index: one.relevance for one in reply.results}
            assert found[1] == pytest.approx(1 / (1 + math.exp(-case["logits"][0])), abs=1e-5)
        generate = inference_pb2.GenerateRequest(prompt="<1>")
        failure = await failure_of(rig.inference.Generate(generate))
        assert "a classifier, which has no next token" in failure.message
        score = inference_pb2.ScoreRequest(
            prompt="<1>", continuations=[inference_pb2.Continuation(text="<2>")]
        )
        assert "no next token" in (await failure_of(rig.inference.Score(score))).message
        asked = inference_pb2.RerankRequest(query="a", documents=["b"], method=types_pb2.RERANK_METHOD_YES_NO)
        assert "no next token" in (await failure_of(rig.inference.Rerank(asked))).message
        assert rig.engine.compiles_after_warmup == 0


@pytest.mark.sweep
async def test_an_encoder(tmp_path: Path) -> None:
    cases = cases_of("roberta")
    inputs = [inference_pb2.EmbedInput(text=spelled(case["ids"])) for case in cases]
    async with serving(Engine.from_pretrained(str(with_words("roberta", tmp_path)), OPTIONS)) as rig:
        for pooling, name in POOLINGS.items():
            reply = await rig.inference.Embed(inference_pb2.EmbedRequest(inputs=inputs, pooling=pooling))
            made = [np.frombuffer(one.values, "<f4") for one in reply.embeddings]
            np.testing.assert_allclose(made, [case[name] for case in cases], atol=1e-5)
        long = inference_pb2.EmbedInput(text=spelled([9] * 129))
        failure = await failure_of(rig.inference.Embed(inference_pb2.EmbedRequest(inputs=[long])))
        assert "at most 128 tokens, not 129" in str(failure)
        cut = inference_pb2.EmbedRequest(inputs=[long], truncation=types_pb2.TRUNCATION_RIGHT)
        (one,) = (await rig.inference.Embed(cut)).embeddings
        assert (one.token_count, one.truncated_tokens) == (128, 1)
        no_classes = inference_pb2.RerankRequest(query="a", documents=["b"], method=CLASSIFIER)
        assert "no classifier" in (await failure_of(rig.inference.Rerank(no_classes))).message
