"""Measures what bfloat16, weights of 8 and 4 bits and an int8 KV cache change: next-token distributions
against float32 on the same text.

    python -m bench.probes.accuracy --model demo
    python -m bench.probes.accuracy --model ./gemma-3-270m --topics --quantised ./gemma-3-270m-int4
    python -m bench.probes.accuracy --model ./gemma-3-270m-Q4_K_M.gguf --topics

The text is sampled from the float32 model at temperature 1, from short prompts; or with --topics it is the
reference of the Python language, by which `penstock quantize` judges, too. Each format scores every position:
how often its likeliest token is float32's, the mean KL(float32 || format) in nats, and the perplexity of the
text. It reads the text in one step, in which tokens attend to the cache as in every other. A model may be a
GGUF file or another whose weights are codes; float32 means the values of these codes then.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.config import EngineConfig
from penstock.runtime.engine import Engine
from penstock.runtime.execution.backend import Backend, choose_backend
from penstock.runtime.loading.checkpoint import load_leaves
from penstock.runtime.loading.hub import resolve_model
from penstock.runtime.loading.served_model import CheckpointFacts, read_checkpoint
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.params import bind, leaf_shapes, load_rules
from penstock.runtime.ops.attention import make_meta
from penstock.runtime.ops.cache_spec import cache_dtype
from penstock.runtime.quantising.texts import JUDGED_TOKENS, JUDGED_WINDOWS, judging_text, windows
from penstock.runtime.requests.request import StoppingParams
from penstock.runtime.requests.sampling import SamplingParams

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
    path: Path | None = None
    """The checkpoint, if it is not the model's own."""


def read(path: Path, backend: Backend, length: int | None = None) -> CheckpointFacts:
    """Read all that the files of a model in bfloat16 say, but for the values of its weights. length: tokens
    of its context; None: as many as it can take.
    """
    return read_checkpoint(path, EngineConfig(dtype="bfloat16", max_model_len=length), backend)


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
        path, dtype, linear = tried.path or model, tried.dtype, tried.linear
        facts = read(path, backend, length)
        config = facts.config
        rules, shapes = load_rules(config, dtype, linear), leaf_shapes(config, dtype, linear)
        leaves = load_leaves(path, rules, facts.tensors, shapes, progress=False)
        self._leaves = tuple(leaves[each] for each in shapes)
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


def formats(model: Path, backend: Backend, quantised: Sequence[Path]) -> dict[str, Format]:
    """Return the formats by their names in the table."""
    bfloat16: np.dtype[Any] = np.dtype(jnp.bfloat16)
    plain, int8, int4 = (backend.linear_format(bfloat16, name) for name in ("none", "int8", "int4"))
    in_codes = {path: read(path, backend).linear for path in (model, *quantised)}
    if not in_codes[model].kept:
        del in_codes[model]
    return {
        "float32 | float32": Format("float32", LinearFormat()),
        "float32 | int8": Format("float32", LinearFormat(), "int8"),
        "bfloat16 | bfloat16": Format("bfloat16", plain),
        "bfloat16 | int8": Format("bfloat16", plain, "int8"),
        "int8 | bfloat16": Format("bfloat16", int8),
        "int8 | int8": Format("bfloat16", int8, "int8"),
        "int4 | bfloat16": Format("bfloat16", int4),
    } | {
        f"codes of {path.name} | bfloat16": Format("bfloat16", linear, path=path)
        for path, linear in in_codes.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.probes.accuracy", description="Accuracy of the formats of weights and KV cache."
    )
    parser.add_argument(
        "--model", default="demo", help='"demo", a checkpoint or a GGUF file; default: %(default)s'
    )
    parser.add_argument("--texts", type=int, default=4, metavar="N", help="per prompt; default: %(default)s")
    parser.add_argument(
        "--topics", action="store_true", help="score the Python language's reference, and no sampled texts"
    )
    parser.add_argument(
        "--quantised",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="a folder that `penstock quantize` has made of the model, or a GGUF file of it; may be repeated",
    )
    args = parser.parse_args()
    model, backend = resolve_model(args.model), choose_backend(EngineConfig(), jax.devices("cpu")[0])
    if args.topics:
        facts = read(model, backend)
        if facts.text is None:
            raise SystemExit(f"{model} has no tokenizer, which --topics needs")
        size = min(JUDGED_TOKENS, facts.max_length)
        texts = windows(facts.text, judging_text(), count=JUDGED_WINDOWS, num_tokens=size)
    else:
        texts = sample_texts(args.model, args.texts)
    length = texts.shape[1]
    tried = formats(model, backend, args.quantised)
    reference = Format("float32", LinearFormat())
    exact = Scorer(model, reference, backend, length)
    print(f"{texts[:, 1:].size} positions of {len(texts)} texts\n")
    print("| weights | KV cache | likeliest token as float32's | KL, nats | perplexity |")
    print("|---|---|---:|---:|---:|", flush=True)
    for name, each in tried.items():
        scorer = exact if each == reference else Scorer(model, each, backend, length)
        same, divergence, surprise = figures(exact, scorer, texts)
        print(f"| {name} | {same:.2%} | {divergence:.5f} | {np.exp(surprise):.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
