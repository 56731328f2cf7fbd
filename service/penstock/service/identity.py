"""Says which version of Penstock a server is, and which start of it."""

from __future__ import annotations

import importlib.metadata
import uuid


def version() -> str:
    """Return the version of the installed package."""
    return importlib.metadata.version("penstock")


def new_instance_id() -> str:
    """Make an id that tells this start of the server from all others."""
    return uuid.uuid4().hex
