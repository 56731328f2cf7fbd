"""Makes golden checkpoints: tiny random models in Hugging Face's form, with what PyTorch computes from them.

    python -m tools.golden --out tests/golden NAME ...

It needs torch and transformers, which the project itself does not need: run it in an environment that has
both. tests/golden/README.md says what the files hold.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

VOCAB = 512
PROMPTS = (3, 20, 90)
"""Lengths of the prompts, in tokens."""
GENERATED = 24
TOP = 8
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
LLAMA4: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 64,
    "intermediate_size_mlp": 160,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 32,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """The classes of transformers that make a golden."""

    config_class: str
    model_class: str
    different: Mapping[str, Any]
    """The arguments of the config's class that COMMON lacks, or has with another value."""
    is_whole: bool = False
    """Whether the class has other names than those of COMMON, so that `different` has all arguments."""


_LLAMA = ("LlamaConfig", "LlamaForCausalLM")
_MISTRAL = ("MistralConfig", "MistralForCausalLM")
_QWEN2 = ("Qwen2Config", "Qwen2ForCausalLM")
_QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_QWEN3 = ("Qwen3Config", "Qwen3ForCausalLM")
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 32}
_DELTA_NETS = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_QUARTER_MROPE = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
_GRANITE_EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
_MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_QUARTER = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
_HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
_OWN = {
    "vocab_size": VOCAB,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
_GPT = {**_OWN, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 512}
_FALCON = {**_OWN, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CASES: Mapping[str, Kind] = {
    "apertus": Kind("ApertusConfig", "ApertusForCausalLM", {}),
    "arcee": Kind("ArceeConfig", "ArceeForCausalLM", {}),
    "bloom": Kind(
        "BloomConfig",
        "BloomForCausalLM",
        {**_OWN, "hidden_size": 48, "n_layer": 2, "n_head": 4},
        is_whole=True,
    ),
    "cohere": Kind("CohereConfig", "CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": Kind(
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {"sliding_window": 32, "num_hidden_layers": 4, "logit_scale": 0.25},
    ),
    "ernie4_5": Kind("Ernie4_5Config", "Ernie4_5ForCausalLM", {"head_dim": 16}),
    "exaone4": Kind(
        "Exaone4Config",
        "Exaone4ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 32, "sliding_window_pattern": 4},
    ),
    "falcon": Kind(
        "FalconConfig",
        "FalconForCausalLM",
        {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 112},
        is_whole=True,
    ),
    "falcon_7b": Kind("FalconConfig", "FalconForCausalLM", _FALCON, is_whole=True),
    "gemma": Kind("GemmaConfig", "GemmaForCausalLM", {"head_dim": 32}),
    "glm": Kind("GlmConfig", "GlmForCausalLM", {"head_dim": 16, "rope_parameters": _HALF}),
    "glm4": Kind("Glm4Config", "Glm4ForCausalLM", {"head_dim": 16, "rope_parameters": _HALF}),
    "gpt2": Kind("GPT2Config", "GPT2LMHeadModel", _GPT, is_whole=True),
    "gpt_bigcode": Kind("GPTBigCodeConfig", "GPTBigCodeForCausalLM", {**_GPT, "n_inner": 112}, is_whole=True),
    "gpt_neox": Kind("GPTNeoXConfig", "GPTNeoXForCausalLM", {"rope_parameters": _QUARTER}),
    "gpt_neox_serial": Kind(
        "GPTNeoXConfig", "GPTNeoXForCausalLM", {"rope_parameters": _HALF, "use_parallel_residual": False}
    ),
    "gptj": Kind("GPTJConfig", "GPTJForCausalLM", {**_GPT, "rotary_dim": 8}, is_whole=True),
    "helium": Kind("HeliumConfig", "HeliumForCausalLM", {"head_dim": 12}),
    "mpt": Kind(
        "MptConfig",
        "MptForCausalLM",
        {**_OWN, "d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 512},
        is_whole=True,
    ),
    "nemotron": Kind("NemotronConfig", "NemotronForCausalLM", {"rope_parameters": _HALF}),
    "olmo": Kind("OlmoConfig", "OlmoForCausalLM", {"clip_qkv": 8.0}),
    "opt": Kind(
        "OPTConfig",
        "OPTForCausalLM",
        {**_FALCON, "ffn_dim": 112, "max_position_embeddings": 512, "word_embed_proj_dim": 48},
        is_whole=True,
    ),
    "phi": Kind("PhiConfig", "PhiForCausalLM", {"num_key_value_heads": 4, "rope_parameters": _HALF}),
    "stablelm": Kind(
        "StableLmConfig", "StableLmForCausalLM", {"rope_parameters": _HALF, "use_qkv_bias": True}
    ),
    "stablelm_parallel": Kind(
        "StableLmConfig",
        "StableLmForCausalLM",
        {"rope_parameters": _HALF, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "starcoder2": Kind("Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": 32}),
    "dots1": Kind(
        "Dots1Config",
        "Dots1ForCausalLM",
        {
            "num_hidden_layers": 3,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "head_dim": 16,
        },
    ),
    "ernie4_5_moe": Kind(
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {
            "num_hidden_layers": 3,
            "moe_intermediate_size": 48,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
        },
    ),
    "flex_olmo": Kind("FlexOlmoConfig", "FlexOlmoForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granite_moe": Kind("GraniteMoeConfig", "GraniteMoeForCausalLM", _GRANITE_EXPERTS),
    "granite_moe_shared": Kind(
        "GraniteMoeSharedConfig",
        "GraniteMoeSharedForCausalLM",
        {**_GRANITE_EXPERTS, "shared_intermediate_size": 64},
    ),
    "olmoe": Kind("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "vaultgemma": Kind(
        "VaultGemmaConfig",
        "VaultGemmaForCausalLM",
        {"head_dim": 32, "sliding_window": 32, "num_hidden_layers": 4},
    ),
    "hunyuan_dense": Kind("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", {"head_dim": 16}),
    "hunyuan_moe": Kind(
        "HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", {"head_dim": 16, "num_experts": 4, "moe_topk": 2}
    ),
    "phimoe": Kind("PhimoeConfig", "PhimoeForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": Kind(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 24,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "group_limited_greedy",
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 2.0,
        },
    ),
    "deepseek_v3": Kind(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 24,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 2.0,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": Kind(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **_GEMMA,
            "num_hidden_layers": 4,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 15.0,
        },
    ),
    "gemma3": Kind("Gemma3TextConfig", "Gemma3ForCausalLM", {**_GEMMA, "num_hidden_layers": 6}),
    "glm4_moe": Kind(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "granite": Kind(
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "mamba2": Kind(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            **_OWN,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_heads": 6,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
        is_whole=True,
    ),
    "bamba": Kind(
        "BambaConfig", "BambaForCausalLM", {"num_hidden_layers": 4, "attn_layer_indices": [2], **_MAMBA}
    ),
    "falcon_h1": Kind(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **_MAMBA,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "mamba_d_ssm": 96,
            "key_multiplier": 0.7,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "ssm_in_multiplier": 0.8,
            "ssm_out_multiplier": 0.6,
            "attention_out_multiplier": 0.9,
            "mlp_multipliers": [0.8, 0.6],
            "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 0.8],
        },
    ),
    "nemotron_h": Kind(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M-*-",
            "head_dim": 16,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "granite_hybrid": Kind(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            **_MAMBA,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 64,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "position_embedding_type": "rope",
        },
    ),
    "ministral3": Kind(
        "Ministral3Config", "Ministral3ForCausalLM", {"head_dim": 16, "rope_parameters": _MINISTRAL}
    ),
    "olmo2": Kind("Olmo2Config", "Olmo2ForCausalLM", {}),
    "olmo3": Kind("Olmo3Config", "Olmo3ForCausalLM", {"num_hidden_layers": 4, "sliding_window": 32}),
    "phi3": Kind("Phi3Config", "Phi3ForCausalLM", {"sliding_window": None}),
    "seed_oss": Kind(
        "SeedOssConfig",
        "SeedOssForCausalLM",
        {"head_dim": 16, "attention_bias": True, "attention_out_bias": False},
    ),
    "smollm3": Kind(
        "SmolLM3Config", "SmolLM3ForCausalLM", {"num_hidden_layers": 4, "tie_word_embeddings": True}
    ),
    "gpt_oss": Kind(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "intermediate_size": 64,
        },
    ),
    "lfm2": Kind(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "llama": Kind(*_LLAMA, {"rope_parameters": _LLAMA3, "tie_word_embeddings": False}),
    "llama_linear_rope": Kind(
        *_LLAMA, {"rope_parameters": _LINEAR, "attention_bias": True, "mlp_bias": True}
    ),
    "llama4": Kind("Llama4TextConfig", "Llama4ForCausalLM", LLAMA4),
    "minimax_m2": Kind(
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "mistral_swa": Kind(*_MISTRAL, {"sliding_window": 32, "head_dim": 16}),
    "mixtral": Kind("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen2": Kind(*_QWEN2, {}),
    "qwen2_moe": Kind(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 64}
    ),
    "qwen2_yarn": Kind(*_QWEN2, {"rope_parameters": _YARN}),
    "qwen3": Kind(*_QWEN3, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_5": Kind(
        "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_DELTA_NETS, "rope_parameters": _QUARTER_MROPE}
    ),
    "qwen3_5_moe": Kind(
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**_DELTA_NETS, **_SHARED_EXPERT, "rope_parameters": _QUARTER_MROPE},
    ),
    "qwen3_next": Kind("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_DELTA_NETS, **_SHARED_EXPERT}),
    "qwen3_moe": Kind(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_QWEN_EXPERTS, "head_dim": 32, "norm_topk_prob": True}
    ),
}
"""From a golden's name to how it is made. Raise `num_hidden_layers` where a family has several kinds of
layers, so that every kind occurs.
"""


def make_model(name: str) -> Any:
    """Make a random model in float32. Norms and biases are random, too, so that a test notices if one is left
    out.
    """
    case = CASES[name]
    torch.manual_seed(1000 + sum(map(ord, name)))
    config = getattr(transformers, case.config_class)(
        **{**({} if case.is_whole else COMMON), **case.different}
    )
    config.dtype = "float32"
    model_class = getattr(transformers, case.model_class)
    model = model_class._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.1 if parameter.ndim == 1 else None
            if noise is not None and "norm" in parameter_name:
                parameter.add_(noise)
            elif noise is not None:
                parameter.copy_(noise)
        for buffer_name, buffer in model.named_buffers():
            if "correction" in buffer_name:
                buffer.copy_(torch.randn_like(buffer) * 0.05)
        if config.tie_word_embeddings:  # otherwise the logits would only echo the input
            model.get_input_embeddings().weight.mul_(0.35)
    return model


def save_tokenizer(folder: Path, marks: Mapping[str, str] | None = None) -> None:
    """Save a byte-level BPE, learnt from some of Python's sources, with a template for conversations. marks:
    further special tokens, by what the tokenizer's attributes are called.
    """
    marks = marks or {}
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *marks.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([inspect.getsource(module) for module in (json, pathlib, inspect)], trainer)
    kind: Any = transformers.PreTrainedTokenizerFast
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
    fast = kind(tokenizer_object=made, **special, **({"extra_special_tokens": dict(marks)} if marks else {}))
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder)


def case_of(model: Any, prompt: torch.Tensor) -> dict[str, Any]:
    """Return greedy tokens after a prompt [1, T], their log-probabilities, and the largest logits after the
    prompt.

    Every token is computed from the whole text, without a cache.
    """
    tokens, logprobs = prompt, []
    for _ in range(GENERATED):
        last = torch.log_softmax(model(tokens, use_cache=False).logits[0, -1], -1)
        best = int(last.argmax())
        logprobs.append(float(last[best]))
        tokens = torch.cat([tokens, torch.tensor([[best]])], 1)
    top = torch.topk(model(prompt, use_cache=False).logits[0, -1], TOP)
    return {
        "prompt": prompt[0].tolist(),
        "tokens": tokens[0, prompt.shape[1] :].tolist(),
        "logprobs": logprobs,
        "last_logits_top": [[int(i), float(v)] for v, i in zip(top.values, top.indices, strict=True)],
    }


def make(name: str, out: Path) -> None:
    """Write out/NAME."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(name)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    random = torch.Generator().manual_seed(11)
    prompts = [torch.randint(3, VOCAB - 8, (1, length), generator=random) for length in PROMPTS]
    with torch.no_grad():
        cases = [case_of(model, prompt) for prompt in prompts]
    expected = {"transformers": transformers.__version__, "torch": torch.__version__, "cases": cases}
    (folder / "expected.json").write_text(json.dumps(expected))
    print(f"{folder}: {sum(p.numel() for p in model.parameters())} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make golden checkpoints with PyTorch.")
    parser.add_argument("names", nargs="+", choices=CASES, metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--out", type=Path, required=True, help="the folder that gets a folder of each name")
    arguments = parser.parse_args()
    for name in arguments.names:
        make(name, arguments.out)


if __name__ == "__main__":
    main()
