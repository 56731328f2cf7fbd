"""`penstock check` through main(): what it says of checkpoints that would serve, and of others."""

from __future__ import annotations

import json
import logging
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.checkpoint import SHAPES, config_json
from penstock.cli.__main__ import main
from tests.support.gguf_bytes import header, padded, typed
from tests.support.goldens import GOLDEN

Run = Callable[..., tuple[int, str, str]]
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "eos_token_id": [128001, 128009],
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `penstock check ...`. Returns exit code, stdout and stderr."""

    def command(*arguments: str) -> tuple[int, str, str]:
        code = main(["check", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


def test_a_program_that_goes_on_logs_as_before(run: Run) -> None:
    logger = logging.getLogger("penstock")
    before = logger.level
    assert before != logging.ERROR
    run(str(GOLDEN))
    run("no-such-folder")
    assert logger.level == before


def header_of(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    header.pop("__metadata__", None)
    return header


def write_llama_70b(folder: Path) -> int:
    """Write a checkpoint of the real size, whose file is all holes. Returns the number of its parameters."""
    hidden, inner, vocab, kv = 8192, 28672, 128256, 1024
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(80):
        of = f"model.layers.{i}"
        shapes |= {f"{of}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{of}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{of}.self_attn.{name}_proj.weight": (kv, hidden) for name in "kv"}
        shapes |= {f"{of}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{of}.mlp.down_proj.weight"] = (hidden, inner)
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return at // 2


def test_a_golden_with_all_figures(run: Run) -> None:
    code, out, err = run(str(GOLDEN / "qwen3"), "--json", "--max-model-len", "100", "--max-num-seqs", "3")
    facts = json.loads(out)
    tensors = header_of(GOLDEN / "qwen3" / "model.safetensors")
    assert (code, err) == (0, "")
    assert facts["parameters"] == sum(math.prod(tensor["shape"]) for tensor in tensors.values())
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 32 * 4  # layers, key and value, heads, dim, float32
    assert facts["request_bytes"] == 2 * 64 * facts["kv_bytes_per_token"]  # two pages of 64 tokens
    assert facts["total_bytes"] == facts["weight_bytes"] + 3 * facts["request_bytes"]
    assert 0 <= facts["weight_bytes"] - 4 * facts["parameters"] < 4096  # the gaps between small parameters
    assert (facts["tokenizer"], facts["chat_template"], facts["context_tokens"]) == (True, True, 100)
    assert facts["end_token_ids"] == [2]


def test_places_for_adapters(run: Run) -> None:
    """A place has room for inputs and outputs of each linear layer; one more place stays empty."""
    code, out, _ = run(str(GOLDEN / "llama"), "--json", "--max-adapters", "3")
    facts = json.loads(out)
    attention, mlp = 2 * (48 + 48) + 2 * (48 + 24), 3 * (48 + 112)
    assert (code, facts["adapter_bytes"]) == (0, (3 + 1) * 16 * 2 * (attention + mlp) * 4)
    whole = facts["weight_bytes"] + facts["adapter_bytes"] + facts["requests"] * facts["request_bytes"]
    assert facts["total_bytes"] == whole
    assert "adapters    0.4 MiB" in run(str(GOLDEN / "llama"), "--max-adapters", "3")[1]
    out = run(str(GOLDEN / "llama"), "--json", "--max-adapters", "3", "--tensor-parallel-size", "2")[1]
    # On each of two devices: half of the outputs of q, k, v, gate and up, and of the inputs of o and down.
    attention, mlp = (48 + 24) + (24 + 48) + 2 * (48 + 12), 2 * (48 + 56) + (56 + 48)
    assert json.loads(out)["adapter_bytes"] == (3 + 1) * 16 * 2 * (attention + mlp) * 4


def test_a_draft_model(run: Run) -> None:
    """As a draft of itself a model takes its memory twice, in weights and in pages."""
    folder = str(GOLDEN / "llama")
    alone = json.loads(run(folder, "--json")[1])
    code, out, _ = run(folder, "--json", "--draft-model", folder)
    facts = json.loads(out)
    assert (code, facts["draft_bytes"]) == (0, alone["weight_bytes"])
    for name in ("kv_bytes_per_token", "kv_bytes_per_page", "total_bytes"):
        assert facts[name] == 2 * alone[name]
    more = 2 * facts["weight_bytes"] + facts["cache_bytes"] - alone["weight_bytes"] - alone["cache_bytes"]
    assert facts["process_bytes"] - alone["process_bytes"] - more == pytest.approx(0, abs=50e6)
    code, _, error = run(folder, "--draft-model", str(GOLDEN / "gpt2"), "--max-model-len", "64")
    assert (code, "draft_model: " in error, "its tokenizer is another one" in error) == (1, True, True)
    code, _, error = run(f"{folder}/config.json", "--draft-model", folder)
    assert (code, "draft_model: needs the whole checkpoint" in error) == (1, True)


@pytest.mark.ci
def test_a_draft_has_no_adapters(run: Run) -> None:
    """Also where those of the model change experts."""
    draft = ("--draft-model", str(GOLDEN / "qwen3"))
    code, out, _ = run(
        str(GOLDEN / "qwen3_moe"), "--json", "--max-adapters", "3", "--adapter-experts", *draft
    )
    facts = json.loads(out)
    assert (code, facts["draft_bytes"] > 0, facts["adapter_bytes"] > 0) == (0, True, True)


@pytest.mark.ci
def test_heads(run: Run) -> None:
    """A token has 48 numbers of latent attention in the head, as in each of three layers, and 48 of a hidden
    state.
    """
    config = str(GOLDEN / "deepseek_v3" / "config.json")
    alone = json.loads(run(config, "--json")[1])
    code, out, _ = run(config, "--json", "--speculation", "heads")
    assert (code, json.loads(out)["kv_bytes_per_token"]) == (0, 4 * 5 * 48)
    assert (alone["kv_bytes_per_token"], alone["parameters"] < json.loads(out)["parameters"]) == (
        4 * 3 * 48,
        True,
    )
    code, _, error = run(str(GOLDEN / "llama"), "--speculation", "heads", "--max-model-len", "64")
    assert (code, "has no heads here" in error) == (1, True)
    code, _, error = run(
        str(GOLDEN / "llama"), "--speculation", "heads", "--draft-model", str(GOLDEN / "llama")
    )
    assert (code, "draft_model: goes with" in error) == (1, True)


@pytest.mark.parametrize(
    ("name", "option", "told"),
    [
        ("encoders/bert", (), "max_adapters: this model takes no adapters"),
        (
            "llama4",
            ("--adapter-experts",),
            "adapter_experts: this model has no experts that adapters can change",
        ),
        (
            "granite_moe",
            ("--adapter-experts",),
            "adapter_experts: adapters cannot change this model's experts",
        ),
    ],
)
def test_a_model_that_takes_no_adapters_is_named(
    run: Run, name: str, option: tuple[str, ...], told: str
) -> None:
    code, out, error = run(str(GOLDEN / name), "--max-adapters", "3", *option)
    assert (code, out) == (1, "")
    assert told in error


def test_a_kv_cache_of_int8(run: Run) -> None:
    """A byte for each of the 32 channels, and 4 for the scale."""
    code, out, _ = run(str(GOLDEN / "qwen3"), "--json", "--kv-cache-dtype", "int8")
    facts = json.loads(out)
    assert (code, facts["kv_cache_dtype"], facts["dtype"]) == (0, "int8", "float32")
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * (32 + 4)
    assert "in int8: 288 bytes for each token" in run(str(GOLDEN / "qwen3"), "--kv-cache-dtype", "int8")[1]
    assert "in float32: 1,024 bytes for each token" in run(str(GOLDEN / "qwen3"))[1]


@pytest.mark.ci
def test_a_quantised_checkpoint(run: Run) -> None:
    """A layer has seven weights, each with 4 bits for a code, and 16 for a scale and 4 for a zero of each 64
    inputs.
    """
    folder = str(GOLDEN / "quantised" / "awq_g64")
    code, out, err = run(folder, "--json")
    facts = json.loads(out)
    count = 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256)
    assert (code, err) == (0, "")
    assert facts["quantised"] == [
        {
            "form": "AWQ, 4 bits, groups of 64 with zeros",
            "kept": False,
            "weights": 14,
            "parameters": count,
            "bits_per_parameter": pytest.approx(4 + 20 / 64, abs=1e-3),
        }
    ]
    assert facts["parameters"] == count + 320 * 128 + 5 * 128
    text = run(folder)[1]
    assert "quantised   14 weights in the files as AWQ, 4 bits, groups of 64 with zeros: 4.31 bits" in text
    assert json.loads(run(str(GOLDEN / "qwen3"), "--json")[1])["quantised"] == []
    kept = json.loads(run(folder, "--json", "--quantization", "int4")[1])
    assert kept["quantised"] == [facts["quantised"][0] | {"kept": True}]
    # A tile of 16 x 64 has 512 bytes of codes, 64 of scales and 64 of zeros. An output has a factor.
    tiles, outputs = count // (16 * 64), 2 * (128 + 64 + 64 + 128 + 256 + 256 + 128)
    table, norms = 320 * (128 + 4), 5 * 128 * 2
    assert 0 <= kept["weight_bytes"] - (tiles * 640 + outputs * 4 + table + norms) < 4096


@pytest.mark.ci
def test_small_floats_are_kept_where_the_kernels_compute(run: Run) -> None:
    """MXFP4 has 4.25 bits a weight in the files, and in memory; the other numbers have 16."""
    folder = str(GOLDEN / "quantised" / "ct_mxfp4a16")
    floats, kept = (
        json.loads(run(folder, "--json", "--dtype", dtype)[1]) for dtype in ("float32", "bfloat16")
    )
    (form,) = kept["quantised"]
    assert floats["quantised"] == [form | {"kept": False}]
    if not kept["packed"]:
        pytest.skip("no native library on this machine")
    assert (form["kept"], form["bits_per_parameter"]) == (True, 4.25)
    others = kept["parameters"] - form["parameters"]
    assert 0 <= kept["weight_bytes"] - (form["parameters"] * 4.25 / 8 + others * 2) < 4096


def test_windowed_layers_hold_their_window(run: Run) -> None:
    code, out, _ = run(str(GOLDEN / "mistral_swa"), "--json")
    facts = json.loads(out)
    per_token = 2 * 2 * 2 * 16 * 4
    assert code == 0
    assert facts["kv_bytes_per_token"] == 0
    assert facts["kv_bytes_per_token_in_window"] == {"32": per_token}
    # A window of 32 touches two pages of 64. A request gets its next page before it gives the oldest one
    # back.
    assert facts["request_bytes"] == 3 * 64 * per_token


@pytest.mark.ci
def test_a_model_that_reads_images(run: Run, tmp_path: Path) -> None:
    """The golden has three embeddings of 48 float32 for a token: two are for layers that get some besides."""
    code, out, err = run(str(GOLDEN / "qwen3_vl"), "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert (facts["images"], facts["image_bytes_per_token"]) == (True, 3 * 48 * 4)
    assert "576 bytes for each token of an image" in run(str(GOLDEN / "qwen3_vl"))[1]
    folder = tmp_path / "qwen3_vl"
    shutil.copytree(GOLDEN / "qwen3_vl", folder)
    processor = folder / "preprocessor_config.json"
    processor.write_text(processor.read_text().replace('"patch_size": 8', '"patch_size": 4'))
    assert "patch_size is 4, and the model's 8" in run(str(folder))[2]
    processor.unlink()
    assert "do not say how images are made ready" in run(str(folder))[1]
    assert "none: the model reads text only" in run(str(GOLDEN / "qwen3"))[1]


@pytest.mark.ci
def test_a_model_that_generates_nothing(run: Run, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "encoders" / "bert_classifier", tmp_path / "bert")
    (tmp_path / "bert" / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    code, out, _ = run(str(tmp_path / "bert"))
    assert code == 0
    assert "nothing: it is a classifier, for embeddings and classes: LABEL_0, LABEL_1, LABEL_2" in out
    assert "128 tokens" in out
    facts = json.loads(run(str(tmp_path / "bert"), "--json")[1])
    assert (facts["generates"], facts["classes"]) == (False, ["LABEL_0", "LABEL_1", "LABEL_2"])
    assert (facts["kv_bytes_per_page"], facts["context_tokens"]) == (0, 128)
    assert "nothing: it is an encoder, for embeddings\n" in run(str(GOLDEN / "encoders" / "mpnet"))[1]
    code, _, err = run(str(GOLDEN / "encoders" / "mpnet"), "--max-adapters", "2")
    assert (code, "this model takes no adapters" in err) == (1, True)


@pytest.mark.ci
def test_seventy_billion_parameters_are_checked_without_reading_them(run: Run, tmp_path: Path) -> None:
    count = write_llama_70b(tmp_path / "large")
    code, out, _ = run(str(tmp_path / "large"), "--max-model-len", "8192", "--max-num-seqs", "1")
    lines = dict(line.strip().split("  ", 1) for line in out.splitlines()[1:] if not line.startswith("   "))
    assert code == 0
    assert out.startswith("LlamaForCausalLM with 80 layers would serve.")
    assert f"{count:,} parameters" in lines["weights"]
    assert f"{2 * count / 2**30:.2f} GiB" in lines["weights"]
    assert "327,680 bytes for each token" in lines["KV cache"]  # 80 layers x 2 x 8 heads x 128 x 2 bytes
    assert "2.50 GiB for a request of the whole context" in out
    assert "no tokenizer" in out


DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}


def llama_70b_on_each_of(devices: int) -> int:
    """Numbers of the weights, of which only norms are not cut."""
    layer = (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192) // devices + 2 * 8192
    return 80 * layer + 2 * 128256 * 8192 // devices + 8192


def deepseek_v3_on_each_of(devices: int) -> int:
    """Numbers of the weights. What makes latents is whole, and so is the router, whose 256 corrections are
    float32, and so count twice.
    """
    by_heads = 128 * 192 * 1536 + 128 * 256 * 512 + 128 * 128 * 7168
    attention = (1536 + 576) * 7168 + by_heads // devices + 1536 + 512 + 2 * 7168
    dense = 3 * 7168 * 18432 // devices
    experts = 257 * 3 * 7168 * 2048 // devices + 256 * 7168 + 2 * 256
    return 61 * attention + 3 * dense + 58 * experts + 2 * 129280 * 7168 // devices + 7168


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.ci), 8])
@pytest.mark.parametrize(
    ("config", "on_each_of", "page_bytes"),
    [
        (LLAMA_70B, llama_70b_on_each_of, {1: 8 * 2621440, 8: 2621440}),  # 80 x 2 x 64 x 128 x 2 bytes
        pytest.param(
            DEEPSEEK_V3,
            deepseek_v3_on_each_of,
            dict.fromkeys((1, 8), 61 * 64 * 576 * 2),
            marks=pytest.mark.ci,
        ),
    ],
    ids=["Llama-70B", "DeepSeek-V3"],
)
def test_a_config_alone_says_what_each_device_holds(
    run: Run, tmp_path: Path, config: Any, on_each_of: Any, page_bytes: dict[int, int], devices: int
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    options = ["--tensor-parallel-size", str(devices), "--native", "off"]
    code, out, err = run(str(file), "--json", *options)
    facts = json.loads(out)
    assert (code, err, facts["would_serve"], facts["devices"]) == (0, "", None, devices)
    assert facts["weight_bytes"] == 2 * on_each_of(devices)
    assert (facts["kv_page_tokens"], facts["kv_bytes_per_page"]) == (64, page_bytes[devices])
    corrections = 58 * 256 if config is DEEPSEEK_V3 else 0
    assert facts["parameters"] == on_each_of(1) - corrections
    assert "by its config.json alone" in run(str(file), *options)[1]


@pytest.mark.ci
def test_stages_hold_their_own_layers(run: Run, tmp_path: Path) -> None:
    """Of 80 layers each stage has 40, and all norms; and one has the embeddings, the other the head."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_70B))
    options = [str(file), "--native", "off", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]
    facts = json.loads(run(*options, "--json")[1])
    norms = 161 * 8192
    of_each = (llama_70b_on_each_of(2) - norms) // 2 + norms
    assert [stage["weight_bytes"] for stage in facts["stages"]] == [2 * of_each] * 2
    assert facts["weight_bytes"] == 4 * of_each
    assert [stage["layers"] for stage in facts["stages"]] == [[0, 40], [40, 80]]
    assert [stage["kv_bytes_per_page"] for stage in facts["stages"]] == [2 * 2621440] * 2
    lines = run(*options)[1].splitlines()
    assert [
        line.split(":")[0].split()[-4:] for line in lines if "layers 0 to" in line or "40 to" in line
    ] == [
        ["layers", "0", "to", "39"],
        ["layers", "40", "to", "79"],
    ]


