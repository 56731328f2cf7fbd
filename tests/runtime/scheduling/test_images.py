"""Images in prompts: when they are encoded, how far chunks go, and what pool and prefix cache keep."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.runtime.errors import ConfigError, ExceedsKVCapacity, InvalidRequest
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.scheduling.image_pool import BLOCK_TOKENS, ImagePool
from penstock.runtime.scheduling.plan import Plan
from penstock.runtime.scheduling.scheduler import Scheduler
from tests.support.scheduler.images import prompt_with
from tests.support.scheduler.scheduling import commit, dispatch, make

LIMITS: dict[str, Any] = {"image_blocks": 2, "max_encode_patches": 16, "max_num_batched_tokens": 64}
"""Two images of up to a block each; a step encodes 4 tokens' worth of patches, or one image."""


def queue(scheduler: Scheduler, name: str, *parts: int | tuple[int, int], max_tokens: int = 2) -> Request:
    tokens, media = prompt_with(parts)
    request = Request(name, tokens, stopping=StoppingParams(max_tokens=max_tokens), media=media)
    scheduler.add(request, 1)
    return request


def rows(plan: Plan) -> dict[str, tuple[int, int]]:
    return {row.request_id: (row.start, row.num_tokens) for row in plan.rows}


def encoded(plan: Plan) -> list[float]:
    """Return the numbers of the images that the plan encodes."""
    return [float(encode.item.patches[0, 0]) for encode in plan.encodes]


def test_an_image_is_encoded_by_the_step_that_computes_its_tokens() -> None:
    scheduler = make(**LIMITS)
    queue(scheduler, "a", 1, 2, (5, 3), 4)
    plan = dispatch(scheduler)
    assert rows(plan) == {"a": (0, 6)}
    assert encoded(plan) == [5]
    (part,) = plan.images
    assert (part.row, part.at, part.num_tokens, part.first) == (0, 2, 3, 0)
    assert part.blocks == plan.encodes[0].blocks
    commit(scheduler, plan)
    plan = dispatch(scheduler)
    assert (plan.encodes, plan.images) == ((), ())


def test_a_chunk_ends_before_an_image_that_exceeds_the_budget() -> None:
    scheduler = make(**LIMITS)
    queue(scheduler, "a", 1, (5, 3), 2, (6, 2), 3)  # 20 patches in all, of which a step may encode 16
    plan = dispatch(scheduler)
    assert rows(plan) == {"a": (0, 5)}
    assert encoded(plan) == [5]
    commit(scheduler, plan)
    plan = dispatch(scheduler)
    assert rows(plan) == {"a": (5, 3)}
    assert encoded(plan) == [6]


def test_one_image_is_encoded_however_large_it_is() -> None:
    scheduler = make(**LIMITS)
    queue(scheduler, "a", (5, 20), 1)
    queue(scheduler, "b", 1, (6, 1), 2)
    plan = dispatch(scheduler)
    assert rows(plan) == {"a": (0, 21), "b": (0, 1)}
    assert encoded(plan) == [5]


def test_a_prompt_that_begins_with_an_image_does_not_enter_before_its_turn() -> None:
    """It would hold a slot and pages without a token to compute."""
    scheduler = make(**LIMITS)
    queue(scheduler, "a", (5, 4), 1)
    queue(scheduler, "b", (6, 1), 2)
    plan = dispatch(scheduler)
    assert rows(plan) == {"a": (0, 5)}
    assert len(plan.new_requests) == 1
    commit(scheduler, plan)
    assert rows(dispatch(scheduler))["b"] == (0, 2)


def test_equal_images_are_encoded_once() -> None:
    scheduler = make(**LIMITS)
    queue(scheduler, "a", 1, (5, 3), (5, 3), 2)
    queue(scheduler, "b", 3, (5, 3), 4)
    plan = dispatch(scheduler)
    assert encoded(plan) == [5]
    assert [(part.row, part.at) for part in plan.images] == [(0, 1), (0, 4), (1, 1)]
    assert len({part.blocks for part in plan.images}) == 1
    commit(scheduler, plan)
    commit(scheduler, dispatch(scheduler))
    assert not scheduler.has_work
    queue(scheduler, "c", 8, (5, 3))
    assert dispatch(scheduler).encodes == ()


