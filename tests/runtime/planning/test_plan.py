"""What a plan says of models: weights against published sizes, and all else against sums by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.models.registry import parse_config
from penstock.runtime.ops.gpu.forms import FORMS
from penstock.runtime.planning.chips import CHIPS, Chip, GpuTarget, Machine, read_machine
from penstock.runtime.planning.plan import plan
from tests.support.goldens import GOLDEN
from tests.support.models.configs import TINY, published

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
}
PRODUCTS = (4 + 2 + 2) * 4 * 8 + 16 * 8 + 2 * 16 * 8 + 8 * 16  # qkv, o, gate and up, down
PADDED = 32
"""A norm of fewer numbers takes so many in the model's pool."""
NORMS = 5 * PADDED  # before attention, before the MLP, the last one, queries, keys
HEAD = 100 * 8
OPTIONS = EngineConfig(max_num_seqs=3, max_num_batched_tokens=32, max_model_len=48, page_size=16)


def one(**changes: Any) -> Machine:
    """Make a chip of round numbers."""
    numbers: dict[str, Any] = {
        "memory_bytes": 100_000,
        "bytes_per_s": 1e6,
        "flops_per_s": 1e9,
    }
    return Machine(dataclasses.replace(CHIPS["h100"], **(numbers | changes)))


@pytest.mark.parametrize(
    ("config", "total_size"),
    [  # as model.safetensors.index.json says on the hub
        pytest.param(published("Qwen3-8B"), 16_381_470_720, marks=pytest.mark.ci),
        pytest.param(published("Qwen3-30B-A3B"), 61_064_245_248, marks=pytest.mark.ci),
        (published("Mixtral-8x7B-v0.1"), 93_405_585_408),
        (published("gemma-2-9b") | {"torch_dtype": "bfloat16"}, 18_483_411_968),
        (LLAMA_3_1_8B, 16_060_522_496),
    ],
    ids=["Qwen3-8B", "Qwen3-30B-A3B", "Mixtral-8x7B", "gemma-2-9b", "Llama-3.1-8B"],
)
def test_weights_take_what_was_published(config: dict[str, Any], total_size: int) -> None:
    options = EngineConfig(max_num_seqs=1, max_model_len=4096)
    assert plan(parse_config(config), read_machine("b200"), options).weight_bytes == total_size


def test_every_number_of_a_tiny_model() -> None:
    found = plan(parse_config(TINY), one(), OPTIONS)
    assert found.weight_bytes == 2 * (PRODUCTS + NORMS + 2 * HEAD)
    assert found.state_bytes == 3 * 100 * 8
    per_token = 2 * 2 * 4 * 2  # key and value, heads, channels, bytes
    assert found.kv_bytes_per_row == 48 * per_token
    # Attention of decode rows: key and value of 256 positions twice in float32, and their scores.
    scratch = 3 * 256 * 4 * (2 * 2 * 2 * 4 + 4)
    # Of a chunk of 32 tokens: 2 blocks, and one more for each row.
    scratch = max(scratch, 5 * 128 * 4 * (2 * 2 * 2 * 4 + 16 * 4))
    assert (found.temp_bytes, found.is_temp_compiled) == (scratch, False)
    assert found.usable_bytes == 85_500  # 0.9 of 0.95
    assert not found.fits  # scratch memory alone is too large
    assert found.problem is not None
    assert "scratch" in found.problem


def test_the_steps_of_a_tiny_model() -> None:
    found = plan(parse_config(TINY), one(), OPTIONS)
    decode, prefill = found.decode, found.prefill
    assert decode is not None
    assert prefill is not None
    per_token = 2 * 2 * 4 * 2
    read = 2 * (PRODUCTS + NORMS + HEAD + 3 * 8) + 3 * (48 + 1) * per_token
    attended = 4 * 4 * 4  # heads, 2 products of 2 operations, channels
    operations = 2 * 3 * (PRODUCTS + HEAD) + 3 * 48 * attended
    assert (decode.tokens, decode.bytes, decode.operations) == (3, read, operations)
    assert decode.least_s == pytest.approx(read / 1e6)
    assert decode.is_bound_by_memory
    # The first 32 tokens of one row: 1 + 2 + ... + 32 positions, and the head once.
    assert prefill.operations == 2 * (32 * PRODUCTS + HEAD) + 32 * 33 // 2 * attended
    assert prefill.bytes == 2 * (PRODUCTS + NORMS + HEAD + 32 * 8) + (32 + 32) * per_token
    for quantization in ("none", "int8"):  # products are in bfloat16 with both
        options = dataclasses.replace(OPTIONS, quantization=quantization)
        slow = plan(parse_config(TINY), one(flops_per_s=1e6), options).prefill
        assert slow is not None
        assert slow.least_s == pytest.approx(prefill.operations / 1e6)
        assert not slow.is_bound_by_memory


