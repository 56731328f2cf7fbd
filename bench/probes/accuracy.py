"""Measures what bfloat16, weights of 8 and 4 bits and an int8 KV cache change: next-token distributions
against float32 on the same text.

    python -m bench.probes.accuracy --model demo
    python -m bench.probes.accuracy --model ./gemma-3-270m --topics --quantised ./gemma-3-270m-int4

The text is sampled from the float32 model at temperature 1, from short prompts; or with --topics it is the
reference of the Python language, by which `penstock quantize` judges, too. Each format scores every position:
how often its likeliest token is float32's, the mean KL(float32 || format) in nats, and the perplexity of the
text. It reads the text in one step, in which tokens attend to the cache as in every other.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.config import EngineConfig
from penstock.runtime.engine import Engine
from penstock.runtime.execution.backend import Backend, choose_backend
from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.loading.hub import resolve_model
from penstock.runtime.loading.quantised.checkpoint import find_weights, format_for
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.params import bind, load_rules, state_to_leaves
from penstock.runtime.ops.attention import make_meta
from penstock.runtime.ops.cache_spec import cache_dtype
from penstock.runtime.quantising.texts import JUDGED_TOKENS, JUDGED_WINDOWS, judging_text, windows
from penstock.runtime.requests.request import StoppingParams
from penstock.runtime.requests.sampling import SamplingParams
from penstock.runtime.text.codec import TextCodec

PROMPTS = ("Once upon a time", "The little", "What is 3 + 4?", "Tell me about", "Hello", "In the morning")
LENGTH = 128
"""Tokens of one sampled text, prompt and sample together."""
PAGE = 16
ROWS = 128
"""Positions whose distributions over the vocabulary are in memory at a time."""


class Format(NamedTuple):
    """What a model is computed with: the dtype of activations, and how weights and the KV cache are kept."""

    dtype: str
    linear: LinearFormat
    kv_cache_dtype: str = "auto"
    directory: Path | None = None
    """The checkpoint, if it is not the model's own."""


def sample_texts(model: str, per_prompt: int) -> NDArray[np.int32]:
    """Sample token ids of texts of LENGTH tokens from the model in float32."""
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
    return np.array(texts, np.int32)


