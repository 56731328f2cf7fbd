"""The loader: dtypes, every complaint at once, placement, progress; and the config.json beside it."""

import io
import json
import logging
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.runtime import checkpoint
from penstock.runtime.checkpoint import load_config, load_weights
from penstock.runtime.checkpoint_safetensors import find_tensors
from penstock.runtime.errors import CheckpointError, ConfigError
from penstock.runtime.models.params import param_specs, state_to_leaves

UP = "model.layers.1.mlp.up_proj.weight"


def rewrite(directory, change, cast=None):
    """Apply `change` to the tensors of model.safetensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    if cast is not None:
        tensors = {name: t.astype(cast) for name, t in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    return tensors


def load(directory, dtype=None, **options):
    options = {"progress": False, **options}
    return state_to_leaves(load_weights(directory, load_config(directory), dtype, **options))


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama_linear_rope"])
def test_every_tensor_lands_at_its_path(golden_root, name):
    directory = golden_root / name
    config = load_config(directory)
    tensors = load_file(directory / "model.safetensors")
    specs = param_specs(config)
    assert {spec.hf_name for spec in specs} == set(tensors)
    state = load_weights(directory, config, progress=False)
    for spec, leaf in zip(specs, state_to_leaves(state), strict=True):
        node = state
        for step in spec.path:
            node = node[step]
        np.testing.assert_array_equal(node[...], tensors[spec.hf_name])
        np.testing.assert_array_equal(leaf, tensors[spec.hf_name])
        assert (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype)


def test_shards_equal_a_single_file(copy, into_shards):
    directory = copy()
    single = load(directory)
    into_shards(directory)
    assert_same(load(directory), single)


@pytest.mark.parametrize("stored", [jnp.bfloat16, np.float16, np.float64])
def test_other_stored_dtypes(copy, stored):
    directory = copy()
    tensors = rewrite(directory, lambda _: None, cast=stored)
    names = [spec.hf_name for spec in param_specs(load_config(directory))]
    assert_same(load(directory, "float32"), [tensors[n].astype(np.float32) for n in names])
    assert_same(load(directory, jnp.bfloat16), [tensors[n].astype(jnp.bfloat16) for n in names])


def test_auto_is_the_dtype_of_the_checkpoint(copy):
    directory = copy()
    data = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**data, "dtype": "bfloat16"}))
    assert {leaf.dtype for leaf in load(directory)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in load(directory, "auto")} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in load(directory, "float32")} == {np.dtype(np.float32)}


def test_every_problem_is_reported_before_anything_is_placed(copy, monkeypatch):
    directory = copy()

    def damage(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.0.self_attn.q_proj.bias"]
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["visual.patch_embed.weight"] = np.zeros((2, 2), np.float32)
        tensors[UP] = np.ascontiguousarray(tensors[UP].T)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)

    rewrite(directory, damage)
    monkeypatch.setattr(jax, "device_put", lambda *_: pytest.fail("a tensor was placed"))
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    error = caught.value
    assert set(error.missing) == {"model.norm.weight", "model.layers.0.self_attn.q_proj.bias"}
    assert set(error.extra) == {"model.layers.2.mlp.up_proj.weight", "visual.patch_embed.weight"}
    assert len(error.mismatched) == 2
    assert f"{UP} has shape [48, 112], expected [112, 48]" in str(error)
    assert "lm_head.weight has dtype int8" in str(error)
    assert str(directory) in str(error)


def test_stored_rotary_buffers_are_ignored(copy):
    directory = copy()
    before = load(directory)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(directory, lambda tensors: tensors.update({name: np.ones(6, np.float32)}))
    assert_same(load(directory), before)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(copy):
    directory = copy("qwen3")
    before = load(directory)
    embedding = "model.embed_tokens.weight"
    rewrite(directory, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].copy()}))
    assert_same(load(directory), before)
    rewrite(directory, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding] * 2}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load(directory)


def test_an_untied_head_is_required(copy):
    directory = copy()
    rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing \(1\): lm_head\.weight"):
        load(directory)


def test_values_beyond_the_dtype_are_refused_not_made_infinite(copy):
    directory = copy()
    rewrite(directory, lambda tensors: tensors[UP].__setitem__((0, 0), 1e6), cast=jnp.bfloat16)
    with pytest.raises(CheckpointError, match="beyond the range of float16"):
        load(directory, "float16")
    load(directory, "float32")


def test_loaded_weights_do_not_follow_the_file(copy):
    directory = copy()
    leaves = load(directory)
    before = [np.array(leaf) for leaf in leaves]
    file = directory / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(-4096, io.SEEK_END)
        stream.write(b"\x7f" * 4096)
    assert_same(leaves, before)
    with pytest.raises(AssertionError):
        assert_same(load(directory), before)  # the file did change


def test_tensors_are_mapped_not_read(golden_root):
    entry = find_tensors(golden_root / "qwen2")[UP]
    value = entry.map()
    assert isinstance(value, np.memmap)
    assert not value.flags.writeable


def test_tensors_are_held_one_at_a_time(copy, monkeypatch):
    directory = copy()
    live, peak = set(), [0]
    original = checkpoint._convert

    def counting(spec, tensor):
        value, problem = original(spec, tensor)
        base = tensor.base
        while isinstance(base.base, np.ndarray):
            base = base.base
        live.add(id(base))
        peak[0] = max(peak[0], len(live))
        weakref.finalize(base, live.discard, id(base))
        return value, problem

    monkeypatch.setattr(checkpoint, "_convert", counting)
    load(directory)
    assert peak[0] <= 2
    assert not live


def test_placement_per_parameter(copy):
    directory = copy()
    seen = []
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def place(spec):
        seen.append(spec.hf_name)
        return sharding

    leaves = load(directory, placement=place)
    assert seen == [spec.hf_name for spec in param_specs(load_config(directory))]
    assert all(leaf.sharding == sharding for leaf in leaves)
    assert_same(load(directory, placement=jax.devices()[0]), leaves)


def test_progress_callback_ends_at_the_total(copy):
    directory = copy()
    calls = []
    load(directory, progress=lambda done, total: calls.append((done, total)))
    total = sum(spec.num_bytes for spec in param_specs(load_config(directory)))
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len(calls) == len(param_specs(load_config(directory)))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "progress", "drawn"),
    [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)],
)
def test_the_bar_is_drawn_on_terminals_only(copy, monkeypatch, stream, progress, drawn):
    err = stream()
    monkeypatch.setattr(sys, "stderr", err)
    load(copy(), progress=progress)
    assert ("weights:" in err.getvalue()) == drawn
    assert ("100%" in err.getvalue()) == drawn


def test_loading_is_logged(copy, caplog):
    with caplog.at_level(logging.INFO, "penstock.runtime.checkpoint"):
        load(copy())
    assert "loading 27 tensors" in caplog.text


def test_generation_config_has_the_last_word_on_eos(copy):
    directory = copy()
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 2], "temperature": 0.6}')
    assert load_config(directory).eos_token_ids == (7, 2)
    (directory / "generation_config.json").write_text('{"temperature": 0.6}')
    assert load_config(directory).eos_token_ids == (2,)
    (directory / "generation_config.json").unlink()
    assert load_config(directory).eos_token_ids == (2,)
    (directory / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json.*eos_token_id"):
        load_config(directory)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_unreadable_config(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)
