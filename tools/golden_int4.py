"""Makes goldens whose matrices int4 holds exactly, with what PyTorch computes from them in float32.

    python -m tools.golden_int4 --out tests/golden/int4 NAME ...

They are the models of `tools.golden` in sizes that int4 takes. tests/support/int4_goldens.py says what a file
holds. It needs torch and transformers, as `tools.golden` does.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from tests.support.int4_goldens import GROUP, write_checkpoint
from tools import golden

SIZES: Mapping[str, int] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "n_inner": 128,
    "ffn_dim": 128,
    "ffn_hidden_size": 128,
    "moe_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "v_head_dim": 32,
    "mamba_n_heads": 16,
    "mamba_d_head": 8,
    "mamba_d_ssm": 128,
    "mamba_num_heads": 16,
    "mamba_head_dim": 8,
    "linear_num_key_heads": 4,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 256,
}
"""Sizes of which products' inputs are multiples of 64 and outputs of 16, where a model has another."""
OF_NAMES: Mapping[str, Mapping[str, Any]] = {
    "mamba2": {"num_heads": 16, "head_dim": 8},
    "helium": {"head_dim": 16},
}
"""Sizes of single models, whose fields mean something else in others."""
GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
WRITTEN = ("architectures", "dtype", "model_type", "transformers_version")
"""Fields of a config.json that its class writes itself."""
PROMPTS = (5, 40)
"""Lengths of the prompts, in tokens."""
GENERATED = 12
LEAST_MARGIN = 0.01
"""Between the logits of the likeliest token and of the next one: less may come out the other way round."""
TABLES = re.compile(r"embed|wte|lm_head|tok_embeddings")
POSITIONS = re.compile(r"wpe|embed_positions|position_embeddings")
INPUTS_FIRST = re.compile(r"(c_attn|c_proj|c_fc)\.weight|experts\.(gate_up_proj|down_proj)$")
"""Matrices [inputs, outputs] of GPT-2, gpt-oss and Llama 4."""
HAVE_INPUTS_FIRST = ("gpt2", "gpt_oss", "llama4")


def how_drawn(name: str, tensor: str, values: np.ndarray) -> list[Any]:
    """Say how a tensor is drawn that transformers has made with these values."""
    if values.ndim < 2:
        if re.search("bias|norm|ln_|sinks", tensor) or (values.ndim == 1 and np.ptp(values) == 0):
            mean = 1.0 if re.search(r"ln_.*weight$", tensor) else round(float(values.mean()), 1)
            return ["normal", mean, 0.1]
        return ["values", [round(float(value), 5) for value in values.ravel()]]
    is_conv = "conv" in tensor and values.shape[-1] < GROUP
    if POSITIONS.search(tensor) or is_conv or values.shape[-1] % GROUP:
        return ["normal", 0.0, 0.15]
    if TABLES.search(tensor):
        return ["rows"]
    if tensor.endswith("_bias"):
        return ["normal", 0.0, 0.1]
    return ["codes", -2 if name in HAVE_INPUTS_FIRST and INPUTS_FIRST.search(tensor) else -1]


def kind_of(name: str) -> golden.Kind:
    """Return how `tools.golden` makes the model. Those of Gemma 4 were made elsewhere, with these configs."""
    if name in golden.CASES:
        return golden.CASES[name]
    fields = json.loads((GOLDEN / name / "config.json").read_text())
    own = {field: value for field, value in fields.items() if field not in WRITTEN}
    return golden.Kind("Gemma4TextConfig", "Gemma4ForCausalLM", own, is_whole=True)


def larger(name: str) -> golden.Kind:
    """Return how the model is made in sizes that int4 takes."""
    kind = kind_of(name)
    given = {**({} if kind.is_whole else golden.COMMON), **kind.different}
    sizes = {field: size for field, size in SIZES.items() if given.get(field)}
    return replace(kind, different={**given, **sizes, **OF_NAMES.get(name, {})}, is_whole=True)


def margin(logits: torch.Tensor) -> float:
    first, second = torch.topk(logits, 2).values.tolist()
    return float(first - second)


def make(name: str, out: Path) -> None:
    """Write out/NAME.json."""
    with mock.patch.object(golden, "CASES", {name: larger(name)}), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        golden.make_model(name).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        tensors = {
            tensor: [list(values.shape), how_drawn(name, tensor, values)]
            for tensor, values in sorted(load_file(folder / "model.safetensors").items())
        }
        write_checkpoint(folder, config, tensors)
        model_class: Any = getattr(transformers, golden.CASES[name].model_class)
        model, told = model_class.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        model.eval()
    if problems := {what: found for what, found in told.items() if found}:
        raise SystemExit(f"{name}: transformers reads the checkpoint otherwise: {problems}")
    cases = []
    with torch.no_grad(), mock.patch.object(golden, "GENERATED", GENERATED):
        for length in PROMPTS:
            for seed in range(20):
                random = torch.Generator().manual_seed(seed)
                prompt = torch.randint(3, SIZES["vocab_size"] - 8, (1, length), generator=random)
                case = golden.case_of(model, prompt)
                whole = torch.tensor([case["prompt"] + case["tokens"]])
                steps = model(whole, use_cache=False).logits[0, length - 1 : -1]
                if min(map(margin, steps)) >= LEAST_MARGIN:
                    break
            else:
                raise SystemExit(
                    f"{name}: some token is hardly likelier than another one, whatever the prompt"
                )
            cases.append(case)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    (out / f"{name}.json").write_text(
        json.dumps({"config": config, "tensors": tensors, **versions, "cases": cases})
    )
    print(f"{name}: log-probabilities {min(min(case['logprobs']) for case in cases):.2f} and more")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make goldens that int4 holds exactly with PyTorch.")
    parser.add_argument("names", nargs="+", metavar="NAME", help="of `tools.golden`, or gemma4 or gemma4_moe")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    for name in arguments.names:
        make(name, arguments.out)


if __name__ == "__main__":
    main()