def test_a_draft_takes_its_part_of_everything() -> None:
    """As a draft of itself a model takes twice what it takes alone, except what the sampler keeps."""
    model, large = parse_config(TINY), one(memory_bytes=10**7)
    alone, both = plan(model, large, OPTIONS), plan(model, large, OPTIONS, draft=model)
    assert both.weight_bytes == 2 * alone.weight_bytes
    assert both.kv_bytes_per_row == 2 * alone.kv_bytes_per_row
    assert both.state_bytes == alone.state_bytes
    for one_step, two_steps in ((alone.decode, both.decode), (alone.prefill, both.prefill)):
        assert one_step is not None
        assert two_steps is not None
        assert (two_steps.tokens, two_steps.bytes, two_steps.operations) == (
            one_step.tokens,
            2 * one_step.bytes,
            2 * one_step.operations,
        )
        assert two_steps.least_s == pytest.approx(2 * one_step.least_s)
    two = Machine(large.chip, 2)
    cut, both = plan(model, two, OPTIONS), plan(model, two, OPTIONS, draft=model)
    assert cut.weight_bytes < alone.weight_bytes
    assert (both.weight_bytes, both.kv_bytes_per_row) == (2 * cut.weight_bytes, 2 * cut.kv_bytes_per_row)


def test_a_window_bounds_what_is_read_and_kept() -> None:
    config = TINY | {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 16,
        "max_position_embeddings": 64,
    }
    found = plan(parse_config(config), one(memory_bytes=10**9), OPTIONS)
    per_token = 2 * 2 * 4 * 2
    assert found.kv_bytes_per_row == 16 * per_token
    assert found.decode is not None
    weights = 2 * (
        PRODUCTS + NORMS - 2 * PADDED + HEAD + 3 * 8
    )  # this family has no norms of queries and keys
    assert found.decode.bytes == weights + 3 * (16 + 1) * per_token
    assert found.fits


def test_experts_are_read_as_often_as_they_are_drawn() -> None:
    """With one of two experts for a token, three tokens leave one of them out by 1/2 ** 3. XLA reads both."""
    config = TINY | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    found = plan(parse_config(config), one(memory_bytes=10**9), OPTIONS)
    assert found.decode is not None
    expert = 3 * 16 * 8
    attention = PRODUCTS - expert
    per_token = 2 * 2 * 4 * 2
    kept = 3 * (48 + 1) * per_token
    drawn = 2 * expert * (1 - 0.5**3)
    assert found.decode.bytes == 2 * (attention + NORMS + HEAD + 2 * 8 + 3 * 8 + drawn) + kept
    products = attention + HEAD + 2 * 8 + expert
    assert found.decode.operations == 2 * 3 * products + 3 * 48 * 4 * 4 * 4
    off = plan(parse_config(config), one(memory_bytes=10**9), dataclasses.replace(OPTIONS, native="off"))
    assert off.decode is not None
    assert off.decode.bytes == found.decode.bytes + 2 * 2 * expert * 0.5**3


def test_a_cache_of_int8_has_columns_where_kernels_read_it() -> None:
    """Eight heads of 128 channels have nine columns of 128 bytes on a TPU, and seventeen of 64 on a GPU with
    kernels, of each key and value of 32 layers. Other GPUs, and all of them without kernels, have rows of 132
    bytes.
    """
    options = EngineConfig(max_num_seqs=1, max_model_len=64, kv_cache_dtype="int8")
    model = parse_config(LLAMA_3_1_8B)
    found = [plan(model, read_machine(chip), options) for chip in ("tpu-v6e", "h100", "rtx4090")]
    off = dataclasses.replace(options, native="off")
    found += [plan(model, read_machine(chip), off) for chip in ("tpu-v6e", "h100")]
    of_token = (9 * 128, 17 * 64, 8 * 132, 9 * 128, 8 * 132)
    assert [each.kv_bytes_per_row for each in found] == [64 * 32 * 2 * n for n in of_token]


