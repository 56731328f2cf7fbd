"""Models that read texts and generate nothing: encoders, and classifiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.requests.request import Pooling

Problem = Literal["regression", "single_label_classification", "multi_label_classification"]
"""What the classes are: numbers that are no classes; one of several; or each by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """The classes of a text."""

    labels: tuple[str, ...]
    problem: Problem
    pooling: Pooling
    """Of which hidden states their numbers are made."""

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return what the numbers of a text, float32[classes], mean: probabilities that add up to 1 where one
        of several is meant, or one for each class by itself. For a regression there are none.
        """
        wide = logits.astype(np.float64)
        if self.problem == "regression":
            return wide[:0]
        if self.problem == "multi_label_classification":
            return sigmoid(wide)
        shares = np.exp(wide - wide.max())
        return np.asarray(shares / shares.sum())


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute 1 / (1 + exp(-x)), also where exp(-x) is beyond any float."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """What an engine must know of a model that generates nothing."""

    kind: str
    """What it is, for messages: "an encoder" or "a classifier"."""
    reads_whole: bool
    """Whether a text must be read in one step, because its tokens attend to those behind them."""
    token_types: int = 1
    """How many types its tokens have. A token of type t has the id t * vocab_size + id."""
    classes: Classes | None = None
    """The classes of texts; None: it makes embeddings only."""
    has_projections: bool = False
    """Whether embeddings pass layers behind their pooling."""
