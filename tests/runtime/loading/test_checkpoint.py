"""The loader of checkpoints: dtypes, all problems named at once, placement and progress; and the config.json
beside the weights.
"""

import io
import json
import logging
import re
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bench.checkpoint import SHAPES, write_checkpoint
from penstock.runtime.errors import CheckpointError, ConfigError
from penstock.runtime.loading import leaves as checkpoint_leaves
from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.loading.safetensors_files import TensorEntry, find_tensors
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.params import leaf_shapes, load_rules, state_to_leaves
from penstock.runtime.ops.native.linear import unpack
from tests.support.goldens import GOLDEN

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


def assert_same_by_name(one, other):
    assert one.keys() == other.keys()
    assert_same(one.values(), [other[name] for name in one])


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama_linear_rope"])
def test_every_tensor_lands_in_a_part_of_its_own(golden_root, by_name, name):
    directory = golden_root / name
    config = load_config(directory)
    tensors = load_file(directory / "model.safetensors")
    leaves = state_to_leaves(load_weights(directory, config, progress=False))
    assert_same_by_name(by_name(config, leaves), tensors)
    shapes = leaf_shapes(config)
    taken = {path: np.zeros(leaf.shape, int) for path, leaf in shapes.items()}
    for rule in load_rules(config).rules:
        for target in rule.targets:
            taken[target.path][target.part(0, rule.num_rows)] += 1
    assert all(leaf.max() == 1 for leaf in taken.values())
    assert all(leaf.all() for path, leaf in taken.items() if path != ("vectors",))  # the pool has gaps
    assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [(s.shape, s.dtype) for s in shapes.values()]


def test_shards_equal_a_single_file(copy, into_shards):
    directory = copy()
    single = load(directory)
    into_shards(directory)
    assert_same(load(directory), single)


@pytest.mark.parametrize("stored", [jnp.bfloat16, np.float16, np.float64])
def test_other_stored_dtypes(copy, by_name, stored):
    directory = copy()
    config = load_config(directory)
    tensors = rewrite(directory, lambda _: None, cast=stored)
    for dtype in (np.float32, jnp.bfloat16):
        loaded = by_name(config, load(directory, dtype), dtype)
        assert_same_by_name(loaded, {name: tensor.astype(dtype) for name, tensor in tensors.items()})


def quantized(weight):
    """Compute the symmetric int8 values and the scale of each output, by their definition."""
    wide = weight.astype(np.float32)
    scale = np.abs(wide).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(wide / scale).astype(np.int8), scale[:, 0]


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_leaves_do_not_depend_on_how_the_work_is_divided(tmp_path, monkeypatch, int8):
    """The weights are packed. The rows of a tensor are divided into many tasks of one block each, which run
    on many threads in any order.
    """
    directory = tmp_path
    write_checkpoint(directory, SHAPES["tiny"])
    linear = LinearFormat(packed=True, int8=int8)
    whole = load(directory, "bfloat16", linear=linear)
    monkeypatch.setattr(checkpoint_leaves, "_TASK_VALUES", 1)
    monkeypatch.setattr(checkpoint_leaves, "_STEP_VALUES", 1)
    assert_same(load(directory, "bfloat16", linear=linear, threads=7), whole)
    config, tensors = load_config(directory), find_tensors(directory)
    leaves = dict(zip(leaf_shapes(config, "bfloat16", linear), whole, strict=True))
    for name in ("k_proj", "v_proj"):
        hf_name = f"model.layers.1.self_attn.{name}.weight"
        rules = load_rules(config, "bfloat16", linear).rules
        rule = next(rule for rule in rules if rule.sources[0].name == hf_name)
        weight, *scales = [
            np.asarray(leaves[target.path])[target.part(0, rule.num_rows)] for target in rule.targets
        ]
        tensor = tensors[hf_name].map()
        values, scale = quantized(tensor) if int8 else (tensor, None)
        np.testing.assert_array_equal(unpack(weight), values)
        if int8:
            np.testing.assert_array_equal(scales[0], scale)


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
    assert "lm_head.weight has dtype I8" in str(error)
    assert str(directory) in str(error)


@pytest.mark.parametrize("golden", ["llama", "deepseek_v3", "gemma4"])
def test_stored_rotary_buffers_are_ignored(copy, golden):
    directory = copy(golden)
    before = load(directory)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(directory, lambda tensors: tensors.update({name: np.ones(6, np.float32)}))
    assert_same(load(directory), before)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(copy):
    directory = copy("qwen3")
    before = load(directory)
    embedding = "model.embed_tokens.weight"
    rewrite(directory, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].copy()}))
    assert load_config(directory).tie_word_embeddings
    assert_same(load(directory), before)


