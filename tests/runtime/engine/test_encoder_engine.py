"""An engine that serves an encoder: its texts share steps, and what generates is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.runtime import Engine, EngineConfig
from penstock.runtime.errors import ConfigError, InvalidRequest, UnsupportedFeature
from penstock.runtime.inprocess.scoring import read
from penstock.runtime.requests.request import PromptReading
from tests.support.goldens import CONFIG, GOLDEN

DIRECTORY = GOLDEN / "encoders" / "bert_classifier"
CASES = json.loads((DIRECTORY / "expected.json").read_text())["cases"]
pytestmark = pytest.mark.ci


def config(**options: object) -> EngineConfig:
    values = {
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 96,
        "page_size": 8,
        "show_progress": False,
        "compilation_cache": CONFIG.compilation_cache,
    }
    return EngineConfig(**{**values, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(str(DIRECTORY), config()) as engine:
        yield engine
        assert engine.compiles_after_warmup == 0
        assert engine.load().pages_used == 0


def logits(engine: Engine, asked: list[tuple[int, ...]]) -> list[Any]:
    reader = engine.info.reader
    assert reader is not None
    assert reader.classes is not None
    reading = PromptReading(pooling=reader.classes.pooling, classes=True)
    return [output.hidden for output in read(engine, asked, [reading] * len(asked), {})]


def texts(engine: Engine) -> list[tuple[int, ...]]:
    size = engine.info.vocab_size
    return [tuple(i + t * size for i, t in zip(case["ids"], case["type_ids"], strict=True)) for case in CASES]


@pytest.mark.parametrize(
    ("pooling", "name"), [("mean", "mean"), ("first_token", "cls"), ("last_token", "last")]
)
def test_embeddings_alone_and_together(engine: Engine, pooling: str, name: str) -> None:
    expected = [case[name] for case in CASES]
    together = engine.embed(texts(engine) * 3, pooling=pooling)
    np.testing.assert_allclose(together, expected * 3, atol=1e-5)
    alone = [engine.embed([text], pooling=pooling)[0] for text in texts(engine)]
    np.testing.assert_allclose(alone, expected, atol=1e-5)


def test_classes(engine: Engine) -> None:
    expected = [case["logits"] for case in CASES]
    np.testing.assert_allclose(logits(engine, texts(engine)), expected, atol=1e-5)


def test_a_text_may_fill_the_step_and_no_more(engine: Engine) -> None:
    assert engine.info.max_model_len == 96  # the checkpoint has 512 positions
    assert engine.embed([(5,) * 96]).shape == (1, 48)
    with pytest.raises(InvalidRequest, match="at most 96 tokens, not 97"):
        engine.embed([(5,) * 97])


def test_what_generates_is_refused(engine: Engine) -> None:
    with pytest.raises(UnsupportedFeature, match="a classifier, which has no next token"):
        engine.generate((1, 2, 3))
    with pytest.raises(UnsupportedFeature, match="scores of tokens"):
        engine.score((1, 2), [(3,)])


def test_new_weights(engine: Engine) -> None:
    """Last, because it leaves the engine with other weights."""
    bias = np.array([1, 2, 3], np.float32)
    engine.update_weights({"classifier.bias": bias}, label="moved", partial=True).result(60)
    moved = bias - load_file(DIRECTORY / "model.safetensors")["classifier.bias"]
    np.testing.assert_allclose(logits(engine, texts(engine)[:1]), [CASES[0]["logits"] + moved], atol=1e-5)


@pytest.mark.parametrize(
    ("option", "value"), [("max_prefill_chunk", 16), ("prefix_cache_pages", 4), ("max_model_len", 100)]
)
def test_options_that_an_encoder_has_no_use_for(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{option}: .*encoder"):
        Engine.from_pretrained(str(DIRECTORY), config(**{option: value}))


def test_nothing_is_proposed_where_nothing_is_generated(caplog: pytest.LogCaptureFixture) -> None:
    """So no programs are compiled that check proposals, and callers are told of no proposer."""
    engine = Engine.from_pretrained(str(DIRECTORY), config(speculation="lookup"))
    assert engine.config.speculation == "off"
    assert "speculation: nothing is proposed, because the model generates nothing" in caplog.text
