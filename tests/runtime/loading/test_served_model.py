"""What loading a model makes of the operator's options."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading import served_model
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.pooling import read_pooling, with_projections
from penstock.runtime.loading.served_model import load_model
from penstock.runtime.requests.request import Pooling
from tests.support.goldens import CONFIG, GOLDEN
from tests.support.models.configs import rope_of
from tests.support.models.toy import toy_backend


def test_the_context_that_is_asked_for_decides_on_longrope(tmp_path):
    shutil.copytree(GOLDEN / "phi3", tmp_path / "phi3")
    path = tmp_path / "phi3" / "config.json"
    data = json.loads(path.read_text())
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    path.write_text(json.dumps({**data, "rope_parameters": scaling, "original_max_position_embeddings": 64}))
    found = {}
    for max_len in (64, 65, None):
        options = dataclasses.replace(CONFIG, max_model_len=max_len)
        model = load_model(str(path.parent), options, toy_backend(options))
        found[max_len] = rope_of(nnx.merge(model.graphdef, model.weights).config).serves_long
    assert found == {64: False, 65: True, None: True}  # the model's own context has 1024 tokens


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("encoders/bert", "max_adapters: this model takes no adapters"),
        ("llama", "adapter_experts: this model has no experts that adapters can change"),
        ("llama4", "adapter_experts: this model has no experts that adapters can change"),
        ("granite_moe", "adapter_experts: adapters cannot change this model's experts"),
    ],
)
def test_adapters_that_a_model_cannot_have_are_refused_before_weights_are_read(name, told, monkeypatch):
    monkeypatch.setattr(served_model, "load_leaves", lambda *args, **more: pytest.fail("weights are read"))
    options = dataclasses.replace(CONFIG, max_adapters=2, adapter_experts=True)
    with pytest.raises(ConfigError, match=told):
        load_model(str(GOLDEN / name), options, toy_backend(options))


def test_an_encoder_takes_as_long_texts_as_sentence_transformers(tmp_path, caplog):
    folder = tmp_path / "bert"
    shutil.copytree(GOLDEN / "encoders" / "bert", folder)
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 32, "do_lower_case": True})
    )
    prompts = {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    caplog.set_level("INFO")
    found = {}
    for max_len in (None, 64):
        options = dataclasses.replace(CONFIG, max_model_len=max_len)
        found[max_len] = load_model(str(folder), options, toy_backend(options)).max_model_len
    assert found == {None: 32, 64: 512}  # who asks for more gets what the checkpoint has
    assert "query: 'q: ', document: ''; by default 'query'" in caplog.text
    assert "do_lower_case" in caplog.text


ENCODER = load_config(GOLDEN / "encoders" / "bert")
DENSE = {"in_features": 48, "out_features": 6, "bias": False, "activation_function": "torch.nn.Identity"}


@pytest.mark.parametrize(
    ("config", "kinds", "changed", "said"),
    [
        (ENCODER, "Pooling Dense Dense", {}, "in_features must be 6"),
        (ENCODER, "Dense Pooling", {}, "behind a Pooling"),
        (ENCODER, "Dense", {}, "behind a Pooling"),
        (ENCODER, "Pooling Normalize Dense", {}, "before Normalize"),
        (load_config(GOLDEN / "qwen3"), "Pooling Dense", {}, "in encoders"),
        (load_config(GOLDEN / "encoders" / "bert_classifier"), "Pooling Dense", {}, "in encoders"),
        (ENCODER, "Pooling Dense", {"out_features": 1 << 40}, "out_features must be from 1 to"),
        (ENCODER, "Pooling Dense", {"out_features": True}, "out_features must be from 1 to"),
        (ENCODER, "Pooling Dense", {"in_features": None}, "in_features must be 48"),
        (ENCODER, "Pooling Dense", {"bias": 1}, "bias must be true or false"),
        (ENCODER, "Pooling Dense", {"activation_function": "torch.nn.Mish"}, "activation_function must be"),
        (ENCODER, "Pooling Dense", {"activation_function": ["x"]}, "activation_function must be"),
        (ENCODER, "Pooling Dense", {"module_input_name": "token_embeddings"}, "module_input_name must be"),
        (ENCODER, "Pooling Dense", {}, "holds neither model.safetensors"),
    ],
)
def test_wrong_layers_behind_the_pooling_are_refused(tmp_path, config, kinds, changed, said):
    modules = [{"path": kind, "type": f"sentence_transformers.models.{kind}"} for kind in kinds.split()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "Dense").mkdir()
    (tmp_path / "Dense" / "config.json").write_text(json.dumps(DENSE | changed))
    if "Dense Dense" in kinds:
        save_file({"linear.weight": np.zeros((6, 48), np.float32)}, tmp_path / "Dense" / "model.safetensors")
    with pytest.raises(ConfigError, match=said):
        with_projections(config, tmp_path)


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [
        ("cls_token", Pooling.FIRST_TOKEN),
        ("mean_tokens", Pooling.MEAN),
        ("lasttoken", Pooling.LAST_TOKEN),
        ("max_tokens", Pooling.MAX),
        ("mean_sqrt_len_tokens", None),
        ("weightedmean_tokens", None),
        ("max_tokens and mean_tokens", None),
    ],
)
def test_the_pooling_of_sentence_transformers(tmp_path, mode, pooling):
    """Several poolings, whose vectors Sentence Transformers joins, are refused, as unknown ones are."""
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(
        json.dumps({f"pooling_mode_{name}": True for name in mode.split(" and ")})
    )
    if pooling is None:
        named = " and ".join(f"pooling_mode_{name}" for name in mode.split(" and "))
        with pytest.raises(ConfigError, match=f", not {named}$"):
            read_pooling(tmp_path, Pooling.MEAN)
    else:
        assert read_pooling(tmp_path, Pooling.MEAN) == pooling
