"""Measures what bfloat16, weights of 8 and 4 bits and an int8 KV cache change: next-token distributions
against float32 on the same text.

    python -m bench.probes.accuracy --model demo

The text is sampled from the float32 model at temperature 1, from short prompts. Each format scores every
position: how often its likeliest token is float32's, the mean KL(float32 || format) in nats, and the
perplexity of the text. It reads the text in one step, in which tokens attend to the cache as in every other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.config import EngineConfig
from penstock.runtime.engine import Engine
from penstock.runtime.execution.backend import Backend, choose_backend
from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.loading.hub import resolve_model
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.params import bind, state_to_leaves
from penstock.runtime.ops.attention import make_meta
from penstock.runtime.ops.cache_spec import cache_dtype
from penstock.runtime.requests.request import StoppingParams
from penstock.runtime.requests.sampling import SamplingParams

PROMPTS = ("Once upon a time", "The little", "What is 3 + 4?", "Tell me about", "Hello", "In the morning")
LENGTH = 128
"""Tokens of one text, prompt and sample together."""


class Format(NamedTuple):
    """What a model is computed with: the dtype of activations, and how weights and the KV cache are kept."""

    dtype: str
    linear: LinearFormat
    kv_cache_dtype: str = "auto"


def sample_texts(model: str, per_prompt: int) -> list[list[int]]:
    """Token ids of texts of LENGTH tokens, sampled from the model in float32."""
    engine = Engine.from_pretrained(model, EngineConfig(dtype="float32", max_num_seqs=4, show_progress=False))
    engine.start()
    texts: list[list[int]] = []
    codec = engine.text
    assert codec is not None
    for prompt in PROMPTS:
        for seed in range(per_prompt):
            ids = list(codec.encode(prompt))
            made = engine.generate(
                ids,
                sampling=SamplingParams(temperature=1.0, seed=seed),
                stopping=StoppingParams(max_tokens=LENGTH - len(ids), ignore_eos=True),
            )
            texts.append(ids + list(made.token_ids))
    engine.shutdown()
    return texts


def scorer(
    directory: Path, config: ModelConfig, tried: Format, backend: Backend
) -> Callable[[Sequence[int]], NDArray[np.float64]]:
    """Make a function from the tokens of one text to log-probabilities float64 [LENGTH, V] of the token after
    each.
    """
    dtype, linear = tried.dtype, tried.linear
    leaves = state_to_leaves(load_weights(directory, config, dtype, linear=linear, progress=False))
    page_size = 16
    pages = LENGTH // page_size
    kept = backend.kv_storage_dtype(cache_dtype(tried.kv_cache_dtype, np.dtype(dtype)))
    arrays = config.cache.arrays([pages] * len(config.cache.windows), page_size, 1, kept)

    @jax.jit
    def run(leaves: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
        model = bind(config, leaves, dtype, linear)
        meta = make_meta(
            starts=jnp.zeros((1,), jnp.int32),
            q_lens=jnp.full((1,), LENGTH, jnp.int32),
            page_table=jnp.arange(pages, dtype=jnp.int32)[None],
            num_tokens=LENGTH,
            decode_only=False,
            page_size=page_size,
            num_pages=pages,
        )
        kv = tuple(jnp.zeros(layer.shape, layer.dtype) for layer in arrays)
        hidden, _ = model(
            tokens, meta.positions, kv, (meta,) * len(config.cache.windows), attention=backend.attention
        )
        return jax.nn.log_softmax(model.logits(hidden, jnp.int32(LENGTH)), axis=1)

    return lambda tokens: np.asarray(run(leaves, jnp.asarray(tokens, jnp.int32))).astype(np.float64)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.probes.accuracy", description="Accuracy of the formats of weights and KV cache."
    )
    parser.add_argument("--model", default="demo", help='"demo" or a checkpoint; default: %(default)s')
    parser.add_argument("--texts", type=int, default=4, metavar="N", help="per prompt; default: %(default)s")
    args = parser.parse_args()
    texts = sample_texts(args.model, args.texts)
    directory = resolve_model(args.model)
    config = load_config(directory)
    backend = choose_backend(EngineConfig(), jax.devices("cpu")[0])
    bfloat16 = np.dtype(jnp.bfloat16)
    plain, int8, int4 = (backend.linear_format(bfloat16, name) for name in ("none", "int8", "int4"))
    formats = {
        "float32 | float32": Format("float32", LinearFormat()),
        "float32 | int8": Format("float32", LinearFormat(), "int8"),
        "bfloat16 | bfloat16": Format("bfloat16", plain),
        "bfloat16 | int8": Format("bfloat16", plain, "int8"),
        "int8 | bfloat16": Format("bfloat16", int8),
        "int8 | int8": Format("bfloat16", int8, "int8"),
        "int4 | bfloat16": Format("bfloat16", int4),
    }
    scores = {
        name: np.stack([score(text) for text in texts])
        for name, tried in formats.items()
        for score in [scorer(directory, config, tried, backend)]
    }
    exact = scores["float32 | float32"][:, :-1]
    following = np.array(texts)[:, 1:]
    print(f"{following.size} positions of {len(texts)} texts\n")
    print("| weights | KV cache | likeliest token as float32's | KL, nats | perplexity |")
    print("|---|---|---:|---:|---:|")
    for name, all_scores in scores.items():
        tried = all_scores[:, :-1]
        same = (tried.argmax(axis=2) == exact.argmax(axis=2)).mean()
        divergence = (np.exp(exact) * (exact - tried)).sum(axis=2).mean()
        surprise = -np.take_along_axis(tried, following[:, :, None], axis=2).mean()
        print(f"| {name} | {same:.2%} | {divergence:.5f} | {np.exp(surprise):.3f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
