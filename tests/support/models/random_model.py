"""A small model of random weights with the demo model's tokenizer. If its output makes sense, something other
than the model has made it so.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from bench.checkpoint import Shape, write_checkpoint
from penstock.runtime.loading.hub import resolve_model

SHAPE = Shape(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=2048,
    num_words=2000,
    max_position_embeddings=2048,
)
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_random_model(directory: Path, seed: int = 0) -> None:
    """Write a checkpoint that `Engine.from_pretrained` loads."""
    demo = resolve_model("demo")
    write_checkpoint(directory, SHAPE, seed)
    for name in _TOKENIZER:
        shutil.copy(demo / name, directory / name)
    config = json.loads((directory / "config.json").read_text())
    theirs = json.loads((demo / "config.json").read_text())
    assert theirs["vocab_size"] == SHAPE.vocab_size
    config |= {name: theirs[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (directory / "config.json").write_text(json.dumps(config))