def test_a_cache_of_int8_is_no_plan_for_a_tpu_where_it_cannot_be_told_how_it_lies() -> None:
    options = EngineConfig(max_num_seqs=1, max_model_len=64, kv_cache_dtype="int8")
    model = parse_config(LLAMA_3_1_8B | {"head_dim": 124})
    problem = plan(model, read_machine("tpu-v6e"), options).problem
    assert problem is not None
    assert problem.startswith("kv_cache_dtype: ")


def test_weights_of_four_bits_take_less_and_are_multiplied_as_often() -> None:
    """A tile of 16 outputs and 64 inputs has 576 bytes, and 16 outputs have 64 more; table and head are
    int8.
    """
    config = TINY | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "vocab_size": 128}
    codes = dataclasses.replace(OPTIONS, quantization="int4")
    plain, packed = (plan(parse_config(config), one(), options) for options in (OPTIONS, codes))
    outputs = (4 + 2 + 2) * 16 + 64 + 2 * 64 + 64
    norms = 2 * (3 * 64 + 2 * PADDED)
    assert packed.weight_bytes == outputs // 16 * (576 + 64) + 128 * (64 + 4) + 128 * 64 * 2 + norms
    assert plain.decode is not None
    assert packed.decode is not None
    assert packed.decode.operations == plain.decode.operations
    assert packed.decode.bytes < plain.decode.bytes


def test_rows_of_learned_positions_are_looked_up() -> None:
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 100,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 1,
        "n_positions": 64,
    }
    found = plan(parse_config(config), one(), OPTIONS).decode
    longer = plan(parse_config(config | {"n_positions": 128}), one(), OPTIONS).decode
    assert found is not None
    assert longer is not None
    assert (longer.bytes, longer.operations) == (found.bytes, found.operations)


