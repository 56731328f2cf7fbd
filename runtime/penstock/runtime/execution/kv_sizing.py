"""How large the KV cache is, and so how long a request may be. Pure arithmetic.

If all layers are alike, the budget divided by the bytes of a page is the number of pages, n. Otherwise the
layers are in groups (`CacheSpec`), each of which has a number of pages of its own:

- A group with a sliding window gets no more than n pages, and no more than all rows can use together: for
  each row its window, wherever in a page it begins, and the decode steps of one dispatch; and two of the
  largest chunks of a prompt. To that come as many pages again for prefixes, but at most half of what is left
  up to n.
- The first group, which has no window or the largest one, gets all the rest. So it has n pages at least, and
  nothing that fitted before fits no more.
- If that is too little for a max_model_len that the operator asked for, the groups with a window get only
  what one request needs there.

Recurrent state is taken off the budget before: that of all slots, and the snapshots of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.runtime.config import EngineConfig, ResolvedConfig
from penstock.runtime.errors import ConfigError
from penstock.runtime.ops.cache_spec import CacheGroup
from penstock.runtime.scheduling.pages import window_pages
from penstock.runtime.scheduling.scheduler_config import capacity_tokens

log = logging.getLogger(__name__)

DEFAULT_CPU_KV_BYTES = 1 << 30
"""Used if the operator sets no size on CPU, and logged then. On CPU the operating system cannot say how much
memory may be taken."""


def check_max_model_len(config: EngineConfig, model_max_len: int) -> None:
    """Raise ConfigError if requests are to be longer than the model's context."""
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is more than the model's own {model_max_len}"
        )


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The resolved sizes: pages of each group of layers, and most tokens (prompt and generated together) of
    one request.
    """

    num_pages: tuple[int, ...]
    max_model_len: int
    num_snapshots: int = 0
    """Snapshots of recurrent state."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of an accelerator's memory: how many JAX may use, and how many it uses already."""

    limit_bytes: int
    used_bytes: int


def device_kv_bytes(memory: DeviceMemory, utilization: float, peak_temp_bytes: int) -> int:
    """Compute the bytes that are left for KV on an accelerator: limit * utilization, less what is in use (the
    weights), less the scratch memory of the largest program. ConfigError if nothing is left.
    """
    limit, in_use = memory.limit_bytes, memory.used_bytes
    log.info(
        "JAX may use %.1f GiB of the device's memory (the variable XLA_PYTHON_CLIENT_MEM_FRACTION says which "
        "share; 0.75 where it is not set), of which hbm_utilization takes %g",
        limit / 2**30,
        utilization,
    )
    left = int(limit * utilization) - in_use - peak_temp_bytes
    if left <= 0:
        raise ConfigError(
            f"hbm_utilization: {utilization:g} of {limit / 2**30:.1f} GiB leaves nothing for the KV cache "
            f"after {in_use / 2**30:.1f} GiB of weights and {peak_temp_bytes / 2**30:.1f} GiB of scratch; "
            "raise it, or lower max_num_batched_tokens"
        )
    return left


