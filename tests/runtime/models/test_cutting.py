"""What each device of a mesh has of a model's weights, compared with slices of the checkpoint's tensors that
are written down here; and which numbers of devices are refused.
"""

import dataclasses
import math
import re

import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.adapters.interface import AdapterTensors
from penstock.runtime.adapters.peft import AdapterReader
from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.hub import DEMO_DIRECTORY
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.models.config import ExpertsConfig
from penstock.runtime.models.configs.recurrent import DeltaNetConfig
from penstock.runtime.models.cutting import cut, sizes_that_work
from penstock.runtime.models.families.mxfp4 import decode
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.load_rules import Cut, LoadRule, Source, Span, Target
from penstock.runtime.models.params import abstract_model, adapted_model, leaf_shapes, load_rules
from tests.support.goldens import GOLDEN, NAMES, WITH_IMAGES
from tests.support.suite.drawing import few


def leaves_of(name, devices, linear=PLAIN, **options):
    """Return the leaves of a golden that is cut over devices, and the checkpoint's tensors in float32."""
    directory = GOLDEN / name
    config, tensors = cut(load_config(directory), devices, **options), find_tensors(directory)
    shapes = leaf_shapes(config, "float32", linear)
    leaves = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in shapes.items()}
    for rule in load_rules(config, "float32", linear).rules:
        assert rule.fill(leaves, tensors, 0, rule.num_rows) == []
    arrays = {name: np.asarray(tensor[0 : tensor.shape[0]], np.float32) for name, tensor in tensors.items()}
    return {"/".join(map(str, path)): leaf for path, leaf in leaves.items()}, arrays


