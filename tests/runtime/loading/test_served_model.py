"""What loading a model makes of the operator's options."""

import dataclasses
import json
import shutil

import pytest
from flax import nnx

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.pooling import read_pooling
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


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [
        ("cls_token", Pooling.FIRST_TOKEN),
        ("mean_tokens", Pooling.MEAN),
        ("lasttoken", Pooling.LAST_TOKEN),
        ("max_tokens", None),
    ],
)
def test_the_pooling_of_sentence_transformers(tmp_path, mode, pooling):
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    if pooling is None:
        with pytest.raises(ConfigError, match="pooling_mode_max_tokens"):
            read_pooling(tmp_path, Pooling.MEAN)
    else:
        assert read_pooling(tmp_path, Pooling.MEAN) == pooling
