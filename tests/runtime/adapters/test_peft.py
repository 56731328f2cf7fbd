"""Adapters as PEFT writes them: which numbers go where, and what is refused by the name of a tensor or of a
field.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.adapters.interface import AdapterTensors, check_name
from penstock.runtime.adapters.peft import AdapterReader, read_config
from penstock.runtime.errors import AdapterFormatError, InvalidRequest
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.models.adapted import (
    AdaptedLayer,
    AdaptedModel,
    AdaptedPart,
    AdaptedPiece,
    AdapterSizes,
)
from penstock.runtime.ops.adapters import AdapterPlace
from penstock.runtime.sent_tensors import SentTensor

RANK = 4
FUSED = AdapterPlace(0, 3, (2, 1))
"""Two layers of the checkpoint that the model computes together; of the first the outputs change places."""
DOWN = AdapterPlace(FUSED.size, 2, (3,))


def part(place: AdapterPlace, number: int, outputs: list[int]) -> AdaptedPart:
    """Make a part on one device, which has all inputs."""
    return AdaptedPart(place, number, (AdaptedPiece(0, np.array(outputs), slice(0, place.in_size)),))


MODEL = AdaptedModel(
    {
        "model.layers.0.self_attn.q_proj": AdaptedLayer(3, 2, (part(FUSED, 0, [1, 0]),)),
        "model.layers.0.self_attn.k_proj": AdaptedLayer(3, 1, (part(FUSED, 1, [0]),)),
        "model.layers.0.mlp.down_proj": AdaptedLayer(2, 3, (part(DOWN, 0, [0, 1, 2]),)),
    },
    {},
    AdapterSizes(FUSED.size + DOWN.size, FUSED.size + DOWN.size),
    takes_experts=False,
    dtype=np.dtype(np.float32),
    is_native=False,
)
READER = AdapterReader(MODEL, RANK)
Q = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
A, B = np.arange(1, 7, dtype=np.float32).reshape(2, 3), np.arange(1, 5, dtype=np.float32).reshape(2, 2)
TENSORS = {f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": B}


def sent(config: dict[str, Any], tensors: dict[str, Any]) -> AdapterTensors:
    return AdapterTensors(config, tensors.items())


def described(tensors: dict[str, Any]) -> list[SentTensor]:
    return [SentTensor(name, name_of(array.dtype), array.shape) for name, array in tensors.items()]


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    data = b""
    kinds = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    for name, array in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": kinds[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def test_the_numbers_lie_where_the_computation_reads_them() -> None:
    """A is [in, rank], B is [rank, out] with the scaling alpha / r = 2, and what no matrix fills is zero."""
    READER.check(CONFIG, described(TENSORS))
    made = READER.read(sent(CONFIG, TENSORS))
    values = made.values.whole().reshape(-1, RANK)
    assert made.values.num_bytes == 4 * (A.size + B.size)  # and no zeros
    np.testing.assert_array_equal(values[:3], [[1, 4, 0, 0], [2, 5, 0, 0], [3, 6, 0, 0]])
    b = values[6:8].reshape(RANK, 2)  # behind the A of k_proj
    np.testing.assert_array_equal(b, [[6, 2], [8, 4], [0, 0], [0, 0]])  # outputs 1 and 0, times 2
    assert not values[3:6].any()
    assert not values[8:].any()
    assert (made.rank, made.scaling, made.targets) == (2, 2.0, ("q_proj",))


def test_one_that_fills_its_place_is_kept_as_the_device_takes_it() -> None:
    name = "model.layers.0.mlp.down_proj"
    model = dataclasses.replace(
        MODEL,
        layers={name: AdaptedLayer(2, 3, (part(AdapterPlace(0, 2, (3,)), 0, [0, 1, 2]),))},
        sizes=AdapterSizes(5, 5),
    )
    for rank in (2, 3):  # of 4: half of the place, and three quarters
        a, b = np.ones((rank, 2), np.float32), np.full((3, rank), 2, np.float32)
        tensors = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        values = AdapterReader(model, 4).read(sent({"r": rank, "lora_alpha": rank}, tensors)).values
        whole = values.whole()
        np.testing.assert_array_equal(whole[:8].reshape(2, 4), [[1] * rank + [0] * (4 - rank)] * 2)
        np.testing.assert_array_equal(whole[8:].reshape(4, 3), [[2] * 3] * rank + [[0] * 3] * (4 - rank))
        assert (values.placed is not None) == (rank == 3)
        assert values.num_bytes == (80 if rank == 3 else 40)
        assert values.placed is None or values.whole() is whole
        assert whole.ctypes.data % 64 == 0  # XLA copies other arrays


def test_matrices_are_packed_where_native_kernels_read_them() -> None:
    """The rank is odd, and smaller than the place has room for."""
    place, name = AdapterPlace(0, 4, (16, 32), packed=True), "model.layers.0.self_attn.q_proj"
    outputs = list(range(48, 16, -1))
    layers = {name: AdaptedLayer(4, 64, (part(place, 1, outputs),))}
    model = dataclasses.replace(MODEL, layers=layers, sizes=AdapterSizes(place.size, place.size))
    a = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    b = np.arange(192, dtype=np.float32).reshape(64, 3)
    tensors = {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b}
    values = AdapterReader(model, RANK).read(sent({"r": 3, "lora_alpha": 6}, tensors)).values.whole()
    packed_a = values[place.a_at(1) * RANK :][: 4 * RANK].reshape(2, RANK, 2)
    packed_b = values[place.b_at(1) * RANK :].reshape(2, RANK // 2, 16, 2)
    for rank in range(RANK):
        for number in range(4):
            assert packed_a[number // 2, rank, number % 2] == (a[rank, number] if rank < 3 else 0)
        for number, output in enumerate(outputs):
            own = packed_b[number // 16, rank // 2, number % 16, rank % 2]
            assert own == (2 * b[output, rank] if rank < 3 else 0)


@pytest.mark.parametrize(
    ("fields", "rank", "scaling"),
    [
        ({"r": 4, "lora_alpha": 8}, 4, 2.0),
        ({"r": 4, "lora_alpha": 8, "use_rslora": True}, 4, 4.0),
        ({"rank_pattern": {"k_proj": 1, "q_proj": 4}}, 4, 1.0),
        ({"rank_pattern": {r"layers\.0\..*q_proj": 4}, "alpha_pattern": {"q_proj": 2}}, 4, 0.5),
        ({"rank_pattern": {"proj": 4}}, 2, 2.0),  # a pattern matches from a dot on, or the whole name
    ],
)
def test_ranks_and_scalings(fields: dict[str, Any], rank: int, scaling: float) -> None:
    config = read_config({**CONFIG, **fields})
    name = "model.layers.0.self_attn.q_proj"
    assert (config.rank_of(name), config.scaling_of(name)) == (rank, scaling)


def test_files_and_what_is_sent_are_one_adapter_if_their_numbers_are(tmp_path: Path) -> None:
    read = READER.read(write(tmp_path / "a", CONFIG, TENSORS))
    of_its_only_piece = hashlib.sha256(read.values.whole().tobytes()).digest()
    assert read.digest == hashlib.sha256(of_its_only_piece).hexdigest()
    assert read.digest == READER.read(sent(CONFIG, TENSORS)).digest
    halved = {name: t.astype(ml_dtypes.bfloat16) for name, t in TENSORS.items()}  # exact in bfloat16 too
    assert read.digest == READER.read(write(tmp_path / "b", CONFIG, halved)).digest
    assert read.digest != READER.read(sent({**CONFIG, "lora_alpha": 5}, TENSORS)).digest


BAD_TENSORS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "of another model": ({}, {Q.replace("0", "7") + ".lora_A.weight": A}, "layers.7.", "no such layer"),
    "a head": ({}, {"base_model.model.lm_head.lora_A.weight": A}, "lm_head", "no such layer"),
    "a shape": ({}, {f"{Q}.lora_A.weight": A[:, :2]}, "q_proj.lora_A", r"\(2, 2\); with rank 2 .* \(2, 3\)"),
    "a rank": ({"r": 3}, {}, "q_proj.lora_A", "with rank 3"),
    "a rank that is too large": ({"r": 8}, {}, "q_proj.lora_A", "rank is 8.* at most 4"),
    "NaN": ({}, {f"{Q}.lora_B.weight": np.full((2, 2), np.nan, np.float32)}, "lora_B", "NaN or infinity"),
    "infinity": ({}, {f"{Q}.lora_A.weight": np.full((2, 3), np.inf, np.float32)}, "lora_A", "NaN or inf"),
    "whole numbers": ({}, {f"{Q}.lora_A.weight": A.astype(np.int32)}, "lora_A", "dtype is int32"),
    "an embedding": ({}, {f"{Q}.lora_embedding_A": A}, "lora_embedding_A", "only matrices"),
    "a magnitude": ({}, {f"{Q}.lora_magnitude_vector": A}, "magnitude", "only matrices"),
    "a matrix twice": ({}, {f"{Q}.lora_A.default.weight": A}, "default", "already"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_bad_tensor_is_named(case: str) -> None:
    fields, tensors, named, message = BAD_TENSORS[case]
    with pytest.raises(AdapterFormatError, match=message) as caught:
        READER.read(sent({**CONFIG, **fields}, {**TENSORS, **tensors}))
    assert named in (caught.value.tensor or "")
    if "inf" in message:  # which the values alone tell
        return
    with pytest.raises(AdapterFormatError, match=message) as caught:  # also before its values are there
        READER.check({**CONFIG, **fields}, described({**TENSORS, **tensors}))
    assert named in (caught.value.tensor or "")


@pytest.mark.parametrize("half", ["A", "B"])
def test_a_missing_half_is_named(half: str) -> None:
    tensors = {f"{Q}.lora_{half}.weight": TENSORS[f"{Q}.lora_{half}.weight"]}
    with pytest.raises(AdapterFormatError, match="q_proj is missing"):
        READER.read(sent(CONFIG, tensors))
    with pytest.raises(AdapterFormatError, match="q_proj is missing"):  # also before its values are there
        READER.check(CONFIG, described(tensors))


def test_a_scaling_that_leaves_the_range_of_the_dtype() -> None:
    with pytest.raises(AdapterFormatError, match="too large for float32"):
        READER.read(sent({**CONFIG, "lora_alpha": 1e38}, {**TENSORS, f"{Q}.lora_B.weight": B * 1000}))
    with pytest.raises(AdapterFormatError, match="too large for float32"):
        READER.read(sent({**CONFIG, "lora_alpha": 1e300}, {**TENSORS, f"{Q}.lora_B.weight": B - 1}))


def test_numbers_in_bfloat16_are_those_of_the_tensors() -> None:
    """A is kept as it is, and B times 2 is rounded once. What is not finite is found in either dtype."""
    reader = AdapterReader(dataclasses.replace(MODEL, dtype=np.dtype(ml_dtypes.bfloat16)), RANK)
    a, b = A.astype(ml_dtypes.bfloat16) / 3, B / np.float32(3)
    tensors = {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b}
    values = reader.read(sent(CONFIG, tensors)).values
    own, scaled = (block.matrix for block in values.blocks)
    assert own.dtype == scaled.dtype == values.dtype
    np.testing.assert_array_equal(own, a.T)
    exact = 2 * b.astype(np.float64)[[1, 0]].T  # the outputs change places
    assert np.abs(scaled.astype(np.float64) - exact).max() <= np.abs(exact).max() * 2**-9
    a[0, 0] = 9  # what was sent may change when it was read
    assert own[0, 0] != 9
    for half in ("A", "B"):
        name = f"{Q}.lora_{half}.weight"
        for wrong in (np.nan, -np.inf):
            bad = tensors[name].copy()
            bad[1, 1] = wrong
            with pytest.raises(AdapterFormatError, match="NaN or infinity") as caught:
                reader.read(sent(CONFIG, {**tensors, name: bad}))
            assert caught.value.tensor == name
    with pytest.raises(AdapterFormatError, match="too large for bfloat16"):
        reader.read(sent({**CONFIG, "lora_alpha": 1e38}, {**tensors, f"{Q}.lora_B.weight": b * 1000}))


BAD_FIELDS: dict[str, dict[str, Any]] = {
    "peft_type": {"peft_type": "IA3"},
    "r": {"r": 0},
    "lora_alpha": {"lora_alpha": float("nan")},
    "alpha_pattern ": {"alpha_pattern": {"q_proj": 10**400}},
    "use_rslora": {"use_rslora": "yes"},
    "use_dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "target_parameters": {"target_parameters": ["experts.gate_up_proj"]},
    "layer_replication": {"layer_replication": [[0, 2]]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [1]},
    "init_lora_weights": {"init_lora_weights": "pissa_niter_16"},
    "a_field_of_tomorrow": {"a_field_of_tomorrow": 3},
    "target_modules": {"target_modules": ["q_proj", "k_proj"]},
    "layers_to_transform": {"layers_to_transform": "all"},
    "rank_pattern": {"rank_pattern": {"(a+)+b": 4}},
    "alpha_pattern": {"alpha_pattern": {"[": 4}},
}


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_a_field_that_is_not_honoured_is_named(field: str) -> None:
    with pytest.raises(AdapterFormatError) as caught:
        READER.read(sent({**CONFIG, **BAD_FIELDS[field]}, TENSORS))
    assert caught.value.field == field.strip()


LONG = [".*.*.*.*.*x", "(a|b)*", "a{1,9}", "(?=a)", r"(a)\1", "a" * 1001, ".?" * 40 + "x", "(.|.)" * 40 + "x"]


@pytest.mark.parametrize("pattern", LONG)
def test_a_pattern_that_might_take_long_is_refused(pattern: str) -> None:
    with pytest.raises(AdapterFormatError, match="too long or too costly"):
        read_config({**CONFIG, "rank_pattern": {pattern: 2}})


def test_a_pattern_may_list_layers_and_modules() -> None:
    pattern = rf"layers\.({'|'.join(map(str, range(48)))})\.(mlp|self_attn)\.(q|k|v|o)_proj"
    config = read_config({**CONFIG, "rank_pattern": {pattern: 4}})
    assert config.rank_of("model.layers.47.self_attn.q_proj") == 4


def test_damaged_folders(tmp_path: Path) -> None:
    """Errors do not tell where the folder lies."""
    with pytest.raises(AdapterFormatError, match=r"cannot be read.* 'adapter_model\.safetensors'") as caught:
        READER.read(tmp_path / "nowhere")
    assert str(tmp_path) not in str(caught.value)
    folder = write(tmp_path / "a", CONFIG, TENSORS)
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(AdapterFormatError, match="not a complete safetensors file") as caught:
        READER.read(folder)
    assert str(tmp_path) not in str(caught.value)
    (folder / "adapter_model.safetensors").write_bytes(whole)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterFormatError, match="no JSON") as caught:
        READER.read(folder)
    assert str(tmp_path) not in str(caught.value)


def test_a_folder_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "a", CONFIG, TENSORS)
    make = READER._made

    def made(*given: Any) -> Any:
        weights = make(*given)
        write(folder, {**CONFIG, "lora_alpha": 9}, TENSORS)
        return weights

    monkeypatch.setattr(READER, "_made", made)
    with pytest.raises(AdapterFormatError, match="changed while it was read"):
        READER.read(folder)


def expert(
    place: AdapterPlace, number: int, part_number: int, name: str, out_size: int
) -> tuple[str, AdaptedLayer]:
    """Make a layer of one expert that has a tensor of its own in the checkpoint."""
    at = part(place.of_expert(number), part_number, list(range(out_size)))
    return f"model.layers.0.mlp.experts.{number}.{name}", AdaptedLayer(place.in_size, out_size, (at,))


GATE_UP = AdapterPlace(0, 3, (1, 1), num_experts=2)
OF_DOWN = AdapterPlace(GATE_UP.size, 1, (3,), num_experts=2)
STACK = "model.layers.0.mlp.experts"
MIXTURE = AdaptedModel(
    dict(
        layer
        for number in range(2)
        for layer in (
            expert(GATE_UP, number, 0, "gate_proj", 1),
            expert(GATE_UP, number, 1, "up_proj", 1),
            expert(OF_DOWN, number, 0, "down_proj", 3),
        )
    ),
    {
        (0, "gate_up_proj"): tuple((f"{STACK}.{i}.gate_proj", f"{STACK}.{i}.up_proj") for i in range(2)),
        (0, "down_proj"): tuple((f"{STACK}.{i}.down_proj",) for i in range(2)),
    },
    AdapterSizes(0, GATE_UP.size + OF_DOWN.size),
    takes_experts=True,
    dtype=np.dtype(np.float32),
    is_native=False,
)


def test_parameters_that_stack_experts() -> None:
    """PEFT sorts the rows of A by expert and then by rank, the columns of B by rank and then by expert; and
    of two parameters of a module the first is wrapped by the second.
    """
    config = {"r": 2, "lora_alpha": 2, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    config["rank_pattern"] = {"experts.down_proj": 1}
    a = np.arange(12, dtype=np.float32).reshape(4, 3)  # rows: ranks 0 and 1 of expert 0, then of expert 1
    b = np.arange(8, dtype=np.float32).reshape(2, 4)  # columns: experts 0 and 1 of rank 0, then of rank 1
    down_a, down_b = np.array([[5.0], [7.0]], np.float32), np.arange(6, dtype=np.float32).reshape(3, 2)
    tensors = {
        f"{STACK}.base_layer.lora_A.weight": a,
        f"{STACK}.base_layer.lora_B.weight": b,
        f"{STACK}.lora_A.weight": down_a,
        f"{STACK}.lora_B.weight": down_b,
    }
    reader = AdapterReader(MIXTURE, RANK)
    values = reader.read(sent(config, tensors)).values.whole().reshape(-1, RANK)
    of_second = values[GATE_UP.size // 2 : GATE_UP.size]  # 3 units of A for each part, then 1 of each B
    for part_number in range(2):
        np.testing.assert_array_equal(of_second[3 * part_number : 3 * part_number + 3, :2], a[2:].T)
        np.testing.assert_array_equal(of_second[6 + part_number, :2], b[part_number, [1, 3]])
    np.testing.assert_array_equal(values[GATE_UP.size + 4, :1], [7])
    np.testing.assert_array_equal(
        values[GATE_UP.size + 5 : GATE_UP.size + 8].reshape(RANK, 3)[0], 2 * down_b[:, 1]
    )
    with pytest.raises(AdapterFormatError, match=r"down_proj") as caught:
        reader.read(sent(config, {name: tensors[name] for name in tensors if "base_layer" in name}))
    assert caught.value.field == "target_parameters"
    with pytest.raises(AdapterFormatError, match="no such layer"):
        reader.read(sent({**config, "target_parameters": ["experts.down_proj"]}, tensors))


@pytest.mark.parametrize("name", [f"{STACK}.0.down_proj", "layers.0.mlp.experts"])
def test_a_layer_of_an_expert_that_has_two_names(name: str) -> None:
    """The one of the two that is written last would be the adapter's."""
    config = {"r": 1, "target_parameters": ["experts.down_proj"]}
    a, b = np.ones((2, 1), np.float32), np.ones((3, 2), np.float32)
    count = 1 if name.endswith("down_proj") else 2
    tensors = {
        f"{STACK}.lora_A.weight": a,
        f"{STACK}.lora_B.weight": b,
        f"{name}.lora_A.weight": a[:count],
        f"{name}.lora_B.weight": b[:, :count],
    }
    with pytest.raises(AdapterFormatError, match="has this matrix already") as caught:
        AdapterReader(MIXTURE, RANK).read(sent(config, tensors))
    assert caught.value.tensor == f"{name}.lora_A.weight"


def test_an_expert_that_has_matrices_of_its_own() -> None:
    names = {f"{STACK}.1.up_proj.lora_A.weight": A[:1], f"{STACK}.1.up_proj.lora_B.weight": B[:1, :1]}
    config = {"r": 1, "lora_alpha": 2}
    values = AdapterReader(MIXTURE, RANK).read(sent(config, names)).values.whole().reshape(-1, RANK)
    assert values[GATE_UP.size // 2 + 3 : GATE_UP.size // 2 + 6, 0].tolist() == A[0].tolist()
    assert values[GATE_UP.size // 2 + 7, 0] == 2
    without = dataclasses.replace(MIXTURE, layers={}, stacks={}, takes_experts=False)
    with pytest.raises(AdapterFormatError, match="started without adapter_experts"):
        AdapterReader(without, RANK).read(sent(config, names))


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a\\b", "a:b", "a\nb", "x" * 129])
def test_names_that_no_adapter_can_have(name: str) -> None:
    with pytest.raises(InvalidRequest, match="adapter"):
        check_name(name)
