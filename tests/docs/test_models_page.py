"""What docs/models.md says of architectures is what the registry has."""

from __future__ import annotations

import re

from penstock.runtime.models.registry import ARCHITECTURES
from tests.docs.pages import ROOT, text_of


def test_every_architecture_has_a_row() -> None:
    named = re.findall(
        r"^\| `(\w+(?:ForCausalLM|ForConditionalGeneration|LMHeadModel))` \| [^|]+ \| [^|]+ \|$",
        text_of(ROOT / "docs" / "models.md"),
        re.M,
    )
    assert sorted(named) == sorted(ARCHITECTURES)
