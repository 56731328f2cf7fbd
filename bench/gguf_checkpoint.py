"""Writes a GGUF file of random weights in the shape of Llama 3.1 8B, to measure speed and memory without a
real one.

    python -m bench.gguf_checkpoint --out bench/out/llama-8b.gguf
    python -m bench.gguf_checkpoint --of bench/out/copies --out bench/out/copies.gguf

Its matrices have the types that llama.cpp's `Q4_K_M` gives them: Q4_K, and Q6_K for the head and for values
and down projections of half of the layers. Codes and scales of blocks are random, so that every byte has to
be read, and factors are such that weights have mean 0 and deviation 0.02. Tokens mean nothing. One seed
always writes the same file. A tensor is in memory at a time. The package `gguf` (of the extra `dev`) writes
the file.

With `--of DIR` it writes the checkpoint that `bench.checkpoint` has written there, in bfloat16, so that
engines that read GGUF files serve the same weights as others.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from bench.checkpoint import CONTROL, DEVIATION, MERGES, Shape, words

_VALUES = 256  # of a block
_ROPE_THETA, _NORM_EPSILON = 500_000.0, 1e-5
_ROPE_FACTOR, _LOW, _HIGH, _ORIGINAL_CONTEXT = 8.0, 1.0, 4.0, 8192
"""How Llama 3.1 stretches positions."""
_OF_FILE, _OF_BFLOAT16 = 15, 32
"""What general.file_type has for Q4_K_M, and for bfloat16."""
_NORMAL, _CONTROL = 1, 3


SHAPES = {
    "8b": Shape(4096, 14_336, 32, 32, 8, 128, 128_256, 128_000, 131_072),
    "tiny": Shape(256, 512, 2, 4, 2, 64, 512, 400, 4096),
}


def matrices(shape: Shape) -> Iterator[tuple[str, tuple[int, int], str]]:
    """Yield the name, the shape [out, in] and the type of every matrix."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.vocab_size, hidden), "Q4_K"
    yield "output.weight", (shape.vocab_size, hidden), "Q6_K"
    for layer in range(shape.num_layers):
        sensitive = "Q6_K" if has_more_bits(layer, shape.num_layers) else "Q4_K"
        for name, size, kind in (
            ("attn_q", (queries, hidden), "Q4_K"),
            ("attn_k", (keys, hidden), "Q4_K"),
            ("attn_v", (keys, hidden), sensitive),
            ("attn_output", (hidden, queries), "Q4_K"),
            ("ffn_gate", (inner, hidden), "Q4_K"),
            ("ffn_up", (inner, hidden), "Q4_K"),
            ("ffn_down", (hidden, inner), sensitive),
        ):
            yield f"blk.{layer}.{name}.weight", size, kind