def test_the_cache_holds_what_the_memory_leaves() -> None:
    found = plan(parse_config(TINY), one(memory_bytes=10**6), OPTIONS)
    left = 855_000 - found.weight_bytes - found.state_bytes - found.temp_bytes
    assert (found.fits, found.kv_bytes, found.kv_tokens) == (True, left, left // 32)
    tight = plan(parse_config(TINY), one(memory_bytes=10**6), OPTIONS, temp_bytes=846_000)
    assert (tight.fits, tight.is_temp_compiled, tight.temp_bytes) == (False, True, 846_000)


def test_narrow_heads_take_whole_rows_of_a_tpu() -> None:
    """LFM2 attends in 6 layers, with 8 heads of 64 channels for keys, of which a TPU keeps 128 each."""
    model = parse_config(published("LFM2-1.2B"))
    options = dataclasses.replace(OPTIONS, max_model_len=1024)
    takes = [plan(model, read_machine(name), options).kv_bytes_per_row for name in ("h100", "tpu-v5e")]
    assert takes == [6 * 1024 * 2 * 8 * 64 * 2, 6 * 1024 * 2 * 8 * 128 * 2]


def test_a_model_is_cut_over_devices() -> None:
    """Products, heads of keys, the table of embeddings and the head are halves; norms are whole."""
    found = plan(parse_config(TINY), Machine(one().chip, 2), OPTIONS)
    assert found.weight_bytes == 2 * (PRODUCTS // 2 + NORMS + HEAD // 2 + HEAD // 2)
    assert found.kv_bytes_per_row == 48 * 2 * 4 * 2
    three = plan(parse_config(TINY), Machine(one().chip, 3), OPTIONS)
    assert not three.fits
    assert three.problem is not None
    assert "num_attention_heads are 4" in three.problem


def test_a_stage_has_its_own_layers_and_a_row_a_token_in_every_other_step() -> None:
    """Of three layers the first stage has two, and the table of embeddings; the last one has the head. The
    first one holds fewer tokens, and is slower. Of three rows it has two at a time.
    """
    model = parse_config({**TINY, "num_hidden_layers": 3})
    staged = dataclasses.replace(OPTIONS, pipeline_parallel_size=2)
    found = plan(model, Machine(one(memory_bytes=10**7).chip, 2), staged)
    pool = (3 * 4 + 1) * PADDED
    assert found.fits
    assert found.weight_bytes == 2 * (2 * PRODUCTS + pool + HEAD)
    assert found.state_bytes == 0  # the last stage samples
    assert found.temp_bytes == 5 * 128 * 4 * (2 * 2 * 2 * 4 + 16 * 4)
    per_token = 2 * 2 * 2 * 4 * 2
    assert found.kv_bytes_per_row == 48 * per_token
    decode, prefill = found.decode, found.prefill
    assert decode is not None
    assert prefill is not None
    read = 2 * (2 * PRODUCTS + pool + 2 * 8) + 2 * (48 + 1) * per_token
    assert (decode.tokens, decode.bytes) == (3, 2 * read)
    assert decode.operations == 2 * (2 * 2 * 2 * PRODUCTS + 2 * 48 * 2 * 4 * 4 * 4)
    assert decode.least_s == pytest.approx(2 * read / 1e6)
    assert prefill.bytes == 2 * (2 * PRODUCTS + pool + 32 * 8) + (32 + 32) * per_token
    three = plan(model, Machine(one().chip, 3), staged)
    assert three.problem == "pipeline_parallel_size: 3 devices cannot be dealt to 2 stages"


def test_a_table_that_is_the_head_too_is_multiplied_in_the_last_stage_alone() -> None:
    """The last stage has less left for its cache, because it samples; the first one is slower at prompts."""
    model = parse_config({**TINY, "num_hidden_layers": 3, "tie_word_embeddings": True})
    staged = dataclasses.replace(OPTIONS, pipeline_parallel_size=2)
    machine = Machine(one(memory_bytes=10**7, flops_per_s=1e6).chip, 2)
    prefill = plan(model, machine, staged).prefill
    assert prefill is not None
    assert prefill.operations == 2 * 32 * 2 * PRODUCTS + 2 * 32 * 33 // 2 * 4 * 4 * 4


def test_a_plan_has_the_server_s_ways_to_cut_a_model() -> None:
    """Of DeepSeek's golden each of two devices keeps 48 numbers of all tokens in 3 layers, or a half."""
    model, machine = load_config(GOLDEN / "deepseek_v3"), Machine(one(memory_bytes=10**8).chip, 2)
    dealt = dataclasses.replace(OPTIONS, context_parallel=True, expert_parallel=True)
    each = [plan(model, machine, options) for options in (OPTIONS, dealt)]
    assert [found.kv_bytes_per_row for found in each] == [48 * 3 * 48 * 4, 48 * 3 * 48 * 4 // 2]
    alone = plan(parse_config(TINY), machine, dealt).problem
    assert alone is not None
    assert "expert_parallel" in alone


def test_a_stage_that_keeps_no_tokens_does_not_say_how_many_fit() -> None:
    """Of four layers of Qwen 3.5's golden the last one attends: 2 heads, keys and values, 32 channels. So the
    second of two stages says it.
    """
    model, machine = load_config(GOLDEN / "qwen3_5"), Machine(one(memory_bytes=10**8).chip, 2)
    found = plan(model, machine, dataclasses.replace(OPTIONS, pipeline_parallel_size=2))
    assert found.kv_bytes_per_row == 48 * 2 * 2 * 32 * 4
    assert found.kv_tokens == found.kv_bytes * 48 // found.kv_bytes_per_row > 0


@pytest.mark.parametrize("name", ["h100", "tpu-v5e-4", "tpu-v7x-8"])
def test_machines_have_names(name: str) -> None:
    assert read_machine(name).name == name


@pytest.mark.parametrize("name", ["h101", "h100-0", "tpu", "", "h100-"])
def test_an_unknown_machine_is_refused_with_all_names(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^for: .*tpu-v5e-4.*rtx5090"):
        read_machine(name)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_a_chip_has_its_source_and_plausible_rates(chip: Chip) -> None:
    """A rate in the wrong unit would be off by a thousand."""
    assert chip.source.startswith("https://")
    assert 10 * 2**30 < chip.memory_bytes < 300 * 2**30
    assert 100 < chip.flops_per_s / chip.bytes_per_s < 1000


@pytest.mark.parametrize("name", ["h100", "h200", "b200", "rtx5090"])
def test_kernels_find_the_shared_memory_that_a_gpu_has(name: str) -> None:
    target = CHIPS[name].target
    assert isinstance(target, GpuTarget)
    form = FORMS[".".join(map(str, target.capability))]
    assert form.shared_bytes == target.shared_per_block


@pytest.mark.parametrize(("name", "has_them"), [("a100", False), ("h100", True), ("rtx5090", True)])
def test_gpus_have_the_features_of_their_generation_from_hopper_on(name: str, has_them: bool) -> None:
    """XLA finds them so of GPUs that are there; without them ptxas refuses the kernels for an RTX 5090."""
    assert ("feature_extension: ACCELERATED_FEATURES" in CHIPS[name].target_config) == has_them