@pytest.mark.ci
def test_dealt_pages_take_their_share_on_each_device(run: Run, tmp_path: Path) -> None:
    """Of 61 layers with 576 numbers of 2 bytes for each of 64 tokens, an eighth."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DEEPSEEK_V3))
    options = [str(file), "--json", "--native", "off", "--context-parallel", "--tensor-parallel-size"]
    facts = json.loads(run(*options, "8")[1])
    assert facts["kv_bytes_per_page"] == 61 * 64 * 576 * 2 // 8
    assert facts["weight_bytes"] == 2 * deepseek_v3_on_each_of(8)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (("--native", "require"), "native: require does not go with context_parallel"),
        (("--draft-model", str(GOLDEN / "deepseek_v3")), "does not go with context_parallel"),
        ((), "must be left out on one device"),
    ],
)
def test_what_dealt_pages_do_not_go_with_is_named(run: Run, option: tuple[str, ...], told: str) -> None:
    devices = "2" if option else "1"
    folder = str(GOLDEN / "deepseek_v3")
    code, out, err = run(folder, "--context-parallel", "--tensor-parallel-size", devices, *option)
    assert (code, out) == (1, "")
    assert told in err.replace("--native", "native").replace("--context-parallel", "context_parallel")


@pytest.mark.ci
def test_experts_that_are_dealt_take_as_much_as_parts_of_all(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DEEPSEEK_V3))
    options = [str(file), "--json", "--native", "off", "--expert-parallel", "--tensor-parallel-size"]
    assert json.loads(run(*options, "8")[1])["weight_bytes"] == 2 * deepseek_v3_on_each_of(8)
    assert "num_experts are 256" in run(*options, "3")[1]


def test_the_demo(run: Run) -> None:
    code, out, _ = run("demo")
    assert code == 0
    assert "tool calls: hermes" in out


def test_what_is_missing_or_too_much_is_named(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "qwen3"
    shutil.copytree(GOLDEN / "qwen3", folder)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data.replace(b"model.layers.1.mlp.up_proj.weight", b"model.layers.1.mlp.up_PROJ.weight"))
    code, out, err = run(str(folder))
    assert (code, out) == (1, "")
    assert "model.layers.1.mlp.up_proj.weight" in err
    assert "model.layers.1.mlp.up_PROJ.weight" in err
    code, out, _ = run(str(folder), "--json")
    problem = json.loads(out)
    assert code == 1
    assert problem["would_serve"] is False
    assert "model.layers.1.mlp.up_proj.weight" in problem["problem"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["BertLMHeadModel"]}, "'BertLMHeadModel' (an encoder of a kind"),
        ({"architectures": ["CamembertForMaskedLM"]}, "(an encoder of a kind"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "(an encoder with a decoder"),
        ({"architectures": ["OtherForSequenceClassification"]}, "(a classifier"),
        ({"architectures": ["OtherForCausalLM"]}, "'OtherForCausalLM'; the nearest that is served is "),
        ({"quantization_config": {"quant_method": "gptq"}, "logit_scale": 2.0}, "logit_scale"),
        ({"hidden_act": "relu"}, "hidden_act"),
    ],
)
def test_a_config_that_cannot_be_served(run: Run, tmp_path: Path, change: Any, named: str) -> None:
    config = config_json(SHAPES["slim"]) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = run(str(tmp_path))
    assert (code, out) == (1, "")
    assert named in err


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("adapter_config.json", "an adapter (LoRA)"),
        ("model_index.json", "diffusers"),
        ("params.json", "makers"),
    ],
)
def test_a_folder_of_another_kind(run: Run, tmp_path: Path, file: str, named: str) -> None:
    (tmp_path / file).write_text("{}")
    assert named in run(str(tmp_path))[2]


def test_what_the_whole_process_takes(run: Run) -> None:
    """The sum of its parts. The cache is that of an engine: 16 rows of 2,048 tokens of the demo model, and a
    number and a float for each token of the vocabulary in 16 feature slots.
    """
    facts = json.loads(run("demo", "--json")[1])
    parts = ("weight_bytes", "cache_bytes", "program_bytes", "tokenizer_bytes", "interpreter_bytes")
    assert facts["process_bytes"] == sum(facts[part] for part in parts)
    assert facts["cache_bytes"] == 16 * 2048 * facts["kv_bytes_per_token"] + 16 * 2048 * 8
    assert facts["interpreter_bytes"] > 50 * 2**20
    assert "by default: weights" in run("demo")[1]


def test_a_model_in_float32_is_told_of_the_kernels(run: Run) -> None:
    advice = "with --dtype bfloat16 by the native CPU kernels"
    assert advice in run(str(GOLDEN / "qwen3"))[1]
    assert advice not in run(str(GOLDEN / "qwen3"), "--dtype", "float32")[1]
    assert advice not in run(str(GOLDEN / "qwen3"), "--dtype", "bfloat16")[1]
    assert advice not in run(str(GOLDEN / "qwen3"), "--native", "off")[1]
    assert advice not in run("demo")[1]


def test_bad_arguments(run: Run, tmp_path: Path) -> None:
    assert run(str(tmp_path / "absent"))[0] == 1
    assert "config.json" in run(str(tmp_path))[2]
    assert "max_num_seqs" in run("demo", "--max-num-seqs", "0")[2]


def test_a_gguf_file_is_a_whole_model(run: Run) -> None:
    """The figures are those of the file: 320 rows of embeddings and one layer, mostly of Q4_K and Q6_K."""
    code, out, err = run(str(GOLDEN / "gguf" / "llama_q4_k_m" / "model.gguf"), "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert (facts["architecture"], facts["layers"], facts["dtype"]) == ("LlamaForCausalLM", 1, "bfloat16")
    assert (facts["tokenizer"], facts["chat_template"], facts["end_token_ids"]) == (True, False, [2])
    kinds, _, bits = facts["stored"].partition("; ")
    assert kinds == "GGUF: Q4_K, Q6_K, Q5_0"
    assert 4.5 < float(bits.split()[0]) < 6.5625
    assert "stored" in run(str(GOLDEN / "gguf" / "llama_q4_k_m" / "model.gguf"))[1]
    assert json.loads(run(str(GOLDEN / "qwen3"), "--json")[1])["stored"] == "safetensors: F32"


@pytest.mark.parametrize(
    ("name", "nearest"), [("mamba", ""), ("qwen3mos", "; the nearest that is served is qwen3moe")]
)
def test_a_gguf_file_of_another_architecture_is_refused_by_name(
    run: Run, tmp_path: Path, name: str, nearest: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(padded(header({"general.architecture": typed(name)})))
    code, _, err = run(str(path))
    assert code == 1
    assert err.endswith(f"unknown architecture {name!r} of a GGUF file{nearest}\n")