@pytest.mark.parametrize(("devices", "kv_heads"), [(2, ((0,), (1,))), (4, ((0,), (0,), (1,), (1,)))])
def test_heads_and_inner_channels_are_cut_and_heads_of_keys_repeat(devices, kv_heads):
    """qwen3 has 4 heads of queries and 2 of keys, each of 32 channels, and 112 inner channels."""
    leaves, tensors = leaves_of("qwen3", devices)
    layer = "model.layers.0"
    q, k, v, o = (tensors[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkvo")
    gate, up, down = (tensors[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    heads, inner = 4 // devices, 112 // devices
    for device in range(devices):
        mine = slice(device * heads * 32, (device + 1) * heads * 32)
        keys = np.concatenate([np.arange(32) + 32 * head for head in kv_heads[device]])
        qkv = np.concatenate([q[mine], k[keys], v[keys]])
        np.testing.assert_array_equal(leaves["layers/0/self_attn/qkv_proj/weight"][device], qkv)
        np.testing.assert_array_equal(leaves["layers/0/self_attn/o_proj/weight"][device], o[:, mine])
        some = slice(device * inner, (device + 1) * inner)
        both = np.concatenate([gate[some], up[some]])
        np.testing.assert_array_equal(leaves["layers/0/mlp/gate_up_proj/weight"][device], both)
        np.testing.assert_array_equal(leaves["layers/0/mlp/down_proj/weight"][device], down[:, some])


def test_a_bias_of_a_sum_is_on_the_first_device_alone():
    """gpt_oss has biases everywhere; that of o_proj would be added once by each device."""
    leaves, tensors = leaves_of("gpt_oss", 2)
    bias, vectors = tensors["model.layers.0.self_attn.o_proj.bias"], leaves["vectors"]
    places = [
        [at for at in range(vectors.shape[1]) if np.array_equal(vectors[device, at : at + len(bias)], bias)]
        for device in range(2)
    ]
    (at,) = places[0]
    assert places[1] == []
    np.testing.assert_array_equal(vectors[1, at : at + len(bias)], 0)
    sinks = tensors["model.layers.0.self_attn.sinks"]
    for device, mine in enumerate((sinks[:2], sinks[2:])):
        assert any(np.array_equal(vectors[device, i : i + 2], mine) for i in range(vectors.shape[1]))


def test_int8_scales_are_those_of_a_device_s_own_part():
    """The largest of each row's own 56 inner channels becomes 127."""
    leaves, tensors = leaves_of("qwen3", 2, LinearFormat(int8=True))
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    for device, some in enumerate((slice(0, 56), slice(56, 112))):
        mine = leaves["layers/0/mlp/down_proj/weight"][device]
        assert np.abs(mine).max(axis=1).tolist() == [127] * 48
        scales = np.abs(down[:, some]).max(axis=1) / 127
        np.testing.assert_allclose(mine * scales[:, None], down[:, some], atol=scales.max() * 0.51)


def test_heads_of_recurrent_layers_are_cut_wherever_a_tensor_has_them():
    """qwen3_5's nets have in_proj_qkv and a convolution over queries, keys and values of all heads."""
    config = load_config(GOLDEN / "qwen3_5")
    net = config.layers[0].attention
    assert isinstance(net, DeltaNetConfig)
    keys, values = net.key_channels, net.value_channels
    for devices in (2, 4):
        leaves, tensors = leaves_of("qwen3_5", devices)
        layer = "model.layers.0.linear_attn"
        qkv, z = tensors[f"{layer}.in_proj_qkv.weight"], tensors[f"{layer}.in_proj_z.weight"]
        taps = tensors[f"{layer}.conv1d.weight"][:, 0].T
        key_pieces = min(devices, net.num_key_heads)
        for device in range(devices):
            some = np.arange(keys // key_pieces) + device * key_pieces // devices * (keys // key_pieces)
            mine = np.arange(values // devices) + device * (values // devices)
            own = np.concatenate([some, keys + some, 2 * keys + mine])
            weight = leaves["layers/0/self_attn/in_proj/weight"][device]
            np.testing.assert_array_equal(weight, np.concatenate([qkv[own], z[mine]]))
            conv = taps[:, own].ravel()
            pool = leaves["vectors"][device]
            assert any(np.array_equal(pool[at : at + conv.size], conv) for at in range(pool.size))
            out = leaves["layers/0/self_attn/out_proj/weight"][device]
            np.testing.assert_array_equal(out, tensors[f"{layer}.out_proj.weight"][:, mine])


class Counted:
    """A tensor that counts the values that are read of it."""

    def __init__(self, values):
        self.values, self.shape, self.dtype, self.read = values, values.shape, values.dtype, 0

    def __getitem__(self, part):
        found = self.values[part]
        self.read += found.size
        return found


def test_experts_are_dealt_whole_and_the_shared_one_is_cut():
    leaves, tensors = leaves_of("deepseek_v3", 2, expert_parallel=True)
    config = load_config(GOLDEN / "deepseek_v3").layers[-1].mlp
    assert isinstance(config, ExpertsConfig)
    layer = f"model.layers.{len(load_config(GOLDEN / 'deepseek_v3').layers) - 1}.mlp"
    own = config.num_experts // 2
    shared = tensors[f"{layer}.shared_experts.down_proj.weight"]
    some = shared.shape[1] // 2
    path = layer.removeprefix("model.").replace(".", "/")
    for device in range(2):
        downs = leaves[f"{path}/experts/down_proj/weight"][device]
        for expert in range(own):
            name = f"{layer}.experts.{device * own + expert}.down_proj.weight"
            np.testing.assert_array_equal(downs[expert], tensors[name])
        mine = shared[:, device * some : (device + 1) * some]
        np.testing.assert_array_equal(leaves[f"{path}/shared_expert/down_proj/weight"][device, 0], mine)


@pytest.mark.parametrize(
    ("name", "devices", "told"),
    [
        ("qwen3", 2, "expert_parallel: must be left out: Qwen3ForCausalLM has no experts"),
        ("mixtral", 1, "expert_parallel: must be left out on one device"),
        ("deepseek_v3", 3, "num_experts are 8; sizes that would work: 1, 2, 4"),
    ],
)
def test_experts_that_cannot_be_dealt_are_refused(name, devices, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        cut(load_config(GOLDEN / name), devices, expert_parallel=True)


@pytest.mark.parametrize(
    ("name", "devices", "told"),
    [
        ("qwen3", 2, "context_parallel: must be left out: Qwen3ForCausalLM has attention that is not latent"),
        ("lfm2", 2, "context_parallel: must be left out: Lfm2ForCausalLM has attention that is not latent"),
        ("mamba2", 2, "context_parallel: must be left out: Mamba2ForCausalLM has no latent attention"),
        ("deepseek_v3", 1, "context_parallel: must be left out on one device"),
    ],
)
def test_caches_whose_pages_cannot_be_dealt_are_refused(name, devices, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        cut(load_config(GOLDEN / name), devices, context_parallel=True)


def test_adapters_are_cut_as_their_layers_are():
    """Of qwen3 on four devices: one head of queries and 28 inner channels each, and two devices have the same
    head of keys. Where a layer's outputs are cut, B is; where its inputs are, A is.
    """
    generator, devices, rank = np.random.default_rng(0), 4, 16
    model = adapted_model(cut(load_config(GOLDEN / "qwen3"), devices), "float32")
    names = {part: f"model.layers.1.self_attn.{part}_proj" for part in "qko"}
    names |= {part: f"model.layers.1.mlp.{part}_proj" for part in ("up", "down")}
    tensors = {}
    for part, name in names.items():
        layer = model.layers[name]
        tensors[part, "A"] = generator.standard_normal((8, layer.in_size)).astype(np.float32)
        tensors[part, "B"] = generator.standard_normal((layer.out_size, 8)).astype(np.float32)
    sent = [(f"{names[part]}.lora_{half}.weight", value) for (part, half), value in tensors.items()]
    made = AdapterReader(model, rank).read(AdapterTensors({"r": 8, "lora_alpha": 16}, sent))
    whole = made.values.whole()
    assert whole.shape == (devices, model.size * rank)
    for device, values in enumerate(whole):
        heads, inner = np.arange(32) + 32 * device, np.arange(28) + 28 * device
        keys = np.arange(32) + 32 * (device // 2)
        own = {"q": (None, heads), "k": (None, keys), "o": (heads, None), "up": (None, inner)}
        for part, (inputs, outputs) in (own | {"down": (inner, None)}).items():
            found = next(each for each in model.layers[names[part]].parts if each.pieces[0].device == device)
            place, number = found.place, found.part
            begin, size = place.a_at(number) * rank, place.in_size * rank
            a = values[begin : begin + size].reshape(place.in_size, rank)
            begin, size = place.b_at(number) * rank, place.parts[number] * rank
            b = values[begin : begin + size].reshape(rank, place.parts[number])
            whole_a, whole_b = tensors[part, "A"], 2 * tensors[part, "B"]
            np.testing.assert_array_equal(a[:, :8].T, whole_a if inputs is None else whole_a[:, inputs])
            np.testing.assert_array_equal(b[:8].T, whole_b if outputs is None else whole_b[outputs])
            assert not a[:, 8:].any()
            assert not b[8:].any()


def test_packed_adapters_are_cut_as_their_layers_are():
    """Native kernels multiply all layers of the demo model on two devices, which have two heads of queries
    and 384 inner channels each. A lies in pairs of inputs, and B in blocks of 16 outputs and pairs of ranks.
    """
    generator, devices, rank = np.random.default_rng(1), 2, 16
    config = cut(load_config(DEMO_DIRECTORY), devices)
    model = adapted_model(config, ml_dtypes.bfloat16, LinearFormat(packed=True))
    names = {part: f"model.layers.1.self_attn.{part}_proj" for part in "qo"}
    names |= {part: f"model.layers.1.mlp.{part}_proj" for part in ("up", "down")}
    a, b, sent = {}, {}, []
    for part, name in names.items():
        layer = model.layers[name]
        a[part] = generator.integers(-9, 9, (7, layer.in_size)).astype(ml_dtypes.bfloat16)
        b[part] = generator.integers(-9, 9, (layer.out_size, 7)).astype(ml_dtypes.bfloat16)
        sent += [(f"{name}.lora_A.weight", a[part]), (f"{name}.lora_B.weight", b[part])]
    made = AdapterReader(model, rank).read(AdapterTensors({"r": 7, "lora_alpha": 7}, sent))
    for device, values in enumerate(made.values.whole()):
        heads, inner = (slice(size * device, size * (device + 1)) for size in (128, 384))
        wanted = {
            "q": (a["q"], b["q"][heads]),
            "o": (a["o"][:, heads], b["o"]),
            "up": (a["up"], b["up"][inner]),
            "down": (a["down"][:, inner], b["down"]),
        }
        for part, (wanted_a, wanted_b) in wanted.items():
            found = next(each for each in model.layers[names[part]].parts if each.pieces[0].device == device)
            place, inputs, outputs = found.place, wanted_a.shape[1], len(wanted_b)
            assert place.packed
            pairs = values[place.a_at(found.part) * rank :][: inputs * rank].reshape(-1, rank, 2)
            blocks = values[place.b_at(found.part) * rank :][: outputs * rank].reshape(-1, rank // 2, 16, 2)
            got_a = pairs.transpose(1, 0, 2).reshape(rank, inputs)
            got_b = blocks.transpose(0, 2, 1, 3).reshape(outputs, rank)
            np.testing.assert_array_equal(got_a, np.pad(wanted_a, ((0, rank - 7), (0, 0))))
            np.testing.assert_array_equal(got_b, np.pad(wanted_b, ((0, 0), (0, rank - 7))))


FAMILIES = [*NAMES, *WITH_IMAGES]
WHOLE = r"norm|_a_proj|mlp\.gate\.|block_sparse_moe\.gate|e_score_correction"
"""Names of tensors that every device reads whole."""


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "deepseek_v3", "lfm2"])
def test_a_device_reads_its_own_slices_and_no_more(name):
    config, found = cut(load_config(GOLDEN / name), 2), find_tensors(GOLDEN / name)
    rules, shapes = load_rules(config, "float32").rules, leaf_shapes(config, "float32")
    leaves = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in shapes.items()}
    for device in range(2):
        counted = {name: Counted(tensor) for name, tensor in found.items()}
        for rule in rules:
            if rule.targets[0].at[0] == device:
                rule.fill(leaves, counted, 0, rule.num_rows)
        for tensor, its in counted.items():
            share = 1 if re.search(WHOLE, tensor) else 2
            assert its.read == math.prod(its.shape) // share, tensor


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6])
def test_columns_in_blocks_are_read_in_whole_blocks(devices):
    """gpt-oss has 32 columns in a block of MXFP4; a device's share may begin and end within one."""
    generator = np.random.default_rng(0)
    blocks, scales = generator.integers(0, 256, (5, 3, 16)), generator.integers(120, 130, (5, 3))
    tensors = {"blocks": blocks.astype(np.uint8), "scales": scales.astype(np.uint8)}
    whole, size, path = decode(list(tensors.values())).dequantised(), 96 // devices, ("leaf",)
    uint8 = np.dtype(np.uint8)
    rule = LoadRule(
        sources=tuple(Source(name, values.shape, dtype=uint8) for name, values in tensors.items()),
        targets=(Target(path),),
        num_rows=5,
        dtype=np.dtype(np.float32),
        decode=decode,
        cut=Cut(along="columns", spans=(Span(devices, size),)),
    )
    leaf = np.zeros((devices, 5, size), np.float32)
    for device in range(devices):
        counted = {name: Counted(values) for name, values in tensors.items()}
        (own,) = rule.on_device(device, devices)
        own.fill({path: leaf}, counted, 0, 5)
        mine = range(device * size // 32, -(-(device + 1) * size // 32))
        assert counted["scales"].read == 5 * len(mine)
        np.testing.assert_array_equal(leaf[device], whole[:, device * size : (device + 1) * size])


@pytest.mark.parametrize("name", few(FAMILIES, ("gemma3", "deepseek_v3", "qwen3_5"), ci=FAMILIES))
def test_every_family_can_be_cut(name):
    """`load_rules` proves that each leaf of each device is filled once, and that every tensor is read. A
    model's structure is a key of its programs.
    """
    config = load_config(GOLDEN / name)
    for devices in sizes_that_work(config)[1:]:
        hash(abstract_model(cut(config, devices), "float32")[0])
        rules = load_rules(cut(config, devices), "float32").rules
        assert {target.at[0] for rule in rules for target in rule.targets} == set(range(devices))


def test_what_does_not_divide_is_refused_with_the_sizes_that_work():
    config = load_config(GOLDEN / "qwen3")
    with pytest.raises(ConfigError, match="tensor_parallel_size") as told:
        cut(config, 3)
    for part in ("Qwen3ForCausalLM", "num_attention_heads are 4", "intermediate_size) are 112", "1, 2, 4"):
        assert part in str(told.value)
    assert sizes_that_work(config) == [1, 2, 4]


def test_one_device_changes_nothing():
    config = load_config(GOLDEN / "qwen3")
    assert cut(config, 1) is config
    assert dataclasses.replace(cut(config, 2), whole=None) != config