def plan_kv(
    config: ResolvedConfig,
    *,
    model_max_len: int,
    groups: Sequence[CacheGroup],
    state_bytes: int = 0,
    snapshot_bytes: int = 0,
    tokens_per_row: int | None = None,
    device_bytes: int | None,
) -> KVPlan:
    """Resolve the numbers of pages and of snapshots, and the context length.

    The budget is kv_cache_bytes, else `device_bytes`, and all of it is taken: pages beyond what the rows can
    fill keep prefixes. Without either the budget is a default, which is logged, and of which only as much is
    taken as all rows could fill, because nobody asked for more: with `tokens_per_row`, so many tokens of each
    row, and one row of the longest context. An explicit max_model_len that the budget
    cannot hold is a ConfigError; a derived one is lowered to what fits, with a log line. The last token of a
    request needs no KV, so `num_pages * page_size` positions hold one token more. If all layers have a
    sliding window, pages out of it are given back, so pages for the window hold any context.

    `state_bytes` are the bytes of the state of all slots, in all layers, and `snapshot_bytes` those of one
    snapshot of it; 0 where no layer has state. Both are part of the budget, but the default budget is for
    pages alone. Unless the operator says how many snapshots there are, there are as many as rows, but they
    take no more than half of what the state leaves, and nothing that an explicit max_model_len needs. If no
    layer has pages, there are as many pages as all rows could fill: they are numbers without memory.
    """
    if config.state_snapshots and not snapshot_bytes:
        raise ConfigError(
            f"state_snapshots: must be 0 or left out, not {config.state_snapshots}: the model has no layers "
            "with a recurrent state"
        )
    page_size = config.page_size
    asked_for = config.kv_cache_bytes or device_bytes
    check_max_model_len(config, model_max_len)
    wanted_len = config.max_model_len or model_max_len
    pages_per_row = -(-wanted_len // page_size)
    usual_pages = min(pages_per_row, -(-(tokens_per_row or wanted_len) // page_size))
    most_pages = max(pages_per_row, usual_pages * config.max_num_seqs)
    first, *others = groups
    least = [min(pages_per_row, _pages_for_one(group, config)) for group in others]
    one_request = _bytes(groups, (_dealt_up(pages_per_row, first), *least))
    spare = None
    if asked_for is not None:
        spare = asked_for - state_bytes - (one_request if config.max_model_len is not None else 0)
    num_snapshots = _num_snapshots(config, snapshot_bytes, spare)
    state_bytes += num_snapshots * snapshot_bytes
    budget = asked_for or DEFAULT_CPU_KV_BYTES + state_bytes
    if asked_for is None:
        log.info("kv_cache_bytes is not set: the KV cache takes %.2f GiB at most", budget / 2**30)
    page_bytes = sum(group.page_bytes for group in groups)
    equal = (budget - state_bytes) // page_bytes if page_bytes else most_pages
    if equal < 1 or budget < state_bytes:
        holders = f"{config.max_num_seqs} requests and {num_snapshots} snapshots"
        beside = f", beside {state_bytes} of state for {holders}" if state_bytes else ""
        raise ConfigError(f"kv_cache_bytes: {budget} is less than one page of {page_bytes} bytes{beside}")
    if asked_for is None:
        equal = min(equal, most_pages)
    further = [_pages_for_all(group, config, pages_per_row, equal) for group in others]
    num_pages = _rest(budget - state_bytes, first, others, further) if page_bytes else equal
    if config.max_model_len is not None and num_pages < pages_per_row:
        further = [min(pair) for pair in zip(least, further, strict=True)]
        num_pages = _rest(budget - state_bytes, first, others, further) if page_bytes else equal
    if asked_for is None:
        num_pages = min(num_pages, _dealt_up(most_pages, first))
    plan = (num_pages, *further)
    fits_len = 1 + min(
        capacity_tokens(pages, page_size, group.window, wanted_len)
        for pages, group in zip(plan, groups, strict=True)
    )
    if fits_len < 2 or (config.max_model_len is not None and wanted_len > fits_len):
        needed = one_request + state_bytes
        raise ConfigError(
            f"max_model_len: {wanted_len} tokens need {needed} bytes of KV cache and the budget is {budget}; "
            f"set kv_cache_bytes to at least {needed}, or max_model_len to at most {fits_len}"
        )
    if fits_len < wanted_len:
        log.warning(
            "the context is %d tokens, not the model's %d: that is what the KV cache holds; raise it with "
            "kv_cache_bytes (--kv-cache-bytes)",
            fits_len,
            wanted_len,
        )
    log.info(
        "KV cache: %d pages of %d tokens%s, %.2f GiB",
        num_pages,
        page_size,
        "".join(
            f", {pages} for the layers with a sliding window of {group.window}"
            for pages, group in zip(further, others, strict=True)
        ),
        (_bytes(groups, plan) + state_bytes) / 2**30,
    )
    if snapshot_bytes:
        log.info("recurrent state: %.2f GiB of these, with %d snapshots", state_bytes / 2**30, num_snapshots)
    return KVPlan(plan, min(wanted_len, fits_len), num_snapshots)


def _num_snapshots(config: ResolvedConfig, snapshot_bytes: int, spare: int | None) -> int:
    """Tell how many snapshots of recurrent state there are, if `spare` bytes can be shared between them and
    pages; None: no such bound.
    """
    if not snapshot_bytes:
        return 0
    if config.state_snapshots is not None:
        return config.state_snapshots
    most = config.max_num_seqs
    return most if spare is None else min(max(spare, 0) // 2 // snapshot_bytes, most)


def _bytes(groups: Sequence[CacheGroup], num_pages: Sequence[int]) -> int:
    return sum(group.page_bytes * pages for group, pages in zip(groups, num_pages, strict=True))


def _rest(budget: int, first: CacheGroup, others: Sequence[CacheGroup], num_pages: Sequence[int]) -> int:
    """Tell how many pages the first group can have beside so many of the others."""
    most = (budget - _bytes(others, num_pages)) // first.page_bytes
    return most - most % first.pieces


def _dealt_up(num_pages: int, group: CacheGroup) -> int:
    """Return so many pages, or the few more that each device has as many of as any other."""
    return -(-num_pages // group.pieces) * group.pieces


def _chunk_pages(config: ResolvedConfig) -> int:
    """Count the pages of the largest chunk of a prompt, wherever in a page it begins."""
    chunk = config.max_prefill_chunk or config.max_num_batched_tokens
    return -(-chunk // config.page_size) + 1


def _pages_for_one(group: CacheGroup, config: ResolvedConfig) -> int:
    """Tell how many pages of a group with a window one request needs to run as fast as it can."""
    assert group.window is not None
    steps = config.max_decode_steps // config.page_size
    return window_pages(group.window, config.page_size) + steps + _chunk_pages(config)


def _pages_for_all(group: CacheGroup, config: ResolvedConfig, pages_per_row: int, equal: int) -> int:
    """Tell how many pages a group with a window gets of a budget that has room for `equal` pages of all
    layers.
    """
    per_row = min(_pages_for_one(group, config) - _chunk_pages(config), pages_per_row)
    used = config.max_num_seqs * per_row + 2 * _chunk_pages(config)
    return min(equal, used + min(used, max(equal - used, 0) // 2))


def prefix_cache_pages(
    config: EngineConfig, *, has_state: bool, num_snapshots: int, reads_whole: bool = False
) -> int | None:
    """Return `EngineConfig.prefix_cache_pages`, or 0 for a model with recurrent state of which no snapshots
    are kept, because shared pages alone do not restore a request's state; and for one that reads each text
    whole. ConfigError if such a model was given a prefix cache.
    """
    if reads_whole:
        if config.prefix_cache_pages:
            raise ConfigError(
                f"prefix_cache_pages: must be 0 or left out, not {config.prefix_cache_pages}: what an "
                "encoder makes of a token depends on those behind it"
            )
        return 0
    if not has_state or num_snapshots:
        return config.prefix_cache_pages
    if config.prefix_cache_pages:
        raise ConfigError(
            f"prefix_cache_pages: must be 0 or left out, not {config.prefix_cache_pages}: this model has "
            "layers with a recurrent state, and no snapshots of it are kept (state_snapshots)"
        )
    log.info("no prefix cache: the model has layers with a recurrent state, and there are no snapshots of it")
    return 0