OWN_HEADS = sorted(
    file.parent.name
    for file in GOLDEN.glob("*/config.json")
    if not json.loads(file.read_text())["tie_word_embeddings"]
)


@pytest.mark.parametrize("golden", OWN_HEADS)
def test_a_tied_head_that_differs_is_not_tied(copy, golden_root, golden, caplog):
    """transformers 5.23 ties parameters of which both are in the checkpoint only if they are equal
    (`PreTrainedModel.tie_weights`). So a config.json that wrongly ties them changes nothing of the model.
    """
    directory = copy(golden)
    data = json.loads((directory / "config.json").read_text())
    for level in (data, data.get("text_config", data)):
        level["tie_word_embeddings"] = True
    (directory / "config.json").write_text(json.dumps(data))
    assert load_config(directory) == load_config(golden_root / golden)
    assert re.search(r"it ties (\w+\.)?(lm_head|embed_out)\.weight to", caplog.text)


@pytest.mark.parametrize(
    ("head", "mismatched"),
    [
        (lambda embedding: 2 * embedding, None),
        (lambda embedding: np.where(embedding == embedding[-1, -1], 0, embedding), None),
        (lambda embedding: embedding.astype(np.float64), None),
        (lambda embedding: embedding[:-1], "lm_head.weight has shape"),
        (lambda _: np.float32(1), "lm_head.weight has shape"),
    ],
    ids=["twice", "last value", "dtype", "shape", "scalar"],
)
def test_what_is_tied_by_mistake_must_fit_all_the_same(copy, by_name, head, mismatched):
    directory = copy("qwen3")
    made = rewrite(
        directory,
        lambda tensors: tensors.update(
            {"lm_head.weight": np.ascontiguousarray(head(tensors["model.embed_tokens.weight"]))}
        ),
    )
    config = load_config(directory)
    assert not config.tie_word_embeddings
    if mismatched is not None:
        with pytest.raises(CheckpointError, match=mismatched):
            load(directory)
        return
    for name, values in by_name(config, load(directory)).items():
        np.testing.assert_array_equal(values, made[name])


def test_an_untied_head_is_required(copy):
    directory = copy()
    rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing \(1\): lm_head\.weight"):
        load(directory)


def test_values_beyond_the_dtype_are_refused_and_not_made_infinite(copy):
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


def test_rows_of_a_tensor_are_those_of_all_of_it(golden_root):
    entry = find_tensors(golden_root / "qwen2")[UP]
    whole = entry.map()
    for rows in (slice(0, 112), slice(16, 48), slice(100, None), slice(7, 7)):
        np.testing.assert_array_equal(entry[rows], whole[rows])
    with pytest.raises(ValueError, match="one after the other"):
        entry[slice(0, 4, 2)]


def test_tensors_are_mapped_not_read(golden_root):
    entry = find_tensors(golden_root / "qwen2")[UP]
    value = entry.map()
    assert isinstance(value, np.memmap)
    assert not value.flags.writeable


def test_few_rows_are_mapped_at_a_time(copy, monkeypatch):
    """While rows are mapped and read, they count as memory of the process."""
    directory = copy()
    live, peak = set(), [0]
    original = TensorEntry.map

    def counting(entry):
        value = original(entry)
        base = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        live.add(id(base))
        peak[0] = max(peak[0], len(live))
        weakref.finalize(base, live.discard, id(base))
        return value

    monkeypatch.setattr(TensorEntry, "map", counting)
    load(directory, threads=2)
    assert 1 <= peak[0] <= 4  # for each thread its own, and the one before it
    assert not live


def test_placement_per_leaf(copy):
    directory = copy()
    seen = []
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def place(path):
        seen.append(path)
        return sharding

    leaves = load(directory, placement=place)
    shapes = leaf_shapes(load_config(directory))
    assert set(seen) == set(shapes)
    assert all(leaf.sharding == sharding for leaf in leaves)
    assert_same(load(directory, placement=jax.devices()[0]), leaves)


def test_progress_callback_ends_at_the_total(copy):
    directory = copy()
    calls = []
    load(directory, progress=lambda done, total: calls.append((done, total)))
    rules = load_rules(load_config(directory)).rules
    total = sum(tensor.nbytes for tensor in load_file(directory / "model.safetensors").values())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len(calls) == len(rules)


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
    with caplog.at_level(logging.INFO, "penstock.runtime.loading.checkpoint"):
        load(copy())
    assert "loading 27 tensors" in caplog.text


def test_generation_config_decides_the_eos_ids(copy):
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
