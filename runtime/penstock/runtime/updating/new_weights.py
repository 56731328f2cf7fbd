"""The new weights of one update: whole tensors go in, in any order, and come out as leaves that serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from penstock.runtime.errors import ChecksumMismatch, InvalidRequest, TensorsRefused, Violation
from penstock.runtime.host import host_memory
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.loading.leaves import LeafMaker
from penstock.runtime.models.load_rules import LoadRules
from penstock.runtime.sent_tensors import SentTensor, TensorProblem, TensorReason
from penstock.runtime.updating.digest import digest_of
from penstock.runtime.updating.incoming import is_finite
from penstock.runtime.updating.new_leaves import NewLeaves


class NewWeights:
    """Tensors are put in by one thread at a time. Nothing is refused before all have been looked at, so that
    the error lists every bad one; but no more leaves are kept once there is one.
    """

    def __init__(
        self,
        rules: LoadRules,
        sent: Sequence[SentTensor],
        maker: LeafMaker,
        leaves: NewLeaves,
        *,
        field: str,
        refuse_non_finite: bool,
    ) -> None:
        """sent: all tensors of the update, as `manifest.check` takes them. maker: made for them, and to hand
        its leaves to `leaves`. field: what the caller calls the source of the tensors, for errors.
        """
        self._rules, self._field, self._refuse_non_finite = rules, field, refuse_non_finite
        self._specs = {spec.name: spec for spec in rules.tensors}
        self._sent = {tensor.name: tensor for tensor in sent}
        self._maker, self._leaves = maker, leaves
        self._hashes: dict[str, bytes] = {}
        self._problems: dict[str, TensorProblem] = {}
        self.is_spent = False
        """Whether the leaves are gone, because `install` or `drop` was called."""

    def needs(self, name: str) -> bool:
        """Whether the values of a tensor are needed, and not only its checksums."""
        return name in self._specs

    def put(
        self, name: str, values: npt.NDArray[Any] | None, sha256: bytes, *, is_intact: bool = True
    ) -> None:
        """Takes a whole tensor, of which the values must not change any more; they are contiguous, and None
        if they are not needed. sha256: of its bytes. is_intact: whether they have the sender's checksums. May
        block while others are converted.
        """
        self._hashes[name] = sha256
        sent = self._sent[name]
        if not is_intact:
            self._note(TensorProblem(name, TensorReason.CHECKSUM, sent, sent, "does not have its checksum"))
        elif self._refuse_non_finite and values is not None and not is_finite(sent.dtype, values):
            self._note(TensorProblem(name, TensorReason.NON_FINITE, sent, sent, "has NaN or infinity"))
        if values is not None:
            self._maker.add(name, values)
        if self._maker.too_large and not self._problems:
            self._leaves.drop()

    def finish(self) -> bytes:
        """Waits until all leaves are complete, and returns the digest of the update.

        Raises TensorsRefused with every tensor that has not come or is bad: ChecksumMismatch if one does not
        have its checksum. Raises InvalidRequest if a tensor that is to be a copy of another is none.
        """
        for name, sent in self._sent.items():
            if name not in self._hashes:
                why = "has fewer bytes than its shape needs"
                self._note(TensorProblem(name, TensorReason.INCOMPLETE, sent, sent, why))
        if len(self._hashes) == len(self._sent):
            self._maker.finish()
        for name, dtype in self._maker.too_large.items():
            expected = SentTensor(name, name_of(dtype), self._sent[name].shape)
            why = f"has values beyond the range of {expected.dtype}"
            self._note(TensorProblem(name, TensorReason.DTYPE, expected, self._sent[name], why))
        if self._problems:
            problems = sorted(self._problems.values(), key=lambda problem: problem.name)
            is_damaged = any(problem.reason is TensorReason.CHECKSUM for problem in problems)
            raise (ChecksumMismatch if is_damaged else TensorsRefused)(problems)
        self._check_copies()
        self._maker.close()
        host_memory.give_back()
        return digest_of((tensor, self._hashes[name]) for name, tensor in self._sent.items())

    def install(self) -> None:
        """Makes the new leaves those that serve, see `NewLeaves.install`."""
        self.is_spent = True
        self._leaves.install()

    def drop(self) -> None:
        """Lets go of all tensors and leaves. May be called twice."""
        self.is_spent = True
        self._maker.close()
        self._leaves.drop()

    def _note(self, problem: TensorProblem) -> None:
        """Keeps the first problem of each tensor."""
        if not self._problems:
            self._maker.is_refused = True
            self._leaves.drop()
        self._problems.setdefault(problem.name, problem)

    def _check_copies(self) -> None:
        """Compares by hashes, so that neither tensor need be kept until the other has come."""
        wrong = [
            f"{name} differs from {other}, though config.json ties them"
            for name, other in self._rules.copies.items()
            if name in self._sent and name not in self._specs and self._hashes[name] != self._hashes[other]
        ]
        if wrong:
            raise InvalidRequest([Violation(self._field, "; ".join(wrong))])
