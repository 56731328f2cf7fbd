"""config.json of either generation is parsed, and what this build does not compute is refused by name."""

import contextlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.errors import ConfigError, UnknownArchitecture
from penstock.runtime.models.families import encoders
from penstock.runtime.models.hf_harmless_fields import HARMLESS_FIELDS
from penstock.runtime.models.registry import ARCHITECTURES, family_of, parse_config
from penstock.runtime.models.rope import RopeConfig, inverse_frequencies
from penstock.runtime.ops.cache_spec import CacheSpec, PagedKV
from tests.support.goldens import GOLDEN, NAMES, WITH_IMAGES
from tests.support.models.configs import PUBLISHED, attentions, one_layer, published, rope_of, windows
from tests.support.suite.drawing import few

SIZES = {
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def parse(architecture="LlamaForCausalLM", **fields):
    return parse_config({"architectures": [architecture], **SIZES, **fields})


def refused(**fields):
    with pytest.raises(ConfigError) as caught:
        parse(**fields)
    return str(caught.value)


# The fields as these checkpoints publish them.
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
    "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
MISTRAL_7B_V0_1 = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip


def test_published_qwen3():
    config = parse_config(QWEN3_0_6B)
    attention = one_layer(config).attention
    assert attention.qk_norm == "head"
    assert not attention.qkv_bias
    assert config.cache == CacheSpec((PagedKV(8, 128),) * 28)
    assert rope_of(config) == RopeConfig(theta=1e6)
    assert windows(config) == (None,) * 28
    assert (config.dtype, config.tie_word_embeddings) == ("bfloat16", True)
    assert (config.bos_token_id, config.eos_token_ids) == (151643, (151645,))


def test_published_qwen2():
    config = parse_config(QWEN2_5_0_5B)
    attention, mlp = one_layer(config).attention, one_layer(config).mlp
    assert (attention.qkv_bias, attention.o_bias, mlp.bias) == (True, False, False)
    assert (attention.head_dim, attention.qk_norm) == (64, "none")
    assert windows(config) == (None,) * 24  # the file sets sliding_window, but switches it off


def test_published_llama():
    config = parse_config(LLAMA_3_2_1B)
    assert rope_of(config) == RopeConfig(
        "llama3", 500_000.0, 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.rms_norm_eps == 1e-5


def test_published_mistral():
    config = parse_config(MISTRAL_7B_V0_1)
    assert windows(config) == (4096,) * 32
    assert one_layer(config).attention.head_dim == 128


def test_old_and_new_style_are_the_same_model():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 256}
    old = parse(rope_theta=5e5, rope_scaling={"type": "yarn", **scaling}, torch_dtype="float16")
    new = parse(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **scaling}, dtype="float16")
    assert old == new
    assert rope_of(old).attention_factor == pytest.approx(1.1386294)
    assert hash(old) == hash(new)
    assert parse(torch_dtype="torch.float16").dtype == "float16"


def test_rope_fields():
    rope = rope_of(parse(rope_scaling={"rope_type": "linear", "type": "dynamic", "factor": 2}))
    assert rope == RopeConfig("linear", factor=2.0)  # rope_type wins over type
    assert rope_of(parse(rope_scaling={"type": "dynamic", "factor": 2.0})).original_max_positions == 1024
    yarn = {"rope_type": "yarn", "factor": 8.0}
    assert rope_of(parse(rope_parameters=yarn)).original_max_positions == 1024
    assert (
        rope_of(parse(rope_parameters=yarn, original_max_position_embeddings=64)).original_max_positions == 64
    )
    assert rope_of(parse(rope_parameters={**yarn, "attention_factor": 0.5})).attention_factor == 0.5
    ratio = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 256}
    assert rope_of(parse(rope_parameters=ratio)).factor == 4.0
    full = {**yarn, "beta_fast": 16, "beta_slow": 2, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.9}
    rope = rope_of(parse(rope_parameters=full))
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (16.0, 2.0, False)
    assert rope.attention_factor == pytest.approx(1.1455609 / 1.1871498, rel=1e-5)
    assert rope_of(parse()) == RopeConfig(theta=10_000.0)


def test_windows_by_layer_type():
    qwen = {"architecture": "Qwen2ForCausalLM", "sliding_window": 64}
    assert windows(parse(**qwen)) == (None,) * 4
    assert windows(parse(**qwen, use_sliding_window=True, max_window_layers=3)) == (
        None,
        None,
        None,
        64,
    )
    types = ["sliding_attention", "full_attention"] * 2
    assert windows(parse(**qwen, use_sliding_window=True, layer_types=types)) == (64, None, 64, None)
    assert "layer_types" in refused(**qwen, layer_types=types)  # contradicts use_sliding_window
    assert "layer_types" in refused(architecture="MistralForCausalLM", sliding_window=64, layer_types=types)
    assert windows(parse("MistralForCausalLM", sliding_window=None)) == (None,) * 4
    assert windows(parse("MistralForCausalLM")) == (4096,) * 4  # transformers' default


