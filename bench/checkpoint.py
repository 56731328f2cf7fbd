"""Writes a checkpoint of random weights in the shape of Qwen3-0.6B, or of another model whose config.json is
there, to measure speed without a real one.

    python -m bench.checkpoint --out DIR
    python -m bench.checkpoint --config tests/support/models/published/Qwen3.5-0.8B.json --out DIR

With --copies N the model repeats a prompt of N tokens, for the workloads on speculation (`bench.copying`).
Else tokens mean nothing, but every product, read and write has the size that it has in the real model.
Weights are normal with deviation 0.02 (weights of norms around 1), so activations stay finite. One seed
always writes the same file. Tensors are written block by block, so memory stays small however large the model
is.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bench import copying
from penstock.runtime.models.params import load_rules
from penstock.runtime.models.registry import parse_config

DEVIATION = 0.02
_BLOCK = 1 << 22  # values that are drawn at a time: 16 MiB of float32
MERGES = [("t", "h"), ("h", "e"), ("i", "n")]
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_CONTROL = len(CONTROL)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder: here Qwen3's with tied embeddings, in `bench.gguf_checkpoint` Llama's with a head.

    `num_words` is how many of the vocabulary's ids the tokenizer knows as text. Its control tokens follow,
    and the rest of the vocabulary is padding, as in the real model.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_words: int
    max_position_embeddings: int

    def __post_init__(self) -> None:
        least, most = 256 + len(MERGES), self.vocab_size - NUM_CONTROL
        if not least <= self.num_words <= most:
            raise ValueError(f"num_words: must be from {least} to {most}, not {self.num_words}")


SHAPES = {
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151_936, 151_643, 40_960),
    # As many arrays as the real model and next to no work, to measure the host's share of a step.
    "slim": Shape(64, 128, 28, 4, 2, 64, 512, 300, 4096),
    "tiny": Shape(64, 128, 2, 4, 2, 64, 512, 300, 4096),
}


def config_json(shape: Shape) -> dict[str, Any]:
    """Make the content of config.json, with the fields of the real checkpoint."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": shape.num_words,
        "eos_token_id": shape.num_words + 2,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": DEVIATION,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "max_window_layers": shape.num_layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": copying.ROPE_THETA,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor, in the order of the file. Linear weights are [out, in]."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (shape.head_dim,),
            "self_attn.k_norm": (shape.head_dim,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": size for name, size in parts.items()}
    return shapes | {"model.norm.weight": (hidden,)}


def safetensors_header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Build the header of a safetensors file of bfloat16 tensors: its length and its JSON, padded to 8 bytes
    as the format demands.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in shapes.items():
        end = at + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def blocks(size: int, mean: float, draw: np.random.Generator) -> Iterator[NDArray[Any]]:
    """Yield `size` normal values of deviation 0.02 around `mean`, as bfloat16 arrays of at most
    2**22 values.
    """
    for start in range(0, size, _BLOCK):
        values = draw.standard_normal(min(_BLOCK, size - start), np.float32)
        yield (mean + DEVIATION * values).astype(ml_dtypes.bfloat16)


def words(num_words: int) -> list[str]:
    """List the tokens that are text: 256 bytes, what the merges make, and filler words."""
    found = sorted(pre_tokenizers.ByteLevel.alphabet())
    found += [first + second for first, second in MERGES]
    return found + [f"Ġw{number}" for number in range(len(found), num_words)]


def make_tokenizer(num_words: int) -> Tokenizer:
    """Make a byte-level BPE with 256 bytes, a few merges, filler words that no merge reaches, and the control
    tokens.
    """
    vocabulary = {word: number for number, word in enumerate(words(num_words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in CONTROL])
    return tokenizer


def write_checkpoint(directory: Path, shape: Shape, seed: int = 0, copies: int | None = None) -> None:
    """Write model.safetensors, config.json, generation_config.json and the tokenizer's files. `copies`: the
    length of prompts that the model repeats; None: it repeats none.
    """
    of_name = None
    if copies is not None:
        of_name = partial(
            copying.tensor, hidden_size=shape.hidden_size, head_dim=shape.head_dim, num_prompt=copies
        )
    _write(directory, config_json(shape), tensor_shapes(shape), shape.num_words, seed, of_name)


def write_checkpoint_of(directory: Path, published: Mapping[str, Any], seed: int = 0) -> int:
    """Do the same for a published config.json, and return the number of parameters. Of a model that reads
    images only the text model is written.
    """
    config = text_model(published)
    shapes = {tensor.name: tensor.shape for tensor in load_rules(parse_config(config)).tensors}
    _write(directory, config, shapes, config["vocab_size"] - NUM_CONTROL, seed)
    return sum(map(math.prod, shapes.values()))


def text_model(published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model's text model, which is the whole model where it reads nothing else.
    Its end token is the tokenizer's.
    """
    inner = published.get("text_config")
    if inner is None:
        config = dict(published)
    else:
        (name,) = published["architectures"]
        config = {**inner, "architectures": [name.replace("ForConditionalGeneration", "ForCausalLM")]}
    return {**config, "eos_token_id": config["vocab_size"] - 1, "bos_token_id": None}


def _write(
    directory: Path,
    config: Mapping[str, Any],
    shapes: dict[str, tuple[int, ...]],
    num_words: int,
    seed: int,
    of_name: Callable[..., Iterator[NDArray[Any]] | None] | None = None,
) -> None:
    """Write a checkpoint. `of_name` makes the blocks of a tensor, or None for one that is random."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], "do_sample": False},
    )
    make_tokenizer(num_words).save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": CONTROL[2],
            "pad_token": CONTROL[0],
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    )
    draw = np.random.default_rng(seed)
    part = directory / "model.safetensors.part"
    with part.open("wb") as file:
        file.write(safetensors_header(shapes))
        for name, size in shapes.items():
            made = None if of_name is None else of_name(name, size, draw=draw)
            for block in made or blocks(math.prod(size), 1.0 if "norm" in name else 0.0, draw):
                file.write(block.astype(ml_dtypes.bfloat16).tobytes())
    part.replace(directory / "model.safetensors")  # renamed last, so a file of this name is always complete


def _write_json(file: Path, data: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="default: %(default)s")
    which.add_argument("--config", type=Path, metavar="FILE", help="the config.json of another model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--copies", type=int, metavar="N", help="the model repeats prompts of N tokens")
    args = parser.parse_args()
    if args.copies is not None and args.config is not None:
        parser.error("--copies: goes with --shape only")
    if args.config is None:
        shape = SHAPES[args.shape]
        write_checkpoint(args.out, shape, args.seed, args.copies)
        parameters = sum(map(math.prod, tensor_shapes(shape).values()))
    else:
        published = json.loads(args.config.read_text(encoding="utf-8"))
        parameters = write_checkpoint_of(args.out, published, args.seed)
    print(f"{args.out}: {parameters / 1e6:.1f} million parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
