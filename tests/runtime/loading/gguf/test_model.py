"""Metadata that lies about a model ends in an error that names the file, and nothing that it says is trusted
before the tensors agree.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.errors import CheckpointError, ConfigError
from penstock.runtime.loading.checkpoint import check_tensors
from penstock.runtime.loading.gguf import model as gguf_model
from penstock.runtime.loading.gguf.file import GgufFile, read_gguf
from penstock.runtime.models.params import load_rules
from tests.support.goldens import GOLDEN

_PATH = GOLDEN / "gguf" / "llama_gqa4_q5_0" / "model.gguf"


@pytest.fixture(scope="module")
def file() -> GgufFile:
    return read_gguf(_PATH)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, file: GgufFile) -> Any:
    """Read the golden with other metadata, and check its tensors by the load rules of the family."""

    def changed(**metadata: Any) -> Any:
        own = {key: value for key, value in {**file.metadata, **metadata}.items() if value is not None}
        other = dataclasses.replace(file, metadata=own)
        monkeypatch.setattr(gguf_model, "read_gguf", lambda path: other)
        found = gguf_model.read_model(Path("m.gguf"))
        check_tensors(load_rules(found.config, np.float32), found.tensors, where="m.gguf")
        return found

    return changed


_HUGE = (1 << 32) - 1
_LIES: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "architecture": ({"general.architecture": "mamba"}, r"unknown architecture 'mamba' of a GGUF file"),
    "no architecture": ({"general.architecture": None}, r"m?\.gguf: general\.architecture must name"),
    "adapter": ({"general.type": "adapter"}, r"general\.type is 'adapter'"),
    "layers": (
        {"llama.block_count": _HUGE},
        r"llama\.block_count: the file has no tensors for 4294967295 layers",
    ),
    "heads": (
        {"llama.attention.head_count": _HUGE},
        r"llama\.attention\.head_count: blk\.0\.attn_q\.weight has",
    ),
    "head size": (
        {"llama.attention.key_length": _HUGE},
        r"llama\.attention\.head_count: blk\.0\.attn_q\.weight has",
    ),
    "width": ({"llama.embedding_length": 2**64 - 1}, r"llama\.embedding_length: .* and below 8589934592"),
    "no heads": ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count: must be an integer"),
    "experts": (
        {"llama.expert_count": _HUGE, "llama.expert_used_count": 2},
        r"llama\.expert_count: no tensor ffn_gate_exps",
    ),
    "a key's type": ({"llama.embedding_length": "many"}, r"llama\.embedding_length: must be an integer"),
    "no context": ({"llama.context_length": None}, r"llama\.context_length: is required"),
    "an unknown key": ({"llama.warp_factor": 9}, r"llama\.warp_factor: 9 is not supported"),
    "no number": (
        {"llama.rope.freq_base": float("nan")},
        r"llama\.rope\.freq_base: must be a number",
    ),
    "RoPE": (
        {"llama.rope.scaling.type": "mystery"},
        r"llama\.rope\.scaling\.type: 'mystery' is not supported",
    ),
    "attention factor": (
        {
            "llama.rope.scaling.type": "linear",
            "llama.rope.scaling.factor": 2.0,
            "llama.rope.scaling.attn_factor": 2.0,
        },
        r"llama\.rope\.scaling\.attn_factor: 2\.0 is not supported with linear",
    ),
    "RoPE of a part": ({"llama.rope.dimension_count": 2}, r"partial_rotary_factor: .* is not supported"),
    "tokens": (
        {"tokenizer.ggml.tokens": ["a"] * 999, "tokenizer.ggml.token_type": [1] * 999},
        r"has 999 tokens",
    ),
    "a token's id": (
        {"tokenizer.ggml.eos_token_id": "2"},
        r"tokenizer\.ggml\.eos_token_id must be a token id",
    ),
    "sampling": ({"general.sampling.temp": -1.0}, r"general\.sampling\.\*.*temperature"),
    "inner size": ({"llama.feed_forward_length": 7}, r"mlp\.gate_proj\.weight"),
}


@pytest.mark.parametrize("name", _LIES)
def test_what_cannot_be_served_is_refused_by_its_key(read: Any, name: str) -> None:
    metadata, message = _LIES[name]
    with pytest.raises(ConfigError, match=message):
        read(**metadata)


def test_two_names_of_one_tensor_are_refused(file: GgufFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of the two counts must not depend on their order."""
    tensors = {**file.tensors, "blk.00.attn_q.weight": file.tensors["blk.0.attn_q.weight"]}
    monkeypatch.setattr(gguf_model, "read_gguf", lambda path: dataclasses.replace(file, tensors=tensors))
    with pytest.raises(ConfigError, match=r"tensor blk\.00\.attn_q\.weight is there twice"):
        gguf_model.read_model(Path("m.gguf"))


@pytest.mark.parametrize(
    "name", ["blk.0.{e}.weight", "{0}", "blk.0.attn_q", "blk.0.ffn_gate_exps.weight", "é"]
)
def test_an_unknown_tensor_is_refused_by_its_name(
    file: GgufFile, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also one of experts in a model without experts."""
    tensors = {**file.tensors, name: file.tensors["output_norm.weight"]}
    monkeypatch.setattr(gguf_model, "read_gguf", lambda path: dataclasses.replace(file, tensors=tensors))
    found = gguf_model.read_model(Path("m.gguf"))
    with pytest.raises(CheckpointError) as raised:
        check_tensors(load_rules(found.config, np.float32), found.tensors, where="m.gguf")
    assert len(raised.value.extra) == 1


def test_defaults_of_sampling_are_those_of_the_metadata(read: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = read(
            **{"general.sampling.temp": 0.5, "general.sampling.top_k": 7, "general.sampling.mirostat": 2}
        )
    assert (found.defaults.temperature, found.defaults.top_k) == (0.5, 7)
    assert "general.sampling.mirostat = 2 is not honoured" in caplog.text


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2, 3, 255, (1 << 31) - 1, _HUGE, (1 << 64) - 1, -1]),
    st.floats(width=32),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(0, _HUGE), st.text(max_size=3)), max_size=5),
)


@given(data=st.data())
def test_any_metadata_is_read_or_refused(file: GgufFile, data: st.DataObject) -> None:
    """Some keys have any values: those of the file, and those that other files of the architecture have."""
    further = [
        f"llama.{key}"
        for key in ("rope.scaling.type", "rope.scaling.factor", "expert_count", "attention.scale")
    ]
    further += ["tokenizer.ggml.scores", "tokenizer.chat_template", "general.sampling.top_k", "split.count"]
    changes = data.draw(
        st.dictionaries(st.sampled_from([*file.metadata, *further]), _VALUES, min_size=1, max_size=3)
    )
    if data.draw(st.booleans()):
        changes["tokenizer.ggml.model"] = "llama"
    metadata = {key: value for key, value in {**file.metadata, **changes}.items() if value is not None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_model, "read_gguf", lambda path: dataclasses.replace(file, metadata=metadata))
        try:
            found = gguf_model.read_model(Path("m.gguf"))
            check_tensors(load_rules(found.config, np.float32), found.tensors, where="m.gguf")
        except ConfigError:
            return
    for tensor in found.tensors.values():
        tensor[0:1]