def test_a_chunk_that_cuts_an_image_says_which_part_it_has() -> None:
    scheduler = make(**{**LIMITS, "max_num_batched_tokens": 4})
    queue(scheduler, "a", 1, 2, (5, 5), 3)
    first = dispatch(scheduler)
    assert [(part.at, part.num_tokens, part.first) for part in first.images] == [(2, 2, 0)]
    second = dispatch(scheduler)  # before the first is committed
    assert [(part.at, part.num_tokens, part.first) for part in second.images] == [(0, 3, 2)]
    assert second.encodes == ()
    assert second.images[0].blocks == first.images[0].blocks


WHOLE = {**LIMITS, "whole_image_tokens": 8, "max_num_batched_tokens": 16}
"""No chunk may end within an image, of 8 tokens at most."""


def test_an_image_that_must_be_whole_is_not_cut() -> None:
    """A chunk ends before it, or goes to its end, beyond what a request is to get of a step."""
    scheduler = make(**{**WHOLE, "max_prefill_chunk": 4})
    queue(scheduler, "a", 1, 2, (5, 7), 3, 4, (6, 1), 8)
    found = []
    for _ in range(3):
        plan = dispatch(scheduler)
        found.append(rows(plan)["a"])
        commit(scheduler, plan)
    assert found == [(0, 2), (2, 7), (9, 4)]


def test_a_whole_image_waits_for_a_step_with_room() -> None:
    """Of 16 tokens the first prompt takes 12, and the image of the second needs 8."""
    scheduler = make(**WHOLE)
    queue(scheduler, "a", *range(12))
    queue(scheduler, "b", (5, 8), 1)
    queue(scheduler, "c", 1, (6, 8), 2)
    plan = dispatch(scheduler)
    assert rows(plan) == {"a": (0, 12)}
    commit(scheduler, plan)
    assert rows(dispatch(scheduler)) == {"a": (12, 1), "b": (0, 9), "c": (0, 1)}


def test_a_whole_image_waits_for_room_beside_decodes_and_other_prompts() -> None:
    """Of 16 tokens the decode has one and the prompt behind it 8, so there is none for the image's last."""
    scheduler = make(**WHOLE)
    queue(scheduler, "a", 1, max_tokens=9)
    commit(scheduler, dispatch(scheduler))
    queue(scheduler, "b", *range(8))
    queue(scheduler, "c", (5, 8), 1)
    plan = dispatch(scheduler)
    assert rows(plan) == {"a": (1, 1), "b": (0, 8)}
    commit(scheduler, plan)
    assert rows(dispatch(scheduler))["c"] == (0, 9)


def test_a_chunk_may_begin_within_a_whole_image_behind_a_shared_page() -> None:
    """Pages have 4 tokens, and what they hold has seen the whole image."""
    scheduler = make(**WHOLE, prefix_cache_pages=None)
    queue(scheduler, "a", 1, (5, 5), 2, 3)
    commit(scheduler, dispatch(scheduler))
    queue(scheduler, "b", 1, (5, 5), 9, 9)
    assert rows(dispatch(scheduler))["b"] == (4, 4)


def test_a_whole_image_for_which_the_cache_has_no_pages_is_refused() -> None:
    """With a sliding window of 4, pages of 4 tokens, and 3 pages, which any text gets through."""
    scheduler = make(**{**WHOLE, "sliding_window": 4, "num_pages": 3, "max_model_len": 60})
    queue(scheduler, "a", *range(30))
    with pytest.raises(ExceedsKVCapacity):
        queue(scheduler, "b", *range(10), (5, 5))
    queue(scheduler, "c", *range(10), (5, 4))


def test_a_step_must_have_room_for_a_whole_image_beside_all_decodes() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens must be at least 12, not 9: an image"):
        make(**{**WHOLE, "max_num_batched_tokens": 9})


def test_an_image_that_is_begun_stays_and_others_go() -> None:
    """The pool has two blocks. Request a is in the midst of its image, so that of b makes room for c's."""
    scheduler = make(**{**LIMITS, "max_prefill_chunk": 2, "max_num_batched_tokens": 6})
    queue(scheduler, "a", (5, 12), 1)
    queue(scheduler, "b", 1, (6, 1), 2)
    assert encoded(dispatch(scheduler)) == [5]
    plan = dispatch(scheduler)
    assert (rows(plan)["a"], encoded(plan)) == ((2, 2), [6])
    scheduler.abort("b", "gone", 2)
    queue(scheduler, "c", 1, (7, 1), 2)
    queue(scheduler, "d", 1, (8, 1), 2)
    seen = []
    for _ in range(3):
        plan = dispatch(scheduler)
        seen += encoded(plan)
    assert seen == [7, 8]


