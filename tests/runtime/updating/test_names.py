"""Updates whose tensors have other names than the checkpoint: they are read as a checkpoint's are."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.runtime import Engine
from penstock.runtime.errors import TensorsRefused
from penstock.runtime.sent_tensors import TensorReason
from tests.support.updating import Arrays, bits, changed, fresh_bits

HEAD, UP = "lm_head.weight", "model.layers.1.mlp.up_proj.weight"
BEGINNINGS = [
    pytest.param("", "lm_head.", id="none"),
    pytest.param("module.model.", "module.lm_head.", id="module"),
    pytest.param("_orig_mod.model.", "_orig_mod.lm_head.", id="_orig_mod"),
    pytest.param("module._orig_mod.model.", "module._orig_mod.lm_head.", id="both"),
    pytest.param("language_model.model.", "language_model.lm_head.", id="language_model"),
    pytest.param("model.language_model.", "lm_head.", id="inner"),
]


def renamed(tensors: Arrays, decoder: str, head: str) -> Arrays:
    """Return the tensors under names that begin so."""
    return {
        head + "weight" if name == HEAD else decoder + name.removeprefix("model."): values
        for name, values in tensors.items()
    }


@pytest.mark.parametrize(("decoder", "head"), BEGINNINGS)
def test_names_begin_as_they_may_in_a_checkpoint(
    engine: Engine, tensors: Arrays, tmp_path: Path, golden: Path, decoder: str, head: str
) -> None:
    """What serves then is what a fresh engine loads from files with these names."""
    new = renamed(changed(tensors), decoder, head)
    engine.update_weights(new, label="renamed").result(60)
    found = bits(engine)
    engine.update_weights(tensors, label="back").result(60)
    assert found == fresh_bits(golden, new, tmp_path / "fresh")


@pytest.mark.parametrize("decoder", ["", "module.model.", "model.language_model."])
def test_a_part_with_the_embeddings_tells_how_names_begin(
    engine: Engine, tensors: Arrays, decoder: str
) -> None:
    before = bits(engine)
    part = {name: tensors[name] for name in ("model.embed_tokens.weight", UP)}
    engine.update_weights(renamed(part, decoder, "lm_head."), label="part", partial=True).result(60)
    assert bits(engine) == before


@pytest.mark.parametrize(
    ("name", "alike"),
    [
        ("module." + UP, UP),
        (UP.removeprefix("model."), UP),
        ("model.language_model.layers.1.mlp.up_proj.weight", UP),
        ("module.lm_head.bias", None),
        ("model.layers.7.mlp.up_proj.weight", None),
        ("weight", None),
    ],
)
def test_a_name_that_only_begins_otherwise_is_refused_with_the_models(
    engine: Engine, tensors: Arrays, name: str, alike: str | None
) -> None:
    with pytest.raises(TensorsRefused) as refused:
        engine.update_weights({name: tensors[UP]}, label="part", partial=True)
    (problem,) = refused.value.problems
    assert problem.reason is TensorReason.UNKNOWN_NAME
    assert str(problem) == f"{name} " + (
        f"is an unknown name; the model has {alike}" if alike else "(unknown name)"
    )
