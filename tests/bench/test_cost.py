"""The roofline's arithmetic, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from safetensors.numpy import load_file

from bench.measures.cost import (
    Machine,
    Work,
    decode_spans,
    head_weights,
    layer_weights,
    one_pass,
    prefill_spans,
)
from bench.roofline import floors, measured
from bench.workloads import Group, Job, Workload
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.models.registry import parse_config
from tests.support.goldens import GOLDEN

# 1 layer: q and o of 8 x 8, k and v of 8 x 4, three MLP matrices of 8 x 16; a vocabulary of 100.
CONFIG = parse_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
)
LAYER = 2 * 64 + 2 * 32 + 3 * 128
HEAD = 800


def test_weights():
    assert layer_weights(CONFIG) == LAYER == 576
    assert head_weights(CONFIG) == HEAD


def test_weights_of_a_hybrid():
    hybrid = parse_config(
        {
            "architectures": ["Qwen3_5ForCausalLM"],
            "vocab_size": 100,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 2,
            "linear_value_head_dim": 3,
            "max_position_embeddings": 64,
        }
    )
    # Queries, keys and values of 4, 4 and 12 channels, gates and output of 12, and two numbers for each of 4
    # heads; queries, their gates and the output of 16 channels, keys and values of 8; two MLPs.
    assert layer_weights(hybrid) == 8 * (20 + 12 + 12 + 8) + 8 * (16 + 16 + 16 + 8 + 8) + 2 * 3 * 128


@pytest.mark.parametrize("name", ["lfm2", "granite_hybrid"])
def test_weights_are_those_of_the_tensors(name):
    """The matrices of a golden's layers, of which convolutions are none."""
    tensors = load_file(GOLDEN / name / "model.safetensors")
    sizes = [tensor.size for key, tensor in tensors.items() if "layers" in key and tensor.ndim == 2]
    assert layer_weights(load_config(GOLDEN / name)) == sum(sizes)


def test_prefill_from_the_start():
    # 3 tokens attend to 1 + 2 + 3 positions, 4 operations for each of 2 heads x 4 dimensions.
    work = one_pass(CONFIG, [(0, 3)])
    assert work.operations == 2 * (LAYER * 3 + HEAD) + 4 * 8 * 6
    # Weights of 2 bytes; keys and values of 3 positions, 4 dimensions, 2 bytes.
    assert work.bytes_read == 2 * (LAYER + HEAD) + 2 * 4 * 2 * 3


def test_decode_step_of_two():
    # One token each, at positions 4 and 9: they attend to 5 and 10.
    work = one_pass(CONFIG, [(4, 5), (9, 10)], weight_bytes=1)
    assert work.operations == 2 * 2 * (LAYER + HEAD) + 4 * 8 * 15
    assert work.bytes_read == (LAYER + HEAD) + 16 * 15


def test_shared_beginnings_are_computed_once():
    jobs = [Job((1, 2, 3, 4), 1), Job((1, 2, 9), 1), Job((7,), 1), Job((1, 2, 9), 1)]
    # The fourth prompt repeats the second, so only its last token is computed.
    assert prefill_spans(jobs) == [(0, 4), (2, 3), (0, 1), (2, 3)]
    assert prefill_spans(jobs[:2], [(1, 2, 3, 4, 5)]) == [(3, 4), (2, 3)]


def test_decode_spans():
    # Prompts of 2 tokens and 1 token. The first request generates 3 tokens, one of them by the prefill.
    assert decode_spans([Job((1, 2), 3), Job((1,), 2)]) == [[(2, 3), (1, 2)], [(3, 4)]]
    assert decode_spans([Job((1,), 1)]) == []


def test_the_slower_of_computing_and_reading_counts():
    machine = Machine(operations_per_s=10, bytes_per_s=2)
    assert machine.seconds(Work(50, 4)) == 5
    assert machine.seconds(Work(50, 20)) == 10


def test_an_int8_cache_has_a_scale_for_each_row():
    # A position has a key and a value of one head: 4 numbers of a byte and a scale of 4 bytes.
    plain, int8 = (one_pass(CONFIG, [(4, 5)], kv_is_int8=is_int8) for is_int8 in (False, True))
    assert plain.bytes_read == 2 * (LAYER + HEAD) + 5 * 2 * 2 * 4
    assert int8.bytes_read == 2 * (LAYER + HEAD) + 5 * 2 * (4 + 4)
    assert int8.operations == plain.operations


def test_floors_are_named_as_the_figures():
    machine = Machine(operations_per_s=1e9, bytes_per_s=1e3)
    alone = Workload("x", "", (Group(1, (2, 2), (3, 3)),), ())
    reading = 2 * (LAYER + HEAD)
    found = floors(CONFIG, alone, machine)
    assert found["ttft_s"][1] == pytest.approx((reading + 16 * 2) / 1e3)
    assert found["decode_s"][1] == pytest.approx((2 * reading + 16 * (3 + 4)) / 1e3)
    twice = Workload("x", "", (Group(2, (2, 2), (1, 1)),), (), waves=2)
    assert list(floors(CONFIG, twice, machine)) == ["wave1_s", "wave2_s"]


def test_measured_are_medians():
    lines = [{"engine": "e", "workload": "W1", "figures": {"wall_s": value}} for value in (3.0, 1.0, 2.0)]
    assert measured(lines) == {("e", "W1"): {"wall_s": 2.0}}