class Scorer:
    """A model in one format."""

    def __init__(self, model: Path, tried: Format, backend: Backend, length: int) -> None:
        """length: tokens of each text."""
        directory, dtype, linear = tried.directory or model, tried.dtype, tried.linear
        config = load_config(directory).for_context(length)
        self._leaves = state_to_leaves(load_weights(directory, config, dtype, linear=linear, progress=False))
        pages = -(-length // PAGE)
        kept = backend.kv_storage_dtype(cache_dtype(tried.kv_cache_dtype, np.dtype(dtype)))
        arrays = config.cache.arrays([pages] * len(config.cache.windows), PAGE, 1, kept)

        def run(leaves: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
            meta = make_meta(
                starts=jnp.zeros((1,), jnp.int32),
                q_lens=jnp.full((1,), length, jnp.int32),
                page_table=jnp.arange(pages, dtype=jnp.int32)[None],
                num_tokens=length,
                decode_only=False,
                page_size=PAGE,
                num_pages=pages,
            )
            kv = tuple(jnp.zeros(layer.shape, layer.dtype) for layer in arrays)
            groups = (meta,) * len(config.cache.windows)
            attention = backend.attention
            model = bind(config, leaves, dtype, linear)
            return model(tokens, meta.positions, kv, groups, attention=attention)[0]

        def score(leaves: tuple[jax.Array, ...], hidden: jax.Array) -> jax.Array:
            model = bind(config, leaves, dtype, linear)
            return jax.nn.log_softmax(model.logits(hidden, jnp.int32(hidden.shape[0])), axis=1)

        self._run, self._score = jax.jit(run), jax.jit(score)

    def hidden(self, tokens: NDArray[np.int32]) -> jax.Array:
        """Compute hidden states behind each token but the last, [length - 1, E]."""
        found: jax.Array = self._run(self._leaves, jnp.asarray(tokens))[:-1]
        return found

    def log_probabilities(self, hidden: jax.Array) -> jax.Array:
        """Compute the log-probabilities of every token after each position: float32 [rows, V]."""
        found: jax.Array = self._score(self._leaves, hidden)
        return found


@jax.jit
def compared(exact: jax.Array, tried: jax.Array, following: jax.Array) -> jax.Array:
    """Return for each position whether the likeliest token is the same, KL in nats, and the surprise:
    [3, rows].
    """
    same = exact.argmax(axis=1) == tried.argmax(axis=1)
    divergence = (jnp.exp(exact) * (exact - tried)).sum(axis=1)
    surprise = -jnp.take_along_axis(tried, following[:, None], axis=1)[:, 0]
    return jnp.stack([same.astype(jnp.float32), divergence, surprise])


def figures(exact: Scorer, tried: Scorer, texts: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return agreement, KL and surprise of a format, as means over all positions."""
    found = []
    for text in texts:
        ours, theirs, following = exact.hidden(text), tried.hidden(text), jnp.asarray(text[1:])
        for begin in range(0, len(following), ROWS):
            rows = slice(begin, begin + ROWS)
            scores = [of.log_probabilities(hidden[rows]) for of, hidden in ((exact, ours), (tried, theirs))]
            found.append(np.asarray(compared(*scores, following[rows]), np.float64))
    means: NDArray[np.float64] = np.concatenate(found, axis=1).mean(axis=1)
    return means


def formats(backend: Backend, quantised: Sequence[Path]) -> dict[str, Format]:
    """Return the formats by their names in the table."""
    bfloat16: np.dtype[Any] = np.dtype(jnp.bfloat16)
    plain, int8, int4 = (backend.linear_format(bfloat16, name) for name in ("none", "int8", "int4"))

    def kept(directory: Path) -> LinearFormat:
        rules = partial(load_rules, load_config(directory), bfloat16)
        return format_for(plain, find_weights(directory), rules)

    return {
        "float32 | float32": Format("float32", LinearFormat()),
        "float32 | int8": Format("float32", LinearFormat(), "int8"),
        "bfloat16 | bfloat16": Format("bfloat16", plain),
        "bfloat16 | int8": Format("bfloat16", plain, "int8"),
        "int8 | bfloat16": Format("bfloat16", int8),
        "int8 | int8": Format("bfloat16", int8, "int8"),
        "int4 | bfloat16": Format("bfloat16", int4),
    } | {
        f"{directory.name} | bfloat16": Format("bfloat16", kept(directory), directory=directory)
        for directory in quantised
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.probes.accuracy", description="Accuracy of the formats of weights and KV cache."
    )
    parser.add_argument("--model", default="demo", help='"demo" or a checkpoint; default: %(default)s')
    parser.add_argument("--texts", type=int, default=4, metavar="N", help="per prompt; default: %(default)s")
    parser.add_argument(
        "--topics", action="store_true", help="score the Python language's reference, and no sampled texts"
    )
    parser.add_argument(
        "--quantised",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a folder that `penstock quantize` has made of the model; may be repeated",
    )
    args = parser.parse_args()
    directory = resolve_model(args.model)
    if args.topics:
        codec = TextCodec.from_pretrained(directory)
        size = min(JUDGED_TOKENS, load_config(directory).max_position_embeddings)
        texts = windows(codec, judging_text(), count=JUDGED_WINDOWS, num_tokens=size)
    else:
        texts = sample_texts(args.model, args.texts)
    backend = choose_backend(EngineConfig(), jax.devices("cpu")[0])
    length = texts.shape[1]
    tried = formats(backend, args.quantised)
    reference = Format("float32", LinearFormat())
    exact = Scorer(directory, reference, backend, length)
    print(f"{texts[:, 1:].size} positions of {len(texts)} texts\n")
    print("| weights | KV cache | likeliest token as float32's | KL, nats | perplexity |")
    print("|---|---|---:|---:|---:|", flush=True)
    for name, each in tried.items():
        scorer = exact if each == reference else Scorer(directory, each, backend, length)
        same, divergence, surprise = figures(exact, scorer, texts)
        print(f"| {name} | {same:.2%} | {divergence:.5f} | {np.exp(surprise):.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