def test_a_preempted_request_uses_what_the_pool_kept() -> None:
    scheduler = make(**{**LIMITS, "max_num_batched_tokens": 4})
    queue(scheduler, "a", 1, (5, 8), 3)
    dispatch(scheduler)
    assert scheduler.preempt_all() == ("a",)
    scheduler.check()
    plan = dispatch(scheduler)
    assert rows(plan) == {"a": (0, 4)}
    assert plan.encodes == ()


def test_new_weights_have_every_image_encoded_again() -> None:
    scheduler = make(**{**LIMITS, "max_num_batched_tokens": 4})
    queue(scheduler, "a", 1, (5, 8), 3)
    dispatch(scheduler)
    scheduler.use_weights(1)
    scheduler.check()
    plan = dispatch(scheduler)
    assert rows(plan) == {"a": (4, 4)}
    assert encoded(plan) == [5]


def test_an_image_larger_than_the_pool_is_refused() -> None:
    scheduler = make(**{**LIMITS, "max_model_len": 200, "num_pages": 64})
    with pytest.raises(InvalidRequest) as raised:
        queue(scheduler, "a", 1, (5, 2 * BLOCK_TOKENS + 1))
    assert [bad.field for bad in raised.value.violations] == ["media[0]"]
    queue(scheduler, "a", 1, (5, 2 * BLOCK_TOKENS))


def cached(*parts: int | tuple[int, int]) -> int:
    """How many tokens of a prompt are shared with the one [1, image 5 of 8 tokens, 2, 3, 4, 9]."""
    scheduler = make(**LIMITS, prefix_cache_pages=None)
    queue(scheduler, "a", 1, (5, 8), 2, 3, 4, 9)
    commit(scheduler, dispatch(scheduler))
    queue(scheduler, "b", *parts)
    return rows(dispatch(scheduler))["b"][0]


def test_prefixes_with_images_are_shared_only_where_the_images_are_equal() -> None:
    """Pages have 4 tokens. The tokens of images are all the same, so only the digest tells them apart."""
    assert cached(1, (5, 8), 2, 3, 4, 9, 9) == 12
    assert cached(1, (6, 8), 2, 3, 4, 9, 9) == 0
    assert cached(1, 7, 7, 7, 7, 7, 7, 7, 7, 2, 3, 4, 9) == 0  # the same token ids without an image
    assert cached(1, (5, 7), 7, 2, 3, 4, 9) == 0  # another size of image 5 is another image
    assert cached(1, (5, 8), 6, 3, 4, 9, 9) == 8


def test_where_an_image_begins_matters() -> None:
    scheduler = make(**LIMITS, prefix_cache_pages=None)
    tokens, media = prompt_with([1, (5, 6), 7, 2, 3])
    shifted = tuple(type(item)(item.patches, item.grid, item.digest, 2, 6) for item in media)
    keys = [list(scheduler.page_keys(Request("r", tokens, media=each))) for each in (media, shifted, media)]
    assert len(keys[0]) == 2
    assert keys[0] == keys[2]
    assert not set(keys[0]) & set(keys[1])


def test_the_image_that_was_used_longest_ago_goes_first() -> None:
    pool = ImagePool(3)
    a, b, c = (pool.add(name, 1) for name in (b"a", b"b", b"c"))
    assert sorted((*a.blocks, *b.blocks, *c.blocks)) == [0, 1, 2]
    assert not pool.has_room(1)  # all are of the plan in the making
    pool.begin_plan()
    pool.use(a)
    pool.hold(c)
    pool.begin_plan()
    assert pool.has_room(2 * BLOCK_TOKENS)
    assert not pool.has_room(2 * BLOCK_TOKENS + 1)
    d = pool.add(b"d", 1)
    assert d.blocks == b.blocks
    assert pool.find(b"b") is None
    pool.begin_plan()
    with pytest.raises(RuntimeError):
        pool.add(b"d", 1)
    e = pool.add(b"e", 2 * BLOCK_TOKENS)
    assert sorted((*c.blocks, *e.blocks)) == [0, 1, 2]
    pool.check([c])
    pool.let_go(c)
    pool.forget()
    pool.check([])
    assert pool.num_images == 0
