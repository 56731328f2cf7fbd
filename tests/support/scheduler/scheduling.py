"""A scheduler small enough to compute its plans by hand, and the helpers that its tests share."""

from __future__ import annotations

from typing import Any

from penstock.runtime.requests.request import Request, StepOutput, StoppingParams
from penstock.runtime.scheduling.plan import Plan, StepResult
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig

EOS, OTHER_EOS, STOP_ID, WORD = 0, 1, 5, 9
LIMITS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "max_model_len": 32,
    "page_size": 4,
    "num_pages": 16,
    "eos_token_ids": frozenset({EOS, OTHER_EOS}),
    "max_queued_requests": 10_000,
}


def make(**limits: Any) -> Scheduler:
    """Make a scheduler with these limits. It has no prefix cache unless `limits` give it one, because all
    prompts of `add` begin alike.
    """
    return Scheduler(SchedulerConfig(**{**LIMITS, "prefix_cache_pages": 0, **limits}))


def add(scheduler: Scheduler, name: str = "a", num_prompt: int = 3, now_ns: int = 1, **stopping: Any) -> None:
    """Queue a request with the prompt 100, 101, ..."""
    prompt = tuple(range(100, 100 + num_prompt))
    scheduler.add(Request(name, prompt, stopping=StoppingParams(**stopping)), now_ns)


def dispatch(
    scheduler: Scheduler,
    now_ns: int = 2,
    admit: bool = True,
    max_steps: int = 1,
    prefill_budget: int | None = None,
    apart_steps: int = 0,
) -> Plan:
    """Return the next plan; fails if there is none."""
    plan = scheduler.schedule(
        now_ns, admit=admit, max_steps=max_steps, prefill_budget=prefill_budget, apart_steps=apart_steps
    )
    assert plan is not None
    scheduler.check()
    return plan


def commit(
    scheduler: Scheduler, plan: Plan, token: int = WORD, now_ns: int = 3, *, audit: bool = True
) -> list[StepOutput]:
    """Commit the plan with the same token for every sample of every row."""
    sampled = [(token,) * row.max_samples if row.samples else () for row in plan.rows]
    result = StepResult(sampled, [()] * len(plan.rows))
    outputs = scheduler.commit(plan, result, now_ns, scheduler.accept(plan, result, now_ns))
    if audit:
        scheduler.check()
    return outputs
