"""The text in which a lookup finds what outputs repeat."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from penstock.runtime import Engine, EngineConfig, building
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import choose_backend
from penstock.runtime.loading import served_model
from penstock.runtime.loading.hub import DEMO_TEXT
from penstock.runtime.loading.served_model import load_model, read_lookup_text
from penstock.runtime.text.codec import TextCodec
from tests.support.goldens import GOLDEN
from tests.support.models.table import random_tables, table_model
from tests.support.models.toy import toy_config

AUTO = EngineConfig(speculation="auto", lookup_text="demo", max_num_seqs=4, max_model_len=64)


def test_the_demo_s_text_reaches_the_lookup() -> None:
    model = load_model("demo", AUTO, choose_backend(AUTO, jax.devices()[0]))
    assert model.text is not None
    assert model.lookup_tokens is not None
    assert model.text.decode(model.lookup_tokens.tolist()) == DEMO_TEXT.read_text(encoding="utf-8")
    native = dataclasses.replace(model, is_native=True)
    backend = dataclasses.replace(
        choose_backend(AUTO, jax.devices()[0]), attends_batch_invariantly=lambda *_: True
    )
    with mock.patch.object(building, "Lookup") as made:
        Engine(native, AUTO, backend=backend)
    np.testing.assert_array_equal(made.call_args.kwargs["text"], model.lookup_tokens)
    with pytest.raises(ConfigError, match="lookup_text: a model has its tokens"):
        Engine(dataclasses.replace(native, lookup_tokens=None), AUTO, backend=backend)


def test_a_text_without_effect_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is proposed where bits may depend on a step's size."""
    config = toy_config(speculation="auto", lookup_text="demo")
    model = dataclasses.replace(table_model(random_tables()), lookup_tokens=np.arange(9, dtype=np.int32))
    engine = Engine(model, config)
    assert (engine.config.speculation, engine.config.lookup_text) == ("off", None)
    assert "lookup_text: has no effect" in caplog.text


def test_what_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any weights are read."""
    codec = TextCodec.find(GOLDEN / "qwen3")
    wrong, long, empty = tmp_path / "wrong", tmp_path / "long", tmp_path / "empty"
    empty.touch()
    wrong.write_bytes(b"\xff\xfe\xff")
    long.write_text("one two three four five six seven eight nine ten")
    monkeypatch.setattr(served_model, "MOST_TEXT_TOKENS", 5)
    for name, text, problem in (
        (str(tmp_path / "none"), codec, "lookup_text: .*none cannot be read"),
        ("~nobody-of-this-name/text", codec, "lookup_text: ~nobody.* cannot be read"),
        ("a\0b", codec, "lookup_text: .* cannot be read"),
        (str(empty), codec, "lookup_text: .*empty is empty"),
        (str(wrong), codec, "lookup_text: .*wrong cannot be read"),
        (str(long), None, "lookup_text: the model has no tokenizer"),
        (str(long), codec, "lookup_text: .*long has .* tokens, and at most 5 are read"),
    ):
        with pytest.raises(ConfigError, match=problem):
            read_lookup_text(name, text)
    monkeypatch.setattr(served_model, "MOST_TEXT_CHARS", 1000)
    with pytest.raises(ConfigError, match="lookup_text: /dev/zero has more than 1000 characters"):
        read_lookup_text("/dev/zero", codec)


@pytest.mark.parametrize(("speculation", "draft"), [("off", None), ("heads", None), ("auto", "demo")])
def test_a_text_goes_with_a_lookup(speculation: str, draft: str | None) -> None:
    with pytest.raises(ConfigError, match="lookup_text: goes with"):
        EngineConfig(speculation=speculation, draft_model=draft, lookup_text="demo")
