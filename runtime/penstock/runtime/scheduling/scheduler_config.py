"""The limits a scheduler works under. No jax."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.runtime.errors import ConfigError

SCHEDULING_POLICIES = ("fcfs", "priority")


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
    feature_slots: int | None = None
    """Requests with penalties or a bias that run at a time; None: as many as there are slots."""
    max_prefill_chunk: int | None = None
    """Most prompt tokens of one request in a step; None: as many as the budget allows."""
    step_sizes: tuple[int, ...] = ()
    """Numbers of tokens, ascending, that steps are padded to; none where padding costs nothing."""
    scheduling_policy: str = "fcfs"
    """"fcfs": in order of arrival. "priority": highest `Request.priority` first, then in order of arrival."""
    prefix_cache_pages: int | None = None
    """Most pages kept for their prefix while nobody holds them; None: all that are free. 0: no prefix
    cache."""
    sliding_window: int | None = None
    """Largest window of the model's layers, if each has one: a token attends to that many latest tokens at
    most, itself included, so pages before them are given back."""
    has_state: bool = False
    """Whether the model keeps state by slot beside pages. Then no request begins with what another one has
    computed, and one whose token is put off computes its last step again, and not its last position alone."""
    window_steps: tuple[int, ...] = ()
    """Lengths that windows may have, ascending from 1; (): any."""

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
        if self.feature_slots is not None and self.feature_slots < 1:
            bad.append(f"feature_slots must be at least 1, not {self.feature_slots}")
        if self.max_prefill_chunk is not None and self.max_prefill_chunk < 1:
            bad.append(f"max_prefill_chunk must be at least 1, not {self.max_prefill_chunk}")
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            policies = ", ".join(SCHEDULING_POLICIES)
            bad.append(f"scheduling_policy must be one of {policies}, not {self.scheduling_policy!r}")
        if self.prefix_cache_pages is not None and self.prefix_cache_pages < 0:
            bad.append(f"prefix_cache_pages must be at least 0, not {self.prefix_cache_pages}")
        if self.has_state and self.prefix_cache_pages != 0:
            bad.append(f"prefix_cache_pages must be 0 with has_state, not {self.prefix_cache_pages}")
        if self.sliding_window is not None and self.sliding_window < 1:
            bad.append(f"sliding_window must be at least 1, not {self.sliding_window}")
        if bad:
            raise ConfigError("; ".join(bad))

    @property
    def max_prefill_pages(self) -> int:
        """Most pages that a row holds while it prefills. With a sliding window: those of a chunk and of what
        it looks back to, wherever in a page they begin.
        """
        if self.sliding_window is None:
            return self.num_pages
        chunk = self.max_prefill_chunk or self.max_num_batched_tokens
        return min(self.num_pages, -(-(self.sliding_window + chunk) // self.page_size) + 1)

    @property
    def capacity_tokens(self) -> int:
        """Most positions that one request alone can have computed."""
        return capacity_tokens(self.num_pages, self.page_size, self.sliding_window, self.max_model_len)

    @property
    def by_priority(self) -> bool:
        return self.scheduling_policy == "priority"


def capacity_tokens(num_pages: int, page_size: int, sliding_window: int | None, max_model_len: int) -> int:
    """Most positions of one request that so many pages are enough for: theirs; or, where the window and one
    more page fit, wherever in a page they begin, any number, for what is out of the window is given back.
    """
    capacity = num_pages * page_size
    if sliding_window is not None and num_pages >= -(-sliding_window // page_size) + 2:
        return max(capacity, max_model_len)
    return capacity
