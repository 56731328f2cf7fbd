"""The package `gguf` of llama.cpp's authors, which is the witness of what is read from GGUF files."""

from __future__ import annotations

import importlib.util

from tests.support.toolchains import refuse

if importlib.util.find_spec("gguf") is None:
    refuse("no package gguf here: install the extra dev of pyproject.toml")
