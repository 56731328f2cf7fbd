"""What of the contract an operator lets callers use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Switches; whatever is off is refused as UNSUPPORTED_FEATURE, and the error names the flag."""

    constraints: bool = True
    """Grammars of any kind, and a `chat.tool_choice` that requires a call, which is one."""
    request_templates: bool = False
    """Chat templates that come with a request: programs of a caller's, run in a process of their own."""


DEFAULT_FEATURES = Features()
