"""Parts of the contract that an operator can switch on and off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Switches. A request that uses a part that is off is refused as UNSUPPORTED_FEATURE; the error names the
    flag.
    """

    constraints: bool = True
    """Whether requests may have a constraint, or a `chat.tool_choice` that requires a call, which needs a
    grammar, too.
    """
    request_templates: bool = False
    """Whether a request may bring a chat template of its own. It is a program of the caller's, so it runs in
    a process of its own.
    """
    vllm_service: bool = False
    """Whether the server also answers vLLM's gRPC service."""


DEFAULT_FEATURES = Features()
