"""The texts on which the inputs of layers are watched, and those by which a quantised model is judged.

Both come with Python, which is installed wherever Penstock is, so nothing is downloaded: inputs are watched
on the docstrings of some modules, and the result is judged by the language's reference, `pydoc_data.topics`.
No text is in both. They differ a little from one version of Python to the next.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import numpy as np

from penstock.runtime.errors import ConfigError
from penstock.runtime.quantising.layerwise import Tokens
from penstock.runtime.text.codec import TextCodec

_DOCUMENTED = (
    "argparse",
    "ast",
    "asyncio.base_events",
    "collections",
    "configparser",
    "contextlib",
    "csv",
    "dataclasses",
    "difflib",
    "doctest",
    "email.message",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "http.client",
    "http.cookiejar",
    "inspect",
    "ipaddress",
    "json",
    "locale",
    "logging",
    "mailbox",
    "optparse",
    "pathlib",
    "pickletools",
    "random",
    "shutil",
    "smtplib",
    "socket",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "turtle",
    "typing",
    "unittest.case",
    "unittest.mock",
    "urllib.request",
    "xml.dom.minidom",
    "zipfile",
)
_JUDGED_BY = "pydoc_data.topics"
JUDGED_WINDOWS, JUDGED_TOKENS = 4, 1024
"""How many windows of how many tokens a model is judged by."""
_MOST_CHARACTERS = 1 << 23


def calibration_text(file: Path | None) -> str:
    """Return the text of the file, or of the docstrings. Raises ConfigError if it cannot be read."""
    if file is None:
        return "\n\n".join(text for module in _DOCUMENTED for text in _docstrings(module))
    try:
        with file.open(encoding="utf-8") as stream:
            return stream.read(_MOST_CHARACTERS)
    except (OSError, ValueError) as error:
        raise ConfigError(f"calibration: {file} cannot be read as text in UTF-8: {error}") from error


def judging_text() -> str:
    """Return the topics of the language's reference."""
    topics: dict[str, str] = importlib.import_module(_JUDGED_BY).topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def _docstrings(module: str) -> list[str]:
    """Collect the longer docstrings of a module; none if this Python comes without its source."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return []
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return [text for text in found if text is not None and len(text) > 80]


def windows(codec: TextCodec, text: str, *, count: int, num_tokens: int) -> Tokens:
    """Cut windows of equal length out of a text, evenly over all of it: int32 [up to count, num_tokens]. Each
    begins with the special tokens that a prompt of the model begins with. Raises ConfigError if the text is
    shorter than one window.
    """
    begin = codec.special_around[0]
    ids = codec.encode(text, add_special_tokens=False)
    size = num_tokens - len(begin)
    if size < 1 or len(ids) < size:
        raise ConfigError(f"calibration: the text has {len(ids)} tokens, and at least {size} are needed")
    count = min(count, len(ids) // size)
    starts = [(len(ids) - size) * window // max(1, count - 1) for window in range(count)]
    return np.array([[*begin, *ids[start : start + size]] for start in starts], np.int32)
