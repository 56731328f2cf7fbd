"""The process of one engine that embeds texts. It answers as `bench.child` says, and needs only the standard
library and the packages of its engine.

python -m bench.embeddings.engines ENGINE MODEL
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import TypeAlias

from bench.child import answer, own_output

Embed: TypeAlias = Callable[[Sequence[str]], Sequence[Sequence[float]]]
"""Texts to a vector of each, divided by its length. All are given at once."""


def penstock(model: str, dtype: str) -> Embed:
    runtime = import_module("penstock.runtime")
    # A step of 4,096 tokens; texts that are too long are cut, as the others do.
    options = {"max_num_seqs": 128, "max_num_batched_tokens": 4096}
    config = runtime.EngineConfig(dtype=dtype, **options)
    engine = runtime.Engine.from_pretrained(model, config)
    engine.start()

    def embed(texts: Sequence[str]) -> Sequence[Sequence[float]]:
        made: Sequence[Sequence[float]] = engine.embed(list(texts), truncation="right").tolist()
        return made

    return embed


def sentence_transformers(model: str, dtype: str) -> Embed:
    torch = import_module("torch")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    package = import_module("sentence_transformers")
    loaded = package.SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})

    def embed(texts: Sequence[str]) -> Sequence[Sequence[float]]:
        made: Sequence[Sequence[float]] = (
            loaded.encode(list(texts), normalize_embeddings=True, convert_to_tensor=True).float().tolist()
        )
        return made

    return embed


def infinity(model: str, dtype: str) -> Embed:
    torch, package = import_module("torch"), import_module("infinity_emb")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    arguments = package.EngineArgs(model_name_or_path=model, engine="torch", device="cpu", dtype=dtype)
    engine = package.AsyncEmbeddingEngine.from_args(arguments)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.astart())

    def embed(texts: Sequence[str]) -> Sequence[Sequence[float]]:
        made, _ = loop.run_until_complete(engine.embed(sentences=list(texts)))
        return [[float(number) for number in vector] for vector in made]

    return embed


ENGINES: dict[str, tuple[str, Callable[[str, str], Embed]]] = {
    "penstock": ("penstock", penstock),
    "sentence-transformers": ("sentence-transformers", sentence_transformers),
    "infinity": ("infinity-emb", infinity),
}
"""The package of each engine, and what starts it. It is imported there, because the environment of one lacks
the packages of the others."""


def main() -> int:
    answers = own_output()
    name, model, dtype = sys.argv[1:]
    package, start = ENGINES[name]
    embed = start(model, dtype)
    answer({"version": version(package)}, answers)
    for line in sys.stdin:
        texts = json.loads(line)["texts"]
        began, used = time.perf_counter(), time.process_time()
        vectors = [vector for group in texts for vector in embed(group)]
        seconds, processor = time.perf_counter() - began, time.process_time() - used
        answer({"seconds": seconds, "processor_seconds": processor, "first": list(vectors[0])}, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
