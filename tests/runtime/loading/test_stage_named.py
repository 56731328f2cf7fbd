"""Replacing weights by name: everything is checked and converted before anything is touched."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.runtime.errors import CheckpointError
from penstock.runtime.loading.checkpoint import load_config, load_weights, stage_named
from penstock.runtime.models.params import leaf_shapes, load_rules, state_to_leaves

UP = "model.layers.1.mlp.up_proj.weight"


def named(directory):
    return load_config(directory), load_file(directory / "model.safetensors")


def stage(config, tensors, directory, *, partial, dtype=None):
    """The new leaves beside those of the checkpoint as it is."""
    leaves = state_to_leaves(load_weights(directory, config, dtype, progress=False))
    current = dict(zip(leaf_shapes(config, dtype), leaves, strict=True))
    return stage_named(config, tensors, current, partial=partial, dtype=dtype)


def test_all_tensors_make_all_leaves_of_their_own(golden_root, by_name):
    directory = golden_root / "qwen2"
    config, tensors = named(directory)
    doubled = {name: 2 * tensor for name, tensor in tensors.items()}
    made = stage(config, doubled, directory, partial=False, dtype="bfloat16")
    assert all(leaf.parts is None for leaf in made.values())
    leaves = [made[path].value for path in leaf_shapes(config)]
    for name, value in by_name(config, leaves, "bfloat16").items():
        np.testing.assert_array_equal(value, doubled[name].astype(jnp.bfloat16))
    same = stage(config, tensors, directory, partial=False)
    for rule in load_rules(config).rules:
        (source,), (target,) = rule.sources, rule.targets
        assert not np.shares_memory(np.asarray(same[target.path].value), tensors[source.name])


def test_a_part_of_a_fused_leaf_keeps_the_rest(golden_root, by_name):
    directory = golden_root / "qwen2"
    config, tensors = named(directory)
    made = stage(config, {UP: -tensors[UP]}, directory, partial=True)
    ((path, leaf),) = made.items()
    assert path == ("layers", 1, "mlp", "gate_up_proj", "weight")
    assert leaf.parts == [(slice(112, 224),)]
    np.testing.assert_array_equal(leaf.value[:112], tensors[UP.replace("up_proj", "gate_proj")])
    np.testing.assert_array_equal(leaf.value[112:], -tensors[UP])
    with pytest.raises(CheckpointError, match=r"missing \(26\)"):
        stage(config, {UP: tensors[UP]}, directory, partial=False)


def test_lazy_tensors_are_asked_for_twice_and_let_go(golden_root):
    directory = golden_root / "qwen2"
    config, tensors = named(directory)
    asked = []

    class Lazy(dict[str, Any]):
        def __getitem__(self, name):
            asked.append(name)
            return np.array(super().__getitem__(name))

    stage(config, Lazy(tensors), directory, partial=False)
    assert sorted(asked) == sorted([*tensors, *tensors])


@pytest.mark.parametrize("partial", [True, False])
def test_staging_lists_everything_wrong(golden_root, partial):
    directory = golden_root / "qwen2"
    config, tensors = named(directory)
    del tensors["model.norm.weight"]
    tensors["ghost"] = tensors[UP]
    tensors[UP] = tensors[UP][1:]
    with pytest.raises(CheckpointError) as caught:
        stage(config, tensors, directory, partial=partial)
    assert caught.value.missing == (() if partial else ("model.norm.weight",))
    assert caught.value.extra == ("ghost",)
    assert caught.value.mismatched == (f"{UP} has shape [111, 48], expected [112, 48]",)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.bool_, jnp.float8_e4m3fn])
def test_staging_takes_floats_of_16_bits_or_more(golden_root, dtype):
    directory = golden_root / "qwen2"
    config, tensors = named(directory)
    with pytest.raises(CheckpointError, match=rf"{UP} has dtype {np.dtype(dtype)}"):
        stage(config, {UP: tensors[UP].astype(dtype)}, directory, partial=True)


def test_staging_lists_every_overflow(golden_root):
    directory = golden_root / "qwen2"
    config, tensors = named(directory)
    tensors = {name: np.array(t) for name, t in tensors.items()}
    for name in (UP, "model.norm.weight"):
        tensors[name].flat[0] = 1e9
    with pytest.raises(CheckpointError) as caught:
        stage(config, tensors, directory, partial=False, dtype="float16")
    assert len(caught.value.mismatched) == 2


def test_staging_takes_no_tied_head_by_itself(golden_root):
    directory = golden_root / "qwen3"
    config, tensors = named(directory)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): lm_head\.weight"):
        stage(config, head, directory, partial=True)
    both = stage(config, {**tensors, **head}, directory, partial=False)
    assert both.keys() == leaf_shapes(config).keys()
