"""An engine that serves an encoder: its texts share steps, and what generates is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.runtime import Engine, EngineConfig
from penstock.runtime.errors import ConfigError, InvalidRequest, UnsupportedFeature
from penstock.runtime.inprocess.scoring import read
from penstock.runtime.requests.request import PromptReading
from tests.support.goldens import CONFIG, GOLDEN
from tests.support.updating import options

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


def texts(engine: Engine, cases: list[dict[str, Any]] = CASES) -> list[tuple[int, ...]]:
    size = engine.info.vocab_size
    return [tuple(i + t * size for i, t in zip(case["ids"], case["type_ids"], strict=True)) for case in cases]


@pytest.mark.parametrize(
    ("pooling", "name"),
    [("mean", "mean"), ("first_token", "cls"), ("last_token", "last"), ("max", "max")],
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


def test_layers_behind_the_pooling(tmp_path: Path) -> None:
    """Sentence Transformers' Dense, of which EmbeddingGemma has two: what PyTorch pooled, multiplied here in
    float64. The second one has a bias and tanh, and an update changes it.
    """
    folder = tmp_path / "bert"
    shutil.copytree(GOLDEN / "encoders" / "bert", folder)
    random = np.random.default_rng(5)
    wide = {"linear.weight": random.normal(size=(80, 48)).astype(np.float32)}
    small = {"linear.weight": random.normal(size=(6, 80)).astype(np.float32) / 9}
    small["linear.bias"] = random.normal(size=6).astype(np.float32)
    config_of: dict[str, dict[str, Any]] = {"1_Pooling": {"pooling_mode_mean_tokens": True}}
    for name, tensors, activation in (("2_Dense", wide, "Identity"), ("3_Dense", small, "Tanh")):
        out, into = tensors["linear.weight"].shape
        config_of[name] = {
            "in_features": into,
            "out_features": out,
            "bias": len(tensors) > 1,
            "activation_function": f"torch.nn.modules.activation.{activation}",
        }
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors")
    (folder / "1_Pooling").mkdir()
    for name, values in config_of.items():
        (folder / name / "config.json").write_text(json.dumps(values))
    modules = [{"path": name, "type": f"sentence_transformers.models.{name[2:]}"} for name in config_of]
    (folder / "modules.json").write_text(json.dumps(modules))
    cases = json.loads((folder / "expected.json").read_text())["cases"]

    def expected(pooled: np.ndarray, more: float = 0) -> np.ndarray:
        inner = pooled.astype(np.float64) @ wide["linear.weight"].T
        return np.tanh(inner @ small["linear.weight"].T + small["linear.bias"] + more)

    with Engine.from_pretrained(str(GOLDEN / "encoders" / "bert"), config()) as engine:
        asked = texts(engine, cases)
        pooled = engine.embed(asked, normalize=False)
        means = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        np.testing.assert_allclose(means, [case["mean"] for case in cases], atol=1e-5)
    with Engine.from_pretrained(str(folder), config()) as engine:
        assert engine.info.hidden_size == 6
        np.testing.assert_allclose(
            engine.embed(asked * 2, normalize=False), [*expected(pooled)] * 2, atol=1e-5
        )
        moved = {"3_Dense.linear.bias": small["linear.bias"] + 1}
        engine.update_weights(moved, label="moved", partial=True).result(60)
        np.testing.assert_allclose(engine.embed(asked, normalize=False), expected(pooled, 1), atol=1e-5)
        # A directory is read with its folders, so that no part of the weights is missing.
        upload = engine.updater.open_uri(options(), f"file://{folder}", roots=[tmp_path])
        upload.read()
        upload.commit(0).result(60)
        upload.close()
        np.testing.assert_allclose(engine.embed(asked, normalize=False), expected(pooled), atol=1e-5)
        with pytest.raises(InvalidRequest, match="from 1 to 6"):
            engine.embed(asked, dimensions=7)


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
