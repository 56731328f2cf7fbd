"""The golden checkpoints: tiny random models, and what PyTorch computed from them."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("qwen3", "qwen2", "qwen2_yarn", "llama", "llama_linear_rope", "mistral_swa")
"""The folders in GOLDEN. Every test that compares all models with PyTorch takes its names from here."""
