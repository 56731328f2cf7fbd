"""What docs/models.md says of architectures is what the registry has."""

from __future__ import annotations

import re

from penstock.runtime.loading.gguf import architectures, block_types, tokenizer
from penstock.runtime.models.registry import ARCHITECTURES
from tests.docs.pages import ROOT, text_of


def test_every_architecture_has_a_row() -> None:
    page = text_of(ROOT / "docs" / "models.md")
    named = re.findall(
        r"^\| `(\w+(?:ForCausalLM|ForConditionalGeneration|LMHeadModel))` \| [^|]+ \| [^|]+ \|$", page, re.M
    )
    readers = page.partition("\n## Encoders and classifiers\n")[2].partition("\n## ")[0]
    for row in re.findall(r"^\| (`[^|]+) \| [^|]+ \| [^|]+ \|$", readers, re.M):
        named += re.findall(r"`(\w+)`", row)
    assert sorted(named) == sorted(ARCHITECTURES)


def test_what_is_read_of_gguf_files_is_listed() -> None:
    page = text_of(ROOT / "docs" / "models.md")
    section = page.partition("\n## GGUF files\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", section, re.M)
    assert re.findall(r"`([\w-]+)`", " ".join(rows)) == list(architectures.ARCHITECTURES)
    types = section.partition("- **Types**:")[2].partition(", which")[0]
    assert re.findall(r"\w+\d\w*", types) == [
        block_types.BLOCK_TYPES[number].name
        for number in (0, 1, 30, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 39)
    ]
    patterns = section.partition("with the patterns")[2].partition(", and SentencePiece")[0]
    assert sorted(re.findall(r"`([\w.-]+)`", patterns)) == sorted(tokenizer._PRE)
