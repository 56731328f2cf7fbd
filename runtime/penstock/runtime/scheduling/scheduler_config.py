"""The limits that a scheduler works under. No jax."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.runtime.errors import (
    ConfigError,
    ExceedsKVCapacity,
    InvalidRequest,
    PromptTooLong,
    Violation,
)
from penstock.runtime.requests.images import MediaItem
from penstock.runtime.requests.request import Request
from penstock.runtime.scheduling.image_pool import blocks_of
from penstock.runtime.scheduling.pages import window_pages

SCHEDULING_POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The pages of one group of layers, see `pages`."""

    num_pages: int
    window: int | None
    """The most latest positions, its own included, that a token attends to in these layers; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits of one engine's scheduler. ConfigError lists every field that is out of range."""

    max_num_seqs: int
    """Number of slots: most sequences that run at a time."""
    max_num_batched_tokens: int
    """Token budget of a step; at least max_num_seqs, so that all decodes always fit."""
    max_model_len: int
    """Most tokens of one request, prompt and generated together."""
    page_size: int
    """Tokens per page."""
    num_pages: int
    """Pages of the first group of layers, which is the only one where all layers are alike."""
    eos_token_ids: frozenset[int]
    """Tokens that end an output, unless the request ignores them."""
    max_queued_requests: int
    """Most sequences that wait at a time."""
    feature_slots: int | None = None
    """Most sequences with penalties or a bias that run at a time; None: as many as there are slots."""
    max_prefill_chunk: int | None = None
    """Most prompt tokens of one request in a step; None: the token budget is the only bound."""
    whole_prompts: bool = False
    """Whether each prompt is computed in one step, because its tokens attend to those behind them."""
    step_sizes: tuple[int, ...] = ()
    """Numbers of tokens, ascending, that steps are padded to; empty where padding costs nothing."""
    scheduling_policy: str = "fcfs"
    """"fcfs": in order of arrival. "priority": highest `Request.priority` first, then in order of arrival."""
    prefix_cache_pages: int | None = None
    """Most pages of each group that are kept for their prefix while no request holds them; None: all free
    pages; 0: no prefix cache."""
    sliding_window: int | None = None
    """The sliding window of the first group of layers; None if these have none. A token attends to at most
    this many latest tokens, itself included, so pages before them are given back."""
    further_groups: tuple[GroupLimits, ...] = ()
    """The other groups of layers; each has a window, and the first group has none or a larger one."""
    has_state: bool = False
    """Whether the model keeps state by slot beside pages. If so, a request whose token is put off computes
    its whole last step again, not only its last position."""
    num_snapshots: int = 0
    """How many snapshots of such state can be kept; without them no request begins with what another one has
    computed."""
    window_steps: tuple[int, ...] = ()
    """The lengths that windows may have, ascending from 1; empty: any length."""
    max_adapters: int = 0
    """Slots of adapters."""
    image_blocks: int = 0
    """Blocks of the pool of image embeddings, see `image_pool`; 0: prompts have no images."""
    whole_image_tokens: int = 0
    """The most tokens of an image, where all of them are computed in one step because they see those behind
    them in the image; 0: an image may be cut."""
    max_encode_patches: int = 0
    """Most patches of images that a step encodes; a single image may have more."""
    max_proposed_tokens: int = 0
    """Most tokens that are proposed for a sequence in a step, see `proposals`; 0: none are."""
    max_rows: int | None = None
    """Most rows of a step, where each proposed token counts as one; None: max_num_seqs."""
    num_turns: int = 1
    """How many turns there are. Each running sequence belongs to one, and a step has the rows of one turn, so
    that the next step depends on no token of it. A turn without rows is left out. Before each plan, turns of
    more sequences than others give some to them (`Roster.even_out_turns`). 1: a step has all rows."""
    vocab_size: int = 2**31
    """Proposed tokens are below this."""
    drafted_tokens: int = 0
    """Most tokens that a draft model on the device guesses for a sequence in a step; 0: there is none."""

    def __post_init__(self) -> None:
        least = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "max_model_len": 2,  # one prompt token and one generated
            "page_size": 1,
            "num_pages": 1,
            "max_queued_requests": 1,
            "num_turns": 1,
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
        if self.num_snapshots < 0 or (self.num_snapshots and not self.has_state):
            bad.append(f"num_snapshots must be 0, or above 0 with has_state, not {self.num_snapshots}")
        if self.has_state and not self.num_snapshots and self.prefix_cache_pages != 0:
            bad.append(
                "prefix_cache_pages must be 0 with has_state and without num_snapshots, not "
                f"{self.prefix_cache_pages}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            bad.append(f"sliding_window must be at least 1, not {self.sliding_window}")
        bad += [
            f"further_groups must have pages and a window, not {group}"
            for group in self.further_groups
            if group.num_pages < 1 or group.window is None or group.window < 1
        ]
        room = self.max_num_batched_tokens - self.most_rows
        if self.whole_image_tokens > max(room, 0):
            bad.append(
                f"max_num_batched_tokens must be at least {self.whole_image_tokens + self.most_rows}, not "
                f"{self.max_num_batched_tokens}: an image of {self.whole_image_tokens} tokens is computed "
                f"in one step, beside up to {self.most_rows} tokens of requests that decode"
            )
        if self.max_proposed_tokens < 0:
            bad.append(f"max_proposed_tokens must be at least 0, not {self.max_proposed_tokens}")
        if self.most_rows < self.max_num_seqs:
            bad.append(f"max_rows must be at least max_num_seqs, {self.max_num_seqs}, not {self.max_rows}")
        if bad:
            raise ConfigError("; ".join(bad))

    @property
    def most_rows(self) -> int:
        """Most rows of a step, proposed tokens included."""
        return self.max_num_seqs if self.max_rows is None else self.max_rows

    @property
    def groups(self) -> tuple[GroupLimits, ...]:
        """All groups of layers."""
        return GroupLimits(self.num_pages, self.sliding_window), *self.further_groups

    @property
    def total_pages(self) -> int:
        """Pages of all groups together."""
        return sum(group.num_pages for group in self.groups)

    def max_prefill_pages(self, group: GroupLimits) -> int:
        """Return the most pages of a group that a sequence holds while it is prefilled. With a window these
        are the pages of a chunk and of what the chunk attends to, wherever in a page they begin.
        """
        if group.window is None:
            return group.num_pages
        chunk = max(self.max_prefill_chunk or self.max_num_batched_tokens, self.whole_image_tokens)
        return min(group.num_pages, -(-(group.window + chunk) // self.page_size) + 1)

    @property
    def capacity_tokens(self) -> int:
        """Most positions that one request can have computed, alone in empty pools."""
        return min(
            capacity_tokens(group.num_pages, self.page_size, group.window, self.max_model_len)
            for group in self.groups
        )

    def context_limit(self, request: Request) -> int:
        """Return the most tokens, prompt and generated, that a request may reach. Raises PromptTooLong or
        ExceedsKVCapacity, or InvalidRequest for an image that is too large.

        The prompt must leave room for one token: len(prompt) <= max_model_len - 1. The last token of a
        request is never an input, so T tokens in all need KV for T - 1 positions. A request with max_tokens
        must be able to reach them (or max_model_len) alone in an empty pool. A request without max_tokens
        only needs KV for its prompt, and ends CONTEXT_FULL at min(max_model_len, capacity + 1) tokens.
        """
        for i, item in enumerate(request.media):
            if blocks_of(item.num_tokens) > self.image_blocks:
                described = f"{item.num_tokens} tokens of one image are more than the engine has room for"
                raise InvalidRequest([Violation(f"media[{i}]", described)])
            if self.whole_image_tokens:
                self._check_pages(item)
        num_prompt = len(request.prompt_token_ids)
        if self.whole_prompts and num_prompt > self.max_num_batched_tokens:
            raise PromptTooLong(num_prompt, self.max_num_batched_tokens)
        if num_prompt > self.max_model_len - 1:
            raise PromptTooLong(num_prompt, self.max_model_len - 1)
        capacity, max_tokens = self.capacity_tokens, request.stopping.max_tokens
        most_tokens = min(self.max_model_len, num_prompt + (1 if max_tokens is None else max_tokens))
        if most_tokens - 1 > capacity:
            raise ExceedsKVCapacity(most_tokens - 1, capacity)
        return min(self.max_model_len, capacity + 1)

    def _check_pages(self, item: MediaItem) -> None:
        """Raise ExceedsKVCapacity for an image whose tokens cannot have pages all at once, behind those of
        the sliding window.
        """
        for group in self.groups:
            positions = item.end
            if group.window is not None:
                positions = min(positions, group.window + item.num_tokens + self.page_size)
            if -(-positions // self.page_size) > group.num_pages:
                raise ExceedsKVCapacity(positions, group.num_pages * self.page_size)

    @property
    def by_priority(self) -> bool:
        """Whether requests of higher priority are served first."""
        return self.scheduling_policy == "priority"


def capacity_tokens(num_pages: int, page_size: int, sliding_window: int | None, max_model_len: int) -> int:
    """Return the most positions of one request, at most `max_model_len`, for which `num_pages` pages are
    enough. If the pages hold the sliding window and one page more, wherever in a page the window begins,
    there is no limit but `max_model_len`, because pages out of the window are given back.
    """
    capacity = num_pages * page_size
    if sliding_window is not None and num_pages >= window_pages(sliding_window, page_size):
        return max(capacity, max_model_len)
    return capacity
