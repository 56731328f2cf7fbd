"""Rates, with a clock that only the test moves."""

from __future__ import annotations

import pytest

from penstock.service.access.rates import Account, Rates, TokenBucket
from penstock.service.access_errors import RateLimited
from penstock.service.errors import Busy
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(account: Account) -> float:
    """In how many seconds there will be room."""
    with pytest.raises(RateLimited) as caught:
        account.admit()
    return caught.value.retry_after_s


def admitted_until_refused(account: Account) -> int:
    for count in range(1000):
        try:
            account.admit()
        except RateLimited:
            return count
        account.leave()
    raise AssertionError("nothing is refused")


def test_a_minutes_worth_at_once_then_one_at_a_time(clock):
    account = Account(Rates(requests_per_minute=6), clock)
    assert admitted_until_refused(account) == 6
    assert refused(account) == pytest.approx(10.0)
    clock.now += 9.0
    assert refused(account) == pytest.approx(1.0)
    clock.now += 1.0
    assert admitted_until_refused(account) == 1


def test_retry_info_is_honest(clock):
    """Waiting exactly as long as was said is enough, whatever the rate, and a little less is not."""
    for rate in (1, 7, 59, 60, 61, 1000, 10**6, 10**9):
        account = Account(Rates(tokens_per_minute=rate), clock)
        account.use_tokens(3 * rate + 1)
        wait_s = refused(account)
        clock.now += wait_s * 0.99
        refused(account)
        clock.now += wait_s * 0.01
        account.admit()


@pytest.mark.parametrize(
    ("requests", "tokens", "limit", "wait_s"),
    [(60, 60, "tokens_per_minute", 61.0), (1, 600, "requests_per_minute", 60.0)],
)
def test_where_both_are_short_the_longer_wait_is_told(clock, requests, tokens, limit, wait_s):
    account = Account(Rates(requests_per_minute=requests, tokens_per_minute=tokens), clock)
    for _ in range(requests):
        account.admit()
        account.leave()
    account.use_tokens(2 * 60 if tokens == 60 else tokens)
    with pytest.raises(RateLimited) as caught:
        account.admit()
    assert caught.value.limit == limit
    assert caught.value.retry_after_s == pytest.approx(wait_s)
    clock.now += caught.value.retry_after_s
    account.admit()


def test_requests_that_begin_together_may_each_overdraw(clock):
    """Unless the key bounds how many run at once."""
    account = Account(Rates(tokens_per_minute=60), clock)
    for _ in range(3):
        account.admit()
    for _ in range(3):
        account.use_tokens(60)
    assert refused(account) == pytest.approx(121.0)
    bounded = Account(Rates(tokens_per_minute=60, max_parallel_requests=1), clock)
    bounded.admit()
    with pytest.raises(Busy):
        bounded.admit()


def test_a_bucket_never_holds_more_than_a_minutes_worth(clock):
    bucket = TokenBucket(60, clock)
    clock.now += 3600.0
    assert bucket.level() == 60.0


def test_tokens_are_owed_after_they_were_used(clock):
    """A request that used three minutes' worth is not cut off; the next one waits until that is paid."""
    account = Account(Rates(tokens_per_minute=600), clock)
    account.admit()
    for _ in range(18):
        account.use_tokens(100)
    assert refused(account) == pytest.approx(120.0, abs=0.2)
    clock.now += 121.0
    account.admit()


def test_over_an_hour_the_average_is_the_rate(clock):
    account = Account(Rates(tokens_per_minute=600), clock)
    used = 0
    for _ in range(3600):
        try:
            account.admit()
        except RateLimited:
            pass
        else:
            account.use_tokens(37)
            used += 37
            account.leave()
        clock.now += 1.0
    assert used == pytest.approx(600 * 61, rel=0.01)  # that, and the first minute's worth


def test_parallel_requests(clock):
    account = Account(Rates(max_parallel_requests=2), clock)
    account.admit()
    account.admit()
    with pytest.raises(Busy) as caught:
        account.admit()
    assert (caught.value.limit, caught.value.most) == ("max_parallel_requests", 2)
    account.leave()
    account.admit()


def test_when_a_place_is_free_is_judged_by_the_callers_own_requests(clock):
    account = Account(Rates(max_parallel_requests=1), clock)
    for _ in range(5):
        account.admit()
        clock.now += 5.0
        account.leave()
    account.admit()
    with pytest.raises(Busy) as caught:
        account.admit()
    assert caught.value.retry_after_s == pytest.approx(5.0, rel=0.1)


def test_a_refusal_costs_nothing(clock):
    account = Account(Rates(requests_per_minute=60, tokens_per_minute=60, max_parallel_requests=1), clock)
    account.admit()
    with pytest.raises(Busy):
        account.admit()
    account.leave()
    account.use_tokens(60)
    refused(account)
    clock.now += 60.0
    assert account.num_running == 0
    account.admit()


def test_no_limits(clock):
    account = Account(Rates(), clock)
    for _ in range(10_000):
        account.admit()
        account.use_tokens(10**9)
    assert account.num_running == 10_000


@pytest.mark.parametrize(("rate", "left"), [(120, 80), (60, 20), (30, 0)])
def test_another_rate_keeps_what_was_used(clock, rate, left):
    """40 of 60 were used. Otherwise a reload would fill the bucket."""
    account = Account(Rates(requests_per_minute=60), clock)
    for _ in range(40):
        account.admit()
        account.leave()
    account.change(Rates(requests_per_minute=rate))
    assert admitted_until_refused(account) == left


def test_limits_come_and_go(clock):
    account = Account(Rates(), clock)
    account.admit()
    account.change(Rates(max_parallel_requests=1))
    with pytest.raises(Busy):
        account.admit()
    account.change(Rates())
    account.admit()
