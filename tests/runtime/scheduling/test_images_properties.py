"""Random traffic with images on a fake runner that reads them through the plan's blocks.

Whatever the chunks, the budget and the size of the pool, every request makes the tokens that it makes alone,
where each place of an image holds what the encoder makes of that very image and place. So a block that was
overwritten too early, or a page that was shared by requests with other images, makes a wrong token. Where
images must be whole, no chunk ends within one, and all requests finish nevertheless.
"""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given, note, settings
from hypothesis import strategies as st

from penstock.runtime.requests.request import CacheParams, Request, StoppingParams, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.image_pool import BLOCK_TOKENS, blocks_of
from penstock.runtime.scheduling.plan import Plan, StepResult
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.scheduler_config import GroupLimits, SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence
from tests.support.scheduler.fake_runner import EOS, VOCAB, FakeRunner, Rota, run_alone
from tests.support.scheduler.images import prompt_with
from tests.support.scheduler.proposing import Guesses, lies

MOST_TOKENS = 40
"""Of one image: two blocks."""


def random_config(rng: random.Random) -> SchedulerConfig:
    max_num_seqs = rng.randint(1, 5)
    window = rng.choice([None, None, None, rng.randint(1, 12)])
    has_state = rng.random() < 0.4
    num_snapshots = rng.choice([0, 1, 4]) if has_state else 0
    whole = rng.choice([0, MOST_TOKENS])
    most_rows = max_num_seqs + rng.choice([0, 0, 3, 8])
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=most_rows + whole + rng.choice([rng.randint(0, 8), 60]),
        max_model_len=100,
        page_size=rng.choice([1, 4, 8]),
        num_pages=rng.choice([100, 150, 300]),
        eos_token_ids=EOS,
        max_queued_requests=100,
        max_prefill_chunk=rng.choice([None, rng.randint(1, 50)]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        prefix_cache_pages=0 if has_state and not num_snapshots else rng.choice([None, None, 0, 3]),
        sliding_window=window,
        further_groups=rng.choice([(), (GroupLimits(150, min(window or 5, 5)),)]),
        has_state=has_state,
        num_snapshots=num_snapshots,
        image_blocks=rng.randint(blocks_of(MOST_TOKENS), 6),
        whole_image_tokens=whole,
        max_encode_patches=rng.choice([1, 40, 1000]),
        max_proposed_tokens=rng.randint(1, 4),
        max_rows=most_rows,
        vocab_size=VOCAB,
    )


def random_request(rng: random.Random, name: str) -> Request:
    """Make a prompt of a few words and images; there are only four images."""
    sizes = {number: random.Random(number).choice([1, 3, BLOCK_TOKENS, MOST_TOKENS]) for number in range(4)}
    parts: list[int | tuple[int, int]] = []
    for _ in range(rng.randint(1, 6)):
        number = rng.randrange(4)
        part: int | tuple[int, int] = (number, sizes[number]) if rng.random() < 0.5 else rng.randint(0, 2)
        if sum(p[1] if isinstance(p, tuple) else 1 for p in [*parts, part]) < 90:
            parts.append(part)
    tokens, media = prompt_with(parts or [1])
    return Request(
        name,
        tokens,
        stopping=StoppingParams(max_tokens=rng.randint(1, 8), ignore_eos=rng.random() < 0.5),
        cache=CacheParams(bypass=rng.random() < 0.1),
        sampling=ResolvedSampling(seed=rng.randrange(2**64)),
        priority=rng.randint(-1, 1),
        media=media,
    )


def check_plan(plan: Plan, config: SchedulerConfig, requests: dict[str, Request]) -> None:
    patches = sum(encode.item.num_patches for encode in plan.encodes)
    assert len(plan.encodes) < 2 or patches <= config.max_encode_patches
    digests = [encode.item.digest for encode in plan.encodes]
    assert len(set(digests)) == len(digests)
    written = [block for encode in plan.encodes for block in encode.blocks]
    assert len(set(written)) == len(written)
    assert all(row.num_tokens > 0 for row in plan.rows)
    assert sum(row.num_tokens for row in plan.rows) <= config.max_num_batched_tokens
    if config.whole_image_tokens:
        ends = [(row.start + row.num_tokens, requests[row.request_id].media) for row in plan.rows]
        assert not any(item.start < end < item.end for end, media in ends for item in media)


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_every_request_makes_the_tokens_that_it_makes_alone(seed: int) -> None:
    rng = random.Random(seed)
    config = random_config(rng)
    note(str(config))
    runner = FakeRunner(config)
    limit = min(config.max_model_len, config.capacity_tokens + 1)
    requests, made = {}, {}
    expected: dict[str, list[int]] = {}
    in_flight: deque[tuple[Plan, StepResult]] = deque()
    waiting = []

    def right(seq: Sequence, most: int) -> list[int]:
        return expected[seq.request_id][seq.num_generated :][:most]

    proposes = rng.random() < 0.5
    scheduler = Scheduler(config, Guesses(lies(rng, VOCAB, right), rng) if proposes else None)
    for i in range(rng.randint(1, 8)):
        request = random_request(rng, f"r{i}")
        n = rng.choice([1, 1, 2])
        constraints = [Rota(rng.randint(1, 9)) for _ in range(n)] if rng.random() < 0.2 else []
        waiting.append(outputs_of(request, n, constraints))
    ahead = rng.randint(0, 1)
    while waiting or scheduler.has_work or in_flight:
        if waiting and rng.random() < 0.5:
            for request in waiting.pop():
                scheduler.add(request, 1)
                expected[request.request_id] = run_alone(
                    request, limit, windows=runner.windows, has_state=config.has_state
                )[0]
                requests[request.request_id], made[request.request_id] = request, list[int]()
        if rng.random() < 0.03:
            scheduler.preempt_all()
        if rng.random() < 0.03:
            scheduler.flush_prefix_cache()
        if scheduler.has_work and rng.random() < 0.02:
            name = rng.choice(scheduler.active_ids())
            assert scheduler.abort(name, "gone", 2) is not None
            del made[name], expected[name]
        plan = scheduler.schedule(2, max_steps=rng.choice([1, 4]))
        scheduler.check()
        if plan is None:
            assert in_flight or not scheduler.has_work, "there is work, and no plan"
        else:
            check_plan(plan, config, requests)
            put_off = [
                i
                for i, row in enumerate(plan.rows)
                if row.samples and requests[row.request_id].constraint is not None and rng.random() < 0.3
            ]
            in_flight.append((plan, runner.execute(plan, put_off)))
            scheduler.put_off(plan, put_off, put_off[:1])
        while len(in_flight) > (ahead if plan is not None else 0):
            done, result = in_flight.popleft()
            verdicts = scheduler.accept(done, result, 3)
            for output in scheduler.commit(done, result, 3, verdicts):
                made[output.request_id] += output.token_ids
            scheduler.check()
    assert made == expected
    assert all(0 <= token < VOCAB for tokens in made.values() for token in tokens)
