"""The limits a scheduler works under. No jax."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine. ConfigError lists every field that is out of range."""

    max_num_seqs: int
    """Slots: requests that run at a time."""
    max_num_batched_tokens: int
    """Token budget of a step; at least max_num_seqs, so that all decodes always fit."""
    max_model_len: int
    """Most tokens of one request, prompt and generated together."""
    page_size: int
    num_pages: int
    eos_token_ids: frozenset[int]
    max_queued_requests: int
    max_prefill_chunk: int | None = None
    """Most prompt tokens of one request in a step; None: as many as the budget allows."""

    def __post_init__(self) -> None:
        least = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "max_model_len": 2,  # one prompt token and one generated
            "page_size": 1,
            "num_pages": 1,
            "max_queued_requests": 1,
        }
        values = {name: getattr(self, name) for name in least}
        bad = [
            f"{name} must be at least {least[name]}, not {n}" for name, n in values.items() if n < least[name]
        ]
        if self.max_num_batched_tokens < self.max_num_seqs:
            bad.append(
                f"max_num_batched_tokens, {self.max_num_batched_tokens}, must be at least max_num_seqs, "
                f"{self.max_num_seqs}: in every step each running request may decode one token"
            )
        if self.max_prefill_chunk is not None and self.max_prefill_chunk < 1:
            bad.append(f"max_prefill_chunk must be at least 1, not {self.max_prefill_chunk}")
        if bad:
            raise ConfigError("; ".join(bad))