def has_more_bits(layer: int, num_layers: int) -> bool:
    """Say whether `Q4_K_M` gives this layer's values and down projection more bits: the first and the last
    eighth of the layers, and each third one between them.
    """
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def blocks(rng: np.random.Generator, size: tuple[int, int], kind: str) -> NDArray[np.uint8]:
    """Draw the blocks of a matrix, uint8 [rows, bytes]. All integers of a block are equally likely."""
    rows, columns = size
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    drawn = np.frombuffer(rng.bytes(rows * columns // _VALUES * num_bytes), np.uint8).copy()
    found = drawn.reshape(-1, num_bytes)
    if kind == "Q4_K":
        # value = d * scale * code - dmin * minimum, where codes have 4 bits, and the others 6
        scale, code, square_scale, square_code = 31.5, 7.5, _mean_square(0, 63), _mean_square(0, 15)
        of_products = square_scale * square_code - (scale * code) ** 2
        of_minima = code**2 * (square_scale - scale**2)
        factor = DEVIATION / math.sqrt(of_products + of_minima)
        found[:, :4] = np.array([factor, code * factor], np.float16).view(np.uint8)
    else:
        factor = DEVIATION / math.sqrt(_mean_square(-128, 127) * _mean_square(-32, 31))
        found[:, -2:] = np.array([factor], np.float16).view(np.uint8)
    return found.reshape(rows, -1)


def _mean_square(least: int, most: int) -> float:
    return float(np.mean(np.arange(least, most + 1, dtype=np.float64) ** 2))


def vectors(shape: Shape) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield norms, and what each frequency of rotated channels is divided by."""
    ones = np.ones(shape.hidden_size, np.float32)
    for layer in range(shape.num_layers):
        yield f"blk.{layer}.attn_norm.weight", ones
        yield f"blk.{layer}.ffn_norm.weight", ones
    yield "output_norm.weight", ones
    yield "rope_freqs.weight", rope_divisors(shape.head_dim)


def rope_divisors(head_dim: int) -> NDArray[np.float32]:
    """Return the divisors of Llama 3.1: 1 for high frequencies, 8 for low ones."""
    waves = 2 * math.pi * _ROPE_THETA ** (np.arange(0, head_dim, 2) / head_dim)
    share = np.clip((_ORIGINAL_CONTEXT / waves - _LOW) / (_HIGH - _LOW), 0, 1)
    return (1 / ((1 - share) / _ROPE_FACTOR + share)).astype(np.float32)


def write(file: Path, shape: Shape, seed: int = 0) -> int:
    """Write the file, and return the number of parameters."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    writer = gguf.GGUFWriter(part, "llama")
    _describe(writer, shape)
    sizes, others = list(matrices(shape)), list(vectors(shape))
    for name, values in others:
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    for name, (rows, columns), kind in sizes:
        stored = gguf.GGMLQuantizationType[kind]
        row_bytes = columns // _VALUES * gguf.GGML_QUANT_SIZES[stored][1]
        writer.add_tensor_info(name, (rows, row_bytes), np.dtype(np.uint8), rows * row_bytes, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, values in others:
        writer.write_tensor_data(values)
    rng = np.random.default_rng(seed)
    for _, size, kind in sizes:
        writer.write_tensor_data(blocks(rng, size, kind))
    writer.close()
    part.replace(file)  # renamed last, so a file of this name is always complete
    return sum(math.prod(size) for _, size, _ in sizes) + sum(values.size for _, values in others)


_OF_LAYERS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""What GGUF files call the tensors of a layer of Qwen3."""


def gguf_name(name: str) -> str:
    """Return what GGUF files call a tensor of Qwen3."""
    if name.startswith("model.layers."):
        number, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
        return f"blk.{number}.{_OF_LAYERS[part]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


def write_checkpoint(directory: Path, file: Path) -> int:
    """Write a checkpoint of `bench.checkpoint` in the shape of Qwen3, and return the number of parameters."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    shape = Shape(
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["vocab_size"],
        config["bos_token_id"],
        config["max_position_embeddings"],
    )
    part = file.with_name(f"{file.name}.part")
    writer = gguf.GGUFWriter(part, "qwen3")
    _describe(writer, shape, of_file=_OF_BFLOAT16, rms_eps=config["rms_norm_eps"], theta=config["rope_theta"])
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    sizes: dict[str, tuple[int, ...]] = {}
    with safe_open(directory / "model.safetensors", framework="numpy") as stored:
        for name in stored.keys():  # noqa: SIM118  it is no mapping
            sizes[name] = tuple(stored.get_slice(name).get_shape())
            if _is_norm(name):
                writer.add_tensor_info(gguf_name(name), sizes[name], np.dtype(np.float32), 4 * sizes[name][0])
            else:
                rows, columns = sizes[name]
                writer.add_tensor_info(
                    gguf_name(name),
                    (rows, 2 * columns),
                    np.dtype(np.uint8),
                    2 * rows * columns,
                    gguf.GGMLQuantizationType.BF16,
                )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in sizes:
            values = stored.get_tensor(name)
            assert values.dtype == ml_dtypes.bfloat16, "bench.checkpoint writes bfloat16"
            writer.write_tensor_data(values.astype(np.float32) if _is_norm(name) else values.view(np.uint8))
    writer.close()
    part.replace(file)
    return sum(map(math.prod, sizes.values()))


def _is_norm(name: str) -> bool:
    return "norm" in name


def _describe(
    writer: Any,
    shape: Shape,
    *,
    of_file: int = _OF_FILE,
    rms_eps: float = _NORM_EPSILON,
    theta: float = _ROPE_THETA,
) -> None:
    """Write what the file says of its model and its tokenizer."""
    writer.add_name("random")
    writer.add_file_type(of_file)
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(rms_eps)
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    control = [
        *CONTROL,
        *(f"<|reserved_{i}|>" for i in range(len(CONTROL), shape.vocab_size - shape.num_words)),
    ]
    writer.add_token_list([*words(shape.num_words), *control])
    writer.add_token_types([_NORMAL] * shape.num_words + [_CONTROL] * len(control))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(shape.num_words)
    writer.add_eos_token_id(shape.num_words + 2)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gguf_checkpoint", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", choices=SHAPES, default="8b", help="default: %(default)s")
    which.add_argument(
        "--of", type=Path, metavar="DIR", help="a checkpoint that bench.checkpoint has written"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.of is None:
        parameters = write(args.out, SHAPES[args.shape], args.seed)
    else:
        parameters = write_checkpoint(args.of, args.out)
    print(f"{args.out}: {parameters / 1e6:.1f} million parameters, {args.out.stat().st_size / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
