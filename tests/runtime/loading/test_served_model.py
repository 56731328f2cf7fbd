"""What loading a model makes of the operator's options."""

import dataclasses
import json
import shutil

from flax import nnx

from penstock.runtime.loading.served_model import load_model
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
