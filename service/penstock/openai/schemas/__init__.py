"""The bodies of requests, as pydantic models."""