def biases(config):
    layer = one_layer(config)
    return layer.attention.qkv_bias, layer.attention.o_bias, layer.mlp.bias


def test_biases_follow_the_architecture():
    assert biases(parse(attention_bias=True, mlp_bias=True)) == (True, True, True)
    qwen3 = parse("Qwen3ForCausalLM", attention_bias=True)
    assert biases(qwen3) == (True, True, False)
    assert one_layer(qwen3).attention.head_dim == 128
    # transformers' Qwen2 ignores attention_bias
    assert biases(parse("Qwen2ForCausalLM", attention_bias=False)) == (True, False, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("pretraining_tp", 2),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("is_encoder_decoder", True),
        ("quantization_config", {"quant_method": "gptq"}),
        ("auto_map", {"AutoModelForCausalLM": "modeling.Own"}),
        ("attn_logit_softcapping", 50.0),
        ("sliding_window", 4096),  # Llama has no sliding window
        ("num_local_experts", 8),
        ("dtype", "float8_e4m3fn"),
        ("torch_dtype", "int8"),
        ("model_type", "gemma"),
        ("layer_types", ["chunked_attention"] * 4),
        ("layer_types", ["full_attention"]),
        ("num_hidden_layers", 1 << 32),  # a list of so many takes all memory
        ("rope_theta", 1e308),
        ("rms_norm_eps", 10**400),
        ("hidden_size", "48"),
        ("hidden_size", 0),
        ("hidden_size", True),
        ("vocab_size", None),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", "</s>"),
        ("rope_theta", -1.0),
        ("rope_theta", 1.0),
        ("original_max_position_embeddings", "8192"),
        ("rope_scaling", "linear"),
        ("rope_scaling.type", {"type": "ntk", "factor": 2.0}),
        ("rope_scaling.factor", {"rope_type": "linear"}),
        ("rope_scaling.alpha", {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}),
        ("rope_scaling.partial_rotary_factor", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("rope_scaling.low_freq_factor", {"rope_type": "llama3", "factor": 2.0, "high_freq_factor": 4.0}),
        (
            "rope_scaling.high_freq_factor",
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 3.0},
        ),
    ],
)
def test_refused_by_name(field, value):
    message = refused(**{field.partition(".")[0]: value})
    assert message.count(f"{field}: ") == 1, message


class Noting(dict[str, object]):
    """A JSON object that records which of its names are looked up."""

    def __init__(self, pairs):
        super().__init__(pairs)
        self.names = set()

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_a_golden_is_read_or_known_even_if_off(name):
    """A field that is null, false or empty is not refused, so its name could be forgotten unnoticed."""
    data = json.loads((GOLDEN / name / "config.json").read_text(), object_hook=Noting)
    parse_config(data)
    assert set(data) - data.names - HARMLESS_FIELDS == set()
    inner = [data[name] for name in ("rope_parameters",) if name in data]
    for fields in inner:  # one object, or one for each type of attention
        assert set(fields) <= fields.names
        inner.extend(value for value in fields.values() if isinstance(value, Noting))


def test_contradicting_rope_styles_are_refused():
    one = {"rope_type": "linear", "factor": 2.0}
    assert "rope_scaling" in refused(rope_scaling=one, rope_parameters={**one, "factor": 4.0})
    assert rope_of(parse(rope_scaling=one, rope_parameters=one)).factor == 2.0


def test_all_problems_are_named_at_once():
    message = refused(hidden_act="gelu", vocab_size=None, logit_scale=0.1, rope_scaling={"type": "ntk"})
    for field in ("hidden_act", "vocab_size", "logit_scale", "rope_scaling.type"):
        assert f"{field}: " in message


@pytest.mark.parametrize("off", [None, False, [], {}, ""])
def test_unknown_fields_that_are_off_pass(off):
    assert parse(some_new_feature=off) == parse()


def test_harmless_fields_pass():
    harmless = {"_name_or_path": "x", "attention_dropout": 0.1, "temperature": 0.6, "id2label": {"0": "a"}}
    assert parse(**harmless) == parse()


def test_missing_kv_heads():
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    assert attentions(parse_config({"architectures": ["LlamaForCausalLM"], **sizes}))[0].num_kv_heads == 4
    assert attentions(parse("MistralForCausalLM", num_key_value_heads=None))[0].num_kv_heads == 4
    with pytest.raises(ConfigError, match="num_key_value_heads: is required"):
        parse_config({"architectures": ["MistralForCausalLM"], **sizes})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70_000) | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=4,
)
OTHERS = [published(path.stem) for path in sorted(PUBLISHED.glob("*.json"))]
rope_fields = st.dictionaries(
    st.sampled_from(
        ["rope_type", "type", "factor", "rope_theta", "mscale", "low_freq_factor", "truncate", "x"]
    ),
    st.sampled_from(["yarn", "llama3", "dynamic", "linear", "default"]) | json_values,
)


