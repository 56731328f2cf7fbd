"""Compares what was sent, or what a checkpoint holds, with what a model needs: by name, shape and dtype."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from penstock.runtime.loading.dtypes import is_float, name_of, num_bytes
from penstock.runtime.models.load_rules import LoadRules, TensorSpec
from penstock.runtime.sent_tensors import SentTensor, TensorProblem, TensorReason


def problems_of(rules: LoadRules, sent: Sequence[SentTensor], *, partial: bool) -> list[TensorProblem]:
    """Return everything that is wrong with tensors, as far as it can be told without their values: first what
    is missing, then the others by name.

    `partial`: whether some of the model's tensors are enough. But a rule needs all of its tensors at once,
    and a copy needs the tensor whose copy it is.
    """
    expected = {spec.name: spec for spec in rules.tensors}
    found = {tensor.name: tensor for tensor in sent}
    needed = dict.fromkeys(expected)
    if partial:
        some = [rule for rule in rules.rules if any(source.name in found for source in rule.sources)]
        needed = dict.fromkeys(source.name for rule in some for source in rule.sources)
    problems = [
        TensorProblem(name, TensorReason.MISSING, expected=_as_expected(expected[name]))
        for name in needed
        if name not in found
    ]
    usual: dict[str, str] | None = None
    for name in sorted(found):
        tensor, other = found[name], rules.copies.get(name)
        if name in expected:
            problem = _compared(tensor, _as_expected(expected[name]), exact=expected[name].exact)
        elif other is not None and other in found:
            problem = _compared(tensor, found[other], exact=True)
        elif is_harmless(rules, name):
            problem = _sized(tensor)
        else:
            usual = _by_ending(expected) if usual is None else usual
            alike = next((usual[end] for end in _endings(name) if usual.get(end)), None)
            why = f"is an unknown name; the model has {alike}" if alike else ""
            problem = TensorProblem(name, TensorReason.UNKNOWN_NAME, received=tensor, why=why)
        if problem is not None:
            problems.append(problem)
    return problems


def _endings(name: str) -> list[str]:
    """Return the name, and what is left of it without its first part, its first two, and so on."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def _by_ending(names: Iterable[str]) -> dict[str, str]:
    """Map each ending to the one name that has it; to "" where several have."""
    found: dict[str, str] = {}
    for name in names:
        for end in _endings(name):
            found[end] = "" if end in found else name
    return found


def is_harmless(rules: LoadRules, name: str) -> bool:
    """Say whether a tensor that no rule reads may be there."""
    return any(re.search(pattern, name) for pattern in rules.harmless)


def _as_expected(spec: TensorSpec) -> SentTensor:
    return SentTensor(spec.name, name_of(spec.dtype), spec.shape)


def _compared(tensor: SentTensor, expected: SentTensor, *, exact: bool) -> TensorProblem | None:
    """Compare a tensor with what it must be. `exact`: whether the dtype must be the expected one, rather than
    any of floats.
    """
    expected = SentTensor(tensor.name, expected.dtype, expected.shape)
    if tensor.shape != expected.shape:
        return TensorProblem(tensor.name, TensorReason.SHAPE, expected, tensor)
    if tensor.dtype == expected.dtype or (not exact and is_float(tensor.dtype)):
        return None
    why = "" if exact else f"has dtype {tensor.dtype}, expected {expected.dtype} or another one of floats"
    return TensorProblem(tensor.name, TensorReason.DTYPE, expected, tensor, why)


def _sized(tensor: SentTensor) -> TensorProblem | None:
    """Check that it is known how many bytes a harmless tensor has, though it is not read."""
    if num_bytes(tensor) is not None:
        return None
    why = f"has dtype {tensor.dtype}, which is not known here"
    return TensorProblem(tensor.name, TensorReason.DTYPE, None, tensor, why)
