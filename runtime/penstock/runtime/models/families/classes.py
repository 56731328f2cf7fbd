"""What config.json says of the classes of a model that has some."""

from __future__ import annotations

from typing import cast

from penstock.runtime.models.configs.encoder import ClassifierConfig
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.requests.reader import Classes, Problem
from penstock.runtime.requests.request import Pooling

_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")

_MOST_CLASSES = 1 << 20


def read_classes(fields: Fields, pooling: Pooling) -> Classes:
    """Read the classes in their order. A single one is a number and no class, unless config.json says that a
    text may have it or not; several exclude each other.
    """
    named = fields.mapping("id2label")
    count = len(named) or fields.integer("num_labels", 2, most=_MOST_CLASSES)
    unnamed = [
        label for label in named.values() if isinstance(label, bool) or not isinstance(label, str | int)
    ]
    if unnamed:
        fields.problem("id2label", f"must name each class, not {', '.join(map(repr, unnamed))}")
    labels = tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(count))
    if named and set(named) != {str(i) for i in range(count)}:
        fields.problem("id2label", f"must name the classes 0 to {count - 1}, not {', '.join(named)}")
    usual = "regression" if count == 1 else "single_label_classification"
    fields.only("problem_type", *_PROBLEMS)
    problem = cast("Problem", fields.raw("problem_type") or usual)
    if count == 1 and problem == "single_label_classification":
        problem = "regression"  # one class that excludes no other says nothing
    return Classes(labels=labels, problem=problem, pooling=pooling)


def last_token_classifier(fields: Fields) -> ClassifierConfig:
    """Make the classifier of a decoder: one product of the last token's hidden state."""
    return ClassifierConfig(classes=read_classes(fields, Pooling.LAST_TOKEN), bias=False)
