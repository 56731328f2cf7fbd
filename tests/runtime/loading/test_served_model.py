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
from penstock.runtime.loading.pooling import read_most_tokens, read_pooling, with_projections
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
        (ENCODER, "Pooling Dense", {"use_residual": True}, "use_residual must be false"),
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
    ("config", "found"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, Pooling.FIRST_TOKEN),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, Pooling.MEAN),
        ({"pooling_mode_lasttoken": True}, Pooling.LAST_TOKEN),
        ({"pooling_mode_max_tokens": True}, Pooling.MAX),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "not pooling_mode_mean_sqrt_len_tokens$"),
        (
            {"pooling_mode_weightedmean_tokens": True},
            "pooling_mode_max_tokens, not pooling_mode_weightedmean_tokens$",
        ),
        (
            {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True},
            "not pooling_mode_max_tokens and pooling_mode_mean_tokens$",
        ),
        ({}, "not none$"),
        # As Sentence Transformers 6 writes them. Several poolings, whose vectors it joins, are refused.
        ({"pooling_mode": "cls", "include_prompt": True}, Pooling.FIRST_TOKEN),
        ({"pooling_mode": "mean", "pooling_mode_cls_token": True}, Pooling.MEAN),
        ({"pooling_mode": ["lasttoken"]}, Pooling.LAST_TOKEN),
        ({"pooling_mode": "max"}, Pooling.MAX),
        ({"pooling_mode": "weightedmean"}, "one of lasttoken, cls, mean, max, not weightedmean$"),
        ({"pooling_mode": ["mean", "max"]}, "not mean and max$"),
        ({"pooling_mode": []}, "not none$"),
        ({"pooling_mode": {"mean": True}}, "not {'mean': True}$"),
        ({"pooling_mode": "mean", "include_prompt": False}, "include_prompt must be true"),
    ],
)
def test_the_pooling_of_sentence_transformers(tmp_path, config, found):
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if isinstance(found, Pooling):
        assert read_pooling(tmp_path, Pooling.MEAN) == found
    else:
        with pytest.raises(ConfigError, match=found):
            read_pooling(tmp_path, Pooling.MEAN)


@pytest.mark.parametrize(
    ("told", "of_tokenizer", "found"),
    [
        ({"max_seq_length": 32}, {"model_max_length": 48}, 32),
        ({"max_seq_length": None}, {"model_max_length": 48}, 48),
        ({"transformer_task": "feature-extraction"}, {"model_max_length": 48}, 48),
        ({"transformer_task": "feature-extraction"}, {"model_max_length": 1e30}, 10**30),
        ({"transformer_task": "feature-extraction"}, {}, None),
        ({"transformer_task": "feature-extraction"}, None, None),
        (None, {"model_max_length": 48}, None),  # nothing of Sentence Transformers, which would cut texts
    ],
)
def test_where_sentence_transformers_says_how_long_texts_may_be(tmp_path, told, of_tokenizer, found):
    for name, content in (("sentence_bert_config.json", told), ("tokenizer_config.json", of_tokenizer)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert (read_most_tokens(tmp_path) or 0) == pytest.approx(found or 0)
