"""Checks an update's list of tensors as a whole, before the first of their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.runtime.errors import InvalidRequest, TensorsRefused, Violation
from penstock.runtime.loading.tensor_checks import problems_of
from penstock.runtime.models.load_rules import LoadRules
from penstock.runtime.sent_tensors import SentTensor

_MOST_VIOLATIONS = 100


def check(rules: LoadRules, sent: Sequence[SentTensor], *, partial: bool, field: str) -> None:
    """Raises InvalidRequest if the list itself is wrong, and TensorsRefused with every tensor that does not
    fit the model. `field`: what the caller calls the list.
    """
    counts = Counter(tensor.name for tensor in sent)
    violations = [
        Violation(f"{field}.tensors", f"the name {name!r} is there {count} times")
        for name, count in counts.items()
        if count > 1
    ]
    violations += [
        Violation(f"{field}.tensors[{i}].sha256", f"has {len(tensor.sha256)} bytes; SHA-256 has 32")
        for i, tensor in enumerate(sent)
        if len(tensor.sha256) not in (0, 32)
    ]
    if violations:
        raise InvalidRequest(violations[:_MOST_VIOLATIONS])
    problems = problems_of(rules, sent, partial=partial)
    if problems:
        raise TensorsRefused(problems)
