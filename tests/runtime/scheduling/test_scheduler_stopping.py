"""Every finish reason that tokens and deadlines cause, at its exact limits, and which one wins if several
apply.
"""

from __future__ import annotations

import pytest

from penstock.runtime.requests.request import Finish, FinishReason, StepOutput
from penstock.runtime.scheduling.scheduler import Scheduler
from tests.support.scheduler.scheduling import EOS, OTHER_EOS, STOP_ID, WORD, add, commit, dispatch, make

SECOND = 10**9


def step(scheduler: Scheduler, token: int = WORD, now_ns: int = 3) -> list[StepOutput]:
    return commit(scheduler, dispatch(scheduler), token, now_ns)


def run(scheduler: Scheduler, tokens: list[int]) -> tuple[list[int], Finish | None]:
    """Give one request these samples until it ends. Returns its tokens and how it ended."""
    made: list[int] = []
    for token in tokens:
        (output,) = step(scheduler, token)
        made += output.token_ids
        if output.finish is not None:
            assert scheduler.load().pages_used == scheduler.load().num_running == 0
            return made, output.finish
    return made, None


@pytest.mark.parametrize(
    ("stopping", "samples", "num_made", "finish"),
    [
        # EOS and stop ids end at once, and are part of the output.
        ({}, [WORD, EOS], 2, Finish(FinishReason.EOS, token_id=EOS)),
        ({}, [OTHER_EOS], 1, Finish(FinishReason.EOS, token_id=OTHER_EOS)),
        ({"stop_token_ids": (STOP_ID,)}, [WORD, STOP_ID], 2, Finish(FinishReason.STOP, token_id=STOP_ID)),
        ({}, [STOP_ID], 1, None),
        ({"ignore_eos": True}, [EOS, OTHER_EOS, WORD], 3, None),
        # An EOS that is ignored but asked for by id is a stop; one that is not ignored stays an EOS.
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, [EOS], 1, Finish(FinishReason.STOP, token_id=EOS)),
        ({"stop_token_ids": (EOS,)}, [EOS], 1, Finish(FinishReason.EOS, token_id=EOS)),
        # Length.
        ({"max_tokens": 1}, [WORD], 1, Finish(FinishReason.MAX_TOKENS)),
        ({"max_tokens": 3}, [WORD] * 9, 3, Finish(FinishReason.MAX_TOKENS)),
        ({"max_tokens": 3, "ignore_eos": True}, [EOS] * 9, 3, Finish(FinishReason.MAX_TOKENS)),
        # If several apply, the first of this list wins: EOS, STOP, MAX_TOKENS, CONTEXT_FULL.
        ({"max_tokens": 1}, [EOS], 1, Finish(FinishReason.EOS, token_id=EOS)),
        ({"max_tokens": 1, "stop_token_ids": (5,)}, [5], 1, Finish(FinishReason.STOP, token_id=5)),
        # The first min_tokens tokens never end it by EOS or stop id (the sampler should not have chosen
        # them).
        ({"min_tokens": 2}, [EOS, EOS, WORD, EOS], 4, Finish(FinishReason.EOS, token_id=EOS)),
        ({"min_tokens": 2}, [EOS, EOS, EOS], 3, Finish(FinishReason.EOS, token_id=EOS)),
        ({"min_tokens": 1, "stop_token_ids": (5,)}, [5, 5], 2, Finish(FinishReason.STOP, token_id=5)),
        ({"min_tokens": 2, "max_tokens": 2}, [EOS, EOS], 2, Finish(FinishReason.MAX_TOKENS)),
    ],
)
def test_tokens_end_a_request(stopping, samples, num_made, finish):
    scheduler = make()
    add(scheduler, **stopping)
    assert run(scheduler, samples) == (samples[:num_made], finish)
    assert scheduler.finished("a") == (finish is not None)


@pytest.mark.parametrize(
    ("num_prompt", "stopping", "num_made", "reason"),
    [
        (7, {}, 1, FinishReason.CONTEXT_FULL),  # max_model_len is 8, and reached exactly
        (3, {}, 5, FinishReason.CONTEXT_FULL),
        (3, {"max_tokens": 6}, 5, FinishReason.CONTEXT_FULL),
        (3, {"max_tokens": 5}, 5, FinishReason.MAX_TOKENS),
        (3, {"max_tokens": 4}, 4, FinishReason.MAX_TOKENS),
        (3, {"min_tokens": 100}, 5, FinishReason.CONTEXT_FULL),
    ],
)
def test_the_context_ends_a_request(num_prompt, stopping, num_made, reason):
    scheduler = make(max_model_len=8)
    add(scheduler, num_prompt=num_prompt, **stopping)
    assert run(scheduler, [WORD] * 20) == ([WORD] * num_made, Finish(reason))


def test_without_max_tokens_the_pool_is_the_context():
    scheduler = make(num_pages=2)  # 8 positions are enough for 9 tokens, because the last needs none
    add(scheduler, num_prompt=8)
    assert run(scheduler, [WORD] * 20) == ([WORD], Finish(FinishReason.CONTEXT_FULL))
    add(scheduler, num_prompt=5)
    assert run(scheduler, [WORD] * 20) == ([WORD] * 4, Finish(FinishReason.CONTEXT_FULL))
    add(scheduler, num_prompt=5, max_tokens=4)
    assert run(scheduler, [WORD] * 20) == ([WORD] * 4, Finish(FinishReason.MAX_TOKENS))


def test_a_token_sampled_at_the_deadline_is_kept_and_is_the_last():
    scheduler = make()
    add(scheduler, now_ns=SECOND, time_limit_s=2.0)
    assert step(scheduler, now_ns=3 * SECOND - 1)[0].finish is None
    (output,) = step(scheduler, now_ns=3 * SECOND)
    assert (output.token_ids, output.finish) == ((WORD,), Finish(FinishReason.TIME_LIMIT))
    assert scheduler.load().pages_used == 0


@pytest.mark.parametrize(
    ("stopping", "token", "reason"),
    [
        ({}, EOS, FinishReason.EOS),
        ({"stop_token_ids": (STOP_ID,)}, STOP_ID, FinishReason.STOP),
        ({"max_tokens": 1}, WORD, FinishReason.MAX_TOKENS),
        ({"min_tokens": 1}, EOS, FinishReason.TIME_LIMIT),
    ],
)
def test_any_other_reason_comes_before_the_deadline(stopping, token, reason):
    scheduler = make()
    add(scheduler, now_ns=SECOND, time_limit_s=1.0, **stopping)
    (output,) = step(scheduler, token, now_ns=9 * SECOND)
    assert output.finish is not None
    assert output.finish.reason is reason