@settings(deadline=None)  # on a busy machine the first example may take long
@given(
    base=st.sampled_from([QWEN3_0_6B, QWEN2_5_0_5B, LLAMA_3_2_1B, MISTRAL_7B_V0_1, *OTHERS]),
    changes=st.dictionaries(st.sampled_from([*QWEN3_0_6B, "layer_types", "mlp_bias", "dtype"]), json_values),
    rope=st.none() | rope_fields,
)
def test_whatever_the_json_holds_it_is_parsed_or_refused(base, changes, rope):
    try:
        config = parse_config({**base, **changes, "rope_parameters": rope})
    except ConfigError:
        return
    for attention in attentions(config):
        assert attention.num_heads % attention.num_kv_heads == 0
        if attention.rope is not None:
            assert np.isfinite(inverse_frequencies(attention.rope, attention.rotary_dim)).all()


ENCODERS = [f"encoders/{folder.parent.name}" for folder in sorted(GOLDEN.glob("encoders/*/config.json"))]
EXTREMES = [1 << 32, 10**400, -1, 0, 1e308, 5e-324, float("nan"), "x", True, None, [], {}, [None], {"a": 1}]


def places(data, *before):
    for name, value in data.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from places(value, *before, name)


@pytest.mark.parametrize(
    "name", few([*NAMES, *ENCODERS, *WITH_IMAGES], ("encoders/deberta_v3_classifier", "gemma3_vl"))
)
def test_extremes_in_any_field_are_parsed_or_refused(name):
    """None takes all memory, or ends in another error."""
    text = (GOLDEN / name / "config.json").read_text()
    for *path, field in places(json.loads(text)):
        for value in EXTREMES:
            data = inner = json.loads(text)
            for step in path:
                inner = inner[step]
            inner[field] = value
            with contextlib.suppress(ConfigError, UnknownArchitecture):
                parse_config(data)


@pytest.mark.parametrize(
    ("golden", "name", "fields", "nearest", "lacks"),
    [
        ("qwen3", "Qwen3NewForCausalLM", {}, "Qwen3ForCausalLM", ()),
        ("bloom", "OtherForCausalLM", {"shift": 3}, "BloomForCausalLM", ("shift",)),
        ("gemma2", "OtherForCausalLM", {"query_pre_attn_scalar": -1}, "Gemma2ForCausalLM", None),
        ("falcon_h1", "OtherForCausalLM", {}, "FalconH1ForCausalLM", ()),
    ],
)
def test_the_nearest_of_an_unknown_architecture_is_named(golden, name, fields, nearest, lacks):
    data = json.loads((GOLDEN / golden / "config.json").read_text())
    with pytest.raises(UnknownArchitecture) as caught:
        parse_config({**data, "architectures": [name], "model_type": "other", **fields})
    lacks = tuple(fields) if lacks is None else lacks
    assert (caught.value.nearest, caught.value.lacks) == (nearest, lacks)
    ending = f", which does not take these fields as they are: {', '.join(lacks)}" if lacks else ""
    message = f"unknown architecture {name!r}; the nearest that is served is {nearest}{ending}"
    assert str(caught.value) == message


def test_an_encoder_has_no_nearest():
    with pytest.raises(
        UnknownArchitecture,
        match=r"^unknown architecture 'ConvBertModel' \(an encoder of a kind that is not served\)$",
    ):
        parse("ConvBertModel")
    with pytest.raises(UnknownArchitecture):
        family_of("ConvBertModel")


@pytest.mark.parametrize(
    "value", [None, [], ["LlamaForCausalLM", "MistralForCausalLM"], "LlamaForCausalLM", [3]]
)
def test_architectures_must_name_one(value):
    with pytest.raises(ConfigError, match="architectures"):
        parse_config({**SIZES, "architectures": value})


def test_the_registry_has_the_promised_architectures():
    assert set(ARCHITECTURES) - set(encoders.FAMILIES) == {
        "Gemma3TextModel",
        "LlamaForSequenceClassification",
        "MistralForSequenceClassification",
        "Qwen2ForSequenceClassification",
        "Qwen3ForSequenceClassification",
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "BambaForCausalLM",
        "BloomForCausalLM",
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Dots1ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM",
        "FalconForCausalLM",
        "FalconH1ForCausalLM",
        "FlexOlmoForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GPTJForCausalLM",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "GlmForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "HeliumForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "InternVLForConditionalGeneration",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "LlamaForCausalLM",
        "LlavaForConditionalGeneration",
        "MiMoForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Ministral3ForCausalLM",
        "Mistral3ForConditionalGeneration",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "MPTForCausalLM",
        "Mamba2ForCausalLM",
        "MptForCausalLM",
        "NemotronForCausalLM",
        "NemotronHForCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "PhiMoEForCausalLM",
        "PhimoeForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
        "VaultGemmaForCausalLM",
    }
